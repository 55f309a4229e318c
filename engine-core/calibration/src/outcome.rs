//! What skipping does to a layer: which active neurons are missed, and how far the output moves.

use crate::Result;
use crate::network::Network;
use serde::{Deserialize, Serialize};

/// Shares over all tokens of what was looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Of all neurons, those that are computed.
    pub kept: f64,
    /// Of the active ones, those that are computed.
    pub recall: f64,
    /// Of those that are computed, the active ones.
    pub precision: f64,
    /// Of the sum of |h| x |row of down|, what is skipped.
    pub missed: f64,
    /// Mean cosine between the layer's output with and without skipping.
    pub cosine: f64,
}

/// Adds up an [`Outcome`].
#[derive(Clone, Debug, Default)]
pub struct Tally {
    neurons: u64,
    kept: u64,
    active: u64,
    both: u64,
    mass: f64,
    skipped: f64,
    cosines: f64,
    tokens: u64,
}

/// A chunk of tokens as it is without skipping.
pub struct Exact<'a> {
    /// The layer.
    pub network: &'a Network,
    /// Length of each neuron's row of down.
    pub norms: &'a [f32],
    /// A row of neurons per token.
    pub hidden: &'a [f32],
    /// Which of them are active.
    pub active: &'a [bool],
    /// The layer's output, a row per token.
    pub output: &'a [f32],
}

/// Which neurons are active: those whose `h` is not 0; where hardly any is 0, those above the mean of the row's |h|.
pub fn active(network: &Network, hidden: &[f32], out: &mut Vec<bool>) {
    out.clear();
    for row in hidden.chunks_exact(network.neurons.max(1)) {
        let mean = row.iter().map(|h| f64::from(h.abs())).sum::<f64>() / row.len() as f64;
        let limit = if network.is_zero_below() { 0.0 } else { mean as f32 };
        out.extend(row.iter().map(|h| h.abs() > limit));
    }
}

/// Of the active neurons in `on`, a row per token, leaves those that add more to the output than the row's do on average.
pub(crate) fn large(network: &Network, norms: &[f32], hidden: &[f32], on: &mut [bool]) {
    let neurons = network.neurons.max(1);
    for (hidden, on) in hidden.chunks_exact(neurons).zip(on.chunks_exact_mut(neurons)) {
        let mass = |i: usize| f64::from(hidden[i].abs()) * f64::from(norms[i]);
        let active = (0..on.len()).filter(|&i| on[i]);
        let (sum, count) = active.fold((0.0, 0u32), |(sum, count), i| (sum + mass(i), count + 1));
        let mean = sum / f64::from(count.max(1));
        (0..on.len()).for_each(|i| on[i] = on[i] && mass(i) > mean);
    }
}

impl Tally {
    /// A chunk of which the neurons in `keep` are computed.
    ///
    /// # Errors
    /// Where sizes do not belong together.
    pub fn see(&mut self, exact: &Exact<'_>, keep: &[bool]) -> Result<()> {
        let network = exact.network;
        let mut left = exact.hidden.to_vec();
        let rows =
            left.chunks_exact_mut(network.neurons.max(1)).zip(keep.chunks_exact(network.neurons.max(1)));
        for ((row, keep), active) in rows.zip(exact.active.chunks_exact(network.neurons.max(1))) {
            for (i, h) in row.iter_mut().enumerate() {
                let mass = f64::from(h.abs()) * f64::from(exact.norms[i]);
                self.mass += mass;
                self.kept += u64::from(keep[i]);
                self.active += u64::from(active[i]);
                self.both += u64::from(keep[i] && active[i]);
                if !keep[i] {
                    self.skipped += mass;
                    *h = 0.0;
                }
            }
        }
        self.neurons += left.len() as u64;
        let mut output = Vec::new();
        network.output(&left, &mut output)?;
        for (a, b) in exact.output.chunks_exact(network.width).zip(output.chunks_exact(network.width)) {
            self.cosines += cosine(a, b);
            self.tokens += 1;
        }
        Ok(())
    }

    /// What came of it.
    pub fn outcome(&self) -> Outcome {
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 1.0 };
        Outcome {
            kept: share(self.kept as f64, self.neurons as f64),
            recall: share(self.both as f64, self.active as f64),
            precision: share(self.both as f64, self.kept as f64),
            missed: if self.mass > 0.0 { self.skipped / self.mass } else { 0.0 },
            cosine: share(self.cosines, self.tokens as f64),
        }
    }
}

/// Of two vectors; 1 where both are nothing.
fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 { dot(a, b) / lengths } else { f64::from(u8::from(dot(a, a) == dot(b, b))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Function;

    #[test]
    fn shares_are_counted() {
        let network = Network {
            width: 1,
            neurons: 4,
            gate: None,
            up: vec![0.0; 4],
            down: vec![1.0, 2.0, 1.0, 1.0],
            gate_bias: None,
            up_bias: None,
            function: Function::Relu,
            up_function: Function::Identity,
        };
        let hidden = [1.0, 2.0, 0.0, 0.0];
        let mut on = Vec::new();
        active(&network, &hidden, &mut on);
        assert_eq!(on, [true, true, false, false]);
        let exact = Exact {
            network: &network,
            norms: &network.down_norms(),
            hidden: &hidden,
            active: &on,
            output: &[5.0],
        };
        let mut tally = Tally::default();
        tally.see(&exact, &[false, true, true, false]).unwrap();
        let found = tally.outcome();
        assert_eq!((found.kept, found.recall, found.precision), (0.5, 0.5, 0.5));
        assert!((found.missed - 0.2).abs() < 1e-12 && (found.cosine - 1.0).abs() < 1e-12);
        let mut all = Tally::default();
        all.see(&exact, &[false; 4]).unwrap();
        assert_eq!((all.outcome().recall, all.outcome().missed, all.outcome().cosine), (0.0, 1.0, 0.0));
    }

    #[test]
    fn where_nothing_is_zero_the_larger_ones_are_active() {
        let silu = Network {
            width: 1,
            neurons: 4,
            gate: None,
            up: vec![],
            down: vec![],
            gate_bias: None,
            up_bias: None,
            function: Function::Silu,
            up_function: Function::Identity,
        };
        let mut on = Vec::new();
        active(&silu, &[0.1, -3.0, 0.2, 0.3], &mut on);
        assert_eq!(on, [false, true, false, false]);
    }
}
