//! Mixtures of experts: the choice of experts, and the sum over those chosen, token by token.

use super::functions::activate;
use super::linear::dot;
use crate::execute::Run;
use crate::parallel;
use engine_core::operation::{Arithmetic, DownLayout, Experts, Gating, Selection, SlotId};
use engine_core::{Error, Result};
use std::cmp::Ordering;

/// The experts with the largest scores, ascending by index, and their shares.
pub(crate) fn route(
    run: &Run<'_>,
    scores: SlotId,
    chosen: SlotId,
    weights: SlotId,
    (gating, normalise, scale): (Gating, bool, f32),
) -> Result<()> {
    let count = run.columns(chosen);
    for token in 0..run.tokens {
        let scores = run.row(scores, token);
        let mut order: Vec<usize> = (0..scores.len()).collect();
        // A stable sort: of equal scores the lower index stays first.
        order.sort_by(|&a, &b| descending(scores[a], scores[b]));
        order.truncate(count);
        order.sort_unstable();
        let mut shares: Vec<f64> = match gating {
            Gating::Softmax => {
                let most = scores.iter().fold(f64::NEG_INFINITY, |most, s| most.max(*s));
                let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
                order.iter().map(|&e| (scores[e] - most).exp() / sum).collect()
            }
            Gating::Sigmoid => order.iter().map(|&e| 1.0 / (1.0 + (-scores[e]).exp())).collect(),
            other => return Err(Error::unsupported(format!("gating {other:?}"))),
        };
        if normalise {
            let sum: f64 = shares.iter().sum();
            shares.iter_mut().for_each(|share| *share /= sum);
        }
        shares.iter_mut().for_each(|share| *share *= f64::from(scale));
        let ids: Vec<u8> = order.iter().flat_map(|&e| (e as i32).to_le_bytes()).collect();
        run.write_row_bytes(chosen, token, &ids);
        run.write_row(weights, token, &shares);
    }
    Ok(())
}

/// From the largest to the smallest, NaN counting as the largest.
fn descending(a: f64, b: f64) -> Ordering {
    b.partial_cmp(&a).unwrap_or_else(|| b.is_nan().cmp(&a.is_nan()))
}

/// The experts of every token; all are checked before anything is written.
fn chosen(run: &Run<'_>, label: &str, op: &Experts) -> Result<Vec<Vec<usize>>> {
    (0..run.tokens)
        .map(|token| {
            let bytes = run.row_bytes(op.chosen, token);
            let ids: Vec<i32> =
                bytes.chunks_exact(4).map(|id| i32::from_le_bytes([id[0], id[1], id[2], id[3]])).collect();
            let experts: Vec<usize> = ids.iter().filter_map(|id| usize::try_from(*id).ok()).collect();
            let ascending = experts.windows(2).all(|pair| pair[0] < pair[1]);
            let known = experts.iter().all(|&e| e < op.experts as usize);
            if experts.len() != ids.len() || !ascending || !known {
                return Err(Error::data(format!(
                    "{label} (experts): token {token} has experts {ids:?}, wanted ascending ids below {}",
                    op.experts
                )));
            }
            Ok(experts)
        })
        .collect()
}

/// The weighted sum over the chosen experts of each token.
pub(crate) fn experts(run: &Run<'_>, label: &str, arithmetic: Arithmetic, op: &Experts) -> Result<()> {
    let chosen = chosen(run, label, op)?;
    let inputs = run.quantised_rows(op.input, arithmetic.input)?;
    for (token, (experts, input)) in chosen.iter().zip(&inputs).enumerate() {
        let shares = run.row(op.weights, token);
        let mut sum =
            if op.accumulate { run.row(op.output, token) } else { vec![0.0; run.columns(op.output)] };
        let mut active = 0;
        for (&expert, share) in experts.iter().zip(shares) {
            let mut hidden = hidden(run, op, expert, input)?;
            active += hidden.iter().filter(|h| h.is_some_and(|h| h as f32 != 0.0)).count() as i32;
            let mut row: Vec<f64> = hidden.iter().map(|h| h.unwrap_or(0.0)).collect();
            run.quantise(&mut row, arithmetic.hidden)?;
            hidden.iter_mut().zip(row).for_each(|(h, value)| *h = h.and(Some(value)));
            for (sum, value) in sum.iter_mut().zip(down(run, op, expert, &hidden)) {
                *sum += share * value;
            }
        }
        run.write_row(op.output, token, &sum);
        if let Some(count) = op.active_count {
            run.write_row_bytes(count, token, &active.to_le_bytes());
        }
    }
    Ok(())
}

/// `h` of an expert's neurons; `None` where the selection drops one.
fn hidden(run: &Run<'_>, op: &Experts, expert: usize, input: &[f64]) -> Result<Vec<Option<f64>>> {
    let neurons = run.tensor(op.up).rows as usize / op.experts as usize;
    let mut hidden: Vec<Result<Option<f64>>> = vec![Ok(None); neurons];
    parallel::for_each(&mut hidden, run.threads, |i, h| *h = neuron(run, op, expert * neurons + i, input));
    hidden.into_iter().collect()
}

/// `h` of the neuron in this row.
fn neuron(run: &Run<'_>, op: &Experts, row: usize, input: &[f64]) -> Result<Option<f64>> {
    let (drops, threshold) = match op.selection {
        Selection::All => (false, 0.0),
        Selection::GateFirst => (true, 0.0),
        Selection::Threshold(threshold) => (true, f64::from(threshold)),
        other => return Err(Error::unsupported(format!("selection {other:?}"))),
    };
    let small = |h: f64, limit: f64| drops && !h.is_nan() && h.abs() <= limit;
    let product = |weight| dot(&run.row(weight, row), input);
    let Some(gate) = op.gate else {
        let h = activate(op.function, product(op.up))?;
        return Ok((!small(h, threshold)).then_some(h));
    };
    let gate = activate(op.function, product(gate))?;
    if small(gate, threshold) {
        return Ok(None);
    }
    let h = gate * activate(op.up_function, product(op.up))?;
    Ok((!small(h, 0.0)).then_some(h))
}

/// `sum_i h_i * down_i` of an expert.
fn down(run: &Run<'_>, op: &Experts, expert: usize, hidden: &[Option<f64>]) -> Vec<f64> {
    let width = run.columns(op.output);
    let mut sums = vec![0.0; width];
    match op.down_layout {
        DownLayout::NeuronRows => {
            for (i, h) in hidden.iter().enumerate() {
                if let Some(h) = h {
                    let row = run.row(op.down, expert * hidden.len() + i);
                    sums.iter_mut().zip(&row).for_each(|(sum, d)| *sum += h * d);
                }
            }
        }
        DownLayout::OutputRows => parallel::for_each(&mut sums, run.threads, |c, sum| {
            let row = run.row(op.down, expert * width + c);
            *sum = hidden.iter().zip(&row).filter_map(|(h, d)| h.map(|h| h * d)).sum();
        }),
    }
    sums
}
