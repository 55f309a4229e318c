//! All methods of the four traits through both doors.

use crate::support::{catalogue, entry, fixture, options};
use engine_core::backend::{
    ActiveRanges, Bindings, Bound, BufferId, BufferUse, BufferView, ExecutableId, SequenceSpan, Support,
    TimelineValue,
};
use engine_core::cache::{Miss, Region, Unit};
use engine_core::error::HandleKind;
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Ffn, OperationKind, OperationList, Rope, RopeScaling, RopeStyle,
    Selection, SlotId, SlotRole,
};
use engine_core::planner::{Budget, DeviceProfile, HardwareProfile, LayerProfile, ModelProfile};
use engine_core::storage::Read;
use engine_core::{ClusterRange, DType, Error, HostMemory, Reached, TensorType};
use engine_loader::{Door, LoadError};
use std::time::Duration;

/// `x -> rope -> ffn -> y` and a KV append, for two tokens.
fn list() -> OperationList {
    let mut list = OperationList::new(2);
    let x = list.per_token("x", SlotRole::Input, DType::F32, 8).unwrap();
    let y = list.per_token("y", SlotRole::Output, DType::F32, 8).unwrap();
    let r = list.per_token("r", SlotRole::Scratch, DType::F32, 8).unwrap();
    let view = BufferView { buffer: BufferId(3), offset: 64 };
    let weight = TensorType::matrix(DType::F32, 16, 8).unwrap();
    let up = list.fixed("up", SlotRole::Constant(view), weight);
    let down = list.fixed("down", SlotRole::Constant(view), weight);
    let rope = Rope {
        input: x,
        output: r,
        factors: None,
        style: RopeStyle::Halves,
        head_dim: 8,
        rotary_dim: 4,
        base: 1e4,
        scaling: RopeScaling::None,
    };
    list.push("rope", OperationKind::Rope(rope), Arithmetic::F32);
    let ffn = Ffn {
        input: r,
        gate: None,
        up,
        down,
        gate_low: None,
        up_low: None,
        gate_bias: None,
        up_bias: None,
        output: y,
        hidden: None,
        active_count: None,
        down_layout: DownLayout::NeuronRows,
        function: Activation::Relu,
        up_function: Activation::Identity,
        selection: Selection::All,
        accumulate: false,
    };
    list.push("ffn", OperationKind::Ffn(ffn), Arithmetic::INT8);
    list
}

fn buffers() -> Vec<(SlotId, Bound)> {
    let at = |offset| Bound::Buffer(BufferView { buffer: BufferId(1), offset });
    vec![(SlotId(0), at(0)), (SlotId(1), at(64))]
}

#[test]
fn compute_through_the_root_module() {
    let catalogue = catalogue(&[&fixture("fixture_compute")]);
    let entry = entry(&catalogue, "fixture");
    assert_eq!((entry.door, entry.abi), (Some(Door::RootModule), Some((1, 0))));
    assert_eq!(entry.devices.len(), 2);
    assert_eq!(entry.schema.as_ref().unwrap().fields[0].name, "devices");

    let device = catalogue.open_compute("fixture:1", &options("")).unwrap();
    assert_eq!(device.describe(), &entry.devices[1]);
    assert_eq!(device.describe().notes, ["ünïcode"]);

    let list = list();
    assert_eq!(device.supports(&list, 0), Support::no("no rope today"));
    assert_eq!(device.supports(&list, 1), Support::Preferred);
    assert!(!device.supports(&list, 2).is_yes());

    assert_eq!(device.allocate(64, BufferUse::KvCache), Ok(BufferId(64)));
    assert!(matches!(device.allocate(1 << 21, BufferUse::Weights), Err(Error::OutOfMemory { .. })));
    assert_eq!(device.free(BufferId(9)), Err(Error::unknown(HandleKind::Buffer, 9)));
    let memory = HostMemory::allocate(100).unwrap();
    // SAFETY: the fixture only looks at the address.
    let span = unsafe { memory.span() };
    assert_eq!(device.import(span), Ok(BufferId(span.address() as u64 ^ 100 ^ 1)));

    let executable = device.prepare(&list).unwrap();
    let slots = buffers();
    let sequences = [SequenceSpan { first_token: 0, tokens: 2, past: 5, cache_base: 0 }];
    let clusters = [ClusterRange::new(0, 3), ClusterRange::new(4, 6)];
    let ranges = [ActiveRanges { operation: 1, ranges: &clusters }];
    let bindings = Bindings { tokens: 2, slots: &slots, sequences: &sequences, ranges: &ranges };
    let value = device.submit(executable, &bindings, &[TimelineValue(4), TimelineValue(6)]).unwrap();
    assert_eq!(device.wait(value, Duration::ZERO), Ok(Reached::TimedOut));
    assert_eq!(device.wait(value, engine_core::error::FOREVER), Ok(Reached::Done));
    assert_eq!(
        device.wait(TimelineValue(99), Duration::ZERO),
        Err(Error::unknown(HandleKind::TimelineValue, 99))
    );
    let count = |name: &str| device.counters().into_iter().find(|c| c.name == name).unwrap().value;
    let seen = ["submissions", "bytes_allocated", "slots", "tokens", "active", "past", "waits"].map(count);
    assert_eq!(seen, [1, 64, 5, 2, 5, 5, 10]);

    // Mistakes are found before anything crosses.
    let unbound = Bindings { slots: &slots[..1], ..bindings };
    assert!(matches!(device.submit(executable, &unbound, &[]), Err(Error::InvalidArgument { .. })));
    assert!(matches!(device.prepare(&OperationList::new(1)), Err(Error::InvalidArgument { .. })));
    device.release(executable).unwrap();
    assert_eq!(
        device.submit(executable, &bindings, &[]),
        Err(Error::unknown(HandleKind::Executable, executable.0))
    );
    assert_eq!(
        device.submit(ExecutableId(1234), &bindings, &[]),
        Err(Error::unknown(HandleKind::Executable, 1234))
    );
}

#[test]
fn panics_are_errors_with_a_place() {
    let catalogue = catalogue(&[&fixture("fixture_compute")]);
    let error = catalogue.open_compute("fixture", &options("panic_in = 'open'")).err().unwrap();
    let text = error.to_string();
    assert!(text.contains("told to panic in open") && text.contains("fixture_compute.rs:"), "{text}");
    assert!(matches!(error, LoadError::Open { source: Error::Panicked { .. }, .. }));

    let device = catalogue.open_compute("fixture", &options("panic_in = 'allocate'")).unwrap();
    for _ in 0..2 {
        let error = device.allocate(1, BufferUse::Weights).unwrap_err();
        assert!(matches!(&error, Error::Panicked { detail } if detail.contains("compute plug-in `fixture`")));
    }
    assert_eq!(device.counters()[0].value, 0);
}

#[test]
fn devices_and_options_are_checked() {
    let catalogue = catalogue(&[&fixture("fixture_compute")]);
    let message = |device: &str, text: &str| {
        catalogue.open_compute(device, &options(text)).err().expect("an error").to_string()
    };
    insta::assert_snapshot!(
        [
            message("fixture:2", ""),
            message("fixture:0", "devices = 0"),
            message("fixture", "device = 1"),
            message("fixture", "devices = 5"),
            message("fixture:x", ""),
            message("", ""),
        ]
        .join("\n"),
        @r#"
    compute plug-in `fixture` has no device 2: there are fixture:0, fixture:1
    compute plug-in `fixture` has no device 0: it has none, because it was told to have none
    configuration: [compute.options.fixture]: unknown key `device`; did you mean `devices`?
    configuration: [compute.options.fixture]: `devices` is 5, wanted a whole number from 0 to 4
    device "fixture:x" is not of the form NAME or NAME:INDEX, such as "cpu" or "vulkan:1"
    device "" is not of the form NAME or NAME:INDEX, such as "cpu" or "vulkan:1"
    "#
    );
    assert_eq!(catalogue.devices("fixture", &options("devices = 3")).unwrap().len(), 3);
}

#[test]
fn storage_through_the_root_module() {
    let catalogue = catalogue(&[&fixture("fixture_storage")]);
    let tier = catalogue.open_storage("fixture", &options("")).unwrap();
    assert_eq!((tier.describe().max_depth, tier.describe().curve[0].bytes_per_second), (3, 1.5e9));
    let folder = crate::support::folder();
    let path = folder.path().join("file with ünïcode");
    std::fs::write(&path, b"0123456789").unwrap();
    let file = tier.open(&path).unwrap();
    assert_eq!(tier.len(file), Ok(10));
    let span = tier.resident(file, 2..6).unwrap().unwrap();
    assert_eq!(span.len(), 4);
    // SAFETY: the tier keeps the bytes until the file is closed.
    assert_eq!(unsafe { std::slice::from_raw_parts(span.address() as *const u8, 4) }, b"2345");
    assert!(matches!(tier.resident(file, 8..11), Err(Error::InvalidArgument { .. })));

    let memory = HostMemory::allocate(4).unwrap();
    // SAFETY: the memory outlives the read, and is looked at after it.
    let into = unsafe { memory.span() };
    let read = Read { file, range: 6..10, into, priority: 7 };
    let value = tier.read(std::slice::from_ref(&read)).unwrap();
    assert_eq!(value, TimelineValue(7));
    assert_eq!(tier.wait(value, Duration::ZERO), Ok(Reached::Done));
    assert_eq!(memory.bytes(), b"6789");
    let short = Read { range: 0..5, ..read };
    assert!(matches!(tier.read(&[short]), Err(Error::InvalidArgument { .. })));
    assert_eq!(tier.cancel(TimelineValue(8)), Err(Error::unknown(HandleKind::TimelineValue, 8)));
    assert_eq!(tier.counters().len(), 2);
    tier.close(file).unwrap();
    assert_eq!(tier.close(file), Err(Error::unknown(HandleKind::File, file.0)));
    let error = tier.open(&folder.path().join("absent")).unwrap_err();
    assert!(matches!(&error, Error::Io { detail } if detail.contains("absent")));
}

#[test]
fn cache_through_the_root_module() {
    let catalogue = catalogue(&[&fixture("fixture_cache")]);
    let mut policy = catalogue.open_cache("fixture", &options("")).unwrap();
    let unit = |cluster| Unit { region: 1, layer: 2, cluster };
    let early = policy.step(9, &[], &[], &[]).unwrap_err();
    assert!(matches!(&early, Error::Panicked { detail } if detail.contains("step 9 before configure")));
    assert!(policy.configure(&[Region { unit_bytes: 8, budget_bytes: 7 }]).is_err());
    policy.configure(&[Region { unit_bytes: 8, budget_bytes: 80 }]).unwrap();
    let misses = [Miss { unit: unit(5), deadline: 1 }, Miss { unit: unit(4), deadline: 0 }];
    let decision = policy.step(0, &[unit(1), unit(2)], &misses, &[unit(2)]).unwrap();
    assert_eq!(decision.admit, [unit(5), unit(4)]);
    assert_eq!(decision.evict, [unit(1)]);
}

#[test]
fn planner_through_the_root_module() {
    let catalogue = catalogue(&[&fixture("fixture_planner")]);
    let planner = catalogue.open_planner("fixture", &options("")).unwrap();
    let layer = LayerProfile {
        attention_bytes: 1,
        neurons: 7,
        neuron_bytes: 2,
        zero_below: true,
        predictor_bytes: 0,
        frequency: vec![0.1, 0.7],
        ..LayerProfile::default()
    };
    let model = ModelProfile {
        name: "m".into(),
        hash: "mh".into(),
        embedding_bytes: 1,
        kv_bytes: 2,
        activation_bytes: 3,
        divided_bytes: 4,
        layers: vec![layer; 2],
    };
    let device = DeviceProfile {
        name: "cpu".into(),
        memory_bytes: 100,
        bandwidth: 1e9,
        sync_seconds: 1e-5,
        sparse: true,
        ..DeviceProfile::default()
    };
    let hardware = HardwareProfile { hash: "hh".into(), devices: vec![device] };
    let plan = planner.plan(&model, &hardware, &Budget::default()).unwrap();
    plan.validate(&model).unwrap();
    assert_eq!(plan.predicted_seconds, 2.0 * (f64::from(0.1f32) + f64::from(0.7f32)));
    let nothing = HardwareProfile { hash: String::new(), devices: vec![] };
    let error = planner.plan(&model, &nothing, &Budget::default()).unwrap_err();
    assert_eq!(error, Error::Infeasible { detail: "at least one device is needed".into() });
    let nonsense = Budget { slowdown: f64::NAN, ..Budget::default() };
    assert!(matches!(planner.plan(&model, &hardware, &nonsense), Err(Error::InvalidArgument { .. })));
}
