//! The top level of the repository, and what no file of it may hold.

use std::path::Path;

/// What may stand at the top level.
const TOP_LEVEL: &[&str] = &[
    ".cargo",
    ".ci",
    ".gitignore",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "backends",
    "conformance",
    "docs",
    "engine-core",
    "formats",
    "models",
    "planners",
    "rustfmt.toml",
    "xtask",
];

/// What must stand there.
const REQUIRED: &[&str] =
    &[".ci/run", "ARCHITECTURE.md", "Cargo.lock", "Cargo.toml", "LICENSE", "README.md", "docs/config.md"];

const LARGEST_BYTES: u64 = 16 << 20;

/// Text of one machine or one network, in two parts so that this file does not hold it.
const FOREIGN: &[(&str, &str, &str)] = &[
    ("/wo", "rk/", "a machine's path"),
    ("/ro", "ot/", "a machine's path"),
    ("/fa", "rm/", "a machine's path"),
    ("/ho", "me/", "a machine's path"),
    ("deb.", "debian.org", "a registry's host"),
    ("pypi", ".org", "a registry's host"),
    ("files.python", "hosted.org", "a registry's host"),
    ("registry.", "npmjs", "a registry's host"),
    ("index.", "crates.io", "a registry's host"),
    ("static.", "crates.io", "a registry's host"),
    ("crates.io", "/api", "a registry's host"),
];

/// Checks names, sizes and texts of all files.
pub(super) fn check(root: &Path, files: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    let mut strangers: Vec<&str> = files
        .iter()
        .filter_map(|file| file.split('/').next())
        .filter(|top| !TOP_LEVEL.contains(top))
        .collect();
    strangers.dedup();
    found.extend(
        strangers.iter().map(|top| format!("{top}: the top level's layout is fixed; it has no place there")),
    );
    found.extend(
        REQUIRED.iter().filter(|file| !root.join(file).is_file()).map(|file| format!("{file} is missing")),
    );
    for file in files {
        let path = root.join(file);
        let bytes = path.metadata().map_or(0, |m| m.len());
        if bytes > LARGEST_BYTES {
            found.push(format!("{file}: {bytes} bytes, more than {LARGEST_BYTES}"));
        }
        // Lock files name registries by right; models are data.
        if file.ends_with("Cargo.lock") || file.ends_with(".gguf") {
            continue;
        }
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        for (at, line) in text.lines().enumerate() {
            for (first, second, what) in FOREIGN {
                if line.contains(&format!("{first}{second}")) {
                    found.push(format!("{file}:{}: {what}", at + 1));
                }
            }
        }
    }
    found
}
