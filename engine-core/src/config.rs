//! The configuration file: one definition gives defaults, checks, schema and documentation.

use crate::module::PluginKind;
use crate::options::{OptionTable, Schema, nearest};
use crate::{Error, Result, options};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Version of the config schema that this program reads and writes.
pub const CONFIG_VERSION: u32 = 1;

/// Features that a config may require of this version.
const KNOWN_FEATURES: &[&str] = &[];

options! {
    /// Keys at the top of the file.
    pub struct General {
        /// Version of the schema.
        version: u32 = CONFIG_VERSION;
        /// Features that the reader must know; a program that does not know one refuses the file.
        requires: Vec<String> = vec![];
        /// Makes every fallback an error: a device that is absent, an operation or a sparsity policy that cannot run
        /// where it was asked for, predictors that are incomplete, a tokenizer key that is missing.
        strict: bool = false;
    }
}

impl General {
    /// Whether this program may read the rest.
    fn check(&self) -> Result<()> {
        if self.version != CONFIG_VERSION {
            return Err(Error::config(format!(
                "`version` is {}, this program reads version {CONFIG_VERSION}",
                self.version
            )));
        }
        match self.requires.iter().find(|feature| !KNOWN_FEATURES.contains(&feature.as_str())) {
            Some(feature) => {
                Err(Error::config(format!("`requires` names `{feature}`, which this version does not have")))
            }
            None => Ok(()),
        }
    }
}

options! {
    /// `[plugins]`: where plug-ins are found besides `THERMOCLINE_PLUGIN_PATH`, the manifest directories and the
    /// program's own folder.
    pub struct Plugins {
        /// Library files, or folders with `libthermocline_*.so` files, searched first and in this order. Relative
        /// paths are relative to the config file.
        paths: Vec<String> = vec![];
        /// Loads plug-ins from files or folders that every user may write.
        allow_world_writable: bool = false;
        /// Milliseconds that a plug-in may take to be probed in a child process.
        probe_timeout_ms: u32 = 1500, in 1..=60000;
    }
}

options! {
    /// `[compute]`: the devices.
    pub struct Compute {
        /// Devices in the order of preference: a plug-in's name, or `name:index` for one of several devices.
        devices: Vec<String> = vec!["cpu".into()];
    }
}

options! {
    /// `[storage]`: how model files are read.
    pub struct Storage {
        /// Name of the storage tier.
        tier: String = "mmap".into();
    }
}

options! {
    /// `[cache]`: what stays in memory when not everything fits.
    pub struct Cache {
        /// Name of the cache policy.
        policy: String = "lru".into();
    }
}

options! {
    /// `[planner]`: where neuron clusters are placed.
    pub struct PlannerSection {
        /// Name of the planner.
        name: String = "greedy".into();
        /// How neurons are skipped: `auto` lets the planner choose among the exact policies, `dense` skips none,
        /// `gate-first` skips exactly (ReLU and dReLU models). The others change the output within the error that a
        /// model was prepared for: `predictor` by the model's predictors, `threshold` where the activated gate is small
        /// (CATS), `bitplane` by the high halves of weights in planes. Under `auto` a prepared model may name one.
        sparsity: String = "auto".into(),
            one_of ["auto", "dense", "gate-first", "predictor", "threshold", "bitplane"];
        /// Share of neurons that `threshold` and `bitplane` skip where no neuron is zero by itself (SiLU, GELU); 0 takes
        /// the share that the model was prepared for.
        skip: f32 = 0.0, in 0.0..=0.95;
        /// Greatest share of every layer's neurons on the devices before the last that is listed, in whole clusters;
        /// absent is as many as their memory holds.
        hot: Option<f32> = None, in 0.0..=1.0;
        /// The device that has embedding, attention and KV cache while text is generated, one of those listed;
        /// empty lets the planner choose.
        attention: String = String::new();
        /// The device that runs batches of tokens (the prompt), as much of them as it can, one of those listed; empty
        /// lets the planner choose.
        prefill: String = String::new();
    }
}

options! {
    /// `[runtime]`: the session.
    pub struct Runtime {
        /// Positions of the KV cache; 0 takes the model's trained context.
        context: u32 = 0, in 0..=16777216;
        /// Tokens of a prefill batch.
        batch: u32 = 256, in 1..=8192;
        /// Activations that meet quantised weights: `int8` blocks (fast) or `f32` (closest to the model).
        activations: String = "int8".into(), one_of ["int8", "f32"];
    }
}

options! {
    /// `[sampling]`: how tokens are chosen.
    pub struct Sampling {
        /// 0 takes the most likely token always.
        temperature: f32 = 0.8, in 0.0..=1e9;
        /// Keeps the k most likely tokens; 0 keeps all.
        top_k: u32 = 40;
        /// Keeps the most likely tokens that together have this probability; 1 keeps all.
        top_p: f32 = 0.95, in 0.0..=1.0;
        /// Keeps tokens with at least this share of the most likely one's probability; 0 keeps all.
        min_p: f32 = 0.05, in 0.0..=1.0;
        /// Divides positive and multiplies negative logits of recent tokens; 1 changes nothing.
        repeat_penalty: f32 = 1.0, in 0.01..=100.0;
        /// How many recent tokens the penalty covers; 0 covers none.
        repeat_last: u32 = 64;
        /// Seed of the random choice; absent takes one from the system and reports it.
        seed: Option<u64> = None;
        /// Texts that end the generation; they are not printed.
        stop: Vec<String> = vec![];
    }
}

/// A configuration, complete with defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// Top of the file.
    pub general: General,
    /// `[plugins]`.
    pub plugins: Plugins,
    /// `[compute]`.
    pub compute: Compute,
    /// `[storage]`.
    pub storage: Storage,
    /// `[cache]`.
    pub cache: Cache,
    /// `[planner]`.
    pub planner: PlannerSection,
    /// `[runtime]`.
    pub runtime: Runtime,
    /// `[sampling]`.
    pub sampling: Sampling,
    /// `[KIND.options.NAME]`: each plug-in's own table, checked by its own schema once it is loaded.
    pub plugin_options: BTreeMap<(PluginKind, String), OptionTable>,
}

/// Sections in the order of the file, with their documentation and schema.
fn sections() -> Vec<(&'static str, &'static str, Schema, Option<PluginKind>)> {
    vec![
        ("plugins", "Where plug-ins are found.", Plugins::schema(), None),
        ("compute", "The devices.", Compute::schema(), Some(PluginKind::Compute)),
        ("storage", "How model files are read.", Storage::schema(), Some(PluginKind::Storage)),
        ("cache", "What stays in memory when not everything fits.", Cache::schema(), Some(PluginKind::Cache)),
        ("planner", "Where neuron clusters are placed.", PlannerSection::schema(), Some(PluginKind::Planner)),
        ("runtime", "The session.", Runtime::schema(), None),
        ("sampling", "How tokens are chosen.", Sampling::schema(), None),
    ]
}

impl Config {
    /// Reads a config. `origin` names the text in messages (a path). Plug-in tables are kept as they are; everything
    /// else is checked.
    ///
    /// # Errors
    /// [`Error::Config`], naming origin and key, for an unknown key the nearest valid one.
    pub fn parse(text: &str, origin: &str) -> Result<Config> {
        let in_origin = |e: Error| Error::config(format!("{origin}: {}", e.detail()));
        let mut root: toml::Table = text
            .parse()
            .map_err(|e: toml::de::Error| Error::config(format!("{origin}: {}", e.to_string().trim_end())))?;
        // First of all: what else a later version's file says, this one cannot judge.
        let about = root.iter().filter(|(key, _)| *key == "version" || *key == "requires");
        let about = about.map(|(key, value)| (key.clone(), value.clone())).collect();
        General::from_table(&about, "top of the file").and_then(|about| about.check()).map_err(in_origin)?;
        let sections = sections();
        let mut tables: BTreeMap<&str, OptionTable> = BTreeMap::new();
        let mut config = Config::default();
        for (name, _, _, kind) in &sections {
            let Some(value) = root.remove(*name) else { continue };
            let toml::Value::Table(mut table) = value else {
                return Err(Error::config(format!("{origin}: `{name}` is {value}, wanted a table [{name}]")));
            };
            if let (Some(kind), Some(options)) = (kind, table.remove("options")) {
                config.plugin_options.extend(plugin_tables(*kind, name, options).map_err(in_origin)?);
            }
            tables.insert(name, table);
        }
        let general_schema = General::schema();
        for key in root.keys() {
            let known =
                general_schema.fields.iter().map(|f| f.name.as_str()).chain(sections.iter().map(|s| s.0));
            if !general_schema.fields.iter().any(|f| f.name == *key) {
                return Err(Error::config(format!(
                    "{origin}: unknown key or section `{key}`{}",
                    nearest(key, known)
                )));
            }
        }
        config.general = General::from_table(&root, "top of the file").map_err(in_origin)?;
        let mut table = |name: &str| tables.remove(name).unwrap_or_default();
        config.plugins = Plugins::from_table(&table("plugins"), "[plugins]").map_err(in_origin)?;
        config.compute = Compute::from_table(&table("compute"), "[compute]").map_err(in_origin)?;
        config.storage = Storage::from_table(&table("storage"), "[storage]").map_err(in_origin)?;
        config.cache = Cache::from_table(&table("cache"), "[cache]").map_err(in_origin)?;
        config.planner = PlannerSection::from_table(&table("planner"), "[planner]").map_err(in_origin)?;
        config.runtime = Runtime::from_table(&table("runtime"), "[runtime]").map_err(in_origin)?;
        config.sampling = Sampling::from_table(&table("sampling"), "[sampling]").map_err(in_origin)?;
        if config.compute.devices.is_empty() {
            let problem = Error::config("[compute]: `devices` is empty; name at least one, such as \"cpu\"");
            return Err(in_origin(problem));
        }
        Ok(config)
    }

    /// The table of one plug-in; empty where the config has none.
    pub fn options_of(&self, kind: PluginKind, name: &str) -> OptionTable {
        self.plugin_options.get(&(kind, name.to_owned())).cloned().unwrap_or_default()
    }

    /// How messages name the table of one plug-in.
    pub fn options_place(kind: PluginKind, name: &str) -> String {
        format!("[{kind}.options.{name}]")
    }

    /// The complete config as TOML: what `thermocline config show` prints.
    pub fn to_toml(&self) -> String {
        let mut text = self.general.to_table().to_string();
        let tables = [
            ("plugins", self.plugins.to_table(), None),
            ("compute", self.compute.to_table(), Some(PluginKind::Compute)),
            ("storage", self.storage.to_table(), Some(PluginKind::Storage)),
            ("cache", self.cache.to_table(), Some(PluginKind::Cache)),
            ("planner", self.planner.to_table(), Some(PluginKind::Planner)),
            ("runtime", self.runtime.to_table(), None),
            ("sampling", self.sampling.to_table(), None),
        ];
        for (name, table, kind) in tables {
            let _ = write!(text, "\n[{name}]\n{table}");
            for ((of, plugin), options) in &self.plugin_options {
                if Some(*of) == kind {
                    let _ = write!(text, "\n{}\n{options}", Config::options_place(*of, plugin));
                }
            }
        }
        if let Some(seed) = self.sampling.seed.filter(|seed| i64::try_from(*seed).is_err()) {
            let _ = writeln!(
                text,
                "# seed = {seed}: a file holds whole numbers of 63 bits, --seed takes this one"
            );
        }
        text
    }

    /// The schema as a page for people, in Markdown: a table per section, made from the definitions above.
    pub fn documentation() -> String {
        let mut page =
            String::from("# Configuration\n\nGenerated by `thermocline config schema --markdown`.\n");
        section_page(&mut page, "Top of the file", "Keys before the first section.", &General::schema());
        for (name, doc, schema, kind) in sections() {
            section_page(&mut page, &format!("`[{name}]`"), doc, &schema);
            if let Some(kind) = kind {
                let _ = writeln!(
                    page,
                    "\nOptions of one plug-in stand in `[{kind}.options.NAME]`; `thermocline plugins inspect NAME` lists them."
                );
            }
        }
        page
    }

    /// The schema of every section by name, the top of the file under the empty name.
    pub fn schema() -> Vec<(String, Schema)> {
        let mut all = vec![(String::new(), General::schema())];
        all.extend(sections().into_iter().map(|(name, _, schema, _)| (name.to_owned(), schema)));
        all
    }
}

fn plugin_tables(
    kind: PluginKind,
    section: &str,
    options: toml::Value,
) -> Result<Vec<((PluginKind, String), OptionTable)>> {
    let wanted = |what: &str| Error::config(format!("`{what}` is no table; wanted [{section}.options.NAME]"));
    let toml::Value::Table(plugins) = options else { return Err(wanted(&format!("{section}.options"))) };
    plugins
        .into_iter()
        .map(|(name, value)| match value {
            toml::Value::Table(table) => Ok(((kind, name), table)),
            _ => Err(wanted(&format!("{section}.options.{name}"))),
        })
        .collect()
}

/// One table of options in Markdown, used for config sections and for plug-ins.
pub fn section_page(page: &mut String, title: &str, doc: &str, schema: &Schema) {
    let _ = write!(page, "\n## {title}\n\n{doc}\n\n| key | value | default | meaning |\n|---|---|---|---|\n");
    for field in &schema.fields {
        let default =
            field.default.as_ref().map_or_else(|| "absent".to_owned(), |value| format!("`{value}`"));
        let _ = writeln!(page, "| `{}` | {} | {default} | {} |", field.name, field.kind, field.doc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_round_trip() {
        assert_eq!(Config::parse("", "x").unwrap(), Config::default());
        let text = "strict = true\n[compute]\ndevices = ['cpu', 'vulkan:1']\n[compute.options.cpu]\nthreads = 2\n[sampling]\nseed = 7\n";
        let config = Config::parse(text, "x").unwrap();
        assert!(config.general.strict);
        assert_eq!(config.options_of(PluginKind::Compute, "cpu").len(), 1);
        assert_eq!(Config::parse(&config.to_toml(), "x").unwrap(), config);
    }

    #[test]
    fn a_seed_that_no_file_can_hold_is_not_shown_as_another() {
        let mut config = Config::default();
        config.sampling.seed = Some(u64::MAX);
        let text = config.to_toml();
        assert!(text.contains("\n# seed = 18446744073709551615: "), "{text}");
        assert_eq!(Config::parse(&text, "x").unwrap(), Config::default());
    }

    #[test]
    fn errors_name_file_and_key() {
        for (text, wanted) in [
            ("strct = true", "f.toml: unknown key or section `strct`; did you mean `strict`?"),
            ("[runtme]\n", "did you mean `runtime`?"),
            (
                "[runtime]\nactivations = 'int4'",
                "f.toml: [runtime]: `activations` is \"int4\", wanted one of int8, f32",
            ),
            ("[runtime]\nbatchs = 3", "did you mean `batch`?"),
            ("runtime = 3", "wanted a table [runtime]"),
            ("version = 2", "this program reads version 1"),
            // What a later version adds is not what is wrong with its file.
            ("version = 2\nnew_key = 1\n[new_section]\nx = 1", "this program reads version 1"),
            ("requires = ['time-travel']\n[runtime]\ntravel = 'back'", "`time-travel`"),
            ("version = 'two'", "`version`"),
            ("requires = ['time-travel']", "`time-travel`"),
            ("[compute]\ndevices = []", "`devices` is empty"),
            ("[compute.options]\ncpu = 3", "wanted [compute.options.NAME]"),
            ("a = [", "f.toml: "),
        ] {
            let message = Config::parse(text, "f.toml").unwrap_err().to_string();
            assert!(message.contains(wanted), "{text}: {message}");
        }
    }
}
