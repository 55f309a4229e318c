//! Scalar conversion between block formats and `f32`: the reference for kernels, and the way to convert at load.
//!
//! Decoding is exact (but of F64). Encoding follows the formats' reference; blocks are independent of each other, so the bytes do
//! not depend on the number of threads.

mod legacy;
mod nonlinear;
pub mod planes;
mod search;
mod superblock;

use std::thread;

use engine_core::DType;
use half::{bf16, f16};

use crate::{FormatError, Result};

/// Types that [`dequantise`] reads.
pub const READABLE: &[DType] = &[
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2K,
    DType::Q3K,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::IQ4NL,
    DType::IQ4XS,
    DType::MXFP4,
    DType::F64,
];

/// Types that [`quantise`] writes.
pub const WRITABLE: &[DType] =
    &[DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q4K, DType::Q6K];

fn fail<T>(dtype: DType, problem: String) -> Result<T> {
    Err(FormatError::Conversion { dtype: dtype.name(), problem })
}

fn names(dtypes: &[DType]) -> String {
    dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ")
}

/// The f16 at this place of a block.
fn read_half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Writes an f16 at this place of a block; refused where it does not fit.
fn put_half(dtype: DType, block: &mut [u8], at: usize, value: f32) -> Result<()> {
    let stored = f16::from_f32(value);
    if !stored.is_finite() {
        return fail(dtype, format!("a block's scale or minimum of {value} does not fit an f16"));
    }
    block[at..at + 2].copy_from_slice(&stored.to_le_bytes());
    Ok(())
}

/// Decodes `bytes` of `dtype` into `out`, whose length must be exactly theirs. Types: [`READABLE`].
pub fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    fn each<const B: usize, const N: usize>(
        bytes: &[u8],
        out: &mut [f32],
        decode: fn(&[u8; B], &mut [f32; N]),
    ) {
        for (block, values) in bytes.as_chunks::<B>().0.iter().zip(out.as_chunks_mut::<N>().0) {
            decode(block, values);
        }
    }
    let wanted = dtype.row_bytes(out.len() as u64);
    if wanted != Some(bytes.len() as u64) {
        return fail(dtype, format!("{} elements do not take {} bytes", out.len(), bytes.len()));
    }
    match dtype {
        DType::F32 => each(bytes, out, |bytes: &[u8; 4], [value]| *value = f32::from_le_bytes(*bytes)),
        DType::F16 => {
            each(bytes, out, |bytes: &[u8; 2], [value]| *value = f16::from_le_bytes(*bytes).to_f32())
        }
        DType::BF16 => {
            each(bytes, out, |bytes: &[u8; 2], [value]| *value = bf16::from_le_bytes(*bytes).to_f32())
        }
        DType::F64 => each(bytes, out, |bytes: &[u8; 8], [value]| *value = f64::from_le_bytes(*bytes) as f32),
        DType::Q4_0 => each(bytes, out, legacy::decode_q4_0),
        DType::Q4_1 => each(bytes, out, legacy::decode_q4_1),
        DType::Q5_0 => each(bytes, out, legacy::decode_q5_0),
        DType::Q5_1 => each(bytes, out, legacy::decode_q5_1),
        DType::Q8_0 => each(bytes, out, legacy::decode_q8_0),
        DType::Q2K => each(bytes, out, superblock::decode_q2_k),
        DType::Q3K => each(bytes, out, superblock::decode_q3_k),
        DType::Q4K => each(bytes, out, superblock::decode_q4_k),
        DType::Q5K => each(bytes, out, superblock::decode_q5_k),
        DType::Q6K => each(bytes, out, superblock::decode_q6_k),
        DType::IQ4NL => each(bytes, out, nonlinear::decode_iq4_nl),
        DType::IQ4XS => each(bytes, out, nonlinear::decode_iq4_xs),
        DType::MXFP4 => each(bytes, out, nonlinear::decode_mxfp4),
        other => return fail(other, format!("this type is not decoded; {} are", names(READABLE))),
    }
    Ok(())
}

/// Encodes `values` as `dtype`: a whole number of blocks, all finite for block formats. Types: [`WRITABLE`].
///
/// Rounding is that of the formats' reference: nearest for F16, BF16 (ties to even) and Q8_0 (ties away from zero); for
/// Q4_0 the scale by the element of largest magnitude, sign included, so that this element is met exactly; for Q4_K and
/// Q6_K a search for the least weighted squared error.
pub fn quantise(dtype: DType, values: &[f32]) -> Result<Vec<u8>> {
    let Some(length) = dtype.row_bytes(values.len() as u64) else {
        return fail(dtype, format!("{} elements are no whole number of blocks", values.len()));
    };
    if !WRITABLE.contains(&dtype) {
        return fail(dtype, format!("this type is not encoded; {} are", names(WRITABLE)));
    }
    let mut out = vec![0; length as usize]; // no longer than the values are
    encode(dtype, values, &mut out)?;
    Ok(out)
}

/// Into `out`, whose length is that of the encoded values.
fn encode(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<()> {
    fn each<const B: usize, const N: usize>(
        values: &[f32],
        out: &mut [u8],
        encode: fn(&[f32; N], &mut [u8; B]) -> Result<()>,
    ) -> Result<()> {
        let blocks = values.as_chunks::<N>().0.iter().zip(out.as_chunks_mut::<B>().0);
        blocks.into_iter().try_for_each(|(values, block)| encode(values, block))
    }
    if dtype.is_quantised()
        && let Some(at) = values.iter().position(|value| !value.is_finite())
    {
        return fail(dtype, format!("element {at} is {}, which no block can hold", values[at]));
    }
    match dtype {
        DType::F16 => each(values, out, |[value], bytes: &mut [u8; 2]| {
            let half = f16::from_f32(*value);
            if value.is_finite() && !half.is_finite() {
                return fail(DType::F16, format!("an element of {value} is beyond the range of F16 (65504)"));
            }
            *bytes = half.to_le_bytes();
            Ok(())
        }),
        DType::BF16 => each(values, out, |[value], bytes: &mut [u8; 2]| {
            *bytes = bf16::from_f32(*value).to_le_bytes();
            Ok(())
        }),
        DType::Q8_0 => each(values, out, legacy::encode_q8_0),
        DType::Q4_0 => each(values, out, legacy::encode_q4_0),
        DType::Q4_1 => each(values, out, legacy::encode_q4_1),
        DType::Q4K => each(values, out, search::encode_q4_k),
        DType::Q6K => each(values, out, search::encode_q6_k),
        _ => each(values, out, |[value], bytes: &mut [u8; 4]| {
            *bytes = value.to_le_bytes();
            Ok(())
        }),
    }
}

/// [`quantise`] of whole rows of `row_elements` by up to `threads` threads; the bytes are the same for any number.
pub fn quantise_rows(dtype: DType, values: &[f32], row_elements: usize, threads: usize) -> Result<Vec<u8>> {
    let row_bytes = row_bytes(dtype, values.len(), row_elements)?;
    if !WRITABLE.contains(&dtype) {
        return fail(dtype, format!("this type is not encoded; {} are", names(WRITABLE)));
    }
    let rows = values.len() / row_elements;
    let mut out = vec![0; rows * row_bytes];
    let share = rows.div_ceil(threads.max(1)).max(1);
    let work = values.chunks(share * row_elements).zip(out.chunks_mut(share * row_bytes));
    in_parallel(work.map(|(values, out)| move || encode(dtype, values, out)))?;
    Ok(out)
}

/// [`dequantise`] of whole rows of `row_elements` by up to `threads` threads.
pub fn dequantise_rows(
    dtype: DType,
    bytes: &[u8],
    row_elements: usize,
    threads: usize,
    out: &mut [f32],
) -> Result<()> {
    let row_bytes = row_bytes(dtype, out.len(), row_elements)?;
    let rows = out.len() / row_elements;
    if bytes.len() != rows * row_bytes {
        return fail(dtype, format!("{} elements do not take {} bytes", out.len(), bytes.len()));
    }
    let share = rows.div_ceil(threads.max(1)).max(1);
    let work = bytes.chunks(share * row_bytes).zip(out.chunks_mut(share * row_elements));
    in_parallel(work.map(|(bytes, out)| move || dequantise(dtype, bytes, out)))
}

/// Bytes of a row; refused where rows are no whole number of blocks or `elements` no whole number of rows.
fn row_bytes(dtype: DType, elements: usize, row_elements: usize) -> Result<usize> {
    if row_elements == 0 || !elements.is_multiple_of(row_elements) {
        return fail(dtype, format!("{elements} elements are no whole number of rows of {row_elements}"));
    }
    match dtype.row_bytes(row_elements as u64).and_then(|bytes| usize::try_from(bytes).ok()) {
        Some(bytes) => Ok(bytes),
        None => fail(
            dtype,
            format!(
                "rows of {row_elements} elements are no whole number of blocks of {}",
                dtype.block_elements()
            ),
        ),
    }
}

/// Runs all work, the first piece on this thread; of several errors, that of the earliest piece.
fn in_parallel<W: FnOnce() -> Result<()> + Send>(work: impl Iterator<Item = W>) -> Result<()> {
    let mut work = work;
    let Some(first) = work.next() else { return Ok(()) };
    thread::scope(|scope| {
        let others: Vec<_> = work.map(|work| scope.spawn(work)).collect();
        let mut result = first();
        for other in others {
            let found = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(found);
        }
        result
    })
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
        // An MXFP4 block whose scale is no number.
        dequantise(DType::MXFP4, &[255; 17], &mut out).unwrap();
        assert!(out.iter().all(|value| value.is_nan()));
    }

    #[test]
    fn what_cannot_be_held_is_an_error() {
        assert!(quantise(DType::Q8_0, &[0.0; 33]).is_err());
        for &dtype in WRITABLE.iter().filter(|dtype| dtype.is_quantised()) {
            assert!(
                quantise(dtype, &[f32::NAN; 256]).unwrap_err().to_string().contains("element 0"),
                "{dtype}"
            );
            assert!(quantise(dtype, &[1e30; 256]).unwrap_err().to_string().contains("f16"), "{dtype}");
            assert_eq!(round_trip(dtype, &[0.0; 256]), [0.0; 256], "{dtype}");
            assert_eq!(round_trip(dtype, &[1e-44; 256]), [0.0; 256], "{dtype}");
        }
        assert!(quantise(DType::F16, &[7e4]).unwrap_err().to_string().contains("65504"));
        assert!(dequantise(DType::I32, &[0; 4], &mut [0.0; 1]).unwrap_err().to_string().contains("I32"));
        assert!(quantise(DType::Q5K, &[0.0; 256]).unwrap_err().to_string().contains("Q5_K"));
        assert!(dequantise(DType::F32, &[0; 5], &mut [0.0; 1]).is_err());
    }

    #[test]
    fn rows_are_whole_blocks_and_threads_do_not_matter() {
        let values: Vec<f32> = (0..7 * 512).map(|at| ((at * 37 % 101) as f32 - 50.0) / 7.0).collect();
        for &dtype in WRITABLE {
            let bytes = quantise(dtype, &values).unwrap();
            let mut alone = vec![0.0; values.len()];
            dequantise(dtype, &bytes, &mut alone).unwrap();
            for threads in [0, 1, 2, 3, 50] {
                assert_eq!(quantise_rows(dtype, &values, 512, threads).unwrap(), bytes);
                let mut out = vec![0.0; values.len()];
                dequantise_rows(dtype, &bytes, 512, threads, &mut out).unwrap();
                assert_eq!(out, alone);
            }
        }
        let error = quantise_rows(DType::Q4K, &[0.0; 1152], 576, 1).unwrap_err().to_string();
        assert!(error.contains("Q4_K") && error.contains("576") && error.contains("256"), "{error}");
        assert!(quantise_rows(DType::F16, &[0.0; 5], 2, 1).is_err());
        assert!(quantise_rows(DType::F16, &[0.0; 5], 0, 1).is_err());
        assert!(dequantise_rows(DType::F16, &[0; 9], 1, 2, &mut [0.0; 5]).is_err());
        let mut broken = vec![0.0; 128];
        broken[100] = f32::INFINITY;
        assert!(quantise_rows(DType::Q8_0, &broken, 32, 4).is_err());
        assert!(quantise_rows(DType::Q8_0, &[], 32, 4).unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn errors_stay_within_half_a_step(values in prop::collection::vec(-100.0_f32..100.0, 256)) {
            let largest = values.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
            // Half a step, and for Q4_0 a whole one at the end that has no code (+8); f16 scales add 2^-11. A searched
            // scale may cut the ends off for a smaller error elsewhere.
            let bounds = [
                (DType::Q8_0, 0.5 / 127.0),
                (DType::Q4_0, 1.0 / 8.0),
                (DType::Q4_1, 1.0 / 15.0),
                (DType::Q4K, 2.0 / 15.0),
                (DType::Q6K, 2.0 / 32.0),
            ];
            for (dtype, bound) in bounds {
                for (value, back) in values.iter().zip(round_trip(dtype, &values)) {
                    prop_assert!((value - back).abs() <= largest * (bound + 1e-3), "{dtype} {value} {back}");
                }
            }
            prop_assert_eq!(round_trip(DType::F32, &values), values);
        }

        #[test]
        fn any_bytes_decode(bytes in prop::collection::vec(any::<u8>(), 210)) {
            for &dtype in READABLE {
                let blocks = bytes.len() / dtype.block_bytes() as usize;
                let mut out = vec![0.0; blocks * dtype.block_elements() as usize];
                dequantise(dtype, &bytes[..blocks * dtype.block_bytes() as usize], &mut out).unwrap();
            }
        }

        #[test]
        fn any_finite_values_encode_or_are_refused(bits in prop::collection::vec(any::<u32>(), 256)) {
            let values: Vec<f32> =
                bits.iter().map(|&bits| f32::from_bits(bits)).map(|v| if v.is_finite() { v } else { 1.0 }).collect();
            let small: Vec<f32> = values.iter().map(|value| value / value.abs().max(1.0)).collect();
            for &dtype in WRITABLE {
                let _ = quantise(dtype, &values); // refused or not, never a panic
                prop_assert!(round_trip(dtype, &small).iter().all(|value| value.is_finite()));
            }
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
