//! `cargo xtask cross`: the aarch64 build on an x86 machine, run by qemu on processors with and without extensions.

mod packages;
mod story;
mod sysroot;
mod toolchain;

use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::Path;
use std::time::Instant;
use toolchain::{STORY, SUITE, Toolchain};

/// One of qemu's processors.
struct Tier {
    /// qemu's name.
    cpu: &'static str,
    /// What it has.
    has: &'static str,
    /// The kernels that the cpu plug-in must choose there.
    kernels: &'static str,
}

/// From the processor with every extension to plain NEON.
const TIERS: [Tier; 3] = [
    Tier { cpu: "max", has: "dotprod, fp16, i8mm", kernels: "i8mm" },
    Tier { cpu: "neoverse-n1", has: "dotprod, fp16", kernels: "dotprod" },
    Tier { cpu: "cortex-a72", has: "plain NEON", kernels: "neon" },
];

/// How much of the suite is run.
#[derive(Clone, Copy)]
enum Amount {
    /// The sampled cases.
    Sampled,
    /// Every case.
    Full,
}

/// Property-test cases of the unit tests: an emulator is some thirty times slower than the machine.
const PROPTEST_CASES: u32 = 4;

/// Reads the arguments and does one of the three.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let Some((what, rest)) = arguments.split_first() else { bail!("cross needs setup, conformance or demo") };
    let names: Vec<String> = rest.iter().filter(|a| *a != "--full").cloned().collect();
    let amount = if names.len() == rest.len() { Amount::Sampled } else { Amount::Full };
    let tiers = tiers(&names)?;
    match what.as_str() {
        "setup" => Toolchain::ready().map(|toolchain| println!("aarch64: ready, {}", toolchain.source())),
        "conformance" => on(&tiers, Work { suite: Some(amount), story: false }),
        "demo" => on(&tiers, Work { suite: None, story: true }),
        other => bail!("unknown argument `{other}`: cross takes setup, conformance or demo"),
    }
}

/// Everything that the long lane of CI asks of aarch64.
pub(crate) fn everything() -> Result<()> {
    on(&TIERS.each_ref(), Work { suite: Some(Amount::Full), story: true })
}

/// What the default lane asks: one processor whose kernels use every extension, with unit tests of the lesser ones too.
pub(crate) fn one_tier() -> Result<()> {
    on(&[&TIERS[0]], Work { suite: Some(Amount::Sampled), story: true })
}

/// Why this machine cannot build for aarch64 or emulate it, or nothing.
pub(crate) fn missing() -> Result<Option<String>> {
    Toolchain::missing()
}

fn tiers(arguments: &[String]) -> Result<Vec<&'static Tier>> {
    let mut chosen = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let name = match argument.as_str() {
            "--tier" => arguments.next(),
            other => bail!("unknown argument `{other}`"),
        };
        match TIERS.iter().find(|tier| Some(tier.cpu) == name.map(String::as_str)) {
            Some(tier) => chosen.push(tier),
            None => {
                let names: Vec<String> = TIERS.iter().map(|t| format!("{} ({})", t.cpu, t.has)).collect();
                bail!("--tier takes one of {}", names.join(", "));
            }
        }
    }
    if chosen.is_empty() { Ok(TIERS.iter().collect()) } else { Ok(chosen) }
}

/// What is done on a tier.
struct Work {
    /// The kernels' unit tests, and so much of the suite.
    suite: Option<Amount>,
    /// The story model.
    story: bool,
}

/// Builds once and does the work on every tier; the last line names each with its result and time.
fn on(tiers: &[&Tier], work: Work) -> Result<()> {
    let toolchain = Toolchain::ready()?;
    let begun = Instant::now();
    let mut packages = Vec::new();
    packages.extend(work.suite.map(|_| SUITE));
    packages.extend(work.story.then_some(STORY));
    toolchain.build(&packages)?;
    let suite = match work.suite {
        Some(amount) => Some((toolchain.build_unit_tests()?, amount)),
        None => None,
    };
    let mut lines = vec![format!("build {:.0} s", begun.elapsed().as_secs_f64())];
    let mut failed = Vec::new();
    for tier in tiers {
        println!("\n=== aarch64 {} ({})", tier.cpu, tier.has);
        let begun = Instant::now();
        let result = suite
            .as_ref()
            .map_or(Ok(()), |(tests, amount)| conformance(&toolchain, tier, tests, *amount))
            .and_then(|()| if work.story { story::check(&toolchain, tier) } else { Ok(()) });
        let outcome = if result.is_ok() { "passed" } else { "FAILED" };
        let seconds = begun.elapsed().as_secs_f64();
        lines.push(format!("{} ({}) {outcome} in {seconds:.0} s", tier.cpu, tier.has));
        if let Err(error) = result {
            eprintln!("{}: {error:#}", tier.cpu);
            failed.push(tier.cpu);
        }
    }
    println!("\naarch64: {}", lines.join("; "));
    if failed.is_empty() { Ok(()) } else { bail!("aarch64 failed on {}", failed.join(", ")) }
}

/// The unit tests of the kernels and the suite for the cpu plug-in.
fn conformance(toolchain: &Toolchain, tier: &Tier, tests: &Path, amount: Amount) -> Result<()> {
    toolchain.unit_tests(tests, tier, PROPTEST_CASES)?;
    let mut suite = toolchain::suite(toolchain, tier, &toolchain::plugin("cpu"))?;
    // A case of a second may take a minute here; a hang is still found.
    suite.args(["--timeout", "300"]);
    match amount {
        Amount::Sampled => suite.args(["--random", "4"]),
        Amount::Full => suite.args(["--full", "--random", "24"]),
    };
    process::run(&mut suite)?;
    let path = toolchain::report(tier);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    uses(tier, &serde_json::from_str(&text)?)
}

/// That the kernels are those that the tier is there for, and not lesser ones that pass as well.
fn uses(tier: &Tier, report: &Value) -> Result<()> {
    let notes = report["subject"]["notes"].to_string();
    if notes.contains(&format!("kernels: {},", tier.kernels)) {
        return Ok(());
    }
    bail!("on {} the cpu plug-in must choose the {} kernels, but says {notes}", tier.cpu, tier.kernels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lesser_kernels_are_no_pass() {
        let says = |kernels: &str| {
            let note = format!("kernels: {kernels}, the best tier that this processor and system run");
            serde_json::json!({"subject": {"notes": [note]}})
        };
        assert!(uses(&TIERS[1], &says("dotprod")).is_ok());
        assert!(uses(&TIERS[1], &says("neon")).is_err());
    }

    #[test]
    fn unknown_tiers_are_refused() {
        let names = |arguments: &[&str]| {
            tiers(&arguments.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>())
                .map(|tiers| tiers.iter().map(|t| t.cpu).collect::<Vec<_>>())
        };
        assert_eq!(names(&["--tier", "max"]).unwrap(), ["max"]);
        assert_eq!(names(&[]).unwrap().len(), 3);
        assert!(names(&["--tier", "x"]).is_err() && names(&["max"]).is_err());
    }
}
