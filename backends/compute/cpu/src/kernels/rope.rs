//! Rotary position embedding: frequencies once per operation, angles once per token, then the rotation of each head.
//!
//! Angles are reduced in f64, so that far positions lose no digits; the rotation is f32.

use engine_core::operation::{RopeScaling, RopeStyle};

/// The frequencies of the pairs and the factor on rotated elements, as the contract's `Rope` has them.
///
/// `factors` is empty or has an element per pair.
pub(crate) fn frequencies(
    rotary_dim: u32,
    base: f32,
    scaling: RopeScaling,
    factors: &[f32],
) -> Option<(Vec<f64>, f64)> {
    let pairs = (rotary_dim / 2) as usize;
    let base = f64::from(base);
    let dim = f64::from(rotary_dim);
    let plain = (0..pairs).map(|j| {
        let divisor = factors.get(j).map_or(1.0, |&f| f64::from(f));
        base.powf(-2.0 * j as f64 / dim) / divisor
    });
    Some(match scaling {
        RopeScaling::None => (plain.collect(), 1.0),
        RopeScaling::Linear { factor } => (plain.map(|f| f / f64::from(factor)).collect(), 1.0),
        RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => {
            let factor = f64::from(factor);
            let pair_of = |beta: f32| {
                let turns = f64::from(original_context) / (2.0 * core::f64::consts::PI * f64::from(beta));
                dim * turns.ln() / (2.0 * base.ln())
            };
            let low = pair_of(beta_fast).floor().max(0.0);
            let high = pair_of(beta_slow).ceil().min(dim - 1.0);
            let mixed = plain.enumerate().map(|(j, f)| {
                let ramp = ((j as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                f / factor * ramp + f * (1.0 - ramp)
            });
            (mixed.collect(), f64::from(attention_factor) * (1.0 + 0.1 * factor.ln()))
        }
        // `supports` denies scalings that this version does not know.
        _ => return None,
    })
}

/// Cosine and sine of each pair's angle at a position, times the magnitude.
pub(crate) fn angles(frequencies: &[f64], magnitude: f64, position: u32, out: &mut [[f32; 2]]) {
    for (f, out) in frequencies.iter().zip(out) {
        let (sin, cos) = (f64::from(position) * f).sin_cos();
        *out = [(cos * magnitude) as f32, (sin * magnitude) as f32];
    }
}

/// Rotates one head in place: `head` has at least `2 x angles.len()` elements, the others stay.
pub(crate) fn rotate(head: &mut [f32], angles: &[[f32; 2]], style: RopeStyle) {
    match style {
        RopeStyle::Interleaved => {
            let (pairs, _) = head.as_chunks_mut::<2>();
            for ([a, b], [cos, sin]) in pairs.iter_mut().zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
        RopeStyle::Halves => {
            let (first, second) = head.split_at_mut(angles.len());
            for ((a, b), [cos, sin]) in first.iter_mut().zip(second).zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
        // `supports` denies styles that this version does not know.
        #[allow(unreachable_patterns, reason = "the enum may grow")]
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_keeps_length_and_partial_dims() {
        for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
            let (f, m) = frequencies(4, 10000.0, RopeScaling::None, &[]).unwrap();
            let mut table = vec![[0.0; 2]; 2];
            angles(&f, m, 7, &mut table);
            let mut head = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
            let before: f32 = head[..4].iter().map(|x| x * x).sum();
            rotate(&mut head, &table, style);
            let after: f32 = head[..4].iter().map(|x| x * x).sum();
            assert!((before - after).abs() < 1e-4);
            assert_eq!(head[4..], [5.0, 6.0]);
            let (a, b) = if style == RopeStyle::Interleaved { (1.0, 2.0) } else { (1.0, 3.0) };
            let want = a * 7f64.cos() - b * 7f64.sin();
            assert!((f64::from(head[0]) - want).abs() < 1e-6);
        }
    }

    #[test]
    fn scalings() {
        let (plain, _) = frequencies(64, 10000.0, RopeScaling::None, &[]).unwrap();
        let (linear, m) = frequencies(64, 10000.0, RopeScaling::Linear { factor: 4.0 }, &[]).unwrap();
        assert_eq!(m, 1.0);
        assert!(plain.iter().zip(&linear).all(|(p, l)| (p / 4.0 - l).abs() < 1e-15));
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 2048,
            attention_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        let (mixed, m) = frequencies(64, 10000.0, yarn, &[]).unwrap();
        // The fastest pairs keep their frequency, the slowest are interpolated.
        assert_eq!(mixed[0], plain[0]);
        assert!((mixed[31] - plain[31] / 4.0).abs() < 1e-12);
        assert!((m - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
        let (divided, _) = frequencies(4, 10000.0, RopeScaling::None, &[2.0, 8.0]).unwrap();
        assert_eq!(divided[0], 0.5);
    }
}
