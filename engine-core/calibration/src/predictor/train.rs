//! Trains one predictor: Adam (Kingma and Ba 2015) on weighted cross-entropy, batches of tokens in a random order that the
//! seed decides.

use super::{Labels, Predictor, Random};
use crate::rows::Rows;
use crate::{CalibrationError, Result, product};
use std::sync::atomic::{AtomicBool, Ordering};

/// Tokens of a step.
const BATCH: usize = 128;
/// Of the first step; it falls along half a cosine to a twentieth.
const RATE: f32 = 0.01;
/// Steps over which the rate rises to that.
const RISE: usize = 60;
/// Missing an active neuron is this much worse than computing one in vain, and this much where it adds more to the output
/// than the token's active neurons do on average.
const MISSED: f32 = 2.0;
const MISSED_LARGE: f32 = 8.0;
/// How slowly the means of gradients and of their squares follow.
const FIRST: f32 = 0.9;
const SECOND: f32 = 0.999;

/// What is trained on.
pub(super) struct Examples<'a> {
    pub(super) residuals: Rows<'a>,
    pub(super) labels: &'a Labels,
    /// Those that add more than the token's active neurons do on average.
    pub(super) large: &'a Labels,
    pub(super) neurons: usize,
    /// Tokens.
    pub(super) rows: &'a [usize],
}

/// Scales that bring each element of a residual of length sqrt(width) to a mean square of 1.
fn column_scales(examples: &Examples<'_>) -> Vec<f32> {
    let width = examples.residuals.width();
    let mut squares = vec![0.0f64; width];
    let mut row = vec![0.0; width];
    let step = examples.rows.len().div_ceil(2048).max(1);
    let mut count = 0.0f64;
    for &at in examples.rows.iter().step_by(step) {
        examples.residuals.read(at, &mut row);
        let size = root_mean_square(&row);
        squares.iter_mut().zip(&row).for_each(|(sum, &x)| *sum += (f64::from(x) / size).powi(2));
        count += 1.0;
    }
    // Elements that hardly ever move are not blown up beyond reason.
    squares.iter().map(|sum| (1.0 / (sum / count.max(1.0)).sqrt().max(1e-3)) as f32).collect()
}

/// The median of the residuals' root mean squares.
fn typical(examples: &Examples<'_>) -> f64 {
    let mut row = vec![0.0; examples.residuals.width()];
    let step = examples.rows.len().div_ceil(2048).max(1);
    let size = |&at: &usize| {
        examples.residuals.read(at, &mut row);
        root_mean_square(&row)
    };
    let mut sizes: Vec<f64> = examples.rows.iter().step_by(step).map(size).collect();
    sizes.sort_unstable_by(f64::total_cmp);
    sizes.get(sizes.len() / 2).copied().unwrap_or(1.0)
}

fn root_mean_square(row: &[f32]) -> f64 {
    let square: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (square / row.len().max(1) as f64).sqrt().max(1e-12)
}

/// Weights and what Adam knows of them.
struct Weights {
    values: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
    gradient: Vec<f32>,
}

impl Weights {
    /// Evenly between plus and minus sqrt(3 / inputs): of variance 1 / inputs.
    fn random(count: usize, inputs: usize, random: &mut Random) -> Weights {
        let size = (3.0 / inputs as f64).sqrt();
        let zeros = || vec![0.0; count];
        let values = (0..count).map(|_| (size * random.symmetric()) as f32).collect();
        Weights { values, first: zeros(), second: zeros(), gradient: zeros() }
    }

    fn step(&mut self, rate: f32, (first, second): (f32, f32)) {
        let moments = self.first.iter_mut().zip(&mut self.second);
        for ((value, (m, v)), &g) in self.values.iter_mut().zip(moments).zip(&self.gradient) {
            *m = FIRST * *m + (1.0 - FIRST) * g;
            *v = SECOND * *v + (1.0 - SECOND) * g * g;
            *value -= rate * (*m / first) / ((*v / second).sqrt() + 1e-8);
        }
    }
}

/// Trains a predictor of this rank. `progress` is told the share that is done.
///
/// # Errors
/// [`CalibrationError::Cancelled`], looked at with every step.
pub(super) fn train(
    examples: &Examples<'_>,
    rank: usize,
    epochs: usize,
    seed: u64,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(f64),
) -> Result<Predictor> {
    let (width, neurons) = (examples.residuals.width(), examples.neurons);
    let scales = column_scales(examples);
    let typical = typical(examples);
    let mut random = Random::new(seed);
    let mut fc1 = Weights::random(rank * width, width, &mut random);
    let mut fc2 = Weights::random(neurons * rank, rank, &mut random);
    let mut order = examples.rows.to_vec();
    let steps = epochs * order.len().div_ceil(BATCH);
    let [mut input, mut inner, mut scores, mut back] = [const { Vec::new() }; 4];
    let (mut powers, mut done) = ((1.0, 1.0), 0usize);
    for _ in 0..epochs {
        random.shuffle(&mut order);
        for batch in order.chunks(BATCH) {
            if cancel.load(Ordering::Relaxed) {
                return Err(CalibrationError::Cancelled);
            }
            let tokens = batch.len();
            examples.residuals.gather(batch.iter().copied(), &mut input);
            for row in input.chunks_exact_mut(width) {
                // One scale for all, as when the predictor is used; tokens of unusual size do not count for more.
                let scale = (1.0 / typical.max(root_mean_square(row) / 2.0)) as f32;
                row.iter_mut().zip(&scales).for_each(|(x, s)| *x *= scale * s);
            }
            inner.resize(tokens * rank, 0.0);
            product::by_rows(&input, &fc1.values, width, &mut inner)?;
            inner.iter_mut().for_each(|x| *x = x.max(0.0));
            scores.resize(tokens * neurons, 0.0);
            product::by_rows(&inner, &fc2.values, rank, &mut scores)?;
            for (row, &at) in scores.chunks_exact_mut(neurons).zip(batch) {
                derive(row, examples.labels.row(at), examples.large.row(at), 1.0 / tokens as f32);
            }
            product::of_columns(&scores, &inner, tokens, &mut fc2.gradient)?;
            back.resize(tokens * rank, 0.0);
            product::plain(&scores, &fc2.values, neurons, &mut back)?;
            back.iter_mut().zip(&inner).filter(|(_, inner)| **inner <= 0.0).for_each(|(x, _)| *x = 0.0);
            product::of_columns(&back, &input, tokens, &mut fc1.gradient)?;
            powers = (powers.0 * FIRST, powers.1 * SECOND);
            let share = done as f32 / steps as f32;
            let risen = ((done + 1) as f32 / RISE as f32).min(1.0);
            let rate = RATE * risen * (0.05 + 0.95 * 0.5 * (1.0 + (std::f32::consts::PI * share).cos()));
            let corrections = (1.0 - powers.0, 1.0 - powers.1);
            fc1.step(rate, corrections);
            fc2.step(rate, corrections);
            done += 1;
            progress(done as f64 / steps as f64);
        }
    }
    // The scales go into fc1, and fc1 to a size that F16 has room for: relu lets any factor above 0 through.
    let mut fc1 = fc1.values;
    fc1.chunks_exact_mut(width).for_each(|row| row.iter_mut().zip(&scales).for_each(|(w, s)| *w *= s));
    let largest = fc1.iter().fold(0.0f32, |most, w| most.max(w.abs()));
    if largest > 0.0 {
        fc1.iter_mut().for_each(|w| *w *= 16.0 / largest);
    }
    Ok(Predictor { rank, fc1, fc2: fc2.values, threshold: 0.0 })
}

/// Scores to the loss's derivative by them.
fn derive(scores: &mut [f32], labels: &[u64], large: &[u64], share: f32) {
    for ((scores, &word), &large) in scores.chunks_mut(64).zip(labels).zip(large) {
        for (at, score) in scores.iter_mut().enumerate() {
            let bit = |word: u64| (word >> at & 1) as f32;
            let on = bit(word);
            // The logistic function by a quotient of polynomials, within 0.03: a direction is all that is wanted.
            let half = (0.5 * *score).clamp(-3.0, 3.0);
            let square = half * half;
            let likely = 0.5 + 0.5 * half * (27.0 + square) / (27.0 + 9.0 * square);
            let weight = 1.0 + (MISSED - 1.0) * on + (MISSED_LARGE - MISSED) * bit(large);
            *score = share * (likely - on) * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{encode, row_bytes};

    #[test]
    fn a_layer_of_rank_four_is_learned_and_the_same_each_time() {
        let (width, neurons, tokens) = (16, 96, 3000);
        let mut random = Random::new(5);
        let mut numbers =
            |count: usize| -> Vec<f32> { (0..count).map(|_| random.symmetric() as f32).collect() };
        let (first, second) = (numbers(4 * width), numbers(neurons * 4));
        let mut inputs = numbers(tokens * width);
        inputs.chunks_exact_mut(width).enumerate().for_each(|(t, row)| {
            let size = 1.0 + (t % 7) as f32 * 30.0; // tokens of different sizes
            row.iter_mut().enumerate().for_each(|(i, x)| *x *= size * if i == 3 { 50.0 } else { 1.0 });
            row[0] = 2.0 * size; // a constant direction is a bias
        });
        let (mut inner, mut gate) = (vec![0.0; tokens * 4], vec![0.0; tokens * neurons]);
        product::by_rows(&inputs, &first, width, &mut inner).unwrap();
        product::by_rows(&inner, &second, 4, &mut gate).unwrap();
        let active: Vec<bool> = gate.iter().map(|&x| x > 0.0).collect();
        let mut labels = Labels::default();
        labels.extend(&active, neurons);
        let mut bytes = Vec::new();
        inputs.chunks_exact(width).for_each(|row| encode(row, &mut bytes));
        let residuals = Rows::new(&bytes, width, row_bytes(width), 0);
        let rows: Vec<usize> = (0..2500).collect();
        let examples = Examples { residuals, labels: &labels, large: &labels, neurons, rows: &rows };
        let cancel = AtomicBool::new(false);
        let train = || train(&examples, 32, 20, 9, &cancel, &mut |_| {}).unwrap();
        let predictor = train();
        assert_eq!(predictor, train());
        let mut scores = Vec::new();
        predictor.scores(&inputs[2500 * width..], &mut scores).unwrap();
        let of = |at: &[(bool, bool)], which: (bool, bool)| at.iter().filter(|&&x| x == which).count() as f64;
        let pairs: Vec<(bool, bool)> =
            scores.iter().zip(&active[2500 * neurons..]).map(|(&s, &on)| (s >= 0.0, on)).collect();
        let (hits, missed, vain) =
            (of(&pairs, (true, true)), of(&pairs, (false, true)), of(&pairs, (true, false)));
        assert!(hits / (hits + missed) > 0.95, "recall {}", hits / (hits + missed));
        assert!(hits / (hits + vain) > 0.85, "precision {}", hits / (hits + vain));
        cancel.store(true, Ordering::Relaxed);
        let stopped = super::train(&examples, 32, 1, 9, &cancel, &mut |_| {});
        assert!(matches!(stopped, Err(CalibrationError::Cancelled)));
    }
}
