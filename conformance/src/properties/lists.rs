//! Lists and memory: several operations at once, submissions in order, weights wherever they lie.

use crate::bench::Bench;
use crate::compare::identical;
use crate::finding::{Element, Fallible, Finding, Outcome};
use crate::problem::{Content, Problem, UNPLACED};
use crate::rng::Rng;
use crate::run::{Outputs, Prepared, prepare, span_of};
use crate::spec::Spec;
use crate::values::{ValueClass, f32_bytes, f32_values, numbers};
use engine_core::backend::{BufferView, ToleranceClass};
use engine_core::operation::{Activation, Arithmetic, NormKind, OperationKind, SlotId, SlotRole};
use engine_core::{DType, HostMemory, TensorType};

pub(super) fn weight_placement(
    bench: &Bench<'_>,
    spec: &Spec,
    seed: u64,
    problem: &Problem,
) -> Fallible<Outcome> {
    let reason = "a result depends on operands, not on where they lie";
    let base = bench.run(problem)?;
    for (strided, constant) in [(true, true), (false, false), (true, false)] {
        let mut other = spec.clone();
        match &mut other {
            Spec::Linear(s) => (s.strided, s.constant) = (strided, constant),
            Spec::Ffn(s) => (s.strided, s.constant) = (strided, constant),
            _ => return Err(Finding::new("suite", "this property needs linear or ffn")),
        }
        let what = format!("weight placement (strided {strided}, constant {constant})");
        match bench.ask(&other, seed)? {
            Ok(other) => identical(problem, &what, reason, &bench.run(&other)?, &base, false)?,
            Err(_) if !constant && bench.dut.describe().needs_constant_weights => {}
            Err(reason) => return Ok(Outcome::NotSupported { reason }),
        }
    }
    Ok(Outcome::OK)
}

/// Runs a problem with its constants in imported host memory.
pub(super) fn import(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    if !bench.dut.describe().imports_host_memory {
        return Ok(Outcome::NotSupported { reason: "the device does not import host memory".into() });
    }
    let want = bench.run(problem)?;
    let mut list = problem.list.clone();
    let (mut memories, mut buffers) = (Vec::new(), Vec::new());
    for (index, slot) in list.slots.iter_mut().enumerate() {
        if !matches!(slot.role, SlotRole::Constant(_)) {
            continue;
        }
        let bytes = problem.bytes(SlotId(index as u32));
        let offset = bench.dut.describe().alignment.max(32);
        let mut memory = HostMemory::allocate(offset + bytes.len() as u64)?;
        memory.write(offset, bytes)?;
        let buffer = bench
            .dut
            .import(span_of(&memory))
            .map_err(|e| Finding::new("import", format!("importing page-aligned host memory failed: {e}")))?;
        slot.role = SlotRole::Constant(BufferView { buffer, offset });
        memories.push(memory);
        buffers.push(buffer);
    }
    let placed = Problem { list, ..problem.clone() };
    let prepared = Prepared::of(bench.lab(), &placed)?;
    let got = prepared.run(&placed)?;
    prepared.close(&placed)?;
    for buffer in buffers {
        bench.dut.free(buffer)?;
    }
    drop(memories);
    identical(problem, "import", "imported memory is memory", &got, &want, false)?;
    Ok(Outcome::OK)
}

/// Submits the same accumulation three times without waiting in between, and compares with waiting.
pub(super) fn order(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let prepared = prepare(bench.lab(), problem)?;
    let slow = prepared.bind(problem)?;
    for _ in 0..3 {
        bench.lab().finish(prepared.submit(problem, &slow, &[])?)?;
    }
    let want = slow.outputs(problem)?;
    slow.free()?;
    let fast = prepared.bind(problem)?;
    let first = prepared.submit(problem, &fast, &[])?;
    let second = prepared.submit(problem, &fast, &[first])?;
    let third = prepared.submit(problem, &fast, &[])?;
    if !(first < second && second < third) {
        return Err(Finding::new(
            "order",
            format!("values do not grow: {}, {}, {}", first.0, second.0, third.0),
        ));
    }
    bench.lab().finish(third)?;
    bench.lab().finish(first)?;
    let got = fast.outputs(problem)?;
    fast.free()?;
    prepared.close(problem)?;
    let reason = "submissions take effect in the order of their values";
    identical(problem, "order", reason, &got, &want, false)?;
    Ok(Outcome::OK)
}

/// A small block of a model: norm, two projections, product, projection back, residual; with scratch in between.
fn block(rng: &mut Rng) -> Fallible<Problem> {
    let (capacity, tokens, n, m) = (6u32, 5u32, 64u64, 96u64);
    let mut p = Problem::new(capacity, tokens);
    let mut rows = f32_bytes(&numbers(rng, ValueClass::Plain, (u64::from(tokens) * n) as usize));
    rows.resize((u64::from(capacity) * n * 4) as usize, crate::values::FILL);
    let mut weight = |p: &mut Problem, name: &str, rows: u64, columns: u64| -> Fallible<SlotId> {
        let tensor = TensorType::matrix(DType::F32, rows, columns)?;
        let bytes = f32_bytes(&numbers(rng, ValueClass::Plain, (rows * columns) as usize));
        Ok(p.fixed(name, UNPLACED, tensor, Content::Bytes(bytes)))
    };
    let residual = p.rows("residual", SlotRole::State, DType::F32, n, Content::Bytes(rows))?;
    let scratch = |p: &mut Problem, name: &str, columns| {
        p.rows(name, SlotRole::Scratch, DType::F32, columns, Content::Unset)
    };
    let normed = scratch(&mut p, "normed", n)?;
    let left = scratch(&mut p, "left", m)?;
    let right = scratch(&mut p, "right", m)?;
    let out = scratch(&mut p, "out", n)?;
    let norm_weight = weight(&mut p, "norm_weight", 1, n)?;
    let (a, b) = (weight(&mut p, "a", m, n)?, weight(&mut p, "b", m, n)?);
    let c = weight(&mut p, "c", n, m)?;
    let linear = |input, weight, output| OperationKind::Linear {
        input,
        weight,
        bias: None,
        output,
        accumulate: false,
    };
    let kinds = [
        OperationKind::Norm {
            norm: NormKind::Rms,
            epsilon: 1e-5,
            input: residual,
            weight: norm_weight,
            bias: None,
            output: normed,
        },
        linear(normed, a, left),
        linear(normed, b, right),
        OperationKind::Activate { function: Activation::Silu, input: left, output: left },
        OperationKind::Multiply { left, right, output: left },
        linear(left, c, out),
        OperationKind::Add { left: residual, right: out, output: residual },
    ];
    for kind in kinds {
        p.push(kind, Arithmetic::F32);
    }
    Ok(p)
}

pub(super) fn list(bench: &Bench<'_>, seed: u64) -> Fallible<Outcome> {
    let problem = block(&mut Rng::new(seed))?;
    if let Some(reason) = crate::bench::refusal(bench.dut, &problem) {
        return Ok(Outcome::NotSupported { reason });
    }
    let got = bench.run(&problem)?;
    let residual = SlotId(0);
    let want = one_by_one(bench, &problem)?;
    // Operations that a device fuses may round differently, so this is a tolerance and not bits.
    let tolerance = if bench.class() == ToleranceClass::F16 { 2e-2 } else { 2e-5 };
    let (got, want) = (values(&got, residual), values(&want, residual));
    let most = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let distance = |i: usize| if got[i].is_finite() { (got[i] - want[i]).abs() } else { f32::INFINITY };
    let worst = (0..want.len()).max_by(|a, b| distance(*a).total_cmp(&distance(*b))).unwrap_or(0);
    let units = f64::from(distance(worst)) / (f64::from(most) * tolerance);
    if units <= 1.0 {
        return Ok(Outcome::Passed { worst: units });
    }
    let columns = problem.tensor(residual).columns;
    Err(Finding {
        check: "list".into(),
        message:
            "a list does not give what its operations give one by one (an order between operations is broken)"
                .into(),
        element: Some(Box::new(Element {
            slot: "residual".into(),
            row: worst as u64 / columns,
            column: worst as u64 % columns,
            got: got[worst].to_string(),
            want: want[worst].to_string(),
            allowed: (f64::from(most) * tolerance).to_string(),
            limit: format!("{tolerance:e} of the largest value"),
            reason: "rounding of seven operations, fused or not".into(),
            wrong: "at least 1".into(),
            times: units.is_finite().then_some(units),
        })),
    })
}

fn values(outputs: &Outputs, slot: SlotId) -> Vec<f32> {
    f32_values(outputs.get(&slot.0).map_or(&[][..], |b| b))
}

/// Runs each operation of a problem by itself on the oracle, handing values from one to the next.
fn one_by_one(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outputs> {
    let mut bytes: Vec<Vec<u8>> =
        (0..problem.list.slots.len()).map(|i| problem.bytes(SlotId(i as u32)).to_vec()).collect();
    for index in 0..problem.list.operations.len() {
        let outputs = crate::diverge::run_single(bench.stated, problem, index, &bytes)?.0;
        for (slot, new) in outputs {
            let full = problem.tensor(SlotId(slot)).bytes() as usize;
            bytes[slot as usize].resize(full, crate::values::FILL);
            bytes[slot as usize][..new.len()].copy_from_slice(&new);
        }
    }
    let used = (problem.tensor(SlotId(0)).row_stride * u64::from(problem.tokens)) as usize;
    Ok(Outputs::from([(0, bytes[0][..used].to_vec())]))
}
