//! `config check|schema|show`.

use crate::args::{ConfigCommand, Global};
use crate::output;
use crate::settings::{self, Settings};
use crate::stack;
use anyhow::{Result, bail};
use engine_core::config::Config;
use engine_core::module::PluginKind;
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

/// Checks everything that can be checked here; tables of plug-ins that are not here are named.
fn check(file: &Path) -> Result<()> {
    let settings =
        Settings { config: settings::read_file(file)?, file: Some(file.into()), ..Settings::default() };
    let catalogue = stack::catalogue(&settings);
    for ((kind, name), table) in &settings.config.plugin_options {
        let place = Config::options_place(*kind, name);
        match catalogue.find(*kind, name).and_then(|entry| entry.schema.as_ref()) {
            Some(schema) => schema
                .validate(table, &place)
                .map_err(|error| anyhow::anyhow!("{}: {}", file.display(), error.detail()))?,
            None if settings.config.general.strict => {
                bail!("{}: {place} is for a plug-in that is not here, and strict is on", file.display())
            }
            None => tracing::warn!("{place} was not checked: there is no {kind} plug-in `{name}` here"),
        }
    }
    for problem in super::plugins::missing(&settings, &catalogue) {
        if settings.config.general.strict {
            bail!("{}: {problem}, and strict is on", file.display());
        }
        tracing::warn!("{problem}");
    }
    output::line(&format!("{} is valid", file.display()))
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
