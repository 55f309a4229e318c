//! `cargo xtask ci`: every check in turn, with a time budget and the time of each; the record of the long lane.

use crate::test::Tally;
use crate::{codegen, conformance, cross, demo, process, test, tidy};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::time::{Duration, Instant};

/// Where the result of the last `ci --full` is kept.
const RECORD: &str = "docs/full-ci.json";

/// One check.
struct Stage {
    name: &'static str,
    /// Seconds that it should take on two cores from a clean clone.
    budget: u64,
    /// Whether nothing after it makes sense when it fails.
    vital: bool,
    work: fn(&mut Option<Tally>) -> Result<()>,
}

const fn stage(name: &'static str, budget: u64, work: fn(&mut Option<Tally>) -> Result<()>) -> Stage {
    Stage { name, budget, vital: false, work }
}

const STAGES: &[Stage] = &[
    stage("format", 5, |_| process::run(&mut process::cargo(&["fmt", "--all", "--check"]))),
    Stage { vital: true, ..stage("build", 540, |_| process::build_with_tests()) },
    stage("tests", 120, |tally| {
        let result = test::run_tests(&[])?;
        let failed = result.failed;
        *tally = Some(result);
        if failed > 0 { bail!("{failed} of the tests failed") } else { Ok(()) }
    }),
    // Release artefacts of build scripts and macros serve clippy and rustdoc too.
    stage("clippy", 180, |_| {
        process::run(&mut process::cargo(&[
            "clippy",
            "--release",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]))
    }),
    stage("documentation", 60, |_| {
        process::run(
            process::cargo(&["doc", "--release", "--no-deps", "--workspace"])
                .env("RUSTDOCFLAGS", "-D warnings"),
        )
    }),
    stage("tidy", 5, |_| tidy::run()),
    stage("codegen", 10, |_| codegen::generate(true)),
    stage("conformance", 120, |_| conformance::check(&[])),
    stage("demo", 10, |_| demo::generate()),
];

/// What the long lane has besides.
const LONG_STAGES: &[Stage] = &[
    stage("conformance, full", 1200, |_| conformance::check(&["--full".to_owned()])),
    stage("conformance, mutations", 300, |_| conformance::check_mutations()),
    stage("aarch64 under qemu", 1800, |_| cross::everything()),
];

/// Runs all stages and answers whether all passed. The last line is the test runner's.
pub(crate) fn run(full: bool) -> Result<bool> {
    let start = Instant::now();
    let mut tally = None;
    let mut rows: Vec<(&Stage, Option<Duration>, Result<()>)> = Vec::new();
    let mut stopped = false;
    for stage in STAGES.iter().chain(if full { LONG_STAGES } else { &[] }) {
        if stopped {
            rows.push((stage, None, Ok(())));
            continue;
        }
        println!("\n=== {}", stage.name);
        let begun = Instant::now();
        let result = (stage.work)(&mut tally);
        if let Err(error) = &result {
            eprintln!("{}: {error:#}", stage.name);
        }
        stopped = stage.vital && result.is_err();
        rows.push((stage, Some(begun.elapsed()), result));
    }
    println!("\n{:<24} {:>8} {:>8}  result", "stage", "time", "budget");
    for (stage, took, result) in &rows {
        let time = took.map_or_else(|| "-".to_owned(), |t| format!("{:.1} s", t.as_secs_f64()));
        println!("{:<24} {time:>8} {:>6} s  {}", stage.name, stage.budget, outcome(stage, *took, result));
    }
    let total = start.elapsed();
    println!("{:<24} {:>8}", "total", format!("{:.1} s", total.as_secs_f64()));
    let failed: Vec<&str> = rows.iter().filter(|row| row.2.is_err()).map(|row| row.0.name).collect();
    if full {
        record(&rows, total, tally.as_ref())?;
    }
    if !failed.is_empty() {
        eprintln!("\nfailed: {}", failed.join(", "));
    }
    match &tally {
        Some(tally) => {
            tally.print();
            println!("{}", tally.closing_line());
        }
        None => println!("\n0 passed, 1 failed, 0 skipped"),
    }
    Ok(failed.is_empty())
}

fn outcome(stage: &Stage, took: Option<Duration>, result: &Result<()>) -> &'static str {
    match (took, result) {
        (None, _) => "not run",
        (_, Err(_)) => "FAILED",
        (Some(took), Ok(())) if took.as_secs() > stage.budget => "ok, over its budget",
        _ => "ok",
    }
}

fn record(
    rows: &[(&Stage, Option<Duration>, Result<()>)],
    total: Duration,
    tally: Option<&Tally>,
) -> Result<()> {
    let line = |name: &str, arguments: &[&str]| -> Result<String> {
        Ok(process::output(process::program(name).args(arguments))?.trim().to_owned())
    };
    let stages: Vec<_> = rows
        .iter()
        .map(|(stage, took, result)| {
            json!({
                "stage": stage.name,
                "seconds": took.map(|t| t.as_secs()),
                "budget_seconds": stage.budget,
                "result": outcome(stage, *took, result),
            })
        })
        .collect();
    let record = json!({
        "commit": line("git", &["rev-parse", "HEAD"])?,
        "changes_beside_it": !line("git", &["status", "--porcelain"])?.is_empty(),
        "date": line("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"])?,
        "seconds": total.as_secs(),
        "tests": tally.map(Tally::closing_line),
        "stages": stages,
    });
    let text = serde_json::to_string_pretty(&record)? + "\n";
    std::fs::write(process::root().join(RECORD), text).with_context(|| format!("cannot write {RECORD}"))?;
    println!("wrote {RECORD}");
    Ok(())
}
