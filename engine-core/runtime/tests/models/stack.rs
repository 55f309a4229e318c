//! Opens plug-ins by name from the folder of this test program.

use engine_core::ComputeBackend;
use engine_core::config::Plugins;
use engine_core::options::OptionTable;
use engine_loader::{Catalogue, Environment};
use engine_runtime::{Activations, Engine, EngineOptions, SparsityChoice, Stack};
use libtest_mimic::{Failed, Trial};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub(crate) type Outcome = Result<(), Failed>;

/// Which plug-ins, and how they run.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) device: &'static str,
    pub(crate) tier: &'static str,
    pub(crate) threads: i64,
    pub(crate) context: u32,
    pub(crate) batch: u32,
    pub(crate) activations: Activations,
    pub(crate) sparsity: SparsityChoice,
    pub(crate) strict: bool,
    pub(crate) count_active: bool,
}

impl Setup {
    pub(crate) fn on(device: &'static str) -> Setup {
        Setup {
            device,
            tier: "mmap",
            threads: 2,
            context: 256,
            batch: 256,
            activations: Activations::F32,
            sparsity: SparsityChoice::Dense,
            strict: true,
            count_active: false,
        }
    }

    pub(crate) fn load(&self, model: &Path) -> Result<Engine, Failed> {
        Ok(self.load_watched(model)?.0)
    }

    /// The engine, and its device for a look at the counters.
    pub(crate) fn load_watched(&self, model: &Path) -> Result<(Engine, Arc<dyn ComputeBackend>), Failed> {
        let catalogue = catalogue();
        let mut options = OptionTable::new();
        if self.device != "vulkan" {
            options.insert("threads".into(), self.threads.into());
        }
        let none = OptionTable::new();
        let stack = Stack {
            compute: vec![(self.device.to_owned(), catalogue.open_compute(self.device, &options)?)],
            storage: catalogue.open_storage(self.tier, &none)?,
            cache: catalogue.open_cache("lru", &none)?,
            planner: catalogue.open_planner("greedy", &none)?,
        };
        drop(catalogue);
        let device = stack.compute[0].1.clone();
        let options = EngineOptions {
            context: self.context,
            batch: self.batch,
            activations: self.activations,
            sparsity: self.sparsity,
            skip: 0.0,
            strict: self.strict,
            count_active: self.count_active,
            ..EngineOptions::default()
        };
        Ok((Engine::load(model, stack, options)?, device))
    }
}

pub(crate) fn catalogue() -> MutexGuard<'static, Catalogue> {
    static CATALOGUE: OnceLock<Mutex<Catalogue>> = OnceLock::new();
    CATALOGUE.get_or_init(|| Mutex::new(discover())).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why there is no such device on this machine, asked once.
pub(crate) fn no_vulkan() -> Option<&'static str> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    REASON.get_or_init(|| absent("vulkan")).as_deref()
}

/// Why a plug-in has no device on this machine.
fn absent(plugin: &str) -> Option<String> {
    match catalogue().devices(plugin, &OptionTable::new()) {
        Ok(devices) if devices.is_empty() => Some(format!("there is no {plugin} device")),
        Ok(_) => None,
        Err(error) => Some(error.to_string().lines().next().unwrap_or_default().to_owned()),
    }
}

/// A trial that needs a device of some plug-in, ignored with the reason in its name where there is none.
pub(crate) fn on_device(plugin: &str, name: String, run: impl FnOnce() -> Outcome + Send + 'static) -> Trial {
    match absent(plugin) {
        None => Trial::test(name, run),
        Some(reason) => Trial::test(format!("{name} (ignored: {reason})"), || Ok(())).with_ignored_flag(true),
    }
}

/// A trial that needs a Vulkan device, ignored with the reason in its name where there is none.
pub(crate) fn on_vulkan(name: String, run: impl FnOnce() -> Outcome + Send + 'static) -> Trial {
    match no_vulkan() {
        None => Trial::test(name, run),
        Some(reason) => Trial::test(format!("{name} (ignored: {reason})"), || Ok(())).with_ignored_flag(true),
    }
}

fn discover() -> Catalogue {
    // The test program lies in target/PROFILE/deps, plug-ins in target/PROFILE.
    let program = std::env::current_exe().unwrap_or_default();
    let folder = program.parent().and_then(Path::parent).unwrap_or(Path::new(".")).to_path_buf();
    let plugins = Plugins { paths: vec![folder.display().to_string()], ..Plugins::default() };
    let environment = Environment {
        program_folder: None,
        manifest_folders: Vec::new(),
        plugin_path: None,
        ..Environment::from_process()
    };
    engine_loader::discover(&plugins, &folder, &environment)
}

/// The story model, which is always there.
pub(crate) fn story() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-story-9m-q8_0.gguf")
}

/// A file of the folder with models that is shared beside the repository.
pub(crate) fn shared(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models").join(name)
}

/// A trial that is ignored, with the reason in its name, where one of `files` is absent.
pub(crate) fn trial_with(
    name: String,
    files: &[PathBuf],
    run: impl FnOnce() -> Outcome + Send + 'static,
) -> Trial {
    match files.iter().find(|file| !file.is_file()) {
        None => Trial::test(name, run),
        Some(absent) => {
            let file = absent.file_name().unwrap_or_default().to_string_lossy();
            Trial::test(format!("{name} (ignored: ../shared/models/{file} is absent)"), || Ok(()))
                .with_ignored_flag(true)
        }
    }
}

/// Fails with this text unless `condition` holds.
pub(crate) fn ensure(condition: bool, text: impl FnOnce() -> String) -> Outcome {
    if condition { Ok(()) } else { Err(text().into()) }
}

/// Prints a measured figure where `SHOW_DISTANCES` is set: what the limits were chosen by.
#[expect(clippy::print_stderr, reason = "asked for by the person who runs the tests")]
pub(crate) fn show(text: impl FnOnce() -> String) {
    if std::env::var_os("SHOW_DISTANCES").is_some() {
        eprintln!("{}", text());
    }
}
