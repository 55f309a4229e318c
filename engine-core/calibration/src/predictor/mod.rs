//! Low-rank predictors: neuron i counts as active iff row i of fc2 . relu(fc1 . x) reaches a threshold (PowerInfer,
//! SOSP'24, section 5; the form of its released code: no biases, x a residual before any norm).

mod random;
mod search;
mod threshold;
mod train;

pub(crate) use random::Random;
pub use search::{Task, Trained, search};

use crate::{Result, product};
use engine_core::DType;
use formats::convert::predictor_type;
use formats::quantise::{dequantise, quantise};

/// Ranks are multiples of this, a block of fc2.
pub const RANKS: usize = 32;

/// What training is held to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Largest share of the output's mass that may be missed.
    pub missed: f64,
    /// Least share of active neurons that must be found.
    pub recall: f64,
    /// How often every token is trained on.
    pub epochs: usize,
    /// Largest rank that is tried.
    pub most_rank: usize,
    /// Of the random numbers.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Options { missed: 0.01, recall: 0.96, epochs: 6, most_rank: 512, seed: 1 }
    }
}

/// A predictor in f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Predictor {
    /// Rows of fc1.
    pub rank: usize,
    /// `[rank x width]`.
    pub fc1: Vec<f32>,
    /// `[neurons x rank]`.
    pub fc2: Vec<f32>,
    /// Scores from here on count as active.
    pub threshold: f32,
}

impl Predictor {
    /// Scores for some residuals, a row of neurons per token.
    ///
    /// # Errors
    /// Where sizes do not belong together.
    pub fn scores(&self, residuals: &[f32], out: &mut Vec<f32>) -> Result<()> {
        let width = self.fc1.len() / self.rank.max(1);
        let tokens = residuals.len() / width.max(1);
        let mut inner = vec![0.0; tokens * self.rank];
        product::by_rows(residuals, &self.fc1, width, &mut inner)?;
        inner.iter_mut().for_each(|x| *x = x.max(0.0));
        out.resize(tokens * (self.fc2.len() / self.rank.max(1)), 0.0);
        product::by_rows(&inner, &self.fc2, self.rank, out)
    }

    /// Both matrices as they are stored (fc2 in Q8_0, fc1 in [`predictor_type`]), and the predictor as it is after that.
    ///
    /// # Errors
    /// Where a value does not fit.
    pub fn encoded(&self) -> Result<(Vec<u8>, Vec<u8>, Predictor)> {
        let width = self.fc1.len() / self.rank.max(1);
        let first = predictor_type(width as u64);
        let (fc1, fc2) = (quantise(first, &self.fc1)?, quantise(DType::Q8_0, &self.fc2)?);
        let mut stored = self.clone();
        dequantise(first, &fc1, &mut stored.fc1)?;
        dequantise(DType::Q8_0, &fc2, &mut stored.fc2)?;
        Ok((fc1, fc2, stored))
    }
}

/// Which neurons are active, a bit each, a row per token.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    words: Vec<u64>,
    per_row: usize,
}

impl Labels {
    /// Appends the rows of some tokens.
    pub fn extend(&mut self, active: &[bool], neurons: usize) {
        self.per_row = neurons.div_ceil(64);
        for row in active.chunks_exact(neurons.max(1)) {
            for part in row.chunks(64) {
                let word = part.iter().enumerate().fold(0u64, |word, (at, &bit)| word | u64::from(bit) << at);
                self.words.push(word);
            }
        }
    }

    /// Bits of a row, 64 in each word.
    fn row(&self, at: usize) -> &[u64] {
        self.words.get(at * self.per_row..(at + 1) * self.per_row).unwrap_or_default()
    }
}
