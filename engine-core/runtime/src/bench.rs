//! Measures prefill and decode as llama-bench does: pp is one prefill of n tokens into an empty KV cache, tg is n single
//! decodes after it was emptied again.

use crate::generate::per_second;
use crate::{Engine, Result, RuntimeError};
use serde::Serialize;
use std::time::Instant;

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchOptions {
    /// Tokens of the prefill; 0 measures none.
    pub prompt: u32,
    /// Tokens that are decoded; 0 measures none.
    pub generate: u32,
    /// How often each is measured; before that each runs once for warming up.
    pub repeats: u32,
}

impl Default for BenchOptions {
    fn default() -> BenchOptions {
        BenchOptions { prompt: 512, generate: 128, repeats: 5 }
    }
}

/// Every measurement, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BenchReport {
    /// Tokens of a prefill.
    pub prompt: u32,
    /// Tokens decoded.
    pub generate: u32,
    /// Tokens per second of each prefill.
    pub prompt_runs: Vec<f64>,
    /// Tokens per second of each decode run.
    pub generate_runs: Vec<f64>,
}

/// Middle value; between two, their mean. 0 for none.
pub fn median(runs: &[f64]) -> f64 {
    let mut sorted = runs.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.len(), sorted.len() / 2) {
        (0, _) => 0.0,
        (n, middle) if n % 2 == 1 => sorted[middle],
        (_, middle) => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// Mean and sample standard deviation (0 for fewer than two runs).
pub fn mean_and_deviation(runs: &[f64]) -> (f64, f64) {
    let count = runs.len() as f64;
    if runs.is_empty() {
        return (0.0, 0.0);
    }
    let mean = runs.iter().sum::<f64>() / count;
    let squares: f64 = runs.iter().map(|run| (run - mean).powi(2)).sum();
    (mean, if runs.len() < 2 { 0.0 } else { (squares / (count - 1.0)).sqrt() })
}

/// Measures an engine. The ids are fixed and spread over the vocabulary; what they mean does not matter.
///
/// # Errors
/// Where the context is shorter than a run, and where the device fails.
pub fn bench(engine: &Engine, options: BenchOptions) -> Result<BenchReport> {
    let vocabulary = engine.model().sampleable_vocab.max(1) as u64;
    let id = |index: u32| ((u64::from(index) * 7919 + 13) % vocabulary) as u32;
    let longest = options.prompt.max(options.generate);
    if longest > engine.context() {
        return Err(RuntimeError::ContextFull {
            past: 0,
            tokens: longest as usize,
            context: engine.context(),
        });
    }
    let prompt: Vec<u32> = (0..options.prompt).map(id).collect();
    let mut session = engine.session()?;
    let mut report =
        BenchReport { prompt: options.prompt, generate: options.generate, ..BenchReport::default() };
    // Run 0 warms up. The two kinds take turns, so that a slow moment of the machine meets both.
    for run in 0..=options.repeats {
        if options.prompt > 0 {
            session.rewind(0)?;
            let started = Instant::now();
            session.prefill(&prompt)?;
            if run > 0 {
                report.prompt_runs.push(per_second(options.prompt, started.elapsed()));
            }
        }
        if options.generate > 0 {
            session.rewind(0)?;
            let tokens = if run == 0 { options.generate.min(8) } else { options.generate };
            let started = Instant::now();
            for index in 0..tokens {
                session.decode(id(index))?;
            }
            if run > 0 {
                report.generate_runs.push(per_second(tokens, started.elapsed()));
            }
        }
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages() {
        assert_eq!((median(&[]), median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0])), (0.0, 2.0, 2.5));
        assert_eq!(mean_and_deviation(&[]), (0.0, 0.0));
        assert_eq!(mean_and_deviation(&[2.0]), (2.0, 0.0));
        assert_eq!(mean_and_deviation(&[1.0, 3.0]), (2.0, 2f64.sqrt()));
    }
}
