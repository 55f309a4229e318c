//! Error paths: mistakes give the right code, write nothing, and leave the device usable.

use crate::bench::{Bench, LIMIT_BYTES};
use crate::finding::{Fallible, Finding, Outcome};
use crate::problem::{Content, Problem};
use crate::run::{Operands, prepare};
use crate::spec::{EmbedSpec, LinearSpec, Spec};
use crate::values::ValueClass;
use engine_core::backend::{
    ActiveRanges, Bindings, Bound, BufferId, BufferUse, BufferView, ExecutableId, TimelineValue,
};
use engine_core::operation::{OperationList, SlotId, SlotRole};
use engine_core::{ClusterRange, DType, Error, HandleKind, Reached, Result};
use std::time::Duration;

/// A case by name.
pub type ErrorCase = (&'static str, fn(&Bench<'_>) -> Fallible<Outcome>);

/// Every case.
pub const CASES: &[ErrorCase] = &[
    ("unknown-buffer", unknown_buffer),
    ("double-free", double_free),
    ("unknown-executable", unknown_executable),
    ("double-release", double_release),
    ("use-after-release", use_after_release),
    ("use-after-free", use_after_free),
    ("constant-of-unknown-buffer", constant_of_unknown_buffer),
    ("allocate-nothing", allocate_nothing),
    ("out-of-memory", out_of_memory),
    ("memory-limit", memory_limit),
    ("empty-list", empty_list),
    ("prepare-unsupported", prepare_unsupported),
    ("bad-bindings", bad_bindings),
    ("short-buffer", short_buffer),
    ("offset-overflow", offset_overflow),
    ("misaligned", misaligned),
    ("id-out-of-range", id_out_of_range),
    ("dependency-failed", dependency_failed),
    ("unknown-value", unknown_value),
    ("wait-without-time", wait_without_time),
    ("counters", counters),
];

fn expect<T: std::fmt::Debug>(
    what: &str,
    wanted: &str,
    got: Result<T>,
    is: fn(&Error) -> bool,
) -> Fallible<()> {
    match got {
        Err(error) if is(&error) => {
            let detail = error.to_string();
            if detail.trim().len() < 8 {
                return Err(Finding::new(
                    "error paths",
                    format!("{what}: the error says nothing: {detail:?}"),
                ));
            }
            Ok(())
        }
        Err(error) => Err(Finding::new("error paths", format!("{what}: wanted {wanted}, got `{error}`"))),
        Ok(value) => Err(Finding::new(
            "error paths",
            format!("{what}: wanted {wanted}, but it succeeded with {value:?}"),
        )),
    }
}

fn is_buffer(e: &Error) -> bool {
    matches!(e, Error::UnknownHandle { kind: HandleKind::Buffer, .. })
}
fn is_executable(e: &Error) -> bool {
    matches!(e, Error::UnknownHandle { kind: HandleKind::Executable, .. })
}
fn is_value(e: &Error) -> bool {
    matches!(e, Error::UnknownHandle { kind: HandleKind::TimelineValue, .. })
}
fn is_invalid(e: &Error) -> bool {
    matches!(e, Error::InvalidArgument { .. })
}
fn is_out_of_memory(e: &Error) -> bool {
    matches!(e, Error::OutOfMemory { .. })
}
fn is_invalid_or_data(e: &Error) -> bool {
    matches!(e, Error::InvalidArgument { .. } | Error::Data { .. })
}
fn is_dependency(e: &Error) -> bool {
    matches!(e, Error::DependencyFailed { .. })
}
fn is_unsupported(e: &Error) -> bool {
    matches!(e, Error::Unsupported { .. })
}

const UNKNOWN_BUFFER: &str = "an unknown buffer handle";
const UNKNOWN_EXECUTABLE: &str = "an unknown executable handle";
const INVALID: &str = "an invalid argument";
/// A handle that no backend gives out.
const NEVER: u64 = u64::MAX - 7;

fn linear() -> Spec {
    Spec::Linear(LinearSpec {
        dtype: DType::F32,
        rows: 7,
        columns: 64,
        capacity: 3,
        tokens: 2,
        bias: false,
        accumulate: false,
        int8: false,
        strided: false,
        constant: true,
        values: ValueClass::Plain,
    })
}

fn embed() -> Spec {
    Spec::Embed(EmbedSpec {
        dtype: DType::F32,
        vocabulary: 5,
        columns: 32,
        capacity: 3,
        tokens: 3,
        scale: 1.0,
        values: ValueClass::Plain,
    })
}

/// A problem of this specification, or the device's refusal as an outcome.
macro_rules! ask {
    ($bench:expr, $spec:expr) => {
        match $bench.ask(&$spec, $bench.seed)? {
            Ok(problem) => problem,
            Err(reason) => return Ok(Outcome::NotSupported { reason }),
        }
    };
}

fn unknown_buffer(b: &Bench<'_>) -> Fallible<Outcome> {
    expect(
        "freeing a handle that was never given out",
        UNKNOWN_BUFFER,
        b.dut.free(BufferId(NEVER)),
        is_buffer,
    )?;
    Ok(Outcome::OK)
}

fn double_free(b: &Bench<'_>) -> Fallible<Outcome> {
    let buffer = b.dut.allocate(256, BufferUse::Activations)?;
    b.dut.free(buffer)?;
    expect("freeing a buffer twice", UNKNOWN_BUFFER, b.dut.free(buffer), is_buffer)?;
    // A handle is not given out again at once: the first one's owner would use the second one's memory.
    let next = b.dut.allocate(256, BufferUse::Activations)?;
    if next == buffer {
        return Err(Finding::new("error paths", "a freed buffer's handle was given out again"));
    }
    b.dut.free(next)?;
    Ok(Outcome::OK)
}

fn unknown_executable(b: &Bench<'_>) -> Fallible<Outcome> {
    let never = ExecutableId(NEVER);
    expect(
        "releasing a handle that was never given out",
        UNKNOWN_EXECUTABLE,
        b.dut.release(never),
        is_executable,
    )?;
    Ok(Outcome::OK)
}

fn double_release(b: &Bench<'_>) -> Fallible<Outcome> {
    let problem = ask!(b, linear());
    let prepared = prepare(b.lab(), &problem)?;
    b.dut.release(prepared.executable)?;
    let again = b.dut.release(prepared.executable);
    expect("releasing an executable twice", UNKNOWN_EXECUTABLE, again, is_executable)?;
    Ok(Outcome::OK)
}

fn use_after_release(b: &Bench<'_>) -> Fallible<Outcome> {
    let problem = ask!(b, linear());
    let prepared = prepare(b.lab(), &problem)?;
    let operands = prepared.bind(&problem)?;
    b.dut.release(prepared.executable)?;
    let got = prepared.try_submit(&problem, &operands, &[]);
    expect("submitting a released executable", UNKNOWN_EXECUTABLE, got, is_executable)?;
    operands.free()?;
    Ok(Outcome::OK)
}

fn use_after_free(b: &Bench<'_>) -> Fallible<Outcome> {
    let problem = ask!(b, linear());
    let prepared = prepare(b.lab(), &problem)?;
    let operands = prepared.bind(&problem)?;
    if let Some(input) = operands.placed(SlotId(0)) {
        b.dut.free(input.buffer)?;
    }
    let got = prepared.try_submit(&problem, &operands, &[]);
    expect("submitting with a freed buffer", UNKNOWN_BUFFER, got, is_buffer)?;
    prepared.close(&problem)?;
    Ok(Outcome::OK)
}

fn constant_of_unknown_buffer(b: &Bench<'_>) -> Fallible<Outcome> {
    let mut list = ask!(b, linear()).list;
    for slot in &mut list.slots {
        if matches!(slot.role, SlotRole::Constant(_)) {
            slot.role = SlotRole::Constant(BufferView { buffer: BufferId(NEVER), offset: 0 });
        }
    }
    expect(
        "preparing with a constant in an unknown buffer",
        UNKNOWN_BUFFER,
        b.dut.prepare(&list),
        is_buffer,
    )?;
    Ok(Outcome::OK)
}

fn allocate_nothing(b: &Bench<'_>) -> Fallible<Outcome> {
    expect("allocating 0 bytes", INVALID, b.dut.allocate(0, BufferUse::Weights), is_invalid)?;
    Ok(Outcome::OK)
}

fn out_of_memory(b: &Bench<'_>) -> Fallible<Outcome> {
    for bytes in [u64::MAX, 1 << 62, 1 << 56] {
        let got = b.dut.allocate(bytes, BufferUse::Activations);
        expect(&format!("allocating {bytes} bytes"), "out of memory", got, is_out_of_memory)?;
    }
    let buffer = b.dut.allocate(4096, BufferUse::Activations).map_err(|e| {
        Finding::new("error paths", format!("after running out of memory 4096 bytes cannot be had: {e}"))
    })?;
    b.dut.free(buffer)?;
    Ok(Outcome::OK)
}

/// A budget is kept to the byte, over several buffers, and what is freed can be had again.
fn memory_limit(b: &Bench<'_>) -> Fallible<Outcome> {
    let Some(dut) = b.limited else {
        return Ok(Outcome::NotSupported { reason: "the plug-in has no option `memory_limit`".into() });
    };
    let known = dut.describe().memory_bytes;
    if known > LIMIT_BYTES {
        let what = format!("opened with a memory limit of {LIMIT_BYTES} bytes it describes {known} bytes");
        return Err(Finding::new("error paths", what));
    }
    let wanted = "out of memory";
    let too_much = dut.allocate(LIMIT_BYTES + 1, BufferUse::Weights);
    expect("allocating a byte more than the memory limit", wanted, too_much, is_out_of_memory)?;
    let most = dut.allocate(LIMIT_BYTES * 3 / 4, BufferUse::Weights)?;
    let rest = dut.allocate(LIMIT_BYTES / 2, BufferUse::KvCache);
    expect("allocating more than what is left of the memory limit", wanted, rest, is_out_of_memory)?;
    dut.free(most)?;
    let again = dut.allocate(LIMIT_BYTES * 3 / 4, BufferUse::Weights).map_err(|e| {
        Finding::new("error paths", format!("what was freed does not come back to the memory limit: {e}"))
    })?;
    dut.free(again)?;
    Ok(Outcome::OK)
}

fn empty_list(b: &Bench<'_>) -> Fallible<Outcome> {
    expect("preparing an empty list", INVALID, b.dut.prepare(&OperationList::new(1)), is_invalid)?;
    Ok(Outcome::OK)
}

fn prepare_unsupported(b: &Bench<'_>) -> Fallible<Outcome> {
    for case in crate::matrix::all() {
        let crate::case::Action::Values(spec) = &case.action else { continue };
        let problem = spec.build(b.seed, b.stated)?;
        if crate::bench::refusal(b.dut, &problem).is_some() {
            let got = b.dut.prepare(&problem.list);
            expect(
                &format!("preparing {}, which `supports` denies", case.name),
                "not supported",
                got,
                |e| is_unsupported(e) || is_buffer(e),
            )?;
            return Ok(Outcome::OK);
        }
    }
    Ok(Outcome::NotSupported { reason: "the device denies no operation of the suite".into() })
}

/// Submits with changed bindings, expects a refusal, and checks that the outputs were not touched.
fn refused(
    b: &Bench<'_>,
    what: &str,
    is: fn(&Error) -> bool,
    change: impl Fn(&mut Vec<(SlotId, Bound)>, &mut u32),
) -> Fallible<Option<String>> {
    let problem = match b.ask(&linear(), b.seed)? {
        Ok(problem) => problem,
        Err(reason) => return Ok(Some(reason)),
    };
    let prepared = prepare(b.lab(), &problem)?;
    let operands = prepared.bind(&problem)?;
    let mut slots = operands.bound();
    let mut tokens = problem.tokens;
    change(&mut slots, &mut tokens);
    let bindings = Bindings { tokens, slots: &slots, sequences: &[], ranges: &[] };
    expect(what, INVALID, b.dut.submit(prepared.executable, &bindings, &[]), is)?;
    untouched(&problem, &operands, what)?;
    operands.free()?;
    prepared.close(&problem)?;
    Ok(None)
}

fn untouched(problem: &Problem, operands: &Operands<'_>, what: &str) -> Fallible<()> {
    for (slot, bytes) in operands.outputs(problem)? {
        let unset = matches!(problem.content.get(slot as usize), Some(Content::Unset));
        if unset && bytes.iter().any(|b| *b != crate::values::FILL) {
            return Err(Finding::new("error paths", format!("{what}: an output was written all the same")));
        }
    }
    Ok(())
}

/// An outcome from the refusals of several changes.
fn all(results: Vec<Fallible<Option<String>>>) -> Fallible<Outcome> {
    for result in results {
        if let Some(reason) = result? {
            return Ok(Outcome::NotSupported { reason });
        }
    }
    Ok(Outcome::OK)
}

fn bad_bindings(b: &Bench<'_>) -> Fallible<Outcome> {
    let problem = ask!(b, linear());
    let prepared = prepare(b.lab(), &problem)?;
    let operands = prepared.bind(&problem)?;
    let slots = operands.bound();
    let ranges = [ActiveRanges { operation: 0, ranges: &[ClusterRange { start: 0, end: 1 }] }];
    let bindings = Bindings { tokens: 1, slots: &slots, sequences: &[], ranges: &ranges };
    let got = b.dut.submit(prepared.executable, &bindings, &[]);
    expect("active ranges for an operation that is no ffn", INVALID, got, is_invalid)?;
    operands.free()?;
    prepared.close(&problem)?;
    all(vec![
        refused(b, "a slot that is not bound", is_invalid, |slots, _| {
            slots.pop();
        }),
        refused(b, "a slot that is bound twice", is_invalid, |slots, _| {
            let first = slots[0];
            slots.push(first);
        }),
        refused(b, "0 tokens", is_invalid, |_, tokens| *tokens = 0),
        refused(b, "more tokens than the capacity", is_invalid, |_, tokens| *tokens = 4),
    ])
}

fn move_output(slots: &mut [(SlotId, Bound)], offset: impl Fn(u64) -> u64) {
    if let Some((_, Bound::Buffer(view))) = slots.last_mut() {
        view.offset = offset(view.offset);
    }
}

fn short_buffer(b: &Bench<'_>) -> Fallible<Outcome> {
    let align = b.dut.describe().alignment.max(4);
    let end = move |offset: u64| (offset + 4096).next_multiple_of(align);
    all(vec![refused(b, "an output that does not fit its buffer", is_invalid, move |slots, _| {
        move_output(slots, end);
    })])
}

fn offset_overflow(b: &Bench<'_>) -> Fallible<Outcome> {
    let align = b.dut.describe().alignment.max(4);
    all(vec![refused(b, "an offset near 2^64", is_invalid, move |slots, _| {
        move_output(slots, |_| u64::MAX / align * align);
    })])
}

fn misaligned(b: &Bench<'_>) -> Fallible<Outcome> {
    all(vec![refused(b, "an F32 output at an odd offset", is_invalid, |slots, _| {
        move_output(slots, |offset| offset + 1);
    })])
}

fn submit_bad_id(
    b: &Bench<'_>,
    id: i32,
    then: &mut dyn FnMut(TimelineValue) -> Fallible<()>,
) -> Fallible<Outcome> {
    let mut problem = ask!(b, embed());
    if let Some(bytes) = problem.bytes_mut(SlotId(0)) {
        bytes[8..12].copy_from_slice(&id.to_le_bytes());
    }
    let prepared = prepare(b.lab(), &problem)?;
    let operands = prepared.bind(&problem)?;
    let value = prepared.try_submit(&problem, &operands, &[]).map_err(|e| {
        Finding::new(
            "error paths",
            format!("ids are data: their error travels with `wait`, but submit failed: {e}"),
        )
    })?;
    then(value)?;
    operands.free()?;
    prepared.close(&problem)?;
    Ok(Outcome::OK)
}

fn id_out_of_range(b: &Bench<'_>) -> Fallible<Outcome> {
    for id in [5, -1, i32::MAX, i32::MIN] {
        let outcome = submit_bad_id(b, id, &mut |value| {
            let what = format!("waiting for an embed with id {id} of 5");
            let wanted = "an invalid argument or data error";
            expect(&what, wanted, b.lab().finish(value), is_invalid_or_data)?;
            expect(&format!("{what} again"), wanted, b.lab().finish(value), is_invalid_or_data)
        })?;
        if outcome != Outcome::OK {
            return Ok(outcome);
        }
    }
    // The device goes on.
    let problem = ask!(b, embed());
    b.judge(&problem, &b.run(&problem)?, 1.0).map(|worst| Outcome::Passed { worst })
}

fn dependency_failed(b: &Bench<'_>) -> Fallible<Outcome> {
    let problem = ask!(b, linear());
    let prepared = prepare(b.lab(), &problem)?;
    let operands = prepared.bind(&problem)?;
    let outcome = submit_bad_id(b, 99, &mut |failed| {
        let after = prepared.submit(&problem, &operands, &[failed])?;
        let wanted = "that a dependency failed";
        expect("waiting for work that waits for failed work", wanted, b.lab().finish(after), is_dependency)?;
        untouched(&problem, &operands, "work that waits for failed work")?;
        let free = prepared.submit(&problem, &operands, &[])?;
        b.lab().finish(free).map_err(|e| {
            Finding::new("error paths", format!("work that does not wait for failed work failed, too: {e}"))
        })
    })?;
    operands.free()?;
    prepared.close(&problem)?;
    Ok(outcome)
}

fn unknown_value(b: &Bench<'_>) -> Fallible<Outcome> {
    let never = TimelineValue(NEVER);
    let wanted = "an unknown timeline value";
    expect(
        "waiting for a value that was never returned",
        wanted,
        b.dut.wait(never, Duration::ZERO),
        is_value,
    )?;
    let problem = ask!(b, linear());
    let prepared = prepare(b.lab(), &problem)?;
    let operands = prepared.bind(&problem)?;
    let got = prepared.try_submit(&problem, &operands, &[never]);
    expect("submitting with an unknown value to wait for", wanted, got, is_value)?;
    operands.free()?;
    prepared.close(&problem)?;
    Ok(Outcome::OK)
}

fn wait_without_time(b: &Bench<'_>) -> Fallible<Outcome> {
    let problem = ask!(b, linear());
    let prepared = prepare(b.lab(), &problem)?;
    let operands = prepared.bind(&problem)?;
    let value = prepared.submit(&problem, &operands, &[])?;
    b.dut.wait(value, Duration::ZERO).map_err(|e| {
        Finding::new("error paths", format!("a wait without time only asks, but it failed: {e}"))
    })?;
    b.lab().finish(value)?;
    match b.dut.wait(value, Duration::ZERO)? {
        Reached::Done => {}
        Reached::TimedOut => {
            return Err(Finding::new("error paths", "a value that was reached is not reached"));
        }
    }
    operands.free()?;
    prepared.close(&problem)?;
    Ok(Outcome::OK)
}

fn counter(b: &Bench<'_>, name: &str) -> Fallible<u64> {
    b.dut
        .counters()
        .into_iter()
        .find(|c| c.name == name)
        .map(|c| c.value)
        .ok_or_else(|| Finding::new("counters", format!("there is no counter `{name}`")))
}

fn counters(b: &Bench<'_>) -> Fallible<Outcome> {
    let wrong = |what: String| Err(Finding::new("counters", what));
    let before = counter(b, "bytes_allocated")?;
    let buffer = b.dut.allocate(1 << 20, BufferUse::Activations)?;
    let during = counter(b, "bytes_allocated")?;
    if during < before + (1 << 20) || counter(b, "bytes_allocated_peak")? < during {
        return wrong(format!("after allocating 1 MiB `bytes_allocated` went from {before} to {during}"));
    }
    b.dut.free(buffer)?;
    let after = counter(b, "bytes_allocated")?;
    if after != before {
        return wrong(format!(
            "after freeing everything `bytes_allocated` is {after}, before it was {before}"
        ));
    }
    let problem = ask!(b, linear());
    let submissions = counter(b, "submissions")?;
    b.run(&problem)?;
    if counter(b, "submissions")? <= submissions {
        return wrong("`submissions` does not count".into());
    }
    if counter(b, "bytes_allocated")? != before {
        return wrong(
            "after releasing an executable and freeing its buffers, memory is still counted".into(),
        );
    }
    Ok(Outcome::OK)
}
