//! What crosses comes out as it went in; what cannot be right is an error.

use super::*;
use crate::{Bytes, NO_SLOT, OperationCode, Sink, Status};
use engine_core::backend::{
    ActiveRanges, Bindings, Bound, BufferId, BufferView, SequenceSpan, ToleranceClass,
};
use engine_core::operation::{
    Accumulation, Activation, Arithmetic, Bitplane, DownLayout, Experts, Ffn, Gating, NormKind, Operation,
    OperationKind, OperationList, Place, Quantization, Rope, RopeScaling, RopeStyle, Selection, Slot, SlotId,
    SlotRole,
};
use engine_core::{ClusterRange, DType, Error, HostSpan, TensorType};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn slot_id() -> impl Strategy<Value = SlotId> {
    prop_oneof![0..40u32, 0..NO_SLOT].prop_map(SlotId)
}

fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        proptest::num::f32::ANY.prop_filter("NaN equals nothing", |x| !x.is_nan()),
        Just(0.0),
        Just(1e-5)
    ]
}

fn activation() -> impl Strategy<Value = Activation> {
    prop_oneof![
        Just(Activation::Identity),
        Just(Activation::Relu),
        Just(Activation::ReluSquared),
        Just(Activation::Silu),
        Just(Activation::GeluTanh),
        Just(Activation::GeluErf)
    ]
}

fn rope() -> impl Strategy<Value = OperationKind> {
    let scaling = prop_oneof![
        Just(RopeScaling::None),
        number().prop_map(|factor| RopeScaling::Linear { factor }),
        (number(), any::<u32>(), number(), number(), number()).prop_map(
            |(factor, context, attention, fast, slow)| {
                RopeScaling::Yarn {
                    factor,
                    original_context: context,
                    attention_factor: attention,
                    beta_fast: fast,
                    beta_slow: slow,
                }
            }
        )
    ];
    let style = prop_oneof![Just(RopeStyle::Interleaved), Just(RopeStyle::Halves)];
    (slot_id(), slot_id(), option::of(slot_id()), style, any::<(u32, u32)>(), number(), scaling).prop_map(
        |(input, output, factors, style, (head_dim, rotary_dim), base, scaling)| {
            OperationKind::Rope(Rope { input, output, factors, style, head_dim, rotary_dim, base, scaling })
        },
    )
}

fn ffn() -> impl Strategy<Value = OperationKind> {
    let selection = prop_oneof![
        Just(Selection::All),
        slot_id().prop_map(Selection::Mask),
        Just(Selection::GateFirst),
        number().prop_map(Selection::Threshold),
        (slot_id(), vec(option::of(slot_id()), 2), number(), number()).prop_map(|(gate, o, k, threshold)| {
            Selection::Bitplane(Bitplane {
                gate_deviation: gate,
                up_deviation: o[0],
                down_norm: o[1],
                deviations: k,
                threshold,
            })
        })
    ];
    let layout = prop_oneof![Just(DownLayout::OutputRows), Just(DownLayout::NeuronRows)];
    let optional = vec(option::of(slot_id()), 7);
    let codes = (layout, activation(), activation(), selection, any::<bool>());
    ([slot_id(), slot_id(), slot_id(), slot_id()], optional, codes).prop_map(
        |([input, up, down, output], o, (down_layout, function, up_function, selection, accumulate))| {
            OperationKind::Ffn(Ffn {
                input,
                gate: o[0],
                up,
                down,
                gate_low: o[5],
                up_low: o[6],
                gate_bias: o[1],
                up_bias: o[2],
                output,
                hidden: o[3],
                active_count: o[4],
                down_layout,
                function,
                up_function,
                selection,
                accumulate,
            })
        },
    )
}

fn experts() -> impl Strategy<Value = OperationKind> {
    let selection = prop_oneof![
        Just(Selection::All),
        Just(Selection::GateFirst),
        number().prop_map(Selection::Threshold)
    ];
    let layout = prop_oneof![Just(DownLayout::OutputRows), Just(DownLayout::NeuronRows)];
    let optional = (option::of(slot_id()), option::of(slot_id()));
    let codes = (layout, activation(), activation(), selection, any::<bool>(), any::<u32>());
    (vec(slot_id(), 6), optional, codes).prop_map(|(s, (gate, active_count), codes)| {
        let (down_layout, function, up_function, selection, accumulate, experts) = codes;
        OperationKind::Experts(Experts {
            input: s[0],
            chosen: s[1],
            weights: s[2],
            gate,
            up: s[3],
            down: s[4],
            output: s[5],
            active_count,
            experts,
            down_layout,
            function,
            up_function,
            selection,
            accumulate,
        })
    })
}

fn route() -> impl Strategy<Value = OperationKind> {
    let gating = prop_oneof![Just(Gating::Softmax), Just(Gating::Sigmoid)];
    ([slot_id(), slot_id(), slot_id()], gating, any::<bool>(), number()).prop_map(
        |([scores, chosen, weights], gating, normalise, scale)| OperationKind::Route {
            scores,
            chosen,
            weights,
            gating,
            normalise,
            scale,
        },
    )
}

fn attention() -> impl Strategy<Value = OperationKind> {
    let window = option::of(1..=u32::MAX);
    let cap = option::of(number().prop_filter("0 means none", |cap| *cap != 0.0));
    ([slot_id(), slot_id(), slot_id()], any::<(u32, u32, u32)>(), number(), window, cap).prop_map(
        |([query, cache, output], (heads, kv_heads, head_dim), scale, window, soft_cap)| {
            OperationKind::Attention {
                query,
                cache,
                output,
                heads,
                kv_heads,
                head_dim,
                scale,
                window,
                soft_cap,
            }
        },
    )
}

fn kind() -> impl Strategy<Value = OperationKind> {
    let slots = || [slot_id(), slot_id(), slot_id(), slot_id()];
    let norm = prop_oneof![Just(NormKind::Rms), Just(NormKind::Layer)];
    let dims = || any::<(u32, u32)>();
    prop_oneof![
        slots().prop_map(|[from, to, ..]| OperationKind::Copy { from, to }),
        (slots(), number()).prop_map(|([ids, table, output, _], scale)| OperationKind::Embed {
            ids,
            table,
            output,
            scale
        }),
        (slots(), option::of(slot_id()), norm, number()).prop_map(
            |([input, weight, output, _], bias, norm, epsilon)| OperationKind::Norm {
                norm,
                epsilon,
                input,
                weight,
                bias,
                output
            }
        ),
        (slots(), option::of(slot_id()), any::<bool>()).prop_map(
            |([input, weight, output, _], bias, accumulate)| OperationKind::Linear {
                input,
                weight,
                bias,
                output,
                accumulate
            }
        ),
        rope(),
        (slots(), dims()).prop_map(|([key, value, cache, _], (kv_heads, head_dim))| {
            OperationKind::KvAppend { key, value, cache, kv_heads, head_dim }
        }),
        attention(),
        ffn(),
        experts(),
        route(),
        (slots(), number()).prop_map(|([input, fc1, fc2, mask], threshold)| OperationKind::Predict {
            input,
            fc1,
            fc2,
            mask,
            threshold
        }),
        (slots(), activation()).prop_map(|([input, output, ..], function)| OperationKind::Activate {
            function,
            input,
            output
        }),
        slots().prop_map(|[left, right, output, _]| OperationKind::Add { left, right, output }),
        slots().prop_map(|[left, right, output, _]| OperationKind::Multiply { left, right, output }),
        (slots(), dims()).prop_map(|([key, value, cache, _], (kv_heads, head_dim))| {
            OperationKind::KvExport { cache, key, value, kv_heads, head_dim }
        }),
        (slots(), dims()).prop_map(|([key, value, cache, _], (kv_heads, head_dim))| {
            OperationKind::KvImport { key, value, cache, kv_heads, head_dim }
        }),
    ]
}

fn slot() -> impl Strategy<Value = Slot> {
    let role = prop_oneof![
        any::<(u64, u64)>()
            .prop_map(|(buffer, offset)| SlotRole::Constant(BufferView { buffer: BufferId(buffer), offset })),
        Just(SlotRole::Input),
        Just(SlotRole::Output),
        Just(SlotRole::State),
        Just(SlotRole::Scratch)
    ];
    let dtype = proptest::sample::select(DType::all().collect::<Vec<_>>());
    let place = prop_oneof![Just(Place::Device), Just(Place::Host)];
    (".*", role, place, dtype, any::<(u64, u64, u64)>(), any::<bool>()).prop_map(
        |(name, role, place, dtype, (rows, columns, row_stride), per_token)| Slot {
            name,
            role,
            place,
            tensor: TensorType { dtype, rows, columns, row_stride },
            per_token,
        },
    )
}

fn operation() -> impl Strategy<Value = Operation> {
    let quantization = || prop_oneof![Just(Quantization::None), Just(Quantization::Int8Blocks)];
    let accumulation = prop_oneof![Just(Accumulation::F32), Just(Accumulation::F16)];
    (".*", kind(), quantization(), quantization(), accumulation).prop_map(
        |(label, kind, input, hidden, accumulation)| Operation {
            label,
            kind,
            arithmetic: Arithmetic { input, hidden, accumulation },
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn lists_round_trip(
        token_capacity in any::<u32>(),
        slots in vec(slot(), 0..6),
        operations in vec(operation(), 0..6),
    ) {
        let list = OperationList { token_capacity, slots, operations };
        let descriptor = ListDescriptor::new(&list).unwrap();
        let abi = descriptor.as_abi();
        // SAFETY: the descriptor lives until the end of the test.
        let back = unsafe { list_from_abi(&raw const abi) }.unwrap();
        prop_assert_eq!(back, list);
    }

    /// Any words in place of a descriptor's numbers give a list or an error, and what gives a list gives the same
    /// words back.
    #[test]
    fn wild_operations_never_panic(
        code in 0..20u32,
        slots in proptest::array::uniform16(prop_oneof![Just(NO_SLOT), 0..9u32]),
        u in proptest::array::uniform8(prop_oneof![0..4u64, any::<u64>()]),
        f in proptest::array::uniform12(prop_oneof![Just(0.0), any::<f64>()]),
        words in any::<(u32, u32, u32, u32)>(),
    ) {
        let operation = crate::Operation {
            struct_size: size_of::<crate::Operation>() as u32,
            code: OperationCode(code),
            label: Bytes { data: std::ptr::null(), len: 0 },
            input: crate::Quantization(words.0 % 3),
            hidden: crate::Quantization(words.1 % 3),
            accumulation: crate::Accumulation(words.2 % 4),
            reserved_flags: words.3 % 2,
            slots,
            u,
            f,
            reserved: [0; 4],
        };
        let list = crate::OperationList {
            struct_size: size_of::<crate::OperationList>() as u32,
            token_capacity: 1,
            slots: std::ptr::null(),
            slots_len: 0,
            operations: &raw const operation,
            operations_len: 1,
            reserved: [0; 4],
        };
        // SAFETY: one operation lies there.
        if let Ok(list) = unsafe { list_from_abi(&raw const list) } {
            let descriptor = ListDescriptor::new(&list).unwrap();
            let again = descriptor.as_abi();
            // SAFETY: the descriptor has one operation.
            let again = unsafe { &*again.operations };
            prop_assert_eq!((again.code, again.slots, again.u), (operation.code, slots, u));
        }
    }

    #[test]
    fn bindings_round_trip(
        tokens in any::<u32>(),
        buffers in vec(any::<(u32, u64, u64)>(), 0..5),
        spans in vec((any::<u32>(), 1..usize::MAX / 2, 0..1u64 << 40, any::<bool>()), 0..5),
        sequences in vec(any::<(u32, u32, u32, u32)>(), 0..4),
        ranges in vec((any::<u32>(), vec(any::<(u32, u32)>(), 0..5)), 0..4),
    ) {
        let mut slots: Vec<(SlotId, Bound)> = buffers
            .iter()
            .map(|(slot, buffer, offset)| {
                (SlotId(*slot), Bound::Buffer(BufferView { buffer: BufferId(*buffer), offset: *offset }))
            })
            .collect();
        for (slot, address, len, writable) in spans {
            // SAFETY: nothing uses the memory.
            let span = unsafe { HostSpan::new(std::ptr::without_provenance(address), len, writable) };
            slots.push((SlotId(slot), Bound::Host(span)));
        }
        let sequences: Vec<SequenceSpan> = sequences
            .into_iter()
            .map(|(first_token, tokens, past, cache_base)| SequenceSpan { first_token, tokens, past, cache_base })
            .collect();
        let owned: Vec<(u32, Vec<ClusterRange>)> = ranges
            .into_iter()
            .map(|(operation, ranges)| {
                (operation, ranges.into_iter().map(|(start, end)| ClusterRange::new(start, end)).collect())
            })
            .collect();
        let ranges: Vec<ActiveRanges<'_>> =
            owned.iter().map(|(operation, ranges)| ActiveRanges { operation: *operation, ranges }).collect();
        let bindings = Bindings { tokens, slots: &slots, sequences: &sequences, ranges: &ranges };
        let descriptor = BindingsDescriptor::new(&bindings);
        let abi = descriptor.as_abi();
        // SAFETY: the descriptor lives until the end of the test, and nothing uses the spans.
        let back = unsafe { BindingsOwned::from_abi(&raw const abi) }.unwrap();
        back.with(|back| {
            prop_assert_eq!(back.tokens, tokens);
            prop_assert_eq!(back.slots, slots.as_slice());
            prop_assert_eq!(back.sequences, sequences.as_slice());
            prop_assert_eq!(back.ranges, ranges.as_slice());
            Ok(())
        })?;
    }

    #[test]
    fn descriptions_round_trip(
        texts in vec(".*", 4),
        numbers in any::<(u64, u64)>(),
        shift in 0..40u32,
        flags in any::<(bool, bool)>(),
    ) {
        let device = engine_core::backend::DeviceDescription {
            name: texts[0].clone(),
            description: texts[1].clone(),
            tolerance: [ToleranceClass::Exact64, ToleranceClass::F32, ToleranceClass::F16][shift as usize % 3],
            memory_bytes: numbers.0,
            alignment: 1 << shift,
            imports_host_memory: flags.0,
            needs_constant_weights: flags.1,
            max_buffer_bytes: numbers.1,
            notes: texts[2..].to_vec(),
        };
        prop_assert_eq!(device_from_json(&device_to_json(&device)).unwrap(), device.clone());
        prop_assert_eq!(devices_from_json(&devices_to_json(&[device.clone(), device.clone()])).unwrap().len(), 2);
    }

    #[test]
    fn wild_text_is_no_description(text in ".*") {
        let _ = device_from_json(&text);
        let _ = tier_from_json(&text);
        let _ = info_from_json(&text);
        let _ = counters_from_json(&text);
        let _ = request_from_json(&text);
    }

    #[test]
    fn requests_round_trip(
        frequency in vec(0.0..=1.0f32, 0..20),
        floats in (0.0..1e12f64, 0.0..1.0f64, 0.0..1.0f64),
        threshold in number().prop_filter("finite", |x| x.is_finite()),
    ) {
        use engine_core::planner::{
            Budget, DeviceProfile, HardwareProfile, LayerProfile, ModelProfile, Part, SparsityKind,
            SparsityPolicy,
        };
        let model = ModelProfile {
            name: "m".into(),
            hash: "h".into(),
            embedding_bytes: u64::MAX,
            kv_bytes: 1,
            activation_bytes: 2,
            divided_bytes: 3,
            layers: vec![LayerProfile {
                attention_bytes: 3,
                neurons: 20,
                neuron_bytes: 4,
                zero_below: true,
                predictor_bytes: 0,
                frequency,
                calibrated: vec![
                    SparsityPolicy::Predictor { threshold },
                    SparsityPolicy::Bitplane { deviations: threshold, threshold },
                ],
                whole: true,
                block: 32,
            }],
        };
        let hardware = HardwareProfile {
            hash: "w".into(),
            devices: vec![DeviceProfile {
                name: "cpu".into(),
                memory_bytes: 5,
                bandwidth: floats.0,
                sync_seconds: floats.1,
                unsupported: vec!["x".into()],
                sparse: true,
                parts: vec![Part::Projections, Part::Ffn],
            }],
        };
        let budget = Budget {
            slowdown: floats.2,
            strict: true,
            sparsity: Some(SparsityKind::Predictor),
            hot: Some(floats.2),
            attention: Some("cpu".into()),
            prefill: None,
        };
        let json = request_to_json(&model, &hardware, &budget).unwrap();
        prop_assert_eq!(request_from_json(&json).unwrap(), (model, hardware, budget));
    }
}

#[test]
fn every_error_crosses_with_its_sentence() {
    for code in (1..=2).chain(4..=13).chain(30..=33) {
        let error = Error::from_code(code, "41".into());
        let mut detail = TextBuffer::new();
        // SAFETY: the buffer lives until it is read.
        let status = unsafe { report(Err(error.clone()), detail.sink()) };
        assert_eq!(check_status(status, detail), Err(error));
    }
    assert_eq!(check_status(Status::OK, TextBuffer::new()), Ok(()));
}

#[test]
fn wrong_pointers_are_errors() {
    let null = Bytes { data: std::ptr::null(), len: 3 };
    // SAFETY: null, empty, or bytes that live as long as the test.
    unsafe {
        assert!(text_from_abi(null, "x").is_err());
        assert_eq!(text_from_abi(Bytes { data: std::ptr::null(), len: 0 }, "x").unwrap(), "");
        assert!(text_from_abi(bytes_of(b"\xff"), "x").is_err());
        assert!(path_from_abi(bytes_of(b"")).is_err());
        assert!(path_from_abi(bytes_of(b"a\0b")).is_err());
        assert_eq!(path_from_abi(bytes_of(b"/\xff")).unwrap().as_os_str().len(), 2);
        assert!(slice::<u64>(std::ptr::without_provenance(4), 1, "x").is_err());
        assert!(slice::<u64>(std::ptr::without_provenance(8), usize::MAX, "x").is_err());
        assert!(list_from_abi(std::ptr::null()).is_err());
        assert!(BindingsOwned::from_abi(std::ptr::null()).is_err());
        write(Sink { context: std::ptr::null_mut(), write: None }, "nobody listens");
    }
    let mut buffer = TextBuffer::new();
    let sink = buffer.sink();
    let append = sink.write.unwrap();
    // SAFETY: the buffer lives.
    unsafe {
        append(sink.context, null);
        append(std::ptr::null_mut(), bytes_of(b"x"));
    }
    assert!(buffer.into_text().is_err());
}

#[test]
fn a_newer_meaning_is_refused() {
    let mut list = OperationList::new(1);
    let a = list.fixed("a", SlotRole::Input, TensorType::f32_vector(1));
    list.push("x", OperationKind::Copy { from: a, to: a }, Arithmetic::F32);
    let descriptor = ListDescriptor::new(&list).unwrap();
    let abi = descriptor.as_abi();
    let change = |change: &dyn Fn(&mut crate::Operation)| {
        // SAFETY: the descriptor has one operation.
        let mut operation = unsafe { *abi.operations };
        change(&mut operation);
        let abi = crate::OperationList { operations: &raw const operation, ..abi };
        // SAFETY: everything lives until the end of the call.
        unsafe { list_from_abi(&raw const abi) }.unwrap_err().to_string()
    };
    let newer = "parameters that this version of the interface does not know";
    assert!(change(&|op| op.u[7] = 1).contains(newer));
    assert!(change(&|op| op.f[0] = 1.0).contains(newer));
    assert!(change(&|op| op.slots[2] = 0).contains(newer));
    assert!(change(&|op| op.reserved[3] = 1).contains(newer));
    assert!(change(&|op| op.code = OperationCode(99)).contains("operation code 99 is not known"));
    assert!(change(&|op| op.struct_size = 8).contains("struct_size is 8"));
    assert!(change(&|op| op.slots[0] = NO_SLOT).contains("operand 0 is absent"));
}

#[test]
fn codes_of_both_crates_agree() {
    for dtype in DType::all() {
        assert_eq!(super::codes::dtype(crate::DType(dtype.code())).unwrap(), dtype);
    }
    for kind in engine_core::module::PluginKind::ALL {
        let known = [crate::Kind::COMPUTE, crate::Kind::STORAGE, crate::Kind::CACHE, crate::Kind::PLANNER];
        assert!(known.contains(&crate::Kind(kind.code())));
    }
    assert_eq!(crate::Kind::COMPUTE.0, engine_core::module::PluginKind::Compute.code());
    assert_eq!(crate::MAGIC.to_le_bytes(), *b"THERMOC1");
    assert_eq!(Status::UNKNOWN_FILE.0, Error::unknown(engine_core::HandleKind::File, 1).code());
    assert_eq!(
        crate::ROOT_MODULE_SYMBOL,
        abi_stable::library::ROOT_MODULE_LOADER_NAME,
        "abi_stable spells its symbol anew"
    );
}
