//! Weights whose 8-bit codes lie in two halves, and the selection by the high ones.

use super::functions::activate;
use super::linear::Columns;
use crate::execute::Run;
use engine_core::Result;
use engine_core::operation::{Activation, Bitplane, Ffn, SlotId};

/// The middle of what the low half of a code may add, in units of the high half.
const MIDDLE: f64 = 7.5 / 16.0;

/// A matrix, with its low halves where it is in planes.
#[derive(Clone, Copy)]
pub(super) struct Halves {
    pub(super) high: SlotId,
    pub(super) low: Option<SlotId>,
}

impl Halves {
    /// A row's values: of planes `D/16 * (16 (q - 8) + l)`, where `D (q - 8)` is what Q4_0 says.
    pub(super) fn row(self, run: &Run<'_>, i: usize) -> Vec<f64> {
        let mut row = run.row(self.high, i);
        let Some(low) = self.low else { return row };
        let scales = scales(run, self.high, i);
        for (block, bytes) in run.row_bytes(low, i).chunks_exact(16).enumerate() {
            for (j, byte) in bytes.iter().enumerate() {
                let scale = scales[block] / 16.0;
                row[block * 32 + j] += scale * f64::from(byte & 15);
                row[block * 32 + 16 + j] += scale * f64::from(byte >> 4);
            }
        }
        row
    }

    /// The row as far as the high halves tell.
    fn estimate(self, run: &Run<'_>, i: usize) -> Vec<f64> {
        let mut row = run.row(self.high, i);
        let scales = scales(run, self.high, i);
        for (block, scale) in row.chunks_mut(32).zip(scales) {
            block.iter_mut().for_each(|value| *value += scale * MIDDLE);
        }
        row
    }
}

/// The scale of each block of a Q4_0 row.
fn scales(run: &Run<'_>, slot: SlotId, i: usize) -> Vec<f64> {
    let bytes = run.row_bytes(slot, i);
    bytes.chunks_exact(18).map(|block| half::f16::from_le_bytes([block[0], block[1]]).to_f64()).collect()
}

/// `Selection::Bitplane` of a layer.
pub(super) struct Rule<'a> {
    run: &'a Run<'a>,
    ffn: &'a Ffn,
    rule: Bitplane,
    inputs: &'a Columns,
    /// Euclidean norms of the tokens' inputs as they were given.
    norms: Vec<f64>,
    gate_deviation: Vec<f64>,
    up_deviation: Option<Vec<f64>>,
    down_norm: Option<Vec<f64>>,
    gate_bias: Option<Vec<f64>>,
    up_bias: Option<Vec<f64>>,
}

impl<'a> Rule<'a> {
    pub(super) fn new(run: &'a Run<'a>, ffn: &'a Ffn, rule: Bitplane, inputs: &'a Columns) -> Rule<'a> {
        let norm = |t| run.row(ffn.input, t).iter().map(|x| x * x).sum::<f64>().sqrt();
        Rule {
            run,
            ffn,
            rule,
            inputs,
            norms: (0..run.tokens).map(norm).collect(),
            gate_deviation: run.vector(Some(rule.gate_deviation)).unwrap_or_default(),
            up_deviation: run.vector(rule.up_deviation),
            down_norm: run.vector(rule.down_norm),
            gate_bias: run.vector(ffn.gate_bias),
            up_bias: run.vector(ffn.up_bias),
        }
    }

    /// Whether neuron `i` is kept, for each token.
    pub(super) fn keeps(&self, i: usize) -> Result<Vec<bool>> {
        let mut scores = vec![self.down_norm.as_ref().map_or(1.0, |norms| norms[i]); self.run.tokens];
        if let Some(gate) = self.ffn.gate {
            let gate = Halves { high: gate, low: self.ffn.gate_low };
            self.factor(&mut scores, gate, i, &self.gate_bias, self.gate_deviation[i], self.ffn.function)?;
        }
        if let Some(deviations) = &self.up_deviation {
            let up = Halves { high: self.ffn.up, low: self.ffn.up_low };
            self.factor(&mut scores, up, i, &self.up_bias, deviations[i], self.ffn.up_function)?;
        }
        let threshold = f64::from(self.rule.threshold);
        Ok(scores.into_iter().map(|score| score > threshold || score.is_nan()).collect())
    }

    fn factor(
        &self,
        scores: &mut [f64],
        weight: Halves,
        i: usize,
        bias: &Option<Vec<f64>>,
        deviation: f64,
        function: Activation,
    ) -> Result<()> {
        let bias = bias.as_ref().map_or(0.0, |bias| bias[i]);
        let dots = self.inputs.dots(&weight.estimate(self.run, i));
        for ((score, dot), norm) in scores.iter_mut().zip(dots).zip(&self.norms) {
            let allowed = match self.rule.deviations {
                0.0 => 0.0,
                deviations => f64::from(deviations) * deviation * norm,
            };
            *score *= activate(function, dot + bias + allowed)?.abs();
        }
        Ok(())
    }
}
