//! The plug-ins that there are: what was chosen, why the rest was not, and opening them.

use crate::adapter::{self, Device, Placer, Policy, Tier};
use crate::builtin::Checked;
use crate::library::{self, Door, Loaded, Table};
use crate::probe::{self, Report};
use crate::search::{self, Candidate, Environment, Identity, Listed, Source};
use crate::{LoadError, Tried};
use engine_core::backend::DeviceDescription;
use engine_core::config::{Config, Plugins};
use engine_core::module::{ComputeModule, PluginInfo, PluginKind};
use engine_core::options::{OptionTable, Schema};
use engine_core::{CachePolicy, ComputeBackend, Planner, StorageTier};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Where a plug-in comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A library file, by its canonical path (or, where there is no such file, the path that was named).
    File(PathBuf),
    /// Linked into this program.
    Linked,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Linked => f.write_str("linked in"),
        }
    }
}

/// Whether a plug-in is used, and why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It answers to its kind and name.
    Chosen,
    /// Another one of its kind and name comes first.
    Shadowed {
        /// Where the other one comes from.
        by: Origin,
    },
    /// It cannot be used.
    Refused {
        /// A sentence about the file that begins with a verb, such as "is truncated: ...".
        reason: String,
    },
}

/// A plug-in, or a file that should be one.
#[derive(Debug)]
pub struct Entry {
    /// Where it comes from.
    pub origin: Origin,
    /// Why that place was looked at.
    pub source: Source,
    /// Whether it is used.
    pub standing: Standing,
    /// Its kind, where that is known.
    pub kind: Option<PluginKind>,
    /// Who it is; absent where it was refused before it could say.
    pub info: Option<PluginInfo>,
    /// The options that it takes.
    pub schema: Option<Schema>,
    /// Its devices, where they were listed ([`Environment::listed`]; compute plug-ins).
    pub devices: Vec<DeviceDescription>,
    /// Why it has no devices.
    pub no_devices: Option<String>,
    /// How its table is reached.
    pub door: Option<Door>,
    /// Major and minor version of the interface that it was built for.
    pub abi: Option<(u32, u32)>,
    /// How long its probe took.
    pub probe_time: Duration,
    identity: Option<Identity>,
    loaded: OnceLock<Result<Arc<Loaded>, String>>,
    linked: Option<Linked>,
}

struct Linked(Box<dyn ComputeModule>);

impl fmt::Debug for Linked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Linked")
    }
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loaded({}, {})", self.kind(), self.door)
    }
}

impl Entry {
    fn new(origin: Origin, source: Source, standing: Standing) -> Entry {
        Entry {
            origin,
            source,
            standing,
            kind: None,
            info: None,
            schema: None,
            devices: Vec::new(),
            no_devices: None,
            door: None,
            abi: None,
            probe_time: Duration::ZERO,
            identity: None,
            loaded: OnceLock::new(),
            linked: None,
        }
    }

    /// Its name, where that is known.
    pub fn name(&self) -> Option<&str> {
        self.info.as_ref().map(|info| info.name.as_str())
    }

    /// Whether it is used.
    pub fn is_chosen(&self) -> bool {
        self.standing == Standing::Chosen
    }

    /// All of it as JSON, for `--json` outputs.
    pub fn to_json(&self) -> serde_json::Value {
        let (standing, reason) = match &self.standing {
            Standing::Chosen => ("chosen", None),
            Standing::Shadowed { by } => ("shadowed", Some(format!("{by} comes first"))),
            Standing::Refused { reason } => ("refused", Some(reason.clone())),
        };
        let json = |text: String| serde_json::from_str::<serde_json::Value>(&text).unwrap_or_default();
        serde_json::json!({
            "kind": self.kind.map(PluginKind::name),
            "name": self.name(),
            "origin": self.origin.to_string(),
            "source": self.source.to_string(),
            "standing": standing,
            "reason": reason,
            "info": self.info.as_ref().map(|info| json(engine_abi::convert::info_to_json(info))),
            "options": self.schema.as_ref().map(|schema| json(schema.to_json())),
            "devices": json(engine_abi::convert::devices_to_json(&self.devices)),
            "no_devices": self.no_devices,
            "door": self.door.map(|door| door.to_string()),
            "interface": self.abi.map(|(major, minor)| format!("{major}.{minor}")),
            "probe_seconds": self.probe_time.as_secs_f64(),
        })
    }
}

/// The plug-ins that there are.
#[derive(Debug)]
pub struct Catalogue {
    entries: Vec<Entry>,
    tried: Vec<Tried>,
    listed: Listed,
}

pub(crate) fn discover(plugins: &Plugins, config_dir: &Path, environment: &Environment) -> Catalogue {
    let found = search::search(plugins, config_dir, environment);
    let timeout = Duration::from_millis(plugins.probe_timeout_ms.into());
    let listed = Listed::of(environment);
    let probed = probe_all(&found.candidates, environment.probe.as_deref(), &listed, timeout);
    let mut entries: Vec<Entry> = found
        .dead_ends
        .into_iter()
        .map(|(source, path, reason)| Entry::new(Origin::File(path), source, Standing::Refused { reason }))
        .collect();
    for (candidate, (probed, probe_time)) in found.candidates.into_iter().zip(probed) {
        entries.push(judge(candidate, probed, probe_time));
    }
    let mut catalogue = Catalogue { entries, tried: found.tried, listed };
    catalogue.settle();
    for entry in &catalogue.entries {
        if let Standing::Refused { reason } = &entry.standing {
            tracing::warn!("plug-in refused: {} {reason}", entry.origin);
        }
    }
    catalogue
}

type Probed = (Result<Report, String>, Duration);

/// Probes all candidates, several at a time: each is mostly the start of a process.
fn probe_all(
    candidates: &[Candidate],
    program: Option<&Path>,
    listed: &Listed,
    timeout: Duration,
) -> Vec<Probed> {
    let one = |candidate: &Candidate| {
        let start = Instant::now();
        let report = match (&candidate.refused, program) {
            (Some(reason), _) => Err(reason.clone()),
            (None, None) => Err("cannot be probed: there is no probe program (build `thermocline-probe`, \
                                 or name it in THERMOCLINE_PROBE)"
                .into()),
            (None, Some(program)) => probe::probe(program, &candidate.path, listed, timeout),
        };
        (report, start.elapsed())
    };
    let mut results = Vec::with_capacity(candidates.len());
    for group in candidates.chunks(16) {
        std::thread::scope(|scope| {
            let threads: Vec<_> = group.iter().map(|c| scope.spawn(move || one(c))).collect();
            results.extend(threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| (Err("could not be probed".into()), Duration::ZERO))
            }));
        });
    }
    results
}

fn judge(candidate: Candidate, probed: Result<Report, String>, probe_time: Duration) -> Entry {
    let mut entry = Entry::new(Origin::File(candidate.path), candidate.source, Standing::Chosen);
    entry.probe_time = probe_time;
    entry.identity = Some(candidate.identity);
    let manifest = candidate.manifest;
    let report = match probed {
        Err(reason) => {
            entry.kind = manifest.map(|m| m.kind);
            entry.standing = Standing::Refused { reason };
            return entry;
        }
        Ok(report) => report,
    };
    if let Some(manifest) = manifest.filter(|m| (m.kind, &m.name) != (report.kind, &report.info.name)) {
        entry.standing = Standing::Refused {
            reason: format!(
                "is the {} plug-in `{}`, its manifest {} says {} `{}`",
                report.kind,
                report.info.name,
                manifest.path.display(),
                manifest.kind,
                manifest.name
            ),
        };
    }
    entry.kind = Some(report.kind);
    entry.info = Some(report.info);
    entry.schema = Some(report.schema);
    entry.devices = report.devices;
    entry.no_devices = report.no_devices;
    entry.door = Some(report.door);
    entry.abi = Some(report.abi);
    entry
}

impl Catalogue {
    /// A catalogue without plug-ins, for [`Catalogue::register_builtin`].
    pub fn empty() -> Catalogue {
        Catalogue { entries: Vec::new(), tried: Vec::new(), listed: Listed::of(&Environment::default()) }
    }

    /// Everything that was found, in the order of the search.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Every place that was looked at.
    pub fn tried(&self) -> &[Tried] {
        &self.tried
    }

    /// All of it as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "plugins": self.entries.iter().map(Entry::to_json).collect::<Vec<_>>(),
            "looked_at": self.tried.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    }

    /// The chosen plug-in of this kind and name.
    pub fn find(&self, kind: PluginKind, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.is_chosen() && e.kind == Some(kind) && e.name() == Some(name))
    }

    /// The chosen plug-ins of this kind.
    pub fn of_kind(&self, kind: PluginKind) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(move |e| e.is_chosen() && e.kind == Some(kind))
    }

    /// Adds a compute plug-in that is linked into this program. Libraries named by the config or the environment come
    /// before it, libraries found elsewhere after it.
    pub fn register_builtin(&mut self, module: Box<dyn ComputeModule>) {
        let mut entry = Entry::new(Origin::Linked, Source::Linked, Standing::Chosen);
        entry.kind = Some(PluginKind::Compute);
        let (info, schema) = (module.info(), module.schema());
        let options = self.listed.options_of(&info.name);
        let place = Config::options_place(PluginKind::Compute, &info.name);
        entry.door = Some(Door::Linked);
        entry.abi = Some((engine_abi::ABI_MAJOR, engine_abi::ABI_MINOR));
        let list = |options| schema.validate(&options, &place).and_then(|()| module.devices(&options));
        match options.map(list) {
            None => {}
            Some(Ok(devices)) if devices.is_empty() => entry.no_devices = Some(module.why_none()),
            Some(Ok(devices)) => entry.devices = devices,
            Some(Err(error)) => entry.no_devices = Some(error.to_string()),
        }
        (entry.info, entry.schema) = (Some(info), Some(schema));
        entry.linked = Some(Linked(module));
        let explicit = |e: &Entry| matches!(e.source, Source::Config | Source::Environment);
        // Behind the last of them: entries begin with what was no library, from all sources.
        let at = self.entries.iter().rposition(explicit).map_or(0, |last| last + 1);
        self.entries.insert(at, entry);
        self.settle();
    }

    /// Decides which of several with one kind and name is used: the first.
    fn settle(&mut self) {
        let mut first: Vec<(PluginKind, String, Origin)> = Vec::new();
        for entry in &mut self.entries {
            let (Some(kind), Some(info)) = (entry.kind, &entry.info) else { continue };
            if matches!(entry.standing, Standing::Refused { .. }) {
                continue;
            }
            entry.standing = match first.iter().find(|(k, name, _)| *k == kind && *name == info.name) {
                Some((_, _, by)) => Standing::Shadowed { by: by.clone() },
                None => {
                    first.push((kind, info.name.clone(), entry.origin.clone()));
                    Standing::Chosen
                }
            };
        }
    }

    /// The chosen plug-in of this kind and name, its options checked against its schema.
    fn prepare(&self, kind: PluginKind, name: &str, options: &OptionTable) -> Result<&Entry, LoadError> {
        let entry = self.find(kind, name).ok_or_else(|| self.not_found(kind, name))?;
        if let Some(schema) = &entry.schema {
            schema.validate(options, &Config::options_place(kind, name)).map_err(LoadError::Options)?;
        }
        Ok(entry)
    }

    fn not_found(&self, kind: PluginKind, name: &str) -> LoadError {
        let refused = |entry: &Entry| match (&entry.standing, &entry.origin) {
            (Standing::Refused { reason }, Origin::File(path)) => Some((path.clone(), reason.clone())),
            _ => None,
        };
        LoadError::NotFound {
            kind,
            name: name.to_owned(),
            known: self.of_kind(kind).filter_map(Entry::name).map(str::to_owned).collect(),
            refused: self.entries.iter().filter_map(refused).collect(),
            tried: self.tried.clone(),
        }
    }

    /// Loads the entry's library into this process, once.
    fn load(&self, entry: &Entry, kind: PluginKind, name: &str) -> Result<Arc<Loaded>, LoadError> {
        let refused = |path: &Path, reason: &str| LoadError::Refused {
            kind,
            name: name.to_owned(),
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let Origin::File(path) = &entry.origin else {
            return Err(refused(Path::new("linked in"), "is no library"));
        };
        let loaded = entry.loaded.get_or_init(|| {
            // A file that changed since its probe has not been probed.
            match Identity::at(path) {
                Ok(now) if Some(now) == entry.identity => library::open(path).map(Arc::new),
                Ok(_) => Err("has changed since it was probed; start again".into()),
                Err(error) => Err(format!("cannot be read any more: {error}")),
            }
        });
        match loaded {
            Ok(loaded) if loaded.kind() == kind => Ok(Arc::clone(loaded)),
            Ok(_) => Err(refused(path, "has changed its kind since it was probed")),
            Err(reason) => Err(refused(path, reason)),
        }
    }

    /// The devices of a compute plug-in with these options.
    ///
    /// # Errors
    /// Where there is no such plug-in, an option is wrong, or the plug-in fails.
    pub fn devices(&self, name: &str, options: &OptionTable) -> Result<Vec<DeviceDescription>, LoadError> {
        let entry = self.prepare(PluginKind::Compute, name, options)?;
        self.devices_of(entry, name, options).map(|(devices, _)| devices)
    }

    fn devices_of(
        &self,
        entry: &Entry,
        name: &str,
        options: &OptionTable,
    ) -> Result<(Vec<DeviceDescription>, Option<String>), LoadError> {
        let failed = |source| LoadError::Open { kind: PluginKind::Compute, name: name.to_owned(), source };
        if let Some(Linked(module)) = &entry.linked {
            let devices = module.devices(options).map_err(failed)?;
            let why = devices.is_empty().then(|| module.why_none());
            return Ok((devices, why));
        }
        let loaded = self.load(entry, PluginKind::Compute, name)?;
        let Table::Compute(table) = &loaded.table else {
            return Ok((Vec::new(), None));
        };
        let plugin = plugin_name(PluginKind::Compute, name);
        let devices = adapter::devices(table, &plugin, options).map_err(failed)?;
        let why =
            if devices.is_empty() { Some(adapter::why_none(table, &plugin).map_err(failed)?) } else { None };
        Ok((devices, why))
    }

    /// Opens a device: `NAME` (the plug-in's first) or `NAME:INDEX`. `options` is the plug-in's table of the config,
    /// [`Config::options_of`].
    ///
    /// # Errors
    /// Where there is no such plug-in or device, an option is wrong, or the plug-in fails.
    pub fn open_compute(
        &self,
        device: &str,
        options: &OptionTable,
    ) -> Result<Arc<dyn ComputeBackend>, LoadError> {
        let (name, index) = device_name(device)?;
        let kind = PluginKind::Compute;
        let entry = self.prepare(kind, name, options)?;
        let (devices, why_none) = self.devices_of(entry, name, options)?;
        if index as usize >= devices.len() {
            let found = match (devices.as_slice(), why_none) {
                ([], why) => format!("it has none, because {}", why.unwrap_or_default()),
                (devices, _) => {
                    let names: Vec<&str> = devices.iter().map(|d| d.name.as_str()).collect();
                    format!("there are {}", names.join(", "))
                }
            };
            return Err(LoadError::NoDevice { name: name.to_owned(), index, found });
        }
        let failed = |source| LoadError::Open { kind, name: name.to_owned(), source };
        if let Some(Linked(module)) = &entry.linked {
            return Ok(Arc::new(Checked::new(module.open(index, options).map_err(failed)?)));
        }
        let loaded = self.load(entry, kind, name)?;
        let Table::Compute(table) = loaded.table else { return Err(self.not_found(kind, name)) };
        let device = Device::open(table, &plugin_name(kind, name), index, options).map_err(failed)?;
        Ok(Arc::new(device))
    }

    /// Opens a storage tier.
    ///
    /// # Errors
    /// Where there is no such plug-in, an option is wrong, or the plug-in fails.
    pub fn open_storage(&self, name: &str, options: &OptionTable) -> Result<Arc<dyn StorageTier>, LoadError> {
        let kind = PluginKind::Storage;
        let loaded = self.load(self.prepare(kind, name, options)?, kind, name)?;
        let Table::Storage(table) = loaded.table else { return Err(self.not_found(kind, name)) };
        let failed = |source| LoadError::Open { kind, name: name.to_owned(), source };
        let tier = Tier::open(table, &plugin_name(kind, name), options).map_err(failed)?;
        for note in &tier.describe().notes {
            tracing::info!("{}: {note}", plugin_name(kind, name));
        }
        Ok(Arc::new(tier))
    }

    /// Opens a cache policy.
    ///
    /// # Errors
    /// Where there is no such plug-in, an option is wrong, or the plug-in fails.
    pub fn open_cache(&self, name: &str, options: &OptionTable) -> Result<Box<dyn CachePolicy>, LoadError> {
        let kind = PluginKind::Cache;
        let loaded = self.load(self.prepare(kind, name, options)?, kind, name)?;
        let Table::Cache(table) = loaded.table else { return Err(self.not_found(kind, name)) };
        let failed = |source| LoadError::Open { kind, name: name.to_owned(), source };
        Ok(Box::new(Policy::open(table, &plugin_name(kind, name), options).map_err(failed)?))
    }

    /// Opens a planner.
    ///
    /// # Errors
    /// Where there is no such plug-in, an option is wrong, or the plug-in fails.
    pub fn open_planner(&self, name: &str, options: &OptionTable) -> Result<Arc<dyn Planner>, LoadError> {
        let kind = PluginKind::Planner;
        let loaded = self.load(self.prepare(kind, name, options)?, kind, name)?;
        let Table::Planner(table) = loaded.table else { return Err(self.not_found(kind, name)) };
        let failed = |source| LoadError::Open { kind, name: name.to_owned(), source };
        Ok(Arc::new(Placer::open(table, &plugin_name(kind, name), options).map_err(failed)?))
    }
}

/// How messages name a plug-in.
fn plugin_name(kind: PluginKind, name: &str) -> String {
    format!("{kind} plug-in `{name}`")
}

fn device_name(device: &str) -> Result<(&str, u32), LoadError> {
    let wrong = || LoadError::DeviceName { text: device.to_owned() };
    let (name, index) = match device.split_once(':') {
        None => (device, 0),
        Some((name, index)) => (name, index.parse().map_err(|_| wrong())?),
    };
    if name.is_empty() { Err(wrong()) } else { Ok((name, index)) }
}
