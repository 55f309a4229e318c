//! Random rows of every weight type with their exact values, taken apart element by element from the definition.

use super::Random;
use crate::kernels::format::{Matrix, WeightType};

/// Rows start at odd addresses, as in a file's bundles.
pub(super) struct Weights {
    pub(super) bytes: Vec<u8>,
    /// Low halves of rows in planes; empty otherwise.
    pub(super) low: Vec<u8>,
    pub(super) stride: usize,
    pub(super) columns: usize,
    pub(super) format: WeightType,
    /// Per row and element the value, and the sum of the magnitudes of the terms that it is made of.
    pub(super) values: Vec<Vec<(f64, f64)>>,
}

/// A row length that the type allows.
pub(super) fn columns(format: WeightType, blocks: usize, odd: usize) -> usize {
    match format.dtype().block_elements() {
        1 => blocks * 32 - odd,
        256 => blocks.div_ceil(3) * 256,
        _ => blocks * 32,
    }
}

/// The product with an activation per element, and the sum of its terms' magnitudes.
pub(super) fn dot(row: &[(f64, f64)], x: impl Fn(usize) -> f64) -> (f64, f64) {
    row.iter().enumerate().fold((0.0, 0.0), |(sum, scale), (i, (w, magnitude))| {
        (sum + w * x(i), scale + magnitude * x(i).abs())
    })
}

impl Weights {
    pub(super) fn new(random: &mut Random, format: WeightType, rows: usize, columns: usize) -> Weights {
        let row_bytes = format.dtype().row_bytes(columns as u64).unwrap() as usize;
        let stride = row_bytes + if format.has_integer_dot() { 1 } else { 4 };
        let low = if format == WeightType::Planes { rows * columns / 2 } else { 0 };
        let low = (0..low).map(|_| random.next() as u8).collect();
        let mut weights =
            Weights { bytes: vec![0xff; rows * stride], low, stride, columns, format, values: Vec::new() };
        for r in 0..rows {
            let mut values = Vec::new();
            let row = &mut weights.bytes[r * stride..][..row_bytes];
            for (b, block) in row.chunks_exact_mut(format.dtype().block_bytes() as usize).enumerate() {
                block.fill_with(|| random.next() as u8);
                for at in floats(format) {
                    let x = half::f16::from_f32(random.f32() / 64.0);
                    block[at..at + 2].copy_from_slice(&x.to_le_bytes());
                }
                match format {
                    WeightType::F32 => block.copy_from_slice(&random.f32().to_le_bytes()),
                    WeightType::F16 => {
                        block.copy_from_slice(&half::f16::from_f32(random.f32()).to_le_bytes())
                    }
                    WeightType::BF16 => {
                        block.copy_from_slice(&half::bf16::from_f32(random.f32()).to_le_bytes())
                    }
                    _ => {}
                }
                let low = weights.low.get(r * columns / 2 + b * 16..).unwrap_or(&[]);
                let elements = format.dtype().block_elements() as usize;
                values.extend((0..elements).map(|e| {
                    let (a, b) = element(format, block, low, e);
                    (a + b, a.abs() + b.abs())
                }));
            }
            weights.values.push(values);
        }
        weights
    }

    pub(super) fn matrix(&self) -> Matrix {
        Matrix {
            data: self.bytes.as_ptr(),
            stride: self.stride,
            low: self.low.as_ptr(),
            low_stride: self.columns / 2,
            columns: self.columns,
            format: self.format,
        }
    }
}

/// Where a block has f16 factors.
fn floats(format: WeightType) -> Vec<usize> {
    match format {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => vec![],
        WeightType::Q4_0 | WeightType::Q8_0 | WeightType::HighHalves | WeightType::Planes => vec![0],
        WeightType::Q4_1 | WeightType::Q4K => vec![0, 2],
        WeightType::Q6K => vec![208],
    }
}

/// Every type that kernels are made for: those of the contract, and the two views of a matrix in planes.
pub(super) fn formats() -> impl Iterator<Item = WeightType> {
    WeightType::ALL.into_iter().chain([WeightType::HighHalves, WeightType::Planes])
}

/// Element `e` of a block (of planes, with its low halves) as the two terms whose sum it is.
fn element(format: WeightType, block: &[u8], low: &[u8], e: usize) -> (f64, f64) {
    let f16 = |at: usize| half::f16::from_le_bytes([block[at], block[at + 1]]).to_f64();
    let nibble = |at: usize| f64::from(if e < 16 { block[at + e] & 15 } else { block[at + e - 16] >> 4 });
    match format {
        WeightType::F32 => (f64::from(f32::from_le_bytes(block.try_into().unwrap())), 0.0),
        WeightType::F16 => (f16(0), 0.0),
        WeightType::BF16 => (half::bf16::from_le_bytes([block[0], block[1]]).to_f64(), 0.0),
        WeightType::Q8_0 => (f16(0) * f64::from(block[2 + e] as i8), 0.0),
        WeightType::Q4_0 => (f16(0) * (nibble(2) - 8.0), 0.0),
        WeightType::HighHalves => (f16(0) * nibble(2), f16(0) * (7.5 / 16.0 - 8.0)),
        WeightType::Planes => {
            let low = if e < 16 { low[e] & 15 } else { low[e - 16] >> 4 };
            (f16(0) / 16.0 * (16.0 * (nibble(2) - 8.0) + f64::from(low)), 0.0)
        }
        WeightType::Q4_1 => (f16(0) * nibble(4), f16(2)),
        WeightType::Q4K => {
            let (group, packed) = (e / 32, &block[4..16]);
            let (scale, minimum) = match group {
                0..4 => (packed[group] & 63, packed[group + 4] & 63),
                _ => (
                    (packed[group + 4] & 15) + (packed[group - 4] >> 6) * 16,
                    (packed[group + 4] >> 4) + (packed[group] >> 6) * 16,
                ),
            };
            let byte = block[16 + group / 2 * 32 + e % 32];
            let code = if group % 2 == 0 { byte & 15 } else { byte >> 4 };
            (f16(0) * f64::from(scale) * f64::from(code), -f16(2) * f64::from(minimum))
        }
        WeightType::Q6K => {
            let (half, run, l) = (e / 128, e % 128 / 32, e % 32);
            let low = block[64 * half + 32 * (run % 2) + l];
            let low = if run < 2 { low & 15 } else { low >> 4 };
            let high = block[128 + 32 * half + l] >> (2 * run) & 3;
            let code = f64::from(low) + 16.0 * f64::from(high) - 32.0;
            (f16(208) * f64::from(block[192 + e / 16] as i8) * code, 0.0)
        }
    }
}
