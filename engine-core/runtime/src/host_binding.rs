//! Runs submissions or a read to their end with host memory bound: the one place that hands host memory to devices and
//! storage tiers.
#![expect(unsafe_code, reason = "a span of host memory is valid only as long as the work that uses it")]

use crate::resource::DeviceBuffer;
use crate::stages::Span;
use engine_core::backend::{
    ActiveRanges, Bindings, Bound, BufferUse, BufferView, ExecutableId, SequenceSpan, TimelineValue,
};
use engine_core::error::FOREVER;
use engine_core::operation::SlotId;
use engine_core::storage::{FileId, Read};
use engine_core::{ComputeBackend, HostMemory, HostSpan, Reached, Result, StorageTier};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// One submission of a chain.
pub(crate) struct Call<'a> {
    pub(crate) backend: &'a dyn ComputeBackend,
    pub(crate) executable: ExecutableId,
    /// Which of the chain's devices this is: values of one are in order.
    pub(crate) device: u32,
    pub(crate) buffers: Vec<(SlotId, BufferView)>,
    /// Slots of host memory, by index into the chain's.
    pub(crate) host: Vec<(SlotId, usize)>,
    pub(crate) ranges: Vec<ActiveRanges<'a>>,
    /// Calls before this one that must be done before it begins.
    pub(crate) waits: &'a [usize],
}

impl<'a> Call<'a> {
    pub(crate) fn new(backend: &'a dyn ComputeBackend, executable: ExecutableId) -> Call<'a> {
        let (buffers, host, ranges) = (Vec::new(), Vec::new(), Vec::new());
        Call { backend, executable, device: 0, buffers, host, ranges, waits: &[] }
    }
}

/// Submissions on several devices, in an order in which each comes behind what it waits for.
///
/// A call that waits for none of another device is submitted at once, so that devices run at the same time. Waits within
/// a device are passed on to it; for those between devices the host waits before it submits.
pub(crate) struct Chain<'a> {
    pub(crate) tokens: u32,
    pub(crate) sequences: &'a [SequenceSpan],
    /// Host memory that the calls are bound to; two may read one, and what writes one is waited for by those that read it.
    pub(crate) memory: Vec<&'a mut HostMemory>,
    pub(crate) calls: Vec<Call<'a>>,
}

impl Chain<'_> {
    /// Runs every call to its end.
    ///
    /// # Errors
    /// That of the first call that failed, with its index; nothing is under way any more when this returns.
    pub(crate) fn run(self) -> std::result::Result<Vec<Span>, (usize, engine_core::Error)> {
        let Chain { tokens, sequences, memory, calls } = self;
        let spans: Vec<HostSpan> = memory
            .iter()
            // SAFETY: `memory` borrows each uniquely, and `flight`, which is dropped before `memory`, waits for all work
            // that was submitted, however this function ends; so nothing else can touch or free it while a device may.
            .map(|memory| unsafe { memory.span() })
            .collect();
        let mut flight =
            Flight { calls: &calls, under_way: Vec::new(), spans: Vec::with_capacity(calls.len()) };
        for (at, call) in calls.iter().enumerate() {
            let of_others = call.waits.iter().filter(|wait| calls[**wait].device != call.device);
            of_others.copied().try_for_each(|wait| flight.finish(wait))?;
            let own = flight.under_way.iter().filter(|(under_way, _)| call.waits.contains(under_way));
            let waits: Vec<TimelineValue> = own.map(|(_, value)| *value).collect();
            let mut slots: Vec<(SlotId, Bound)> =
                call.buffers.iter().map(|(slot, view)| (*slot, Bound::Buffer(*view))).collect();
            slots.extend(call.host.iter().map(|(slot, index)| (*slot, Bound::Host(spans[*index]))));
            let bindings = Bindings { tokens, slots: &slots, sequences, ranges: &call.ranges };
            let submitted = Instant::now();
            let value =
                call.backend.submit(call.executable, &bindings, &waits).map_err(|error| (at, error))?;
            flight.under_way.push((at, value));
            flight.spans.push(Span { submitted, ended: None, waited: Duration::ZERO });
        }
        (0..calls.len()).try_for_each(|at| flight.finish(at))?;
        Ok(std::mem::take(&mut flight.spans))
    }
}

/// Calls that were submitted. Dropping it waits for those that are not done.
struct Flight<'c, 'a> {
    calls: &'c [Call<'a>],
    under_way: Vec<(usize, TimelineValue)>,
    spans: Vec<Span>,
}

impl Flight<'_, '_> {
    /// Waits for one call, if it is under way, and for those before it on its device, which end earlier anyway: so each
    /// has an end of its own. Notes which others are done as well.
    fn finish(&mut self, at: usize) -> std::result::Result<(), (usize, engine_core::Error)> {
        if self.under_way.iter().all(|(under_way, _)| *under_way != at) {
            return Ok(());
        }
        let device = self.calls[at].device;
        while let Some(index) =
            self.under_way.iter().position(|(other, _)| *other <= at && self.calls[*other].device == device)
        {
            let (call, value) = self.under_way.remove(index);
            self.wait(call, value).map_err(|error| (call, error))?;
        }
        self.look();
        Ok(())
    }

    /// Notes which calls are done.
    fn look(&mut self) {
        let now = Instant::now();
        for (other, value) in &self.under_way {
            // An error is told when that call is waited for.
            let done = self.calls[*other].backend.wait(*value, Duration::ZERO);
            if !matches!(done, Ok(Reached::TimedOut)) {
                self.spans[*other].ended.get_or_insert(now);
            }
        }
    }

    fn wait(&mut self, at: usize, value: TimelineValue) -> Result<()> {
        let from = Instant::now();
        let mut patience = FIRST_LOOK;
        let result = loop {
            // While other devices work, too, the host looks at them now and then, so that the end of each is known.
            let others = self.under_way.iter().any(|(other, _)| self.spans[*other].ended.is_none());
            let timeout = if others { patience } else { FOREVER };
            match self.calls[at].backend.wait(value, timeout) {
                Ok(Reached::TimedOut) => {
                    self.look();
                    patience = (patience * 2).min(LAST_LOOK);
                }
                Ok(_) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        let now = Instant::now();
        self.spans[at].waited += now - from;
        self.spans[at].ended.get_or_insert(now);
        result
    }
}

/// How long the host waits for one device before it looks at the others: at first, and at most.
const FIRST_LOOK: Duration = Duration::from_micros(50);
const LAST_LOOK: Duration = Duration::from_millis(1);

impl Drop for Flight<'_, '_> {
    fn drop(&mut self) {
        while let Some((at, _)) = self.under_way.first() {
            // The first error is told; what fails because of it, or beside it, is not.
            let _ = self.finish(*at);
        }
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

/// Memory of a device that stands where weights would be, in lists that are never run: zeroed memory of the host, which
/// nothing touches and which so takes none, where the device views such; an allocation where it does not.
pub(crate) struct StandIn {
    buffer: DeviceBuffer,
    /// Given back behind the view.
    _memory: Option<HostMemory>,
}

impl StandIn {
    pub(crate) fn new(backend: &Arc<dyn ComputeBackend>, bytes: u64) -> Result<StandIn> {
        if backend.describe().imports_host_memory {
            let memory = HostMemory::allocate(bytes)?;
            // SAFETY: the memory outlives the buffer, which is declared (and so dropped) before it, and nothing writes it.
            let span = unsafe { memory.span() };
            match DeviceBuffer::import(backend, span) {
                Ok(buffer) => return Ok(StandIn { buffer, _memory: Some(memory) }),
                Err(engine_core::Error::Unsupported { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let buffer = DeviceBuffer::allocate(backend, bytes, BufferUse::Weights)?;
        Ok(StandIn { buffer, _memory: None })
    }

    pub(crate) fn view(&self) -> BufferView {
        self.buffer.at(0)
    }
}

/// A span that is passed around and never followed, for tests of what passes it around.
#[cfg(test)]
pub(crate) fn unfollowed_span(len: u64) -> engine_core::HostSpan {
    // SAFETY: the fakes that receive it keep its numbers and never use the address.
    unsafe { engine_core::HostSpan::new(std::ptr::null::<u8>().wrapping_add(4096), len, false) }
}
