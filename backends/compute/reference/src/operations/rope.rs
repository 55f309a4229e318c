//! Rotary position embedding.

use crate::execute::Run;
use engine_core::operation::{Rope, RopeScaling, RopeStyle};
use engine_core::{Error, Result};
use std::f64::consts::PI;

/// Rotates pair `j` of each head by `position * frequency_j`.
pub(crate) fn rope(run: &Run<'_>, rope: &Rope) -> Result<()> {
    let pairs = rope.rotary_dim as usize / 2;
    let factors = run.vector(rope.factors).unwrap_or_else(|| vec![1.0; pairs]);
    let (frequencies, magnitude) = frequencies(rope, &factors)?;
    for at in run.positions() {
        let mut row = run.row(rope.input, at.token);
        for head in row.chunks_exact_mut(rope.head_dim as usize) {
            for (j, frequency) in frequencies.iter().enumerate() {
                let (first, second) = match rope.style {
                    RopeStyle::Interleaved => (2 * j, 2 * j + 1),
                    RopeStyle::Halves => (j, j + pairs),
                    other => return Err(Error::unsupported(format!("rope style {other:?}"))),
                };
                let (sin, cos) = (f64::from(at.position) * frequency).sin_cos();
                let (a, b) = (head[first], head[second]);
                head[first] = magnitude * (a * cos - b * sin);
                head[second] = magnitude * (a * sin + b * cos);
            }
        }
        run.write_row(rope.output, at.token, &row);
    }
    Ok(())
}

/// Angle per position of each pair, and the factor on rotated elements.
fn frequencies(rope: &Rope, factors: &[f64]) -> Result<(Vec<f64>, f64)> {
    let (dim, base) = (f64::from(rope.rotary_dim), f64::from(rope.base));
    let plain: Vec<f64> =
        factors.iter().enumerate().map(|(j, factor)| base.powf(-2.0 * j as f64 / dim) / factor).collect();
    match rope.scaling {
        RopeScaling::None => Ok((plain, 1.0)),
        RopeScaling::Linear { factor } => {
            Ok((plain.iter().map(|theta| theta / f64::from(factor)).collect(), 1.0))
        }
        RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => {
            let factor = f64::from(factor);
            let turns = |beta: f32| {
                dim * (f64::from(original_context) / (2.0 * PI * f64::from(beta))).ln() / (2.0 * base.ln())
            };
            let low = turns(beta_fast).floor().max(0.0);
            let high = turns(beta_slow).ceil().min(dim - 1.0);
            let scaled = plain.iter().enumerate().map(|(j, theta)| {
                let ramp = ((j as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                theta / factor * ramp + theta * (1.0 - ramp)
            });
            Ok((scaled.collect(), f64::from(attention_factor) * (1.0 + 0.1 * factor.ln())))
        }
        other => Err(Error::unsupported(format!("rope scaling {other:?}"))),
    }
}
