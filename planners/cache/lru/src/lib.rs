//! Exact least-recently-used caching: a miss is always worth loading, and what was used longest ago makes room.
//!
//! Each region has its own order. Accesses of a step count in the order in which they are named, hits before misses,
//! misses by deadline. A unit accessed in a step, or pinned, is never evicted in it; a miss for which no room can be
//! made is not admitted.

#![forbid(unsafe_code)]

mod order;
mod policy;

pub use policy::Lru;

use engine_core::config::Config;
use engine_core::module::{CacheModule, Module, PluginInfo, PluginKind};
use engine_core::options::{OptionTable, Schema};
use engine_core::{CachePolicy, Result};

/// The name that the config uses.
const NAME: &str = "lru";

/// The plug-in. It has no options.
pub struct LruModule;

impl Module for LruModule {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!(NAME, "Keeps the neuron clusters that were used last.")
    }

    fn schema(&self) -> Schema {
        Schema::default()
    }
}

impl CacheModule for LruModule {
    fn open(&self, options: &OptionTable) -> Result<Box<dyn CachePolicy>> {
        self.schema().validate(options, &Config::options_place(PluginKind::Cache, NAME))?;
        Ok(Box::new(Lru::default()))
    }
}

engine_plugin::export_plugin!(cache: LruModule);
