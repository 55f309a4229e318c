//! What can go wrong between the name of a plug-in in the config and an open instance of it.

use engine_core::Error;
use engine_core::module::PluginKind;
use std::fmt;
use std::path::PathBuf;

/// A place that was looked at, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// Why it was looked at, such as `THERMOCLINE_PLUGIN_PATH`.
    pub source: crate::Source,
    /// The file or folder; `None` where the source names none.
    pub path: Option<PathBuf>,
    /// What was found there.
    pub outcome: String,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{}: {}: {}", self.source, path.display(), self.outcome),
            None => write!(f, "{}: {}", self.source, self.outcome),
        }
    }
}

/// Why a plug-in could not be had.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No usable library offers this name.
    #[error("{}", not_found(*.kind, .name, .known, .refused, .tried))]
    NotFound {
        /// The kind.
        kind: PluginKind,
        /// The name that was asked for.
        name: String,
        /// Names of this kind that there are.
        known: Vec<String>,
        /// Libraries that were refused, with the reason.
        refused: Vec<(PathBuf, String)>,
        /// Every place that was looked at.
        tried: Vec<Tried>,
    },
    /// The library was fine when it was probed, and is not now.
    #[error("{kind} plug-in `{name}` ({path}): {reason}", path = .path.display())]
    Refused {
        /// The kind.
        kind: PluginKind,
        /// The name.
        name: String,
        /// The library.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The name of a device is not of the form `NAME` or `NAME:INDEX`.
    #[error("device {text:?} is not of the form NAME or NAME:INDEX, such as \"cpu\" or \"vulkan:1\"")]
    DeviceName {
        /// The text.
        text: String,
    },
    /// The plug-in has no device with this index.
    #[error("compute plug-in `{name}` has no device {index}: {found}")]
    NoDevice {
        /// The plug-in.
        name: String,
        /// The index that was asked for.
        index: u32,
        /// The devices that there are, or why there are none.
        found: String,
    },
    /// The plug-in's table in the config is wrong.
    #[error("{0}")]
    Options(Error),
    /// The plug-in refused to open.
    #[error("{kind} plug-in `{name}` cannot be opened: {source}")]
    Open {
        /// The kind.
        kind: PluginKind,
        /// The name.
        name: String,
        /// Its own error.
        source: Error,
    },
}

fn not_found(
    kind: PluginKind,
    name: &str,
    known: &[String],
    refused: &[(PathBuf, String)],
    tried: &[Tried],
) -> String {
    use std::fmt::Write as _;
    let mut text = format!("there is no {kind} plug-in `{name}`");
    match known {
        [] => text.push_str(&format!("; no {kind} plug-in was found at all")),
        known => text.push_str(&engine_core::options::nearest(name, known.iter().map(String::as_str))),
    }
    if !refused.is_empty() {
        text.push_str("\n  refused:");
        for (path, reason) in refused {
            let _ = write!(text, "\n    {}: {reason}", path.display());
        }
    }
    text.push_str("\n  looked at:");
    for tried in tried {
        let _ = write!(text, "\n    {tried}");
    }
    let _ = write!(
        text,
        "\n  hint: name the file or its folder under `paths` in [plugins] of the config, or in \
         THERMOCLINE_PLUGIN_PATH; its usual name is {}",
        usual_file_name(kind, name)
    );
    text
}

/// What the library of a plug-in is called by convention. Planners are called after what they plan, the placement; any
/// name that begins with `libthermocline_` is found.
fn usual_file_name(kind: PluginKind, name: &str) -> String {
    let prefix = match kind {
        PluginKind::Planner => "placement",
        other => other.name(),
    };
    format!("libthermocline_{prefix}_{}.so", name.replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_names_are_those_of_the_plugins_here() {
        assert_eq!(usual_file_name(PluginKind::Planner, "greedy"), "libthermocline_placement_greedy.so");
        assert_eq!(usual_file_name(PluginKind::Cache, "static-hot"), "libthermocline_cache_static_hot.so");
    }
}
