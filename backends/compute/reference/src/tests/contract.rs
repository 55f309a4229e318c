//! Handles, budgets, bindings and the timeline.

use super::{Trial, f32_bytes, transfer};
use crate::{Options, Reference};
use engine_core::backend::{
    Bindings, Bound, BufferId, BufferUse, BufferView, ExecutableId, SequenceSpan, TimelineValue,
};
use engine_core::error::HandleKind;
use engine_core::operation::{Activation, Arithmetic, OperationKind, OperationList, SlotId, SlotRole};
use engine_core::{ComputeBackend, DType, Error, HostMemory, HostSpan, Reached, TensorType};
use std::time::Duration;

fn reference() -> Reference {
    Reference::new(Options::default())
}

fn counter(backend: &Reference, name: &str) -> u64 {
    backend.counters().into_iter().find(|c| c.name == name).unwrap().value
}

fn is_unknown<T: std::fmt::Debug>(result: Result<T, Error>, wanted: HandleKind) {
    assert!(matches!(&result, Err(Error::UnknownHandle { kind, .. }) if *kind == wanted), "{result:?}");
}

/// `output = relu(input)` on rows of four f32.
fn relu_list(tokens: u32) -> OperationList {
    let mut list = OperationList::new(tokens);
    let input = list.per_token("input", SlotRole::Input, DType::F32, 4).unwrap();
    let output = list.per_token("output", SlotRole::Output, DType::F32, 4).unwrap();
    list.push("relu", OperationKind::Activate { function: Activation::Relu, input, output }, Arithmetic::F32);
    list
}

fn at(buffer: BufferId, offset: u64) -> Bound {
    Bound::Buffer(BufferView { buffer, offset })
}

#[test]
fn handles_die_once() {
    let backend = reference();
    let buffer = backend.allocate(16, BufferUse::Weights).unwrap();
    assert!(matches!(backend.allocate(0, BufferUse::Weights), Err(Error::InvalidArgument { .. })));
    backend.free(buffer).unwrap();
    is_unknown(backend.free(buffer), HandleKind::Buffer);
    let executable = backend.prepare(&relu_list(1)).unwrap();
    backend.release(executable).unwrap();
    is_unknown(backend.release(executable), HandleKind::Executable);
    is_unknown(backend.submit(executable, &Bindings::default(), &[]), HandleKind::Executable);
    is_unknown(backend.submit(ExecutableId(999), &Bindings::default(), &[]), HandleKind::Executable);
    is_unknown(backend.wait(TimelineValue(0), Duration::ZERO), HandleKind::TimelineValue);
    is_unknown(backend.wait(TimelineValue(1), Duration::ZERO), HandleKind::TimelineValue);
}

#[test]
fn the_budget_is_kept() {
    let backend = Reference::new(Options { memory_limit: Some(100), ..Options::default() });
    let buffer = backend.allocate(60, BufferUse::KvCache).unwrap();
    let error = backend.allocate(41, BufferUse::KvCache).unwrap_err();
    assert!(
        matches!(&error, Error::OutOfMemory { detail } if detail.contains("40 of its memory_limit of 100"))
    );
    // Scratch counts, and comes back with the executable.
    let mut list = relu_list(1);
    list.slots[1].role = SlotRole::Scratch;
    let executable = backend.prepare(&list).unwrap();
    assert_eq!(counter(&backend, "bytes_allocated"), 76);
    let more = backend.allocate(24, BufferUse::Weights).unwrap();
    assert!(matches!(backend.prepare(&list), Err(Error::OutOfMemory { .. })));
    backend.release(executable).unwrap();
    backend.free(buffer).unwrap();
    backend.free(more).unwrap();
    assert_eq!(counter(&backend, "bytes_allocated"), 0);
    assert_eq!(counter(&backend, "bytes_allocated_peak"), 100);
}

#[test]
fn bindings_are_checked_before_anything_is_written() {
    let backend = reference();
    let executable = backend.prepare(&relu_list(2)).unwrap();
    let small = backend.allocate(20, BufferUse::Activations).unwrap();
    let large = backend.allocate(64, BufferUse::Activations).unwrap();
    let submit = |tokens, slots: &[(SlotId, Bound)]| {
        backend.submit(executable, &Bindings { tokens, slots, ..Bindings::default() }, &[])
    };
    let (input, output) = (SlotId(0), SlotId(1));
    is_unknown(submit(1, &[(input, at(BufferId(77), 0)), (output, at(large, 0))]), HandleKind::Buffer);
    for (tokens, slots) in [
        (2, [(input, at(small, 0)), (output, at(large, 0))]),
        (1, [(input, at(small, 8)), (output, at(large, 0))]),
        (1, [(input, at(large, 2)), (output, at(small, 0))]),
        (1, [(input, at(large, 0)), (output, at(large, u64::MAX - 3))]),
        (3, [(input, at(large, 0)), (output, at(large, 0))]),
        (0, [(input, at(large, 0)), (output, at(large, 0))]),
    ] {
        let result = submit(tokens, &slots);
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{slots:?}: {result:?}");
    }
    assert!(matches!(submit(1, &[(input, at(large, 0))]), Err(Error::InvalidArgument { .. })));
    // Only the rows of the submitted tokens need to be there.
    let value = submit(1, &[(input, at(small, 4)), (output, at(large, 32))]).unwrap();
    assert_eq!(backend.wait(value, Duration::ZERO).unwrap(), Reached::Done);
    assert_eq!((value, counter(&backend, "submissions")), (TimelineValue(1), 1));
    backend.free(small).unwrap();
    is_unknown(submit(1, &[(input, at(small, 4)), (output, at(large, 32))]), HandleKind::Buffer);
}

#[test]
fn constants_are_checked_at_prepare_and_at_submit() {
    let backend = reference();
    let table = backend.allocate(32, BufferUse::Weights).unwrap();
    let list = |buffer, offset| {
        let mut list = OperationList::new(1);
        let tensor = TensorType::matrix(DType::F32, 2, 4).unwrap();
        let ids = list.per_token("ids", SlotRole::Input, DType::I32, 1).unwrap();
        let table = list.fixed("table", SlotRole::Constant(BufferView { buffer, offset }), tensor);
        let output = list.per_token("output", SlotRole::Output, DType::F32, 4).unwrap();
        list.push("embed", OperationKind::Embed { ids, table, output, scale: 1.0 }, Arithmetic::F32);
        list
    };
    is_unknown(backend.prepare(&list(BufferId(50), 0)), HandleKind::Buffer);
    assert!(matches!(backend.prepare(&list(table, 4)), Err(Error::InvalidArgument { .. })));
    let executable = backend.prepare(&list(table, 0)).unwrap();
    let memory = backend.allocate(64, BufferUse::Activations).unwrap();
    backend.free(table).unwrap();
    let slots = [(SlotId(0), at(memory, 0)), (SlotId(2), at(memory, 16))];
    let bindings = Bindings { tokens: 1, slots: &slots, ..Bindings::default() };
    is_unknown(backend.submit(executable, &bindings, &[]), HandleKind::Buffer);
}

#[test]
#[expect(unsafe_code, reason = "host spans are made of raw addresses")]
fn imports_are_views() {
    let backend = reference();
    let mut memory = HostMemory::allocate(32).unwrap();
    memory.write(0, &[-1f32, 2.0, -3.0, 4.0]).unwrap();
    // SAFETY: the span is used only below, while `memory` is left alone.
    let span = unsafe { memory.span() };
    // SAFETY: as above; the same bytes, not to be written.
    let read_only = unsafe { HostSpan::new(span.address() as *const u8, 16, false) };
    let (writable, read_only) = (backend.import(span).unwrap(), backend.import(read_only).unwrap());
    assert!(matches!(backend.import(span.slice(3, 0).unwrap()), Err(Error::InvalidArgument { .. })));
    assert_eq!(counter(&backend, "bytes_allocated"), 0);
    let executable = backend.prepare(&relu_list(1)).unwrap();
    let submit = |slots: &[(SlotId, Bound)]| {
        backend.submit(executable, &Bindings { tokens: 1, slots, ..Bindings::default() }, &[])
    };
    let refused = submit(&[(SlotId(0), at(writable, 0)), (SlotId(1), at(read_only, 0))]);
    assert!(matches!(&refused, Err(Error::InvalidArgument { detail }) if detail.contains("read-only")));
    submit(&[(SlotId(0), at(read_only, 0)), (SlotId(1), at(writable, 16))]).unwrap();
    backend.free(writable).unwrap();
    backend.free(read_only).unwrap();
    let mut out = [0f32; 4];
    memory.read(16, &mut out).unwrap();
    assert_eq!(out, [0.0, 2.0, 0.0, 4.0]);
}

#[test]
fn failures_travel_with_their_value() {
    let mut t = Trial::new(1);
    let ids =
        t.slot(SlotRole::Input, TensorType::matrix(DType::I32, 1, 1).unwrap(), true, &9i32.to_le_bytes());
    let table = t.weight(4, &[0.0; 8]);
    let output = t.output(DType::F32, 4);
    t.push(OperationKind::Embed { ids, table, output, scale: 1.0 });
    let executable = t.backend.prepare(&t.list).unwrap();
    let slots = [(ids, at(t.buffers[0].1, 0)), (output, at(t.buffers[2].1, 0))];
    let bindings = Bindings { tokens: 1, slots: &slots, ..Bindings::default() };
    let runs = counter(&t.backend, "submissions");
    let failed = t.backend.submit(executable, &bindings, &[]).unwrap();
    let behind = t.backend.submit(executable, &bindings, &[failed]).unwrap();
    let further = t.backend.submit(executable, &bindings, &[behind]).unwrap();
    assert!(failed < behind && behind < further);
    assert_eq!(counter(&t.backend, "submissions"), runs + 1);
    for _ in 0..2 {
        assert!(matches!(t.backend.wait(failed, Duration::ZERO), Err(Error::Data { .. })));
        for value in [behind, further] {
            assert!(matches!(t.backend.wait(value, Duration::ZERO), Err(Error::DependencyFailed { .. })));
        }
    }
    let never = TimelineValue(further.0 + 1);
    is_unknown(t.backend.submit(executable, &bindings, &[never]), HandleKind::TimelineValue);
}

#[test]
fn submissions_take_effect_in_the_order_of_their_values() {
    let mut t = Trial::new(1);
    let tensor = TensorType::matrix(DType::F32, 1, 1).unwrap();
    let sum = t.slot(SlotRole::State, tensor, true, &f32_bytes(&[0.0]));
    let one = t.input(&[1.0]);
    t.push(OperationKind::Add { left: sum, right: one, output: sum });
    let executable = t.backend.prepare(&t.list).unwrap();
    let slots = [(sum, at(t.buffers[0].1, 0)), (one, at(t.buffers[1].1, 0))];
    let mut values: Vec<TimelineValue> = std::thread::scope(|scope| {
        let submit = || {
            let bindings = Bindings { tokens: 1, slots: &slots, ..Bindings::default() };
            let values = (0..50).map(|_| t.backend.submit(executable, &bindings, &[]).unwrap());
            let values: Vec<_> = values.collect();
            assert!(values.is_sorted());
            values.iter().for_each(|v| assert_eq!(t.backend.wait(*v, Duration::ZERO), Ok(Reached::Done)));
            values
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(submit)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    values.sort();
    values.dedup();
    assert_eq!((values.len(), t.floats(sum)), (200, vec![200.0]));
}

#[test]
fn scratch_is_fresh() {
    // The cache slot cannot be scratch and rows beyond the tokens are never read; so the only way to see scratch is a
    // per-token slot that a shorter submission left behind: what it holds must not come from the run before.
    let mut list = OperationList::new(2);
    let input = list.per_token("input", SlotRole::Input, DType::F32, 1).unwrap();
    let between = list.per_token("between", SlotRole::Scratch, DType::F32, 1).unwrap();
    let output = list.per_token("output", SlotRole::Output, DType::F32, 1).unwrap();
    let relu = |input, output| OperationKind::Activate { function: Activation::Relu, input, output };
    list.push("first", relu(input, between), Arithmetic::F32);
    list.push("second", relu(between, output), Arithmetic::F32);
    let backend = reference();
    let executable = backend.prepare(&list).unwrap();
    let memory = backend.allocate(16, BufferUse::Activations).unwrap();
    super::copy_in(&backend, memory, &f32_bytes(&[1.0, 2.0, 9.0, 9.0]));
    let slots = [(input, at(memory, 0)), (output, at(memory, 8))];
    let sequences: &[SequenceSpan] = &[];
    let bindings = Bindings { tokens: 1, slots: &slots, sequences, ranges: &[] };
    backend.submit(executable, &bindings, &[]).unwrap();
    assert_eq!(super::copy_out(&backend, memory, 16), f32_bytes(&[1.0, 2.0, 1.0, 9.0]));
}

#[test]
fn what_is_not_there_is_not_supported() {
    let backend = reference();
    let list = transfer(4, true);
    assert!(backend.supports(&list, 0).is_yes());
    assert!(!backend.supports(&list, 1).is_yes());
    let mut invalid = relu_list(1);
    invalid.operations.clear();
    assert!(matches!(backend.prepare(&invalid), Err(Error::InvalidArgument { .. })));
}
