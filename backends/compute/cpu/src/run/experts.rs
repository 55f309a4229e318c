//! Mixtures of experts: the router's choice, and the layers of the chosen experts one after the other.
//!
//! The tokens that chose an expert are gathered, so that its rows are read once for all of them; its outputs are then
//! added to the tokens' sums. Experts go in ascending order, so every token's sum has one order whatever the batch.

use super::ffn::{Ffn, ffn_of};
use super::{Local, Operand, Run, Weight};
use crate::pool::Stopped;
use engine_core::Error;

/// Indices, behind the list's slots, of the rows that an executable keeps for one expert: its input, its output, and
/// the number of its active neurons.
pub(crate) const STAGING: [usize; 3] = [0, 1, 2];

/// `OperationKind::Route`.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) scores: Operand,
    pub(crate) chosen: Operand,
    pub(crate) weights: Operand,
    /// Or sigmoid.
    pub(crate) softmax: bool,
    pub(crate) normalise: bool,
    pub(crate) scale: f32,
}

/// A share of the tokens. Shares are computed in f64: they are few.
pub(crate) fn route(run: &Run<'_>, op: &Route, local: &mut Local) {
    let (start, end) = run.worker.share(run.env.tokens, 1);
    for t in start..end {
        // SAFETY: rows of the checked widths, one thread per token.
        let (scores, chosen, weights) = unsafe {
            (
                std::slice::from_raw_parts(run.env.f32(&op.scores, t), op.scores.columns),
                std::slice::from_raw_parts_mut(run.env.row(&op.chosen, t).cast::<i32>(), op.chosen.columns),
                std::slice::from_raw_parts_mut(run.env.f32(&op.weights, t), op.weights.columns),
            )
        };
        let order = &mut local.list;
        order.clear();
        order.extend(0..scores.len() as u32);
        // NaN counts as the largest; of equal scores the lower index comes first.
        let before = |a: f32, b: f32| a > b || (a.is_nan() && !b.is_nan());
        order.sort_by(|&a, &b| {
            let (x, y) = (scores[a as usize], scores[b as usize]);
            before(y, x).cmp(&before(x, y)).then(a.cmp(&b))
        });
        order.truncate(chosen.len());
        order.sort_unstable();
        let most = scores.iter().fold(f64::NEG_INFINITY, |most, &s| most.max(s.into()));
        let total: f64 = scores.iter().map(|&s| (f64::from(s) - most).exp()).sum();
        let share = |e: u32| {
            let score = f64::from(scores[e as usize]);
            if op.softmax { (score - most).exp() / total } else { 1.0 / (1.0 + (-score).exp()) }
        };
        let sum: f64 = if op.normalise { order.iter().map(|&e| share(e)).sum() } else { 1.0 };
        for ((&e, id), weight) in order.iter().zip(chosen).zip(weights) {
            *id = e as i32;
            *weight = (share(e) / sum * f64::from(op.scale)) as f32;
        }
    }
}

/// `OperationKind::Experts`.
#[derive(Clone, Debug)]
pub(crate) struct Experts {
    pub(crate) label: String,
    /// Expert 0's layer, from and to the staging rows.
    pub(crate) layer: Ffn,
    pub(crate) count: usize,
    pub(crate) input: Operand,
    pub(crate) chosen: Operand,
    pub(crate) weights: Operand,
    pub(crate) output: Operand,
    pub(crate) active_count: Option<Operand>,
    pub(crate) accumulate: bool,
}

/// An expert's rows of a weight.
fn moved(weight: Weight, expert: usize) -> Weight {
    let offset = expert * weight.operand.rows * weight.operand.stride;
    Weight { operand: Operand { offset, ..weight.operand }, ..weight }
}

/// Runs the chosen experts on this thread's share.
pub(crate) fn experts(run: &Run<'_>, op: &Experts, local: &mut Local) -> Result<(), Stopped> {
    let mut choices = std::mem::take(&mut local.choices);
    let result = choices_of(run, op, &mut choices).and_then(|()| all(run, op, &choices, local));
    local.choices = choices;
    result
}

/// Every thread sorts all choices by expert: they are few.
fn choices_of(run: &Run<'_>, op: &Experts, choices: &mut Vec<(u32, u32, u32)>) -> Result<(), Stopped> {
    choices.clear();
    for t in 0..run.env.tokens {
        // SAFETY: the ids have a row per token, aligned for i32.
        let ids = unsafe {
            std::slice::from_raw_parts(run.env.row(&op.chosen, t).cast::<i32>(), op.chosen.columns)
        };
        let known = ids.iter().all(|&e| usize::try_from(e).is_ok_and(|e| e < op.count));
        if !known || !ids.windows(2).all(|pair| pair[0] < pair[1]) {
            return Err(run.worker.fail(Error::data(format!(
                "{}: token {t} has experts {ids:?}, wanted ascending ids below {}",
                op.label, op.count
            ))));
        }
        choices.extend((0..).zip(ids).map(|(j, &e)| (e as u32, t as u32, j)));
    }
    choices.sort_unstable();
    Ok(())
}

fn all(run: &Run<'_>, op: &Experts, choices: &[(u32, u32, u32)], local: &mut Local) -> Result<(), Stopped> {
    let env = run.env;
    let width = op.output.columns;
    // Each thread starts, and later adds to, its own columns of all tokens: no expert's sum waits for another thread.
    let columns = run.worker.share(width, 16);
    for t in 0..env.tokens {
        // SAFETY: the outputs have a row per token; columns are shared out.
        unsafe {
            if !op.accumulate {
                env.f32(&op.output, t).add(columns.0).write_bytes(0, columns.1 - columns.0);
            }
            if let (Some(count), true) = (&op.active_count, run.is_first()) {
                *env.row(count, t).cast::<i32>() = 0;
            }
        }
    }
    for (nth, group) in choices.chunk_by(|a, b| a.0 == b.0).enumerate() {
        let expert = group[0].0 as usize;
        let mut layer = Ffn {
            gate: op.layer.gate.map(|gate| moved(gate, expert)),
            up: moved(op.layer.up, expert),
            down: moved(op.layer.down, expert),
            ..op.layer.clone()
        };
        if let [(_, token, _)] = group {
            // One token's row stays where it is.
            layer.input = Operand { offset: *token as usize * op.input.stride, ..op.input };
        } else {
            let (start, end) = run.worker.share(group.len(), 1);
            for (row, (_, token, _)) in group.iter().enumerate().take(end).skip(start) {
                let from = env.f32(&op.input, *token as usize);
                // SAFETY: the staging rows are as wide as the input's and as many as tokens fit a submission.
                unsafe { std::ptr::copy_nonoverlapping(from, env.f32(&layer.input, row), op.input.columns) };
            }
        }
        if nth > 0 && run.is_first() {
            for claim in run.claims {
                claim.store(0, std::sync::atomic::Ordering::Relaxed);
            }
        }
        if nth > 0 || group.len() > 1 {
            run.worker.barrier()?;
        }
        ffn_of(run, &layer, group.len(), local)?;
        run.worker.barrier()?;
        for (row, (_, token, j)) in group.iter().enumerate() {
            let t = *token as usize;
            // SAFETY: rows of the checked widths; columns are shared out, counts are the first thread's.
            unsafe {
                let weight = *env.f32(&op.weights, t).add(*j as usize);
                let (sum, part) = (env.f32(&op.output, t), env.f32(&layer.output, row));
                for c in columns.0..columns.1 {
                    *sum.add(c) += weight * *part.add(c);
                }
                if let (Some(count), Some(part), true) =
                    (&op.active_count, &layer.active_count, run.is_first())
                {
                    *env.row(count, t).cast::<i32>() += *env.row(part, row).cast::<i32>();
                }
            }
        }
    }
    Ok(())
}
