//! `cargo xtask ci`: every check in turn, with a time budget and the time of each; the record of the long lane.

use crate::test::Tally;
use crate::{codegen, conformance, cross, demo, fuzz, process, test, tidy};
use anyhow::{Context, Result, bail};
use serde_json::json;
use std::time::{Duration, Instant};

/// Where the result of the last `ci --full` is kept.
const RECORD: &str = "docs/full-ci.json";

/// Where a stage is run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lane {
    /// In the default lane and in the full one.
    Both,
    /// In the default lane; the full one has a stage that covers it.
    Default,
    /// In the full lane.
    Full,
}

/// How a stage ended that did not fail.
enum Done {
    Ran,
    /// Something that it needs is absent: what.
    Skipped(String),
}

/// One check.
struct Stage {
    name: &'static str,
    lane: Lane,
    /// Seconds that it should take on two cores from a clean clone.
    budget: u64,
    /// Whether nothing after it makes sense when it fails.
    vital: bool,
    work: fn(&mut Tally) -> Result<Done>,
}

const fn stage(name: &'static str, lane: Lane, budget: u64, work: fn(&mut Tally) -> Result<Done>) -> Stage {
    Stage { name, lane, budget, vital: false, work }
}

const STAGES: &[Stage] = &[
    stage("format", Lane::Both, 5, |_| ran(process::run(&mut process::cargo(&["fmt", "--all", "--check"])))),
    Stage { vital: true, ..stage("build", Lane::Both, 540, |_| ran(process::build_with_tests())) },
    stage("tests", Lane::Both, 180, |tally| {
        let result = test::run_tests(&[])?;
        let failed = result.failed;
        tally.add(result);
        if failed > 0 { bail!("{failed} of the tests failed") } else { Ok(Done::Ran) }
    }),
    // Release artefacts of build scripts and macros serve clippy and rustdoc too.
    stage("clippy", Lane::Both, 180, |_| {
        let arguments = ["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"];
        process::run(&mut process::cargo(&arguments))?;
        // The program with the cpu linked in is built by nothing else.
        let linked = ["clippy", "--release", "-p", "thermocline", "--features", "builtin-cpu"];
        ran(process::run(process::cargo(&linked).args(["--", "-D", "warnings"])))
    }),
    stage("documentation", Lane::Both, 60, |_| {
        let mut doc = process::cargo(&["doc", "--release", "--no-deps", "--workspace"]);
        ran(process::run(doc.env("RUSTDOCFLAGS", "-D warnings")))
    }),
    stage("tidy", Lane::Both, 5, |_| ran(tidy::run())),
    stage("codegen", Lane::Both, 10, |_| ran(codegen::generate(true))),
    stage("conformance", Lane::Default, 120, |tally| held(tally, &[])),
    stage("mutations", Lane::Both, 10, |_| ran(conformance::check_mutations())),
    stage("demo", Lane::Both, 10, |_| ran(demo::generate())),
    stage("aarch64", Lane::Default, 300, |_| emulated(cross::one_tier)),
    stage("conformance-full", Lane::Full, 1200, |tally| held(tally, &["--full".to_owned()])),
    stage("fuzz", Lane::Full, 600, |_| {
        fuzz::lacking().map_or_else(|| ran(fuzz::check()), |why| Ok(Done::Skipped(why)))
    }),
    stage("aarch64-full", Lane::Full, 1800, |_| emulated(cross::everything)),
];

fn ran(result: Result<()>) -> Result<Done> {
    result.map(|()| Done::Ran)
}

/// The suite; what of it this machine cannot run counts as skipped.
fn held(tally: &mut Tally, arguments: &[String]) -> Result<Done> {
    for reason in conformance::check(arguments)? {
        tally.skip("stage conformance", &reason);
    }
    Ok(Done::Ran)
}

/// The work, where this machine can build for aarch64 and emulate it.
fn emulated(work: fn() -> Result<()>) -> Result<Done> {
    match cross::missing()? {
        Some(reason) => Ok(Done::Skipped(reason)),
        None => ran(work()),
    }
}

/// What is to be run.
struct Choice<'a> {
    full: bool,
    only: Vec<&'a str>,
}

impl Choice<'_> {
    fn has(&self, stage: &Stage) -> bool {
        let other = if self.full { Lane::Default } else { Lane::Full };
        if self.only.is_empty() { stage.lane != other } else { self.only.contains(&stage.name) }
    }
}

fn choice(arguments: &[String]) -> Result<Choice<'_>> {
    let mut choice = Choice { full: false, only: Vec::new() };
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--full" => choice.full = true,
            "--only" => {
                let name = arguments.next().map(String::as_str);
                let Some(stage) = STAGES.iter().find(|stage| Some(stage.name) == name) else {
                    let names: Vec<&str> = STAGES.iter().map(|stage| stage.name).collect();
                    bail!("--only takes one of {}", names.join(", "));
                };
                choice.only.push(stage.name);
            }
            other => bail!("unknown argument `{other}`: ci takes --full, or --only STAGE once or more"),
        }
    }
    if choice.full && !choice.only.is_empty() {
        bail!("--full runs every stage and records the result: it goes with no --only");
    }
    Ok(choice)
}

/// A stage with its time and its end; neither where it was not run.
type Row<'a> = (&'a Stage, Option<(Duration, Result<Done>)>);

/// Runs the stages and answers whether none failed. The last line counts tests, and each other stage as one of them.
pub(crate) fn run(arguments: &[String]) -> Result<bool> {
    let choice = choice(arguments)?;
    let start = Instant::now();
    let mut tally = Tally::default();
    let mut rows: Vec<Row<'_>> = Vec::new();
    let mut stopped = false;
    for stage in STAGES.iter().filter(|stage| choice.has(stage)) {
        if stopped {
            tally.fail(&format!("stage {}: not run, for an earlier one failed", stage.name));
            rows.push((stage, None));
            continue;
        }
        println!("\n=== {}", stage.name);
        let begun = Instant::now();
        let result = (stage.work)(&mut tally);
        match &result {
            Err(error) => {
                eprintln!("{}: {error:#}", stage.name);
                // Failed tests are counted one by one.
                if stage.name != "tests" || tally.failed == 0 {
                    tally.fail(&format!("stage {}", stage.name));
                }
            }
            Ok(Done::Skipped(reason)) => tally.skip(&format!("stage {}", stage.name), reason),
            Ok(Done::Ran) if stage.name != "tests" => tally.pass(),
            Ok(Done::Ran) => {}
        }
        stopped = stage.vital && result.is_err();
        rows.push((stage, Some((begun.elapsed(), result))));
    }
    let total = start.elapsed();
    table(&rows, total);
    if choice.full {
        record(&rows, total, &tally)?;
    }
    tally.print();
    println!("{}", tally.closing_line());
    Ok(tally.failed == 0)
}

fn table(rows: &[Row<'_>], total: Duration) {
    println!("\n{:<24} {:>8} {:>8}  result", "stage", "time", "budget");
    for (stage, end) in rows {
        let time =
            end.as_ref().map_or_else(|| "-".to_owned(), |(took, _)| format!("{:.1} s", took.as_secs_f64()));
        println!("{:<24} {time:>8} {:>6} s  {}", stage.name, stage.budget, outcome(stage, end));
    }
    println!("{:<24} {:>8}", "total", format!("{:.1} s", total.as_secs_f64()));
}

fn outcome(stage: &Stage, end: &Option<(Duration, Result<Done>)>) -> String {
    match end {
        None => "not run".into(),
        Some((_, Err(_))) => "FAILED".into(),
        Some((_, Ok(Done::Skipped(reason)))) => format!("skipped: {reason}"),
        Some((took, Ok(Done::Ran))) if took.as_secs() > stage.budget => "ok, over its budget".into(),
        Some((_, Ok(Done::Ran))) => "ok".into(),
    }
}

fn record(rows: &[Row<'_>], total: Duration, tally: &Tally) -> Result<()> {
    let line = |name: &str, arguments: &[&str]| -> Result<String> {
        Ok(process::output(process::program(name).args(arguments))?.trim().to_owned())
    };
    let stages: Vec<_> = rows
        .iter()
        .map(|(stage, end)| {
            json!({
                "stage": stage.name,
                "seconds": end.as_ref().map(|(took, _)| took.as_secs()),
                "budget_seconds": stage.budget,
                "result": outcome(stage, end),
            })
        })
        .collect();
    let record = json!({
        "command": "cargo xtask ci --full",
        "commit": line("git", &["rev-parse", "HEAD"])?,
        "changes_beside_it": !line("git", &["status", "--porcelain"])?.is_empty(),
        "date": line("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"])?,
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "seconds": total.as_secs(),
        "checks": tally.closing_line(),
        "skipped": tally.skips(),
        "stages": stages,
    });
    let text = serde_json::to_string_pretty(&record)? + "\n";
    std::fs::write(process::root().join(RECORD), text).with_context(|| format!("cannot write {RECORD}"))?;
    println!("wrote {RECORD}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(arguments: &[&str]) -> Result<Vec<&'static str>> {
        let arguments: Vec<String> = arguments.iter().map(|a| (*a).to_owned()).collect();
        let choice = choice(&arguments)?;
        Ok(STAGES.iter().filter(|stage| choice.has(stage)).map(|stage| stage.name).collect())
    }

    #[test]
    fn lanes_and_single_stages() {
        let (default, full) = (names(&[]).unwrap(), names(&["--full"]).unwrap());
        assert!(default.contains(&"aarch64") && !default.contains(&"aarch64-full"));
        assert!(full.contains(&"aarch64-full") && full.contains(&"tests") && !full.contains(&"conformance"));
        assert_eq!(names(&["--only", "mutations", "--only", "tidy"]).unwrap(), ["tidy", "mutations"]);
        assert!(names(&["--only", "x"]).is_err() && names(&["--full", "--only", "tidy"]).is_err());
    }

    #[test]
    fn a_skipped_stage_says_why() {
        let end = Some((Duration::from_secs(1), Ok(Done::Skipped("no emulator".into()))));
        assert_eq!(outcome(&STAGES[0], &end), "skipped: no emulator");
    }
}
