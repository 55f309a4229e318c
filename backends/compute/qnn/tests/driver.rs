//! Libraries that are absent, crash, hang or refuse, and what the real one does over many loads: each is an error with a
//! reason, nothing waits for ever, and nothing is kept.
//!
//! `standin.c` is compiled to a library that misbehaves as the environment variable STANDIN says; every scenario runs in a
//! process of its own, which is this program again. Those that need Qualcomm's library are skipped without it.

mod scenarios;
#[path = "../../standin.rs"]
mod standin;

use std::path::PathBuf;
use std::process::ExitCode;

use engine_core::module::ComputeModule;
use engine_core::options::OptionTable;
use libtest_mimic::Arguments;
use standin::Scenario;
use thermocline_compute_qnn::QnnModule;

/// The variable that names the library, for the plug-in and for these tests.
const VARIABLE: &str = "THERMOCLINE_QNN_LIB";

/// Name, what the stand-in does, and whether Qualcomm's library is behind it.
const MISBEHAVING: &[(&str, &str, bool)] = &[
    ("crash", "crash", false),
    ("hang", "hang", false),
    ("spellings", "hang", false),
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
    "compiling-memory",
    "loads",
];

fn main() -> ExitCode {
    engine_loader::probe_main_if_requested();
    if let Some(code) = standin::child(scenarios::run) {
        return code;
    }
    let folder = tempfile::tempdir().unwrap();
    let standin = standin::compile(env!("CARGO_MANIFEST_DIR"), &folder.path().join("libQnnHtp.so"));
    let real = PathBuf::from(std::env::var_os(VARIABLE).unwrap_or_default());
    let absent = match QnnModule.devices(&OptionTable::new()) {
        Ok(devices) if !devices.is_empty() => None,
        Ok(_) => Some(QnnModule.why_none()),
        Err(error) => Some(error.to_string()),
    };
    let scenario = |name, setting: &str, library: Result<PathBuf, String>| {
        // The plug-in's own probe opens the library that the environment names.
        let named = library.clone().unwrap_or_default();
        let environment =
            vec![("STANDIN", setting.into()), ("REAL", real.clone().into()), (VARIABLE, named.into())];
        Scenario { name, library, environment }.trial()
    };
    let with_real = |library: PathBuf| absent.clone().map_or(Ok(library), Err);
    let mut trials = vec![scenario("missing", "", Ok("/no/such/libQnnHtp.so".into()))];
    for (name, setting, needs_library) in MISBEHAVING {
        let library = standin.clone();
        trials.push(scenario(
            *name,
            setting,
            if *needs_library { library.and_then(with_real) } else { library },
        ));
    }
    for name in REAL {
        trials.push(scenario(*name, "", with_real(real.clone())));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
