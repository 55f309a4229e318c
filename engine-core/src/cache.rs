//! `CachePolicy`: what stays in memory and what goes. Pure decisions on a logical clock: no I/O, no time, no weights.

use crate::Result;

/// A unit of caching: a neuron cluster (or an expert's matrix) within a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Unit {
    /// Index of the region it belongs to.
    pub region: u32,
    /// Layer.
    pub layer: u32,
    /// Cluster index within the layer.
    pub cluster: u32,
}

/// A part of the memory budget with units of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Bytes of one unit; at least 1.
    pub unit_bytes: u64,
    /// Bytes that the region may hold.
    pub budget_bytes: u64,
}

impl Region {
    /// How many units fit.
    pub fn capacity(&self) -> u64 {
        self.budget_bytes / self.unit_bytes.max(1)
    }
}

/// A unit that is needed and not in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Miss {
    /// The unit.
    pub unit: Unit,
    /// Steps of the logical clock until it is needed; 0 is now.
    pub deadline: u32,
}

/// What a policy decided in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Misses that become resident, in order of loading. A miss that is not admitted is used once and dropped.
    pub admit: Vec<Unit>,
    /// Resident units that make room; never a pinned one, never one accessed in this step.
    pub evict: Vec<Unit>,
}

/// A cache policy. Not shared between threads; the host owns the tables of what is resident and the pins, and checks
/// every decision against them.
///
/// The same sequence of calls gives the same decisions, always: a run can be replayed.
pub trait CachePolicy: Send {
    /// Sets the regions, forgetting everything.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a region that cannot hold one unit.
    fn configure(&mut self, regions: &[Region]) -> Result<()>;

    /// One layer of one step: what was accessed and found (`hits`), what was not (`misses`), what must stay (`pinned`).
    /// After the decision each region holds at most its capacity.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Error::InvalidArgument) for a region that was not configured, or where the pinned
    /// units alone exceed a region.
    fn step(&mut self, layer: u32, hits: &[Unit], misses: &[Miss], pinned: &[Unit]) -> Result<Decision>;
}
