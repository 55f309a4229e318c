//! The suite against the reference plug-in: green by itself, red with every planted fault, and alive after crashes.

use conformance::finding::Outcome;
use conformance::mutants::tiny_model::{self, TinyModel};
use conformance::open::{Target, none_linked, open_oracle};
use conformance::report::Status;
use conformance::{Expectation, Report, SuiteOptions, mutants};
use libtest_mimic::{Arguments, Failed, Trial};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The reference plug-in beside or above this test program, where `cargo build` puts it.
fn reference() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let folders = program.ancestors().skip(1).take(2);
    let names = ["libthermocline_compute_reference.so"];
    folders.flat_map(|f| names.map(|n| f.join(n))).find(|p| p.is_file())
}

fn main() -> ExitCode {
    conformance::main_if_child(none_linked);
    let arguments = Arguments::from_args();
    let plugin = reference();
    let missing = plugin.is_none();
    let plugin = plugin.unwrap_or_default();
    let trial = |name: &str, test: fn(&Path) -> Result<(), Failed>| {
        let plugin = plugin.clone();
        let kind = "needs `cargo build --release -p compute-reference`";
        let trial = Trial::test(name, move || test(&plugin)).with_ignored_flag(missing);
        if missing { trial.with_kind(kind) } else { trial }
    };
    let trials = vec![
        trial("the_reference_passes", passes),
        trial("every_planted_fault_is_caught", mutations),
        trial("a_crash_costs_one_case", crash),
        trial("a_hang_costs_one_case", hang),
        trial("a_report_says_what_to_do", actionable),
        trial("known_failures_are_set_aside", known),
        trial("nothing_to_run_is_an_error", nothing),
        trial("the_finder_names_each_planted_fault", divergences),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn options(plugin: &Path, filter: &str) -> SuiteOptions {
    SuiteOptions {
        oracle: Some(plugin.to_owned()),
        filter: filter.into(),
        random: Some(4),
        jobs: 2,
        ..SuiteOptions::new(Target::Path(plugin.to_owned()))
    }
}

fn run(options: &SuiteOptions) -> Result<Report, Failed> {
    conformance::run(options).map_err(|f| f.to_string().into())
}

fn passes(plugin: &Path) -> Result<(), Failed> {
    let report = run(&options(plugin, ""))?;
    if report.is_ok() && report.count(Status::NotSupported) < report.cases.len() / 10 {
        return Ok(());
    }
    Err(report.to_text().into())
}

fn mutations(plugin: &Path) -> Result<(), Failed> {
    let oracle = |arithmetic| open_oracle(Some(plugin), arithmetic).map_err(|f| Failed::from(f.to_string()));
    let (stated, exact) = (oracle("stated")?, oracle("true")?);
    let verdicts = mutants::check_all(&stated, exact.as_ref(), 1).map_err(|f| f.to_string())?;
    if verdicts.iter().any(|v| !v.is_ok()) {
        return Err(mutants::table(&verdicts).into());
    }
    Ok(())
}

/// Runs a planted fault over Q8_0 and F16 projections: the first are lost, the second go on.
fn isolated(plugin: &Path, mutant: &str, check: &str) -> Result<(), Failed> {
    let mut options = options(plugin, "/f32/one/plain");
    options.mutant = Some(mutant.into());
    options.full = true;
    options.timeout = Duration::from_secs(5);
    let report = run(&options)?;
    for case in report.cases.iter().filter(|c| c.operation == "linear") {
        let found = match &case.outcome {
            Outcome::Failed { finding } => finding.check.as_str(),
            _ => "",
        };
        let wanted = if case.dtype == "q8_0" { check } else { "" };
        if found != wanted {
            return Err(format!("{}: {found:?}, wanted {wanted:?}", case.name).into());
        }
    }
    if report.count(Status::Failed) == 1 { Ok(()) } else { Err(report.to_text().into()) }
}

fn crash(plugin: &Path) -> Result<(), Failed> {
    isolated(plugin, "aborts", "crash")
}

fn hang(plugin: &Path) -> Result<(), Failed> {
    isolated(plugin, "hangs", "hang")
}

fn actionable(plugin: &Path) -> Result<(), Failed> {
    let mut options = options(plugin, "=linear/q8_0/f32/gemv/plain");
    options.mutant = Some("scale-off".into());
    let report = run(&options)?;
    let text = report.to_text();
    for part in [
        "FAILED linear/q8_0/f32/gemv/plain",
        "element  output[0][36]",
        "oracle",
        "allowed",
        "because  f32 sums over blocks",
        "weight Q8_0 [37 x 96]",
        "f32 activations, f32 sums",
        "thermocline-conformance ",
        "--filter '=linear/q8_0/f32/gemv/plain' --seed 1 --oracle ",
        "--mutant scale-off",
        "held to the limits of class f32, as every planted fault is",
    ] {
        if !text.contains(part) {
            return Err(format!("the report lacks {part:?}:\n{text}").into());
        }
    }
    if report.exit_code() == 1 { Ok(()) } else { Err("the exit code is not 1".into()) }
}

fn known(plugin: &Path) -> Result<(), Failed> {
    let mut options = options(plugin, "=linear/q8_0/f32/gemv/plain");
    options.expectations = vec![Expectation {
        case: "linear/*".into(),
        plugin: "reference".into(),
        device: "*".into(),
        reason: "a test".into(),
    }];
    if run(&options)?.is_ok() {
        return Err("a known failure that passes is no failure".into());
    }
    options.mutant = Some("scale-off".into());
    let report = run(&options)?;
    if report.count(Status::KnownFailure) == 1 && report.is_ok() {
        return Ok(());
    }
    Err(report.to_text().into())
}

fn nothing(plugin: &Path) -> Result<(), Failed> {
    for options in [options(plugin, "no such case"), options(Path::new("/nowhere.so"), "")] {
        if conformance::run(&options).is_ok() {
            return Err("it ran".into());
        }
    }
    Ok(())
}

/// Each fault, and the operation of the tiny model that the finder must name.
const DIVERGENCES: [(&str, u32, &str); 8] = [
    ("scale-off", 0, "blk.0.attn_q"),
    ("rope-order", 0, "blk.0.rope"),
    ("last-row", 0, "blk.0.attn_q"),
    ("writes-past", 0, "blk.0.attn_q"),
    ("peeking-predictor", 0, "blk.0.ffn"),
    ("mask-off-by-one", 0, "blk.0.attention"),
    ("stale-cache", 1, "blk.0.kv_append"),
    ("past-cluster", 0, "blk.0.ffn"),
];

fn divergences(plugin: &Path) -> Result<(), Failed> {
    let oracle = open_oracle(Some(plugin), "stated").map_err(|f| f.to_string())?;
    let find = |dut: &dyn engine_core::ComputeBackend| {
        let mut model = TinyModel::new();
        conformance::diverge::diverge(&mut model, dut, oracle.as_ref(), false).map_err(|f| f.to_string())
    };
    let clean = find(oracle.as_ref())?;
    if clean.first.is_some() || clean.compared != tiny_model::STEPS.len() as u64 * tiny_model::OPERATIONS {
        return Err(format!("the oracle departs from itself: {clean:?}").into());
    }
    for (mutant, submission, label) in DIVERGENCES {
        let dut = mutants::wrap(mutant, oracle.clone()).ok_or("no such fault")?;
        let trace = find(dut.as_ref())?;
        let found = trace.first.as_ref().map(|d| (d.submission, d.label.as_str()));
        if found != Some((submission, label)) {
            return Err(format!("{mutant}: found {:?}, wanted {label}", trace.first).into());
        }
        if mutant != "writes-past" && trace.first.is_some_and(|d| d.finding.element.is_none()) {
            return Err(format!("{mutant}: no element is named").into());
        }
    }
    Ok(())
}
