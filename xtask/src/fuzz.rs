//! `cargo xtask fuzz`: the fuzz targets of `formats/fuzz`, built with the installed compiler, each for some seconds.
//!
//! Coverage comes from LLVM's own pass, which any rustc has; neither a nightly compiler nor cargo-fuzz is needed, but a
//! C++ compiler is (libFuzzer). Address sanitising is left out: the readers forbid unsafe code but for one mapping.

use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// Targets in the order in which they run.
const TARGETS: &[&str] = &["gguf", "pwri", "safetensors", "tokenizer", "template", "pickle"];

/// What makes coverage counters, as `cargo fuzz` asks for them.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Seconds of each target in `ci --full`.
const SHORT: u32 = 60;

/// Reads the arguments: `--seconds N`, and the targets (all of them, if none is named).
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let mut seconds = SHORT;
    let mut targets = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seconds" => {
                let value = arguments.next().context("--seconds needs a number")?;
                seconds = value.parse().with_context(|| format!("--seconds {value}: no number"))?;
            }
            name => match TARGETS.iter().find(|target| **target == name) {
                Some(target) => targets.push(*target),
                None => bail!("no fuzz target `{name}`; there is {}", TARGETS.join(", ")),
            },
        }
    }
    if targets.is_empty() {
        targets.extend(TARGETS);
    }
    fuzz(&targets, seconds)
}

/// Why fuzzing is not possible here.
pub(crate) fn lacking() -> Option<String> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    (!process::exists(&compiler) && !Path::new(&compiler).is_file())
        .then(|| format!("no C++ compiler (`{compiler}`), which libFuzzer needs"))
}

/// The short run of `ci --full`.
pub(crate) fn check() -> Result<()> {
    fuzz(TARGETS, SHORT)
}

fn fuzz(targets: &[&str], seconds: u32) -> Result<()> {
    if let Some(reason) = lacking() {
        bail!("{reason}");
    }
    let host = host()?;
    let folder = process::target().join("fuzz");
    let mut build = process::cargo(&["build", "--release", "--manifest-path", "formats/fuzz/Cargo.toml"]);
    build.args(["--target", &host]).env("CARGO_TARGET_DIR", &folder).env("RUSTFLAGS", FLAGS);
    process::run(build.env_remove("CARGO_ENCODED_RUSTFLAGS"))?;
    let mut found = Vec::new();
    for target in targets {
        if let Err(error) = one(&folder, &host, target, seconds) {
            eprintln!("{error:#}");
            found.push(*target);
        }
    }
    if found.is_empty() {
        Ok(())
    } else {
        bail!("findings in {}; the inputs are under {}", found.join(", "), folder.join("artifacts").display())
    }
}

/// Runs one target on its seeds and on what earlier runs left.
fn one(folder: &Path, host: &str, target: &str, seconds: u32) -> Result<()> {
    let make = |kind: &str| -> Result<PathBuf> {
        let path = folder.join(kind).join(target);
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    };
    let (corpus, artifacts) = (make("corpus")?, make("artifacts")?);
    let mut command = process::program(folder.join(host).join("release").join(target));
    command.arg(corpus).arg(process::root().join("formats/fuzz/seeds").join(target));
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()));
    command.args([
        "-max_len=4096",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        "-verbosity=0",
    ]);
    process::run(&mut command).with_context(|| format!("fuzz target `{target}`"))
}

/// The compiler's own triple.
fn host() -> Result<String> {
    let text = process::output(process::program("rustc").arg("-vV"))?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("`rustc -vV` names no host")
}
