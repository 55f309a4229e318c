//! Compares what a device gave with what the oracle gives, element by element, under the limits.

use crate::finding::{Element, Fallible, Finding};
use crate::limits::{self, Limit};
use crate::problem::{Content, Problem};
use crate::run::Outputs;
use crate::scale::{Scale, Scales};
use crate::values::f32_values;
use engine_core::backend::ToleranceClass;
use engine_core::operation::{OperationKind, Quantization, Selection, SlotId};
use engine_core::{DType, TensorType};

/// Which oracle a comparison is with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Against {
    /// The descriptor's own arithmetic.
    Stated,
    /// True f64.
    Exact,
}

impl Against {
    /// The check's name.
    pub fn name(self) -> &'static str {
        match self {
            Against::Stated => "stated arithmetic",
            Against::Exact => "true f64",
        }
    }
}

/// What one comparison is made with.
pub struct Comparison<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// Scales of its outputs.
    pub scales: &'a Scales,
    /// The device's class.
    pub class: ToleranceClass,
    /// Which oracle.
    pub against: Against,
    /// The limit is multiplied by this (1; 2 where two devices share an operation).
    pub widen: f64,
}

/// The dtype that decides an operation's limit: that of its weight.
pub fn limiting_dtype(problem: &Problem) -> DType {
    let slot = match problem.list.operations.first().map(|o| &o.kind) {
        Some(OperationKind::Linear { weight, .. }) => *weight,
        // Weights in planes are Q8_0 ones.
        Some(OperationKind::Ffn(ffn)) if ffn.gate_low.is_some() || ffn.up_low.is_some() => {
            return DType::Q8_0;
        }
        Some(OperationKind::Ffn(ffn)) => ffn.up,
        Some(OperationKind::Embed { table, .. }) => *table,
        Some(OperationKind::Predict { fc1, .. }) => *fc1,
        Some(OperationKind::Experts(op)) => op.up,
        _ => return DType::F32,
    };
    problem.tensor(slot).dtype
}

/// Whether a comparison with true f64 means something: not where quantised activations decide what is skipped.
pub fn has_exact(problem: &Problem) -> bool {
    problem.list.operations.first().is_none_or(|operation| {
        let decides = match &operation.kind {
            OperationKind::Ffn(ffn) => {
                matches!(ffn.selection, Selection::Threshold(_) | Selection::Bitplane(_))
            }
            OperationKind::Experts(op) => matches!(op.selection, Selection::Threshold(_)),
            OperationKind::Predict { .. } => true,
            _ => false,
        };
        !(decides && operation.arithmetic.input != Quantization::None)
    })
}

/// Compares all outputs; the worst error in units of what is allowed.
///
/// # Errors
/// The worst element beyond its limit.
pub fn compare(c: &Comparison<'_>, got: &Outputs, want: &Outputs) -> Fallible<f64> {
    let mut worst = 0.0f64;
    for (&index, want) in want {
        let slot = SlotId(index);
        let got = got.get(&index).map_or(&[][..], |b| b);
        if got.len() != want.len() {
            return Err(Finding::new(
                "suite",
                format!("slot {index}: {} bytes, wanted {}", got.len(), want.len()),
            ));
        }
        if matches!(c.problem.content.get(index as usize), Some(Content::Cache(_))) {
            same_f16(c, slot, got, want)?;
            continue;
        }
        let copies =
            matches!(c.problem.list.operations.first().map(|o| &o.kind), Some(OperationKind::Copy { .. }));
        let routes =
            matches!(c.problem.list.operations.first().map(|o| &o.kind), Some(OperationKind::Route { .. }));
        match c.problem.tensor(slot).dtype {
            DType::F32 if !copies => worst = worst.max(within(c, slot, got, want)?),
            DType::F16 if !copies => same_f16(c, slot, got, want)?,
            // Counts of neurons that are near an edge may differ: they are checked against the device's own `h`.
            DType::I32 if !copies && !routes => {}
            _ => same_bytes(c, slot, got, want)?,
        }
    }
    counts(c, got)?;
    Ok(worst)
}

fn limit_of(c: &Comparison<'_>) -> Limit {
    let operation = c.problem.list.operations.first().map_or("", |o| o.kind.name());
    let dtype = limiting_dtype(c.problem);
    match c.against {
        Against::Stated => limits::stated(operation, dtype, c.class),
        Against::Exact => limits::exact(operation, dtype, c.class),
    }
}

/// An f32 with the digits that tell it from its neighbours.
fn show(x: f64) -> String {
    let x = x as f32;
    if x == 0.0 || (1e-3..1e6).contains(&x.abs()) { format!("{x}") } else { format!("{x:e}") }
}

fn finding(c: &Comparison<'_>, message: String, element: Element) -> Finding {
    Finding { check: c.against.name().into(), message, element: Some(Box::new(element)) }
}

/// How far an element is from the oracle, in units of what is allowed; infinite where no number could do.
pub fn units(got: f64, want: f64, scale: &Scale, limit: f64, against: Against) -> (f64, f64) {
    let extra = match against {
        Against::Stated => scale.tie,
        Against::Exact => scale.tie.max(0.0) + scale.quantisation,
    };
    let allowed = limit * scale.sum + extra + scale.floor;
    let verdict = |ok: bool| if ok { 0.0 } else { f64::INFINITY };
    let u = if want.is_nan() {
        verdict(!got.is_finite())
    } else if !want.is_finite() {
        // Either the true value, or NaN, or the last finite numbers before an overflow.
        let edge = got.signum() == want.signum() && got.abs() > f64::from(f32::MAX) * 0.999;
        verdict(!got.is_finite() || edge)
    } else if !allowed.is_finite() {
        // It depends on a value that is not finite: not being finite is allowed, and so is being right.
        // Against exact arithmetic, quantised activations leave it near only: no bound of theirs is known here.
        let near = if against == Against::Exact { 5e-2 } else { 1e-3 };
        verdict(!got.is_finite() || (got - want).abs() <= near * (want.abs() + 1.0))
    } else if !got.is_finite() {
        // Only where the value, or one on the way to it, lies at the end of the range.
        verdict(scale.beyond || want.abs() + allowed > f64::from(f32::MAX))
    } else if got == want {
        0.0
    } else {
        (got - want).abs() / allowed
    };
    (u, allowed)
}

fn within(c: &Comparison<'_>, slot: SlotId, got: &[u8], want: &[u8]) -> Fallible<f64> {
    let limit = limit_of(c);
    let tensor = c.problem.tensor(slot);
    let (got, want) = (rows_of(&tensor, got), rows_of(&tensor, want));
    let none = Vec::new();
    let scales = c.scales.get(&slot.0).unwrap_or(&none);
    let (mut worst, mut at, mut wrong) = (0.0f64, 0usize, 0usize);
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        let scale = scales.get(i).copied().unwrap_or_default();
        let (u, _) = units(f64::from(*g), f64::from(*w), &scale, limit.figure * c.widen, c.against);
        wrong += usize::from(u > 1.0);
        if u > worst {
            (worst, at) = (u, i);
        }
    }
    if wrong == 0 {
        return Ok(worst);
    }
    let scale = scales.get(at).copied().unwrap_or_default();
    let (g, w) = (f64::from(got[at]), f64::from(want[at]));
    let (_, allowed) = units(g, w, &scale, limit.figure * c.widen, c.against);
    let columns = tensor.columns.max(1) as usize;
    let times = if worst.is_finite() {
        let times = if worst < 1000.0 { format!("{worst:.3}") } else { format!("{worst:.1e}") };
        format!("by {times} times what is allowed")
    } else {
        "and no limit would do".into()
    };
    let name = c.problem.list.slot(slot).map_or("", |s| s.name.as_str());
    Err(finding(
        c,
        format!("`{name}` is off {times}"),
        Element {
            slot: name.into(),
            row: (at / columns) as u64,
            column: (at % columns) as u64,
            got: show(g),
            want: show(w),
            allowed: format!("{allowed:.2e}"),
            limit: format!(
                "{:.1e} of the sum of absolute products {:.3e}",
                limit.figure * c.widen,
                scale.sum
            ),
            reason: limit.reason.into(),
            wrong: format!("{wrong} of {}", got.len()),
            times: worst.is_finite().then_some(worst),
        },
    ))
}

/// The f32 values of a matrix without the gaps between its rows.
pub fn rows_of(tensor: &TensorType, bytes: &[u8]) -> Vec<f32> {
    let (row, stride) = (tensor.row_bytes() as usize, tensor.row_stride as usize);
    bytes.chunks(stride.max(1)).flat_map(|chunk| f32_values(&chunk[..row.min(chunk.len())])).collect()
}

fn moved(c: &Comparison<'_>, slot: SlotId, at: usize, columns: usize, got: String, want: String) -> Finding {
    let limit = limit_of(c);
    let name = c.problem.list.slot(slot).map_or("", |s| s.name.as_str());
    finding(
        c,
        format!("`{name}` is not what it must be, bit for bit"),
        Element {
            slot: name.into(),
            row: (at / columns.max(1)) as u64,
            column: (at % columns.max(1)) as u64,
            got,
            want,
            allowed: "0".into(),
            limit: "exact".into(),
            reason: limit.reason.into(),
            wrong: "at least 1".into(),
            times: None,
        },
    )
}

fn same_f16(c: &Comparison<'_>, slot: SlotId, got: &[u8], want: &[u8]) -> Fallible<()> {
    let value = |b: &[u8]| half::f16::from_le_bytes([b[0], b[1]]);
    let pairs = got.chunks_exact(2).zip(want.chunks_exact(2)).enumerate();
    for (at, (g, w)) in pairs {
        let (x, y) = (value(g), value(w));
        if g != w && !(x.is_nan() && y.is_nan()) {
            let columns = match c.problem.content.get(slot.0 as usize) {
                Some(Content::Cache(cache)) => cache.columns(),
                _ => c.problem.tensor(slot).columns as usize,
            };
            return Err(moved(c, slot, at, columns, x.to_string(), y.to_string()));
        }
    }
    Ok(())
}

fn same_bytes(c: &Comparison<'_>, slot: SlotId, got: &[u8], want: &[u8]) -> Fallible<()> {
    let tensor = c.problem.tensor(slot);
    let (row, stride) = (tensor.row_bytes() as usize, tensor.row_stride as usize);
    let differs = |i: &usize| i % stride.max(1) < row && got[*i] != want[*i];
    match (0..got.len()).find(differs) {
        None => Ok(()),
        Some(i) => Err(moved(
            c,
            slot,
            i / stride.max(1) * row + i % stride.max(1),
            row,
            format!("byte {}", got[i]),
            format!("byte {}", want[i]),
        )),
    }
}

/// `active_count` is the number of neurons whose `h`, as the device itself gives it, is not 0.
fn counts(c: &Comparison<'_>, got: &Outputs) -> Fallible<()> {
    let Some(OperationKind::Ffn(ffn)) = c.problem.list.operations.first().map(|o| &o.kind) else {
        return Ok(());
    };
    let (Some(hidden), Some(count)) = (ffn.hidden, ffn.active_count) else { return Ok(()) };
    let (Some(h), Some(n)) = (got.get(&hidden.0), got.get(&count.0)) else { return Ok(()) };
    let neurons = c.problem.tensor(hidden).columns as usize;
    for (token, (row, n)) in f32_values(h).chunks(neurons).zip(n.chunks_exact(4)).enumerate() {
        let counted = row.iter().filter(|v| **v != 0.0).count() as i64;
        let said = i64::from(i32::from_le_bytes([n[0], n[1], n[2], n[3]]));
        if counted != said && row.iter().all(|v| v.is_finite()) {
            return Err(Finding::new(
                "active count",
                format!(
                    "token {token}: `active_count` is {said}, but {counted} neurons of `hidden` are not 0"
                ),
            ));
        }
    }
    Ok(())
}

/// Bit-for-bit equality of outputs (-0 equals +0 where `zeros_alike`), or the first element that differs.
///
/// # Errors
/// Naming the check and the element.
pub fn identical(
    problem: &Problem,
    check: &str,
    reason: &'static str,
    got: &Outputs,
    want: &Outputs,
    zeros_alike: bool,
) -> Fallible<()> {
    for (&index, want) in want {
        let Some(got) = got.get(&index) else { continue };
        let slot = problem.list.slot(SlotId(index));
        let name = slot.map_or("", |s| s.name.as_str());
        let len = got.len().min(want.len());
        let float = slot.is_some_and(|s| s.tensor.dtype == DType::F32);
        let unit = if float { 4 } else { 1 };
        let columns = slot.map_or(1, |s| (s.tensor.row_stride as usize / unit).max(1));
        for (at, (g, w)) in got[..len].chunks(unit).zip(want[..len].chunks(unit)).enumerate() {
            let (a, b) = match (f32_values(g).first(), f32_values(w).first()) {
                (Some(a), Some(b)) if float => (*a, *b),
                _ => (f32::from(g[0]), f32::from(w[0])),
            };
            let alike = float && ((a.is_nan() && b.is_nan()) || (zeros_alike && a == b));
            if g != w && !alike {
                return Err(Finding {
                    check: check.into(),
                    message: format!("`{name}` differs"),
                    element: Some(Box::new(Element {
                        slot: name.into(),
                        row: (at / columns) as u64,
                        column: (at % columns) as u64,
                        got: format!("{a:?}"),
                        want: format!("{b:?}"),
                        allowed: "0".into(),
                        limit: "bit-identical".into(),
                        reason: reason.into(),
                        wrong: "at least 1".into(),
                        times: None,
                    })),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_for_values_that_are_not_finite() {
        let of = |sum| Scale { sum, ..Scale::default() };
        let u = |got: f64, want: f64, sum: f64| units(got, want, &of(sum), 1e-6, Against::Stated).0;
        assert_eq!(u(f64::NAN, f64::NAN, f64::NAN), 0.0);
        assert_eq!(u(f64::INFINITY, f64::NAN, f64::NAN), 0.0);
        assert_eq!(u(1.0, f64::NAN, f64::NAN), f64::INFINITY);
        assert_eq!(u(f64::NAN, 1.0, f64::INFINITY), 0.0);
        assert_eq!(u(f64::NAN, 1.0, 5.0), f64::INFINITY);
        assert_eq!(u(2.0, 1.0, f64::INFINITY), f64::INFINITY);
        assert_eq!(u(f64::NEG_INFINITY, f64::INFINITY, f64::INFINITY), 0.0);
        assert!(u(1.0, 1.0 + 0.5e-6, 1.0) <= 0.51);
        assert!(u(1.0, 1.0 + 2e-6, 1.0) > 1.9);
        assert!(u(1.0, 2.0, 0.0) > 1.0);
        let beyond = Scale { sum: 1e5, beyond: true, ..Scale::default() };
        let u = |got| units(got, 1e5, &beyond, 1e-3, Against::Stated).0;
        assert!(u(f64::INFINITY) == 0.0 && u(f64::NAN) == 0.0 && u(1e5) == 0.0 && u(65504.0) > 1.0);
    }
}
