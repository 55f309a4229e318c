//! Which neurons are active together. PowerInfer-2 found that, the hot ones aside, neurons of one matrix are active
//! together less than 20% of the time, so that reading one hardly pays for another; this measures it.

use crate::activity::HOTTEST;
use serde::{Deserialize, Serialize};

/// Neurons whose companions are looked for.
const SAMPLED: usize = 96;
/// Tokens that are looked at.
pub const TOKENS: usize = 8192;

/// How neurons outside the hottest keep company.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Coactivation {
    /// When a neuron is active, how often its most frequent companion is.
    pub companion: f64,
    /// How many times more often that is than the companion is active at all.
    pub lift: f64,
}

/// Bits of tokens, a column per neuron.
#[derive(Clone, Debug)]
pub struct Columns {
    words: Vec<u64>,
    per_neuron: usize,
    tokens: usize,
}

impl Columns {
    /// For at most this many tokens, and no more than [`TOKENS`].
    pub fn new(neurons: usize, tokens: usize) -> Columns {
        let per_neuron = tokens.min(TOKENS).div_ceil(64);
        Columns { words: vec![0; neurons * per_neuron], per_neuron, tokens: 0 }
    }

    /// The next token's active neurons; nothing where there is no room.
    pub fn see(&mut self, active: &[bool]) {
        let at = self.tokens;
        if at >= self.per_neuron * 64 {
            return;
        }
        let words = self.words.chunks_exact_mut(self.per_neuron.max(1));
        words.zip(active).for_each(|(words, &active)| words[at / 64] |= u64::from(active) << (at % 64));
        self.tokens += 1;
    }

    /// Companions among the neurons of `order` (most active first) that are not among the hottest.
    pub fn coactivation(&self, order: &[u32]) -> Coactivation {
        let hottest = (order.len() as f64 * HOTTEST).ceil() as usize;
        let column = |i: u32| {
            let start = i as usize * self.per_neuron;
            &self.words[start..start + self.per_neuron]
        };
        let ones = |words: &[u64]| words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        let cold: Vec<(u32, u64)> = order
            .iter()
            .skip(hottest)
            .map(|&i| (i, ones(column(i))))
            .filter(|&(_, count)| count > 0)
            .collect();
        let step = cold.len().div_ceil(SAMPLED).max(1);
        let (mut companion, mut lift, mut weight) = (0.0, 0.0, 0.0);
        for &(i, count) in cold.iter().step_by(step) {
            let own = column(i);
            let together =
                |j: u32| own.iter().zip(column(j)).map(|(a, b)| u64::from((a & b).count_ones())).sum::<u64>();
            let others = cold.iter().filter(|other| other.0 != i);
            let most =
                others.map(|&(j, all)| (together(j), all)).max_by_key(|&(both, all)| (both, u64::MAX - all));
            let Some((both, all)) = most else { continue };
            let often = both as f64 / count as f64;
            companion += often * count as f64;
            lift += often * self.tokens as f64 / all as f64 * count as f64;
            weight += count as f64;
        }
        if weight == 0.0 {
            return Coactivation::default();
        }
        Coactivation { companion: companion / weight, lift: lift / weight }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn companions_are_found() {
        // Neuron 0 is always active; 2 and 3 together every fourth token; 1 every other one.
        let mut columns = Columns::new(4, 1000);
        for token in 0..100 {
            let pair = token % 4 == 1;
            columns.see(&[true, token % 2 == 0, pair, pair]);
        }
        let found = columns.coactivation(&[0, 1, 2, 3]);
        // 26% of four are two: 0 and 1 are left out.
        assert_eq!(found, Coactivation { companion: 1.0, lift: 4.0 });
        assert_eq!(Columns::new(4, 10).coactivation(&[0, 1, 2, 3]), Coactivation::default());
    }

    #[test]
    fn there_is_room_for_some_tokens_only() {
        let mut columns = Columns::new(1, 1 << 40);
        for _ in 0..TOKENS + 5 {
            columns.see(&[true]);
        }
        assert_eq!(columns.tokens, TOKENS);
    }
}
