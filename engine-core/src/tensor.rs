//! Shapes and types of the operands of operations.

use crate::{DType, Error, Result};
use std::fmt;

/// A row-major matrix type: `rows` rows of `columns` elements, each row `row_stride` bytes after the one before.
///
/// Every operand of an operation is such a matrix (a vector is one row; a per-token operand has a row per token).
/// A stride larger than the row is how a neuron bundle's gate, up and down rows are addressed in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Number of rows.
    pub rows: u64,
    /// Elements in a row; for quantised types a multiple of the block.
    pub columns: u64,
    /// Bytes from the start of one row to the start of the next; at least the bytes of a row.
    pub row_stride: u64,
}

impl TensorType {
    /// A matrix without gaps between its rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where a row is not a whole number of blocks, or the size overflows.
    pub fn matrix(dtype: DType, rows: u64, columns: u64) -> Result<TensorType> {
        let row_stride = dtype.row_bytes(columns).ok_or_else(|| {
            Error::invalid(format!(
                "a row of {columns} {dtype} elements is no whole number of blocks of {}",
                dtype.block_elements()
            ))
        })?;
        TensorType::strided(dtype, rows, columns, row_stride)
    }

    /// A matrix whose rows start `row_stride` bytes apart.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where a row is not a whole number of blocks, the stride is shorter than a row, or
    /// the size overflows.
    pub fn strided(dtype: DType, rows: u64, columns: u64, row_stride: u64) -> Result<TensorType> {
        let tensor = TensorType { dtype, rows, columns, row_stride };
        tensor.check()?;
        Ok(tensor)
    }

    /// One row of f32 values.
    pub fn f32_vector(columns: u64) -> TensorType {
        TensorType { dtype: DType::F32, rows: 1, columns, row_stride: columns.saturating_mul(4) }
    }

    /// Bytes of the elements of one row.
    pub fn row_bytes(&self) -> u64 {
        self.dtype.row_bytes(self.columns).unwrap_or(0)
    }

    /// Bytes from the first row's start to the last row's end.
    pub fn bytes(&self) -> u64 {
        if self.rows == 0 {
            return 0;
        }
        (self.rows - 1).saturating_mul(self.row_stride).saturating_add(self.row_bytes())
    }

    /// Verifies what the constructors verify, for values that came from elsewhere (such as the plug-in boundary).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], saying which of the numbers does not fit.
    pub fn check(&self) -> Result<()> {
        let row = self.dtype.row_bytes(self.columns).ok_or_else(|| {
            Error::invalid(format!(
                "{self}: a row is no whole number of blocks of {}",
                self.dtype.block_elements()
            ))
        })?;
        if self.row_stride < row {
            return Err(Error::invalid(format!(
                "{self}: stride {} is shorter than a row of {row} bytes",
                self.row_stride
            )));
        }
        let fits = match self.rows.checked_sub(1) {
            None => true,
            Some(gaps) => gaps.checked_mul(self.row_stride).and_then(|b| b.checked_add(row)).is_some(),
        };
        if !fits {
            return Err(Error::invalid(format!("{self}: its size overflows 64 bits")));
        }
        Ok(())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{} x {}]", self.dtype, self.rows, self.columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let t = TensorType::matrix(DType::Q8_0, 3, 64).unwrap();
        assert_eq!((t.row_stride, t.bytes()), (68, 204));
        let s = TensorType::strided(DType::Q8_0, 3, 64, 204).unwrap();
        assert_eq!(s.bytes(), 2 * 204 + 68);
        assert!(TensorType::matrix(DType::Q8_0, 1, 33).is_err());
        assert!(TensorType::strided(DType::F32, 2, 4, 15).is_err());
        assert!(TensorType::strided(DType::F32, u64::MAX, 4, 1 << 20).is_err());
    }
}
