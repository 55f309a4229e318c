//! `plugins list|inspect|doctor` and `devices`.

use crate::args::{DevicesArgs, Global, PluginsCommand, SearchArgs};
use crate::failure::WithHint;
use crate::output;
use crate::settings::Settings;
use crate::stack;
use anyhow::{Result, anyhow, bail};
use engine_core::backend::DeviceDescription;
use engine_core::config::Config;
use engine_core::module::PluginKind;
use engine_core::options::{OptionTable, nearest};
use engine_loader::{Catalogue, Entry, Environment, Origin, Standing};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub(super) fn plugins(global: &Global, command: &PluginsCommand) -> Result<ExitCode> {
    match command {
        PluginsCommand::List(search) => list(global, search).map(|()| ExitCode::SUCCESS),
        PluginsCommand::Inspect { plugin, search } => {
            inspect(global, plugin, search).map(|()| ExitCode::SUCCESS)
        }
        PluginsCommand::Doctor(search) => doctor(global, search),
        PluginsCommand::Conformance(args) => super::conformance::conformance(args),
        PluginsCommand::Diverge(args) => super::diverge::diverge(global, args),
    }
}

/// Every plug-in that there is, the linked-in ones included, with the devices that each has by its options of the config.
fn catalogue(settings: &Settings) -> Catalogue {
    let tables = settings.config.plugin_options.iter();
    let compute = tables.filter(|((kind, _), _)| *kind == PluginKind::Compute);
    let options = compute.map(|((_, name), table)| (name.clone(), table.clone())).collect();
    let environment = Environment { options, ..Environment::from_process() };
    // Paths of the config file are relative to it, and were made so when it was read; those of flags to this folder.
    let mut catalogue = engine_loader::discover(&settings.config.plugins, Path::new("."), &environment);
    stack::register(&mut catalogue);
    catalogue
}

fn list(global: &Global, search: &SearchArgs) -> Result<()> {
    let catalogue = catalogue(&Settings::for_search(global, &search.plugins)?);
    if catalogue.entries().is_empty() {
        tracing::warn!(
            "no plug-in was found: they lie beside the program, or where --plugin or [plugins] paths say; \
             `thermocline plugins doctor` lists every place that was searched"
        );
    }
    if search.json {
        return output::json(&json!({"plugins": entries_json(&catalogue)}));
    }
    output::write(&table(&catalogue))
}

/// A row per plug-in, those that are used first, and then why some of those have no device.
fn table(catalogue: &Catalogue) -> String {
    let mut rows: Vec<(bool, Vec<String>)> = catalogue
        .entries()
        .iter()
        .map(|entry| {
            let kind = entry.kind.map_or("-", PluginKind::name).to_owned();
            let name = entry.name().unwrap_or("-").to_owned();
            let version = entry.info.as_ref().map_or("-", |info| &info.version).to_owned();
            let row = vec![kind, name, version, state(entry).into(), entry.origin.to_string(), why(entry)];
            (!entry.is_chosen(), row)
        })
        .collect();
    rows.sort();
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(_, row)| row).collect();
    let mut text = output::table(&["kind", "name", "version", "state", "path", "why"], &rows);
    for entry in catalogue.of_kind(PluginKind::Compute) {
        if let (Some(name), Some(reason)) = (entry.name(), &entry.no_devices) {
            text.push_str(&without_devices(name, reason));
        }
    }
    text
}

/// A line about a plug-in that has no device.
fn without_devices(name: &str, reason: &str) -> String {
    format!("{name}: no devices: {}\n", reason.lines().collect::<Vec<_>>().join(" "))
}

fn state(entry: &Entry) -> &'static str {
    match entry.standing {
        Standing::Chosen => "chosen",
        Standing::Shadowed { .. } => "shadowed",
        Standing::Refused { .. } => "refused",
    }
}

/// Why the plug-in is where it stands, on one line.
fn why(entry: &Entry) -> String {
    match &entry.standing {
        Standing::Chosen => entry.source.to_string(),
        Standing::Shadowed { by } => format!("{by} comes first"),
        Standing::Refused { reason } => reason.lines().collect::<Vec<_>>().join(" "),
    }
}

fn entries_json(catalogue: &Catalogue) -> Vec<Value> {
    catalogue.entries().iter().map(entry_json).collect()
}

fn entry_json(entry: &Entry) -> Value {
    let info = entry.info.as_ref();
    let path = match &entry.origin {
        Origin::File(path) => Some(path),
        Origin::Linked => None,
    };
    json!({
        "kind": entry.kind.map(PluginKind::name),
        "name": entry.name(),
        "version": info.map(|info| &info.version),
        "vendor": info.map(|info| &info.vendor),
        "license": info.map(|info| &info.license),
        "description": info.map(|info| &info.description),
        "build": info.map(|info| &info.build),
        "state": state(entry),
        "reason": (!entry.is_chosen()).then(|| why(entry)),
        "path": path,
        "source": entry.source.to_string(),
        "door": entry.door.map(|door| door.to_string()),
        "interface": entry.abi.map(|(major, minor)| format!("{major}.{minor}")),
        "probe_seconds": entry.probe_time.as_secs_f64(),
        "devices": entry.devices.iter().map(device_json).collect::<Vec<_>>(),
        "no_devices": entry.no_devices,
        "options": entry.schema.as_ref().map(super::config::options),
    })
}

fn device_json(device: &DeviceDescription) -> Value {
    json!({
        "name": device.name,
        "description": device.description,
        "tolerance": device.tolerance.name(),
        "memory_bytes": device.memory_bytes,
        "alignment": device.alignment,
        "imports_host_memory": device.imports_host_memory,
        "needs_constant_weights": device.needs_constant_weights,
        "max_buffer_bytes": device.max_buffer_bytes,
        "notes": device.notes,
    })
}

fn inspect(global: &Global, plugin: &str, search: &SearchArgs) -> Result<()> {
    let file = library(plugin);
    let mut places: Vec<PathBuf> = file.iter().cloned().collect();
    places.extend(search.plugins.iter().cloned());
    let catalogue = catalogue(&Settings::for_search(global, &places)?);
    let entry = match &file {
        Some(path) => by_path(&catalogue, path)?,
        None => by_name(&catalogue, plugin)?,
    };
    if let Standing::Refused { reason } = &entry.standing {
        bail!("{} {reason}", entry.origin);
    }
    if search.json { output::json(&entry_json(entry)) } else { output::write(&text(entry)) }
}

/// The path of a library, where that is what was given.
fn library(plugin: &str) -> Option<PathBuf> {
    let named =
        plugin.split_once('/').is_some_and(|(kind, _)| PluginKind::ALL.iter().any(|k| k.name() == kind));
    let path = Path::new(plugin);
    (!named && (plugin.contains('/') || plugin.ends_with(".so") || path.is_file())).then(|| path.to_owned())
}

fn by_path<'a>(catalogue: &'a Catalogue, path: &Path) -> Result<&'a Entry> {
    let canonical = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_it = |entry: &&Entry| match &entry.origin {
        Origin::File(file) => *file == canonical || file.ends_with(path),
        Origin::Linked => false,
    };
    catalogue
        .entries()
        .iter()
        .find(is_it)
        .ok_or_else(|| anyhow!("{} is no library of a plug-in", path.display()))
}

fn by_name<'a>(catalogue: &'a Catalogue, plugin: &str) -> Result<&'a Entry> {
    let (kind, name) = match plugin.split_once('/') {
        Some((kind, name)) => (PluginKind::ALL.into_iter().find(|k| k.name() == kind), name),
        None => (None, plugin),
    };
    let kinds = PluginKind::ALL.into_iter().filter(|k| kind.is_none_or(|kind| kind == *k));
    let found: Vec<&Entry> = kinds.filter_map(|kind| catalogue.find(kind, name)).collect();
    match found[..] {
        [entry] => Ok(entry),
        [] => {
            let known = catalogue.entries().iter().filter(|entry| entry.is_chosen()).filter_map(Entry::name);
            Err(anyhow!("there is no plug-in `{plugin}`{}", nearest(name, known)))
                .hint("`thermocline plugins doctor` lists every place that was searched")
        }
        _ => bail!("several kinds have a plug-in `{name}`; say which: KIND/{name}"),
    }
}

/// Everything about one plug-in, for people.
fn text(entry: &Entry) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: String| {
        if !value.is_empty() {
            let _ = writeln!(text, "{key:<12} {value}");
        }
    };
    line("kind", entry.kind.map_or("-", PluginKind::name).into());
    if let Some(info) = &entry.info {
        line("name", info.name.clone());
        line("version", info.version.clone());
        line("description", info.description.clone());
        line("vendor", info.vendor.clone());
        line("license", info.license.clone());
        line("build", info.build.clone());
    }
    line("state", format!("{}: {}", state(entry), why(entry)));
    line("path", entry.origin.to_string());
    line("door", entry.door.map(|door| door.to_string()).unwrap_or_default());
    line("interface", entry.abi.map(|(major, minor)| format!("{major}.{minor}")).unwrap_or_default());
    line("probe", format!("{:.1} ms", entry.probe_time.as_secs_f64() * 1e3));
    for device in &entry.devices {
        line("device", format!("{}: {}", device.name, device.description));
        for note in &device.notes {
            line("", note.clone());
        }
    }
    if let Some(reason) = &entry.no_devices {
        line("no devices", reason.clone());
    }
    if let (Some(kind), Some(name), Some(schema)) = (entry.kind, entry.name(), &entry.schema) {
        if schema.fields.is_empty() {
            text.push_str("no options\n");
        } else {
            let place = Config::options_place(kind, name);
            let _ = writeln!(text, "options, in {place} of the config:");
            let rows: Vec<Vec<String>> = schema
                .fields
                .iter()
                .map(|field| {
                    let default = field.default.as_ref().map_or("absent".into(), ToString::to_string);
                    vec![format!("  {}", field.name), default, field.kind.to_string(), field.doc.clone()]
                })
                .collect();
            text.push_str(&output::table(&["  key", "default", "value", "meaning"], &rows));
        }
    }
    text
}

/// What the config names and cannot be had, a sentence each.
pub(super) fn missing(settings: &Settings, catalogue: &Catalogue) -> Vec<String> {
    let config = &settings.config;
    let mut wanted: Vec<(PluginKind, &str)> =
        config.compute.devices.iter().map(|device| (PluginKind::Compute, stack::plugin_of(device))).collect();
    wanted.push((PluginKind::Storage, &config.storage.tier));
    wanted.push((PluginKind::Cache, &config.cache.policy));
    wanted.push((PluginKind::Planner, &config.planner.name));
    let absent = wanted.into_iter().filter(|(kind, name)| catalogue.find(*kind, name).is_none());
    absent
        .map(|(kind, name)| format!("the config names {kind} plug-in `{name}`, which cannot be had"))
        .collect()
}

/// Options of the config that the plug-in of their table refuses, a sentence each.
fn wrong_options(settings: &Settings, catalogue: &Catalogue) -> Vec<String> {
    let wrong = |((kind, name), table): (&(PluginKind, String), &OptionTable)| {
        let schema = catalogue.find(*kind, name)?.schema.as_ref()?;
        let error = schema.validate(table, &Config::options_place(*kind, name)).err()?;
        Some(error.detail())
    };
    settings.config.plugin_options.iter().filter_map(wrong).collect()
}

/// Every place, every plug-in, every doubt. Exit code 1 where the config names what cannot be had, or an option is wrong.
fn doctor(global: &Global, search: &SearchArgs) -> Result<ExitCode> {
    let settings = Settings::for_search(global, &search.plugins)?;
    let catalogue = catalogue(&settings);
    let mut problems = missing(&settings, &catalogue);
    problems.extend(wrong_options(&settings, &catalogue));
    let code = if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    let config_file = settings.file.as_ref().map(|path| path.display().to_string());
    if search.json {
        let tried: Vec<Value> = catalogue
            .tried()
            .iter()
            .map(|tried| {
                json!({"source": tried.source.to_string(), "path": tried.path, "outcome": tried.outcome})
            })
            .collect();
        output::json(&json!({
            "config": config_file,
            "searched": tried,
            "plugins": entries_json(&catalogue),
            "problems": problems,
        }))?;
        return Ok(code);
    }
    let mut text = match config_file {
        Some(file) => format!("config file: {file}\n"),
        None => match crate::settings::default_file() {
            Some(file) => format!("config file: none ({} is not there)\n", file.display()),
            None => "config file: none\n".into(),
        },
    };
    text.push_str("searched, in this order:\n");
    for tried in catalogue.tried() {
        let _ = writeln!(text, "  {tried}");
    }
    text.push_str("plug-ins:\n");
    for entry in catalogue.entries() {
        let name = match (entry.kind, entry.name()) {
            (Some(kind), Some(name)) => format!("{kind} {name}"),
            _ => "unknown".into(),
        };
        let probe = entry.probe_time.as_secs_f64() * 1e3;
        let _ = writeln!(text, "  {name}: {} ({}), probed in {probe:.1} ms", state(entry), entry.origin);
        if !entry.is_chosen() {
            let _ = writeln!(text, "    {}", why(entry));
        }
        if let Some(reason) = &entry.no_devices {
            let _ = writeln!(text, "    no devices: {reason}");
        }
    }
    for problem in &problems {
        let _ = writeln!(text, "problem: {problem}");
    }
    if problems.is_empty() {
        text.push_str("everything that the config names is there\n");
    }
    output::write(&text)?;
    Ok(code)
}

/// The devices of every compute plug-in, by the names that the config takes.
pub(super) fn devices(global: &Global, args: &DevicesArgs) -> Result<()> {
    let settings = Settings::for_search(global, &args.search.plugins)?;
    let catalogue = catalogue(&settings);
    let chosen = &settings.config.compute.devices;
    let mut found: Vec<(String, DeviceDescription)> = Vec::new();
    let mut none: Vec<(String, String)> = Vec::new();
    for entry in catalogue.of_kind(PluginKind::Compute) {
        let Some(plugin) = entry.name() else { continue };
        match catalogue.devices(plugin, &stack::device_options(&settings, &catalogue, plugin)) {
            Ok(devices) if devices.is_empty() => {
                none.push((
                    plugin.to_owned(),
                    entry.no_devices.clone().unwrap_or_else(|| "it found none".into()),
                ));
            }
            Ok(devices) => {
                let only = devices.len() == 1;
                let name = |index: usize| if only { plugin.to_owned() } else { format!("{plugin}:{index}") };
                found.extend(devices.into_iter().enumerate().map(|(index, device)| (name(index), device)));
            }
            Err(error) => none.push((plugin.to_owned(), error.to_string())),
        }
    }
    let in_config = |name: &str| chosen.iter().any(|device| device == name || *device == format!("{name}:0"));
    if args.search.json {
        let list = |(name, device): &(String, DeviceDescription)| {
            let mut value = device_json(device);
            value["plugin_name"] = json!(device.name);
            value["name"] = json!(name);
            value["in_config"] = json!(in_config(name));
            value
        };
        let none: Vec<Value> =
            none.iter().map(|(name, why)| json!({"plugin": name, "reason": why})).collect();
        return output::json(&json!({"devices": found.iter().map(list).collect::<Vec<_>>(), "none": none}));
    }
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|(name, device)| {
            let memory =
                if device.memory_bytes == 0 { "-".into() } else { output::bytes(device.memory_bytes) };
            let used = if in_config(name) { "yes" } else { "no" };
            vec![
                name.clone(),
                used.into(),
                memory,
                device.tolerance.name().into(),
                device.description.clone(),
            ]
        })
        .collect();
    let mut text = output::table(&["name", "in config", "memory", "class", "description"], &rows);
    for (name, why) in &none {
        text.push_str(&without_devices(name, why));
    }
    output::write(&text)
}
