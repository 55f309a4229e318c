//! Libraries that are absent, crash, hang or refuse, and what the real one does over many loads: each is an error with a
//! reason, nothing waits for ever, and nothing is kept.
//!
//! `standin.c` is compiled to a library that misbehaves as the environment variable STANDIN says; every scenario runs in a
//! process of its own, which is this program again. Those that need Qualcomm's library are skipped without it.

mod scenarios;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use engine_core::module::ComputeModule;
use engine_core::options::OptionTable;
use libtest_mimic::{Arguments, Trial};
use thermocline_compute_qnn::QnnModule;

const CHILD: &str = "--scenario";

/// The variable that names the library, for the plug-in and for these tests.
const VARIABLE: &str = "THERMOCLINE_QNN_LIB";

/// Name, what the stand-in does, and whether Qualcomm's library is behind it.
const MISBEHAVING: &[(&str, &str, bool)] = &[
    ("crash", "crash", false),
    ("hang", "hang", false),
    ("nothing", "nothing", false),
    ("other-version", "other", false),
    ("stuck-run", "stuck:3", true),
    ("stuck-compiling", "compile", true),
    ("failing-run", "fails:3", true),
    ("refused-binary", "old", true),
    ("closed-device", "closed", true),
    ("noisy", "noisy", true),
];

/// Scenarios of Qualcomm's library itself.
const REAL: &[&str] = &[
    "another-soc",
    "cache",
    "chunks",
    "rounded",
    "overlapping",
    "one-graph",
    "ranges",
    "beyond",
    "two-chips",
    "quiet",
    "loads",
];

#[expect(clippy::print_stderr, reason = "a program of its own")]
fn main() -> ExitCode {
    engine_loader::probe_main_if_requested();
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, scenario, library] = &arguments[..]
        && flag == CHILD
    {
        return match scenarios::run(scenario, library) {
            Ok(()) => ExitCode::SUCCESS,
            Err(reason) => {
                eprintln!("{reason}");
                ExitCode::FAILURE
            }
        };
    }
    let folder = tempfile::tempdir().unwrap();
    let standin = compile(folder.path());
    let real = std::env::var(VARIABLE).unwrap_or_default();
    let absent = match QnnModule.devices(&OptionTable::new()) {
        Ok(devices) if !devices.is_empty() => None,
        Ok(_) => Some(QnnModule.why_none()),
        Err(error) => Some(error.to_string()),
    };
    let mut trials = vec![trial("missing", "", None, Some(PathBuf::from("/no/such/libQnnHtp.so")))];
    for (scenario, setting, needs_library) in MISBEHAVING {
        let lacking = match &standin {
            Err(reason) => Some(reason.clone()),
            Ok(_) => absent.clone().filter(|_| *needs_library),
        };
        trials.push(trial(scenario, setting, lacking, standin.clone().ok()));
    }
    for scenario in REAL {
        trials.push(trial(scenario, "", absent.clone(), Some(PathBuf::from(&real))));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn compile(folder: &Path) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/standin.c");
    let library = folder.join("libQnnHtp.so");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).output();
    match built {
        Ok(output) if output.status.success() => Ok(library),
        Ok(output) => Err(format!("cc: {}", String::from_utf8_lossy(&output.stderr))),
        Err(error) => Err(format!("no C compiler: {error}")),
    }
}

fn trial(
    scenario: &'static str,
    setting: &'static str,
    absent: Option<String>,
    library: Option<PathBuf>,
) -> Trial {
    if let Some(reason) = absent {
        let name = format!("driver::{scenario} (ignored: {})", reason.lines().next().unwrap_or_default());
        return Trial::test(name, || Ok(())).with_ignored_flag(true);
    }
    Trial::test(format!("driver::{scenario}"), move || {
        let library = library.ok_or("no library")?;
        let real = std::env::var_os(VARIABLE).unwrap_or_default();
        let mut command = Command::new(std::env::current_exe()?);
        command.args([CHILD, scenario]).arg(&library).env("STANDIN", setting).env("REAL", real);
        // The plug-in's own probe opens the library that the environment names.
        command.env(VARIABLE, &library);
        let output = command.output()?;
        let printed = String::from_utf8_lossy(&output.stdout);
        match output.status.success() {
            true if printed.is_empty() => Ok(()),
            true => Err(format!("it printed to the standard output: {printed}").into()),
            false => Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into()),
        }
    })
}
