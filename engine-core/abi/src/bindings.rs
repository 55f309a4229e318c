//! What is fixed only when a list is submitted.

use crate::{BufferView, ClusterRange, HostSpan, Place};
use abi_stable::StableAbi;

/// The memory of one slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Binding {
    /// Index of the slot.
    pub slot: u32,
    /// Which of the two below counts.
    pub place: Place,
    /// For device slots; zero otherwise.
    pub buffer: BufferView,
    /// For host slots; zero otherwise.
    pub host: HostSpan,
}

/// Consecutive tokens of a submission that belong to one sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
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

/// The neurons that one FFN operation covers.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct ActiveRanges {
    /// Index of the operation in its list.
    pub operation: u32,
    /// Zero.
    pub reserved: u32,
    /// Sorted, disjoint ranges.
    pub ranges: *const ClusterRange,
    /// Number of ranges; none means no neuron.
    pub ranges_len: usize,
}

/// Everything that one submission adds to a list.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Bindings {
    /// Bytes of this struct.
    pub struct_size: u32,
    /// Number of tokens; at most the list's capacity.
    pub tokens: u32,
    /// Memory for every input, output and state slot.
    pub slots: *const Binding,
    /// Number of bindings.
    pub slots_len: usize,
    /// Which tokens belong to which sequence.
    pub sequences: *const SequenceSpan,
    /// Number of sequences.
    pub sequences_len: usize,
    /// Active ranges of FFN operations; one that is not named covers all its neurons.
    pub ranges: *const ActiveRanges,
    /// Number of FFN operations that are named.
    pub ranges_len: usize,
    /// Zero.
    pub reserved: [u64; 4],
}
