//! Which neurons of a layer with weights in planes take part: an estimate by the high halves decides, before the low
//! halves, and up and down, are read. See `Selection::Bitplane` of the contract.

use std::ops::Range;

use super::ffn::{Ffn, Layer, Select};
use super::{Local, Operand, Run, Weight};
use crate::kernels::format::{Matrix, WeightType};
use crate::kernels::matmul::Rows;
use crate::kernels::simd::LANES;
use crate::program::SPARSE_TOKENS;
use engine_core::operation::Activation;

/// `Selection::Bitplane`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaneRule {
    pub(crate) gate_deviation: Operand,
    pub(crate) up_deviation: Option<Operand>,
    pub(crate) down_norm: Option<Operand>,
    pub(crate) deviations: f32,
    pub(crate) threshold: f32,
}

/// Bytes of high halves that a chunk of neurons may have. Those of the survivors are read again, and should come from the
/// level-2 cache then.
const CHUNK_BYTES: usize = 256 * 1024;

impl PlaneRule {
    /// The most neurons of a chunk.
    pub(super) fn chunk(&self, op: &Ffn) -> usize {
        let estimates = 1 + usize::from(self.up_deviation.is_some());
        (CHUNK_BYTES / (estimates * op.up.operand.stride).max(1)).next_multiple_of(4).max(16)
    }
}

/// What one factor of the score is estimated from.
struct Factor<'a> {
    weight: &'a Weight,
    bias: Option<&'a Operand>,
    deviation: &'a Operand,
    function: Activation,
    /// Where the estimates go: token 0.
    out: *mut f32,
}

/// A norm per token that a sparse layer handles at a time.
pub(super) type Norms = [f32; SPARSE_TOKENS];

/// For layers that ask for none.
pub(super) const NO_NORMS: Norms = [0.0; SPARSE_TOKENS];

/// The Euclidean norms of some tokens' inputs, each summed in eight lanes, where the selection allows for deviations.
pub(super) fn input_norms(run: &Run<'_>, op: &Ffn, tokens: Range<usize>) -> Norms {
    let mut norms = NO_NORMS;
    if !matches!(&op.select, Select::Planes(rule) if rule.deviations != 0.0) {
        return norms;
    }
    for (norm, token) in norms.iter_mut().zip(tokens) {
        // SAFETY: a row of `columns` elements.
        let x = unsafe { std::slice::from_raw_parts(run.env.f32(&op.input, token), op.input.columns) };
        let mut lanes = [0.0f32; LANES];
        let (whole, rest) = x.as_chunks::<LANES>();
        for x in whole {
            lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane += x * x);
        }
        lanes.iter_mut().zip(rest).for_each(|(lane, x)| *lane += x * x);
        *norm = lanes.iter().sum::<f32>().sqrt();
    }
    norms
}

impl Layer<'_> {
    /// Marks the neurons of a chunk that are kept; `local.list` gets those of any token.
    pub(super) fn keep_by_planes(
        &self,
        rule: &PlaneRule,
        chunk: Range<usize>,
        active: &[Range<usize>],
        local: &mut Local,
    ) {
        let op = self.op;
        let Some(gate) = &op.gate else { return };
        let gate = Factor {
            weight: gate,
            bias: op.gate_bias.as_ref(),
            deviation: &rule.gate_deviation,
            function: op.function,
            out: self.hidden(0),
        };
        for range in active {
            self.estimate(rule, &gate, Rows::Range(range.start, range.end), local);
        }
        self.activate_chunk(&gate, &chunk);
        if let Some(deviation) = &rule.up_deviation {
            let up = Factor {
                weight: &op.up,
                bias: op.up_bias.as_ref(),
                deviation,
                function: op.up_function,
                out: self.up(0),
            };
            if op.function.is_zero_below() {
                // Where the first factor is zero, the second says nothing more.
                let mut list = std::mem::take(&mut local.list);
                list.clear();
                list.extend(active.iter().cloned().flatten().filter(|&i| self.any_gate(i)).map(|i| i as u32));
                self.estimate(rule, &up, Rows::List(&list), local);
                local.list = list;
            } else {
                for range in active {
                    self.estimate(rule, &up, Rows::Range(range.start, range.end), local);
                }
            }
            self.activate_chunk(&up, &chunk);
        }
        for range in active {
            for t in 0..self.tokens {
                self.decide(rule, range.clone(), t);
            }
        }
        self.list_kept(active, &mut local.list);
    }

    /// Marks those of a range whose score is above the threshold, or NaN. Which ones that are is as good as random: so
    /// nothing here branches by it.
    fn decide(&self, rule: &PlaneRule, range: Range<usize>, token: usize) {
        let (start, len) = (range.start, range.len());
        // SAFETY: the range lies within the shared rows, which this thread alone has there, and a norm per neuron.
        let (gate, up, keep, norms) = unsafe {
            let values = |p: *const f32| std::slice::from_raw_parts(p.add(start), len);
            (
                values(self.hidden(token)),
                rule.up_deviation.as_ref().map(|_| values(self.up(token))),
                std::slice::from_raw_parts_mut(self.keep(token).add(start), len),
                rule.down_norm.as_ref().map(|norm| values(self.run.env.f32(norm, 0))),
            )
        };
        let mark = |score: f32| if score <= rule.threshold { 0 } else { u32::MAX };
        match (up, norms) {
            (Some(up), Some(norms)) => {
                for (((keep, gate), up), norm) in keep.iter_mut().zip(gate).zip(up).zip(norms) {
                    *keep = mark(gate.abs() * up.abs() * norm);
                }
            }
            (Some(up), None) => {
                for ((keep, gate), up) in keep.iter_mut().zip(gate).zip(up) {
                    *keep = mark(gate.abs() * up.abs());
                }
            }
            (None, Some(norms)) => {
                for ((keep, gate), norm) in keep.iter_mut().zip(gate).zip(norms) {
                    *keep = mark(gate.abs() * norm);
                }
            }
            (None, None) => {
                for (keep, gate) in keep.iter_mut().zip(gate) {
                    *keep = mark(gate.abs());
                }
            }
        }
    }

    /// The estimates of some neurons, with what the rule allows for.
    fn estimate(&self, rule: &PlaneRule, factor: &Factor<'_>, rows: Rows<'_>, local: &mut Local) {
        let whole = self.run.env.matrix(factor.weight);
        let high = Matrix { low: std::ptr::null(), low_stride: 0, format: WeightType::HighHalves, ..whole };
        self.multiply_matrix(high, factor.weight, factor.bias, rows, factor.out, &mut local.tile);
        if rule.deviations == 0.0 {
            return;
        }
        let deviations = self.run.env.f32(factor.deviation, 0);
        for t in 0..self.tokens {
            let out = factor.out.wrapping_add(t * self.stride());
            let norm = self.norms[t];
            // SAFETY: a deviation per neuron; the neurons lie within the shared rows.
            unsafe {
                match rows {
                    Rows::Range(start, end) => {
                        let out = std::slice::from_raw_parts_mut(out.add(start), end - start);
                        let deviations = std::slice::from_raw_parts(deviations.add(start), end - start);
                        for (out, deviation) in out.iter_mut().zip(deviations) {
                            *out += rule.deviations * deviation * norm;
                        }
                    }
                    Rows::List(list) => {
                        for i in list.iter().map(|&i| i as usize) {
                            *out.add(i) += rule.deviations * *deviations.add(i) * norm;
                        }
                    }
                }
            }
        }
    }

    /// The high halves of the kept rows were read for the estimate already: they count once.
    pub(super) fn forget_estimated(&self, weight: &Weight, local: &mut Local) {
        if matches!(self.op.select, Select::Planes(_)) {
            let again = (local.list.len() * weight.operand.stride) as u64;
            local.tile.read = local.tile.read.saturating_sub(again);
        }
    }

    fn activate_chunk(&self, factor: &Factor<'_>, chunk: &Range<usize>) {
        for t in 0..self.tokens {
            let out = factor.out.wrapping_add(t * self.stride() + chunk.start);
            self.activate(factor.function, out, chunk.len());
        }
    }

    /// Whether any token's activated gate is not zero.
    fn any_gate(&self, neuron: usize) -> bool {
        // SAFETY: the neuron lies within the shared rows.
        (0..self.tokens).any(|t| unsafe { *self.hidden(t).add(neuron) } != 0.0)
    }

    /// Takes out of the kept neurons those whose gate is zero after all; `list` keeps those of any token.
    pub(super) fn drop_zero_gates(&self, list: &mut Vec<u32>) {
        let mut count = 0;
        for at in 0..list.len() {
            let i = list[at];
            let mut any = 0;
            for t in 0..self.tokens {
                // SAFETY: the neuron lies within the shared rows.
                unsafe {
                    let keep = self.keep(t).add(i as usize);
                    // A mark is all ones. As good as random, so without branches.
                    *keep &= u32::from(*self.hidden(t).add(i as usize) != 0.0).wrapping_neg();
                    any |= *keep;
                }
            }
            list[count] = i;
            count += usize::from(any != 0);
        }
        list.truncate(count);
    }
}
