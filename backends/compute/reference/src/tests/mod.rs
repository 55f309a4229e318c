//! Tests through the trait: a list of one operation, its memory, and one submission.

mod contract;
mod ffn;
mod formulas;

use crate::{Options, Reference};
use engine_core::backend::{ActiveRanges, Bindings, Bound, BufferId, BufferUse, BufferView, SequenceSpan};
use engine_core::operation::{Arithmetic, OperationKind, OperationList, Place, Slot, SlotId, SlotRole};
use engine_core::{ComputeBackend, DType, HostMemory, Result, TensorType};
use std::time::Duration;

/// A list under construction with a buffer per slot.
struct Trial {
    backend: Reference,
    list: OperationList,
    buffers: Vec<(SlotId, BufferId, u64)>,
    sequences: Vec<SequenceSpan>,
}

impl Trial {
    fn new(tokens: u32) -> Trial {
        Trial::with(tokens, Options { threads: 2, ..Options::default() })
    }

    fn with(tokens: u32, options: Options) -> Trial {
        Trial {
            backend: Reference::new(options),
            list: OperationList::new(tokens),
            buffers: vec![],
            sequences: vec![SequenceSpan { first_token: 0, tokens, past: 0, cache_base: 0 }],
        }
    }

    /// Adds a slot whose buffer holds these bytes.
    fn slot(&mut self, role: SlotRole, tensor: TensorType, per_token: bool, bytes: &[u8]) -> SlotId {
        let buffer = self.backend.allocate(tensor.bytes(), BufferUse::Activations).unwrap();
        copy_in(&self.backend, buffer, bytes);
        let role = match role {
            SlotRole::Constant(_) => SlotRole::Constant(BufferView { buffer, offset: 0 }),
            role => role,
        };
        let name = format!("slot {}", self.list.slots.len());
        let slot = self.list.add_slot(Slot { name, role, place: Place::Device, tensor, per_token });
        self.buffers.push((slot, buffer, tensor.bytes()));
        slot
    }

    /// F32 rows per token.
    fn input(&mut self, rows: &[f32]) -> SlotId {
        let columns = rows.len() as u64 / u64::from(self.list.token_capacity);
        let tensor = TensorType::matrix(DType::F32, self.list.token_capacity.into(), columns).unwrap();
        self.slot(SlotRole::Input, tensor, true, &f32_bytes(rows))
    }

    /// A constant F32 matrix.
    fn weight(&mut self, columns: usize, values: &[f32]) -> SlotId {
        let tensor = TensorType::matrix(DType::F32, (values.len() / columns) as u64, columns as u64).unwrap();
        let constant = SlotRole::Constant(BufferView { buffer: BufferId(0), offset: 0 });
        self.slot(constant, tensor, false, &f32_bytes(values))
    }

    /// A per-token slot to be written, of any type.
    fn output(&mut self, dtype: DType, columns: u64) -> SlotId {
        let tensor = TensorType::matrix(dtype, self.list.token_capacity.into(), columns).unwrap();
        self.slot(SlotRole::Output, tensor, true, &vec![0xff; tensor.bytes() as usize])
    }

    /// An F16 KV cache.
    fn cache(&mut self, positions: u64, columns: u64) -> SlotId {
        let tensor = TensorType::matrix(DType::F16, positions, columns).unwrap();
        self.slot(SlotRole::State, tensor, false, &vec![0; tensor.bytes() as usize])
    }

    fn push(&mut self, kind: OperationKind) {
        self.list.push("test", kind, Arithmetic::F32);
    }

    /// Prepares, submits and waits.
    fn run(&self) -> Result<()> {
        self.run_with(&[])
    }

    fn run_with(&self, ranges: &[ActiveRanges<'_>]) -> Result<()> {
        for index in 0..self.list.operations.len() {
            assert!(self.backend.supports(&self.list, index).is_yes());
        }
        let executable = self.backend.prepare(&self.list)?;
        let slots: Vec<_> = self
            .buffers
            .iter()
            .filter(|(slot, ..)| !matches!(self.list.slots[slot.0 as usize].role, SlotRole::Constant(_)))
            .map(|(slot, buffer, _)| (*slot, Bound::Buffer(BufferView { buffer: *buffer, offset: 0 })))
            .collect();
        let bindings =
            Bindings { tokens: self.list.token_capacity, slots: &slots, sequences: &self.sequences, ranges };
        let value = self.backend.submit(executable, &bindings, &[])?;
        let result = self.backend.wait(value, Duration::ZERO);
        self.backend.release(executable)?;
        result.map(|_| ())
    }

    fn bytes(&self, slot: SlotId) -> Vec<u8> {
        let (_, buffer, bytes) = self.buffers[slot.0 as usize];
        copy_out(&self.backend, buffer, bytes)
    }

    fn floats(&self, slot: SlotId) -> Vec<f32> {
        self.bytes(slot).chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A list that copies a byte vector between a host slot and a device slot.
fn transfer(bytes: u64, to_device: bool) -> OperationList {
    let mut list = OperationList::new(1);
    let tensor = TensorType::matrix(DType::U8, 1, bytes).unwrap();
    let (host_role, device_role) =
        if to_device { (SlotRole::Input, SlotRole::Output) } else { (SlotRole::Output, SlotRole::Input) };
    let host = list.add_slot(Slot {
        name: "host".into(),
        role: host_role,
        place: Place::Host,
        tensor,
        per_token: false,
    });
    let device = list.fixed("device", device_role, tensor);
    let (from, to) = if to_device { (host, device) } else { (device, host) };
    list.push("transfer", OperationKind::Copy { from, to }, Arithmetic::F32);
    list
}

#[expect(unsafe_code, reason = "host spans are made of raw addresses")]
fn copy(backend: &Reference, buffer: BufferId, memory: &HostMemory, to_device: bool) {
    let executable = backend.prepare(&transfer(memory.len(), to_device)).unwrap();
    // SAFETY: `memory` outlives this function, which waits for the work, and nothing else touches it meanwhile.
    let span = unsafe { memory.span() };
    let slots =
        [(SlotId(0), Bound::Host(span)), (SlotId(1), Bound::Buffer(BufferView { buffer, offset: 0 }))];
    let bindings = Bindings { tokens: 1, slots: &slots, ..Bindings::default() };
    let value = backend.submit(executable, &bindings, &[]).unwrap();
    backend.wait(value, engine_core::error::FOREVER).unwrap();
    backend.release(executable).unwrap();
}

fn copy_in(backend: &Reference, buffer: BufferId, bytes: &[u8]) {
    let mut memory = HostMemory::allocate(bytes.len() as u64).unwrap();
    memory.write(0, bytes).unwrap();
    copy(backend, buffer, &memory, true);
}

fn copy_out(backend: &Reference, buffer: BufferId, bytes: u64) -> Vec<u8> {
    let memory = HostMemory::allocate(bytes).unwrap();
    copy(backend, buffer, &memory, false);
    memory.bytes().to_vec()
}
