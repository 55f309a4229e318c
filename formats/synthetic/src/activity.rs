//! How often neurons are to be active: 10% of them for a token, the hottest 26% making 80% of all activations.
//!
//! The share of tokens for which the neuron at place `q` (0 the hottest, 1 the coldest) is active is `A exp(-k q)`. `k`
//! follows from the part that the hottest make, `A` from the mean.

/// Mean share of neurons that are active for a token.
pub const ACTIVE: f64 = 0.10;
/// The hottest neurons, as a share (PowerInfer, SOSP'24, section 2.2: 26% of OPT-30B's).
pub const HOTTEST: f64 = 0.26;
/// Their part of all activations.
pub const HOTTEST_PART: f64 = 0.80;
/// Of a token's active neurons, about the share that was active at the token before, in text that stays in its topic
/// [`STAYS`] of the time. Activity by bias alone gives 0.31.
pub const OVERLAP: f64 = 0.49;
/// The probability that the next id of sample text is of the same topic.
pub const STAYS: f64 = 0.9;

/// `k`, where `(1 - exp(-k HOTTEST)) / (1 - exp(-k)) = HOTTEST_PART`; a test holds it to that.
const DECAY: f64 = 6.157_712;

/// The share of tokens for which a neuron at place `q` (0 to 1) is to be active.
pub fn share(q: f64) -> f64 {
    ACTIVE * DECAY / (1.0 - (-DECAY).exp()) * (-DECAY * q).exp()
}

/// The bias, in standard deviations, at which a standard normal variable plus the bias is above 0 with probability
/// `share`: the inverse of the normal distribution, by bisection.
pub(crate) fn bias(share: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 8.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if distribution(middle) < share { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}

/// The normal distribution, by the error function of Abramowitz and Stegun 7.1.26 (to 1.5e-7).
fn distribution(x: f64) -> f64 {
    let z = x.abs() / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let series = t
        * (0.254_829_592
            + t * (-0.284_496_736 + t * (1.421_413_741 + t * (-1.453_152_027 + t * 1.061_405_429))));
    let erf = 1.0 - series * (-z * z).exp();
    if x < 0.0 { (1.0 - erf) / 2.0 } else { (1.0 + erf) / 2.0 }
}

/// Mean square of `max(0, z + bias)` for a standard normal `z`.
pub(crate) fn mean_square(bias: f64) -> f64 {
    let density = (-bias * bias / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    (bias * bias + 1.0) * distribution(bias) + bias * density
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_have_the_stated_mean_and_skew() {
        let shares: Vec<f64> = (0..10_000).map(|i| share((f64::from(i) + 0.5) / 1e4)).collect();
        let all: f64 = shares.iter().sum();
        assert!((all / 1e4 - ACTIVE).abs() < 1e-4, "{all}");
        let hottest: f64 = shares[..2600].iter().sum();
        assert!((hottest / all - HOTTEST_PART).abs() < 2e-4, "{}", hottest / all);
        assert!(shares[0] < 0.7);
    }

    #[test]
    fn biases_give_their_shares() {
        for share in [0.001, 0.1, 0.5, 0.9] {
            assert!((distribution(bias(share)) - share).abs() < 1e-6);
        }
        assert!((mean_square(0.0) - 0.5).abs() < 1e-6);
    }
}
