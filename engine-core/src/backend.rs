//! `ComputeBackend`: one device that can say what it runs, prepare it, and run it.
//!
//! # Who checks what
//! The host (the loader's adapter) validates every list with [`OperationList::validate`] and every binding with
//! [`Bindings::validate`] before a backend sees them, and the author-side adapter does it again for callers that come
//! through the C table: a backend may rely on those rules. What only the backend can check, it must: that handles
//! exist, that bound memory is long enough and aligned, that ids lie within a table. Such mistakes are errors, never
//! crashes, and nothing is written when one is found at `submit`.
//!
//! # Time
//! `submit` copies its descriptors, queues the work and returns a value of the backend's timeline, a number that grows
//! with every submission. Submissions take effect in the order of their values. `wait` answers for one value; an error
//! of the work is `wait`'s error, for that value and (as [`crate::Error::DependencyFailed`]) for every submission that named it
//! in its `waits`. The host keeps bound memory alive until the value is reached, and resolves waits between backends.

use crate::operation::{OperationList, SlotId};
use crate::{ClusterRange, HostSpan, Reached, Result};
use std::time::Duration;

/// A handle of memory on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u64);

/// A handle of a prepared list of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExecutableId(pub u64);

/// A point on a timeline: one submission (of a backend) or one read (of a storage tier).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimelineValue(pub u64);

/// A place within a buffer; its length is that of the slot it is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferView {
    /// The buffer.
    pub buffer: BufferId,
    /// Byte offset of the slot's first row.
    pub offset: u64,
}

/// What a buffer is for; a hint for placement in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferUse {
    /// Written once, read often.
    Weights,
    /// A KV cache.
    KvCache,
    /// Activations, ids, logits.
    Activations,
}

/// A device's answer to "can you run this operation".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Support {
    /// It cannot; the reason is a sentence for a person (which dtype, which limit, what is missing).
    No {
        /// Why not.
        reason: String,
    },
    /// It can.
    Yes,
    /// It can, and it is what the device is best at.
    Preferred,
}

impl Support {
    /// `No` with this reason.
    pub fn no(reason: impl Into<String>) -> Support {
        Support::No { reason: reason.into() }
    }

    /// Whether the operation can be run.
    pub fn is_yes(&self) -> bool {
        !matches!(self, Support::No { .. })
    }
}

/// The numeric class of a device, which decides the limits that conformance holds it to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ToleranceClass {
    /// f64 arithmetic: the oracle.
    Exact64,
    /// f32 products and sums.
    F32,
    /// f16 factors, products or sums (NPUs, some GPU paths), and f16's range: what is larger than 65504 may become infinite,
    /// what is smaller than 2^-24 zero.
    F16,
}

impl ToleranceClass {
    /// Name, as in reports and at the boundary.
    pub fn name(self) -> &'static str {
        match self {
            ToleranceClass::Exact64 => "f64",
            ToleranceClass::F32 => "f32",
            ToleranceClass::F16 => "f16",
        }
    }
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceDescription {
    /// The name that the config uses for it, unique within its plug-in, such as `cpu` or `vulkan:0`.
    pub name: String,
    /// What it is, for people, such as the processor's or driver's own name.
    pub description: String,
    /// Numeric class.
    pub tolerance: ToleranceClass,
    /// Bytes of memory that may be allocated; 0 where it is not known.
    pub memory_bytes: u64,
    /// Alignment that bound offsets and imported addresses need, in bytes (at least the dtype's own).
    pub alignment: u64,
    /// Whether [`ComputeBackend::import`] can view ordinary host memory without a copy.
    pub imports_host_memory: bool,
    /// Whether weights should be constants, since the device compiles them into its executables: as inputs some are denied, and
    /// the others are converted for every submission.
    pub needs_constant_weights: bool,
    /// The largest single buffer, in bytes; 0 where there is no limit but memory.
    pub max_buffer_bytes: u64,
    /// Choices that it made and why, a sentence each (kernel tier, threads and their reason, driver paths).
    pub notes: Vec<String>,
}

/// What a slot is bound to for one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A place in a buffer, for device slots.
    Buffer(BufferView),
    /// Host memory, for host slots.
    Host(HostSpan),
}

/// Consecutive tokens of a submission that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceSpan {
    /// Index of its first token within the submission.
    pub first_token: u32,
    /// Number of its tokens.
    pub tokens: u32,
    /// Positions of the sequence that are in the KV cache already; the first token's position.
    pub past: u32,
    /// Where the sequence's position 0 lies within the KV cache, in positions.
    pub cache_base: u32,
}

/// The neurons that one FFN operation covers in one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActiveRanges<'a> {
    /// Index of the operation in its list.
    pub operation: u32,
    /// Sorted, disjoint ranges; none means no neuron.
    pub ranges: &'a [ClusterRange],
}

/// Everything that is fixed only when a list is submitted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bindings<'a> {
    /// Number of tokens; at most the list's capacity.
    pub tokens: u32,
    /// Memory for every input, output and state slot.
    pub slots: &'a [(SlotId, Bound)],
    /// Which tokens belong to which sequence, in order, covering all tokens. May be empty where no operation of the
    /// list uses positions.
    pub sequences: &'a [SequenceSpan],
    /// Active ranges of FFN operations; an operation that is not named covers all its neurons.
    pub ranges: &'a [ActiveRanges<'a>],
}

/// A named count that a backend keeps, such as `submissions` or `bytes_allocated`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Name in lower case with underscores.
    pub name: String,
    /// Value since the device was opened (or the present one, for amounts).
    pub value: u64,
}

/// One device. All methods may be called from any thread.
///
/// The host owns the lifetime of every buffer and executable; the backend owns what its handles name. Dropping the
/// backend waits for work under way and frees everything.
pub trait ComputeBackend: Send + Sync {
    /// What the device is. Constant for the backend's lifetime.
    fn describe(&self) -> &DeviceDescription;

    /// Whether operation `index` of `list` can be run with these slots. A `Yes` binds: preparing and submitting such an
    /// operation must then succeed unless memory runs out. Looks at types and parameters, never at memory.
    fn supports(&self, list: &OperationList, index: usize) -> Support;

    /// Device memory of `bytes`, content undefined. Counts against the device's budget.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::Error::OutOfMemory), [`InvalidArgument`](crate::Error::InvalidArgument) for 0 bytes.
    fn allocate(&self, bytes: u64, purpose: BufferUse) -> Result<BufferId>;

    /// A view of host memory as a buffer, without a copy. Read only unless the span is writable.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Error::Unsupported) where the device cannot, or the address is not aligned for it.
    fn import(&self, span: HostSpan) -> Result<BufferId>;

    /// Gives a buffer back. The host calls it only when every submission that uses the buffer has been reached and
    /// every executable that holds it as a constant was released.
    ///
    /// # Errors
    /// [`UnknownHandle`](crate::Error::UnknownHandle), also for a second free.
    fn free(&self, buffer: BufferId) -> Result<()>;

    /// Turns a list into something that can be submitted many times, from several threads. May compile, may convert
    /// constants, may cache on disk. What depends on active ranges is known at submit only, so a static device compiles that
    /// with the first submission that names a set of ranges, and its errors are that submission's.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Error::Unsupported) for an operation that `supports` denies; handle and memory errors.
    fn prepare(&self, list: &OperationList) -> Result<ExecutableId>;

    /// Gives an executable back; submissions under way finish first.
    ///
    /// # Errors
    /// [`UnknownHandle`](crate::Error::UnknownHandle), also for a second release.
    fn release(&self, executable: ExecutableId) -> Result<()>;

    /// Queues one run. `waits` are values of this backend's own timeline.
    ///
    /// # Errors
    /// Mistakes in handles and bindings are found here, before anything is written.
    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue>;

    /// Waits until the submission with this value is done, at most `timeout` (zero: only asks). May be called several
    /// times, by several threads.
    ///
    /// # Errors
    /// The work's own error; [`UnknownHandle`](crate::Error::UnknownHandle) for a value that was never returned.
    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached>;

    /// Counts that explain what the device did. Every backend has `submissions` (runs executed on the device),
    /// `bytes_allocated` (memory in use, imports not counted) and `bytes_allocated_peak`.
    fn counters(&self) -> Vec<Counter>;
}
