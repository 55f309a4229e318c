//! Weights as the library takes them: rows decoded and rounded to f16, or 4-bit codes with a scale per block of 32.

use engine_core::{DType, TensorType};
use half::{bf16, f16};

use crate::ffi::data_type;
use crate::graph::Encoding;

/// Elements of a block of the quantised types that are known here.
const BLOCK: usize = 32;

/// A constant's type, encoding and bytes.
pub(crate) type Encoded = (u32, Encoding, Vec<u8>);

/// Whether rows of this type can be decoded.
pub(crate) fn is_known(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0 | DType::Q4_0 | DType::Q4_1)
}

/// A matrix in memory.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) tensor: TensorType,
    pub(crate) bytes: &'a [u8],
}

/// Rows, or columns, in the order in which they are wanted.
pub(crate) type Picked<'a> = &'a [u32];

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Decodes a row of a type for which [`is_known`] is true; other types leave `out` as it is.
fn decode(dtype: DType, row: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (to, from) in out.iter_mut().zip(row.chunks_exact(4)) {
                *to = f32::from_le_bytes([from[0], from[1], from[2], from[3]]);
            }
        }
        DType::F16 => {
            for (to, from) in out.iter_mut().zip(row.chunks_exact(2)) {
                *to = f16::from_le_bytes([from[0], from[1]]).to_f32();
            }
        }
        DType::BF16 => {
            for (to, from) in out.iter_mut().zip(row.chunks_exact(2)) {
                *to = bf16::from_le_bytes([from[0], from[1]]).to_f32();
            }
        }
        DType::Q8_0 => {
            for (to, block) in out.chunks_exact_mut(BLOCK).zip(row.chunks_exact(34)) {
                let scale = half_at(block, 0);
                to.iter_mut().zip(&block[2..]).for_each(|(to, code)| *to = scale * f32::from(*code as i8));
            }
        }
        DType::Q4_0 | DType::Q4_1 => {
            let (bytes, codes) = if dtype == DType::Q4_0 { (18, 2) } else { (20, 4) };
            for (to, block) in out.chunks_exact_mut(BLOCK).zip(row.chunks_exact(bytes)) {
                let scale = half_at(block, 0);
                let least = if dtype == DType::Q4_0 { -8.0 * scale } else { half_at(block, 2) };
                let (low, high) = to.split_at_mut(BLOCK / 2);
                for ((low, high), code) in low.iter_mut().zip(high).zip(&block[codes..]) {
                    *low = scale * f32::from(code & 15) + least;
                    *high = scale * f32::from(code >> 4) + least;
                }
            }
        }
        _ => {}
    }
}

impl<'a> Matrix<'a> {
    fn row(&self, at: u32) -> &'a [u8] {
        let start = (u64::from(at) * self.tensor.row_stride) as usize;
        &self.bytes[start..start + self.tensor.row_bytes() as usize]
    }

    fn columns(&self) -> usize {
        self.tensor.columns as usize
    }

    /// These rows in f16, `[rows x columns]`.
    pub(crate) fn rows(&self, rows: Picked<'_>) -> Vec<u8> {
        let mut out = Vec::with_capacity(rows.len() * self.columns() * 2);
        let mut row = vec![0f32; self.columns()];
        for at in rows {
            if self.tensor.dtype == DType::F16 {
                out.extend_from_slice(self.row(*at));
                continue;
            }
            decode(self.tensor.dtype, self.row(*at), &mut row);
            out.extend(row.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()));
        }
        out
    }

    /// These columns of every row in f16, `[rows x columns]`.
    pub(crate) fn picked_columns(&self, columns: Picked<'_>) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.tensor.rows as usize * columns.len() * 2);
        let mut row = vec![0f32; self.columns()];
        for at in 0..self.tensor.rows as u32 {
            decode(self.tensor.dtype, self.row(at), &mut row);
            out.extend(columns.iter().flat_map(|c| f16::from_f32(row[*c as usize]).to_le_bytes()));
        }
        out
    }

    /// These rows in f16 as columns, `[columns x rows]`.
    pub(crate) fn transposed(&self, rows: Picked<'_>) -> Vec<u8> {
        let mut out = vec![0u8; rows.len() * self.columns() * 2];
        let mut row = vec![0f32; self.columns()];
        for (to, at) in rows.iter().enumerate() {
            decode(self.tensor.dtype, self.row(*at), &mut row);
            for (column, x) in row.iter().enumerate() {
                let place = (column * rows.len() + to) * 2;
                out[place..place + 2].copy_from_slice(&f16::from_f32(*x).to_le_bytes());
            }
        }
        out
    }

    /// These rows of a Q4_0 matrix as codes of 4 bits in bytes, with a scale per block: exactly the file's values.
    pub(crate) fn blocks_of_four_bits(&self, rows: Picked<'_>) -> Encoded {
        let mut codes = Vec::with_capacity(rows.len() * self.columns());
        let mut scales = Vec::with_capacity(rows.len() * self.columns() / BLOCK);
        for at in rows {
            for block in self.row(*at).chunks_exact(18) {
                scales.push(half_at(block, 0));
                codes.extend(block[2..].iter().map(|code| (code & 15).wrapping_sub(8)));
                codes.extend(block[2..].iter().map(|code| (code >> 4).wrapping_sub(8)));
            }
        }
        (data_type::SFIXED_POINT_8, Encoding::Blocks { block: [1, BLOCK as u32], scales }, codes)
    }
}

/// A matrix in f16 rounded to 8 bits with one scale per row: half the memory, and not the file's values.
pub(crate) fn eight_bits(halves: &[u8], columns: usize) -> Encoded {
    let mut codes = Vec::with_capacity(halves.len() / 2);
    let mut scales = Vec::with_capacity(halves.len() / 2 / columns.max(1));
    for row in halves.chunks(2 * columns.max(1)) {
        let numbers = || row.chunks_exact(2).map(|x| half_at(x, 0));
        // A NaN must show: it makes the whole row NaN.
        let most = numbers()
            .fold(0f32, |most, x| if x.is_nan() || most.is_nan() { f32::NAN } else { most.max(x.abs()) });
        // A row of zeros has any scale.
        let scale = if most == 0.0 { 1.0 } else { most / 127.0 };
        scales.push(scale);
        codes.extend(numbers().map(|x| (x / scale).round_ties_even() as i8 as u8));
    }
    (data_type::SFIXED_POINT_8, Encoding::Rows(scales), codes)
}

/// f32 numbers as f16.
pub(crate) fn to_f16(from: &[u8], to: &mut [u8]) {
    for (to, from) in to.chunks_exact_mut(2).zip(from.chunks_exact(4)) {
        let x = f32::from_le_bytes([from[0], from[1], from[2], from[3]]);
        to.copy_from_slice(&f16::from_f32(x).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_row() {
        let tensor = TensorType::matrix(DType::Q4_0, 1, 32).unwrap();
        let mut bytes = f16::from_f32(-0.5).to_le_bytes().to_vec();
        bytes.extend((0..16u8).map(|i| i | (15 - i) << 4));
        let matrix = Matrix { tensor, bytes: &bytes };
        let (_, encoding, codes) = matrix.blocks_of_four_bits(&[0]);
        assert_eq!(encoding, Encoding::Blocks { block: [1, 32], scales: vec![-0.5] });
        let values: Vec<f32> = codes.iter().map(|c| f32::from(*c as i8) * -0.5).collect();
        let halves = matrix.rows(&[0]);
        let decoded: Vec<f32> = (0..32).map(|i| half_at(&halves, 2 * i)).collect();
        assert_eq!(values, decoded);
        assert_eq!((decoded[0], decoded[15], decoded[16], decoded[31]), (4.0, -3.5, -3.5, 4.0));
    }

    #[test]
    fn picking_and_turning() {
        let tensor = TensorType::matrix(DType::F32, 2, 3).unwrap();
        let bytes: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let matrix = Matrix { tensor, bytes: &bytes };
        let of = |bytes: Vec<u8>| (0..bytes.len() / 2).map(|i| half_at(&bytes, 2 * i)).collect::<Vec<_>>();
        assert_eq!(of(matrix.rows(&[1])), [3.0, 4.0, 5.0]);
        assert_eq!(of(matrix.picked_columns(&[2, 0])), [2.0, 0.0, 5.0, 3.0]);
        assert_eq!(of(matrix.transposed(&[0, 1])), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        // A row with a NaN is NaN wherever in the row that stands.
        for at in 0..3 {
            let mut row = [1.0f32, 2.0, 3.0];
            row[at] = f32::NAN;
            let halves: Vec<u8> = row.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
            let (_, encoding, _) = eight_bits(&halves, 3);
            assert!(matches!(encoding, Encoding::Rows(scales) if scales[0].is_nan()), "{at}");
        }
        let (_, encoding, codes) = eight_bits(&matrix.rows(&[0, 1]), 3);
        assert_eq!(
            (encoding, codes),
            (Encoding::Rows(vec![2.0 / 127.0, 5.0 / 127.0]), vec![0, 64, 127, 76, 102, 127])
        );
    }
}
