//! How often neurons are active, token by token: what a model is prepared by.

/// Sizes of batches whose union of active neurons is measured.
pub const BATCHES: [usize; 5] = [1, 2, 4, 8, 32];
/// The share of neurons whose part of all activations is reported (PowerInfer, figure 4: 26% carry 80% in OPT-30B).
pub const HOTTEST: f64 = 0.26;

/// What was seen of one layer.
#[derive(Clone, Debug)]
pub struct LayerActivity {
    /// How many tokens each neuron was active for.
    counts: Vec<u64>,
    tokens: u64,
    /// Active neurons that were active at the token before, too, and all that were active at a token with one before.
    repeated: u64,
    followed: u64,
    /// Per entry of [`BATCHES`]: neurons active in a batch, summed, and the number of batches.
    unions: [(u64, u64); BATCHES.len()],
    /// Active neurons, a bit each, of the tokens of the largest batch under way.
    recent: Vec<Vec<u64>>,
    /// Those of the token before.
    before: Option<Vec<u64>>,
}

impl LayerActivity {
    /// Of a layer of this many neurons.
    pub fn new(neurons: usize) -> LayerActivity {
        LayerActivity {
            counts: vec![0; neurons],
            tokens: 0,
            repeated: 0,
            followed: 0,
            unions: [(0, 0); BATCHES.len()],
            recent: Vec::new(),
            before: None,
        }
    }

    /// A new text: its first token follows none, and batches begin anew.
    pub fn start(&mut self) {
        self.recent.clear();
        self.before = None;
    }

    /// The neurons of the next tokens, a row each. A neuron is active where `h` is not 0; where `zero_below` is false,
    /// so that hardly any `h` is, where `|h|` is above the mean of the row's.
    pub fn see(&mut self, rows: &[f32], zero_below: bool) {
        for row in rows.chunks_exact(self.counts.len().max(1)) {
            let mean = row.iter().map(|h| f64::from(h.abs())).sum::<f64>() / row.len() as f64;
            let limit = if zero_below { 0.0 } else { mean as f32 };
            let mut bits = vec![0u64; row.len().div_ceil(64)];
            for (i, _) in row.iter().enumerate().filter(|(_, h)| h.abs() > limit || h.is_nan()) {
                bits[i / 64] |= 1 << (i % 64);
                self.counts[i] += 1;
            }
            self.tokens += 1;
            if let Some(before) = &self.before {
                self.followed += ones(&bits);
                self.repeated +=
                    before.iter().zip(&bits).map(|(a, b)| u64::from((a & b).count_ones())).sum::<u64>();
            }
            self.before = Some(bits.clone());
            self.recent.push(bits);
            let seen = self.recent.len();
            for (size, (sum, batches)) in BATCHES.iter().zip(&mut self.unions) {
                if seen.is_multiple_of(*size) {
                    let mut union = vec![0u64; self.recent[0].len()];
                    for bits in &self.recent[seen - size..] {
                        union.iter_mut().zip(bits).for_each(|(all, bits)| *all |= bits);
                    }
                    *sum += ones(&union);
                    *batches += 1;
                }
            }
            if seen == BATCHES[BATCHES.len() - 1] {
                self.recent.clear();
            }
        }
    }

    /// Tokens seen.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// How often each neuron was active, as a share of the tokens.
    pub fn frequency(&self) -> Vec<f32> {
        self.counts.iter().map(|&count| (count as f64 / self.tokens.max(1) as f64) as f32).collect()
    }

    /// The neurons from the one that is active most often to the one that is seldomest; of equal ones the lower number
    /// first.
    pub fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.counts.len() as u32).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(self.counts[i as usize]));
        order
    }

    /// Mean share of neurons that are active for a token.
    pub fn active(&self) -> f64 {
        self.counts.iter().sum::<u64>() as f64 / (self.tokens.max(1) as f64 * self.counts.len().max(1) as f64)
    }

    /// Of a token's active neurons, the share that was active at the token before.
    pub fn overlap(&self) -> f64 {
        self.repeated as f64 / self.followed.max(1) as f64
    }

    /// Share of neurons that any token of a batch makes active, for the sizes of [`BATCHES`]; `None` where no batch of a
    /// size was complete.
    pub fn unions(&self) -> [Option<f64>; BATCHES.len()] {
        let neurons = self.counts.len().max(1) as f64;
        self.unions.map(|(sum, batches)| (batches > 0).then(|| sum as f64 / batches as f64 / neurons))
    }

    /// The part of all activations that the hottest [`HOTTEST`] of the neurons make.
    pub fn hottest(&self) -> f64 {
        let mut counts = self.counts.clone();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let first = (counts.len() as f64 * HOTTEST).ceil() as usize;
        let part: u64 = counts.iter().take(first).sum();
        part as f64 / counts.iter().sum::<u64>().max(1) as f64
    }
}

fn ones(bits: &[u64]) -> u64 {
    bits.iter().map(|word| u64::from(word.count_ones())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activity_is_counted_by_neuron_token_and_batch() {
        let mut layer = LayerActivity::new(4);
        layer.start();
        // Active: {0, 1}, {1}, {1, 2}, {}.
        layer.see(&[1.0, -2.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0], true);
        layer.see(&[0.0; 4], true);
        assert_eq!(layer.tokens(), 4);
        assert_eq!(layer.frequency(), [0.25, 0.75, 0.25, 0.0]);
        assert_eq!(layer.order(), [1, 0, 2, 3]);
        assert!((layer.active() - 5.0 / 16.0).abs() < 1e-12);
        // Tokens 1 to 3 have three active neurons, of which 1 was active before twice.
        assert!((layer.overlap() - 2.0 / 3.0).abs() < 1e-12);
        let unions = layer.unions();
        assert_eq!(unions[0], Some(5.0 / 16.0));
        assert_eq!(unions[1], Some((2.0 + 2.0) / 8.0));
        assert_eq!(unions[2], Some(3.0 / 4.0));
        assert_eq!(unions[3], None);
        assert!((layer.hottest() - 4.0 / 5.0).abs() < 1e-12); // two of four neurons
        // A new text has no token before its first.
        layer.start();
        layer.see(&[1.0, 1.0, 1.0, 1.0], true);
        assert!((layer.overlap() - 2.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn where_nothing_is_zero_the_larger_ones_count() {
        let mut layer = LayerActivity::new(4);
        layer.see(&[0.1, -3.0, 0.2, 0.3], false);
        assert_eq!(layer.frequency(), [0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn long_texts_keep_few_tokens() {
        let mut layer = LayerActivity::new(2);
        layer.see(&[1.0, 0.0].repeat(100), true);
        assert!(layer.recent.len() <= 32);
        assert_eq!(layer.unions(), [Some(0.5); 5]);
        assert!((layer.overlap() - 1.0).abs() < 1e-12);
    }
}
