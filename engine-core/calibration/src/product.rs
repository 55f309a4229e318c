//! Products of matrices that lie row by row in slices. Each element's sum runs in an order that depends on the inner
//! dimension alone.

use crate::Result;
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};

/// Rows of a matrix with rows of this length.
fn rows(values: &[f32], columns: usize) -> usize {
    values.len() / columns.max(1)
}

/// `out[m x n] = a[m x k] . b[n x k]^T`.
pub(crate) fn by_rows(a: &[f32], b: &[f32], k: usize, out: &mut [f32]) -> Result<()> {
    let (m, n) = (rows(a, k), rows(b, k));
    let (a, b) = (ArrayView2::from_shape((m, k), a)?, ArrayView2::from_shape((n, k), b)?);
    general_mat_mul(1.0, &a, &b.t(), 0.0, &mut ArrayViewMut2::from_shape((m, n), out)?);
    Ok(())
}

/// `out[m x n] = a[m x k] . b[k x n]`.
pub(crate) fn plain(a: &[f32], b: &[f32], k: usize, out: &mut [f32]) -> Result<()> {
    let (m, n) = (rows(a, k), b.len() / k.max(1));
    let (a, b) = (ArrayView2::from_shape((m, k), a)?, ArrayView2::from_shape((k, n), b)?);
    general_mat_mul(1.0, &a, &b, 0.0, &mut ArrayViewMut2::from_shape((m, n), out)?);
    Ok(())
}

/// `out[m x n] = a[k x m]^T . b[k x n]`.
pub(crate) fn of_columns(a: &[f32], b: &[f32], k: usize, out: &mut [f32]) -> Result<()> {
    let (m, n) = (a.len() / k.max(1), b.len() / k.max(1));
    let (a, b) = (ArrayView2::from_shape((k, m), a)?, ArrayView2::from_shape((k, n), b)?);
    general_mat_mul(1.0, &a.t(), &b, 0.0, &mut ArrayViewMut2::from_shape((m, n), out)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_ways_to_multiply() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 2.0, 0.0, 1.0, 1.0]);
        let mut out = [0.0; 4];
        by_rows(&a, &b, 3, &mut out).unwrap(); // [2 x 3] . [2 x 3]^T
        assert_eq!(out, [7.0, 5.0, 16.0, 11.0]);
        plain(&a, &b, 3, &mut out).unwrap(); // [2 x 3] . [3 x 2]
        assert_eq!(out, [8.0, 3.0, 20.0, 6.0]);
        of_columns(&a, &b, 3, &mut out).unwrap(); // [3 x 2]^T . [3 x 2]
        assert_eq!(out, [12.0, 5.0, 16.0, 6.0]);
        assert!(by_rows(&a, &b, 3, &mut out[..3]).is_err());
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let value = |at: usize| ((at * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
        let a: Vec<f32> = (0..37 * 300).map(value).collect();
        let b: Vec<f32> = (0..51 * 300).map(|at| value(at + 7)).collect();
        let mut all = vec![0.0; 37 * 51];
        by_rows(&a, &b, 300, &mut all).unwrap();
        let mut one = vec![0.0; 51];
        by_rows(&a[20 * 300..21 * 300], &b, 300, &mut one).unwrap();
        assert_eq!(all[20 * 51..21 * 51], one);
    }
}
