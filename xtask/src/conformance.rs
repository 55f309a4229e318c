//! `cargo xtask conformance`: the suite, held against every compute plug-in that is built, or against one by path.

use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The suite as a program of its own.
pub(crate) const RUNNER: &str = "thermocline-conformance";

/// Builds the workspace and runs the suite. `--plugin PATH` chooses one library; everything else goes to the runner.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    process::build()?;
    check(arguments)
}

/// As [`run`], with what is built.
pub(crate) fn check(arguments: &[String]) -> Result<()> {
    let (plugin, rest) = split_plugin(arguments)?;
    let plugins = match plugin {
        Some(path) => vec![path],
        None => compute_plugins(&process::release())?,
    };
    hold(&plugins, &process::release(), || process::program(process::release().join(RUNNER)), &rest)
}

/// Shows that the suite catches every planted fault, by name.
pub(crate) fn check_mutations() -> Result<()> {
    let mut runner = process::program(process::release().join(RUNNER));
    process::run(runner.arg("--mutations").arg("--oracle").arg(oracle(&process::release())))
}

/// Runs the suite for every plug-in and fails where one failed.
pub(crate) fn hold(
    plugins: &[PathBuf],
    folder: &Path,
    runner: impl Fn() -> Command,
    arguments: &[&String],
) -> Result<()> {
    let mut failed = Vec::new();
    for plugin in plugins {
        let mut command = runner();
        command.arg(plugin).arg("--oracle").arg(oracle(folder)).args(arguments);
        if let Err(error) = process::run(&mut command) {
            eprintln!("{error:#}");
            failed.push(plugin.display().to_string());
        }
    }
    if !failed.is_empty() {
        bail!("conformance failed for {}", failed.join(", "));
    }
    println!("conformance: {} plug-ins passed", plugins.len());
    Ok(())
}

/// The plug-in whose results count as right.
fn oracle(folder: &Path) -> PathBuf {
    folder.join(format!("libthermocline_compute_reference{}", std::env::consts::DLL_SUFFIX))
}

/// Compute plug-ins in a folder of built libraries.
pub(crate) fn compute_plugins(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            name.starts_with("libthermocline_compute_") && name.ends_with(std::env::consts::DLL_SUFFIX)
        })
        .collect();
    found.sort();
    if found.is_empty() {
        bail!("no libthermocline_compute_* library in {}", folder.display());
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
