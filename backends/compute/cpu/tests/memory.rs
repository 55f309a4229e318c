//! What the device counts is what the process takes. A process of its own, in which nothing else runs.

#![allow(missing_docs)] // a test binary
#![allow(clippy::print_stdout, reason = "what was measured, for a person who reads the test's output")]

use engine_core::backend::{Bindings, Bound, BufferUse, BufferView, Counter, SequenceSpan};
use engine_core::error::FOREVER;
use engine_core::module::ComputeModule;
use engine_core::operation::*;
use engine_core::options::OptionTable;
use engine_core::{ComputeBackend, DType, Error, Reached, TensorType};
use thermocline_compute_cpu::CpuModule;

/// What a process takes besides: stacks of threads that get touched, the allocator's own, code that is paged in.
const BESIDES: u64 = 4 << 20;

/// Threads of the device.
const THREADS: u64 = 4;

/// Positions of the cache: every thread that attends keeps a score for each, 8 MiB in all.
const POSITIONS: u32 = 1 << 21;

/// A field of /proc/self/status, in bytes.
fn status(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}

fn counter(device: &dyn ComputeBackend, name: &str) -> u64 {
    device.counters().into_iter().find(|c: &Counter| c.name == name).unwrap().value
}

fn open(limit: u64) -> Box<dyn ComputeBackend> {
    let options = format!("threads = {THREADS}\npin = false\nmemory_limit = {limit}");
    CpuModule.open(0, &options.parse::<OptionTable>().unwrap()).unwrap()
}

/// A list with its bindings, all in the device's own memory, of which no page has been written.
struct Rig<'a> {
    device: &'a dyn ComputeBackend,
    list: OperationList,
    bound: Vec<(SlotId, Bound)>,
}

impl<'a> Rig<'a> {
    fn new(device: &'a dyn ComputeBackend, tokens: u32) -> Rig<'a> {
        Rig { device, list: OperationList::new(tokens), bound: Vec::new() }
    }

    fn bind(&mut self, slot: SlotId) -> SlotId {
        let bytes = self.list.slot(slot).unwrap().tensor.bytes();
        let buffer = self.device.allocate(bytes, BufferUse::Activations).unwrap();
        self.bound.push((slot, Bound::Buffer(BufferView { buffer, offset: 0 })));
        slot
    }

    fn per_token(&mut self, name: &str, role: SlotRole, columns: u64) -> SlotId {
        let slot = self.list.per_token(name, role, DType::F32, columns).unwrap();
        self.bind(slot)
    }

    fn weight(&mut self, name: &str, rows: u64, columns: u64) -> SlotId {
        let tensor = TensorType::matrix(DType::F16, rows, columns).unwrap();
        let buffer = self.device.allocate(tensor.bytes(), BufferUse::Weights).unwrap();
        self.list.fixed(name, SlotRole::Constant(BufferView { buffer, offset: 0 }), tensor)
    }

    /// Runs it once; answers what the process took at most since before it was prepared, and what was counted.
    fn run(&self, past: u32) -> (u64, u64) {
        let tokens = self.list.token_capacity;
        // Resets the peak; where that is not allowed, the peak so far is only a higher start.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        let (resident, counted) = (status("VmHWM"), counter(self.device, "bytes_allocated"));
        let executable = self.device.prepare(&self.list).unwrap();
        let sequences = [SequenceSpan { first_token: 0, tokens, past, cache_base: 0 }];
        let bindings = Bindings { tokens, slots: &self.bound, sequences: &sequences, ranges: &[] };
        let value = self.device.submit(executable, &bindings, &[]).unwrap();
        assert_eq!(self.device.wait(value, FOREVER), Ok(Reached::Done));
        let grown = status("VmHWM").saturating_sub(resident);
        let most = counter(self.device, "bytes_allocated_peak") - counted;
        self.device.release(executable).unwrap();
        assert_eq!(counter(self.device, "bytes_allocated"), counted, "given back");
        (grown, most)
    }
}

fn attention(device: &dyn ComputeBackend) -> Rig<'_> {
    let mut rig = Rig::new(device, 1);
    let query = rig.per_token("query", SlotRole::Input, 8 * 8);
    let output = rig.per_token("output", SlotRole::Output, 8 * 8);
    let cache = TensorType::matrix(DType::F16, POSITIONS.into(), 2 * 8).unwrap();
    let cache = rig.list.fixed("cache", SlotRole::State, cache);
    let cache = rig.bind(cache);
    let kind = OperationKind::Attention {
        query,
        cache,
        output,
        heads: 8,
        kv_heads: 1,
        head_dim: 8,
        scale: 1.0,
        window: None,
        soft_cap: None,
    };
    rig.list.push("attention", kind, Arithmetic::F32);
    rig
}

/// Gate and up of a whole batch, and a tile per thread.
fn feed_forward(device: &dyn ComputeBackend) -> Rig<'_> {
    let mut rig = Rig::new(device, 128);
    let (width, neurons) = (256, 16384);
    let (gate, up) = (rig.weight("gate", neurons, width), rig.weight("up", neurons, width));
    let down = rig.weight("down", width, neurons);
    let input = rig.per_token("input", SlotRole::Input, width);
    let output = rig.per_token("output", SlotRole::Output, width);
    let ffn = Ffn {
        input,
        gate: Some(gate),
        up,
        down,
        gate_low: None,
        up_low: None,
        gate_bias: None,
        up_bias: None,
        output,
        hidden: None,
        active_count: None,
        down_layout: DownLayout::OutputRows,
        function: Activation::Relu,
        up_function: Activation::Identity,
        selection: Selection::All,
        accumulate: false,
    };
    rig.list.push("ffn", OperationKind::Ffn(ffn), Arithmetic::F32);
    rig
}

/// One test, so that nothing else runs in the process meanwhile.
#[test]
fn what_is_counted_is_what_the_process_takes() {
    let device = open(1 << 30);
    for (name, (grown, counted)) in
        [("attention", attention(&*device).run(POSITIONS - 1)), ("ffn", feed_forward(&*device).run(0))]
    {
        println!("{name}: the process grew by {grown} bytes, {counted} are counted");
        assert!(
            grown <= counted + BESIDES,
            "{name}: the process grew by {grown} bytes, {counted} are counted"
        );
        assert!(grown >= counted / 8, "{name}: {counted} bytes are counted, the process took {grown}");
    }
    drop(device);

    // What threads keep is within the limit as well: a list that would exceed it is refused before it runs.
    let cache = u64::from(POSITIONS) * 32;
    let scores = THREADS * u64::from(POSITIONS) * 4;
    let device = open(cache + scores / 2);
    let rig = attention(&*device);
    let error = device.prepare(&rig.list).map(drop).unwrap_err();
    assert!(matches!(&error, Error::OutOfMemory { detail } if detail.contains("memory_limit")), "{error}");
    let enough = open(cache + scores + (1 << 20));
    attention(&*enough).run(POSITIONS - 1);
}
