//! `cargo xtask conformance`: the suite, held against every compute plug-in that is built, or against one by path.

use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The suite as a program of its own.
pub(crate) const RUNNER: &str = "thermocline-conformance";

/// Instruction tiers of the cpu plug-in that are held to the suite beside the best one of the processor.
#[cfg(target_arch = "x86_64")]
const TIERS: &[&str] = &["avx512", "avx2", "portable"];
#[cfg(not(target_arch = "x86_64"))]
const TIERS: &[&str] = &["portable"];

/// Systems-on-chip that Qualcomm's library imitates for the suite: one with Hexagon V68, which has no 4-bit weights, and one
/// with V75.
const SOCS: &[u32] = &[30, 57];

/// Builds the workspace and runs the suite. `--plugin PATH` chooses one library; everything else goes to the runner.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    process::build()?;
    for reason in check(arguments)? {
        println!("skipped: {reason}");
    }
    Ok(())
}

/// As [`run`], with what is built; answers what this machine cannot run.
///
/// Without `--plugin` every plug-in is held, and the cpu once for each of its tiers.
pub(crate) fn check(arguments: &[String]) -> Result<Vec<String>> {
    let (plugin, rest) = split_plugin(arguments)?;
    let plugins = match &plugin {
        Some(path) => vec![path.clone()],
        None => plugins(&process::release())?,
    };
    let mut runs: Vec<Run> = Vec::new();
    let mut skipped = Vec::new();
    for path in plugins {
        let is = |name| plugin.is_none() && path.file_stem().is_some_and(|stem| stem == name);
        if is("libthermocline_compute_vulkan") {
            let watched = vec!["--set".to_owned(), "validation=true".to_owned()];
            match (lacks(&path, &[], NO_VULKAN)?, lacks(&path, &watched, NO_LAYER)?) {
                (Some(reason), _) => skipped.push(format!("the suite for vulkan: {reason}")),
                (None, None) => runs.push(Run { plugin: path, options: watched }),
                (None, Some(reason)) => {
                    skipped.push(format!("the validation layers over the suite for vulkan: {reason}"));
                    runs.push(Run { plugin: path, options: Vec::new() });
                }
            }
            continue;
        }
        if is("libthermocline_compute_qnn") {
            for soc in SOCS {
                // Graphs of cases are small and many: none is worth a file.
                let options =
                    ["--set", &format!("soc={soc}"), "--set", "context_cache='off'"].map(str::to_owned);
                match lacks(&path, &options, NO_QNN)? {
                    Some(reason) => skipped.push(format!("the suite for qnn with SoC {soc}: {reason}")),
                    None => runs.push(Run { plugin: path.clone(), options: options.to_vec() }),
                }
            }
            continue;
        }
        if !is("libthermocline_compute_cpu") {
            runs.push(Run { plugin: path, options: Vec::new() });
            continue;
        }
        for tier in TIERS {
            let options = vec!["--set".to_owned(), format!("features={tier:?}")];
            match lacks(&path, &options, NO_TIER)? {
                Some(reason) => skipped.push(format!("the suite for the cpu's {tier} kernels: {reason}")),
                None => runs.push(Run { plugin: path.clone(), options }),
            }
        }
    }
    let mut failed = Vec::new();
    for run in &runs {
        let mut command = runner(&run.plugin);
        command.args(&run.options).args(&rest);
        if let Err(error) = process::run(&mut command) {
            eprintln!("{error:#}");
            failed.push(format!("{} {}", run.plugin.display(), run.options.join(" ")));
        }
    }
    if !failed.is_empty() {
        bail!("conformance failed for {}", failed.join(", "));
    }
    println!("conformance: {} runs of the suite passed", runs.len());
    Ok(skipped)
}

/// One run of the suite.
struct Run {
    plugin: PathBuf,
    options: Vec<String>,
}

fn runner(plugin: &Path) -> Command {
    let mut command = process::program(process::release().join(RUNNER));
    command.arg(plugin).arg("--oracle").arg(oracle(&process::release()));
    command
}

/// The plug-ins' words for what a machine lacks.
const NO_TIER: &str = "this processor or system lacks";
const NO_VULKAN: &str = "install the Vulkan loader and a driver";
const NO_QNN: &str = "get Qualcomm's library";
const NO_LAYER: &str = "VK_LAYER_KHRONOS_validation is not installed";

/// What the machine lacks of what these options ask for, by the plug-in's own words, which contain `words`.
fn lacks(plugin: &Path, options: &[String], words: &str) -> Result<Option<String>> {
    let mut command = runner(plugin);
    command.args(options).args(["--filter", "=device/-/empty-list"]);
    let output = command.output().with_context(|| format!("cannot start {RUNNER}"))?;
    if output.status.code() != Some(2) {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    match text.lines().find(|line| line.contains(words)) {
        Some(line) => Ok(Some(line.trim().to_owned())),
        None => bail!("{}", text.trim()),
    }
}

/// Shows that the suite catches every planted fault, by name.
pub(crate) fn check_mutations() -> Result<()> {
    let mut runner = process::program(process::release().join(RUNNER));
    process::run(runner.arg("--mutations").arg("--oracle").arg(oracle(&process::release())))
}

/// The plug-in whose results count as right.
pub(crate) fn oracle(folder: &Path) -> PathBuf {
    folder.join(format!("libthermocline_compute_reference{}", std::env::consts::DLL_SUFFIX))
}

/// Plug-ins of every kind in a folder of built libraries.
fn plugins(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            name.starts_with("libthermocline_") && name.ends_with(std::env::consts::DLL_SUFFIX)
        })
        .collect();
    found.sort();
    if found.is_empty() {
        bail!("no libthermocline_* library in {}", folder.display());
    }
    Ok(found)
}

fn split_plugin(arguments: &[String]) -> Result<(Option<PathBuf>, Vec<&String>)> {
    let mut plugin = None;
    let mut rest = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--plugin" => plugin = Some(arguments.next().context("--plugin needs a path")?.into()),
            _ => rest.push(argument),
        }
    }
    Ok((plugin, rest))
}
