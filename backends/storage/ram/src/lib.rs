//! Storage tier `ram`: a file is read whole when it is opened, and lent from memory from then on.
//!
//! For models that fit and disks that are slow to page from; start-up takes the time to read the file. `read` copies
//! at once: its value is reached when it returns, so there is never anything to cancel.

#![deny(unsafe_code)]

mod copy;
mod files;
mod pages;
mod tier;

pub use tier::Ram;

use engine_core::config::Config;
use engine_core::module::{Module, PluginInfo, PluginKind, StorageModule};
use engine_core::options::{OptionTable, Schema};
use engine_core::{Result, StorageTier, options};

/// The name that the config uses.
const NAME: &str = "ram";

options! {
    /// Options of the tier.
    pub struct Options {
        /// Bytes that open files may take together; absent means no limit.
        memory_limit: Option<u64> = None;
        /// Threads that read a file when it is opened; 0 takes all that the process may, up to 8.
        threads: u32 = 0, in 0..=64;
        /// Whether the system is asked to hold files in huge pages (decode of a model of 135M on one thread: 33.1 tokens/s
        /// instead of 30.3, no difference on a busy machine); where it refuses, they are in small ones, and the log says
        /// so.
        huge_pages: bool = true;
    }
}

/// The plug-in.
pub struct RamModule;

impl Module for RamModule {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!(NAME, "Reads model files whole into memory.")
    }

    fn schema(&self) -> Schema {
        Options::schema()
    }
}

impl StorageModule for RamModule {
    fn open(&self, options: &OptionTable) -> Result<Box<dyn StorageTier>> {
        let options = Options::from_table(options, &Config::options_place(PluginKind::Storage, NAME))?;
        Ok(Box::new(Ram::new(options)))
    }
}

engine_plugin::export_plugin!(storage: RamModule);
