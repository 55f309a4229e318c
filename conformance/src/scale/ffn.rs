//! Scales of feed-forward layers: errors of gate and up carried through function, product and down.

use super::{
    Decoded, Range, Scale, Scales, decode, decode_planes, dot_scale, input_rows, quantisation_steps,
    quantised, quantises_input, vector,
};
use crate::finding::{Fallible, Finding};
use crate::limits;
use crate::problem::Problem;
use crate::run::{Outputs, run_once};
use crate::values::f32_values;
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Ffn, OperationKind, Quantization, Selection,
};
use engine_core::{ComputeBackend, DType};

/// A scalar function in f64.
pub fn function_value(function: Activation, x: f64) -> f64 {
    match function {
        Activation::Relu => x.max(0.0),
        Activation::ReluSquared => x.max(0.0).powi(2),
        Activation::Silu => x / (1.0 + (-x).exp()),
        // Conditions need only be about right: one form serves both.
        Activation::GeluTanh | Activation::GeluErf => {
            x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        _ => x,
    }
}

/// Bound of the function's slope within `reach` of `x`.
pub fn slope_bound(function: Activation, x: f64, reach: f64) -> f64 {
    match function {
        Activation::Relu if x + reach <= 0.0 => 0.0,
        Activation::ReluSquared => 2.0 * (x + reach).max(0.0),
        Activation::Silu | Activation::GeluTanh | Activation::GeluErf => 1.14,
        _ => 1.0,
    }
}

/// A neuron's `h` for one token.
#[derive(Clone, Copy, Default)]
struct Hidden {
    value: f64,
    sum: f64,
    quantisation: f64,
    floor: f64,
    beyond: bool,
}

struct Layer<'a> {
    ffn: &'a Ffn,
    gate: Option<Decoded>,
    up: Decoded,
    gate_bias: Vec<f64>,
    up_bias: Vec<f64>,
    range: Range,
}

impl Layer<'_> {
    fn projection(&self, w: &Decoded, bias: f64, i: usize, x: &[f64], steps: Option<&[f64]>) -> (f64, Scale) {
        let value: f64 = w.row(i).iter().zip(x).map(|(w, x)| w * x).sum::<f64>() + bias;
        let mut scale = dot_scale(w.magnitude(i), x, steps, self.range);
        scale.sum += bias.abs();
        (value, scale)
    }

    fn hidden(&self, i: usize, x: &[f64], steps: Option<&[f64]>) -> Hidden {
        let (u, us) = self.projection(&self.up, self.up_bias[i], i, x, steps);
        let Some(gate) = &self.gate else {
            let reach = us.quantisation;
            let slope = slope_bound(self.ffn.function, u, reach + us.sum * self.range.edge);
            let value = function_value(self.ffn.function, u);
            return Hidden {
                value,
                sum: slope * us.sum + value.abs(),
                quantisation: slope * reach,
                floor: slope.max(1.0) * us.floor,
                beyond: us.beyond || self.range.is_left_by(value.abs()),
            };
        };
        let (g, gs) = self.projection(gate, self.gate_bias[i], i, x, steps);
        let slope = slope_bound(self.ffn.function, g, gs.quantisation + gs.sum * self.range.edge);
        let up_slope = slope_bound(self.ffn.up_function, u, us.quantisation + us.sum * self.range.edge);
        let (f, v) =
            (function_value(self.ffn.function, g).abs(), function_value(self.ffn.up_function, u).abs());
        let (df, dv) = (slope * gs.quantisation, up_slope * us.quantisation);
        let leaves = |magnitude: f64| self.range.is_left_by(magnitude);
        Hidden {
            beyond: gs.beyond || us.beyond || leaves(f) || leaves(v) || leaves(f * v),
            value: function_value(self.ffn.function, g) * function_value(self.ffn.up_function, u),
            // A neuron that is off contributes nothing even to first order; one that is near the edge does.
            sum: slope * gs.sum * v + f * up_slope * us.sum + f * v,
            quantisation: df * v + f * dv + df * dv,
            floor: slope.max(1.0) * gs.floor * (1.0 + v) + us.floor * (1.0 + f),
        }
    }
}

pub(super) fn ffn(
    problem: &Problem,
    ffn: &Ffn,
    arithmetic: Arithmetic,
    (oracle, stated): (&dyn ComputeBackend, &Outputs),
    range: Range,
) -> Fallible<Scales> {
    let fetch = |slot| decode(oracle, &problem.tensor(slot), problem.bytes(slot));
    let neurons = problem.tensor(ffn.up).rows as usize;
    let width = problem.tensor(ffn.input).columns as usize;
    let layer = Layer {
        ffn,
        gate: ffn.gate.map(|gate| decode_planes(oracle, problem, gate, ffn.gate_low)).transpose()?,
        up: decode_planes(oracle, problem, ffn.up, ffn.up_low)?,
        gate_bias: vector(problem, ffn.gate_bias, neurons),
        up_bias: vector(problem, ffn.up_bias, neurons),
        range,
    };
    let down = fetch(ffn.down)?;
    let ranges = problem.ranges.iter().find(|(op, _)| *op == 0).map(|(_, r)| r.as_slice());
    let active = |i: usize| ranges.is_none_or(|r| r.iter().any(|r| (r.start..r.end).contains(&(i as u32))));
    let mask = match ffn.selection {
        Selection::Mask(slot) => Some(problem.bytes(slot)),
        _ => None,
    };
    let quantises_hidden = arithmetic.hidden == Quantization::Int8Blocks;
    let hidden_values =
        if quantises_hidden { Some(stated_hidden(problem, ffn, oracle, stated)?) } else { None };
    let before = ffn.accumulate.then(|| input_rows(problem, ffn.output));
    let (mut outs, mut hiddens) = (Vec::new(), Vec::new());
    for (token, x) in input_rows(problem, ffn.input).into_iter().enumerate() {
        let steps = quantises_input(arithmetic).then(|| quantisation_steps(&x));
        let broken = quantises_input(arithmetic) && x.iter().any(|v| !v.is_finite());
        // What a neuron's error is carried through is its gate and up in the stated arithmetic.
        let x = if steps.is_some() { quantised(&x) } else { x };
        let taken = |i: usize| active(i) && mask.is_none_or(|m| m[token * neurons + i] != 0);
        let row: Vec<Hidden> = (0..neurons)
            .map(|i| {
                if !taken(i) {
                    return Hidden::default();
                }
                let mut h = layer.hidden(i, &x, steps.as_deref());
                if broken {
                    h.sum = f64::NAN;
                }
                h
            })
            .collect();
        hiddens.extend(row.iter().map(|h| Scale {
            sum: h.sum,
            quantisation: h.quantisation,
            tie: 0.0,
            floor: h.floor,
            beyond: h.beyond,
        }));
        let ties = match &hidden_values {
            Some(values) => ties(&values[token * neurons..(token + 1) * neurons], &row),
            None => vec![0.0; neurons],
        };
        let coarse = coarse_steps(quantises_hidden, &row);
        for column in 0..width {
            let mut scale = Scale { floor: range.tiny, ..Scale::default() };
            for i in (0..neurons).filter(|i| taken(*i)) {
                let at = match ffn.down_layout {
                    DownLayout::NeuronRows => i * width + column,
                    DownLayout::OutputRows => column * neurons + i,
                };
                let d = down.magnitudes[at];
                let h = &row[i];
                scale.sum += h.sum * d;
                scale.quantisation += (h.quantisation + coarse[i]) * d;
                scale.tie += ties[i] * d;
                scale.floor += h.floor * (1.0 + d);
                scale.beyond |= h.beyond || range.is_left_by(d);
            }
            if quantises_hidden && row.iter().any(|h| !h.sum.is_finite()) {
                scale.sum = f64::NAN;
            }
            scale.beyond |= range.is_left_by(scale.sum);
            scale.sum += before.as_ref().map_or(0.0, |b| b[token][column].abs());
            outs.push(scale);
        }
    }
    let mut scales = Scales::from([(ffn.output.0, outs)]);
    if let Some(slot) = ffn.hidden {
        scales.insert(slot.0, hiddens);
    }
    Ok(scales)
}

/// Half a step of each block of 32 neurons, against exact arithmetic.
fn coarse_steps(quantised: bool, row: &[Hidden]) -> Vec<f64> {
    if !quantised {
        return vec![0.0; row.len()];
    }
    row.chunks(32)
        .flat_map(|block| {
            let most = block.iter().fold(0.0f64, |m, h| m.max(h.value.abs() + h.quantisation));
            std::iter::repeat_n(most / 254.0 * 1.001, block.len())
        })
        .collect()
}

/// A whole step for each neuron whose `h` lies so near a tie that rounding decides its code.
fn ties(values: &[f32], row: &[Hidden]) -> Vec<f64> {
    let limit = limits::stated("ffn", DType::F32, engine_core::backend::ToleranceClass::F32).figure;
    let mut out = Vec::with_capacity(values.len());
    for (block, hidden) in values.chunks(32).zip(row.chunks(32)) {
        let most = block.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
        let most_error = hidden.iter().fold(0.0f64, |m, h| m.max(h.sum * limit + h.floor));
        for (v, h) in block.iter().zip(hidden) {
            if most == 0.0 {
                out.push(0.0);
                continue;
            }
            let code = f64::from(v.abs()) * 127.0 / most;
            let error = (h.sum * limit + h.floor + code / 127.0 * most_error) * 127.0 / most + 1e-4;
            let distance = (code.fract() - 0.5).abs();
            // Every code of the block also moves with the scale, by the relative error of its largest value.
            let drift = code / 127.0 * most_error;
            out.push(drift + if distance <= error { most / 127.0 } else { 0.0 });
        }
    }
    out
}

/// `h` as the oracle has it in the stated arithmetic.
fn stated_hidden(
    problem: &Problem,
    ffn: &Ffn,
    oracle: &dyn ComputeBackend,
    stated: &Outputs,
) -> Fallible<Vec<f32>> {
    if let Some(bytes) = ffn.hidden.and_then(|slot| stated.get(&slot.0)) {
        return Ok(f32_values(bytes));
    }
    let mut with = problem.clone();
    let neurons = problem.tensor(ffn.up).rows;
    let slot = with.rows_out("hidden", DType::F32, neurons)?;
    for operation in &mut with.list.operations {
        if let OperationKind::Ffn(ffn) = &mut operation.kind {
            ffn.hidden = Some(slot);
        }
    }
    let outputs = run_once(oracle, &with).map_err(|f| f.during("the oracle's hidden activations"))?;
    outputs
        .get(&slot.0)
        .map(|bytes| f32_values(bytes))
        .ok_or_else(|| Finding::new("suite", "the oracle gave no hidden activations"))
}
