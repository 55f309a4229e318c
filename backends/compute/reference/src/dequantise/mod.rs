//! Weight rows as f64: every stored format taken apart by its definition, one block at a time.
//!
//! Scales and codes are exact in f64, and so is nearly every product here; nothing is rounded to f32.

mod blocks;
mod super_blocks;

use engine_core::DType;

/// Takes one block apart; for types without blocks, any number of elements.
type Block = fn(&[u8], &mut [f64]);

/// The function for one block of this type; `None` for types that hold no weights.
fn block(dtype: DType) -> Option<Block> {
    Some(match dtype {
        DType::F32 => |bytes, out| {
            let values = bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
            out.iter_mut().zip(values).for_each(|(out, x)| *out = x);
        },
        DType::F16 => |bytes, out| {
            let values = bytes.as_chunks::<2>().0.iter().map(|b| widen(u16::from_le_bytes(*b)));
            out.iter_mut().zip(values).for_each(|(out, x)| *out = x);
        },
        DType::BF16 => |bytes, out| {
            let values = bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f64());
            out.iter_mut().zip(values).for_each(|(out, x)| *out = x);
        },
        DType::Q4_0 => blocks::q4_0,
        DType::Q4_1 => blocks::q4_1,
        DType::Q5_0 => blocks::q5_0,
        DType::Q5_1 => blocks::q5_1,
        DType::Q8_0 => blocks::q8_0,
        DType::IQ4NL => blocks::iq4_nl,
        DType::MXFP4 => blocks::mxfp4,
        DType::Q2K => super_blocks::q2_k,
        DType::Q3K => super_blocks::q3_k,
        DType::Q4K => super_blocks::q4_k,
        DType::Q5K => super_blocks::q5_k,
        DType::Q6K => super_blocks::q6_k,
        DType::IQ4XS => super_blocks::iq4_xs,
        _ => return None,
    })
}

/// Whether weights may be of this type.
pub(crate) fn is_known(dtype: DType) -> bool {
    block(dtype).is_some()
}

/// Writes the elements of a row into `out`. `bytes` are the whole row's, and `dtype` is a known one.
pub(crate) fn row(dtype: DType, bytes: &[u8], out: &mut [f64]) {
    let Some(block) = block(dtype) else {
        unreachable!("{dtype} is no weight type, and was refused at prepare")
    };
    if !dtype.is_quantised() {
        return block(bytes, out);
    }
    let blocks = bytes.chunks_exact(dtype.block_bytes() as usize);
    for (bytes, out) in blocks.zip(out.chunks_exact_mut(dtype.block_elements() as usize)) {
        block(bytes, out);
    }
}

/// The f16 at byte `at`.
fn f16(bytes: &[u8], at: usize) -> f64 {
    widen(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// The f16 with these bits: one sign bit, five of exponent (bias 15), ten of fraction.
fn widen(bits: u16) -> f64 {
    let (exponent, fraction) = (bits >> 10 & 31, f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => fraction / f64::from(1 << 24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        // 2^(exponent - 15), put together from its bits.
        _ => (1.0 + fraction / 1024.0) * f64::from_bits((u64::from(exponent) + 1023 - 15) << 52),
    };
    if bits >> 15 == 0 { magnitude } else { -magnitude }
}

/// The levels of the non-linear four-bit types.
const NON_LINEAR: [f64; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with `fixtures/*.bin`, made by `fixtures/make.py` with the `gguf` package: the number of blocks (u32),
    /// their bytes, and the f32 values that its dequantiser gives.
    #[test]
    fn equals_the_gguf_package() {
        for (name, fixture) in [
            ("F16", &include_bytes!("../../fixtures/f16.bin")[..]),
            ("BF16", include_bytes!("../../fixtures/bf16.bin")),
            ("Q4_0", include_bytes!("../../fixtures/q4_0.bin")),
            ("Q4_1", include_bytes!("../../fixtures/q4_1.bin")),
            ("Q5_0", include_bytes!("../../fixtures/q5_0.bin")),
            ("Q5_1", include_bytes!("../../fixtures/q5_1.bin")),
            ("Q8_0", include_bytes!("../../fixtures/q8_0.bin")),
            ("Q2_K", include_bytes!("../../fixtures/q2_k.bin")),
            ("Q3_K", include_bytes!("../../fixtures/q3_k.bin")),
            ("Q4_K", include_bytes!("../../fixtures/q4_k.bin")),
            ("Q5_K", include_bytes!("../../fixtures/q5_k.bin")),
            ("Q6_K", include_bytes!("../../fixtures/q6_k.bin")),
            ("IQ4_NL", include_bytes!("../../fixtures/iq4_nl.bin")),
            ("IQ4_XS", include_bytes!("../../fixtures/iq4_xs.bin")),
            ("MXFP4", include_bytes!("../../fixtures/mxfp4.bin")),
        ] {
            let dtype = DType::from_name(name).unwrap();
            let (count, rest) = fixture.split_at(4);
            let count = u32::from_le_bytes(count.try_into().unwrap()) as usize;
            let (bytes, values) = rest.split_at(count * dtype.block_bytes() as usize);
            let mut out = vec![0f64; count * dtype.block_elements() as usize];
            assert_eq!(values.len(), 4 * out.len(), "{name}");
            row(dtype, bytes, &mut out);
            for (index, (ours, theirs)) in out.iter().zip(values.chunks_exact(4)).enumerate() {
                let theirs = f32::from_le_bytes(theirs.try_into().unwrap());
                assert_eq!(*ours as f32, theirs, "{name}, element {index}");
            }
        }
    }

    #[test]
    fn every_f16() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (widen(bits), half::f16::from_bits(bits).to_f64());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#06x}");
        }
    }

    #[test]
    fn every_weight_type_and_no_other() {
        for dtype in DType::all() {
            use DType::{F64, I8, I16, I32, I64, U8};
            assert_eq!(is_known(dtype), !matches!(dtype, F64 | I8 | I16 | I32 | I64 | U8), "{dtype}");
        }
        let mut out = [0.0; 2];
        row(DType::F32, &[0, 0, 128, 63, 0, 0, 0, 192], &mut out);
        assert_eq!(out, [1.0, -2.0]);
    }
}
