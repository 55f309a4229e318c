//! What the high planes of a layer say about its neurons.

use crate::Result;
use crate::network::{Function, Network};
use crate::planes::{HighPlane, lengths};

/// The high planes of a layer.
pub(super) struct High<'a> {
    pub(super) gate: &'a HighPlane,
    pub(super) up: Option<&'a HighPlane>,
}

/// What the high planes say of a chunk, a row of neurons per token.
#[derive(Default)]
pub(super) struct Guess {
    gate: Vec<f32>,
    /// Empty where up is not in planes.
    up: Vec<f32>,
    /// Of each token's input.
    lengths: Vec<f32>,
}

impl High<'_> {
    pub(super) fn guess(&self, network: &Network, inputs: &[f32], out: &mut Guess) -> Result<()> {
        self.gate.estimate(network.gate_bias.as_deref(), inputs, &mut out.gate)?;
        if let Some(up) = self.up {
            up.estimate(network.up_bias.as_deref(), inputs, &mut out.up)?;
        }
        out.lengths = lengths(inputs, network.width);
        Ok(())
    }

    /// Estimates by their deviations, the least of gate's and (where up goes through ReLU) up's: a neuron of token `t` is
    /// kept iff this plus the margin is above 0.
    pub(super) fn ratio(&self, network: &Network, guess: &Guess, (t, i): (usize, usize)) -> f32 {
        let at = t * network.neurons + i;
        let by = |estimate: f32, deviation: f32| {
            let deviation = deviation * guess.lengths[t];
            if deviation > 0.0 {
                estimate / deviation
            } else if estimate > 0.0 {
                f32::MAX
            } else {
                f32::MIN
            }
        };
        let gate = by(guess.gate[at], self.gate.deviation[i]);
        match self.up.filter(|_| network.up_function == Function::Relu) {
            Some(up) => gate.min(by(guess.up[at], up.deviation[i])),
            None => gate,
        }
    }

    /// |f(gate)| |f_up(up)| |row of down| by the estimates, up left out where it is not in planes.
    pub(super) fn score(
        &self,
        network: &Network,
        guess: &Guess,
        norms: &[f32],
        (t, i): (usize, usize),
    ) -> f32 {
        let at = t * network.neurons + i;
        let up = guess.up.get(at).map_or(1.0, |&up| network.up_function.of(up).abs());
        network.function.of(guess.gate[at]).abs() * up * norms[i]
    }
}
