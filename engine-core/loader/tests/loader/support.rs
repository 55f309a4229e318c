//! Fixtures: the cdylib examples of this crate, and C plug-ins compiled on the spot.

use engine_core::config::Plugins;
use engine_core::module::PluginKind;
use engine_core::options::OptionTable;
use engine_loader::{Catalogue, Entry, Environment, Standing, discover};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A fixture built from `examples/NAME.rs`.
pub(crate) fn fixture(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/TEST");
    let path = profile.join(format!("examples/lib{name}.so"));
    assert!(path.is_file(), "{} is missing; run cargo test -p engine-loader without --test", path.display());
    path
}

/// Finds only what a test names.
pub(crate) fn environment() -> Environment {
    Environment { probe: Some(env!("CARGO_BIN_EXE_thermocline-probe").into()), ..Environment::default() }
}

pub(crate) fn plugins(paths: &[&Path]) -> Plugins {
    Plugins {
        paths: paths.iter().map(|path| path.display().to_string()).collect(),
        // Long, so that a busy machine fails no test; those about time set their own.
        probe_timeout_ms: 60_000,
        ..Plugins::default()
    }
}

pub(crate) fn catalogue(paths: &[&Path]) -> Catalogue {
    discover(&plugins(paths), Path::new("/"), &environment())
}

/// The only entry of a catalogue of one file.
pub(crate) fn refusal(path: &Path) -> String {
    let catalogue = catalogue(&[path]);
    let [entry] = catalogue.entries() else { panic!("{:?}", catalogue.entries()) };
    match &entry.standing {
        Standing::Refused { reason } => reason.clone(),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn entry<'a>(catalogue: &'a Catalogue, name: &str) -> &'a Entry {
    catalogue.find(PluginKind::Compute, name).unwrap_or_else(|| panic!("{:?}", catalogue.entries()))
}

pub(crate) fn options(text: &str) -> OptionTable {
    text.parse().expect("options")
}

pub(crate) fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Compiles a C plug-in with `cc`, which rustc itself links with, and with these further arguments.
pub(crate) fn compile(source: &Path, into: &Path, arguments: &[&str]) -> PathBuf {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../abi/include");
    let output = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I"])
        .arg(include)
        .arg("-o")
        .arg(into)
        .arg(source)
        .args(arguments)
        .output()
        .expect("the C compiler `cc` is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    into.to_owned()
}

/// `c/liar.c` with these definitions.
pub(crate) fn liar(folder: &TempDir, defines: &[&str]) -> PathBuf {
    let defines: Vec<String> = defines.iter().map(|define| format!("-D{define}")).collect();
    let defines: Vec<&str> = defines.iter().map(String::as_str).collect();
    liar_with(folder, &defines)
}

/// `c/liar.c` compiled with these arguments.
pub(crate) fn liar_with(folder: &TempDir, arguments: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/loader/c/liar.c");
    compile(&source, &folder.path().join("libthermocline_compute_liar.so"), arguments)
}
