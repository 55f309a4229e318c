//! Bandwidth of a matrix-vector product on a Vulkan device beside that of a copy on it, in one run.
//!
//! `gemv [KEY=VALUE]...`: `rows` (4096), `columns` (14336), `mib` of weights that are rotated over (1024), `passes` (8) per
//! submission, `rounds` (5), `arithmetic` (f32 or int8), and every option of the plug-in (`device`, `library`, ...).

use std::process::ExitCode;
use std::time::Instant;

use engine_core::backend::{Bindings, Bound, BufferId, BufferUse, BufferView};
use engine_core::error::FOREVER;
use engine_core::module::ComputeModule;
use engine_core::operation::{Arithmetic, OperationKind, OperationList, Place, Slot, SlotId, SlotRole};
use engine_core::options::OptionTable;
use engine_core::{ComputeBackend, DType, Error, HostMemory, Reached, Result, TensorType};
use half::f16;
use thermocline_compute_vulkan::VulkanModule;

/// What is measured.
struct Plan {
    rows: u64,
    columns: u64,
    mib: u64,
    passes: u64,
    rounds: u64,
    arithmetic: Arithmetic,
    options: OptionTable,
}

impl Plan {
    fn from_arguments() -> Result<Plan> {
        let mut plan = Plan {
            rows: 4096,
            columns: 14336,
            mib: 1024,
            passes: 8,
            rounds: 5,
            arithmetic: Arithmetic::F32,
            options: OptionTable::new(),
        };
        for argument in std::env::args().skip(1) {
            let wrong = || Error::config(format!("`{argument}` is no KEY=VALUE with a value that fits"));
            let (key, value) = argument.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse::<u64>().ok().filter(|n| *n > 0).ok_or_else(wrong);
            match key {
                "rows" => plan.rows = number()?,
                "columns" => plan.columns = number()?,
                "mib" => plan.mib = number()?,
                "passes" => plan.passes = number()?,
                "rounds" => plan.rounds = number()?,
                "arithmetic" => {
                    plan.arithmetic = match value {
                        "f32" => Arithmetic::F32,
                        "int8" => Arithmetic::INT8,
                        _ => return Err(wrong()),
                    }
                }
                _ => {
                    let value = value
                        .parse::<i64>()
                        .map(Into::into)
                        .or_else(|_| value.parse::<bool>().map(Into::into))
                        .unwrap_or_else(|_| value.into());
                    plan.options.insert(key.into(), value);
                }
            }
        }
        Ok(plan)
    }
}

#[expect(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own")]
fn main() -> ExitCode {
    let result = Plan::from_arguments().and_then(|plan| {
        let device = VulkanModule.open(0, &plan.options)?;
        println!("{}", device.describe().description);
        let copied = copy(&*device, &plan)?;
        println!("copy on the device, read plus write: {:.1} GB/s", copied / 1e9);
        for dtype in [DType::Q4_0, DType::F16, DType::Q8_0] {
            let (bytes, worst) = product(&*device, &plan, dtype)?;
            println!(
                "gemv {} x {} {dtype}: {:.1} GB/s of weights, {:.0}% of the copy; largest error {worst:.1e} of the sum \
                 of absolute products",
                plan.rows,
                plan.columns,
                bytes / 1e9,
                100.0 * bytes / copied
            );
        }
        Ok(())
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a list and waits for it; seconds.
fn run(
    device: &dyn ComputeBackend,
    list: &OperationList,
    slots: &[(SlotId, Bound)],
    rounds: u64,
) -> Result<f64> {
    list.validate()?;
    let executable = device.prepare(list)?;
    let bindings = Bindings { tokens: 1, slots, sequences: &[], ranges: &[] };
    let mut best = f64::INFINITY;
    for _ in 0..rounds {
        let began = Instant::now();
        let value = device.submit(executable, &bindings, &[])?;
        while device.wait(value, FOREVER)? == Reached::TimedOut {}
        best = best.min(began.elapsed().as_secs_f64());
    }
    device.release(executable)?;
    Ok(best)
}

/// Sends bytes to each of some buffers, or fetches one's.
fn transfer(
    device: &dyn ComputeBackend,
    buffers: &[BufferId],
    memory: &HostMemory,
    to_host: bool,
) -> Result<()> {
    let mut list = OperationList::new(1);
    let mut bound = Vec::new();
    let tensor = TensorType::matrix(DType::U8, 1, memory.len())?;
    let role = |input: bool| if input { SlotRole::Input } else { SlotRole::Output };
    let host = list.add_slot(Slot {
        name: "host".into(),
        role: role(!to_host),
        place: Place::Host,
        tensor,
        per_token: false,
    });
    // SAFETY: the memory outlives the submission, which is waited for before it is used again.
    bound.push((host, Bound::Host(unsafe { memory.span() })));
    for buffer in buffers {
        let slot = list.fixed("device", role(to_host), tensor);
        let (from, to) = if to_host { (slot, host) } else { (host, slot) };
        list.push("transfer", OperationKind::Copy { from, to }, Arithmetic::F32);
        bound.push((slot, Bound::Buffer(BufferView { buffer: *buffer, offset: 0 })));
    }
    run(device, &list, &bound, 1).map(|_| ())
}

/// Bytes per second of a copy, read plus write, over `mib` MiB.
fn copy(device: &dyn ComputeBackend, plan: &Plan) -> Result<f64> {
    let (count, bytes) = (plan.mib.div_ceil(64).max(2), 64 << 20);
    let buffers =
        (0..count).map(|_| device.allocate(bytes, BufferUse::Weights)).collect::<Result<Vec<_>>>()?;
    let tensor = TensorType::matrix(DType::U8, 1, bytes)?;
    let mut list = OperationList::new(1);
    let mut bound = Vec::new();
    // The first half is copied to the second half, again and again.
    let half = buffers.len() / 2;
    for buffer in &buffers[..half] {
        bound.push((
            list.fixed("from", SlotRole::Input, tensor),
            Bound::Buffer(BufferView { buffer: *buffer, offset: 0 }),
        ));
    }
    for buffer in &buffers[half..2 * half] {
        bound.push((
            list.fixed("to", SlotRole::Output, tensor),
            Bound::Buffer(BufferView { buffer: *buffer, offset: 0 }),
        ));
    }
    for _ in 0..plan.passes {
        for at in 0..half {
            let kind = OperationKind::Copy { from: SlotId(at as u32), to: SlotId((half + at) as u32) };
            list.push("copy", kind, Arithmetic::F32);
        }
    }
    let seconds = run(device, &list, &bound, plan.rounds)?;
    for buffer in buffers {
        device.free(buffer)?;
    }
    Ok((2 * plan.passes * half as u64 * bytes) as f64 / seconds)
}

/// A row of weights whose values are known: bytes of the file's type, and the numbers that they stand for.
fn weights(dtype: DType, columns: u64, state: &mut u64) -> (Vec<u8>, Vec<f64>) {
    let mut random = || {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 33) as u32
    };
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    let scale = |r: u32| f16::from_f32(0.01 + (r % 64) as f32 / 4096.0);
    match dtype {
        DType::F16 => {
            for _ in 0..columns {
                let value = f16::from_f32((random() % 4096) as f32 / 2048.0 - 1.0);
                bytes.extend(value.to_le_bytes());
                values.push(value.to_f64());
            }
        }
        DType::Q8_0 => {
            for _ in 0..columns / 32 {
                let scale = scale(random());
                bytes.extend(scale.to_le_bytes());
                for _ in 0..32 {
                    let code = (random() % 255) as i32 - 127;
                    bytes.push(code as i8 as u8);
                    values.push(scale.to_f64() * f64::from(code));
                }
            }
        }
        _ => {
            for _ in 0..columns / 32 {
                let scale = scale(random());
                bytes.extend(scale.to_le_bytes());
                let codes: Vec<u8> = (0..16).map(|_| (random() & 255) as u8).collect();
                let value = |code: u8| scale.to_f64() * (f64::from(code) - 8.0);
                values.extend(codes.iter().map(|byte| value(byte & 15)));
                values.extend(codes.iter().map(|byte| value(byte >> 4)));
                bytes.extend(codes);
            }
        }
    }
    (bytes, values)
}

/// Bytes of weights per second, and the largest error as a share of the sum of absolute products.
fn product(device: &dyn ComputeBackend, plan: &Plan, dtype: DType) -> Result<(f64, f64)> {
    let tensor = TensorType::matrix(dtype, plan.rows, plan.columns)?;
    let matrices = (plan.mib << 20).div_ceil(tensor.bytes()).max(1);
    // Some rows, repeated: what is multiplied does not matter for the time, and is checked all the same.
    let mut state = 7;
    let known: Vec<(Vec<u8>, Vec<f64>)> = (0..8).map(|_| weights(dtype, plan.columns, &mut state)).collect();
    let mut memory = HostMemory::allocate(tensor.bytes())?;
    for row in 0..plan.rows {
        memory.write(row * tensor.row_stride, &known[row as usize % known.len()].0)?;
    }
    let buffers = (0..matrices)
        .map(|_| device.allocate(tensor.bytes(), BufferUse::Weights))
        .collect::<Result<Vec<_>>>()?;
    transfer(device, &buffers, &memory, false)?;
    let x: Vec<f32> = (0..plan.columns).map(|c| ((c * 37 % 101) as f32 - 50.0) / 50.0).collect();
    let mut row = HostMemory::allocate(plan.columns * 4)?;
    row.write(0, &x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())?;
    let input = device.allocate(plan.columns * 4, BufferUse::Activations)?;
    transfer(device, &[input], &row, false)?;
    // Every product has an output of its own, so that none waits for another.
    let stride = (plan.rows * 4).next_multiple_of(256);
    let output = device.allocate(plan.passes * matrices * stride, BufferUse::Activations)?;
    let mut list = OperationList::new(1);
    let x_slot = list.per_token("x", SlotRole::Input, DType::F32, plan.columns)?;
    let mut bound = vec![(x_slot, Bound::Buffer(BufferView { buffer: input, offset: 0 }))];
    let constants: Vec<SlotId> = buffers
        .iter()
        .map(|buffer| list.fixed("w", SlotRole::Constant(BufferView { buffer: *buffer, offset: 0 }), tensor))
        .collect();
    for pass in 0..plan.passes {
        for (at, weight) in constants.iter().enumerate() {
            let y = list.per_token("y", SlotRole::Output, DType::F32, plan.rows)?;
            let offset = (pass * matrices + at as u64) * stride;
            bound.push((y, Bound::Buffer(BufferView { buffer: output, offset })));
            let kind = OperationKind::Linear {
                input: x_slot,
                weight: *weight,
                bias: None,
                output: y,
                accumulate: false,
            };
            list.push("gemv", kind, plan.arithmetic);
        }
    }
    let seconds = run(device, &list, &bound, plan.rounds)?;
    let got = HostMemory::allocate(plan.passes * matrices * stride)?;
    transfer(device, &[output], &got, true)?;
    let last = got.bytes().get(got.len() as usize - stride as usize..).unwrap_or_default();
    let mut worst = 0f64;
    for (row, bytes) in last.chunks_exact(4).take(plan.rows as usize).enumerate() {
        let values = &known[row % known.len()].1;
        let products = values.iter().zip(&x).map(|(w, x)| w * f64::from(*x));
        let (want, sum) = products.fold((0.0, 0.0), |(want, sum), p| (want + p, sum + p.abs()));
        let got = f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        worst = worst.max((got - want).abs() / sum);
    }
    for buffer in buffers.into_iter().chain([input, output]) {
        device.free(buffer)?;
    }
    Ok(((plan.passes * matrices * tensor.bytes()) as f64 / seconds, worst))
}
