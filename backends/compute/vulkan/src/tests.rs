//! What the suite's small shapes do not reach: weights that a shader sees only in parts, and copies larger than the staging.
//!
//! They need a Vulkan device and pass without one; `tests/driver.rs` reports there that it is absent.

use engine_core::backend::{Bindings, Bound, BufferUse, BufferView, SequenceSpan};
use engine_core::error::FOREVER;
use engine_core::module::ComputeModule;
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Ffn, OperationKind, OperationList, Place, Selection, Slot, SlotId,
    SlotRole,
};
use engine_core::options::OptionTable;
use engine_core::{ComputeBackend, DType, HostMemory, Reached, TensorType};

use crate::VulkanModule;
use crate::backend::VulkanBackend;
use crate::module::open;

/// The device whose shaders see at most `range` bytes of a buffer; `None` where there is no device.
fn device(range: u64) -> Option<VulkanBackend> {
    let none = OptionTable::new();
    if VulkanModule.devices(&none).map_or(true, |devices| devices.is_empty()) {
        return None;
    }
    Some(open(0, &none, move |candidate| candidate.max_range = candidate.max_range.min(range)).unwrap())
}

/// Numbers between -1 and 1.
fn numbers(count: u64, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    };
    (0..count).flat_map(|_| next().to_le_bytes()).collect()
}

/// Runs a list whose device slots hold these bytes (none: an output), and answers what the outputs hold.
fn run(
    device: &VulkanBackend,
    list: &OperationList,
    content: &[Option<Vec<u8>>],
    tokens: u32,
) -> Vec<Vec<u8>> {
    let host = |list: &mut OperationList, tensor, role| {
        list.add_slot(Slot { name: "host".into(), role, place: Place::Host, tensor, per_token: false })
    };
    let mut buffers = Vec::new();
    let transfer = |buffer, memory: &HostMemory, to_host: bool| {
        let mut copy = OperationList::new(1);
        let tensor = TensorType::matrix(DType::U8, 1, memory.len()).unwrap();
        let role = |input| if input { SlotRole::Input } else { SlotRole::Output };
        let (here, there) =
            (host(&mut copy, tensor, role(!to_host)), copy.fixed("device", role(to_host), tensor));
        let (from, to) = if to_host { (there, here) } else { (here, there) };
        copy.push("transfer", OperationKind::Copy { from, to }, Arithmetic::F32);
        // SAFETY: the memory outlives the submission, which is waited for.
        let span = unsafe { memory.span() };
        let bound = [(here, Bound::Host(span)), (there, Bound::Buffer(BufferView { buffer, offset: 0 }))];
        submit(device, &copy, &bound, 1);
    };
    for (slot, bytes) in list.slots.iter().zip(content) {
        let buffer = device.allocate(slot.tensor.bytes(), BufferUse::Weights).unwrap();
        if let Some(bytes) = bytes {
            let mut memory = HostMemory::allocate(slot.tensor.bytes()).unwrap();
            memory.write(0, bytes).unwrap();
            transfer(buffer, &memory, false);
        }
        buffers.push(buffer);
    }
    let bound: Vec<(SlotId, Bound)> = buffers
        .iter()
        .enumerate()
        .map(|(at, buffer)| (SlotId(at as u32), Bound::Buffer(BufferView { buffer: *buffer, offset: 0 })))
        .collect();
    submit(device, list, &bound, tokens);
    let mut outputs = Vec::new();
    for (at, bytes) in content.iter().enumerate() {
        if bytes.is_none() {
            let memory = HostMemory::allocate(list.slots[at].tensor.bytes()).unwrap();
            transfer(buffers[at], &memory, true);
            outputs.push(memory.bytes().to_vec());
        }
    }
    buffers.into_iter().for_each(|buffer| device.free(buffer).unwrap());
    outputs
}

fn submit(device: &VulkanBackend, list: &OperationList, slots: &[(SlotId, Bound)], tokens: u32) {
    list.validate().unwrap();
    let executable = device.prepare(list).unwrap();
    let sequences = [SequenceSpan { first_token: 0, tokens, past: 0, cache_base: 0 }];
    let bindings = Bindings { tokens, slots, sequences: &sequences, ranges: &[] };
    let value = device.submit(executable, &bindings, &[]).unwrap();
    while device.wait(value, FOREVER).unwrap() == Reached::TimedOut {}
    device.release(executable).unwrap();
}

/// The same list on a device that sees all, and on one that sees 64 KiB: the same bits.
fn same_in_parts(list: &OperationList, content: &[Option<Vec<u8>>], tokens: u32) {
    let Some(whole) = device(u64::MAX) else { return };
    let want = run(&whole, list, content, tokens);
    drop(whole);
    let parts = device(64 << 10).unwrap();
    let got = run(&parts, list, content, tokens);
    assert!(want.iter().flatten().any(|byte| *byte != 0) && got == want);
}

#[test]
fn a_linear_and_an_embed_in_parts() {
    let (rows, columns, tokens) = (1500, 64, 5);
    let mut list = OperationList::new(tokens);
    let input = list.per_token("x", SlotRole::Input, DType::F32, columns).unwrap();
    // 384 KB: seven windows.
    let weight = list.fixed("w", SlotRole::Input, TensorType::matrix(DType::F32, rows, columns).unwrap());
    let output = list.per_token("y", SlotRole::Output, DType::F32, rows).unwrap();
    let ids = list.per_token("ids", SlotRole::Input, DType::I32, 1).unwrap();
    let embedded = list.per_token("e", SlotRole::Output, DType::F32, columns).unwrap();
    let kind = OperationKind::Linear { input, weight, bias: None, output, accumulate: false };
    list.push("linear", kind, Arithmetic::INT8);
    let kind = OperationKind::Embed { ids, table: weight, output: embedded, scale: 2.0 };
    list.push("embed", kind, Arithmetic::F32);
    let numbers_of = |n, seed| Some(numbers(n, seed));
    let ids = [0i32, 1499, 700, 255, 256].iter().flat_map(|id| id.to_le_bytes()).collect();
    let content =
        [numbers_of(u64::from(tokens) * columns, 1), numbers_of(rows * columns, 2), None, Some(ids), None];
    same_in_parts(&list, &content, tokens);
}

#[test]
fn a_feed_forward_layer_in_parts() {
    let (neurons, width, tokens) = (700, 96, 3);
    for down_layout in [DownLayout::NeuronRows, DownLayout::OutputRows] {
        let mut list = OperationList::new(tokens);
        let input = list.per_token("x", SlotRole::Input, DType::F32, width).unwrap();
        let matrix = |rows, columns| TensorType::matrix(DType::F32, rows, columns).unwrap();
        let gate = list.fixed("gate", SlotRole::Input, matrix(neurons, width));
        let up = list.fixed("up", SlotRole::Input, matrix(neurons, width));
        let down = match down_layout {
            DownLayout::NeuronRows => matrix(neurons, width),
            DownLayout::OutputRows => matrix(width, neurons),
        };
        let down = list.fixed("down", SlotRole::Input, down);
        let output = list.per_token("y", SlotRole::Output, DType::F32, width).unwrap();
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
            down_layout,
            function: Activation::Relu,
            up_function: Activation::Identity,
            selection: Selection::GateFirst,
            accumulate: false,
        };
        list.push("ffn", OperationKind::Ffn(ffn), Arithmetic::F32);
        let matrix = neurons * width;
        let content = [
            Some(numbers(u64::from(tokens) * width, 3)),
            Some(numbers(matrix, 4)),
            Some(numbers(matrix, 5)),
            Some(numbers(matrix, 6)),
            None,
        ];
        same_in_parts(&list, &content, tokens);
    }
}

#[test]
fn what_cannot_be_split_is_denied_with_figures() {
    let Some(device) = device(64 << 10) else { return };
    let mut list = OperationList::new(64);
    let input = list.per_token("x", SlotRole::Input, DType::F32, 512).unwrap();
    let output = list.per_token("y", SlotRole::Output, DType::F32, 512).unwrap();
    let kind = OperationKind::Activate { function: Activation::Silu, input, output };
    list.push("silu", kind, Arithmetic::F32);
    let engine_core::backend::Support::No { reason } = device.supports(&list, 0) else {
        panic!("it says yes")
    };
    assert!(reason.contains("`x` has 131072 bytes") && reason.contains("fewer tokens"), "{reason}");
}

/// Twenty MiB go through staging in pieces, there and back.
#[test]
fn copies_larger_than_the_staging() {
    let Some(device) = device(u64::MAX) else { return };
    let mut list = OperationList::new(1);
    let tensor = TensorType::matrix(DType::U8, 1, (20 << 20) + 3).unwrap();
    let from = list.fixed("from", SlotRole::Input, tensor);
    let to = list.fixed("to", SlotRole::Output, tensor);
    list.push("copy", OperationKind::Copy { from, to }, Arithmetic::F32);
    let mut bytes = numbers((20 << 18) + 1, 9);
    bytes.truncate(tensor.bytes() as usize);
    let got = run(&device, &list, &[Some(bytes.clone()), None], 1);
    assert!(got[0] == bytes);
}
