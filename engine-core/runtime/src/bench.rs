//! Measures prefill and decode as llama-bench does: pp is one prefill of n tokens into an empty KV cache, tg is n single
//! decodes after it was emptied again. Several engines are measured in turns, so that one can be held against another.

use crate::generate::per_second;
use crate::step_bytes::StepBytes;
use crate::{Engine, Result, RuntimeError, Session};
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
    /// What a decoded token read, by the devices' own counts over all measured runs, and by arithmetic for those that keep none
    /// and skip nothing; `None` where neither says it.
    pub step_bytes: Option<StepBytes>,
}

/// How fast decoding could be if only bytes counted: the speed of another policy, dense as a rule, times its bytes over
/// one's own.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// Tokens per second of the other, at the median.
    pub against_tokens_per_second: f64,
    /// Bytes that it reads per token.
    pub against_bytes: f64,
    /// Bytes that are read per token.
    pub bytes: f64,
    /// Tokens per second that the bytes allow.
    pub tokens_per_second: f64,
    /// Share of that which was reached.
    pub reached: f64,
}

impl Bound {
    /// Of one report against another of the same run; `None` where nothing was decoded or bytes were not counted.
    pub fn of(report: &BenchReport, against: &BenchReport) -> Option<Bound> {
        let (bytes, against_bytes) = (report.step_bytes?.total(), against.step_bytes?.total());
        let (speed, against_speed) = (median(&report.generate_runs), median(&against.generate_runs));
        let bound = against_speed * against_bytes / bytes;
        let known = bytes > 0.0 && bound > 0.0;
        known.then_some(Bound {
            against_tokens_per_second: against_speed,
            against_bytes,
            bytes,
            tokens_per_second: bound,
            reached: speed / bound,
        })
    }
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

/// Measures engines in turns: a report for each, in their order. Without `ids` these are fixed and spread over the
/// vocabulary; what they mean decides which neurons are active, so figures of sparse policies want those of a real text.
///
/// # Errors
/// Where the context is shorter than a run, there are fewer `ids` than a run takes, and where the device fails.
pub fn bench(engines: &[&Engine], options: BenchOptions, ids: Option<&[u32]>) -> Result<Vec<BenchReport>> {
    let longest = options.prompt.max(options.generate) as usize;
    let mut runs = Vec::new();
    for engine in engines {
        if longest > engine.context() as usize {
            return Err(RuntimeError::ContextFull { past: 0, tokens: longest, context: engine.context() });
        }
        let vocabulary = engine.model().sampleable_vocab.max(1) as u64;
        let ids: Vec<u32> = match ids {
            Some(ids) => ids.iter().copied().take(longest).collect(),
            None => (0..longest as u64).map(|index| ((index * 7919 + 13) % vocabulary) as u32).collect(),
        };
        if ids.len() < longest {
            let problem = format!("has {} ids, and a run takes {longest}; give a longer one", ids.len());
            return Err(RuntimeError::Option { option: "text", problem });
        }
        let report =
            BenchReport { prompt: options.prompt, generate: options.generate, ..BenchReport::default() };
        runs.push(Run { session: engine.session()?, ids, report, read: 0 });
    }
    // Run 0 warms up. The kinds take turns, and so do the engines, so that a slow moment of the machine meets all.
    for turn in 0..=options.repeats {
        if options.prompt > 0 {
            runs.iter_mut().try_for_each(|run| run.prefill(turn > 0))?;
        }
        if options.generate > 0 {
            // The one that goes first alternates.
            let count = runs.len();
            (0..count).try_for_each(|at| runs[(at + turn as usize) % count].generate(turn > 0))?;
        }
    }
    let tokens = f64::from(options.generate) * f64::from(options.repeats);
    Ok(runs
        .into_iter()
        .map(|mut run| {
            let engine = run.session.engine();
            let uncounted = engine.weight_bytes_uncounted().filter(|_| tokens > 0.0);
            run.report.step_bytes = uncounted.map(|uncounted| {
                engine.step_bytes(run.read as f64 / tokens + uncounted as f64, options.generate)
            });
            run.report
        })
        .collect())
}

/// One engine under measurement.
struct Run {
    session: Session,
    ids: Vec<u32>,
    report: BenchReport,
    /// Bytes of weights that devices which count them read while decoding was measured.
    read: u64,
}

impl Run {
    fn prefill(&mut self, measured: bool) -> Result<()> {
        self.session.rewind(0)?;
        let started = Instant::now();
        self.session.prefill(&self.ids[..self.report.prompt as usize])?;
        if measured {
            self.report.prompt_runs.push(per_second(self.report.prompt, started.elapsed()));
        }
        Ok(())
    }

    fn generate(&mut self, measured: bool) -> Result<()> {
        self.session.rewind(0)?;
        let tokens = if measured { self.report.generate } else { self.report.generate.min(8) };
        let before = self.session.engine().weight_bytes_read();
        let started = Instant::now();
        for &id in &self.ids[..tokens as usize] {
            self.session.decode(id)?;
        }
        let time = started.elapsed();
        if measured {
            self.report.generate_runs.push(per_second(tokens, time));
            let after = self.session.engine().weight_bytes_read();
            self.read += after.saturating_sub(before);
        }
        Ok(())
    }
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

    #[test]
    fn a_bound_is_the_others_speed_by_bytes() {
        let report = |speed, ffn| BenchReport {
            generate_runs: vec![speed],
            step_bytes: Some(StepBytes { ffn, head: 20, ..StepBytes::default() }),
            ..BenchReport::default()
        };
        let bound = Bound::of(&report(15.0, 20.0), &report(10.0, 60.0)).unwrap();
        assert_eq!((bound.tokens_per_second, bound.reached), (20.0, 0.75));
        assert_eq!(Bound::of(&report(15.0, 20.0), &BenchReport::default()), None);
        let nothing = BenchReport { generate_runs: Vec::new(), ..report(0.0, 1.0) };
        assert_eq!(Bound::of(&nothing, &nothing), None);
    }
}
