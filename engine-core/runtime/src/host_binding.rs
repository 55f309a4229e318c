//! Runs one submission or read to its end with host memory bound: the one place that hands host memory to devices and
//! storage tiers.
#![expect(unsafe_code, reason = "a span of host memory is valid only as long as the work that uses it")]

use engine_core::backend::{ActiveRanges, Bindings, Bound, BufferView, ExecutableId, SequenceSpan};
use engine_core::error::FOREVER;
use engine_core::operation::SlotId;
use engine_core::storage::{FileId, Read};
use engine_core::{ComputeBackend, HostMemory, Reached, Result, StorageTier};
use std::ops::Range;

/// What one submission is bound to.
#[derive(Default)]
pub(crate) struct Submission<'a> {
    pub(crate) tokens: u32,
    pub(crate) device: Vec<(SlotId, BufferView)>,
    pub(crate) host: Vec<(SlotId, &'a mut HostMemory)>,
    pub(crate) sequences: Vec<SequenceSpan>,
    pub(crate) ranges: Vec<ActiveRanges<'a>>,
}

impl Submission<'_> {
    /// Submits and waits until the work is done.
    pub(crate) fn run(self, backend: &dyn ComputeBackend, executable: ExecutableId) -> Result<()> {
        let mut slots: Vec<(SlotId, Bound)> =
            self.device.iter().map(|(slot, view)| (*slot, Bound::Buffer(*view))).collect();
        for (slot, memory) in &self.host {
            // SAFETY: `self` borrows the memory uniquely and is not given up before `wait` says that the work has
            // ended (done or failed), so nothing else can touch or free it while the device may.
            let span = unsafe { memory.span() };
            slots.push((*slot, Bound::Host(span)));
        }
        let bindings =
            Bindings { tokens: self.tokens, slots: &slots, sequences: &self.sequences, ranges: &self.ranges };
        let value = backend.submit(executable, &bindings, &[])?;
        while backend.wait(value, FOREVER)? == Reached::TimedOut {}
        Ok(())
    }
}

/// Bytes of a file, read by a tier into memory of our own. Where the tier reads whole blocks only, more than `range` is
/// read; the second part of the answer is where `range` lies in the memory.
pub(crate) fn read(
    storage: &dyn StorageTier,
    file: FileId,
    range: Range<u64>,
) -> Result<(HostMemory, Range<usize>)> {
    let unit = storage.describe().alignment.max(1);
    let start = range.start - range.start % unit;
    let end = range.end.next_multiple_of(unit).min(storage.len(file)?.max(range.end));
    let memory = HostMemory::allocate(end - start)?;
    // SAFETY: the memory outlives the read, which is waited for below, and is not touched before that.
    let into = unsafe { memory.span() };
    let value = storage.read(&[Read { file, range: start..end, into, priority: 0 }])?;
    while storage.wait(value, FOREVER)? == Reached::TimedOut {}
    let from = (range.start - start) as usize; // less than the alignment
    Ok((memory, from..from + (range.end - range.start) as usize))
}

/// A span that is passed around and never followed, for tests of what passes it around.
#[cfg(test)]
pub(crate) fn unfollowed_span(len: u64) -> engine_core::HostSpan {
    // SAFETY: the fakes that receive it keep its numbers and never use the address.
    unsafe { engine_core::HostSpan::new(std::ptr::null::<u8>().wrapping_add(4096), len, false) }
}
