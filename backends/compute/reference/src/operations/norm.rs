//! Normalisation: `y = (x - m) / sqrt(v + epsilon) * weight + bias` over groups of the weight's length.

use crate::execute::Run;
use engine_core::operation::{NormKind, SlotId};
use engine_core::{Error, Result};

/// RMS: `m = 0`, `v = mean(x^2)`. Layer: `m = mean(x)`, `v = mean((x - m)^2)`.
pub(crate) fn norm(
    run: &Run<'_>,
    norm: NormKind,
    epsilon: f32,
    input: SlotId,
    weight: SlotId,
    bias: Option<SlotId>,
    output: SlotId,
) -> Result<()> {
    let weight = run.row(weight, 0);
    let bias = run.vector(bias).unwrap_or_else(|| vec![0.0; weight.len()]);
    for token in 0..run.tokens {
        let mut row = run.row(input, token);
        for group in row.chunks_exact_mut(weight.len()) {
            let n = group.len() as f64;
            let mean = match norm {
                NormKind::Rms => 0.0,
                NormKind::Layer => group.iter().sum::<f64>() / n,
                other => return Err(Error::unsupported(format!("norm {other:?}"))),
            };
            let variance = group.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
            let deviation = (variance + f64::from(epsilon)).sqrt();
            for ((x, w), b) in group.iter_mut().zip(&weight).zip(&bias) {
                *x = (*x - mean) / deviation * w + b;
            }
        }
        run.write_row(output, token, &row);
    }
    Ok(())
}
