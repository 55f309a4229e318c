//! The settings of a run: defaults, overridden by the config file, the environment and the flags, in that order.

use crate::args::{EngineArgs, Global, SamplingArgs, SizeArgs};
use crate::failure::{Usage, WithHint};
use anyhow::{Context, Result};
use engine_core::config::{Compute, Config, General, PlannerSection, Plugins, Runtime, Sampling, Storage};
use engine_core::options::{OptionTable, OptionType};
use std::path::{Path, PathBuf};

/// A complete configuration, and where it came from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    /// Every value.
    pub(crate) config: Config,
    /// The file that was read.
    pub(crate) file: Option<PathBuf>,
    /// `--threads`: goes into the options of each device that has `threads`, once plug-ins are known.
    pub(crate) threads: Option<u32>,
    /// Whether active neurons are counted.
    pub(crate) count_active: bool,
}

impl Settings {
    /// Reads the config file, and lays the flags over it.
    ///
    /// # Errors
    /// A config file that cannot be read or is wrong; [`Usage`] for a flag whose value the schema refuses.
    pub(crate) fn resolve(
        global: &Global,
        engine: &EngineArgs,
        size: &SizeArgs,
        sampling: Option<&SamplingArgs>,
    ) -> Result<Settings> {
        let (mut config, file) = read_config(global)?;
        let overlay = Overlay { engine, size, sampling };
        overlay.apply(&mut config).map_err(|error| Usage(named_by_flag(&error.detail())))?;
        warn_of_threads(size.threads);
        Ok(Settings { config, file, threads: size.threads, count_active: engine.count_active })
    }

    /// [`Settings::resolve`] for commands that only look for plug-ins.
    pub(crate) fn for_search(global: &Global, plugins: &[PathBuf]) -> Result<Settings> {
        let engine = EngineArgs { plugins: plugins.to_vec(), ..EngineArgs::default() };
        Settings::resolve(global, &engine, &SizeArgs::default(), None)
    }
}

/// A count of threads beyond the machine's processors only makes them wait for each other.
pub(crate) fn warn_of_threads(threads: Option<u32>) {
    let processors = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    if let Some(threads) = threads.filter(|&threads| usize::try_from(threads).is_ok_and(|n| n > processors)) {
        tracing::warn!(
            "--threads {threads} is more than the {processors} processor(s) that this program may use: it will be slower"
        );
    }
}

/// A message about a value of the command line, by the flag's name instead of the key's.
fn named_by_flag(message: &str) -> String {
    let rest = message.strip_prefix(PLACE).and_then(|rest| rest.strip_prefix(": `"));
    let Some((key, rest)) = rest.and_then(|rest| rest.split_once('`')) else { return message.to_owned() };
    let flag = match key {
        "temperature" => "temp".to_owned(),
        "devices" => "device".to_owned(),
        "tier" => "storage".to_owned(),
        "name" => "planner".to_owned(),
        "paths" => "plugin".to_owned(),
        other => other.replace('_', "-"),
    };
    let variable = flag.to_uppercase().replace('-', "_");
    format!("--{flag} (or THERMOCLINE_{variable}){rest}")
}

/// The config file that applies, read; defaults where there is none.
fn read_config(global: &Global) -> Result<(Config, Option<PathBuf>)> {
    if let Some(path) = &global.config {
        let config = read_file(path).hint("--config and THERMOCLINE_CONFIG name the config file")?;
        tracing::info!("config file {}", path.display());
        return Ok((config, Some(path.clone())));
    }
    let Some(path) = default_file().filter(|path| path.exists()) else {
        tracing::debug!("no config file; defaults apply");
        return Ok((Config::default(), None));
    };
    let config = read_file(&path)?;
    tracing::info!("config file {}", path.display());
    Ok((config, Some(path)))
}

/// Where the config file is looked for when none is named.
pub(crate) fn default_file() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    // The XDG rules: a relative path there is to be ignored.
    let base = set("XDG_CONFIG_HOME").filter(|path| path.is_absolute());
    let base = base.or_else(|| set("HOME").map(|home| home.join(".config")))?;
    Some(base.join("thermocline").join("config.toml"))
}

/// The text of a config file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    crate::prompt::bounded_text(path, 1 << 20)
        .with_context(|| format!("cannot read config file {}", path.display()))
}

/// Reads one config file; relative plug-in paths in it become relative to its folder.
pub(crate) fn read_file(path: &Path) -> Result<Config> {
    let mut config = Config::parse(&read_text(path)?, &path.display().to_string())?;
    let folder = path.parent().unwrap_or(Path::new(""));
    for entry in &mut config.plugins.paths {
        if Path::new(entry).is_relative() {
            *entry = folder.join(&*entry).to_string_lossy().into_owned();
        }
    }
    Ok(config)
}

/// Flags (and their variables) as tables of the config, so that the schema checks them like a file.
struct Overlay<'a> {
    engine: &'a EngineArgs,
    size: &'a SizeArgs,
    sampling: Option<&'a SamplingArgs>,
}

/// How messages name a value that came by flag or variable.
const PLACE: &str = "command line";

/// Lays `flags` over the section and reads it again by its own schema.
macro_rules! lay_over {
    ($section:ty, $target:expr, [$($key:literal = $value:expr),* $(,)?]) => {{
        let mut table = OptionTable::new();
        $( if let Some(value) = ($value).as_ref().and_then(OptionType::to_value) { table.insert($key.into(), value); } )*
        if !table.is_empty() {
            let mut complete = $target.to_table();
            complete.extend(table);
            $target = <$section>::from_table(&complete, PLACE)?;
        }
    }};
}

impl Overlay<'_> {
    fn apply(&self, config: &mut Config) -> engine_core::Result<()> {
        let Overlay { engine, size, sampling } = self;
        let some_list = |list: &[String]| (!list.is_empty()).then(|| list.to_vec());
        lay_over!(General, config.general, ["strict" = engine.strict]);
        let mut paths: Vec<String> =
            engine.plugins.iter().map(|p| p.to_string_lossy().into_owned()).collect();
        paths.extend(config.plugins.paths.iter().cloned());
        lay_over!(Plugins, config.plugins, ["paths" = some_list(&paths)]);
        lay_over!(Compute, config.compute, ["devices" = some_list(&engine.devices)]);
        lay_over!(Storage, config.storage, ["tier" = engine.storage]);
        lay_over!(
            PlannerSection,
            config.planner,
            ["name" = engine.planner, "sparsity" = engine.sparsity, "skip" = engine.skip]
        );
        lay_over!(
            Runtime,
            config.runtime,
            ["context" = size.context, "batch" = engine.batch, "activations" = engine.activations]
        );
        let Some(sampling) = sampling else { return Ok(()) };
        lay_over!(
            Sampling,
            config.sampling,
            [
                "temperature" = sampling.temperature,
                "top_k" = sampling.top_k,
                "top_p" = sampling.top_p,
                "min_p" = sampling.min_p,
                "repeat_penalty" = sampling.repeat_penalty,
                "repeat_last" = sampling.repeat_last,
                "stop" = some_list(&sampling.stop),
            ]
        );
        // Not by way of the table, whose whole numbers have 63 bits.
        config.sampling.seed = sampling.seed.or(config.sampling.seed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::LogFormat;

    fn global(config: Option<PathBuf>) -> Global {
        Global { config, verbose: 0, quiet: true, log_format: LogFormat::Text }
    }

    fn resolve(text: &str, engine: &EngineArgs, sampling: &SamplingArgs) -> Result<Settings> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, text).unwrap();
        Settings::resolve(&global(Some(path)), engine, &SizeArgs::default(), Some(sampling))
    }

    #[test]
    fn flag_over_file_over_default() {
        let engine =
            EngineArgs { strict: Some(false), devices: vec!["reference".into()], ..Default::default() };
        let sampling = SamplingArgs { temperature: Some(0.0), ..Default::default() };
        let text =
            "strict = true\n[sampling]\ntemperature = 0.5\ntop_k = 3\n[plugins]\npaths = ['more', '/abs']\n";
        let settings = resolve(text, &engine, &sampling).unwrap();
        let config = &settings.config;
        assert!(!config.general.strict);
        assert_eq!(config.compute.devices, ["reference"]);
        assert_eq!(
            (config.sampling.temperature, config.sampling.top_k, config.sampling.top_p),
            (0.0, 3, 0.95)
        );
        assert!(config.plugins.paths[0].ends_with("/more") && config.plugins.paths[0].len() > 5);
        assert_eq!(config.plugins.paths[1], "/abs");
    }

    /// Edge values are a documented meaning or a usage error, never a crash (facts: trap 21).
    #[test]
    fn trap_21_edge_values() {
        let none = EngineArgs::default();
        let fine = [
            SamplingArgs { top_k: Some(0), top_p: Some(1.0), min_p: Some(1.0), ..Default::default() },
            SamplingArgs { top_k: Some(1), top_p: Some(0.0), temperature: Some(1e-9), ..Default::default() },
            SamplingArgs { top_k: Some(4_000_000_000), temperature: Some(1e9), ..Default::default() },
            SamplingArgs { seed: Some(u64::MAX), ..Default::default() },
        ];
        for sampling in &fine {
            resolve("", &none, sampling).unwrap();
        }
        let wrong = [
            (
                SamplingArgs { top_k: Some(-1), ..Default::default() },
                "--top-k (or THERMOCLINE_TOP_K) is -1, wanted a whole number from 0",
            ),
            (
                SamplingArgs { temperature: Some(-1.0), ..Default::default() },
                "--temp (or THERMOCLINE_TEMP) is -1",
            ),
            (
                SamplingArgs { temperature: Some(f64::NAN), ..Default::default() },
                "--temp (or THERMOCLINE_TEMP) is nan",
            ),
            (
                SamplingArgs { top_p: Some(1.5), ..Default::default() },
                "--top-p (or THERMOCLINE_TOP_P) is 1.5, wanted a number from 0 to 1",
            ),
            (
                SamplingArgs { min_p: Some(f64::INFINITY), ..Default::default() },
                "--min-p (or THERMOCLINE_MIN_P) is inf",
            ),
            (
                SamplingArgs { repeat_penalty: Some(0.0), ..Default::default() },
                "--repeat-penalty (or THERMOCLINE_REPEAT_PENALTY) is 0",
            ),
            (SamplingArgs { repeat_last: Some(1 << 40), ..Default::default() }, "--repeat-last"),
        ];
        for (sampling, wanted) in &wrong {
            let error = resolve("", &none, sampling).unwrap_err();
            assert!(error.downcast_ref::<Usage>().is_some(), "{error}");
            assert!(error.to_string().contains(wanted), "{error}");
        }
    }

    #[test]
    fn a_missing_or_wrong_file_is_named() {
        let error = Settings::resolve(
            &global(Some("/nonexistent/c.toml".into())),
            &EngineArgs::default(),
            &SizeArgs::default(),
            None,
        )
        .unwrap_err();
        assert!(error.to_string().contains("cannot read config file /nonexistent/c.toml"), "{error}");
        let error = resolve("[runtme]", &EngineArgs::default(), &SamplingArgs::default()).unwrap_err();
        assert!(format!("{error:#}").contains("did you mean `runtime`?"), "{error:#}");
    }
}
