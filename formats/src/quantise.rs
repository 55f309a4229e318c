//! Exact scalar conversion between block formats and `f32`: the reference for kernels, and the way to convert at load.

use engine_core::DType;
use half::{bf16, f16};

use crate::{FormatError, Result};

/// Elements of a block of the formats with one scale per 32.
const BLOCK: usize = 32;

fn fail<T>(dtype: DType, problem: String) -> Result<T> {
    Err(FormatError::Conversion { dtype: dtype.name(), problem })
}

/// Decodes `bytes` of `dtype` into `out`, whose length must be exactly theirs.
///
/// Types: F32, F16, BF16, Q8_0, Q4_0; another one is an error that says so.
pub fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let wanted = dtype.row_bytes(out.len() as u64);
    if wanted != Some(bytes.len() as u64) {
        return fail(dtype, format!("{} elements do not take {} bytes", out.len(), bytes.len()));
    }
    match dtype {
        DType::F32 => {
            for (value, chunk) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*chunk);
            }
        }
        DType::F16 => {
            for (value, chunk) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*chunk).to_f32();
            }
        }
        DType::BF16 => {
            for (value, chunk) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*chunk).to_f32();
            }
        }
        DType::Q8_0 => {
            for (values, block) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(bytes.as_chunks::<34>().0) {
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                for (value, &code) in values.iter_mut().zip(&block[2..]) {
                    *value = scale * f32::from(code.cast_signed());
                }
            }
        }
        DType::Q4_0 => {
            for (values, block) in out.as_chunks_mut::<BLOCK>().0.iter_mut().zip(bytes.as_chunks::<18>().0) {
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                for (at, &pair) in block[2..].iter().enumerate() {
                    // Low nibbles are the block's first half, high nibbles the second.
                    values[at] = scale * (f32::from(pair & 15) - 8.0);
                    values[at + BLOCK / 2] = scale * (f32::from(pair >> 4) - 8.0);
                }
            }
        }
        other => {
            return fail(other, "decoding this type is not built; F32, F16, BF16, Q8_0 and Q4_0 are".into());
        }
    }
    Ok(())
}

/// Encodes `values` as `dtype`: a whole number of blocks, all finite for block formats.
///
/// Rounding is that of the formats' reference: nearest (ties away from zero) for Q8_0, and for Q4_0 the scale by the
/// element of largest magnitude, sign included, so that this element is met exactly.
pub fn quantise(dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    let Some(length) = dtype.row_bytes(values.len() as u64) else {
        return fail(dtype, format!("{} elements are no whole number of blocks", values.len()));
    };
    if dtype.is_quantised()
        && let Some(at) = values.iter().position(|value| !value.is_finite())
    {
        return fail(dtype, format!("element {at} is {}, which no block can hold", values[at]));
    }
    let mut out = Vec::with_capacity(length as usize);
    match dtype {
        DType::F32 => values.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes())),
        DType::F16 => {
            values.iter().for_each(|&value| out.extend_from_slice(&f16::from_f32(value).to_le_bytes()))
        }
        DType::BF16 => {
            values.iter().for_each(|&value| out.extend_from_slice(&bf16::from_f32(value).to_le_bytes()))
        }
        DType::Q8_0 => {
            for block in values.as_chunks::<BLOCK>().0 {
                let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                let inverse = scale(dtype, largest / 127.0, &mut out)?;
                out.extend(block.iter().map(|value| ((value * inverse).round() as i8).cast_unsigned()));
            }
        }
        DType::Q4_0 => {
            for block in values.as_chunks::<BLOCK>().0 {
                let extreme = block
                    .iter()
                    .fold(0.0_f32, |best, &value| if value.abs() > best.abs() { value } else { best });
                let inverse = scale(dtype, extreme / -8.0, &mut out)?;
                let code = |value: f32| (value * inverse + 8.5).clamp(0.0, 15.0) as u8;
                let (low, high) = block.split_at(BLOCK / 2);
                out.extend(low.iter().zip(high).map(|(&low, &high)| code(low) | code(high) << 4));
            }
        }
        other => {
            return fail(other, "encoding this type is not built; F32, F16, BF16, Q8_0 and Q4_0 are".into());
        }
    }
    Ok(out)
}

/// Writes a block's scale and gives its inverse (that of the unrounded scale, as the formats' reference does).
fn scale(dtype: DType, scale: f32, out: &mut Vec<u8>) -> Result<f32> {
    let stored = f16::from_f32(scale);
    if !stored.is_finite() {
        return fail(dtype, format!("a block's scale of {scale} does not fit an f16"));
    }
    out.extend_from_slice(&stored.to_le_bytes());
    Ok(if scale == 0.0 || !(1.0 / scale).is_finite() { 0.0 } else { 1.0 / scale })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trip(dtype: DType, values: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; values.len()];
        dequantise(dtype, &quantise(dtype, values).unwrap(), &mut out).unwrap();
        out
    }

    #[test]
    fn known_blocks() {
        // A Q4_0 block by hand: scale 0.5, codes 0 and 15 in the first byte, 8 elsewhere.
        let mut block = [0x88_u8; 18];
        block[..2].copy_from_slice(&f16::from_f32(0.5).to_le_bytes());
        block[2] = 0xf0;
        let mut out = [9.0; 32];
        dequantise(DType::Q4_0, &block, &mut out).unwrap();
        assert_eq!((out[0], out[16], out[1], out[31]), (-4.0, 3.5, 0.0, 0.0));
        // A Q8_0 block by hand.
        let mut block = [0_u8; 34];
        block[..2].copy_from_slice(&f16::from_f32(2.0).to_le_bytes());
        (block[2], block[33]) = (0x80, 0x7f);
        dequantise(DType::Q8_0, &block, &mut out).unwrap();
        assert_eq!((out[0], out[31], out[1]), (-256.0, 254.0, 0.0));
    }

    #[test]
    fn what_cannot_be_held_is_an_error() {
        assert!(quantise(DType::Q8_0, &[0.0; 33]).is_err());
        assert!(quantise(DType::Q4_0, &[f32::NAN; 32]).unwrap_err().to_string().contains("element 0"));
        assert!(quantise(DType::Q8_0, &[1e30; 32]).unwrap_err().to_string().contains("f16"));
        assert!(dequantise(DType::Q6K, &[0; 210], &mut [0.0; 256]).unwrap_err().to_string().contains("Q6_K"));
        assert!(dequantise(DType::F32, &[0; 5], &mut [0.0; 1]).is_err());
        assert_eq!(round_trip(DType::Q4_0, &[0.0; 32]), [0.0; 32]);
        assert_eq!(round_trip(DType::Q8_0, &[1e-44; 32]), [0.0; 32]);
    }

    proptest! {
        #[test]
        fn errors_stay_within_half_a_step(values in prop::collection::vec(-100.0_f32..100.0, 32)) {
            let largest = values.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            for (dtype, step) in [(DType::Q8_0, 127.0), (DType::Q4_0, 8.0)] {
                // Half a step, and for Q4_0 a whole one at the end that has no code (+8); f16 scales add 2^-11.
                let slack = if dtype == DType::Q4_0 { 1.0 } else { 0.5 };
                for (value, back) in values.iter().zip(round_trip(dtype, &values)) {
                    prop_assert!((value - back).abs() <= largest / step * slack + largest * 1e-3, "{dtype} {value} {back}");
                }
            }
            prop_assert_eq!(round_trip(DType::F32, &values), values);
        }

        #[test]
        fn decoded_blocks_encode_to_themselves_in_f16(bits in prop::collection::vec(any::<u16>(), 8)) {
            let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
            let mut values = vec![0.0; 8];
            dequantise(DType::F16, &bytes, &mut values).unwrap();
            for (bits, value) in bits.iter().zip(&values) {
                if !value.is_nan() {
                    prop_assert_eq!(f16::from_f32(*value).to_bits(), *bits);
                }
            }
        }
    }
}
