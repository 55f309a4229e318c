//! Products with a weight matrix: linear layers, and the low-rank predictor made of two of them.

use super::functions::relu;
use crate::execute::Run;
use crate::parallel;
use engine_core::Result;
use engine_core::operation::{Arithmetic, SlotId};

/// `sum_c a[c] * b[c]`, from the first to the last.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

/// Token rows turned into columns, so that one row of weights meets all tokens in one pass.
pub(crate) struct Columns {
    tokens: usize,
    /// Element `c` of token `t` at `c * tokens + t`.
    values: Vec<f64>,
}

impl Columns {
    pub(crate) fn new(rows: &[Vec<f64>]) -> Columns {
        let columns = rows.first().map_or(0, Vec::len);
        let values = (0..columns).flat_map(|c| rows.iter().map(move |row| row[c])).collect();
        Columns { tokens: rows.len(), values }
    }

    /// `dot(weights, row)` for the row of each token: the same sum in the same order.
    pub(crate) fn dots(&self, weights: &[f64]) -> Vec<f64> {
        if self.tokens == 1 {
            return vec![dot(weights, &self.values)];
        }
        let mut sums = vec![0.0; self.tokens];
        for (w, column) in weights.iter().zip(self.values.chunks_exact(self.tokens)) {
            for (sum, x) in sums.iter_mut().zip(column) {
                *sum += w * x;
            }
        }
        sums
    }
}

/// `product[t][r] = sum_c weight[r][c] * inputs[t][c]`. A row of weights is taken apart once for all tokens.
fn product(run: &Run<'_>, weight: SlotId, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let inputs = Columns::new(inputs);
    let mut by_row = vec![vec![]; run.tensor(weight).rows as usize];
    parallel::for_each(&mut by_row, run.threads, |row, sums| *sums = inputs.dots(&run.row(weight, row)));
    (0..inputs.tokens).map(|t| by_row.iter().map(|sums| sums[t]).collect()).collect()
}

/// `output[t][r] = sum_c weight[r][c] * input[t][c] + bias[r] (+ output[t][r] where accumulate)`.
pub(crate) fn linear(
    run: &Run<'_>,
    arithmetic: Arithmetic,
    input: SlotId,
    weight: SlotId,
    bias: Option<SlotId>,
    output: SlotId,
    accumulate: bool,
) -> Result<()> {
    let inputs = run.quantised_rows(input, arithmetic.input)?;
    let bias = run.vector(bias);
    for (token, mut row) in product(run, weight, &inputs).into_iter().enumerate() {
        if let Some(bias) = &bias {
            row.iter_mut().zip(bias).for_each(|(sum, b)| *sum += b);
        }
        if accumulate {
            row.iter_mut().zip(run.row(output, token)).for_each(|(sum, before)| *sum += before);
        }
        run.write_row(output, token, &row);
    }
    Ok(())
}

/// `mask[t][i] = 1` where `(fc2 . relu(fc1 . input[t]))[i] >= threshold`, else 0 (also for NaN). The input is quantised
/// as stated for inputs, what meets `fc2` as stated for hidden activations.
pub(crate) fn predict(
    run: &Run<'_>,
    arithmetic: Arithmetic,
    input: SlotId,
    fc1: SlotId,
    fc2: SlotId,
    mask: SlotId,
    threshold: f32,
) -> Result<()> {
    let inputs = run.quantised_rows(input, arithmetic.input)?;
    let mut hidden = product(run, fc1, &inputs);
    for row in &mut hidden {
        row.iter_mut().for_each(|x| *x = relu(*x));
        run.quantise(row, arithmetic.hidden)?;
    }
    for (token, scores) in product(run, fc2, &hidden).into_iter().enumerate() {
        let bytes: Vec<u8> = scores.iter().map(|score| u8::from(*score >= f64::from(threshold))).collect();
        run.write_row_bytes(mask, token, &bytes);
    }
    Ok(())
}
