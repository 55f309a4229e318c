//! A sysroot with an aarch64 standard library, built once per compiler version and kept outside the clone.

use super::packages;
use super::toolchain::TARGET;
use crate::process;
use anyhow::{Context, Result};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Whether the installed toolchain has the target's standard library (`rustup target add`).
pub(super) fn is_installed() -> Result<bool> {
    Ok(toolchain()?.join("lib/rustlib").join(TARGET).join("lib").is_dir())
}

/// Whether [`ready`] has nothing to build.
pub(super) fn is_cached() -> Result<bool> {
    Ok(place(&compiler()?.0)?.is_dir())
}

fn place(version: &str) -> Result<PathBuf> {
    Ok(cache()?.join("aarch64-sysroot").join(version))
}

/// The sysroot, built where it is not in the cache yet: minutes, some 200 MB.
pub(super) fn ready() -> Result<PathBuf> {
    let (version, host) = compiler()?;
    let sysroot = place(&version)?;
    if sysroot.is_dir() {
        return Ok(sysroot);
    }
    // Made under another name and renamed, so that an interrupted build is not taken for a whole one.
    let part = sysroot.with_file_name(format!("{version}.part"));
    if part.exists() {
        std::fs::remove_dir_all(&part).with_context(|| format!("cannot remove {}", part.display()))?;
    }
    let work = part.join("work");
    let library = packages::library_source(&version, &work)?;
    let built = build_standard_library(&library, &work.join("seed"))?;
    assemble(&built, &part, &host)?;
    std::fs::remove_dir_all(&work)?;
    std::fs::rename(&part, &sysroot).with_context(|| format!("cannot write {}", sysroot.display()))?;
    Ok(sysroot)
}

/// Builds std and the test harness as dependencies of an empty crate, and answers the folder of the libraries.
fn build_standard_library(library: &Path, seed: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(seed.join("src"))?;
    std::fs::write(
        seed.join("Cargo.toml"),
        "[package]\nname = \"seed\"\nedition = \"2024\"\n[workspace]\n[profile.release]\npanic = \"unwind\"\n",
    )?;
    std::fs::write(seed.join("src/lib.rs"), "")?;
    process::run(
        process::cargo(&["build", "--release", "-Zbuild-std=std,panic_abort,test", "--target", TARGET])
            .current_dir(seed)
            // The two variables that let a stable compiler build its own standard library.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("__CARGO_TESTS_ONLY_SRC_ROOT", library)
            .env("CARGO_TARGET_DIR", seed.join("target"))
            .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", packages::LINKER)
            .env_remove("RUSTFLAGS"),
    )?;
    Ok(seed.join("target").join(TARGET).join("release/deps"))
}

/// Lays the libraries out as the compiler looks for them, with links to the host's own.
fn assemble(built: &Path, sysroot: &Path, host: &str) -> Result<()> {
    let into = sysroot.join("lib/rustlib").join(TARGET).join("lib");
    std::fs::create_dir_all(&into)?;
    for entry in std::fs::read_dir(built).with_context(|| format!("cannot list {}", built.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let is_library = name.ends_with(".rlib") || name.ends_with(".rmeta");
        if is_library && !name.starts_with("libseed-") {
            std::fs::copy(&path, into.join(name))?;
        }
    }
    let toolchain = toolchain()?;
    symlink(toolchain.join("lib/rustlib").join(host), sysroot.join("lib/rustlib").join(host))?;
    for entry in std::fs::read_dir(toolchain.join("lib"))? {
        let path = entry?.path();
        if let (Some("so"), Some(name)) = (path.extension().and_then(|e| e.to_str()), path.file_name()) {
            symlink(&path, sysroot.join("lib").join(name))?;
        }
    }
    Ok(())
}

fn toolchain() -> Result<PathBuf> {
    Ok(process::output(process::program("rustc").args(["--print", "sysroot"]))?.trim().into())
}

/// The compiler's version and its host.
fn compiler() -> Result<(String, String)> {
    let text = process::output(process::program("rustc").arg("-vV"))?;
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name))
            .map(|value| value.trim().to_owned())
            .with_context(|| format!("`rustc -vV` has no `{name}`"))
    };
    Ok((field("release:")?, field("host:")?))
}

fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .filter(|dir| !dir.is_empty())
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is set: there is no place to keep the sysroot")?;
    Ok(base.join("thermocline"))
}
