//! Scales of mixtures of experts: those of the chosen experts' layers, weighted.

use super::{Range, Scale, Scales, TINY, ffn, input_rows};
use crate::finding::Fallible;
use crate::problem::{Content, Problem, UNPLACED};
use crate::run::Outputs;
use crate::spec::layer_of;
use engine_core::operation::{Arithmetic, Experts, Ffn, Gating, OperationKind, SlotId};
use engine_core::{ComputeBackend, TensorType};

/// Of the shares that `Route` gives. A share's relative error is that of an exponential of a difference, whose own
/// rounding is relative to its size; the sum of exponentials is of one sign.
pub(super) fn route(
    problem: &Problem,
    (scores, chosen, weights): (SlotId, SlotId, SlotId),
    gating: Gating,
    stated: &Outputs,
) -> Scales {
    let used = problem.tensor(weights).columns as usize;
    let shares = stated.get(&weights.0).map(|bytes| crate::values::f32_values(bytes)).unwrap_or_default();
    let ids = stated.get(&chosen.0).map(|bytes| ids(bytes)).unwrap_or_default();
    let mut scales = Vec::new();
    for (token, row) in input_rows(problem, scores).iter().enumerate() {
        let most = row.iter().fold(f64::NEG_INFINITY, |most, s| most.max(*s));
        for j in 0..used {
            let at = token * used + j;
            let (share, expert) = (shares.get(at).copied().unwrap_or(0.0), ids.get(at).copied().unwrap_or(0));
            let score = row.get(expert).copied().unwrap_or(0.0);
            let condition = match gating {
                Gating::Softmax => (most - score).abs(),
                _ => score.abs(),
            };
            let finite = row.iter().all(|s| s.is_finite());
            let sum = if finite { f64::from(share).abs() * (1.0 + condition) } else { f64::NAN };
            scales.push(Scale { sum, floor: TINY, ..Scale::default() });
        }
    }
    Scales::from([(weights.0, scales)])
}

fn ids(bytes: &[u8]) -> Vec<usize> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize).collect()
}

pub(super) fn experts(
    problem: &Problem,
    op: &Experts,
    arithmetic: Arithmetic,
    oracle: &dyn ComputeBackend,
    range: Range,
) -> Fallible<Scales> {
    let (width, used) =
        (problem.tensor(op.output).columns as usize, problem.tensor(op.chosen).columns as usize);
    let tokens = problem.tokens as usize;
    let chosen = ids(problem.bytes(op.chosen));
    let weights = input_rows(problem, op.weights);
    let mut sums = vec![Scale { floor: TINY, ..Scale::default() }; tokens * width];
    if op.accumulate {
        for (sum, before) in sums.iter_mut().zip(input_rows(problem, op.output).into_iter().flatten()) {
            sum.sum += before.abs();
        }
    }
    for expert in 0..op.experts as usize {
        let takes: Vec<(usize, f64)> = (0..tokens)
            .flat_map(|t| (0..used).map(move |j| (t, j)))
            .filter(|(t, j)| chosen.get(t * used + j) == Some(&expert))
            .map(|(t, j)| (t, weights[t][j].abs()))
            .collect();
        if takes.is_empty() {
            continue;
        }
        let (alone, layer) = one(problem, op, expert, arithmetic)?;
        let scales = ffn::ffn(&alone, &layer, arithmetic, (oracle, &Outputs::new()), range)?;
        let scales = scales.get(&layer.output.0).map_or(&[][..], |scales| scales);
        for (token, weight) in takes {
            for column in 0..width {
                let part = scales.get(token * width + column).copied().unwrap_or_default();
                let sum = &mut sums[token * width + column];
                sum.sum += weight * part.sum;
                sum.quantisation += weight * part.quantisation;
                sum.tie += weight * part.tie;
                sum.floor += weight * part.floor + range.tiny;
                sum.beyond |= part.beyond;
            }
        }
    }
    Ok(Scales::from([(op.output.0, sums)]))
}

/// The problem of one expert's layer on all tokens.
fn one(problem: &Problem, op: &Experts, expert: usize, arithmetic: Arithmetic) -> Fallible<(Problem, Ffn)> {
    let mut alone = Problem::new(problem.list.token_capacity, problem.tokens);
    let input = problem.tensor(op.input);
    let input = alone.rows_in("input", input.dtype, input.columns, problem.bytes(op.input).to_vec())?;
    let mut part = |name: &str, slot: SlotId| {
        let tensor = problem.tensor(slot);
        let rows = tensor.rows / u64::from(op.experts);
        let (stride, start) = (tensor.row_stride as usize, expert * rows as usize);
        let bytes = problem.bytes(slot)[start * stride..(start + rows as usize) * stride].to_vec();
        alone.fixed(name, UNPLACED, TensorType { rows, ..tensor }, Content::Bytes(bytes))
    };
    let gate = op.gate.map(|gate| part("gate", gate));
    let (up, down) = (part("up", op.up), part("down", op.down));
    let output = alone.rows_out("output", engine_core::DType::F32, problem.tensor(op.output).columns)?;
    let layer = Ffn { input, gate, up, down, output, ..layer_of(op) };
    alone.push(OperationKind::Ffn(layer.clone()), arithmetic);
    Ok((alone, layer))
}
