//! The plug-ins of a run: found, checked and opened as the settings ask.

use crate::failure::{Usage, WithHint};
use crate::settings::Settings;
use anyhow::{Context, Result, anyhow, bail};
use engine_core::ComputeBackend;
use engine_core::module::PluginKind;
use engine_core::options::OptionTable;
use engine_core::planner::Fallback;
use engine_loader::{Catalogue, Environment, LoadError, Origin};
use engine_runtime::Stack;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A plug-in that a run uses.
#[derive(Clone, Debug)]
pub(crate) struct PluginInUse {
    /// What it does.
    pub(crate) kind: PluginKind,
    /// Its name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// The library; `None` where it is linked in.
    pub(crate) path: Option<PathBuf>,
}

/// Everything that an engine runs on, opened.
pub(crate) struct Opened {
    /// For the engine.
    pub(crate) stack: Stack,
    /// Where it came from.
    pub(crate) plugins: Vec<PluginInUse>,
    /// Devices that were asked for and cannot be had.
    pub(crate) fallbacks: Vec<Fallback>,
}

/// Every plug-in that there is, the linked-in ones included, with the devices of all.
pub(crate) fn catalogue(settings: &Settings) -> Catalogue {
    discover(settings, Environment::from_process())
}

fn discover(settings: &Settings, environment: Environment) -> Catalogue {
    // Paths of the config file are relative to it, and were made so when it was read; those of flags to this folder.
    let mut catalogue = engine_loader::discover(&settings.config.plugins, Path::new("."), &environment);
    register(&mut catalogue);
    catalogue
}

/// Only the devices that the settings name are looked for: no other driver is opened.
fn catalogue_for_run(settings: &Settings) -> Catalogue {
    let config = &settings.config;
    let mut listed: Vec<(String, OptionTable)> = Vec::new();
    for plugin in config.compute.devices.iter().map(|device| plugin_of(device)) {
        if listed.iter().all(|(name, _)| name != plugin) {
            listed.push((plugin.to_owned(), config.options_of(PluginKind::Compute, plugin)));
        }
    }
    discover(settings, Environment { listed: Some(listed), ..Environment::from_process() })
}

/// Adds what is linked into this program.
#[cfg_attr(not(feature = "builtin-cpu"), allow(unused_variables, reason = "nothing is linked in"))]
pub(crate) fn register(catalogue: &mut Catalogue) {
    #[cfg(feature = "builtin-cpu")]
    catalogue.register_builtin(Box::new(thermocline_compute_cpu::CpuModule));
}

/// The name of the plug-in that a device belongs to: `vulkan` of `vulkan:1`.
pub(crate) fn plugin_of(device: &str) -> &str {
    device.split_once(':').map_or(device, |(plugin, _)| plugin)
}

/// A device's plug-in and its number there: `vulkan` is the first that the plug-in has, as `vulkan:0` is. None where the
/// number is none, which is refused when the device is opened.
fn number(device: &str) -> (&str, Option<u32>) {
    let index = device.split_once(':').map_or(Some(0), |(_, index)| index.parse().ok());
    (plugin_of(device), index)
}

/// The options of a device's plug-in: its table in the config, and `--threads` where it has such an option.
pub(crate) fn device_options(settings: &Settings, catalogue: &Catalogue, device: &str) -> OptionTable {
    let plugin = plugin_of(device);
    let mut options = settings.config.options_of(PluginKind::Compute, plugin);
    let entry = catalogue.find(PluginKind::Compute, plugin);
    let schema = entry.and_then(|entry| entry.schema.as_ref());
    if let Some(threads) = settings.threads
        && schema.is_some_and(|schema| schema.fields.iter().any(|field| field.name == "threads"))
    {
        options.insert("threads".into(), i64::from(threads).into());
    }
    options
}

/// Finds and opens what the settings name.
///
/// # Errors
/// Where a plug-in is not there or refuses; a device that cannot be had is an error only where it is the last one, or
/// under `strict`.
pub(crate) fn open(settings: &Settings) -> Result<Opened> {
    let catalogue = catalogue_for_run(settings);
    let config = &settings.config;
    let options = |kind, name: &str| config.options_of(kind, name);
    let (storage, cache, planner) = (&config.storage.tier, &config.cache.policy, &config.planner.name);
    planned_devices(settings, |device| config.compute.devices.contains(device), "which is none of")?;
    let (compute, fallbacks) = devices(settings, &catalogue)?;
    let opened = |device: &String| compute.iter().any(|(name, _)| name == device);
    planned_devices(settings, opened, "which cannot be had, though it is one of")?;
    let stack = Stack {
        storage: catalogue.open_storage(storage, &options(PluginKind::Storage, storage))?,
        cache: catalogue.open_cache(cache, &options(PluginKind::Cache, cache))?,
        planner: catalogue.open_planner(planner, &options(PluginKind::Planner, planner))?,
        compute,
    };
    let mut used: Vec<(PluginKind, &str)> = Vec::new();
    let devices = stack.compute.iter().map(|(device, _)| (PluginKind::Compute, plugin_of(device)));
    let others = [
        (PluginKind::Storage, storage.as_str()),
        (PluginKind::Cache, cache.as_str()),
        (PluginKind::Planner, planner.as_str()),
    ];
    for plugin in devices.chain(others) {
        if !used.contains(&plugin) {
            used.push(plugin);
        }
    }
    let in_use = |(kind, name): (PluginKind, &str)| {
        let entry = catalogue.find(kind, name)?;
        let path = match &entry.origin {
            Origin::File(path) => Some(path.clone()),
            Origin::Linked => None,
        };
        let version = entry.info.as_ref().map(|info| info.version.clone()).unwrap_or_default();
        Some(PluginInUse { kind, name: name.to_owned(), version, path })
    };
    let plugins = used.into_iter().filter_map(in_use).collect();
    Ok(Opened { stack, plugins, fallbacks })
}

/// The devices that the planner is to use are `there`; `what` says of others how they are not.
fn planned_devices(settings: &Settings, there: impl Fn(&String) -> bool, what: &str) -> Result<()> {
    let planner = &settings.config.planner;
    for (key, device) in [("attention", &planner.attention), ("prefill", &planner.prefill)] {
        if !device.is_empty() && !there(device) {
            // There is no flag for it, so it came from a file.
            let file = settings.file.as_ref().map_or("config".into(), |file| file.display().to_string());
            bail!(
                "{file}: [planner]: `{key}` is {device:?}, {what} the devices of this run: {} ([compute] devices, or \
                 --device)",
                settings.config.compute.devices.join(", ")
            );
        }
    }
    Ok(())
}

type Devices = Vec<(String, Arc<dyn ComputeBackend>)>;

/// The devices of the config that can be had, and why the others cannot.
fn devices(settings: &Settings, catalogue: &Catalogue) -> Result<(Devices, Vec<Fallback>)> {
    let wanted = &settings.config.compute.devices;
    let mut opened: Devices = Vec::new();
    let mut failed: Vec<(&String, LoadError)> = Vec::new();
    for device in wanted {
        let again = wanted.iter().take_while(|other| !std::ptr::eq(*other, device));
        if let Some(other) = again.into_iter().find(|other| number(other) == number(device)) {
            bail!(Usage(match other == device {
                true => format!("device `{device}` is named twice"),
                false => format!("devices `{other}` and `{device}` are the same device; name it once"),
            }));
        }
        match catalogue.open_compute(device, &device_options(settings, catalogue, device)) {
            Ok(backend) => opened.push((device.clone(), backend)),
            // A mistake in the config is not for another device to make good.
            Err(error @ (LoadError::Options(_) | LoadError::DeviceName { .. })) => return Err(error.into()),
            Err(error) => failed.push((device, error)),
        }
    }
    if settings.threads.is_some() && !failed.is_empty() {
        tracing::debug!("--threads goes to the devices that there are");
    }
    if opened.is_empty() || settings.config.general.strict {
        // The last word of an error is its cause; the first device is the one that was wanted most.
        let Some((device, error)) = failed.into_iter().next() else { return Ok((opened, Vec::new())) };
        let error = anyhow!(error).context(format!("device `{device}` cannot be had"));
        return match settings.config.general.strict && !opened.is_empty() {
            true => Err(error).context("strict is on, and not everything is as asked").hint(
                "leave the device out of [compute] devices (or --device), or allow the fallback with strict = false",
            ),
            false => Err(error),
        };
    }
    let got: Vec<&str> = opened.iter().map(|(name, _)| name.as_str()).collect();
    let got = got.join(", ");
    let fallback = |(device, error): (&String, LoadError)| Fallback {
        what: "devices".into(),
        wanted: device.clone(),
        got: got.clone(),
        reason: short(&error),
    };
    let fallbacks = failed.into_iter().map(fallback).collect();
    Ok((opened, fallbacks))
}

/// An error's first line: the list of every place that was searched is for the error alone.
fn short(error: &LoadError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
