//! The activation quantisation that descriptors state, done in f32 exactly as `engine_core` documents it.

use engine_core::operation::Quantization;
use engine_core::{Error, Result};

/// Elements of a block.
const BLOCK: usize = 32;

/// Whether this is a quantisation that `apply` knows.
pub(crate) fn is_known(quantization: Quantization) -> bool {
    matches!(quantization, Quantization::None | Quantization::Int8Blocks)
}

/// Replaces the values of one row by what is left of them after quantisation: `scale * code` for `Int8Blocks`.
///
/// Values are rounded to f32 first, since that is what a backend quantises.
pub(crate) fn apply(quantization: Quantization, row: &mut [f64]) -> Result<()> {
    match quantization {
        Quantization::None => {}
        Quantization::Int8Blocks => row.chunks_mut(BLOCK).for_each(int8_block),
        other => return Err(Error::unsupported(format!("activation quantisation {other:?}"))),
    }
    Ok(())
}

/// `scale = amax / 127`, `code = round_ties_even(x * (127 / amax))`, value `scale * code`.
///
/// Where `amax` is so small that `127 / amax` overflows f32, codes saturate at +-127 and 0 stays 0.
fn int8_block(block: &mut [f64]) {
    let values: Vec<f32> = block.iter().map(|x| *x as f32).collect();
    if values.iter().any(|x| !x.is_finite()) {
        block.fill(f64::NAN);
        return;
    }
    let amax = values.iter().fold(0f32, |amax, x| amax.max(x.abs()));
    if amax == 0.0 {
        block.fill(0.0);
        return;
    }
    let (scale, inverse) = (amax / 127.0, 127.0 / amax);
    for (out, x) in block.iter_mut().zip(values) {
        // A cast to an integer saturates, and makes 0 of the NaN that 0 * infinity is.
        let code = ((x * inverse).round_ties_even() as i32).clamp(-127, 127);
        *out = f64::from(scale) * f64::from(code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int8(values: &[f64]) -> Vec<f64> {
        let mut row = values.to_vec();
        apply(Quantization::Int8Blocks, &mut row).unwrap();
        row
    }

    #[test]
    fn blocks_stand_alone() {
        let mut row = vec![0.0; 70];
        row[0] = -127.0;
        row[1] = 0.5; // a tie: to even, 0
        row[2] = 1.5; // a tie: to even, 2
        row[32] = f64::INFINITY;
        row[64] = 3.0;
        let out = int8(&row);
        assert_eq!(out[..4], [-127.0, 0.0, 2.0, 0.0]);
        assert!(out[32..64].iter().all(|x| x.is_nan()));
        assert_eq!(out[64], f64::from(3f32 / 127.0) * 127.0);
        assert_eq!(int8(&[0.0, -0.0]), [0.0, 0.0]);
    }

    #[test]
    fn denormals_stay_finite() {
        let out = int8(&[1e-42, 0.0, -1e-42]);
        assert!(out.iter().all(|x| x.is_finite()), "{out:?}");
        assert_eq!(out[1], 0.0);
    }
}
