//! Weights in planes, and selections by their high halves.

use super::ffn::{FfnSpec, quiet_threshold};
use crate::finding::Fallible;
use crate::problem::{Content, Problem, UNPLACED};
use crate::rng::Rng;
use crate::scale::{decode, function_value, input_rows, q4_scales, quantised};
use crate::values::{ValueClass, f32_bytes, f32_values, numbers};
use engine_core::operation::{Activation, Bitplane, Ffn, Selection, SlotId, SlotRole};
use engine_core::{ComputeBackend, DType, TensorType};

/// Which weights are in planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlaneShape {
    /// None.
    None,
    /// The gate.
    Gate,
    /// Gate and up.
    GateUp,
    /// Up.
    Up,
}

impl PlaneShape {
    /// Name, as in case names.
    pub fn name(self) -> &'static str {
        match self {
            PlaneShape::None => "whole",
            PlaneShape::Gate => "planes-gate",
            PlaneShape::GateUp => "planes-gate-up",
            PlaneShape::Up => "planes-up",
        }
    }
}

/// Low halves for the high ones in `high`.
pub(super) fn low_halves(
    problem: &mut Problem,
    rng: &mut Rng,
    name: &str,
    high: SlotId,
    constant: bool,
) -> Fallible<SlotId> {
    let shape = problem.tensor(high);
    let tensor = TensorType::matrix(DType::I8, shape.rows, shape.columns / 2)?;
    let bytes = (0..tensor.bytes()).map(|_| rng.bits() as u8).collect();
    let role = if constant { UNPLACED } else { SlotRole::Input };
    Ok(problem.fixed(name, role, tensor, Content::Bytes(bytes)))
}

/// A vector of numbers that are not negative, `scale` in size.
fn sizes(problem: &mut Problem, rng: &mut Rng, name: &str, columns: u64, scale: f32) -> SlotId {
    let values = numbers(rng, ValueClass::Plain, columns as usize);
    let values: Vec<f32> = values.into_iter().map(|x| x.abs() * scale).collect();
    problem.fixed(name, UNPLACED, TensorType::f32_vector(columns), Content::Bytes(f32_bytes(&values)))
}

impl FfnSpec {
    /// The selection by high halves; with a finite number of deviations, and a threshold that no neuron is near.
    pub(super) fn bitplane(
        &self,
        problem: &mut Problem,
        rng: &mut Rng,
        ffn: &Ffn,
        oracle: &dyn ComputeBackend,
        deviations: f32,
    ) -> Fallible<Selection> {
        let neurons = u64::from(self.neurons);
        let sure = deviations.is_infinite();
        let gate_deviation = sizes(problem, rng, "gate_deviation", neurons, 0.05);
        let estimates_up = ffn.up_low.is_some() && !sure;
        let up_deviation = estimates_up.then(|| sizes(problem, rng, "up_deviation", neurons, 0.05));
        let down_norm = (self.bias && !sure).then(|| sizes(problem, rng, "down_norm", neurons, 1.0));
        let mut rule = Bitplane { gate_deviation, up_deviation, down_norm, deviations, threshold: 0.0 };
        if !sure {
            rule.threshold = quiet_threshold(self.scores(problem, ffn, &rule, oracle)?);
        }
        Ok(Selection::Bitplane(rule))
    }

    /// What the rule compares with its threshold, of every token and neuron, in f64.
    fn scores(
        &self,
        problem: &Problem,
        ffn: &Ffn,
        rule: &Bitplane,
        oracle: &dyn ComputeBackend,
    ) -> Fallible<Vec<f64>> {
        let mut scores = Vec::new();
        let vector = |slot: Option<SlotId>, otherwise: f32| match slot {
            Some(slot) => f32_values(problem.bytes(slot)),
            None => vec![otherwise; self.neurons as usize],
        };
        let norms = vector(rule.down_norm, 1.0);
        let mut factors = Vec::new();
        if let Some(gate) = ffn.gate {
            factors.push((gate, ffn.gate_bias, Some(rule.gate_deviation), self.function));
        }
        if rule.up_deviation.is_some() {
            factors.push((ffn.up, ffn.up_bias, rule.up_deviation, self.up_function));
        }
        let mut tables = Vec::new();
        for (weight, bias, deviation, function) in factors {
            let estimate = estimate(problem, weight, oracle)?;
            tables.push((estimate, vector(bias, 0.0), vector(deviation, 0.0), function));
        }
        for given in input_rows(problem, ffn.input) {
            let length = given.iter().map(|x| x * x).sum::<f64>().sqrt();
            let x = if self.int8 { quantised(&given) } else { given };
            for (i, norm) in norms.iter().enumerate() {
                let factor =
                    |(rows, bias, deviation, function): &(Vec<Vec<f64>>, Vec<f32>, Vec<f32>, Activation)| {
                        let dot: f64 = rows[i].iter().zip(&x).map(|(w, x)| w * x).sum();
                        let allowed = f64::from(rule.deviations) * f64::from(deviation[i]) * length;
                        function_value(*function, dot + f64::from(bias[i]) + allowed).abs()
                    };
                scores.push(tables.iter().map(factor).product::<f64>() * f64::from(*norm));
            }
        }
        Ok(scores)
    }
}

/// The rows of a matrix as far as its high halves tell.
fn estimate(problem: &Problem, high: SlotId, oracle: &dyn ComputeBackend) -> Fallible<Vec<Vec<f64>>> {
    let (tensor, bytes) = (problem.tensor(high), problem.bytes(high));
    let decoded = decode(oracle, &tensor, bytes)?;
    let rows = decoded.rows().zip(0u64..).map(|(row, index)| {
        let scales = q4_scales(&tensor, bytes, index);
        row.iter().enumerate().map(|(i, w)| w + scales[i / 32] * (7.5 / 16.0)).collect()
    });
    Ok(rows.collect())
}
