//! Chooses the next token from logits.
//!
//! The order is llama.cpp's default: repetition penalty, top-k, top-p, min-p, temperature. Ties go to the lower id. The
//! same logits, recent ids, options and seed give the same choice, always.
//!
//! | option | meaning at its ends |
//! |---|---|
//! | `temperature` | 0: the most likely id (after the penalty), nothing is drawn; towards 0 the same but for exact ties; large: all kept ids alike |
//! | `top_k` | 0 or at least the vocabulary: all ids; 1: the most likely one |
//! | `top_p` | 0: the most likely id; 1: all ids |
//! | `min_p` | 0: all ids; 1: only those as likely as the most likely one |
//! | `repeat_penalty` | 1: changes nothing |

mod random;

use crate::{Result, RuntimeError};
use engine_core::config::Sampling;
use random::Random;
use std::hash::{BuildHasher, Hasher, RandomState};

/// How tokens are chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// 0 takes the most likely token always.
    pub temperature: f32,
    /// Keeps the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the most likely tokens that together have this probability; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens with at least this share of the most likely one's probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of recent tokens; 1 changes nothing.
    pub repeat_penalty: f32,
    /// How many recent tokens the penalty covers; 0 covers none.
    pub repeat_last: u32,
    /// Seed; absent takes one from the system, which [`Sampler::seed`] reports.
    pub seed: Option<u64>,
}

impl From<&Sampling> for SamplingOptions {
    fn from(config: &Sampling) -> SamplingOptions {
        SamplingOptions {
            temperature: config.temperature,
            top_k: config.top_k,
            top_p: config.top_p,
            min_p: config.min_p,
            repeat_penalty: config.repeat_penalty,
            repeat_last: config.repeat_last,
            seed: config.seed,
        }
    }
}

impl Default for SamplingOptions {
    fn default() -> SamplingOptions {
        SamplingOptions::from(&Sampling::default())
    }
}

impl SamplingOptions {
    /// The most likely token always.
    pub fn greedy() -> SamplingOptions {
        SamplingOptions { temperature: 0.0, repeat_penalty: 1.0, seed: Some(0), ..SamplingOptions::default() }
    }

    fn check(&self) -> Result<()> {
        let within = |option, value: f32, least: f32, most: f32| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            Err(RuntimeError::Option {
                option,
                problem: format!("is {value}; {least} to {most} is accepted"),
            })
        };
        within("temperature", self.temperature, 0.0, 1e9)?;
        within("top_p", self.top_p, 0.0, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("repeat_penalty", self.repeat_penalty, 0.01, 100.0)
    }
}

/// An id that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    id: u32,
    logit: f32,
}

/// The most likely first, of equal ones the lower id.
fn by_likelihood(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Chooses tokens; its random numbers go on from choice to choice.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    seed: u64,
    random: Random,
    candidates: Vec<Candidate>,
    weights: Vec<f64>,
}

impl Sampler {
    /// A sampler at its start.
    ///
    /// # Errors
    /// For an option out of its range, naming it.
    pub fn new(options: SamplingOptions) -> Result<Sampler> {
        options.check()?;
        let seed = options.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish());
        Ok(Sampler { options, seed, random: Random::new(seed), candidates: Vec::new(), weights: Vec::new() })
    }

    /// The seed, given or taken from the system.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Chooses an id below `logits.len()`. `logits` are finite; `recent` are the ids so far, oldest first. For no
    /// logits the answer is 0.
    pub fn sample(&mut self, logits: &[f32], recent: &[u32]) -> u32 {
        self.candidates.clear();
        self.candidates.extend(logits.iter().zip(0u32..).map(|(&logit, id)| Candidate { id, logit }));
        self.penalise(recent);
        if self.options.temperature == 0.0 {
            return self.candidates.iter().min_by(|a, b| by_likelihood(a, b)).map_or(0, |best| best.id);
        }
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
    }

    fn penalise(&mut self, recent: &[u32]) {
        let penalty = self.options.repeat_penalty;
        if penalty == 1.0 {
            return;
        }
        let first = recent.len().saturating_sub(self.options.repeat_last as usize);
        let mut ids = recent[first..].to_vec();
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            // Candidates still stand in the order of their ids.
            if let Some(candidate) = self.candidates.get_mut(id as usize) {
                let logit = candidate.logit;
                candidate.logit = if logit > 0.0 { logit / penalty } else { logit * penalty };
            }
        }
    }

    fn keep_top_k(&mut self) {
        let k = self.options.top_k as usize;
        if k != 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, by_likelihood);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(by_likelihood);
    }

    fn keep_top_p(&mut self) {
        let p = f64::from(self.options.top_p);
        if p >= 1.0 {
            return;
        }
        let total = self.weigh(1.0);
        let mut sum = 0.0;
        let reaches = |weight: &f64| {
            sum += weight;
            sum >= p * total
        };
        let kept = self.weights.iter().position(reaches).map_or(self.candidates.len(), |last| last + 1);
        self.candidates.truncate(kept);
    }

    fn keep_min_p(&mut self) {
        let share = f64::from(self.options.min_p);
        let Some(best) = self.candidates.first().map(|best| f64::from(best.logit)) else { return };
        // A probability's share of the best one is exp of the logits' difference; ln(0) keeps all.
        let least = best + share.ln();
        let kept = self.candidates.partition_point(|candidate| f64::from(candidate.logit) >= least);
        self.candidates.truncate(kept.max(1));
    }

    fn draw(&mut self) -> u32 {
        let total = self.weigh(f64::from(self.options.temperature));
        let target = self.random.unit() * total;
        let mut sum = 0.0;
        let reaches = |weight: &f64| {
            sum += weight;
            sum > target
        };
        let at = self.weights.iter().position(reaches).unwrap_or(self.weights.len().saturating_sub(1));
        self.candidates.get(at).map_or(0, |candidate| candidate.id)
    }

    /// Fills `weights` with exp((logit - best) / temperature), all in 0..=1; returns their sum, at least 1.
    fn weigh(&mut self, temperature: f64) -> f64 {
        self.weights.clear();
        let Some(best) = self.candidates.first().map(|best| f64::from(best.logit)) else { return 1.0 };
        let weight = |candidate: &Candidate| ((f64::from(candidate.logit) - best) / temperature).exp();
        self.weights.extend(self.candidates.iter().map(weight));
        self.weights.iter().sum()
    }
}

#[cfg(test)]
mod tests;
