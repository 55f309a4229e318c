//! Thresholds that skip a given share of neurons, and what that misses (quantiles of a score over tokens and neurons of a
//! layer; CATS, arXiv 2404.08763, for the score |f(gate)|).

use serde::{Deserialize, Serialize};

/// Shares of skipped neurons that thresholds are made for.
pub const LEVELS: [f32; 9] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9];

/// One share of skipped neurons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Level {
    /// Share of neurons that are skipped.
    pub skipped: f32,
    /// Neurons with a score up to this are skipped.
    pub threshold: f32,
    /// Share of the output's mass that they would have made.
    pub missed: f64,
}

/// Scores of neurons, and what each would add to the output.
#[derive(Clone, Debug, Default)]
pub struct Scores {
    seen: Vec<(f32, f32)>,
}

impl Scores {
    /// Room for no more than this many is used: more tokens than that say nothing new.
    pub const MOST: usize = 4 << 20;

    /// A neuron of a token.
    pub fn see(&mut self, score: f32, mass: f32) {
        self.seen.push((score, mass));
    }

    /// Thresholds and missed mass for [`LEVELS`].
    pub fn levels(mut self) -> Vec<Level> {
        self.seen.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let total: f64 = self.seen.iter().map(|seen| f64::from(seen.1)).sum();
        let count = self.seen.len();
        let mut missed = 0.0;
        let mut at = 0;
        let level = |&skipped: &f32| {
            let wanted = ((f64::from(skipped) * count as f64).round() as usize).min(count);
            let threshold = wanted.checked_sub(1).map_or(0.0, |last| self.seen[last].0);
            while let Some(seen) = self.seen.get(at).filter(|seen| seen.0 <= threshold) {
                missed += f64::from(seen.1);
                at += 1;
            }
            Level { skipped, threshold, missed: if total > 0.0 { missed / total } else { 0.0 } }
        };
        LEVELS.iter().map(level).collect()
    }
}

/// The largest level whose missed mass, the mean over all layers, keeps to the budget; 0 where none does.
pub fn within(layers: &[&[Level]], budget: f64) -> f32 {
    let mut chosen = 0.0;
    for (at, &level) in LEVELS.iter().enumerate() {
        let missed: f64 = layers.iter().filter_map(|levels| levels.get(at)).map(|level| level.missed).sum();
        if layers.is_empty() || missed / layers.len() as f64 > budget {
            break;
        }
        chosen = level;
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_quantiles() {
        let mut scores = Scores::default();
        (1..=100).rev().for_each(|i| scores.see(i as f32, if i <= 30 { 0.0 } else { 1.0 }));
        let levels = scores.levels();
        let thresholds: Vec<f32> = levels.iter().map(|level| level.threshold).collect();
        assert_eq!(thresholds, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0]);
        let missed: Vec<i64> = levels.iter().map(|level| (level.missed * 70.0).round() as i64).collect();
        assert_eq!(missed, [0, 0, 0, 10, 20, 30, 40, 50, 60]);
        assert_eq!(within(&[&levels], 0.3), 0.5);
        assert_eq!(within(&[&levels], 0.0), 0.3);
        assert_eq!(within(&[], 0.5), 0.0);
    }

    #[test]
    fn equal_scores_go_together() {
        let mut scores = Scores::default();
        (0..10).for_each(|i| scores.see(if i < 6 { 0.0 } else { 1.0 }, 1.0));
        let levels = scores.levels();
        assert_eq!((levels[0].threshold, levels[5].threshold), (0.0, 0.0));
        assert!((levels[0].missed - 0.6).abs() < 1e-9);
    }
}
