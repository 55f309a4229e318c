//! `plugins conformance`: the suite, run in children of this program.

use crate::args::ConformanceArgs;
use crate::failure::Usage;
use crate::{output, stack};
use anyhow::{Context, Result};
use conformance::{PluginRef, SuiteOptions, Target};
use engine_core::module::PluginKind;
use engine_core::options::OptionTable;
use std::process::ExitCode;
use std::time::Duration;

pub(super) fn conformance(args: &ConformanceArgs) -> Result<ExitCode> {
    let mut options = SuiteOptions::new(target(&args.plugin));
    options.device = args.device;
    options.options = plugin_options(&args.set)?;
    options.oracle = args.oracle.clone();
    options.filter = args.filter.clone();
    options.full = args.full;
    options.seed = args.seed;
    options.timeout = Duration::from_secs(args.timeout);
    options.random = args.random;
    options.register = stack::register;
    let program = std::env::args().next().unwrap_or_else(|| "thermocline".into());
    options.command = format!("{program} plugins conformance");
    options.jobs = args.jobs.unwrap_or(options.jobs).max(1);
    let report = conformance::run(&options)?;
    if let Some(path) = &args.junit {
        std::fs::write(path, report.to_junit())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    output::line(&if args.json { report.to_json() } else { report.to_text() })?;
    Ok(if report.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `KIND/NAME` is found by the loader, anything else is a path.
fn target(plugin: &str) -> Target {
    let named = plugin.split_once('/').and_then(|(kind, name)| {
        let kind = PluginKind::ALL.into_iter().find(|k| k.name() == kind)?;
        Some(PluginRef { kind, name: name.to_owned() })
    });
    named.map_or_else(|| Target::Path(plugin.into()), Target::Name)
}

/// `KEY=VALUE` pairs as a table.
fn plugin_options(pairs: &[String]) -> Result<OptionTable> {
    let mut table = OptionTable::new();
    for pair in pairs {
        let parsed: OptionTable =
            pair.parse().map_err(|error| Usage(format!("--set {pair}: not KEY=VALUE in TOML: {error}")))?;
        table.extend(parsed);
    }
    Ok(table)
}
