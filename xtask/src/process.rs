//! Child processes: where the workspace is, and how a command is run and reported.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace's folder.
pub(crate) fn root() -> PathBuf {
    // Cargo sets the variable at run time; the compiled-in value serves a binary that is started by hand.
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map_or_else(|| here.clone(), Path::to_path_buf)
}

/// Cargo's target folder.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}

/// Where release binaries and plug-ins are built.
pub(crate) fn release() -> PathBuf {
    target().join("release")
}

/// The engine's program, built by [`build`].
pub(crate) fn thermocline() -> PathBuf {
    release().join("thermocline")
}

/// The cargo that started this program, in the workspace's folder.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments);
    command
}

/// A program in the workspace's folder.
pub(crate) fn program(name: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(name);
    command.current_dir(root());
    command
}

/// Builds the whole workspace, so that the program finds its plug-ins beside it.
pub(crate) fn build() -> Result<()> {
    run(&mut cargo(&["build", "--release", "--workspace"]))
}

/// Builds the workspace and its tests in one go, so that what both need is compiled with one set of features.
pub(crate) fn build_with_tests() -> Result<()> {
    run(&mut cargo(&["build", "--release", "--workspace", "--lib", "--bins", "--tests"]))
}

/// Runs a command with the terminal as its own.
///
/// # Errors
/// The command line, where it cannot be started or does not succeed.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = describe(command);
    println!("$ {line}");
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` ended with {status}");
    }
    Ok(())
}

/// Runs a command and answers what it printed; its errors go to the terminal.
///
/// # Errors
/// The command line, where it cannot be started or does not succeed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = describe(command);
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` ended with {}", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{line}` printed text that is not UTF-8"))
}

/// Whether a program can be found.
pub(crate) fn exists(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

fn describe(command: &Command) -> String {
    let root = root();
    let short = |text: &std::ffi::OsStr| {
        Path::new(text).strip_prefix(&root).unwrap_or(Path::new(text)).display().to_string()
    };
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|part| {
            let part = short(part);
            if part.contains(' ') { format!("{part:?}") } else { part }
        })
        .collect::<Vec<_>>()
        .join(" ")
}
