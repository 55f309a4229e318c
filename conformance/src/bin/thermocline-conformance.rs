//! The suite as a program of its own: for tests, for cross-compiled runs, and where the `thermocline` binary is not at
//! hand.

use conformance::mutants;
use conformance::open::{Target, none_linked, open_oracle};
use conformance::report::limits_page;
use conformance::{Finding, SuiteOptions};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "\
usage: thermocline-conformance PLUGIN.so [options]
       thermocline-conformance --mutations [--markdown] --oracle REFERENCE.so
       thermocline-conformance --limits
       thermocline-conformance --list [--filter TEXT] [--full]

  --oracle FILE    the reference plug-in (otherwise the loader looks for it)
  --filter TEXT    only cases whose name contains TEXT; =NAME is one case
  --full           every case rather than the sampled ones
  --seed N         seed of all operands (1)
  --device N       index of the device (0)
  --set KEY=VALUE  an option of the plug-in, in TOML
  --timeout S      seconds that one case may take (60)
  --jobs N         child processes at a time
  --random N       random problems per operation
  --mutant NAME    plants a fault into the device, to see the suite find it
  --json FILE      writes the report as JSON, too; - prints it instead of the page
  --junit FILE     writes the report as JUnit XML, too
  --version, --help

The exit code is 0 where all is well, 1 where a case failed, 2 where nothing could be run.
";

/// The page of help.
fn help() -> String {
    let mut page = format!("{USAGE}\nFaults for --mutant:\n");
    for mutant in mutants::MUTANTS.iter().chain(mutants::FATAL) {
        page.push_str(&format!("  {:<18} {}\n", mutant.name, mutant.what));
    }
    page
}

fn main() -> ExitCode {
    conformance::main_if_child(none_linked);
    match command(std::env::args().skip(1).collect()) {
        Ok((page, code)) => {
            let _ = std::io::stdout().write_all(page.as_bytes());
            ExitCode::from(code)
        }
        Err(finding) => {
            let _ = writeln!(std::io::stderr(), "{finding}");
            ExitCode::from(2)
        }
    }
}

/// A mistake in the arguments: one sentence, and where to read on.
fn usage(what: &str) -> Finding {
    Finding::new("arguments", format!("{what} (see --help)"))
}

fn command(arguments: Vec<String>) -> Result<(String, u8), Finding> {
    let mut options = SuiteOptions::new(Target::Path(PathBuf::new()));
    let (mut plugin, mut json, mut junit) = (None, None, None);
    let (mut mutations, mut markdown, mut list) = (false, false, false);
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| usage(&format!("{argument} needs a value")));
        match argument.as_str() {
            "--limits" => return Ok((limits_page(), 0)),
            "--help" | "-h" => return Ok((help(), 0)),
            "--version" | "-V" => {
                return Ok((format!("thermocline-conformance {}\n", env!("CARGO_PKG_VERSION")), 0));
            }
            "--mutations" => mutations = true,
            "--markdown" => markdown = true,
            "--list" => list = true,
            "--full" => options.full = true,
            "--oracle" => options.oracle = Some(value()?.into()),
            "--filter" => options.filter = value()?,
            "--mutant" => options.mutant = Some(value()?),
            "--json" => json = Some(value()?),
            "--junit" => junit = Some(value()?),
            "--seed" => options.seed = number(&value()?)?,
            "--device" => options.device = number(&value()?)? as u32,
            "--jobs" => options.jobs = number(&value()?)? as usize,
            "--random" => options.random = Some(number(&value()?)? as u32),
            "--timeout" => options.timeout = std::time::Duration::from_secs(number(&value()?)?),
            "--set" => {
                let table: toml::Table =
                    value()?.parse().map_err(|e| usage(&format!("--set needs KEY=VALUE in TOML: {e}")))?;
                options.options.extend(table);
            }
            other if other.starts_with('-') => return Err(usage(&format!("unknown option {other}"))),
            _ if plugin.is_some() => {
                return Err(usage(&format!("a second plug-in, {argument}: one at a time")));
            }
            _ => plugin = Some(PathBuf::from(argument)),
        }
    }
    if list {
        let cases = conformance::matrix::select(&options.filter, options.full);
        return Ok((cases.iter().map(|c| format!("{}\n", c.name)).collect(), 0));
    }
    if mutations {
        let oracle = |arithmetic| open_oracle(options.oracle.as_deref(), arithmetic);
        let (stated, exact) = (oracle("stated")?, oracle("true")?);
        let verdicts = mutants::check_all(&stated, exact.as_ref(), options.seed)?;
        let survived = verdicts.iter().any(|v| !v.is_ok());
        let page = if markdown { mutants::markdown(&verdicts) } else { mutants::table(&verdicts) };
        return Ok((page, u8::from(survived)));
    }
    options.target = Target::Path(plugin.ok_or_else(|| usage("no plug-in was named"))?);
    if let Some(program) = std::env::args().next() {
        options.command = program;
    }
    let report = conformance::run(&options)?;
    let code = report.exit_code() as u8;
    if let Some(path) = &junit {
        write(path, &report.to_junit())?;
    }
    match json.as_deref() {
        Some("-") => return Ok((report.to_json() + "\n", code)),
        Some(path) => write(path, &report.to_json())?,
        None => {}
    }
    Ok((report.to_text(), code))
}

fn write(path: &str, text: &str) -> Result<(), Finding> {
    std::fs::write(path, text).map_err(|e| Finding::new("report", format!("cannot write {path}: {e}")))
}

fn number(text: &str) -> Result<u64, Finding> {
    text.parse().map_err(|_| usage(&format!("{text} is no number")))
}
