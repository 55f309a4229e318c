//! The device through its trait: what the schedule, the sparse layers and the handles promise.

use engine_core::backend::{
    ActiveRanges, Bindings, Bound, BufferId, BufferUse, BufferView, SequenceSpan, TimelineValue,
};
use engine_core::error::FOREVER;
use engine_core::module::ComputeModule;
use engine_core::operation::*;
use engine_core::options::OptionTable;
use engine_core::{
    ClusterRange, ComputeBackend, DType, Error, HandleKind, HostMemory, Reached, Result, TensorType,
};

use crate::CpuModule;

mod experts;
mod handles;

fn open(options: &str) -> Box<dyn ComputeBackend> {
    CpuModule.open(0, &options.parse::<OptionTable>().unwrap()).unwrap()
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    fn f32(&mut self) -> f32 {
        (self.next() as f64 / f64::from(1u32 << 30) - 1.0) as f32
    }
    /// Rows of a type, small and finite.
    fn rows(&mut self, dtype: DType, rows: usize, columns: usize) -> Vec<u8> {
        let bytes = dtype.row_bytes(columns as u64).unwrap() as usize * rows;
        let mut out = Vec::with_capacity(bytes);
        while out.len() < bytes {
            match dtype {
                DType::F32 => out.extend(self.f32().to_le_bytes()),
                DType::F16 => out.extend(half::f16::from_f32(self.f32()).to_le_bytes()),
                _ => {
                    out.extend(half::f16::from_f32(self.f32() / 64.0).to_le_bytes());
                    out.extend((2..dtype.block_bytes()).map(|_| self.next() as u8));
                }
            }
        }
        out
    }
}

/// A list on a device, with host memory imported for every slot that is bound.
struct Rig<'a> {
    backend: &'a dyn ComputeBackend,
    list: OperationList,
    memory: Vec<(SlotId, HostMemory, BufferId)>,
}

impl<'a> Rig<'a> {
    fn new(backend: &'a dyn ComputeBackend, tokens: u32) -> Rig<'a> {
        Rig { backend, list: OperationList::new(tokens), memory: Vec::new() }
    }

    fn buffer(&self, bytes: &[u8]) -> (HostMemory, BufferId) {
        let mut memory = HostMemory::allocate(bytes.len() as u64).unwrap();
        memory.write(0, bytes).unwrap();
        // SAFETY: the memory lives in the rig and is read only between submissions.
        let id = self.backend.import(unsafe { memory.span() }).unwrap();
        (memory, id)
    }

    fn constant(&mut self, name: &str, dtype: DType, rows: usize, columns: usize, bytes: &[u8]) -> SlotId {
        let (memory, buffer) = self.buffer(bytes);
        let tensor = TensorType::matrix(dtype, rows as u64, columns as u64).unwrap();
        let slot = self.list.fixed(name, SlotRole::Constant(BufferView { buffer, offset: 0 }), tensor);
        self.memory.push((slot, memory, buffer));
        slot
    }

    fn vector(&mut self, name: &str, values: &[f32]) -> SlotId {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.constant(name, DType::F32, 1, values.len(), &bytes)
    }

    fn per_token(&mut self, name: &str, role: SlotRole, dtype: DType, columns: usize) -> SlotId {
        let slot = self.list.per_token(name, role, dtype, columns as u64).unwrap();
        if role != SlotRole::Scratch {
            let bytes = vec![0xffu8; self.list.slots[slot.0 as usize].tensor.bytes() as usize];
            let (memory, buffer) = self.buffer(&bytes);
            self.memory.push((slot, memory, buffer));
        }
        slot
    }

    fn state(&mut self, name: &str, dtype: DType, rows: usize, columns: usize) -> SlotId {
        let tensor = TensorType::matrix(dtype, rows as u64, columns as u64).unwrap();
        let slot = self.list.fixed(name, SlotRole::State, tensor);
        let (memory, buffer) = self.buffer(&vec![0xffu8; tensor.bytes() as usize]);
        self.memory.push((slot, memory, buffer));
        slot
    }

    fn set<T: engine_core::host::Plain>(&mut self, slot: SlotId, values: &[T]) {
        self.memory.iter_mut().find(|m| m.0 == slot).unwrap().1.write(0, values).unwrap();
    }

    fn get(&self, slot: SlotId, n: usize) -> Vec<f32> {
        let mut out = vec![0.0f32; n];
        self.memory.iter().find(|m| m.0 == slot).unwrap().1.read(0, &mut out).unwrap();
        out
    }

    fn bindings(&self) -> Vec<(SlotId, Bound)> {
        let bound = |m: &&(SlotId, HostMemory, BufferId)| {
            !matches!(self.list.slots[m.0.0 as usize].role, SlotRole::Constant(_))
        };
        let view = |buffer| Bound::Buffer(BufferView { buffer, offset: 0 });
        self.memory.iter().filter(bound).map(|m| (m.0, view(m.2))).collect()
    }

    fn run(&self, tokens: u32, past: u32, ranges: &[ActiveRanges<'_>]) -> Result<()> {
        let executable = self.backend.prepare(&self.list)?;
        let slots = self.bindings();
        let sequences = [SequenceSpan { first_token: 0, tokens, past, cache_base: 0 }];
        let bindings = Bindings { tokens, slots: &slots, sequences: &sequences, ranges };
        let value = self.backend.submit(executable, &bindings, &[])?;
        let result = self.backend.wait(value, FOREVER);
        self.backend.release(executable)?;
        assert_eq!(result?, Reached::Done);
        Ok(())
    }
}

const FORMATS: [DType; 4] = [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0];
const WIDTH: usize = 96;
const NEURONS: usize = 160;

struct Layer {
    format: DType,
    layout: DownLayout,
    arithmetic: Arithmetic,
    selection: Selection,
    gate: bool,
    accumulate: bool,
    seed: u64,
}

/// Runs a layer; `poison` destroys the rows of the neurons that it is true for, after the weights were drawn.
fn layer(
    backend: &dyn ComputeBackend,
    what: &Layer,
    tokens: u32,
    ranges: Option<&[ClusterRange]>,
    mask: Option<&[u8]>,
    poison: impl Fn(usize) -> bool,
) -> (Vec<f32>, Vec<f32>) {
    let mut random = Random(what.seed);
    let mut rig = Rig::new(backend, 9);
    let input = rig.per_token("input", SlotRole::Input, DType::F32, WIDTH);
    let mut weight = |rig: &mut Rig<'_>, name: &str, rows: usize, columns: usize, by_neuron: bool| {
        let mut bytes = random.rows(what.format, rows, columns);
        let row = bytes.len() / rows;
        for i in (0..NEURONS).filter(|i| poison(*i)) {
            if by_neuron {
                bytes[i * row..(i + 1) * row].fill(0xff);
            } else if !what.format.is_quantised() {
                let size = row / columns;
                for r in 0..rows {
                    bytes[r * row + i * size..][..size].fill(0xff);
                }
            }
        }
        rig.constant(name, what.format, rows, columns, &bytes)
    };
    let up = weight(&mut rig, "up", NEURONS, WIDTH, true);
    let gate = weight(&mut rig, "gate", NEURONS, WIDTH, true);
    let down = match what.layout {
        DownLayout::OutputRows => weight(&mut rig, "down", WIDTH, NEURONS, false),
        DownLayout::NeuronRows => weight(&mut rig, "down", NEURONS, WIDTH, true),
    };
    let bias: Vec<f32> = (0..NEURONS).map(|_| random.f32() / 8.0).collect();
    let bias = rig.vector("bias", &bias);
    let output = rig.per_token(
        "output",
        if what.accumulate { SlotRole::State } else { SlotRole::Output },
        DType::F32,
        WIDTH,
    );
    let hidden = rig.per_token("hidden", SlotRole::Output, DType::F32, NEURONS);
    let selection = match (what.selection, mask) {
        (_, Some(mask)) => {
            let slot = rig.per_token("mask", SlotRole::Input, DType::U8, NEURONS);
            rig.set(slot, mask);
            Selection::Mask(slot)
        }
        (selection, None) => selection,
    };
    let values: Vec<f32> = (0..9 * WIDTH).map(|_| random.f32()).collect();
    rig.set(input, &values);
    let before: Vec<f32> = (0..9 * WIDTH).map(|_| random.f32()).collect();
    rig.set(output, &before);
    rig.list.push(
        "layer",
        OperationKind::Ffn(Ffn {
            input,
            gate: what.gate.then_some(gate),
            up,
            down,
            gate_low: None,
            up_low: None,
            gate_bias: what.gate.then_some(bias),
            up_bias: None,
            output,
            hidden: Some(hidden),
            active_count: None,
            down_layout: what.layout,
            function: Activation::Relu,
            up_function: Activation::Identity,
            selection,
            accumulate: what.accumulate,
        }),
        what.arithmetic,
    );
    assert!(backend.supports(&rig.list, 0).is_yes());
    let active = ranges.map(|ranges| [ActiveRanges { operation: 0, ranges }]);
    rig.run(tokens, 0, active.as_ref().map_or(&[], |a| a.as_slice())).unwrap();
    (rig.get(output, tokens as usize * WIDTH), rig.get(hidden, tokens as usize * NEURONS))
}

/// -0 equals +0, NaN equals nothing.
#[track_caller]
fn same(a: &[f32], b: &[f32], what: &str) {
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(a == b, "{what}: element {i} is {a} and {b}");
    }
}

fn layers() -> impl Iterator<Item = Layer> {
    let mut seed = 0;
    FORMATS.into_iter().flat_map(move |format| {
        [DownLayout::OutputRows, DownLayout::NeuronRows].into_iter().flat_map(move |layout| {
            [false, true].into_iter().flat_map(move |accumulate| {
                [false, true].into_iter().map(move |gate| {
                    seed += 1;
                    let arithmetic = Arithmetic { hidden: Quantization::None, ..Arithmetic::F32 };
                    Layer { format, layout, arithmetic, selection: Selection::All, gate, accumulate, seed }
                })
            })
        })
    })
}

#[test]
fn gate_first_equals_dense_for_any_threads_and_batch() {
    let devices: Vec<_> =
        ["threads = 1", "threads = 2\npin = false", "threads = 3\nfeatures = 'portable'"].map(open).into();
    for mut what in layers() {
        for input in [Quantization::None, Quantization::Int8Blocks] {
            what.arithmetic.input = input;
            what.selection = Selection::All;
            let name = format!("{} {:?} gate {} {input:?}", what.format, what.layout, what.gate);
            let (want, hidden) = layer(&*devices[0], &what, 9, None, None, |_| false);
            assert!(hidden.contains(&0.0) && hidden.iter().any(|h| *h != 0.0));
            let (again, _) = layer(&*devices[1], &what, 9, None, None, |_| false);
            same(&want, &again, &format!("{name}: threads"));
            what.selection = Selection::GateFirst;
            for device in &devices[..2] {
                for tokens in [1, 2, 9] {
                    let (got, h) = layer(&**device, &what, tokens, None, None, |_| false);
                    same(&got, &want, &format!("{name}: {tokens} tokens"));
                    same(&h, &hidden, &format!("{name}: hidden"));
                }
            }
            what.selection = Selection::All;
            let (portable, _) = layer(&*devices[2], &what, 9, None, None, |_| false);
            what.selection = Selection::GateFirst;
            let (sparse, _) = layer(&*devices[2], &what, 9, None, None, |_| false);
            same(&portable, &sparse, &format!("{name}: portable"));
            if input == Quantization::None {
                let largest = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                for (a, b) in want.iter().zip(&portable) {
                    assert!((a - b).abs() <= 1e-5 * largest, "{name}: tiers differ: {a} {b}");
                }
            }
        }
    }
}

#[test]
fn what_takes_no_part_is_never_read() {
    let device = open("threads = 2\npin = false");
    let ranges = [ClusterRange::new(3, 40), ClusterRange::new(41, 64), ClusterRange::new(100, 131)];
    let inside = |i: usize| ranges.iter().any(|r| (r.start as usize..r.end as usize).contains(&i));
    let mask: Vec<u8> = (0..9 * NEURONS).map(|i| u8::from((i % NEURONS * 7) % 5 < 2)).collect();
    for mut what in layers() {
        for tokens in [1, 5] {
            for arithmetic in [Arithmetic::F32, Arithmetic::INT8] {
                what.arithmetic = arithmetic;
                for selection in [Selection::All, Selection::GateFirst, Selection::Threshold(0.2)] {
                    what.selection = selection;
                    let clean = layer(&*device, &what, tokens, Some(&ranges), None, |_| false);
                    let poisoned = layer(&*device, &what, tokens, Some(&ranges), None, |i| !inside(i));
                    same(&clean.0, &poisoned.0, "output");
                    same(&clean.1, &poisoned.1, "hidden");
                }
                let selected = |i: usize| inside(i) && mask[i] != 0;
                let clean = layer(&*device, &what, tokens, Some(&ranges), Some(&mask), |_| false);
                let poisoned = layer(&*device, &what, tokens, Some(&ranges), Some(&mask), |i| !selected(i));
                same(&clean.0, &poisoned.0, "masked output");
                assert!(clean.1.iter().enumerate().all(|(i, h)| *h == 0.0 || selected(i % NEURONS)));
            }
        }
    }
}

#[test]
fn tokens_do_not_poison_each_other() {
    let device = open("threads = 2\npin = false");
    // Token 0 takes neuron 4, whose rows are NaN; the others do not.
    let mut mask = vec![1u8; 9 * NEURONS];
    for t in 1..9 {
        mask[t * NEURONS + 4] = 0;
    }
    for what in layers().filter(|w| !w.format.is_quantised() || w.layout == DownLayout::NeuronRows) {
        let clean = layer(&*device, &what, 5, None, Some(&mask), |_| false);
        let poisoned = layer(&*device, &what, 5, None, Some(&mask), |i| i == 4);
        same(&clean.0[WIDTH..], &poisoned.0[WIDTH..], "neighbours");
        assert!(poisoned.0[..WIDTH].iter().all(|x| x.is_nan()));
    }
}

/// A whole block of a model: norm, attention with a KV cache, feed-forward.
fn block(backend: &dyn ComputeBackend, steps: &[u32], arithmetic: Arithmetic, format: DType) -> Vec<f32> {
    const HEADS: usize = 4;
    const KV: usize = 2;
    const DIM: usize = 24;
    let total: u32 = steps.iter().sum();
    let mut random = Random(5);
    let mut rig = Rig::new(backend, *steps.iter().max().unwrap());
    let x = rig.per_token("x", SlotRole::State, DType::F32, WIDTH);
    let normed = rig.per_token("normed", SlotRole::Scratch, DType::F32, WIDTH);
    let q = rig.per_token("q", SlotRole::Scratch, DType::F32, HEADS * DIM);
    let k = rig.per_token("k", SlotRole::Scratch, DType::F32, KV * DIM);
    let v = rig.per_token("v", SlotRole::Scratch, DType::F32, KV * DIM);
    let mixed = rig.per_token("mixed", SlotRole::Scratch, DType::F32, HEADS * DIM);
    let cache = rig.state("cache", DType::F16, total as usize, 2 * KV * DIM);
    let ones = rig.vector("norm", &[1.0; WIDTH]);
    let mut weight = |rig: &mut Rig<'_>, rows: usize, columns: usize| {
        let bytes = random.rows(format, rows, columns);
        rig.constant("weight", format, rows, columns, &bytes)
    };
    let (wq, wk) = (weight(&mut rig, HEADS * DIM, WIDTH), weight(&mut rig, KV * DIM, WIDTH));
    let (wv, wo) = (weight(&mut rig, KV * DIM, WIDTH), weight(&mut rig, WIDTH, HEADS * DIM));
    let (up, down) = (weight(&mut rig, NEURONS, WIDTH), weight(&mut rig, WIDTH, NEURONS));
    let norm = |input, output| OperationKind::Norm {
        norm: NormKind::Rms,
        epsilon: 1e-5,
        input,
        weight: ones,
        bias: None,
        output,
    };
    let linear = |input, weight, output, accumulate| OperationKind::Linear {
        input,
        weight,
        bias: None,
        output,
        accumulate,
    };
    let rope = |slot| {
        OperationKind::Rope(Rope {
            input: slot,
            output: slot,
            factors: None,
            style: RopeStyle::Halves,
            head_dim: DIM as u32,
            rotary_dim: 16,
            base: 10000.0,
            scaling: RopeScaling::None,
        })
    };
    let attention = OperationKind::Attention {
        query: q,
        cache,
        output: mixed,
        heads: HEADS as u32,
        kv_heads: KV as u32,
        head_dim: DIM as u32,
        scale: 0.2,
        window: Some(7),
        soft_cap: None,
    };
    let ffn = OperationKind::Ffn(Ffn {
        input: normed,
        gate: None,
        up,
        down,
        gate_low: None,
        up_low: None,
        gate_bias: None,
        up_bias: None,
        output: x,
        hidden: None,
        active_count: None,
        down_layout: DownLayout::OutputRows,
        function: Activation::Silu,
        up_function: Activation::Identity,
        selection: Selection::All,
        accumulate: true,
    });
    for kind in [
        norm(x, normed),
        linear(normed, wq, q, false),
        linear(normed, wk, k, false),
        linear(normed, wv, v, false),
        rope(q),
        rope(k),
        OperationKind::KvAppend { key: k, value: v, cache, kv_heads: KV as u32, head_dim: DIM as u32 },
        attention,
        linear(mixed, wo, x, true),
        norm(x, normed),
        ffn,
    ] {
        rig.list.push("step", kind, arithmetic);
    }
    let input: Vec<f32> = (0..total as usize * WIDTH).map(|_| random.f32()).collect();
    let mut out = Vec::new();
    let mut past = 0;
    for &tokens in steps {
        let start = past as usize * WIDTH;
        rig.set(x, &input[start..start + tokens as usize * WIDTH]);
        rig.run(tokens, past, &[]).unwrap();
        out.extend(rig.get(x, tokens as usize * WIDTH));
        past += tokens;
    }
    out
}

#[test]
fn prefill_equals_decode_bit_for_bit() {
    for format in FORMATS {
        for arithmetic in [Arithmetic::F32, Arithmetic::INT8] {
            let want = block(&*open("threads = 1"), &[13], arithmetic, format);
            assert!(want.iter().all(|x| x.is_finite()));
            for options in ["threads = 1", "threads = 2\npin = false", "threads = 5\npin = false"] {
                let device = open(options);
                for steps in [&[13][..], &[1; 13], &[6, 1, 1, 5]] {
                    let got = block(&*device, steps, arithmetic, format);
                    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&want), bits(&got), "{format} {arithmetic:?} {options} {steps:?}");
                }
            }
        }
    }
}
