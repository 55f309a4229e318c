//! Neuron clusters: what is not selected is never read, and ranges add up, wherever they run.

use crate::bench::{Bench, refusal};
use crate::compare::{identical, rows_of};
use crate::finding::{Fallible, Finding, Outcome};
use crate::problem::{Content, Problem};
use crate::run::run_once;
use crate::values::{f32_bytes, f32_values, poison_row};
use engine_core::ClusterRange;
use engine_core::backend::ToleranceClass;
use engine_core::operation::{DownLayout, Ffn, OperationKind, Quantization, Selection, SlotId, SlotRole};

fn ffn(problem: &Problem) -> Fallible<Ffn> {
    match problem.list.operations.first().map(|o| &o.kind) {
        Some(OperationKind::Ffn(ffn)) => Ok(ffn.clone()),
        _ => Err(Finding::new("suite", "this property needs an ffn")),
    }
}

fn set(problem: &mut Problem, ffn: Ffn) {
    if let Some(operation) = problem.list.operations.first_mut() {
        operation.kind = OperationKind::Ffn(ffn);
    }
}

/// Neurons that no token may read: outside of the ranges, or selected for no token.
fn unread(bench: &Bench<'_>, problem: &Problem, ffn: &Ffn) -> Fallible<(Vec<u64>, Vec<u64>)> {
    let neurons = problem.tensor(ffn.up).rows;
    let ranges = problem.ranges.first().map(|(_, r)| r.clone());
    let inactive = |i: u64| {
        ranges
            .as_ref()
            .is_some_and(|r| !r.iter().any(|r| (u64::from(r.start)..u64::from(r.end)).contains(&i)))
    };
    // A gate is read to decide; only what a mask or a range excludes is not.
    let mask = if let Selection::Mask(slot) = ffn.selection { Some(problem.bytes(slot)) } else { None };
    let tokens = u64::from(problem.tokens);
    let masked = |i: u64| mask.is_some_and(|mask| (0..tokens).all(|t| mask[(t * neurons + i) as usize] == 0));
    let by_gate = match ffn.selection {
        Selection::GateFirst | Selection::Threshold(_) | Selection::Bitplane(_) => true,
        Selection::Mask(_) => ffn.function.is_zero_below(),
        _ => false,
    };
    let zeros = match (by_gate, ffn.hidden) {
        (false, _) => None,
        (true, None) => return Err(Finding::new("suite", "this property needs `hidden`")),
        (true, Some(hidden)) => {
            let outputs = run_once(bench.stated, problem).map_err(|f| f.during("the oracle"))?;
            let h = f32_values(outputs.get(&hidden.0).map_or(&[][..], |b| b));
            let zero = |i| h.chunks(neurons as usize).all(|row| row[i as usize] == 0.0);
            Some((0..neurons).map(zero).collect::<Vec<bool>>())
        }
    };
    let zero = |i: u64| zeros.as_ref().is_some_and(|zeros| zeros[i as usize]);
    let all = (0..neurons).filter(|&i| inactive(i) || masked(i) || zero(i)).collect();
    let gates = (0..neurons).filter(|&i| inactive(i) || masked(i)).collect();
    Ok((all, gates))
}

pub(super) fn poisoned(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let ffn = ffn(problem)?;
    let (all, gates) = unread(bench, problem, &ffn)?;
    if all.is_empty() {
        return Err(Finding::new("suite", "this problem has no neuron that may not be read"));
    }
    let clean = bench.run(problem)?;
    let mut poisoned = problem.clone();
    let mut spoil = |slot: Option<SlotId>, rows: &[u64]| {
        let Some(slot) = slot else { return };
        let tensor = poisoned.tensor(slot);
        if let Some(bytes) = poisoned.bytes_mut(slot) {
            rows.iter().for_each(|&row| poison_row(&tensor, bytes, row));
        }
    };
    // Without a gate, up is what decides; with planes it may help to.
    let decides = match ffn.selection {
        Selection::Bitplane(rule) => rule.up_deviation.is_some(),
        _ => ffn.gate.is_none(),
    };
    spoil(ffn.gate, &gates);
    spoil(Some(ffn.up), if decides { &gates } else { &all });
    if ffn.down_layout == DownLayout::NeuronRows {
        spoil(Some(ffn.down), &all);
    }
    // Where zero gates are found only by both halves, the low ones are read for them.
    let low = if ffn.function.is_zero_below() { &[][..] } else { &all[..] };
    spoil(ffn.gate_low, low);
    spoil(ffn.up_low, low);
    for (bias, rows) in [(ffn.gate_bias, &gates), (ffn.up_bias, if decides { &gates } else { &all })] {
        if let Some(bytes) = bias.and_then(|slot| poisoned.bytes_mut(slot)) {
            for &row in rows {
                bytes[row as usize * 4..][..4].fill(crate::values::FILL);
            }
        }
    }
    let got = bench.run(&poisoned)?;
    let reason = "rows of neurons that are not active or not selected are never read: here they hold NaN";
    identical(problem, "unselected neurons are not read", reason, &got, &clean, false)?;
    Ok(Outcome::OK)
}

/// Experts that no token chose hold NaN.
pub(super) fn poisoned_experts(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let Some(OperationKind::Experts(op)) = problem.list.operations.first().map(|o| &o.kind) else {
        return Err(Finding::new("suite", "the problem has no experts"));
    };
    let ids = problem.bytes(op.chosen).chunks_exact(4);
    let chosen: Vec<u32> = ids.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let spare: Vec<u64> = (0..op.experts).filter(|expert| !chosen.contains(expert)).map(u64::from).collect();
    if spare.is_empty() {
        return Err(Finding::new("suite", "this problem has no expert that may not be read"));
    }
    let clean = bench.run(problem)?;
    let mut poisoned = problem.clone();
    for slot in [op.gate, Some(op.up), Some(op.down)].into_iter().flatten() {
        let tensor = poisoned.tensor(slot);
        let rows = tensor.rows / u64::from(op.experts);
        if let Some(bytes) = poisoned.bytes_mut(slot) {
            spare
                .iter()
                .flat_map(|expert| expert * rows..(expert + 1) * rows)
                .for_each(|row| poison_row(&tensor, bytes, row));
        }
    }
    let got = bench.run(&poisoned)?;
    let reason = "rows of experts that no token chose are never read: here they hold NaN";
    identical(problem, "experts that were not chosen are not read", reason, &got, &clean, false)?;
    Ok(Outcome::OK)
}

pub(super) fn gate_first(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let mut dense = problem.clone();
    let all = Ffn { selection: Selection::All, ..ffn(problem)? };
    set(&mut dense, all);
    if let Some(reason) = refusal(bench.dut, &dense) {
        return Ok(Outcome::NotSupported { reason });
    }
    let reason = "for functions that are zero below zero, gate-first skips only what is zero";
    identical(problem, "gate-first is dense", reason, &bench.run(problem)?, &bench.run(&dense)?, true)?;
    Ok(Outcome::OK)
}

/// Two parts of a layer, alternating; where hidden activations are quantised they end at blocks of 32.
fn parts(problem: &Problem, ffn: &Ffn) -> (Vec<ClusterRange>, Vec<ClusterRange>) {
    let neurons = problem.tensor(ffn.up).rows as u32;
    let step = match problem.list.operations.first().map(|o| o.arithmetic.hidden) {
        Some(Quantization::None) => 13,
        _ => 32,
    };
    let (mut left, mut right) = (Vec::new(), Vec::new());
    let mut start = 0;
    while start < neurons {
        let end = (start + step).min(neurons);
        let side = if (start / step).is_multiple_of(2) { &mut left } else { &mut right };
        side.push(ClusterRange::new(start, end));
        start = end;
    }
    (left, right)
}

fn with_ranges(problem: &Problem, ranges: Vec<ClusterRange>) -> Problem {
    Problem { ranges: vec![(0, ranges)], ..problem.clone() }
}

pub(super) fn add_up(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let whole = ffn(problem)?;
    let (left, right) = parts(problem, &whole);
    let first = bench.run(&with_ranges(problem, left))?;
    let mut second = with_ranges(problem, right);
    let bytes = first.get(&whole.output.0).cloned().unwrap_or_default();
    let mut full = bytes.clone();
    full.resize(problem.tensor(whole.output).bytes() as usize, crate::values::FILL);
    second.content[whole.output.0 as usize] = Content::Bytes(full);
    second.list.slots[whole.output.0 as usize].role = SlotRole::State;
    set(&mut second, Ffn { accumulate: true, ..whole });
    if let Some(reason) = refusal(bench.dut, &second) {
        return Ok(Outcome::NotSupported { reason });
    }
    let got = bench.run(&second)?;
    let worst = bench.judge(problem, &got, 3.0).map_err(|f| f.during("ranges accumulated on one device"))?;
    Ok(Outcome::Passed { worst })
}

pub(super) fn placement(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let output = ffn(problem)?.output;
    let (left, right) = parts(problem, &ffn(problem)?);
    let tensor = problem.tensor(output);
    let mine = bench.run(&with_ranges(problem, left))?;
    let theirs = run_once(bench.stated, &with_ranges(problem, right))?;
    let side = |o: &crate::run::Outputs| rows_of(&tensor, o.get(&output.0).map_or(&[][..], |b| b));
    let merged: Vec<f32> = side(&mine).iter().zip(side(&theirs)).map(|(a, b)| a + b).collect();
    let got = crate::run::Outputs::from([(output.0, f32_bytes(&merged))]);
    // Two roundings and a merge, where the limit is for one rounding.
    let widen = if bench.class() == ToleranceClass::Exact64 { 3.0 } else { 2.0 };
    let worst = bench.judge(problem, &got, widen).map_err(|f| f.during("ranges on two devices, merged"))?;
    Ok(Outcome::Passed { worst })
}
