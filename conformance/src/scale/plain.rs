//! Scales of the operations without state.

use super::{
    Range, Scale, Scales, TINY, decode, dot_scale, input_rows, is_smooth, quantisation_steps,
    quantises_input, vector,
};
use crate::finding::Fallible;
use crate::problem::Problem;
use engine_core::ComputeBackend;
use engine_core::operation::{Activation, Arithmetic, NormKind, OperationKind, Rope, RopeStyle, SlotId};

/// An element made of parts of these magnitudes.
fn of(sum: f64) -> Scale {
    Scale { sum, floor: 4.0 * TINY, ..Scale::default() }
}

pub(super) fn plain(
    problem: &Problem,
    kind: &OperationKind,
    arithmetic: Arithmetic,
    oracle: &dyn ComputeBackend,
    range: Range,
) -> Fallible<Scales> {
    let mut scales = Scales::new();
    match kind {
        OperationKind::Embed { ids, table, output, scale } => {
            let table = decode(oracle, &problem.tensor(*table), problem.bytes(*table))?;
            let ids = problem.bytes(*ids).chunks_exact(4).take(problem.tokens as usize);
            let rows = ids.flat_map(|c| {
                let id = u32::from_le_bytes([c[0], c[1], c[2], c[3]]) as usize;
                table.magnitude(id).iter().map(|m| of(m * f64::from(scale.abs()))).collect::<Vec<_>>()
            });
            scales.insert(output.0, rows.collect());
        }
        OperationKind::Norm { norm, input, weight, bias, output, epsilon } => {
            let weight = vector(problem, Some(*weight), 0);
            let bias = vector(problem, *bias, weight.len());
            let rows = input_rows(problem, *input).into_iter().flat_map(|row| {
                row.chunks(weight.len())
                    .flat_map(|group| norm_group(*norm, group, &weight, &bias, f64::from(*epsilon)))
                    .collect::<Vec<_>>()
            });
            scales.insert(output.0, rows.collect());
        }
        OperationKind::Linear { input, weight, bias, output, accumulate } => {
            let decoded = decode(oracle, &problem.tensor(*weight), problem.bytes(*weight))?;
            let rows = problem.tensor(*weight).rows as usize;
            let bias = vector(problem, *bias, rows);
            let before = accumulate.then(|| input_rows(problem, *output));
            let mut all = Vec::new();
            for (token, x) in input_rows(problem, *input).into_iter().enumerate() {
                let steps = quantises_input(arithmetic).then(|| quantisation_steps(&x));
                for row in 0..rows {
                    let mut scale = dot_scale(decoded.magnitude(row), &x, steps.as_deref(), range);
                    if steps.is_some() && x.iter().any(|v| !v.is_finite()) {
                        // The rule: a block with such a value has scale NaN; it reaches every output of the row.
                        scale.sum = f64::NAN;
                    }
                    scale.sum += bias[row].abs() + before.as_ref().map_or(0.0, |b| b[token][row].abs());
                    all.push(scale);
                }
            }
            scales.insert(output.0, all);
        }
        OperationKind::Rope(rope) => {
            scales.insert(rope.output.0, rope_rows(problem, rope));
        }
        OperationKind::Activate { function, input, output } => {
            let rows = input_rows(problem, *input).into_iter().flatten().map(|x| match function {
                Activation::Identity | Activation::Relu => Scale { sum: x.abs(), ..Scale::default() },
                Activation::ReluSquared => of(x.max(0.0).powi(2) + 0.0 * x),
                f if is_smooth(*f) => of(x.abs()),
                _ => of(x.abs()),
            });
            scales.insert(output.0, rows.collect());
        }
        OperationKind::Add { left, right, output } | OperationKind::Multiply { left, right, output } => {
            let product = matches!(kind, OperationKind::Multiply { .. });
            let right = right_rows(problem, *right);
            let rows = input_rows(problem, *left).into_iter().enumerate().flat_map(|(t, row)| {
                let right = &right[t % right.len()];
                row.iter()
                    .zip(right)
                    .map(|(a, b)| of(if product { (a * b).abs() } else { a.abs() + b.abs() }))
                    .collect::<Vec<_>>()
            });
            scales.insert(output.0, rows.collect());
        }
        _ => {}
    }
    Ok(scales)
}

fn right_rows(problem: &Problem, slot: SlotId) -> Vec<Vec<f64>> {
    if problem.list.slot(slot).is_some_and(|s| s.per_token) {
        input_rows(problem, slot)
    } else {
        vec![vector(problem, Some(slot), 0)]
    }
}

fn norm_group(norm: NormKind, x: &[f64], weight: &[f64], bias: &[f64], epsilon: f64) -> Vec<Scale> {
    let n = x.len() as f64;
    let mean = if norm == NormKind::Layer { x.iter().sum::<f64>() / n } else { 0.0 };
    let mean_abs = if norm == NormKind::Layer { x.iter().map(|v| v.abs()).sum::<f64>() / n } else { 0.0 };
    let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    let inverse = 1.0 / (variance + epsilon).sqrt();
    x.iter()
        .zip(weight.iter().zip(bias))
        .map(|(x, (w, b))| Scale {
            sum: (x.abs() + mean_abs) * inverse * w.abs() + b.abs(),
            floor: TINY * (1.0 + inverse * w.abs()) * 4.0,
            ..Scale::default()
        })
        .collect()
}

/// Each rotated element is made of two; its angle is exact only to the rounding of `position * theta_j`.
fn rope_rows(problem: &Problem, rope: &Rope) -> Vec<Scale> {
    let half = (rope.rotary_dim / 2) as usize;
    let factors = rope.factors.map_or_else(|| vec![1.0; half], |s| vector(problem, Some(s), half));
    let mut all = Vec::new();
    for (token, row) in input_rows(problem, rope.input).into_iter().enumerate() {
        let position = problem
            .sequences
            .iter()
            .find(|s| (s.first_token..s.first_token + s.tokens).contains(&(token as u32)))
            .map_or(0, |s| s.past + token as u32 - s.first_token);
        for head in row.chunks(rope.head_dim as usize) {
            let mut scales: Vec<Scale> = head.iter().map(|x| of(x.abs())).collect();
            for (j, factor) in factors.iter().enumerate() {
                let (a, b) = match rope.style {
                    RopeStyle::Halves => (j, j + half),
                    _ => (2 * j, 2 * j + 1),
                };
                let theta = f64::from(rope.base).powf(-2.0 * j as f64 / f64::from(rope.rotary_dim)) / factor;
                let sum = (head[a].abs() + head[b].abs()) * (1.0 + f64::from(position) * theta);
                // YaRN multiplies rotated elements by up to 1 + 0.1 ln(factor).
                scales[a] = of(1.2 * sum);
                scales[b] = of(1.2 * sum);
            }
            all.extend(scales);
        }
    }
    all
}
