//! Finds and opens the plug-in under test and the oracle, through the loader and nothing else.

use crate::finding::{Fallible, Finding};
use engine_core::config::Plugins;
use engine_core::module::PluginKind;
use engine_core::options::OptionTable;
use engine_core::{CachePolicy, ComputeBackend, Planner, StorageTier};
use engine_loader::{Catalogue, Environment, Standing};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Adds the plug-ins that are linked into this program to a catalogue.
pub type Register = fn(&mut Catalogue);

/// A program without linked plug-ins.
pub fn none_linked(_: &mut Catalogue) {}

/// Which plug-in is tested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// The library in this file.
    Path(PathBuf),
    /// What the loader finds under this name.
    Name(PluginRef),
}

/// A kind and a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginRef {
    /// The kind.
    pub kind: PluginKind,
    /// The name.
    pub name: String,
}

/// Everything that a child process needs to open what it tests.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Setup {
    /// The plug-in.
    pub target: Target,
    /// Index of the device (compute plug-ins).
    pub device: u32,
    /// The plug-in's options.
    pub options: OptionTable,
    /// The reference plug-in's library; absent lets the loader find `reference`.
    pub oracle: Option<PathBuf>,
    /// Seed.
    pub seed: u64,
    /// Random problems per operation.
    pub random: u32,
    /// A planted fault, by name.
    pub mutant: Option<String>,
}

/// A plug-in that was found, with the catalogue that opens it.
pub struct Found {
    /// The catalogue.
    pub catalogue: Arc<Catalogue>,
    /// Its kind and name.
    pub plugin: PluginRef,
}

/// Time for the probe of the one library that is tested.
const PROBE_TIMEOUT_MS: u32 = 30_000;

fn failed(message: impl Into<String>) -> Finding {
    Finding::new("loading", message)
}

fn only(path: &Path) -> Fallible<Found> {
    let text = path
        .canonicalize()
        .map_err(|e| failed(format!("{}: {e}", path.display())))?
        .to_string_lossy()
        .into_owned();
    // The suite has time: an emulator or a busy machine is slow to start a process.
    let plugins =
        Plugins { paths: vec![text], allow_world_writable: true, probe_timeout_ms: PROBE_TIMEOUT_MS };
    let process = Environment::from_process();
    let environment = Environment { probe: process.probe, ..Environment::default() };
    let catalogue = engine_loader::discover(&plugins, Path::new("."), &environment);
    let chosen = catalogue.entries().iter().find(|e| e.is_chosen());
    let Some((kind, name)) = chosen.and_then(|e| Some((e.kind?, e.name()?.to_owned()))) else {
        let reason = catalogue.entries().iter().find_map(|e| match &e.standing {
            Standing::Refused { reason } => Some(reason.clone()),
            _ => None,
        });
        let reason = reason.unwrap_or_else(|| "holds no plug-in".into());
        return Err(failed(format!("{} {reason}", path.display())));
    };
    Ok(Found { catalogue: Arc::new(catalogue), plugin: PluginRef { kind, name } })
}

/// Finds the plug-in under test.
///
/// # Errors
/// Where it is not there or its probe fails.
pub fn find(target: &Target, register: Register) -> Fallible<Found> {
    match target {
        Target::Path(path) => only(path),
        Target::Name(plugin) => {
            let environment = Environment::from_process();
            let mut catalogue = engine_loader::discover(&Plugins::default(), Path::new("."), &environment);
            register(&mut catalogue);
            if catalogue.find(plugin.kind, &plugin.name).is_none() {
                return Err(failed(format!("there is no {} plug-in `{}`", plugin.kind, plugin.name)));
            }
            Ok(Found { catalogue: Arc::new(catalogue), plugin: plugin.clone() })
        }
    }
}

/// The oracle in one arithmetic: `stated` or `true`.
///
/// # Errors
/// Where it is not there or does not open.
pub fn open_oracle(path: Option<&Path>, arithmetic: &str) -> Fallible<Arc<dyn ComputeBackend>> {
    let found = match path {
        Some(path) => only(path)?,
        None => {
            let plugin = PluginRef { kind: PluginKind::Compute, name: "reference".into() };
            find(&Target::Name(plugin), none_linked).map_err(|f| {
                f.during("the oracle (build it with `cargo build --release -p compute-reference`, or name its file)")
            })?
        }
    };
    let mut options = OptionTable::new();
    options.insert("arithmetic".into(), arithmetic.into());
    found
        .catalogue
        .open_compute(&found.plugin.name, &options)
        .map_err(|e| failed(format!("the oracle did not open: {e}")))
}

/// What is tested, opened.
pub enum Subject {
    /// A device.
    Compute(Arc<dyn ComputeBackend>),
    /// A storage tier.
    Storage(Arc<dyn StorageTier>),
    /// A cache policy; each call opens a fresh one.
    Cache(Box<dyn Fn() -> Fallible<Box<dyn CachePolicy>>>),
    /// A planner.
    Planner(Arc<dyn Planner>),
}

/// Opens the plug-in under test.
///
/// # Errors
/// Where it does not open.
pub fn open(found: &Found, device: u32, options: &OptionTable) -> Fallible<Subject> {
    let name = found.plugin.name.clone();
    let wrong = |e: engine_loader::LoadError| failed(format!("it did not open: {e}"));
    match found.plugin.kind {
        PluginKind::Compute => {
            let device = format!("{name}:{device}");
            Ok(Subject::Compute(found.catalogue.open_compute(&device, options).map_err(wrong)?))
        }
        PluginKind::Storage => {
            Ok(Subject::Storage(found.catalogue.open_storage(&name, options).map_err(wrong)?))
        }
        PluginKind::Cache => {
            let (options, catalogue) = (options.clone(), Arc::clone(&found.catalogue));
            Ok(Subject::Cache(Box::new(move || catalogue.open_cache(&name, &options).map_err(wrong))))
        }
        PluginKind::Planner => {
            Ok(Subject::Planner(found.catalogue.open_planner(&name, options).map_err(wrong)?))
        }
        other => Err(failed(format!("the suite knows no {other} plug-ins"))),
    }
}
