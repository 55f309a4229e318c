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
       thermocline-conformance --mutations --oracle REFERENCE.so
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
  --mutant NAME    plants a fault into the device
  --json FILE, --junit FILE
";

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

fn usage(what: &str) -> Finding {
    Finding::new("usage", format!("{what}\n\n{USAGE}"))
}

fn command(arguments: Vec<String>) -> Result<(String, u8), Finding> {
    let mut options = SuiteOptions::new(Target::Path(PathBuf::new()));
    let (mut plugin, mut json, mut junit, mut mutations, mut list) = (None, None, None, false, false);
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| usage(&format!("{argument} needs a value")));
        match argument.as_str() {
            "--limits" => return Ok((limits_page(), 0)),
            "--help" | "-h" => return Ok((USAGE.into(), 0)),
            "--mutations" => mutations = true,
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
        let survived = verdicts.iter().any(|v| v.case.is_none());
        return Ok((mutants::table(&verdicts), u8::from(survived)));
    }
    options.target = Target::Path(plugin.ok_or_else(|| usage("no plug-in was named"))?);
    let report = conformance::run(&options)?;
    for (path, text) in [(json, report.to_json()), (junit, report.to_junit())] {
        if let Some(path) = path {
            std::fs::write(&path, text).map_err(|e| usage(&format!("{path}: {e}")))?;
        }
    }
    Ok((report.to_text(), report.exit_code() as u8))
}

fn number(text: &str) -> Result<u64, Finding> {
    text.parse().map_err(|_| usage(&format!("{text} is no number")))
}
