//! Element types of tensors, with their block geometry.

use std::fmt;

/// How the elements of a tensor are stored.
///
/// Quantised types store blocks of [`DType::block_elements`] consecutive elements of a row; a row of a quantised
/// tensor is a whole number of blocks. Names and layouts are the usual ones of quantised model files; the numeric codes
/// of the plug-in boundary are those of [`DType::code`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// Brain float: the upper half of a binary32.
    BF16,
    /// 32 elements: f16 scale, 16 bytes of 4-bit codes (value = scale x (code - 8)).
    Q4_0,
    /// 32 elements: f16 scale, f16 minimum, 16 bytes of 4-bit codes.
    Q4_1,
    /// 32 elements: f16 scale, 4 bytes of fifth bits, 16 bytes of 4-bit codes.
    Q5_0,
    /// 32 elements: f16 scale, f16 minimum, 4 bytes of fifth bits, 16 bytes of 4-bit codes.
    Q5_1,
    /// 32 elements: f16 scale, 32 signed bytes (value = scale x code).
    Q8_0,
    /// 256 elements in 84 bytes, two-bit codes with four-bit scales and minima.
    Q2K,
    /// 256 elements in 110 bytes, three-bit codes with six-bit scales.
    Q3K,
    /// 256 elements in 144 bytes, four-bit codes with six-bit scales and minima.
    Q4K,
    /// 256 elements in 176 bytes, five-bit codes with six-bit scales and minima.
    Q5K,
    /// 256 elements in 210 bytes, six-bit codes with eight-bit scales.
    Q6K,
    /// 32 elements: f16 scale, 16 bytes of indices into a fixed non-linear table.
    IQ4NL,
    /// 256 elements in 136 bytes, the same table with six-bit scales per 32.
    IQ4XS,
    /// 32 elements: one E8M0 scale byte, 16 bytes of E2M1 codes.
    MXFP4,
    /// Signed 8-bit integers.
    I8,
    /// Signed 16-bit integers.
    I16,
    /// Signed 32-bit integers (token ids, positions).
    I32,
    /// Signed 64-bit integers.
    I64,
    /// IEEE 754 binary64.
    F64,
    /// Unsigned bytes; neuron masks use 0 and 1. 1000 at the boundary.
    U8,
}

/// Every [`DType`] with its boundary code, name, elements per block and bytes per block.
const TABLE: &[(DType, u32, &str, u64, u64)] = &[
    (DType::F32, 0, "F32", 1, 4),
    (DType::F16, 1, "F16", 1, 2),
    (DType::Q4_0, 2, "Q4_0", 32, 18),
    (DType::Q4_1, 3, "Q4_1", 32, 20),
    (DType::Q5_0, 6, "Q5_0", 32, 22),
    (DType::Q5_1, 7, "Q5_1", 32, 24),
    (DType::Q8_0, 8, "Q8_0", 32, 34),
    (DType::Q2K, 10, "Q2_K", 256, 84),
    (DType::Q3K, 11, "Q3_K", 256, 110),
    (DType::Q4K, 12, "Q4_K", 256, 144),
    (DType::Q5K, 13, "Q5_K", 256, 176),
    (DType::Q6K, 14, "Q6_K", 256, 210),
    (DType::IQ4NL, 20, "IQ4_NL", 32, 18),
    (DType::IQ4XS, 23, "IQ4_XS", 256, 136),
    (DType::I8, 24, "I8", 1, 1),
    (DType::I16, 25, "I16", 1, 2),
    (DType::I32, 26, "I32", 1, 4),
    (DType::I64, 27, "I64", 1, 8),
    (DType::F64, 28, "F64", 1, 8),
    (DType::BF16, 30, "BF16", 1, 2),
    (DType::MXFP4, 39, "MXFP4", 32, 17),
    (DType::U8, 1000, "U8", 1, 1),
];

impl DType {
    /// Every type, in code order.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (DType, u32, &'static str, u64, u64) {
        // Every variant has a row: `table_is_complete` below walks them all.
        TABLE.iter().find(|row| row.0 == self).unwrap_or(&TABLE[0])
    }

    /// The numeric code at the plug-in boundary.
    pub fn code(self) -> u32 {
        self.row().1
    }

    /// The type with this code, if it is known.
    pub fn from_code(code: u32) -> Option<DType> {
        TABLE.iter().find(|row| row.1 == code).map(|row| row.0)
    }

    /// The field's usual name, such as `Q8_0`.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// The type with this name (upper or lower case), if there is one.
    pub fn from_name(name: &str) -> Option<DType> {
        TABLE.iter().find(|row| row.2.eq_ignore_ascii_case(name)).map(|row| row.0)
    }

    /// Elements stored together in one block; 1 for unquantised types.
    pub fn block_elements(self) -> u64 {
        self.row().3
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> u64 {
        self.row().4
    }

    /// Whether several elements share a scale.
    pub fn is_quantised(self) -> bool {
        self.block_elements() > 1
    }

    /// Bytes of a row of `elements`, or `None` where that is no whole number of blocks or overflows.
    pub fn row_bytes(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_complete() {
        for dtype in DType::all() {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
            assert!(dtype.block_bytes() > 0);
        }
        // A variant missing from the table would answer with F32's row.
        for dtype in [DType::BF16, DType::Q6K, DType::IQ4XS, DType::MXFP4, DType::U8, DType::F64, DType::I64]
        {
            assert_ne!(dtype.name(), "F32", "{dtype:?}");
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(DType::Q8_0.row_bytes(64), Some(68));
        assert_eq!(DType::Q8_0.row_bytes(33), None);
        assert_eq!(DType::Q4K.row_bytes(256), Some(144));
        assert_eq!(DType::F32.row_bytes(u64::MAX), None);
    }
}
