//! What the tests of devices that open a vendor's library have alike: a stand-in for it in C, which misbehaves as the
//! environment variable STANDIN says, and scenarios that run in a process of their own each, which is the test program again.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use engine_core::config::Plugins;
use engine_loader::{Environment, Standing};
use libtest_mimic::{Failed, Trial};

const CHILD: &str = "--scenario";

/// What every scenario prints, before and after, and nothing else.
const PRINTED: [&str; 2] = ["it begins", "it ends"];

/// A scenario as the test program starts it.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// The library that it opens, or why it cannot run here.
    pub(crate) library: Result<PathBuf, String>,
    /// Variables of its process.
    pub(crate) environment: Vec<(&'static str, OsString)>,
}

/// Runs a scenario where this process was started for one.
#[expect(clippy::print_stderr, reason = "a program of its own")]
pub(crate) fn child(run: impl Fn(&str, &str) -> Result<(), String>) -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, flag, scenario, library] = &arguments[..] else { return None };
    if flag != CHILD {
        return None;
    }
    let ended = print(PRINTED[0]).and_then(|()| run(scenario, library)).and_then(|()| print(PRINTED[1]));
    Some(match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    })
}

/// Prints to the standard output as a program does.
fn print(line: &str) -> Result<(), String> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}").and_then(|()| output.flush()).map_err(|error| error.to_string())
}

/// The stand-in of a crate's tests as a library of this name, or why there is none.
pub(crate) fn compile(manifest: &str, library: &Path) -> Result<PathBuf, String> {
    let source = Path::new(manifest).join("tests/standin.c");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-O1", "-o"]).arg(library).arg(source).arg("-ldl");
    match command.output() {
        Ok(output) if output.status.success() => Ok(library.to_owned()),
        Ok(output) => Err(format!("cc: {}", String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("there is no C compiler: {error}")),
    }
}

impl Scenario {
    /// The test that starts it.
    pub(crate) fn trial(self) -> Trial {
        let Scenario { name, library, environment } = self;
        let library = match library {
            Ok(library) => library,
            Err(reason) => {
                let why = reason.lines().next().unwrap_or_default();
                let ignored = format!("driver::{name} (ignored: {why})");
                return Trial::test(ignored, || Ok(())).with_ignored_flag(true);
            }
        };
        Trial::test(format!("driver::{name}"), move || {
            let mut command = Command::new(std::env::current_exe()?);
            let output = command.args([CHILD, name]).arg(&library).envs(environment).output()?;
            let printed = String::from_utf8_lossy(&output.stdout);
            match output.status.success() {
                true if printed.lines().eq(PRINTED) => Ok(()),
                true => {
                    Err(format!("the standard output should hold {PRINTED:?}, and holds: {printed}").into())
                }
                false => {
                    Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into())
                }
            }
        })
    }
}

/// Fails with what was found where the condition does not hold.
pub(crate) fn ensure(condition: bool, found: impl std::fmt::Debug) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(format!("{found:?}").into()) }
}

/// The loader's probe of the plug-in dies of the library, in a process of its own; the plug-in is refused with the reason.
pub(crate) fn crashes(plugin: &str) -> Result<(), Failed> {
    let program = std::env::current_exe()?;
    let folder = program.parent().and_then(Path::parent).unwrap_or(Path::new("."));
    let plugins = Plugins { paths: vec![folder.join(plugin).display().to_string()], ..Plugins::default() };
    let process = Environment::from_process();
    let environment = Environment { probe: process.probe, ..Environment::default() };
    let catalogue = engine_loader::discover(&plugins, folder, &environment);
    let refused = |entry: &engine_loader::Entry| match &entry.standing {
        Standing::Refused { reason } => Some(reason.clone()),
        _ => None,
    };
    let reasons: Vec<String> = catalogue.entries().iter().filter_map(refused).collect();
    ensure(reasons.iter().any(|reason| reason.contains("while it listed its devices")), reasons)
}
