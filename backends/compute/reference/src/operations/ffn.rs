//! Feed-forward layers, dense and sparse, over the active neurons.
//!
//! Three steps: `h` of every neuron that takes part, the quantisation of `h` that the descriptor states, and the sum of
//! `h_i * down_i`. The rows of a neuron that no token selects are never read.

use super::functions::activate;
use super::linear::Columns;
use super::planes::{self, Halves};
use crate::execute::Run;
use crate::parallel;
use engine_core::operation::{Arithmetic, DownLayout, Ffn, Selection};
use engine_core::{ClusterRange, Error, Result};

/// `h` of one neuron for each token; `None` where the neuron takes no part in the sum.
type Hidden = Vec<Option<f64>>;

/// Runs the layer over the neurons of `ranges`.
pub(crate) fn ffn(run: &Run<'_>, arithmetic: Arithmetic, ffn: &Ffn, ranges: Vec<ClusterRange>) -> Result<()> {
    let inputs = run.quantised_rows(ffn.input, arithmetic.input)?;
    let neurons = run.tensor(ffn.up).rows as usize;
    let hidden = hidden(run, ffn, &inputs, &ranges, neurons)?;
    for token in 0..run.tokens {
        report(run, ffn, &hidden, token);
    }
    let meets_down = quantised(run, arithmetic, &hidden)?;
    let sums = down(run, ffn, &meets_down);
    for (token, mut row) in sums.into_iter().enumerate() {
        if ffn.accumulate {
            row.iter_mut().zip(run.row(ffn.output, token)).for_each(|(sum, before)| *sum += before);
        }
        run.write_row(ffn.output, token, &row);
    }
    Ok(())
}

/// Step 1: `hidden[i][t]`.
fn hidden(
    run: &Run<'_>,
    ffn: &Ffn,
    inputs: &[Vec<f64>],
    ranges: &[ClusterRange],
    neurons: usize,
) -> Result<Vec<Hidden>> {
    let inputs = &Columns::new(inputs);
    let masks = match ffn.selection {
        Selection::Mask(mask) => Some((0..run.tokens).map(|t| run.row_bytes(mask, t)).collect::<Vec<_>>()),
        Selection::All | Selection::GateFirst | Selection::Threshold(_) | Selection::Bitplane(_) => None,
        other => return Err(Error::unsupported(format!("selection {other:?}"))),
    };
    let neuron =
        Neuron { run, ffn, inputs, gate_bias: run.vector(ffn.gate_bias), up_bias: run.vector(ffn.up_bias) };
    let rule = match ffn.selection {
        Selection::Bitplane(rule) => Some(planes::Rule::new(run, ffn, rule, inputs)),
        _ => None,
    };
    let mut hidden: Vec<Result<Hidden>> = vec![Ok(vec![None; run.tokens]); neurons];
    for range in ranges {
        let active = &mut hidden[range.start as usize..range.end as usize];
        parallel::for_each(active, run.threads, |n, h| {
            let i = range.start as usize + n;
            let kept = match rule.as_ref().map(|rule| rule.keeps(i)).transpose() {
                Ok(kept) => kept,
                Err(error) => {
                    *h = Err(error);
                    return;
                }
            };
            let selected = |t: usize| {
                masks.as_ref().is_none_or(|masks| masks[t][i] != 0)
                    && kept.as_ref().is_none_or(|kept| kept[t])
            };
            *h = neuron.hidden(i, &selected);
        });
    }
    hidden.into_iter().collect()
}

/// What the neurons of a layer share.
struct Neuron<'a> {
    run: &'a Run<'a>,
    ffn: &'a Ffn,
    inputs: &'a Columns,
    gate_bias: Option<Vec<f64>>,
    up_bias: Option<Vec<f64>>,
}

impl Neuron<'_> {
    /// `h_i` for each token that selects neuron `i`.
    fn hidden(&self, i: usize, selected: &dyn Fn(usize) -> bool) -> Result<Hidden> {
        let bias = |bias: &Option<Vec<f64>>| bias.as_ref().map_or(0.0, |bias| bias[i]);
        let tokens = 0..self.run.tokens;
        let mut h: Hidden = tokens.map(|t| selected(t).then_some(1.0)).collect();
        if let Some(gate) = self.ffn.gate {
            let gate = Halves { high: gate, low: self.ffn.gate_low };
            self.multiply(&mut h, gate, i, |dot| activate(self.ffn.function, dot + bias(&self.gate_bias)))?;
            self.drop_inactive(&mut h, self.threshold());
            self.multiply(&mut h, self.up(), i, |dot| {
                activate(self.ffn.up_function, dot + bias(&self.up_bias))
            })?;
            self.drop_inactive(&mut h, 0.0);
        } else {
            self.multiply(&mut h, self.up(), i, |dot| {
                activate(self.ffn.function, dot + bias(&self.up_bias))
            })?;
            self.drop_inactive(&mut h, self.threshold());
        }
        Ok(h)
    }

    /// Multiplies `h` of the tokens still taking part by `f(weight_i . x)`. The row is read only if there is one.
    fn multiply(
        &self,
        h: &mut Hidden,
        weight: Halves,
        i: usize,
        f: impl Fn(f64) -> Result<f64>,
    ) -> Result<()> {
        if h.iter().all(Option::is_none) {
            return Ok(());
        }
        let dots = self.inputs.dots(&weight.row(self.run, i));
        for (h, dot) in h.iter_mut().zip(dots) {
            if let Some(h) = h {
                *h *= f(dot)?;
            }
        }
        Ok(())
    }

    fn up(&self) -> Halves {
        Halves { high: self.ffn.up, low: self.ffn.up_low }
    }

    fn threshold(&self) -> f64 {
        if let Selection::Threshold(threshold) = self.ffn.selection { threshold.into() } else { 0.0 }
    }

    /// Where the selection skips, drops what is at most `threshold` in magnitude (NaN stays).
    fn drop_inactive(&self, h: &mut Hidden, threshold: f64) {
        let known_before = matches!(self.ffn.selection, Selection::Bitplane(_) | Selection::Mask(_));
        let zeros = known_before && self.ffn.function.is_zero_below();
        if zeros || matches!(self.ffn.selection, Selection::GateFirst | Selection::Threshold(_)) {
            for h in h.iter_mut() {
                *h = h.filter(|x| x.is_nan() || x.abs() > threshold);
            }
        }
    }
}

/// Writes the optional outputs of one token: `h` as f32 (0 where a neuron took no part), and how many are not 0.
fn report(run: &Run<'_>, ffn: &Ffn, hidden: &[Hidden], token: usize) {
    let row: Vec<f64> = hidden.iter().map(|h| h[token].unwrap_or(0.0)).collect();
    if let Some(slot) = ffn.hidden {
        run.write_row(slot, token, &row);
    }
    if let Some(slot) = ffn.active_count {
        let count = row.iter().filter(|h| **h as f32 != 0.0).count() as i32;
        run.write_row_bytes(slot, token, &count.to_le_bytes());
    }
}

/// Step 2: each token's row of `h` quantised, with 0 for neurons that take no part.
fn quantised(run: &Run<'_>, arithmetic: Arithmetic, hidden: &[Hidden]) -> Result<Vec<Hidden>> {
    let mut out = hidden.to_vec();
    for token in 0..run.tokens {
        let mut row: Vec<f64> = hidden.iter().map(|h| h[token].unwrap_or(0.0)).collect();
        run.quantise(&mut row, arithmetic.hidden)?;
        for (h, value) in out.iter_mut().zip(row) {
            h[token] = h[token].and(Some(value));
        }
    }
    Ok(out)
}

/// Step 3: `sums[t][c] = sum_i h_i * down_i[c]`, neurons ascending.
fn down(run: &Run<'_>, ffn: &Ffn, hidden: &[Hidden]) -> Vec<Vec<f64>> {
    let width = run.columns(ffn.output);
    match ffn.down_layout {
        DownLayout::NeuronRows => {
            let mut sums = vec![vec![0.0; width]; run.tokens];
            for (i, h) in hidden.iter().enumerate().filter(|(_, h)| h.iter().any(Option::is_some)) {
                let row = run.row(ffn.down, i);
                for (sums, h) in sums.iter_mut().zip(h) {
                    if let Some(h) = h {
                        sums.iter_mut().zip(&row).for_each(|(sum, d)| *sum += h * d);
                    }
                }
            }
            sums
        }
        DownLayout::OutputRows => {
            let mut by_row = vec![vec![0.0; run.tokens]; width];
            parallel::for_each(&mut by_row, run.threads, |c, sums| {
                let row = run.row(ffn.down, c);
                for (h, d) in hidden.iter().zip(&row) {
                    for (sum, h) in sums.iter_mut().zip(h) {
                        if let Some(h) = h {
                            *sum += h * d;
                        }
                    }
                }
            });
            (0..run.tokens).map(|t| by_row.iter().map(|sums| sums[t]).collect()).collect()
        }
    }
}
