//! The rank of a layer's predictor: it begins with the layer's sparsity and skewness (PowerInfer, SOSP'24, section 5) and
//! goes up or down while that makes a token read fewer bytes, predictor and neurons together, within the error budget.

use super::threshold::Calibration;
use super::train::{Examples, train};
use super::{Labels, Options, Predictor, RANKS};
use crate::Result;
use crate::rows::Rows;
use formats::convert::predictor_type;
use std::sync::atomic::AtomicBool;

/// Tokens and epochs of the short trainings that compare ranks.
const SHORT: (usize, usize) = (8192, 3);
/// Tokens that are scored at once.
const CHUNK: usize = 128;
/// Bytes of an element in Q8_0.
const Q8: f64 = 34.0 / 32.0;

/// A layer to be predicted.
pub struct Task<'a> {
    /// What the predictor is given, all tokens.
    pub residuals: Rows<'a>,
    /// Which neurons are active, all tokens.
    pub labels: &'a Labels,
    /// Which of them add more to the output than the token's active neurons do on average.
    pub large: &'a Labels,
    /// Neurons of the layer.
    pub neurons: usize,
    /// Tokens that train.
    pub train: &'a [usize],
    /// Tokens that set rank and threshold.
    pub tune: &'a [usize],
    /// What each neuron adds to the output: a row of neurons for each of `tune`.
    pub masses: &'a [f32],
    /// Mean share of active neurons.
    pub active: f64,
    /// The share of all activations that the hottest neurons make.
    pub hottest: f64,
    /// Matrices per neuron.
    pub matrices: usize,
    /// Whether the others of a neuron are read only where its gate is active.
    pub gate_decides: bool,
}

/// A predictor as it is stored, and how it came about.
#[derive(Clone, Debug)]
pub struct Trained {
    /// With its threshold; values as they are after storing.
    pub predictor: Predictor,
    /// fc1 as it is stored.
    pub fc1: Vec<u8>,
    /// fc2 in Q8_0.
    pub fc2: Vec<u8>,
    /// Ranks that were compared, and the share of the network's bytes that a token reads with each.
    pub compared: Vec<(usize, f64)>,
}

/// Finds a rank, trains, and sets the threshold. `progress` is told the share that is done.
///
/// # Errors
/// As training.
pub fn search(
    task: &Task<'_>,
    options: &Options,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(f64),
) -> Result<Trained> {
    let width = task.residuals.width();
    let most = options.most_rank.min(width).max(RANKS) / RANKS * RANKS;
    let rounded = |rank: f64| ((rank / RANKS as f64).round() as usize * RANKS).clamp(RANKS, most);
    // Half the width for a layer that is all active, less where it is sparse; less again where few neurons make most
    // activations, since those are easily told.
    let first = rounded(0.5 * width as f64 * task.active.sqrt() * (1.5 - task.hottest));
    let count = task.train.len();
    let short: Vec<usize> =
        (0..count.min(SHORT.0)).map(|at| task.train[at * count / count.min(SHORT.0)]).collect();
    let epochs = SHORT.1.min(options.epochs);
    let mut compared: Vec<(usize, f64)> = Vec::new();
    // Work in steps of one token; the search is thought to try three ranks.
    let (trial, whole) = ((short.len() * epochs) as f64, (task.train.len() * options.epochs) as f64);
    let total = 3.0 * trial + whole;
    let mut done = 0.0;
    let mut cost = |rank: usize, progress: &mut dyn FnMut(f64)| -> Result<f64> {
        if let Some(&(_, cost)) = compared.iter().find(|&&(tried, _)| tried == rank) {
            return Ok(cost);
        }
        let examples = Examples {
            residuals: task.residuals,
            labels: task.labels,
            large: task.large,
            neurons: task.neurons,
            rows: &short,
        };
        let mut told = |share: f64| progress((done + share * trial).min(3.0 * trial) / total);
        let predictor = train(&examples, rank, epochs, options.seed, cancel, &mut told)?;
        done += trial;
        let (_, reached) = calibrate(task, &predictor, options)?;
        let first = predictor_type(width as u64).row_bytes(width as u64).unwrap_or_default();
        let own = rank as f64 * (first as f64 + Q8 * task.neurons as f64);
        let network = (task.matrices * width * task.neurons) as f64 * Q8;
        let matrices = task.matrices as f64;
        let read = match task.gate_decides {
            true => (reached + (matrices - 1.0) * reached.min(task.active)) / matrices,
            false => reached,
        };
        let share = own / network + read;
        compared.push((rank, share));
        Ok(share)
    };
    let mut best = (first, cost(first, progress)?);
    for factor in [0.5, 2.0] {
        loop {
            let next = rounded(best.0 as f64 * factor);
            if next == best.0 {
                break;
            }
            let share = cost(next, progress)?;
            if share >= best.1 {
                break;
            }
            best = (next, share);
        }
    }
    let examples = Examples {
        residuals: task.residuals,
        labels: task.labels,
        large: task.large,
        neurons: task.neurons,
        rows: task.train,
    };
    let mut told = |share: f64| progress((3.0 * trial + share * whole) / total);
    let predictor = train(&examples, best.0, options.epochs, options.seed, cancel, &mut told)?;
    let (fc1, fc2, mut stored) = predictor.encoded()?;
    stored.threshold = calibrate(task, &stored, options)?.0;
    Ok(Trained { predictor: stored, fc1, fc2, compared })
}

/// The threshold, and the share of neurons that reaches it.
fn calibrate(task: &Task<'_>, predictor: &Predictor, options: &Options) -> Result<(f32, f64)> {
    let mut calibration = Calibration::default();
    let (mut residuals, mut scores) = (Vec::new(), Vec::new());
    let masses = task.masses.chunks(CHUNK * task.neurons.max(1));
    for (rows, masses) in task.tune.chunks(CHUNK).zip(masses) {
        task.residuals.gather(rows.iter().copied(), &mut residuals);
        predictor.scores(&residuals, &mut scores)?;
        let by_token = scores.chunks_exact(task.neurons.max(1)).zip(masses.chunks_exact(task.neurons.max(1)));
        for (&row, (scores, masses)) in rows.iter().zip(by_token) {
            let labels = task.labels.row(row);
            for (i, (&score, &mass)) in scores.iter().zip(masses).enumerate() {
                let active = labels.get(i / 64).is_some_and(|word| word >> (i % 64) & 1 == 1);
                calibration.see(score, active, mass);
            }
        }
    }
    Ok(calibration.threshold(options.recall, options.missed))
}
