//! `config check|schema|show`.

use crate::args::{ConfigCommand, Global};
use crate::output;
use crate::settings::{self, Settings};
use crate::stack;
use anyhow::{Result, bail};
use engine_core::config::Config;
use engine_core::module::PluginKind;
use engine_core::options::OptionTable;
use serde_json::json;
use std::path::Path;

pub(super) fn config(global: &Global, command: &ConfigCommand) -> Result<()> {
    match command {
        ConfigCommand::Check { file } => check(file),
        ConfigCommand::Schema { markdown: _, json: false } => output::line(&Config::documentation()),
        ConfigCommand::Schema { json: true, .. } => output::json(&schema()),
        ConfigCommand::Show(args) => {
            let mut settings = Settings::resolve(global, &args.engine, &args.size, Some(&args.sampling))?;
            show_threads(&mut settings);
            output::line(&settings.config.to_toml())
        }
    }
}

/// Puts `--threads` where a run would: into the tables of the devices that take it.
fn show_threads(settings: &mut Settings) {
    if settings.threads.is_none() {
        return;
    }
    let catalogue = stack::catalogue(settings);
    for device in settings.config.compute.devices.clone() {
        let options = stack::device_options(settings, &catalogue, &device);
        let key = (PluginKind::Compute, stack::plugin_of(&device).to_owned());
        if !options.is_empty() {
            settings.config.plugin_options.insert(key, options);
        }
    }
}

/// Checks everything that can be checked here, and tells every fault; tables of plug-ins that are not here are named.
fn check(file: &Path) -> Result<()> {
    let text = settings::read_text(file)?;
    let mut faults = faults(&text, &file.display().to_string())?;
    // Where it is not sound, tables of plug-ins still can be judged.
    let config = match settings::read_file(file) {
        Ok(config) => config,
        Err(_) => Config::parse(&only_options(&text).to_string(), "").unwrap_or_default(),
    };
    let settings = Settings { config, file: Some(file.into()), ..Settings::default() };
    let strict = settings.config.general.strict;
    let catalogue = stack::catalogue(&settings);
    for ((kind, name), table) in &settings.config.plugin_options {
        let place = Config::options_place(*kind, name);
        match catalogue.find(*kind, name).and_then(|entry| entry.schema.as_ref()) {
            Some(schema) => {
                for (key, value) in table {
                    let one = OptionTable::from_iter([(key.clone(), value.clone())]);
                    let wrong = schema.validate(&one, &place).err();
                    faults.extend(wrong.map(|error| format!("{}: {}", file.display(), error.detail())));
                }
            }
            None if strict => faults.push(format!(
                "{}: {place} is for a plug-in that is not here, and strict is on",
                file.display()
            )),
            None => tracing::warn!("{place} was not checked: there is no {kind} plug-in `{name}` here"),
        }
    }
    for problem in super::plugins::missing(&settings, &catalogue) {
        if strict {
            faults.push(format!("{}: {problem}, and strict is on", file.display()));
        } else {
            tracing::warn!("{problem}");
        }
    }
    if faults.is_empty() {
        return output::line(&format!("{} is valid", file.display()));
    }
    all_of(faults)
}

/// The tables `[KIND.options.NAME]` alone.
fn only_options(text: &str) -> OptionTable {
    let whole: OptionTable = text.parse().unwrap_or_default();
    let options = |section: &toml::Value| {
        let options = section.as_table()?.get("options").filter(|options| options.is_table())?;
        Some(OptionTable::from_iter([("options".to_owned(), options.clone())]).into())
    };
    whole.into_iter().filter_map(|(key, section)| Some((key, options(&section)?))).collect()
}

/// Every fault of a config as such: each key is judged by itself, since reading stops at the first that is wrong.
fn faults(text: &str, origin: &str) -> Result<Vec<String>> {
    let Err(first) = Config::parse(text, origin) else { return Ok(Vec::new()) };
    // Not even TOML, or of another version: nothing else can be said.
    let Ok(whole) = text.parse::<OptionTable>() else { return Err(first.into()) };
    let mut faults: Vec<String> = Vec::new();
    let mut judge = |alone: OptionTable| {
        let wrong = Config::parse(&alone.to_string(), origin).err().map(|error| error.detail());
        faults.extend(wrong.filter(|detail| !faults.contains(detail)));
    };
    let one = |key: &str, value: &toml::Value| OptionTable::from_iter([(key.to_owned(), value.clone())]);
    for (key, value) in &whole {
        match value {
            toml::Value::Table(section) if !section.is_empty() => {
                section.iter().for_each(|(inner, value)| judge(one(key, &one(inner, value).into())));
            }
            value => judge(one(key, value)),
        }
    }
    if faults.is_empty() {
        faults.push(first.detail()); // of several keys together
    }
    Ok(faults)
}

/// One error of all faults, a line each.
fn all_of(faults: Vec<String>) -> Result<()> {
    match faults.as_slice() {
        [] => Ok(()),
        [one] => bail!("{one}"),
        several => bail!("{} faults\n  {}", several.len(), several.join("\n  ")),
    }
}

/// The schema of every section.
fn schema() -> serde_json::Value {
    let sections: Vec<serde_json::Value> = Config::schema()
        .iter()
        .map(|(name, schema)| json!({"section": name, "options": options(schema)}))
        .collect();
    json!({"version": engine_core::config::CONFIG_VERSION, "sections": sections})
}

/// The options of one table, as JSON for programs and for the documentation.
pub(super) fn options(schema: &engine_core::options::Schema) -> Vec<serde_json::Value> {
    let field = |field: &engine_core::options::Field| {
        json!({
            "name": field.name,
            "kind": field.kind.to_string(),
            "default": field.default,
            "doc": field.doc,
        })
    };
    schema.fields.iter().map(field).collect()
}
