//! Units, regions and misses of cache policies.

use super::raw::slice;
use crate::{Miss, Region, Unit, UnitSink};
use engine_core::cache;
use engine_core::{Error, Result};
use std::ffi::c_void;

/// More units than one step of a layer can decide about.
const MAX_UNITS: usize = 1 << 24;

/// A unit as the boundary has it.
pub fn unit_to_abi(unit: &cache::Unit) -> Unit {
    Unit { region: unit.region, layer: unit.layer, cluster: unit.cluster }
}

/// The reverse of [`unit_to_abi`].
pub fn unit_from_abi(unit: &Unit) -> cache::Unit {
    cache::Unit { region: unit.region, layer: unit.layer, cluster: unit.cluster }
}

/// A region as the boundary has it.
pub fn region_to_abi(region: &cache::Region) -> Region {
    Region { unit_bytes: region.unit_bytes, budget_bytes: region.budget_bytes }
}

/// The reverse of [`region_to_abi`].
pub fn region_from_abi(region: &Region) -> cache::Region {
    cache::Region { unit_bytes: region.unit_bytes, budget_bytes: region.budget_bytes }
}

/// A miss as the boundary has it.
pub fn miss_to_abi(miss: &cache::Miss) -> Miss {
    Miss { unit: unit_to_abi(&miss.unit), deadline: miss.deadline }
}

/// The reverse of [`miss_to_abi`].
pub fn miss_from_abi(miss: &Miss) -> cache::Miss {
    cache::Miss { unit: unit_from_abi(&miss.unit), deadline: miss.deadline }
}

/// Collects the units that a policy writes into a sink.
#[derive(Debug, Default)]
pub struct UnitBuffer {
    units: Vec<cache::Unit>,
    problem: bool,
}

impl UnitBuffer {
    /// An empty buffer.
    pub fn new() -> UnitBuffer {
        UnitBuffer::default()
    }

    /// The sink of this buffer, for one call; the buffer must not be moved or touched until the call returns.
    pub fn sink(&mut self) -> UnitSink {
        UnitSink { context: std::ptr::from_mut(self).cast::<c_void>(), write: Some(append) }
    }

    /// What was written.
    ///
    /// # Errors
    /// [`Error::Internal`] where the other side wrote through a null pointer or without end.
    pub fn into_units(self) -> Result<Vec<cache::Unit>> {
        if self.problem {
            return Err(Error::internal("it wrote a decision with a null pointer, or one without end"));
        }
        Ok(self.units)
    }
}

unsafe extern "C" fn append(context: *mut c_void, units: *const Unit, len: usize) {
    // SAFETY: `context` is the buffer of `UnitBuffer::sink`, which nobody else touches during the call.
    let Some(buffer) = (unsafe { context.cast::<UnitBuffer>().as_mut() }) else { return };
    if buffer.units.len().saturating_add(len) > MAX_UNITS {
        buffer.problem = true;
        return;
    }
    // SAFETY: the writer promises `len` units at a pointer that is not null.
    match unsafe { slice(units, len, "units") } {
        Ok(units) => buffer.units.extend(units.iter().map(unit_from_abi)),
        Err(_) => buffer.problem = true,
    }
}

/// Writes units into a sink.
///
/// # Safety
/// The sink is one that the caller of the present function of the table passed to it.
pub unsafe fn write_units(sink: UnitSink, units: &[cache::Unit]) {
    let Some(write) = sink.write else { return };
    let units: Vec<Unit> = units.iter().map(unit_to_abi).collect();
    // SAFETY: the sink is live, and the units are borrowed for the call.
    unsafe { write(sink.context, units.as_ptr(), units.len()) }
}
