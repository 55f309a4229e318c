//! How large an error each output element may have: its condition, not its value, sets the scale.
//!
//! A sum of products that nearly cancel is small, but its rounding errors are not. So an element's error is measured
//! against the sum of the *absolute* products that it was made from (Higham, "Accuracy and Stability of Numerical
//! Algorithms", section 3.1), carried to first order through functions and products. Limits stay meaningful whatever
//! the values are, and one figure per operation suffices.

mod attention;
mod experts;
mod ffn;
mod plain;

use crate::finding::{Fallible, Finding};
use crate::limits;
use crate::problem::Problem;
use crate::run::{Outputs, run_once};
use crate::values::f32_values;
use engine_core::backend::ToleranceClass;
use engine_core::operation::{Activation, Arithmetic, OperationKind, Quantization, SlotId};
use engine_core::{ComputeBackend, DType, TensorType};
use half::{bf16, f16};
use std::collections::BTreeMap;

pub use ffn::{function_value, slope_bound};

/// The numbers that a class of devices computes with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// What is as small may be lost: f32 is flushed below its smallest normal number, f16 rounds to steps of its smallest
    /// subnormal one.
    pub tiny: f64,
    /// What is larger may become infinite.
    pub largest: f64,
    /// Share of its condition by which a value may lie on the other side of a function's edge.
    pub edge: f64,
}

impl Range {
    /// Of a class.
    pub fn of(class: ToleranceClass) -> Range {
        match class {
            ToleranceClass::F16 => {
                let edge = limits::stated("linear", DType::F16, class).figure;
                Range { tiny: f16::MIN_POSITIVE_SUBNORMAL.to_f64(), largest: f16::MAX.to_f64(), edge }
            }
            _ => Range { tiny: f32::MIN_POSITIVE.into(), largest: f32::MAX.into(), edge: 1e-5 },
        }
    }

    /// Whether a value of this magnitude, or one that was rounded up from it, may be infinite.
    pub(crate) fn is_left_by(&self, magnitude: f64) -> bool {
        magnitude * 1.01 > self.largest
    }
}

/// The smallest normal f32.
const TINY: f64 = f32::MIN_POSITIVE as f64;

/// The scale of one output element.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scale {
    /// Sum of absolute products: rounding errors are a small multiple of it. Not finite where the element depends on
    /// a value that is not finite.
    pub sum: f64,
    /// Bound of the error that the stated quantisation makes, against exact arithmetic.
    pub quantisation: f64,
    /// What one code more or less makes, where a quantised hidden activation lies next to a tie.
    pub tie: f64,
    /// Absolute error from flushing subnormal numbers.
    pub floor: f64,
    /// Whether a value on the way may leave the range of the device's numbers: then the element may be anything that is not
    /// finite, or right.
    pub beyond: bool,
}

/// Scales by slot, a row of columns per used row.
pub type Scales = BTreeMap<u32, Vec<Scale>>;

/// A matrix in f64.
#[derive(Clone, Debug)]
pub struct Decoded {
    /// Values, row by row.
    pub values: Vec<f64>,
    /// Bound of the magnitude of each value's parts, for types that subtract a minimum.
    pub magnitudes: Vec<f64>,
    /// Columns.
    pub columns: usize,
}

impl Decoded {
    /// The rows.
    pub fn rows(&self) -> std::slice::ChunksExact<'_, f64> {
        self.values.chunks_exact(self.columns.max(1))
    }

    /// One row.
    pub fn row(&self, index: usize) -> &[f64] {
        &self.values[index * self.columns..(index + 1) * self.columns]
    }

    /// Magnitudes of one row.
    pub fn magnitude(&self, index: usize) -> &[f64] {
        &self.magnitudes[index * self.columns..(index + 1) * self.columns]
    }

    /// The product with an input row.
    pub fn dot(&self, row: &[f64], x: &[f32]) -> f64 {
        row.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum()
    }
}

/// Decodes a weight matrix: plain types here, quantised ones by the oracle's `Embed`.
///
/// # Errors
/// Where the oracle cannot.
pub fn decode(oracle: &dyn ComputeBackend, tensor: &TensorType, bytes: &[u8]) -> Fallible<Decoded> {
    let columns = tensor.columns as usize;
    let mut values = Vec::with_capacity(tensor.rows as usize * columns);
    if tensor.dtype.is_quantised() {
        let rows =
            u32::try_from(tensor.rows).map_err(|_| Finding::new("suite", "too many rows to decode"))?;
        let mut problem = Problem::new(rows, rows);
        let ids = (0..rows).flat_map(u32::to_le_bytes).collect();
        let ids = problem.rows_in("ids", DType::I32, 1, ids)?;
        let content = crate::problem::Content::Bytes(bytes.to_vec());
        let table = problem.fixed("table", crate::problem::UNPLACED, *tensor, content);
        let output = problem.rows_out("output", DType::F32, tensor.columns)?;
        problem.push(OperationKind::Embed { ids, table, output, scale: 1.0 }, Arithmetic::F32);
        let outputs = run_once(oracle, &problem).map_err(|f| f.during("the oracle's decoding"))?;
        values.extend(f32_values(outputs.get(&output.0).map_or(&[][..], |b| b)).into_iter().map(f64::from));
    } else {
        for row in 0..tensor.rows {
            let start = (row * tensor.row_stride) as usize;
            let row = &bytes[start..start + tensor.row_bytes() as usize];
            match tensor.dtype {
                DType::F32 => values.extend(f32_values(row).into_iter().map(f64::from)),
                DType::F16 => {
                    values.extend(row.chunks_exact(2).map(|c| f16::from_le_bytes([c[0], c[1]]).to_f64()))
                }
                DType::BF16 => {
                    values.extend(row.chunks_exact(2).map(|c| bf16::from_le_bytes([c[0], c[1]]).to_f64()))
                }
                other => return Err(Finding::new("suite", format!("{other} is no weight type"))),
            }
        }
    }
    let magnitudes = part_magnitudes(tensor.dtype, columns, &values);
    Ok(Decoded { values, magnitudes, columns })
}

/// The scales of a Q4_0 row.
pub fn q4_scales(tensor: &TensorType, bytes: &[u8], row: u64) -> Vec<f64> {
    let start = (row * tensor.row_stride) as usize;
    let row = &bytes[start..start + tensor.row_bytes() as usize];
    row.chunks_exact(18).map(|block| f16::from_le_bytes([block[0], block[1]]).to_f64()).collect()
}

/// [`decode`], and of a matrix in planes both halves.
///
/// # Errors
/// Where the oracle cannot.
pub fn decode_planes(
    oracle: &dyn ComputeBackend,
    problem: &Problem,
    high: SlotId,
    low: Option<SlotId>,
) -> Fallible<Decoded> {
    let (tensor, bytes) = (problem.tensor(high), problem.bytes(high));
    let mut decoded = decode(oracle, &tensor, bytes)?;
    let Some(low) = low else { return Ok(decoded) };
    let (low, halves) = (problem.tensor(low), problem.bytes(low));
    for row in 0..tensor.rows {
        let scales = q4_scales(&tensor, bytes, row);
        let start = (row * low.row_stride) as usize;
        let values = &mut decoded.values[row as usize * decoded.columns..][..decoded.columns];
        for (i, value) in values.iter_mut().enumerate() {
            let (block, j) = (i / 32, i % 32);
            let byte = halves[start + block * 16 + j % 16];
            *value += scales[block] / 16.0 * f64::from(if j < 16 { byte & 15 } else { byte >> 4 });
        }
    }
    decoded.magnitudes = decoded.values.iter().map(|value| value.abs()).collect();
    Ok(decoded)
}

/// Types with a minimum compute `scale * code - minimum`, whose parts are up to twice the largest value of their run.
fn part_magnitudes(dtype: DType, columns: usize, values: &[f64]) -> Vec<f64> {
    use DType::{Q2K, Q4_1, Q4K, Q5_1, Q5K};
    if !matches!(dtype, Q2K | Q4_1 | Q4K | Q5_1 | Q5K) {
        return values.iter().map(|v| v.abs()).collect();
    }
    let mut out = Vec::with_capacity(values.len());
    for row in values.chunks(columns.max(1)) {
        for run in row.chunks(32) {
            let most = run.iter().fold(0.0f64, |m, v| if v.is_nan() { f64::NAN } else { m.max(v.abs()) });
            let most = if run.iter().any(|v| v.is_nan()) { f64::NAN } else { most };
            out.extend(run.iter().map(|_| 2.0 * most));
        }
    }
    out
}

/// Per element of an input row: the bound of the error of its int8 code (half a step of its block of 32).
pub(crate) fn quantisation_steps(x: &[f64]) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for block in x.chunks(32) {
        let most = block.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        // A little more than half a step, for the rounding of scale and code themselves; where the scale's inverse
        // overflows, every code but zero saturates.
        let saturates = most > 0.0 && !(127.0 / most as f32).is_finite();
        let step = if saturates { 2.0 * most } else { most / 254.0 * 1.001 };
        out.extend(block.iter().map(|_| step));
    }
    out
}

/// An input row as int8 blocks represent it (see [`Quantization::Int8Blocks`]).
pub(crate) fn quantised(x: &[f64]) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for block in x.chunks(32) {
        let most = block.iter().fold(0.0f32, |m, v| m.max((*v as f32).abs()));
        let (scale, inverse) = (most / 127.0, 127.0 / most);
        out.extend(block.iter().map(|v| {
            // Where the inverse overflows codes saturate and zero stays zero.
            let code =
                if *v == 0.0 { 0.0 } else { (*v as f32 * inverse).round_ties_even().clamp(-127.0, 127.0) };
            f64::from(scale) * f64::from(code)
        }));
    }
    out
}

/// Condition of `w . x`: (sum of absolute products, quantisation bound, flush floor).
pub(crate) fn dot_scale(magnitude: &[f64], x: &[f64], steps: Option<&[f64]>, range: Range) -> Scale {
    let mut scale = Scale::default();
    for (i, (w, x)) in magnitude.iter().zip(x).enumerate() {
        scale.sum += w * x.abs();
        scale.floor += (w + x.abs() + 1.0) * range.tiny;
        scale.beyond |= range.is_left_by(w.max(x.abs()));
        if let Some(steps) = steps {
            scale.quantisation += w * steps[i];
        }
    }
    scale.beyond |= range.is_left_by(scale.sum);
    scale
}

/// Whether the arithmetic quantises inputs.
pub(crate) fn quantises_input(arithmetic: Arithmetic) -> bool {
    arithmetic.input != Quantization::None
}

/// The f64 rows of a per-token f32 slot.
pub(crate) fn input_rows(problem: &Problem, slot: SlotId) -> Vec<Vec<f64>> {
    let columns = problem.tensor(slot).columns as usize;
    let values = f32_values(problem.bytes(slot));
    values
        .chunks_exact(columns.max(1))
        .take(problem.tokens as usize)
        .map(|row| row.iter().map(|v| f64::from(*v)).collect())
        .collect()
}

/// The f64 values of a fixed f32 vector; zeros where there is none.
pub(crate) fn vector(problem: &Problem, slot: Option<SlotId>, len: usize) -> Vec<f64> {
    slot.map_or_else(|| vec![0.0; len], |s| f32_values(problem.bytes(s)).into_iter().map(f64::from).collect())
}

/// The scales of a problem with one operation. `stated` is what the oracle gives in the stated arithmetic.
///
/// # Errors
/// Where the oracle cannot decode a weight.
pub fn scales(
    problem: &Problem,
    oracle: &dyn ComputeBackend,
    stated: &Outputs,
    class: ToleranceClass,
) -> Fallible<Scales> {
    let range = Range::of(class);
    let Some(operation) = problem.list.operations.first() else { return Ok(Scales::new()) };
    match &operation.kind {
        OperationKind::Ffn(f) => ffn::ffn(problem, f, operation.arithmetic, (oracle, stated), range),
        OperationKind::Route { scores, chosen, weights, gating, .. } => {
            Ok(experts::route(problem, (*scores, *chosen, *weights), *gating, stated))
        }
        OperationKind::Experts(op) => experts::experts(problem, op, operation.arithmetic, oracle, range),
        OperationKind::Attention { .. } => Ok(attention::attention(problem, &operation.kind)),
        kind => plain::plain(problem, kind, operation.arithmetic, oracle, range),
    }
}

/// Names for activation functions in `match`es elsewhere.
pub(crate) fn is_smooth(function: Activation) -> bool {
    matches!(function, Activation::Silu | Activation::GeluErf | Activation::GeluTanh)
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: Range = Range { tiny: TINY, largest: f32::MAX as f64, edge: 1e-5 };

    #[test]
    fn a_class_has_its_own_range() {
        let of = |class, x: f64| dot_scale(&[1.0, 1.0], &[x, -x], None, Range::of(class));
        assert!(!of(ToleranceClass::F32, 4e4).beyond && of(ToleranceClass::F16, 4e4).beyond);
        assert!(!of(ToleranceClass::F16, 3e4).beyond && of(ToleranceClass::F16, 7e4).beyond);
        assert!(of(ToleranceClass::F16, 0.0).floor > 1e-8 && of(ToleranceClass::F32, 0.0).floor < 1e-37);
    }

    #[test]
    fn cancellation_does_not_shrink_the_scale() {
        let scale = dot_scale(&[1.0, 1.0], &[1e6, -1e6], None, F32);
        assert_eq!(scale.sum, 2e6);
        let steps = quantisation_steps(&[127.0, 0.0]);
        assert!((steps[1] - 0.5).abs() < 1e-2);
        assert_eq!(quantised(&[127.0, 2.5, -0.4, 3.5]), [127.0, 2.0, 0.0, 4.0]);
        assert_eq!(quantised(&[0.0; 3]), [0.0; 3]);
    }

    #[test]
    fn what_is_not_finite_shows() {
        assert!(!dot_scale(&[f64::NAN], &[0.0], None, F32).sum.is_finite());
        assert!(!dot_scale(&[1.0], &[f64::INFINITY], None, F32).sum.is_finite());
    }
}
