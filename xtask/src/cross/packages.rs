//! The Debian packages of the cross build: compiler, C library, emulator, and Rust's library source.

use super::toolchain::TARGET;
use crate::process;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

const PACKAGES: &[&str] = &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"];

/// The compiler that links for the target.
pub(super) const LINKER: &str = "aarch64-linux-gnu-gcc";

/// The emulator of one program.
pub(super) const EMULATOR: &str = "qemu-aarch64";

/// Where the packages put the target's C library.
pub(super) const LIBC_ROOT: &str = "/usr/aarch64-linux-gnu";

/// The suite that offers the library source of recent compilers.
const SUITE: &str = "trixie-backports";

fn present() -> bool {
    process::exists(LINKER)
        && process::exists(EMULATOR)
        && Path::new(LIBC_ROOT).join("lib/libc.so.6").exists()
}

/// Why [`install`], and with `source` [`library_source`], cannot do their work here, or nothing.
pub(super) fn missing(source: bool) -> Option<String> {
    let packages = PACKAGES.join(", ");
    let apt = process::exists("apt-get") && process::exists("dpkg-deb");
    let root = process::output(process::program("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    match (present(), apt, root) {
        (false, true, true) => {}
        (false, ..) => return Some(format!("needs {packages}, or Debian's apt-get as root to install them")),
        (true, false, _) if source => {
            return Some(format!(
                "needs the standard library of {TARGET}, or Debian's apt-get to fetch its source"
            ));
        }
        (true, ..) => {}
    }
    match debian_mirror() {
        Err(error) if source => Some(error.to_string()),
        _ => None,
    }
}

/// Installs compiler, C library and emulator where they are missing.
pub(super) fn install() -> Result<()> {
    if present() {
        return Ok(());
    }
    let apt = |arguments: &[&str]| {
        process::run(process::program("apt-get").env("DEBIAN_FRONTEND", "noninteractive").args(arguments))
    };
    apt(&["update", "-qq"])
        .and_then(|()| {
            let mut arguments = vec!["install", "-y", "-qq", "--no-install-recommends"];
            arguments.extend(PACKAGES);
            apt(&arguments)
        })
        .with_context(|| format!("the cross build needs the Debian packages {}", PACKAGES.join(", ")))
}

/// Fetches the source of the standard library of compiler `version` into `work` and answers its `library` folder.
///
/// The machine's own apt configuration stays as it is: lists and cache lie in `work`.
pub(super) fn library_source(version: &str, work: &Path) -> Result<PathBuf> {
    for folder in ["lists/partial", "cache/archives/partial", "unpacked"] {
        std::fs::create_dir_all(work.join(folder))
            .with_context(|| format!("cannot write {}", work.display()))?;
    }
    let sources = work.join("sources.list");
    std::fs::write(&sources, format!("deb {} {SUITE} main\n", debian_mirror()?))?;
    let options: Vec<String> = [
        format!("Dir::Etc::sourcelist={}", sources.display()),
        "Dir::Etc::sourceparts=-".to_owned(),
        format!("Dir::State::lists={}", work.join("lists").display()),
        format!("Dir::Cache={}", work.join("cache").display()),
        "APT::Sandbox::User=root".to_owned(),
    ]
    .into_iter()
    .flat_map(|option| ["-o".to_owned(), option])
    .collect();
    process::run(process::program("apt-get").args(&options).args(["-qq", "update"]))?;
    let offered =
        process::output(process::program("apt-cache").args(&options).args(["madison", "rust-src"]))?;
    let Some(package_version) = matching(&offered, version) else {
        bail!(
            "{SUITE} offers no rust-src of version {version}, only:\n{offered}\
             use a compiler of an offered version, or `rustup target add {}`",
            TARGET
        );
    };
    process::run(
        process::program("apt-get")
            .current_dir(work)
            .args(&options)
            .args(["-qq", "download"])
            .arg(format!("rust-src={package_version}")),
    )?;
    let package = std::fs::read_dir(work)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "deb"))
        .context("apt-get download left no package")?;
    let unpacked = work.join("unpacked");
    process::run(process::program("dpkg-deb").arg("-x").args([&package, &unpacked]))?;
    let library = unpacked.join(format!("usr/src/rustc-{version}/library"));
    if !library.join("Cargo.toml").is_file() {
        bail!("{} has no {}", package.display(), library.display());
    }
    Ok(library)
}

/// The first version in `apt-cache madison`'s table that belongs to a compiler version.
fn matching<'a>(madison: &'a str, version: &str) -> Option<&'a str> {
    madison
        .lines()
        .filter_map(|line| line.split('|').nth(1).map(str::trim))
        .find(|offered| offered.strip_prefix(version).is_some_and(|rest| rest.starts_with(['+', '-', '~'])))
}

/// The Debian mirror that this machine uses.
fn debian_mirror() -> Result<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = std::fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
    }
    files.sort();
    files
        .iter()
        .filter_map(|file| std::fs::read_to_string(file).ok())
        .find_map(|text| mirror_in(&text))
        .context("no Debian mirror in /etc/apt: the cross build fetches Rust's library source from one")
}

/// A Debian mirror among the sources of one file, in either of apt's two notations.
fn mirror_in(text: &str) -> Option<String> {
    text.lines()
        .filter(|line| line.starts_with("deb ") || line.starts_with("URIs:"))
        .flat_map(str::split_whitespace)
        .find(|word| word.contains("://") && word.trim_end_matches('/').ends_with("/debian"))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_mirror_in_both_notations() {
        let lines = "# x\ndeb https://example.org/tools stable main\ndeb [signed-by=/k.gpg] http://example.org/debian/ bookworm main\n";
        assert_eq!(mirror_in(lines).as_deref(), Some("http://example.org/debian/"));
        let fields = "Types: deb\nURIs: http://example.org/debian-security\nSuites: x\n\nURIs: http://example.org/debian\n";
        assert_eq!(mirror_in(fields).as_deref(), Some("http://example.org/debian"));
        assert_eq!(mirror_in("deb http://example.org/ubuntu jammy main\n"), None);
    }

    #[test]
    fn finds_matching_version() {
        let table = " rust-src | 1.96.0+dfsg1-1~bpo13+1 | http://x Packages\n rust-src | 1.95.0+dfsg1-2~bpo13+1 | http://x Packages\n";
        assert_eq!(matching(table, "1.95.0"), Some("1.95.0+dfsg1-2~bpo13+1"));
        assert_eq!(matching(table, "1.9"), None);
    }
}
