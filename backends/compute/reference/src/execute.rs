//! One submission: slots resolved to memory, rows read as f64 and written as f32, operations in their order.

use crate::dequantise;
use crate::memory::View;
use crate::operations::{attention, experts, ffn, linear, norm, pointwise, rope};
use crate::quantise;
use engine_core::backend::{ActiveRanges, SequenceSpan};
use engine_core::operation::{Operation, OperationKind, OperationList, Quantization, SlotId};
use engine_core::{ClusterRange, Error, Result, TensorType};

/// A submission under way.
pub(crate) struct Run<'a> {
    /// What is run.
    pub(crate) list: &'a OperationList,
    /// The memory of each slot.
    pub(crate) views: Vec<View>,
    /// Tokens of this submission.
    pub(crate) tokens: usize,
    /// Which tokens belong to which sequence.
    pub(crate) sequences: &'a [SequenceSpan],
    /// Active neurons of FFN operations.
    pub(crate) ranges: &'a [ActiveRanges<'a>],
    /// Whether the arithmetic that descriptors state is applied, or left out.
    pub(crate) stated: bool,
    /// Most threads to use.
    pub(crate) threads: usize,
}

impl Run<'_> {
    /// Runs every operation.
    pub(crate) fn execute(&self) -> Result<()> {
        self.list.operations.iter().enumerate().try_for_each(|(index, operation)| self.one(index, operation))
    }

    fn one(&self, index: usize, operation: &Operation) -> Result<()> {
        match &operation.kind {
            OperationKind::Copy { from, to } => pointwise::copy(self, *from, *to),
            OperationKind::Embed { ids, table, output, scale } => {
                pointwise::embed(self, &operation.label, *ids, *table, *output, *scale)
            }
            OperationKind::Activate { function, input, output } => {
                pointwise::activate(self, *function, *input, *output)
            }
            OperationKind::Add { left, right, output } => {
                pointwise::combine(self, *left, *right, *output, |a, b| a + b)
            }
            OperationKind::Multiply { left, right, output } => {
                pointwise::combine(self, *left, *right, *output, |a, b| a * b)
            }
            OperationKind::Norm { norm, epsilon, input, weight, bias, output } => {
                norm::norm(self, *norm, *epsilon, *input, *weight, *bias, *output)
            }
            OperationKind::Linear { input, weight, bias, output, accumulate } => {
                linear::linear(self, operation.arithmetic, *input, *weight, *bias, *output, *accumulate)
            }
            OperationKind::Predict { input, fc1, fc2, mask, threshold } => {
                linear::predict(self, operation.arithmetic, *input, *fc1, *fc2, *mask, *threshold)
            }
            OperationKind::Rope(rope) => rope::rope(self, rope),
            OperationKind::KvAppend { key, value, cache, .. } => {
                attention::append(self, *key, *value, *cache)
            }
            OperationKind::Attention {
                query,
                cache,
                output,
                heads,
                kv_heads,
                head_dim,
                scale,
                window,
                soft_cap,
            } => {
                let heads = attention::Heads {
                    query: *heads as usize,
                    kv: *kv_heads as usize,
                    dim: *head_dim as usize,
                };
                let scores =
                    attention::Scores { scale: *scale, window: *window, soft_cap: soft_cap.map(f64::from) };
                attention::attention(self, *query, *cache, *output, heads, scores)
            }
            OperationKind::KvExport { cache, key, value, .. } => {
                attention::export(self, *cache, *key, *value)
            }
            OperationKind::KvImport { key, value, cache, .. } => {
                attention::import(self, *key, *value, *cache)
            }
            OperationKind::Ffn(ffn) => ffn::ffn(self, operation.arithmetic, ffn, self.active(index, ffn.up)),
            OperationKind::Route { scores, chosen, weights, gating, normalise, scale } => {
                experts::route(self, *scores, *chosen, *weights, (*gating, *normalise, *scale))
            }
            OperationKind::Experts(op) => experts::experts(self, &operation.label, operation.arithmetic, op),
            other => Err(Error::unsupported(format!("operation {}", other.name()))),
        }
    }

    /// The ranges of operation `index`: those bound, or all neurons.
    fn active(&self, index: usize, up: SlotId) -> Vec<ClusterRange> {
        match self.ranges.iter().find(|active| active.operation as usize == index) {
            Some(active) => active.ranges.to_vec(),
            None => vec![ClusterRange::new(0, self.tensor(up).rows as u32)],
        }
    }

    /// The type of a slot.
    pub(crate) fn tensor(&self, slot: SlotId) -> TensorType {
        self.list.slots[slot.0 as usize].tensor
    }

    /// The columns of a slot.
    pub(crate) fn columns(&self, slot: SlotId) -> usize {
        self.tensor(slot).columns as usize
    }

    /// Whether a slot has a row per token.
    pub(crate) fn is_per_token(&self, slot: SlotId) -> bool {
        self.list.slots[slot.0 as usize].per_token
    }

    /// The bytes of one row.
    pub(crate) fn row_bytes(&self, slot: SlotId, row: usize) -> Vec<u8> {
        let tensor = self.tensor(slot);
        let mut bytes = vec![0; tensor.row_bytes() as usize];
        self.views[slot.0 as usize].read(row as u64 * tensor.row_stride, &mut bytes);
        bytes
    }

    /// Writes the start of one row.
    pub(crate) fn write_row_bytes(&self, slot: SlotId, row: usize, bytes: &[u8]) {
        self.views[slot.0 as usize].write(row as u64 * self.tensor(slot).row_stride, bytes);
    }

    /// One row of any weight type (F32 and F16 are such) as f64.
    pub(crate) fn row(&self, slot: SlotId, row: usize) -> Vec<f64> {
        let mut values = vec![0.0; self.columns(slot)];
        dequantise::row(self.tensor(slot).dtype, &self.row_bytes(slot, row), &mut values);
        values
    }

    /// The rows of all tokens.
    pub(crate) fn token_rows(&self, slot: SlotId) -> Vec<Vec<f64>> {
        (0..self.tokens).map(|token| self.row(slot, token)).collect()
    }

    /// The rows of all tokens after the quantisation that a descriptor states.
    pub(crate) fn quantised_rows(&self, slot: SlotId, quantization: Quantization) -> Result<Vec<Vec<f64>>> {
        let mut rows = self.token_rows(slot);
        rows.iter_mut().try_for_each(|row| self.quantise(row, quantization))?;
        Ok(rows)
    }

    /// Quantises a row, unless this is the true oracle.
    pub(crate) fn quantise(&self, row: &mut [f64], quantization: Quantization) -> Result<()> {
        if self.stated { quantise::apply(quantization, row) } else { Ok(()) }
    }

    /// The one row of an optional vector.
    pub(crate) fn vector(&self, slot: Option<SlotId>) -> Option<Vec<f64>> {
        slot.map(|slot| self.row(slot, 0))
    }

    /// Writes one F32 row, rounding each value once.
    pub(crate) fn write_row(&self, slot: SlotId, row: usize, values: &[f64]) {
        let bytes: Vec<u8> = values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        self.write_row_bytes(slot, row, &bytes);
    }

    /// Cache row of each token and how many positions of its sequence precede it.
    pub(crate) fn positions(&self) -> impl Iterator<Item = Position> + '_ {
        self.sequences.iter().flat_map(|span| {
            (0..span.tokens).map(|n| Position {
                token: (span.first_token + n) as usize,
                position: span.past + n,
                cache_base: span.cache_base as usize,
            })
        })
    }
}

/// Where a token stands.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    /// Its row in per-token slots.
    pub(crate) token: usize,
    /// Its position in its sequence.
    pub(crate) position: u32,
    /// Row of the sequence's position 0 in the KV cache.
    pub(crate) cache_base: usize,
}
