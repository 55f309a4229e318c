//! Running operations: what each thread of the pool does for each kind, over checked memory.
//!
//! Everything here was validated at prepare and submit; the raw pointers of [`Env`] are to memory of the checked sizes.

pub(crate) mod attention;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod ffn;
pub(crate) mod input;
pub(crate) mod linear;
pub(crate) mod planes;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use engine_core::ClusterRange;
use engine_core::backend::SequenceSpan;
use engine_core::operation::SlotId;

use crate::kernels::Kernels;
use crate::kernels::format::{Matrix, WeightType};
use crate::kernels::matmul::Tile;
use crate::pool::Worker;

/// A slot as the kernels need it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    /// Index of its address.
    pub(crate) slot: usize,
    /// Bytes between rows.
    pub(crate) stride: usize,
    /// Elements of a row.
    pub(crate) columns: usize,
    /// Rows (the capacity, where per token).
    pub(crate) rows: usize,
    /// Bytes from the slot's address to row 0: where an expert's part of a slot starts.
    pub(crate) offset: usize,
}

/// A weight slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weight {
    /// Where.
    pub(crate) operand: Operand,
    /// Its type.
    pub(crate) format: WeightType,
    /// The low halves of a matrix in planes.
    pub(crate) low: Option<Operand>,
}

/// Where a token stands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Position {
    /// Within its sequence.
    pub(crate) position: u32,
    /// Row of the KV cache that holds its sequence's position 0.
    pub(crate) base: u32,
}

/// What one submission bound.
#[derive(Debug)]
pub(crate) struct Env {
    /// Address of every slot, by index.
    pub(crate) addresses: Vec<*mut u8>,
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// One per token; empty where nothing uses positions.
    pub(crate) positions: Vec<Position>,
    /// The submission's sequences.
    pub(crate) sequences: Vec<SequenceSpan>,
    /// Active ranges by operation, for those that have any.
    pub(crate) ranges: Vec<(usize, Vec<ClusterRange>)>,
}

// SAFETY: addresses of memory that the host leaves alone until the submission is reached.
unsafe impl Send for Env {}
// SAFETY: as above; threads of one job write disjoint parts, or in different phases.
unsafe impl Sync for Env {}

impl Env {
    /// Row `row` of an operand.
    #[inline]
    pub(crate) fn row(&self, operand: &Operand, row: usize) -> *mut u8 {
        self.addresses[operand.slot].wrapping_add(operand.offset + row * operand.stride)
    }

    /// Row `row` of an f32 operand.
    #[inline]
    pub(crate) fn f32(&self, operand: &Operand, row: usize) -> *mut f32 {
        self.row(operand, row).cast()
    }

    /// A vector that may be absent.
    pub(crate) fn optional(&self, operand: Option<&Operand>) -> *const f32 {
        operand.map_or(std::ptr::null(), |o| self.f32(o, 0).cast_const())
    }

    /// A weight's matrix.
    pub(crate) fn matrix(&self, weight: &Weight) -> Matrix {
        Matrix {
            data: self.addresses[weight.operand.slot].wrapping_add(weight.operand.offset),
            stride: weight.operand.stride,
            low: weight.low.map_or(std::ptr::null(), |low| self.row(&low, 0).cast_const()),
            low_stride: weight.low.map_or(0, |low| low.stride),
            columns: weight.operand.columns,
            format: weight.format,
        }
    }

    /// The active ranges of an operation; `None` means all neurons.
    pub(crate) fn ranges_of(&self, operation: usize) -> Option<&[ClusterRange]> {
        self.ranges.iter().find(|(index, _)| *index == operation).map(|(_, ranges)| ranges.as_slice())
    }
}

/// One thread's own memory, kept between submissions.
#[derive(Default)]
pub(crate) struct Local {
    /// Unpacked weights.
    pub(crate) tile: Tile,
    /// A single token's quantised input.
    pub(crate) input: input::Row,
    /// A single token's quantised hidden activations.
    pub(crate) hidden: input::Row,
    /// Neurons of a chunk, or of a token.
    pub(crate) list: Vec<u32>,
    /// Scores of a head.
    pub(crate) scores: Vec<f32>,
    /// Outputs as they were before something was added.
    pub(crate) saved: Vec<f32>,
    /// Rope angles of a token.
    pub(crate) angles: Vec<[f32; 2]>,
    /// Expert, token and column of every choice of a batch.
    pub(crate) choices: Vec<(u32, u32, u32)>,
}

/// Claim counters of one operation.
pub(crate) type Claims = [AtomicUsize; 3];

/// One thread at one operation.
pub(crate) struct Run<'a> {
    /// The tier's entry points.
    pub(crate) kernels: &'static Kernels,
    /// This thread.
    pub(crate) worker: &'a Worker<'a>,
    /// What is bound.
    pub(crate) env: &'a Env,
    /// Memory of the executable that all threads share.
    pub(crate) shared: &'a Shared,
    /// Its claim counters.
    pub(crate) claims: &'a Claims,
    /// Slots overlap: nothing may be used again without a look.
    pub(crate) careful: bool,
}

impl Run<'_> {
    /// The next part of `0..total`, at most `grain` long, that no other thread has; for phase `phase`.
    pub(crate) fn claim(&self, phase: usize, total: usize, grain: usize) -> Option<Range<usize>> {
        let start = self.claims[phase].fetch_add(grain, Relaxed);
        (start < total).then(|| start..total.min(start + grain))
    }

    /// Whether this thread does what only one thread should.
    pub(crate) fn is_first(&self) -> bool {
        self.worker.index == 0
    }

    /// Rows to claim at a time, for a matrix of `rows` rows: enough parts to balance threads, each worth a claim.
    pub(crate) fn grain(&self, rows: usize, row_bytes: usize, tokens: usize) -> usize {
        if tokens > 1 {
            // One tile, fewer where that leaves threads idle.
            let tile = crate::kernels::prefill::tile_rows(row_bytes);
            return tile.min(rows.div_ceil(self.worker.threads).next_multiple_of(6)).max(6);
        }
        let worth = (16 * 1024 / row_bytes.max(1)).max(1);
        (rows / (self.worker.threads * 8)).max(worth).next_multiple_of(4)
    }
}

/// Memory of an executable beside its scratch slots, at fixed places.
pub(crate) struct Shared {
    /// Address of the allocation; the executable owns it.
    pub(crate) base: *mut u8,
    /// Where the parts are.
    pub(crate) layout: SharedLayout,
}

// SAFETY: memory of the executable; submissions run one after the other, threads write disjoint parts per phase.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Offsets and strides of the parts of [`Shared`].
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedLayout {
    /// Quantised inputs.
    pub(crate) input: input::Area,
    /// Quantised hidden activations.
    pub(crate) hidden: input::Area,
    /// Gate, then the hidden activations: f32 rows of `neurons`.
    pub(crate) gate: usize,
    /// Up: f32 rows of `neurons`.
    pub(crate) up: usize,
    /// All ones where a neuron takes part: u32 rows of `neurons`.
    pub(crate) keep: usize,
    /// Elements of a row of the three.
    pub(crate) neurons: usize,
    /// Tokens that a sparse layer handles at a time.
    pub(crate) sparse_tokens: usize,
    /// Rope tables: a row of `[cos, sin]` per token for each.
    pub(crate) angles: Vec<usize>,
    /// Bytes in all.
    pub(crate) bytes: usize,
}

impl Shared {
    /// The part at `offset`.
    pub(crate) fn at<T>(&self, offset: usize) -> *mut T {
        self.base.wrapping_add(offset).cast()
    }
}

/// The index of a slot.
pub(crate) fn index(slot: SlotId) -> usize {
    slot.0 as usize
}
