//! `cargo xtask tidy`: the rules of ARCHITECTURE.md that a program can check, also run as a test.

mod dependencies;
mod layout;
mod rust_text;
mod sources;

use crate::process;
use anyhow::{Result, bail};
use std::path::Path;

/// Checks the workspace and fails with every finding.
pub(crate) fn run() -> Result<()> {
    let findings = findings(&process::root())?;
    findings.iter().for_each(|finding| eprintln!("tidy: {finding}"));
    if !findings.is_empty() {
        bail!("{} rules broken", findings.len());
    }
    println!("tidy: nothing found");
    Ok(())
}

fn findings(root: &Path) -> Result<Vec<String>> {
    let files = tracked(root)?;
    let mut found = dependencies::check()?;
    found.extend(layout::check(root, &files));
    found.extend(sources::check(root, &files));
    Ok(found)
}

/// Files that are, or would be, part of the repository, relative to its folder.
fn tracked(root: &Path) -> Result<Vec<String>> {
    let list = process::output(process::program("git").current_dir(root).args([
        // A checkout that belongs to another user, as in a container, is read all the same.
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let mut files: Vec<String> =
        list.split('\0').filter(|f| !f.is_empty() && root.join(f).is_file()).map(str::to_owned).collect();
    files.sort();
    files.dedup();
    Ok(files)
}

#[cfg(test)]
mod tests {
    #[test]
    fn workspace_is_tidy() {
        let found = super::findings(&crate::process::root()).unwrap();
        assert!(found.is_empty(), "{}", found.join("\n"));
    }
}
