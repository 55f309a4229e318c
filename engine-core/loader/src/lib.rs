//! Finds plug-ins, probes each in a child process, checks it at either door, and turns its table into a trait object.
//!
//! [`discover`] never fails and never runs foreign code in this process: it lists what there is, what was chosen, and
//! why the rest was not. [`Catalogue::open_compute`] and its sisters load a chosen library into this process (it is
//! never unloaded) and open it; what cannot be had is a [`LoadError`] that says what was looked for, where, and what
//! to do.
//!
//! # Trust
//! Values, codes, lengths and text of a plug-in are checked before they reach a caller; what breaks the contract is
//! [`engine_core::Error::Internal`] naming the plug-in. Lists and bindings are checked by engine-core's rules before
//! they cross. A crash cannot be contained in process, which is why a child process tries every library first.

mod adapter;
mod builtin;
mod catalogue;
mod elf;
mod error;
mod library;
mod manifest;
mod probe;
mod search;

pub use catalogue::{Catalogue, Entry, Origin, Standing};
pub use error::{LoadError, Tried};
pub use library::Door;
pub use probe::{PROBE_ARGUMENT, probe_main_if_requested};
pub use search::{Environment, Source};

use engine_core::config::Plugins;
use std::path::Path;

/// Looks for plug-ins and probes them: the paths of the config (relative ones are relative to `config_dir`), then
/// `THERMOCLINE_PLUGIN_PATH`, the manifest directories, and the program's own folder. The first of a kind and name
/// wins.
pub fn discover(plugins: &Plugins, config_dir: &Path, environment: &Environment) -> Catalogue {
    catalogue::discover(plugins, config_dir, environment)
}
