//! Rows times one token of which only some elements take part: a sparse layer whose down matrix has output rows.
//!
//! Equal to the dense product with zeros for the other elements, bit for bit, where the weights are finite: adding zero
//! changes no lane. Blocks without a participant are not read; in the others a lane that takes no part is masked, so a
//! weight that is not finite there does not reach the sum.

use super::format::{Format, Matrix, Row, with_format, with_integer_format};
use super::matmul::Input;
use super::quantised::{IntegerFormat, add_product, lane_sums};
use super::simd::{BLOCK, LANES, Simd};

/// One masked product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Masked<'a> {
    /// The weights; rows are outputs.
    pub(crate) weight: Matrix,
    /// First and one past the last row.
    pub(crate) rows: (usize, usize),
    /// The token (strides do not matter).
    pub(crate) input: Input,
    /// The blocks of 32 elements that have a participant, ascending.
    pub(crate) blocks: &'a [u32],
    /// Per element all ones or all zeros, with as many elements as the row has.
    pub(crate) keep: *const u32,
    /// Results, indexed by row.
    pub(crate) out: *mut f32,
    /// Whether they are added to what `out` holds.
    pub(crate) accumulate: bool,
}

/// Runs a masked product.
///
/// # Safety
/// As for [`super::matmul::matmul`]; blocks lie within the row.
#[inline(always)]
pub(crate) unsafe fn masked<S: Simd>(s: S, job: &Masked<'_>) {
    for row in job.rows.0..job.rows.1 {
        let w = job.weight.row(row);
        // SAFETY: the caller's promise, passed on.
        unsafe {
            let sum = match job.input {
                Input::F32 { data, .. } => {
                    with_format!(job.weight.format, F => dot_f32::<S, F>(s, job, w, data))
                }
                Input::Int8 { codes, scales, .. } => with_integer_format!(job.weight.format,
                    F => dot_int8::<S, F>(s, job, w, codes, scales),
                    else unreachable!("int8 codes meet an unquantised weight")),
            };
            let out = job.out.add(row);
            *out = if job.accumulate { *out + sum } else { sum };
        }
    }
}

#[inline(always)]
unsafe fn dot_f32<S: Simd, F: Format>(s: S, job: &Masked<'_>, row: Row, x: *const f32) -> f32 {
    let n = job.weight.columns;
    let keep = job.keep.cast::<f32>();
    let mut sum = s.splat(0.0);
    for &block in job.blocks {
        let start = block as usize * BLOCK;
        // SAFETY: the block lies within the row, the activations and the mask, or the tail is loaded in part.
        unsafe {
            if start + BLOCK <= n {
                let w = F::vectors(s, row, block as usize);
                for (i, w) in w.into_iter().enumerate() {
                    let at = start + i * LANES;
                    sum = s.fma(s.and(w, s.load(keep.add(at))), s.load(x.add(at)), sum);
                }
            } else {
                let mut at = start;
                while at < n {
                    let part = LANES.min(n - at);
                    let w = s.and(F::tail(s, row, at, part), s.load_part(keep.add(at), part));
                    sum = s.fma(w, s.load_part(x.add(at), part), sum);
                    at += part;
                }
            }
        }
    }
    s.sum(sum)
}

#[inline(always)]
unsafe fn dot_int8<S: Simd, F: IntegerFormat>(
    s: S,
    job: &Masked<'_>,
    row: Row,
    codes: *const i8,
    scales: *const f32,
) -> f32 {
    let mut sum = s.splat(0.0);
    for &block in job.blocks {
        let block = block as usize;
        // SAFETY: the block lies within the row and the activations; quantised rows are whole blocks.
        unsafe {
            let x = s.load_bytes(codes.add(block * BLOCK));
            let activation = (x, *scales.add(block), lane_sums::<S, F>(s, x));
            sum = add_product::<S, F>(s, F::codes(s, row, block), activation, sum);
        }
    }
    s.sum(sum)
}
