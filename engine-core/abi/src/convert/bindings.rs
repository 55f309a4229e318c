//! Bindings of a submission.

use super::codes::place;
use super::raw::{check_size, one, slice, unused};
use super::storage::{span_from_abi, span_to_abi};
use crate::{ActiveRanges, Binding, Bindings, BufferView, ClusterRange, HostSpan, Place, SequenceSpan};
use engine_core::Result;
use engine_core::backend::{self, Bound, BufferId};
use engine_core::operation::SlotId;
use std::marker::PhantomData;

/// Bindings as the boundary has them.
pub struct BindingsDescriptor<'a> {
    tokens: u32,
    slots: Vec<Binding>,
    sequences: Vec<SequenceSpan>,
    ranges: Vec<ActiveRanges>,
    // What `ranges` points into.
    _clusters: Vec<ClusterRange>,
    bindings: PhantomData<&'a backend::Bindings<'a>>,
}

impl<'a> BindingsDescriptor<'a> {
    /// Describes `bindings`.
    pub fn new(bindings: &'a backend::Bindings<'a>) -> BindingsDescriptor<'a> {
        let count = bindings.ranges.iter().map(|active| active.ranges.len()).sum();
        let mut clusters: Vec<ClusterRange> = Vec::with_capacity(count);
        for active in bindings.ranges {
            clusters.extend(active.ranges.iter().map(|r| ClusterRange { start: r.start, end: r.end }));
        }
        let mut rest = clusters.as_slice();
        let ranges = bindings
            .ranges
            .iter()
            .map(|active| {
                let (own, after) = rest.split_at(active.ranges.len());
                rest = after;
                ActiveRanges {
                    operation: active.operation,
                    reserved: 0,
                    ranges: own.as_ptr(),
                    ranges_len: own.len(),
                }
            })
            .collect();
        BindingsDescriptor {
            tokens: bindings.tokens,
            slots: bindings.slots.iter().map(binding_to_abi).collect(),
            sequences: bindings.sequences.iter().map(sequence_to_abi).collect(),
            ranges,
            _clusters: clusters,
            bindings: PhantomData,
        }
    }

    /// The struct to pass; it borrows from this value.
    pub fn as_abi(&self) -> Bindings {
        Bindings {
            struct_size: size_of::<Bindings>() as u32,
            tokens: self.tokens,
            slots: self.slots.as_ptr(),
            slots_len: self.slots.len(),
            sequences: self.sequences.as_ptr(),
            sequences_len: self.sequences.len(),
            ranges: self.ranges.as_ptr(),
            ranges_len: self.ranges.len(),
            reserved: [0; 4],
        }
    }
}

fn sequence_to_abi(span: &backend::SequenceSpan) -> SequenceSpan {
    SequenceSpan {
        first_token: span.first_token,
        tokens: span.tokens,
        past: span.past,
        cache_base: span.cache_base,
    }
}

fn binding_to_abi((slot, bound): &(SlotId, Bound)) -> Binding {
    let no_span = HostSpan { address: std::ptr::null_mut(), len: 0, writable: 0, reserved: 0 };
    match bound {
        Bound::Buffer(view) => Binding {
            slot: slot.0,
            place: Place::DEVICE,
            buffer: BufferView { buffer: view.buffer.0, offset: view.offset },
            host: no_span,
        },
        Bound::Host(span) => Binding {
            slot: slot.0,
            place: Place::HOST,
            buffer: BufferView { buffer: 0, offset: 0 },
            host: span_to_abi(*span),
        },
    }
}

/// Bindings that were read from the boundary.
pub struct BindingsOwned {
    tokens: u32,
    slots: Vec<(SlotId, Bound)>,
    sequences: Vec<backend::SequenceSpan>,
    ranges: Vec<(u32, Vec<engine_core::ClusterRange>)>,
}

impl BindingsOwned {
    /// Copies what a descriptor describes. Its rules ([`backend::Bindings::validate`]) are still to be checked.
    ///
    /// # Errors
    /// [`engine_core::Error::InvalidArgument`] for pointers and sizes that are wrong,
    /// [`engine_core::Error::Unsupported`] for unknown codes.
    ///
    /// # Safety
    /// Every pointer in the descriptor that is not null leads to as many values as its length says, unchanged during
    /// the call; host spans obey [`engine_core::HostSpan::new`].
    pub unsafe fn from_abi(bindings: *const Bindings) -> Result<BindingsOwned> {
        // SAFETY: the caller's promise.
        let bindings = unsafe { one(bindings, "bindings") }?;
        check_size::<Bindings>(bindings.struct_size, "bindings")?;
        unused(&bindings.reserved, "bindings")?;
        // SAFETY: the caller's promise.
        let slots = unsafe { slice(bindings.slots, bindings.slots_len, "bound slots") }?;
        // SAFETY: the caller's promise.
        let sequences = unsafe { slice(bindings.sequences, bindings.sequences_len, "sequences") }?;
        // SAFETY: the caller's promise.
        let ranges = unsafe { slice(bindings.ranges, bindings.ranges_len, "active ranges") }?;
        Ok(BindingsOwned {
            tokens: bindings.tokens,
            // SAFETY: the caller's promise.
            slots: slots.iter().map(|b| unsafe { binding_from_abi(b) }).collect::<Result<_>>()?,
            sequences: sequences
                .iter()
                .map(|s| backend::SequenceSpan {
                    first_token: s.first_token,
                    tokens: s.tokens,
                    past: s.past,
                    cache_base: s.cache_base,
                })
                .collect(),
            ranges: ranges
                .iter()
                .map(|active| {
                    unused(&[active.reserved.into()], "active ranges")?;
                    // SAFETY: the caller's promise.
                    let clusters = unsafe { slice(active.ranges, active.ranges_len, "cluster ranges") }?;
                    let clusters =
                        clusters.iter().map(|r| engine_core::ClusterRange::new(r.start, r.end)).collect();
                    Ok((active.operation, clusters))
                })
                .collect::<Result<_>>()?,
        })
    }

    /// Calls `f` with the bindings as engine-core has them.
    pub fn with<R>(&self, f: impl FnOnce(&backend::Bindings<'_>) -> R) -> R {
        let ranges: Vec<backend::ActiveRanges<'_>> = self
            .ranges
            .iter()
            .map(|(operation, ranges)| backend::ActiveRanges { operation: *operation, ranges })
            .collect();
        f(&backend::Bindings {
            tokens: self.tokens,
            slots: &self.slots,
            sequences: &self.sequences,
            ranges: &ranges,
        })
    }
}

unsafe fn binding_from_abi(binding: &Binding) -> Result<(SlotId, Bound)> {
    let bound = match place(binding.place)? {
        engine_core::operation::Place::Device => Bound::Buffer(backend::BufferView {
            buffer: BufferId(binding.buffer.buffer),
            offset: binding.buffer.offset,
        }),
        // SAFETY: the caller's promise.
        engine_core::operation::Place::Host => Bound::Host(unsafe { span_from_abi(&binding.host) }?),
    };
    Ok((SlotId(binding.slot), bound))
}
