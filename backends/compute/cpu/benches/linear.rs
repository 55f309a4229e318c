//! Products through the device's own trait: decode and prefill, per weight type, beside a plain read of memory.
//!
//! `cargo bench -p compute-cpu` prints, besides criterion's report, bytes or multiply-adds per second: a decode product
//! is as good as its share of the plain read.
#![allow(clippy::print_stdout, reason = "a bench reports on standard output")]

use std::hint::black_box;

use criterion::{Criterion, Throughput};
use engine_core::backend::{Bindings, Bound, BufferUse, BufferView};
use engine_core::error::FOREVER;
use engine_core::module::ComputeModule;
use engine_core::operation::{Arithmetic, OperationKind, OperationList, SlotRole};
use engine_core::options::OptionTable;
use engine_core::{ComputeBackend, DType, TensorType};
use thermocline_compute_cpu::CpuModule;

/// Rows and columns of a large layer, so that weights come from memory: 128 to 512 MiB by type.
const SHAPE: (u64, u64) = (1 << 15, 1 << 12);

fn product(
    backend: &dyn ComputeBackend,
    shape: (u64, u64),
    dtype: DType,
    tokens: u32,
    arithmetic: Arithmetic,
) -> impl FnMut() {
    let tensor = TensorType::matrix(dtype, shape.0, shape.1).expect("a shape of whole blocks");
    let allocate = |bytes| backend.allocate(bytes, BufferUse::Weights).expect("memory for the bench");
    let buffer = allocate(tensor.bytes());
    let mut list = OperationList::new(tokens);
    let weight = list.fixed("weight", SlotRole::Constant(BufferView { buffer, offset: 0 }), tensor);
    let input = list.per_token("input", SlotRole::Input, DType::F32, shape.1).expect("a row of f32");
    let output = list.per_token("output", SlotRole::Output, DType::F32, shape.0).expect("a row of f32");
    let kind = OperationKind::Linear { input, weight, bias: None, output, accumulate: false };
    list.push("linear", kind, arithmetic);
    let executable = backend.prepare(&list).expect("a supported product");
    let place = |bytes| Bound::Buffer(BufferView { buffer: allocate(bytes), offset: 0 });
    let tokens64 = u64::from(tokens);
    let slots = [(input, place(tokens64 * shape.1 * 4)), (output, place(tokens64 * shape.0 * 4))];
    move || {
        let bindings = Bindings { tokens, slots: &slots, ..Bindings::default() };
        let value = backend.submit(executable, &bindings, &[]).expect("a submission");
        backend.wait(value, FOREVER).expect("a product");
    }
}

fn plain_read(c: &mut Criterion, threads: usize) {
    let data = vec![1u64; 1 << 25];
    let mut group = c.benchmark_group("plain-read");
    group.throughput(Throughput::Bytes(data.len() as u64 * 8));
    group.bench_function(format!("{threads} threads"), |b| {
        b.iter(|| {
            std::thread::scope(|scope| {
                for part in data.chunks(data.len().div_ceil(threads)) {
                    scope.spawn(move || black_box(part.iter().fold(0u64, |a, b| a ^ b)));
                }
            });
        });
    });
    group.finish();
}

fn main() {
    let mut c = Criterion::default().sample_size(10).configure_from_args();
    let backend = CpuModule.open(0, &OptionTable::new()).expect("the cpu");
    println!("{}: {:?}", backend.describe().description, backend.describe().notes);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    plain_read(&mut c, threads);
    let int8 = |dtype: DType| if dtype.is_quantised() { Arithmetic::INT8 } else { Arithmetic::F32 };
    let mut group = c.benchmark_group("decode");
    for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0] {
        let bytes = dtype.row_bytes(SHAPE.1).unwrap_or(0) * SHAPE.0;
        group.throughput(Throughput::Bytes(bytes));
        let mut run = product(&*backend, SHAPE, dtype, 1, int8(dtype));
        group.bench_function(format!("{dtype}"), |b| b.iter(&mut run));
        if dtype.is_quantised() {
            let mut run = product(&*backend, SHAPE, dtype, 1, Arithmetic::F32);
            group.bench_function(format!("{dtype} with f32 activations"), |b| b.iter(&mut run));
        }
    }
    group.finish();
    let mut group = c.benchmark_group("prefill-512");
    // The shapes of a 135M model's feed-forward layer: elements are multiply-adds.
    for shape in [(1536, 576), (576, 1536)] {
        for dtype in [DType::F32, DType::F16, DType::Q8_0, DType::Q4_0] {
            group.throughput(Throughput::Elements(shape.0 * shape.1 * 512));
            let mut run = product(&*backend, shape, dtype, 512, int8(dtype));
            group.bench_function(format!("{dtype} {}x{}", shape.0, shape.1), |b| b.iter(&mut run));
        }
    }
    group.finish();
    c.final_summary();
}
