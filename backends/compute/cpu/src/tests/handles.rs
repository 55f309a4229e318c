//! Buffers, executables, timeline and options: mistakes are errors, and nothing is written when one is found.

use std::time::Duration;

use super::*;

/// `to = from` on a device, for the tests of handles.
fn copy_list(bytes: u64) -> OperationList {
    let mut list = OperationList::new(1);
    let tensor = TensorType::matrix(DType::F32, 1, bytes / 4).unwrap();
    let from = list.fixed("from", SlotRole::Input, tensor);
    let to = list.fixed("to", SlotRole::Output, tensor);
    list.push("copy", OperationKind::Copy { from, to }, Arithmetic::F32);
    list
}

#[test]
fn mistakes_are_errors_and_write_nothing() {
    let device = open("threads = 2\npin = false\nmemory_limit = 100000");
    assert!(matches!(device.allocate(0, BufferUse::Weights), Err(Error::InvalidArgument { .. })));
    assert!(matches!(device.allocate(200_000, BufferUse::Weights), Err(Error::OutOfMemory { .. })));
    let buffer = device.allocate(4096, BufferUse::Activations).unwrap();
    let other = device.allocate(4096, BufferUse::Activations).unwrap();
    let executable = device.prepare(&copy_list(64)).unwrap();
    let at = |slot, buffer, offset| (SlotId(slot), Bound::Buffer(BufferView { buffer, offset }));
    let submit = |slots: &[(SlotId, Bound)]| {
        device.submit(executable, &Bindings { tokens: 1, slots, ..Bindings::default() }, &[])
    };
    let invalid = |result: Result<TimelineValue>, word: &str| match result {
        Err(Error::InvalidArgument { detail }) => assert!(detail.contains(word), "{detail}"),
        other => panic!("wanted an invalid argument about {word}, got {other:?}"),
    };
    invalid(submit(&[at(0, buffer, 0)]), "`to` is not bound");
    invalid(submit(&[at(0, buffer, 4090), at(1, other, 0)]), "needs 64 bytes");
    invalid(submit(&[at(0, buffer, u64::MAX), at(1, other, 0)]), "needs 64 bytes");
    invalid(submit(&[at(0, buffer, 2), at(1, other, 0)]), "multiple of 4");
    let missing = submit(&[at(0, BufferId(999), 0), at(1, other, 0)]);
    assert_eq!(missing, Err(Error::unknown(HandleKind::Buffer, 999)));
    let memory = HostMemory::allocate(64).unwrap();
    // SAFETY: the memory outlives the device's use of it.
    let span = unsafe { engine_core::HostSpan::new(memory.bytes().as_ptr(), 64, false) };
    let read_only = device.import(span).unwrap();
    invalid(submit(&[at(0, buffer, 0), at(1, read_only, 0)]), "read-only");
    let value = submit(&[at(0, read_only, 0), at(1, other, 0)]).unwrap();
    assert_eq!(device.wait(value, FOREVER), Ok(Reached::Done));
    for unknown in [0, value.0 + 1] {
        let error = Error::unknown(HandleKind::TimelineValue, unknown);
        assert_eq!(device.wait(TimelineValue(unknown), Duration::ZERO), Err(error));
    }
    device.free(read_only).unwrap();
    assert_eq!(device.free(read_only), Err(Error::unknown(HandleKind::Buffer, read_only.0)));
    device.release(executable).unwrap();
    assert_eq!(device.release(executable), Err(Error::unknown(HandleKind::Executable, executable.0)));
    assert_eq!(submit(&[]), Err(Error::unknown(HandleKind::Executable, executable.0)));
    let count = |name: &str| device.counters().into_iter().find(|c| c.name == name).unwrap().value;
    assert_eq!((count("submissions"), count("bytes_allocated")), (1, 8192));
    device.free(buffer).unwrap();
    device.free(other).unwrap();
    assert_eq!(count("bytes_allocated"), 0);
    assert!(count("bytes_allocated_peak") >= 8192);
}

#[test]
fn a_wrong_id_fails_its_submission_and_what_waits_for_it() {
    let device = open("threads = 2\npin = false");
    let mut rig = Rig::new(&*device, 3);
    let ids = rig.per_token("ids", SlotRole::Input, DType::I32, 1);
    let table = Random(1).rows(DType::Q4_0, 5, 64);
    let table = rig.constant("table", DType::Q4_0, 5, 64, &table);
    let output = rig.per_token("output", SlotRole::Output, DType::F32, 64);
    rig.list.push("embed", OperationKind::Embed { ids, table, output, scale: 2.0 }, Arithmetic::F32);
    rig.set(ids, &[4i32, 0, 4]);
    rig.run(3, 0, &[]).unwrap();
    let rows = rig.get(output, 3 * 64);
    same(&rows[..64], &rows[128..], "the same id");
    for bad in [5, -1, i32::MIN] {
        rig.set(ids, &[4i32, bad, 4]);
        match rig.run(3, 0, &[]) {
            Err(Error::Data { detail }) => assert!(detail.contains(&bad.to_string()), "{detail}"),
            other => panic!("{other:?}"),
        }
    }
    same(&rows, &rig.get(output, 3 * 64), "untouched by a failed submission");
    let executable = device.prepare(&rig.list).unwrap();
    let slots = rig.bindings();
    let bindings = Bindings { tokens: 3, slots: &slots, ..Bindings::default() };
    let first = device.submit(executable, &bindings, &[]).unwrap();
    let second = device.submit(executable, &bindings, &[first]).unwrap();
    assert!(matches!(device.wait(second, FOREVER), Err(Error::DependencyFailed { .. })));
    assert!(matches!(device.wait(first, FOREVER), Err(Error::Data { .. })));
}

#[test]
fn options_are_checked() {
    let wrong = |text: &str| match CpuModule.open(0, &text.parse::<OptionTable>().unwrap()) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{text} was accepted"),
    };
    assert!(wrong("thread = 2").contains("did you mean `threads`?"));
    assert!(wrong("features = 'avx9'").contains("portable"));
    assert!(wrong("threads = 5000").contains("`threads`"));
    let device = open("threads = 3");
    let notes = &device.describe().notes;
    assert!(notes.iter().any(|n| n.contains("threads: 3, as asked for")), "{notes:?}");
    assert!(CpuModule.open(1, &OptionTable::new()).is_err());
}
