//! Manifests: small TOML files that say where an installed plug-in lies.

use engine_core::module::PluginKind;
use engine_core::options::nearest;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// What a manifest says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    pub(crate) path: PathBuf,
    pub(crate) name: String,
    pub(crate) kind: PluginKind,
    /// Absolute.
    pub(crate) library: PathBuf,
    pub(crate) sha256: Option<String>,
}

const KEYS: [&str; 5] = ["name", "kind", "library", "sha256", "target"];

/// Reads a manifest; the error is a sentence that begins with a verb.
pub(crate) fn read(path: &Path) -> Result<Manifest, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot be read: {error}"))?;
    let table: toml::Table =
        text.parse().map_err(|error| format!("is no TOML: {}", one_line(&format!("{error}"))))?;
    if let Some(key) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
        return Err(format!("has an unknown key `{key}`{}", nearest(key, KEYS.into_iter())));
    }
    let text_of = |key: &str| match table.get(key) {
        None => Ok(None),
        Some(toml::Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(format!("has `{key}` = {other}, wanted text")),
    };
    let required = |key: &str| text_of(key)?.ok_or_else(|| format!("lacks the key `{key}`"));
    let kind_name = required("kind")?;
    let kind = PluginKind::ALL
        .into_iter()
        .find(|kind| kind.name() == kind_name)
        .ok_or_else(|| format!("has kind {kind_name:?}, wanted compute, storage, cache or planner"))?;
    if let Some(target) = text_of("target")? {
        let (arch, os) = (std::env::consts::ARCH, std::env::consts::OS);
        if target.split('-').next() != Some(arch) || !target.split('-').any(|part| part == os) {
            return Err(format!("is for {target}, this is {arch} with {os}"));
        }
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    Ok(Manifest {
        path: path.to_owned(),
        name: required("name")?,
        kind,
        library: folder.join(required("library")?),
        sha256: text_of("sha256")?,
    })
}

/// Checks the library's hash, where the manifest states one.
pub(crate) fn check_hash(manifest: &Manifest, library: &Path) -> Result<(), String> {
    let Some(wanted) = &manifest.sha256 else { return Ok(()) };
    let bytes = std::fs::read(library).map_err(|error| format!("cannot be read: {error}"))?;
    let found: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    if found.eq_ignore_ascii_case(wanted) {
        return Ok(());
    }
    Err(format!("has SHA-256 {found}, its manifest {} says {wanted}", manifest.path.display()))
}

pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
