//! What logits say of a token, and how two models' logits differ.

/// Of token `next`, by a softmax over `logits`: minus the logarithm of its likelihood.
pub(crate) fn negative_log_likelihood(logits: &[f32], next: u32) -> f64 {
    let (most, log_sum) = scale(logits);
    let logit = logits.get(next as usize).map_or(f64::NEG_INFINITY, |&logit| f64::from(logit - most));
    log_sum - logit
}

/// The Kullback-Leibler divergence of the softmax over `other` from that over `logits`, in nats.
pub(crate) fn divergence(logits: &[f32], other: &[f32]) -> f64 {
    let ((p_most, p_sum), (q_most, q_sum)) = (scale(logits), scale(other));
    let terms = logits.iter().zip(other).map(|(&p, &q)| {
        let p = f64::from(p - p_most) - p_sum;
        p.exp() * (p - (f64::from(q - q_most) - q_sum))
    });
    terms.sum()
}

/// The most likely token, of equal ones the first.
pub(crate) fn best(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// The largest logit, and the logarithm of the sum of all likelihoods as multiples of its own.
fn scale(logits: &[f32]) -> (f32, f64) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    (most, sum.ln())
}

/// Values, added up.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) count: u64,
    sum: f64,
    squares: f64,
}

impl Sum {
    pub(crate) fn add(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
        self.squares += value * value;
    }

    pub(crate) fn add_all(&mut self, other: &Sum) {
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
    }

    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }

    /// Of the mean.
    pub(crate) fn standard_error(&self) -> f64 {
        let variance = (self.squares / self.count.max(1) as f64 - self.mean().powi(2)).max(0.0);
        (variance / (self.count.max(2) - 1) as f64).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likelihoods_of_a_softmax() {
        let logits = [0.0, 3.0f32.ln(), f32::NEG_INFINITY];
        assert!((negative_log_likelihood(&logits, 1) - (4.0f64 / 3.0).ln()).abs() < 1e-7);
        assert_eq!(negative_log_likelihood(&logits, 2), f64::INFINITY);
        let mut sum = Sum::default();
        [1.0, 2.0, 3.0].into_iter().for_each(|value| sum.add(value));
        assert!((sum.mean() - 2.0).abs() < 1e-12);
        assert!((sum.standard_error() - (2.0f64 / 3.0 / 2.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn divergence_of_two_softmaxes() {
        let (p, q) = ([0.0, 3.0f32.ln()], [1.0f32, 1.0]);
        let want = 0.25 * (0.25f64 / 0.5).ln() + 0.75 * (0.75f64 / 0.5).ln();
        assert!((divergence(&p, &q) - want).abs() < 1e-7);
        assert!(divergence(&p, &p).abs() < 1e-12);
        assert_eq!(best(&[1.0, 3.0, 3.0]), 1);
    }
}
