//! Scalar functions in f64.

use engine_core::operation::Activation;
use engine_core::{Error, Result};

/// The value of an activation function at `x`. NaN stays NaN.
pub(crate) fn activate(function: Activation, x: f64) -> Result<f64> {
    Ok(match function {
        Activation::Identity => x,
        Activation::Relu => relu(x),
        Activation::ReluSquared => relu(x) * relu(x),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::GeluErf => 0.5 * x * erfc(-x / std::f64::consts::SQRT_2),
        other => return Err(Error::unsupported(format!("activation {}", other.name()))),
    })
}

/// Whether `activate` knows the function.
pub(crate) fn is_known(function: Activation) -> bool {
    activate(function, 0.0).is_ok()
}

/// `max(x, 0)`; unlike `f64::max` it passes NaN on.
pub(crate) fn relu(x: f64) -> f64 {
    if x <= 0.0 { 0.0 } else { x }
}

/// `1 - erf(x)`, to 1e-13 of the result: far below what an f32 shows.
///
/// Below 2 by the series `erf(x) = 2/sqrt(pi) * exp(-x^2) * sum_n 2^n x^(2n+1) / (1*3*..*(2n+1))` (all terms of one
/// sign), from 2 on by the continued fraction of Abramowitz and Stegun, 7.1.14.
fn erfc(x: f64) -> f64 {
    if x.is_nan() {
        x
    } else if x < 0.0 {
        2.0 - erfc(-x)
    } else if x < 2.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..100 {
            term *= 2.0 * x * x / f64::from(2 * n + 1);
            sum += term;
        }
        1.0 - std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
    } else {
        let mut fraction = x;
        for n in (1..=200).rev() {
            fraction = x + f64::from(n) / 2.0 / fraction;
        }
        (-x * x).exp() / (fraction * std::f64::consts::PI.sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of `erfc` from Python's `math.erfc`.
    #[test]
    fn erfc_is_erfc() {
        for (x, expected) in [
            (0.0, 1.0),
            (0.5, 0.4795001221869535),
            (1.0, 0.15729920705028513),
            (1.9999, 0.004679802092970608),
            (2.0, 0.004677734981047265),
            (3.0, 2.2090496998585438e-05),
            (5.0, 1.5374597944280351e-12),
            (-1.0, 1.842700792949715),
            (-7.0, 2.0),
        ] {
            assert!((erfc(x) - expected).abs() <= 1e-13 * expected, "erfc({x}) = {}", erfc(x));
        }
        assert_eq!(erfc(f64::INFINITY), 0.0);
    }

    #[test]
    fn functions() {
        let at = |function, x| activate(function, x).unwrap();
        assert_eq!(at(Activation::Relu, -0.0), 0.0);
        assert!(at(Activation::Relu, f64::NAN).is_nan());
        assert_eq!(at(Activation::ReluSquared, 3.0), 9.0);
        assert_eq!(at(Activation::Identity, -3.0), -3.0);
        assert!((at(Activation::Silu, 1.0) - 0.7310585786300049).abs() < 1e-15);
        assert!((at(Activation::GeluErf, 1.0) - 0.8413447460685429).abs() < 1e-14);
        assert!((at(Activation::GeluErf, -3.0) + 0.004049694094890287).abs() < 1e-15);
        assert!((at(Activation::GeluTanh, 1.0) - 0.8411919906082768).abs() < 1e-14);
    }
}
