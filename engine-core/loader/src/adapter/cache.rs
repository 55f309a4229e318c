//! The cache table as [`CachePolicy`].

use super::{Handle, call, function, named, open};
use engine_abi::CacheTable;
use engine_abi::convert::{self, UnitBuffer, bytes_of};
use engine_core::Result;
use engine_core::cache::{CachePolicy, Decision, Miss, Region, Unit};
use engine_core::options::OptionTable;

/// An open cache policy of a plug-in.
pub(crate) struct Policy {
    table: CacheTable,
    handle: Handle,
}

impl Policy {
    /// A fresh policy.
    pub(crate) fn open(table: CacheTable, plugin: &str, options: &OptionTable) -> Result<Policy> {
        let (open_policy, close) = (function!(table, open, plugin), function!(table, close, plugin));
        let options = options.to_string();
        let handle = open(plugin, close, |out, detail| {
            // SAFETY: the table was checked; text, out parameter and sink live until the call returns.
            unsafe { open_policy(bytes_of(options.as_bytes()), out, detail) }
        })?;
        Ok(Policy { table, handle })
    }
}

impl CachePolicy for Policy {
    fn configure(&mut self, regions: &[Region]) -> Result<()> {
        let configure = function!(self.table, configure, &self.handle.plugin);
        let regions: Vec<engine_abi::Region> = regions.iter().map(convert::region_to_abi).collect();
        call(&self.handle.plugin, |detail| {
            // SAFETY: the table was checked, the instance is open; all else lives until the call returns.
            unsafe { configure(self.handle.instance, regions.as_ptr(), regions.len(), detail) }
        })
    }

    fn step(&mut self, layer: u32, hits: &[Unit], misses: &[Miss], pinned: &[Unit]) -> Result<Decision> {
        let step = function!(self.table, step, &self.handle.plugin);
        let hits: Vec<engine_abi::Unit> = hits.iter().map(convert::unit_to_abi).collect();
        let misses: Vec<engine_abi::Miss> = misses.iter().map(convert::miss_to_abi).collect();
        let pinned: Vec<engine_abi::Unit> = pinned.iter().map(convert::unit_to_abi).collect();
        let (mut admit, mut evict) = (UnitBuffer::new(), UnitBuffer::new());
        let (admit_sink, evict_sink) = (admit.sink(), evict.sink());
        call(&self.handle.plugin, |detail| {
            // SAFETY: as in `configure`.
            unsafe {
                step(
                    self.handle.instance,
                    layer,
                    hits.as_ptr(),
                    hits.len(),
                    misses.as_ptr(),
                    misses.len(),
                    pinned.as_ptr(),
                    pinned.len(),
                    admit_sink,
                    evict_sink,
                    detail,
                )
            }
        })?;
        let units =
            |buffer: UnitBuffer| buffer.into_units().map_err(|error| named(&self.handle.plugin, error));
        Ok(Decision { admit: units(admit)?, evict: units(evict)? })
    }
}
