//! Sparse feed-forward operators beside dense ones, by a given share of active neurons: `cargo bench -p compute-cpu
//! --bench sparse`.
//!
//! Weights come from memory: the operators of a case take turns on copies that together are four times the last-level
//! cache, where memory allows. What is active is drawn at random for each copy, which is harder than the runs of
//! neighbours that sorted neurons give. Besides criterion's report tables are printed, for which all shares were measured
//! in turns: by medians, by the shortest times, and by the time that the processors spent on it (Linux only), which is
//! what counts where others use the machine meanwhile. A filter that nothing matches leaves criterion's part out.
#![allow(clippy::print_stdout, reason = "a bench reports on standard output")]

use std::cell::Cell;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput};
use engine_core::backend::{Bindings, Bound, BufferId, BufferUse, BufferView, ExecutableId};
use engine_core::error::FOREVER;
use engine_core::module::ComputeModule;
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Ffn, OperationKind, OperationList, Place, Quantization, Selection,
    Slot, SlotId, SlotRole,
};
use engine_core::options::OptionTable;
use engine_core::{ComputeBackend, DType, HostMemory, TensorType};
use thermocline_compute_cpu::CpuModule;

/// Width, neurons, and whether there is a gate: without one the layer is two matrices of the shape, rows of which are
/// multiplied (up) and added (down).
const SHAPES: [(u64, u64, bool); 3] = [(4096, 4096, false), (4096, 14336, false), (4096, 14336, true)];
const TYPES: [DType; 3] = [DType::Q4_0, DType::Q8_0, DType::F16];
/// Percent of neurons that are active; none is the dense operator, which is given no mask.
const SHARES: [Option<u32>; 8] = [None, Some(100), Some(90), Some(50), Some(25), Some(10), Some(5), Some(2)];
/// What the median is of.
const ROUNDS: usize = 25;

/// An operator on one copy of its weights, with what is bound.
struct Prepared {
    executable: ExecutableId,
    slots: Vec<(SlotId, Bound)>,
}

/// One case: its copies, used in turns.
struct Case<'a> {
    backend: &'a dyn ComputeBackend,
    copies: Vec<Prepared>,
    next: &'a Cell<usize>,
}

impl Case<'_> {
    fn run(&self) {
        let at = self.next.get();
        self.next.set(at + 1);
        let Prepared { executable, slots } = &self.copies[at % self.copies.len()];
        let bindings = Bindings { tokens: 1, slots, ..Bindings::default() };
        let value = self.backend.submit(*executable, &bindings, &[]).expect("a submission");
        self.backend.wait(value, FOREVER).expect("a layer");
    }
}

impl Drop for Case<'_> {
    fn drop(&mut self) {
        for Prepared { executable, slots } in &self.copies {
            // Best effort: the bench goes on, and ends soon.
            let _ = self.backend.release(*executable);
            for (_, bound) in slots {
                if let Bound::Buffer(view) = bound {
                    let _ = self.backend.free(view.buffer);
                }
            }
        }
    }
}

/// Bytes of the last-level cache, as Linux tells them; 32 MiB where it does not.
fn last_level_cache() -> u64 {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size").unwrap_or_default();
    let kibibytes = text.trim().strip_suffix('K').and_then(|number| number.parse::<u64>().ok());
    kibibytes.map_or(32 << 20, |kibibytes| kibibytes << 10)
}

/// Bytes of memory that are free to be used; a fifth of them may go into copies.
fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap_or_default();
    let kibibytes = line.trim().trim_end_matches(" kB").parse::<u64>();
    kibibytes.map_or(4 << 30, |kibibytes| kibibytes << 10)
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Weights of any bytes, but for scales and values, which are small f16 numbers.
fn weights(dtype: DType, bytes: u64, random: &mut Random) -> HostMemory {
    let mut memory = HostMemory::allocate(bytes).expect("memory for the bench");
    for part in memory.bytes_mut().chunks_mut(8) {
        part.copy_from_slice(&random.next().to_le_bytes()[..part.len()]);
    }
    let step = if dtype == DType::F16 { 2 } else { dtype.block_bytes() as usize };
    for block in memory.bytes_mut().chunks_mut(step) {
        block[1] = 0x20 | (block[1] & 3);
    }
    memory
}

/// Copies bytes into a buffer of the device.
fn fill(backend: &dyn ComputeBackend, buffer: BufferId, memory: &mut HostMemory) {
    let mut list = OperationList::new(1);
    let tensor = TensorType::matrix(DType::U8, 1, memory.len()).expect("bytes");
    let (name, role) = ("bytes on the host".to_owned(), SlotRole::Input);
    let from = list.add_slot(Slot { name, role, place: Place::Host, tensor, per_token: false });
    let to = list.fixed("bytes", SlotRole::Output, tensor);
    list.push("copy", OperationKind::Copy { from, to }, Arithmetic::F32);
    let executable = backend.prepare(&list).expect("a copy");
    // SAFETY: the memory lives, and nobody else uses it, until the copy was waited for.
    let span = unsafe { memory.span() };
    let slots = [(from, Bound::Host(span)), (to, Bound::Buffer(BufferView { buffer, offset: 0 }))];
    let bindings = Bindings { tokens: 1, slots: &slots, ..Bindings::default() };
    let value = backend.submit(executable, &bindings, &[]).expect("a submission");
    backend.wait(value, FOREVER).expect("a copy");
    backend.release(executable).expect("an executable");
}

/// A buffer with these bytes.
fn filled(backend: &dyn ComputeBackend, bytes: &[u8]) -> BufferView {
    let mut memory = HostMemory::allocate(bytes.len() as u64).expect("memory for the bench");
    memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    let buffer = backend.allocate(memory.len(), BufferUse::Activations).expect("memory for the bench");
    fill(backend, buffer, &mut memory);
    BufferView { buffer, offset: 0 }
}

/// One copy of a layer's weights, in the device's own memory.
fn layer_weights(backend: &dyn ComputeBackend, tensor: TensorType, count: u64, seed: u64) -> Vec<BufferView> {
    let mut random = Random(seed);
    let view = |_| {
        let buffer = backend.allocate(tensor.bytes(), BufferUse::Weights).expect("memory for the bench");
        fill(backend, buffer, &mut weights(tensor.dtype, tensor.bytes(), &mut random));
        BufferView { buffer, offset: 0 }
    };
    (0..count).map(view).collect()
}

/// As many neurons as asked for, a byte each: the first of a shuffled list.
fn drawn(neurons: usize, percent: u32, random: &mut Random) -> Vec<u8> {
    let mut order: Vec<usize> = (0..neurons).collect();
    for last in (1..neurons).rev() {
        order.swap(last, (random.next() % (last as u64 + 1)) as usize);
    }
    let mut mask = vec![0; neurons];
    order[..neurons * percent as usize / 100].iter().for_each(|&neuron| mask[neuron] = 1);
    mask
}

/// The operator on one copy; `active` of its neurons take part, or all without a mask.
fn prepare(
    backend: &dyn ComputeBackend,
    (width, neurons): (u64, u64),
    (tensor, views): (TensorType, &[BufferView]),
    active: Option<u32>,
    random: &mut Random,
) -> Prepared {
    let mut list = OperationList::new(1);
    let mut bound = Vec::new();
    let mut constants: Vec<SlotId> =
        views.iter().map(|view| list.fixed("weight", SlotRole::Constant(*view), tensor)).collect();
    let mut row = |list: &mut OperationList, name: &str, role, dtype: DType, bytes: &[u8]| {
        let slot =
            list.per_token(name, role, dtype, bytes.len() as u64 / dtype.block_bytes()).expect("a row");
        bound.push((slot, Bound::Buffer(filled(backend, bytes))));
        slot
    };
    let values: Vec<u8> = (0..width).flat_map(|i| ((i % 17) as f32 - 8.0).to_le_bytes()).collect();
    let input = row(&mut list, "input", SlotRole::Input, DType::F32, &values);
    let output = row(&mut list, "output", SlotRole::Output, DType::F32, &values);
    let selection = match active {
        None => Selection::All,
        Some(percent) => {
            let mask = drawn(neurons as usize, percent, random);
            Selection::Mask(row(&mut list, "mask", SlotRole::Input, DType::U8, &mask))
        }
    };
    let down = constants.pop().expect("a layer has a down matrix");
    let up = constants.pop().expect("a layer has an up matrix");
    let quantised = if tensor.dtype.is_quantised() { Quantization::Int8Blocks } else { Quantization::None };
    let ffn = Ffn {
        input,
        gate: constants.pop(),
        up,
        down,
        gate_low: None,
        up_low: None,
        gate_bias: None,
        up_bias: None,
        output,
        hidden: None,
        active_count: None,
        down_layout: DownLayout::NeuronRows,
        function: Activation::Identity,
        up_function: Activation::Identity,
        selection,
        accumulate: false,
    };
    list.push("ffn", OperationKind::Ffn(ffn), Arithmetic { input: quantised, ..Arithmetic::F32 });
    let executable = backend.prepare(&list).expect("a supported layer");
    Prepared { executable, slots: bound }
}

/// Seconds that processors spent on this process' threads so far, in Linux; 0 elsewhere.
fn processor_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanoseconds = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    };
    tasks.filter_map(nanoseconds).sum::<u64>() as f64 / 1e9
}

/// The middle and the shortest of times, and the middle of processor times.
fn condensed(mut times: Vec<f64>, mut processor: Vec<f64>) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    processor.sort_by(f64::total_cmp);
    [times[times.len() / 2], times[0], processor[processor.len() / 2]]
}

/// Microseconds of each case, in turns: [`condensed`].
fn interleaved(cases: &[Case<'_>], bytes: u64) -> Vec<[f64; 3]> {
    // Enough runs per turn for a clock, at about 10 GB/s.
    let runs = (20_000_000 / bytes).max(1) as u32;
    let mut times = vec![(Vec::new(), Vec::new()); cases.len()];
    for round in 0..=ROUNDS {
        for (case, (times, processor)) in cases.iter().zip(&mut times) {
            let (started, spent) = (Instant::now(), processor_seconds());
            (0..runs).for_each(|_| case.run());
            let (time, spent) = (started.elapsed().as_secs_f64(), processor_seconds() - spent);
            if round > 0 {
                times.push(time * 1e6 / f64::from(runs));
                processor.push(spent * 1e6 / f64::from(runs));
            }
        }
    }
    times.into_iter().map(|(times, processor)| condensed(times, processor)).collect()
}

fn main() {
    let mut c = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let backend = CpuModule.open(0, &OptionTable::new()).expect("the cpu");
    let wanted = 4 * last_level_cache();
    let budget = wanted.min(available_memory() / 5);
    println!(
        "{}: {:?}; last-level cache {} MiB, {} MiB of weights in turns",
        backend.describe().description,
        backend.describe().notes,
        last_level_cache() >> 20,
        budget >> 20
    );
    let mut tables = [String::new(), String::new(), String::new()];
    for (width, neurons, gated) in SHAPES {
        for dtype in TYPES {
            let tensor = TensorType::matrix(dtype, neurons, width).expect("a shape of whole blocks");
            let matrices = if gated { 3 } else { 2 };
            let bytes = tensor.bytes() * matrices;
            let copies = budget.div_ceil(bytes).max(2);
            let views: Vec<Vec<BufferView>> =
                (0..copies).map(|copy| layer_weights(&*backend, tensor, matrices, copy)).collect();
            let next = Cell::new(0);
            let mut random = Random(7);
            let cases: Vec<Case<'_>> = SHARES
                .iter()
                .map(|active| Case {
                    backend: &*backend,
                    copies: views
                        .iter()
                        .map(|views| {
                            prepare(&*backend, (width, neurons), (tensor, views), *active, &mut random)
                        })
                        .collect(),
                    next: &next,
                })
                .collect();
            let name = format!("{dtype} {width}x{neurons}{}", if gated { " ffn" } else { "" });
            let mut group = c.benchmark_group(&name);
            for (case, active) in cases.iter().zip(SHARES) {
                group.throughput(Throughput::Bytes(bytes * u64::from(active.unwrap_or(100)) / 100));
                let label = active.map_or("dense".to_owned(), |active| format!("{active}%"));
                group.bench_function(label, |b| b.iter(|| case.run()));
            }
            group.finish();
            let times = interleaved(&cases, bytes);
            for (which, table) in tables.iter_mut().enumerate() {
                let dense = times[0][which];
                let ratios: Vec<String> =
                    times[1..].iter().map(|time| format!("{:.2}", dense / time[which])).collect();
                let speed = bytes as f64 / dense / 1e3;
                let row = format!("| {name} | {dense:.0} ({speed:.1} GB/s) | {} |\n", ratios.join(" | "));
                table.push_str(&row);
            }
            drop(cases);
            for view in views.into_iter().flatten() {
                backend.free(view.buffer).expect("a buffer");
            }
        }
    }
    let shares: Vec<String> = SHARES.iter().flatten().map(|share| format!("{share}%")).collect();
    for (what, table) in ["medians", "shortest times", "processor time"].iter().zip(tables) {
        println!(
            "\nDense in microseconds; then how many times as fast with so many neurons active, by {what}.\n"
        );
        println!("| layer | dense | {} |\n|---|---|{}", shares.join(" | "), "---|".repeat(shares.len()));
        print!("{table}");
    }
    c.final_summary();
}
