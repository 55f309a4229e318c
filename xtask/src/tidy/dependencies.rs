//! Which crate may name which: the invariants of the architecture, checked on every manifest.

use crate::process;
use anyhow::{Context, Result};
use serde_json::Value;

/// A folder of crates and the workspace's crates that they may name.
struct Rule {
    /// Manifest folder, relative to the workspace; a trailing `/` covers everything below it.
    folder: &'static str,
    /// Crates of the workspace that it may depend on.
    may_name: &'static [&'static str],
    /// Further ones that its tests may name.
    tests_may_name: &'static [&'static str],
}

/// The first match counts. A new crate needs a row, which is where its author says what it must not know.
const RULES: &[Rule] = &[
    Rule { folder: "engine-core", may_name: &[], tests_may_name: &[] },
    Rule { folder: "engine-core/abi", may_name: &["engine-core"], tests_may_name: &[] },
    Rule {
        folder: "engine-core/plugin",
        may_name: &["engine-core", "engine-abi"],
        tests_may_name: &["engine-loader"],
    },
    Rule {
        folder: "engine-core/loader",
        may_name: &["engine-core", "engine-abi"],
        tests_may_name: &["engine-plugin"],
    },
    Rule {
        folder: "engine-core/runtime",
        may_name: &["engine-core", "formats"],
        tests_may_name: &["calibration", "engine-loader", "synthetic-models"],
    },
    // Arithmetic on weights and on what was observed: no device, no runtime.
    Rule { folder: "engine-core/calibration", may_name: &["engine-core", "formats"], tests_may_name: &[] },
    Rule {
        folder: "engine-core/cli",
        may_name: &[
            "engine-core",
            "engine-abi",
            "engine-plugin",
            "engine-loader",
            "engine-runtime",
            "calibration",
            "formats",
            "conformance",
            "compute-cpu",
        ],
        tests_may_name: &[],
    },
    // No backend and no policy knows another one, a model, a file format or the runtime.
    Rule {
        folder: "backends/",
        may_name: &["engine-core", "engine-plugin"],
        tests_may_name: &["engine-abi", "engine-loader"],
    },
    Rule { folder: "planners/", may_name: &["engine-core", "engine-plugin"], tests_may_name: &[] },
    Rule { folder: "formats", may_name: &["engine-core"], tests_may_name: &[] },
    Rule { folder: "formats/synthetic", may_name: &["engine-core", "formats"], tests_may_name: &[] },
    Rule { folder: "conformance", may_name: &["engine-core", "engine-loader"], tests_may_name: &[] },
    // Plug-ins that only tests load, such as the ones that misbehave.
    Rule {
        folder: "conformance/",
        may_name: &["engine-core", "engine-abi", "engine-plugin"],
        tests_may_name: &[],
    },
    Rule {
        folder: "engine-core/loader/",
        may_name: &["engine-core", "engine-abi", "engine-plugin"],
        tests_may_name: &[],
    },
    // `synth` makes models; everything else is asked of the program.
    Rule { folder: "xtask", may_name: &["engine-core", "formats", "synthetic-models"], tests_may_name: &[] },
];

/// Packages from outside that only some folders may name, and why.
const RESERVED: &[(&str, &[&str], &str)] = &[
    (
        "abi_stable",
        &["engine-core/abi", "engine-core/plugin", "engine-core/loader"],
        "the plug-in boundary is theirs alone",
    ),
    (
        "libloading",
        &["engine-core/loader", "backends/compute/cuda", "backends/compute/vulkan", "backends/compute/qnn"],
        "only the loader and devices that open a vendor's library load libraries",
    ),
    ("anyhow", &["engine-core/cli", "xtask"], "libraries have an error enum of their own"),
    ("tokenizers", &["formats"], "what tokenizes a text is for `formats` to know"),
];

/// Packages that no crate under a folder may name, and why.
const FORBIDDEN: &[(&str, &[&str], &str)] = &[
    ("planners/", &["libc", "rustix", "memmap2", "tempfile", "tracing"], "policies do no I/O"),
    (
        "engine-core",
        &["libc", "rustix", "memmap2", "half"],
        "the contracts need no system and no file format",
    ),
];

/// Words that say nothing about what a crate holds.
const EMPTY_NAMES: &[&str] = &["util", "utils", "common", "helper", "helpers", "manager", "misc", "shared"];

/// Checks every manifest of the workspace.
pub(super) fn check() -> Result<Vec<String>> {
    let text = process::output(&mut process::cargo(&[
        "metadata",
        "--no-deps",
        "--format-version",
        "1",
        "--offline",
    ]))?;
    let metadata: Value = serde_json::from_str(&text).context("cargo metadata printed no JSON")?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let root = metadata["workspace_root"].as_str().context("cargo metadata has no workspace root")?;
    Ok(check_packages(packages, root))
}

fn check_packages(packages: &[Value], root: &str) -> Vec<String> {
    let mut found = Vec::new();
    let local: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        let folder = manifest
            .strip_prefix(root)
            .and_then(|m| m.strip_suffix("/Cargo.toml"))
            .unwrap_or(manifest)
            .trim_start_matches('/');
        if package["license"].as_str() != Some("Apache-2.0") {
            found.push(format!("{folder}: the manifest has no `license.workspace = true`"));
        }
        if name.split(['-', '_']).any(|part| EMPTY_NAMES.contains(&part)) {
            found.push(format!("{folder}: the crate's name `{name}` does not say what it holds"));
        }
        let Some(rule) = RULES.iter().find(|rule| covers(rule.folder, folder)) else {
            found.push(format!(
                "{folder}: no rule says what `{name}` may depend on; add one in xtask/src/tidy"
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let on = dependency["name"].as_str().unwrap_or_default();
            let for_tests = dependency["kind"].as_str() == Some("dev");
            if local.contains(&on) {
                let allowed = rule.may_name.contains(&on) || (for_tests && rule.tests_may_name.contains(&on));
                if !allowed && on != name {
                    found.push(format!("{folder}: `{name}` must not know `{on}`"));
                }
                if on == "compute-cpu" && !for_tests && dependency["optional"].as_bool() != Some(true) {
                    found.push(format!("{folder}: `{on}` is a plug-in; it may be linked by a feature only"));
                }
            }
            for (package, folders, why) in RESERVED {
                if on == *package && !folders.contains(&folder) {
                    found.push(format!("{folder}: `{name}` must not name `{on}`: {why}"));
                }
            }
            for (place, packages, why) in FORBIDDEN {
                if covers(place, folder) && packages.contains(&on) {
                    found.push(format!("{folder}: `{name}` must not name `{on}`: {why}"));
                }
            }
        }
    }
    found
}

fn covers(rule: &str, folder: &str) -> bool {
    if rule.ends_with('/') { folder.starts_with(rule) } else { folder == rule }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn forbidden_edges_are_found() {
        let package = |name: &str, folder: &str, on: &[(&str, Option<&str>)]| {
            let dependencies: Vec<Value> =
                on.iter().map(|(n, kind)| json!({"name": n, "kind": kind, "optional": false})).collect();
            json!({"name": name, "license": "Apache-2.0", "manifest_path": format!("/r/{folder}/Cargo.toml"),
                   "dependencies": dependencies})
        };
        let packages = [
            package("engine-core", "engine-core", &[("serde", None), ("formats", None)]),
            package("formats", "formats", &[("abi_stable", None), ("engine-core", None)]),
            package("compute-cpu", "backends/compute/cpu", &[("formats", Some("dev")), ("libloading", None)]),
            package("cache-utils", "planners/cache/utils", &[("libc", None)]),
            package("thing", "elsewhere", &[]),
        ];
        let found = check_packages(&packages, "/r");
        let wanted = [
            "engine-core: `engine-core` must not know `formats`",
            "formats: `formats` must not name `abi_stable`",
            "backends/compute/cpu: `compute-cpu` must not know `formats`",
            "backends/compute/cpu: `compute-cpu` must not name `libloading`",
            "the crate's name `cache-utils`",
            "planners/cache/utils: `cache-utils` must not name `libc`",
            "elsewhere: no rule",
        ];
        assert_eq!(found.len(), wanted.len(), "{found:#?}");
        for (found, wanted) in found.iter().zip(wanted) {
            assert!(found.contains(wanted), "{found}");
        }
    }
}
