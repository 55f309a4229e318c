//! Q8_0 in two bit planes: the high four bits of each code as a Q4_0 matrix, the low four beside it, so that the high
//! plane alone estimates a row and both together are the row, bit for bit.
//!
//! With d the block's scale and c a code, the high plane has the scale 16 d and the nibble q = (c >> 4) + 8, the low one
//! the nibble l = c & 15: c = 16 (q - 8) + l. Nibbles are in Q4_0's order: byte j of a block holds element j in its low
//! half and element j + 16 in its high half.

use engine_core::DType;
use half::f16;

use super::legacy::BLOCK;
use super::{fail, put_half, read_half};
use crate::Result;

const Q8: usize = 2 + BLOCK;
const HIGH: usize = 2 + BLOCK / 2;
const LOW: usize = BLOCK / 2;

/// Bytes of blocks of Q8_0 as bytes of Q4_0 (high) and of I8 (low, 16 per block).
///
/// # Errors
/// Where the bytes are no whole number of blocks, or 16 times a scale does not fit an F16 (a code near 127 would be
/// beyond 500000).
pub fn split_q8_0(bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
    let (blocks, rest) = bytes.as_chunks::<Q8>();
    if !rest.is_empty() {
        return fail(DType::Q8_0, format!("{} bytes are no whole number of blocks of {Q8}", bytes.len()));
    }
    let mut high = vec![0; blocks.len() * HIGH];
    let mut low = vec![0; blocks.len() * LOW];
    let parts = high.as_chunks_mut::<HIGH>().0.iter_mut().zip(low.as_chunks_mut::<LOW>().0);
    for (block, (high, low)) in blocks.iter().zip(parts) {
        put_half(DType::Q8_0, high, 0, 16.0 * read_half(block, 0))?; // a power of two: nothing is rounded
        let codes = &block[2..];
        for at in 0..LOW {
            let (a, b) = (codes[at].cast_signed(), codes[at + LOW].cast_signed());
            let nibble = |code: i8| ((code >> 4) + 8).cast_unsigned();
            high[2 + at] = nibble(a) | nibble(b) << 4;
            low[at] = (a.cast_unsigned() & 15) | (b.cast_unsigned() & 15) << 4;
        }
    }
    Ok((high, low))
}

/// The blocks of Q8_0 that [`split_q8_0`] was given.
///
/// # Errors
/// Where the lengths do not belong together, or the scale is not 16 times that of a block.
pub fn join_q8_0(high: &[u8], low: &[u8]) -> Result<Vec<u8>> {
    let (highs, lows) = (high.as_chunks::<HIGH>(), low.as_chunks::<LOW>());
    if !highs.1.is_empty() || !lows.1.is_empty() || highs.0.len() != lows.0.len() {
        let problem = format!("planes of {} and {} bytes do not belong together", high.len(), low.len());
        return fail(DType::Q8_0, problem);
    }
    let mut out = vec![0; highs.0.len() * Q8];
    for ((high, low), block) in highs.0.iter().zip(lows.0).zip(out.as_chunks_mut::<Q8>().0) {
        let scale = f16::from_f32(read_half(high, 0) / 16.0);
        if f32::from(scale) * 16.0 != read_half(high, 0) {
            return fail(DType::Q8_0, format!("a scale of {} is no 16 times an F16", read_half(high, 0)));
        }
        block[..2].copy_from_slice(&scale.to_le_bytes());
        for at in 0..LOW {
            // q - 8 and the nibble below it are the code's two halves, as the bits stand.
            block[2 + at] = ((high[2 + at] & 15) ^ 8) << 4 | low[at] & 15;
            block[2 + at + LOW] = ((high[2 + at] >> 4) ^ 8) << 4 | low[at] >> 4;
        }
    }
    Ok(out)
}

/// What the high plane alone says of blocks of Q8_0: the middle of what the low nibble may be, d (16 (c >> 4) + 7.5).
///
/// # Errors
/// Where lengths do not belong together.
pub fn estimate_q8_0(bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let (blocks, rest) = bytes.as_chunks::<Q8>();
    if !rest.is_empty() || blocks.len() * BLOCK != out.len() {
        return fail(DType::Q8_0, format!("{} elements do not take {} bytes", out.len(), bytes.len()));
    }
    for (block, values) in blocks.iter().zip(out.as_chunks_mut::<BLOCK>().0) {
        let scale = read_half(block, 0);
        for (value, &code) in values.iter_mut().zip(&block[2..]) {
            *value = scale * (f32::from(code.cast_signed() >> 4) * 16.0 + 7.5);
        }
    }
    Ok(())
}

/// The scale of each block of Q8_0.
pub fn scales_q8_0(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<Q8>().0.iter().map(|block| read_half(block, 0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantise::{dequantise, quantise};
    use proptest::prelude::*;

    fn block(scale: f32, codes: [i8; BLOCK]) -> Vec<u8> {
        let mut block = f16::from_f32(scale).to_le_bytes().to_vec();
        block.extend(codes.map(i8::cast_unsigned));
        block
    }

    #[test]
    fn planes_are_valid_tensors_with_the_middle_as_estimate() {
        let mut codes = [0i8; BLOCK];
        codes[..6].copy_from_slice(&[-128, -1, 0, 15, 16, 127]);
        codes[17] = -17;
        let bytes = block(0.5, codes);
        let (high, low) = split_q8_0(&bytes).unwrap();
        assert_eq!((high.len(), low.len()), (18, 16));
        assert_eq!(low[..6], [0, 15 | 15 << 4, 0, 15, 0, 15]);
        // The high plane, read as the Q4_0 it is, and the low nibbles make every value.
        let mut q4 = [0.0; BLOCK];
        dequantise(DType::Q4_0, &high, &mut q4).unwrap();
        let mut whole = [0.0; BLOCK];
        dequantise(DType::Q8_0, &bytes, &mut whole).unwrap();
        let mut guess = [0.0; BLOCK];
        estimate_q8_0(&bytes, &mut guess).unwrap();
        for at in 0..BLOCK {
            let nibble = if at < 16 { low[at] & 15 } else { low[at - 16] >> 4 };
            assert_eq!(q4[at] + 0.5 * f32::from(nibble), whole[at], "{at}");
            assert_eq!(q4[at] + 0.5 * 7.5, guess[at]);
        }
        assert_eq!(scales_q8_0(&bytes), [0.5]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = split_q8_0(&block(5000.0, [1; BLOCK])).unwrap_err().to_string();
        assert!(error.contains("80000") && error.contains("f16"), "{error}");
        assert!(split_q8_0(&[0; 33]).is_err());
        assert!(join_q8_0(&[0; 18], &[0; 15]).is_err());
        assert!(join_q8_0(&[0; 36], &[0; 16]).is_err());
        assert!(estimate_q8_0(&[0; 34], &mut [0.0; 31]).is_err());
        // 1.5 times the smallest F16 is none when it is divided by 16.
        let mut high = [0; 18];
        high[0] = 3;
        assert!(join_q8_0(&high, &[0; 16]).is_err());
    }

    proptest! {
        #[test]
        fn nothing_is_lost(codes in prop::collection::vec(any::<i8>(), BLOCK), scale in 1e-7_f32..4000.0) {
            let bytes = block(scale, codes.try_into().unwrap());
            let (high, low) = split_q8_0(&bytes).unwrap();
            prop_assert_eq!(join_q8_0(&high, &low).unwrap(), bytes);
        }

        #[test]
        fn quantised_values_keep_every_bit(values in prop::collection::vec(-3.0_f32..3.0, 4 * BLOCK)) {
            let bytes = quantise(DType::Q8_0, &values).unwrap();
            let (high, low) = split_q8_0(&bytes).unwrap();
            prop_assert_eq!(join_q8_0(&high, &low).unwrap(), bytes);
        }
    }
}
