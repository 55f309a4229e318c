//! Operands of every kind: plain numbers by class, and quantised blocks from random codes under valid scales.

use crate::rng::Rng;
use engine_core::{DType, TensorType};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// What kind of numbers an operand holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ValueClass {
    /// Evenly spread over -1..1.
    Plain,
    /// Mostly zeros: whole rows and blocks, with zero scales.
    Zeros,
    /// Subnormal numbers of the operand's own type.
    Denormals,
    /// Plain, with one element in about forty a thousand times larger.
    Outliers,
    /// Magnitudes from 2^-12 to 2^12, block by block, and positive only in some rows (no help from cancellation).
    Mixed,
    /// Plain, with some NaN and infinities.
    NonFinite,
}

impl ValueClass {
    /// Every class.
    pub const ALL: [ValueClass; 6] = [
        ValueClass::Plain,
        ValueClass::Zeros,
        ValueClass::Denormals,
        ValueClass::Outliers,
        ValueClass::Mixed,
        ValueClass::NonFinite,
    ];

    /// Name, as in case names.
    pub fn name(self) -> &'static str {
        match self {
            ValueClass::Plain => "plain",
            ValueClass::Zeros => "zeros",
            ValueClass::Denormals => "denormals",
            ValueClass::Outliers => "outliers",
            ValueClass::Mixed => "mixed",
            ValueClass::NonFinite => "non-finite",
        }
    }
}

/// The weight types that the contract allows.
pub fn weight_types() -> impl Iterator<Item = DType> {
    use DType::{F64, I8, I16, I32, I64, U8};
    DType::all().filter(|d| !matches!(d, I8 | I16 | I32 | I64 | F64 | U8))
}

/// `count` f32 numbers of a class.
pub fn numbers(rng: &mut Rng, class: ValueClass, count: usize) -> Vec<f32> {
    // Runs of 32 share a magnitude, as the elements of a quantised block do.
    let mut scale = 1.0f32;
    let mut positive = false;
    (0..count)
        .map(|i| {
            if i % 32 == 0 {
                scale = 2f32.powi(rng.below(25) as i32 - 12);
                positive = rng.once_in(3);
            }
            let x = rng.signed();
            match class {
                ValueClass::Plain => x,
                ValueClass::Zeros => {
                    if rng.once_in(8) {
                        x
                    } else {
                        0.0 * x.signum()
                    }
                }
                ValueClass::Denormals => x * f32::MIN_POSITIVE,
                ValueClass::Outliers => {
                    if rng.once_in(40) {
                        x * 1000.0
                    } else {
                        x
                    }
                }
                ValueClass::Mixed => scale * if positive { x.abs() } else { x },
                ValueClass::NonFinite => match rng.below(160) {
                    0 => f32::NAN,
                    1 => f32::INFINITY,
                    2 => f32::NEG_INFINITY,
                    _ => x,
                },
            }
        })
        .collect()
}

/// The bytes of f32 numbers.
pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// The f32 numbers in bytes (a tail that is no whole number is dropped).
pub fn f32_values(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

/// The bits of f16 numbers as bytes.
pub fn u16_bytes(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// f16 bits of numbers of a class, rounded to nearest even.
pub fn f16_bits(rng: &mut Rng, class: ValueClass, count: usize) -> Vec<u16> {
    numbers(rng, class, count)
        .into_iter()
        .map(|x| {
            let x = if class == ValueClass::Denormals { x / f32::MIN_POSITIVE * 6.0e-5 } else { x };
            f16::from_f32(x).to_bits()
        })
        .collect()
}

/// Offsets of the f16 scales (and minima) within a block; for [`DType::MXFP4`] the scale is byte 0.
fn scale_offsets(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4NL | DType::IQ4XS => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        _ => &[],
    }
}

/// The scale that brings a block's largest values near 1.
fn unit_scale(dtype: DType) -> f32 {
    match dtype {
        DType::Q8_0 => 1.0 / 127.0,
        DType::Q4_0 => 1.0 / 8.0,
        DType::Q4_1 => 1.0 / 15.0,
        DType::Q5_0 => 1.0 / 16.0,
        DType::Q5_1 => 1.0 / 31.0,
        DType::Q2K => 1.0 / (15.0 * 3.0),
        DType::Q3K => 1.0 / (32.0 * 4.0),
        DType::Q4K => 1.0 / (63.0 * 15.0),
        DType::Q5K => 1.0 / (63.0 * 31.0),
        DType::Q6K => 1.0 / (128.0 * 32.0),
        DType::IQ4NL => 1.0 / 113.0,
        DType::IQ4XS => 1.0 / (32.0 * 113.0),
        _ => 1.0,
    }
}

/// One quantised block of a class.
fn block(rng: &mut Rng, dtype: DType, class: ValueClass) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..dtype.block_bytes()).map(|_| rng.bits() as u8).collect();
    let factor = match class {
        ValueClass::Plain | ValueClass::Denormals | ValueClass::NonFinite => 0.5 + 0.5 * rng.unit() as f32,
        ValueClass::Zeros => {
            if rng.once_in(4) {
                1.0
            } else {
                0.0
            }
        }
        ValueClass::Outliers => {
            if rng.once_in(10) {
                64.0
            } else {
                0.75
            }
        }
        ValueClass::Mixed => 2f32.powi(rng.below(13) as i32 - 8),
    };
    let broken = class == ValueClass::NonFinite && rng.once_in(24);
    if dtype == DType::MXFP4 {
        // E8M0: 2^(byte - 127); 0 is the smallest power, not zero. 255 is left out: the OCP's text calls it NaN, GGUF's
        // decoders take it for a power, and the contract does not say.
        bytes[0] = match class {
            ValueClass::Denormals => rng.below(3) as u8,
            ValueClass::Zeros if factor == 0.0 => {
                bytes[1..].fill(0);
                127
            }
            _ => (125.0 + factor.log2().clamp(-8.0, 6.0)) as u8,
        };
        return bytes;
    }
    for (index, &offset) in scale_offsets(dtype).iter().enumerate() {
        // A minimum is subtracted (or added, in the `_1` types): about half of the range, so that signs mix.
        let level = if index == 1 { minimum_share(dtype) } else { 1.0 };
        let sign = if index == 0 && rng.once_in(2) && scale_offsets(dtype).len() == 1 { -1.0 } else { 1.0 };
        let scale = match class {
            ValueClass::Denormals => f16::from_bits(1 + rng.below(1022) as u16),
            // Never infinite: whether a block's product is `scale * sum of codes` or a sum of infinities decides
            // between an infinity and NaN, and relu then between 0 and NaN.
            _ if broken => f16::NAN,
            _ => f16::from_f32(unit_scale(dtype) * factor * level * sign),
        };
        bytes[offset..offset + 2].copy_from_slice(&scale.to_le_bytes());
    }
    bytes
}

/// What the second f16 of a block is, in units of the first.
fn minimum_share(dtype: DType) -> f32 {
    match dtype {
        DType::Q4_1 => -7.5,
        DType::Q5_1 => -15.5,
        DType::Q2K => 1.5,
        DType::Q4K => 7.5,
        DType::Q5K => 15.5,
        _ => 1.0,
    }
}

/// The bytes of one row of a weight matrix.
pub fn weight_row(rng: &mut Rng, dtype: DType, columns: u64, class: ValueClass) -> Vec<u8> {
    let count = columns as usize;
    match dtype {
        DType::F32 => f32_bytes(&numbers(rng, class, count)),
        DType::F16 => u16_bytes(&f16_bits(rng, class, count)),
        DType::BF16 => {
            let bits = numbers(rng, class, count).into_iter().map(|x| bf16::from_f32(x).to_bits());
            bits.flat_map(u16::to_le_bytes).collect()
        }
        _ => (0..columns / dtype.block_elements()).flat_map(|_| block(rng, dtype, class)).collect(),
    }
}

/// The bytes of a whole matrix with its stride; gaps between rows are filled with [`FILL`].
pub fn weights(rng: &mut Rng, tensor: &TensorType, class: ValueClass) -> Vec<u8> {
    let mut bytes = vec![FILL; tensor.bytes() as usize];
    let row_bytes = tensor.row_bytes() as usize;
    for row in 0..tensor.rows {
        let start = (row * tensor.row_stride) as usize;
        bytes[start..start + row_bytes].copy_from_slice(&weight_row(
            rng,
            tensor.dtype,
            tensor.columns,
            class,
        ));
    }
    bytes
}

/// What memory that nobody may use holds: NaN as f32, f16, bf16 and as a scale, so that using it shows.
pub const FILL: u8 = 0xFF;

/// Overwrites one row of a matrix so that any use of it gives NaN.
pub fn poison_row(tensor: &TensorType, bytes: &mut [u8], row: u64) {
    let start = (row * tensor.row_stride) as usize;
    bytes[start..start + tensor.row_bytes() as usize].fill(FILL);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_weight_type_has_rows_of_every_class() {
        let mut rng = Rng::new(1);
        assert_eq!(weight_types().count(), 16);
        for dtype in weight_types() {
            assert_eq!(dtype.is_quantised(), dtype == DType::MXFP4 || !scale_offsets(dtype).is_empty());
            for class in ValueClass::ALL {
                let row = weight_row(&mut rng, dtype, 512, class);
                assert_eq!(Some(row.len() as u64), dtype.row_bytes(512), "{dtype} {class:?}");
                for block in row.chunks_exact(dtype.block_bytes() as usize) {
                    for &at in scale_offsets(dtype) {
                        let scale = f16::from_le_bytes([block[at], block[at + 1]]);
                        assert!(scale.is_finite() || class == ValueClass::NonFinite);
                        assert!(scale.to_f32() != 0.0 || class == ValueClass::Zeros, "{dtype} {class:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn gaps_and_poison_are_nan() {
        let tensor = TensorType::strided(DType::F32, 3, 4, 24).unwrap();
        let mut bytes = weights(&mut Rng::new(3), &tensor, ValueClass::Plain);
        assert!(f32_values(&bytes)[4].is_nan() && f32_values(&bytes)[5].is_nan());
        assert!(f32_values(&bytes)[6].is_finite());
        poison_row(&tensor, &mut bytes, 1);
        assert!(f32_values(&bytes)[6..10].iter().all(|x| x.is_nan()));
        assert!(f32_values(&bytes)[12].is_finite());
    }
}
