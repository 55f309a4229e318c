//! Storage tier `mmap`: files are mapped, and the system brings their pages in when they are touched.
//!
//! Opening takes no time and the page cache is shared between processes. `read` copies at once: its value is reached
//! when it returns, so there is never anything to cancel.

#![deny(unsafe_code)]

mod mapping;
mod tier;

pub use tier::MemoryMap;

use engine_core::config::Config;
use engine_core::module::{Module, PluginInfo, PluginKind, StorageModule};
use engine_core::options::{OptionTable, Schema};
use engine_core::{Result, StorageTier, options};

/// The name that the config uses.
const NAME: &str = "mmap";

options! {
    /// Options of the tier.
    pub struct Options {
        /// Asks the system to read files ahead as soon as they are opened.
        willneed: bool = false;
        /// Reads every page when a file is opened; opening then takes as long as reading the file.
        populate: bool = false;
    }
}

/// The plug-in.
pub struct MmapModule;

impl Module for MmapModule {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!(NAME, "Maps model files into memory.")
    }

    fn schema(&self) -> Schema {
        Options::schema()
    }
}

impl StorageModule for MmapModule {
    fn open(&self, options: &OptionTable) -> Result<Box<dyn StorageTier>> {
        let options = Options::from_table(options, &Config::options_place(PluginKind::Storage, NAME))?;
        Ok(Box::new(MemoryMap::new(options)))
    }
}

engine_plugin::export_plugin!(storage: MmapModule);
