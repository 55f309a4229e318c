//! A cache plug-in for the loader's tests: admits every miss, evicts every hit.

use engine_core::cache::{CachePolicy, Decision, Miss, Region, Unit};
use engine_core::module::{CacheModule, Module, PluginInfo};
use engine_core::options::{OptionTable, Schema};
use engine_core::{Error, Result};

struct Fixture;

impl Module for Fixture {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!("fixture", "Turns everything around.")
    }
    fn schema(&self) -> Schema {
        Schema::default()
    }
}

impl CacheModule for Fixture {
    fn open(&self, _: &OptionTable) -> Result<Box<dyn CachePolicy>> {
        Ok(Box::new(Policy(0)))
    }
}

struct Policy(usize);

impl CachePolicy for Policy {
    fn configure(&mut self, regions: &[Region]) -> Result<()> {
        self.0 = regions.len();
        match regions.iter().position(|region| region.capacity() == 0) {
            Some(index) => Err(Error::invalid(format!("region {index} cannot hold a unit"))),
            None => Ok(()),
        }
    }
    fn step(&mut self, layer: u32, hits: &[Unit], misses: &[Miss], pinned: &[Unit]) -> Result<Decision> {
        assert!(self.0 > 0, "step {layer} before configure");
        let evict = hits.iter().filter(|unit| !pinned.contains(unit)).copied().collect();
        Ok(Decision { admit: misses.iter().map(|miss| miss.unit).collect(), evict })
    }
}

engine_plugin::export_plugin!(cache: Fixture);
