//! The device: handles, memory budget, and a timeline on which submissions run one after the other in the caller's
//! thread.
//!
//! `submit` returns when the work is done, which the contract allows: its value is reached at once, and an error of the
//! work is kept for every `wait`.

use crate::execute::Run;
use crate::memory::{Memory, View};
use crate::{Options, support};
use engine_core::backend::{
    Bindings, Bound, BufferId, BufferUse, BufferView, Counter, DeviceDescription, ExecutableId, Support,
    TimelineValue,
};
use engine_core::error::HandleKind;
use engine_core::operation::{Access, OperationList, Slot, SlotRole};
use engine_core::{ComputeBackend, DType, Error, HostSpan, Reached, Result, TensorType};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The oracle as a device.
pub struct Reference {
    description: DeviceDescription,
    options: Options,
    threads: usize,
    /// Held while a submission runs, so that submissions take effect in the order of their values.
    execution: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Buffers and executables are numbered from one counter, so that a handle of one kind is never one of another.
    last_handle: u64,
    buffers: HashMap<BufferId, Arc<Memory>>,
    executables: HashMap<ExecutableId, Arc<Executable>>,
    last_value: u64,
    failed: BTreeMap<u64, Error>,
    submissions: u64,
    bytes: u64,
    bytes_peak: u64,
}

struct Executable {
    list: OperationList,
    /// Memory of scratch slots, by slot index.
    scratch: BTreeMap<usize, Arc<Memory>>,
    /// Slots that some operation writes.
    written: Vec<bool>,
}

/// A lock whose holder panicked is taken all the same: every change of the state is made at once.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn next_handle(&mut self) -> u64 {
        self.last_handle += 1;
        self.last_handle
    }

    /// Counts `bytes` more, if the limit allows.
    fn reserve(&mut self, bytes: u64, limit: Option<u64>) -> Result<()> {
        let total = self.bytes.saturating_add(bytes);
        if limit.is_some_and(|limit| total > limit) {
            return Err(Error::out_of_memory(format!(
                "{bytes} bytes on the reference device, {} of its memory_limit of {} are left",
                limit.unwrap_or(0).saturating_sub(self.bytes),
                limit.unwrap_or(0)
            )));
        }
        self.bytes = total;
        self.bytes_peak = self.bytes_peak.max(total);
        Ok(())
    }

    /// The memory that a slot of type `tensor` is bound to.
    fn resolve(&self, slot: &Slot, tensor: TensorType, view: BufferView, written: bool) -> Result<View> {
        let memory = self
            .buffers
            .get(&view.buffer)
            .ok_or_else(|| Error::unknown(HandleKind::Buffer, view.buffer.0))?;
        place(slot, tensor, memory.clone(), view.offset, written)
    }
}

/// Bytes that an address of this type is a multiple of. Blocks are read byte by byte.
fn alignment(dtype: DType) -> u64 {
    if dtype.is_quantised() { 1 } else { dtype.block_bytes() }
}

/// Checks length, alignment and writability of a slot's memory.
fn place(slot: &Slot, tensor: TensorType, memory: Arc<Memory>, offset: u64, written: bool) -> Result<View> {
    let fail = |what: String| Err(Error::invalid(format!("slot `{}`: {what}", slot.name)));
    let (needed, there) = (tensor.bytes(), memory.len());
    let align = alignment(tensor.dtype);
    if !(memory.address() as u64).wrapping_add(offset).is_multiple_of(align) {
        return fail(format!("offset {offset} is not aligned to {align} bytes, as {} needs", tensor.dtype));
    }
    if written && !memory.is_writable() {
        return fail("it is written, but bound to a read-only import".into());
    }
    match View::new(memory, offset, needed) {
        Some(view) => Ok(view),
        None => fail(format!("{tensor} needs {needed} bytes from {offset} of a buffer of {there}")),
    }
}

impl Reference {
    /// A device with these options.
    pub fn new(options: Options) -> Reference {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if options.threads == 0 { available } else { options.threads as usize };
        let description = describe(&options, threads);
        Reference { description, options, threads, execution: Mutex::new(()), state: Mutex::default() }
    }

    /// The memory of every slot, or what is wrong with a binding.
    fn resolve(&self, executable: &Executable, bindings: &Bindings<'_>) -> Result<Vec<View>> {
        let state = lock(&self.state);
        let list = &executable.list;
        let mut bound: Vec<Option<Bound>> = vec![None; list.slots.len()];
        for (slot, binding) in bindings.slots {
            bound[slot.0 as usize] = Some(*binding);
        }
        let view = |(index, slot): (usize, &Slot)| {
            let written = executable.written[index];
            let rows = if slot.per_token { u64::from(bindings.tokens) } else { slot.tensor.rows };
            let tensor = TensorType { rows, ..slot.tensor };
            match (slot.role, bound[index]) {
                (SlotRole::Constant(view), _) => state.resolve(slot, tensor, view, written),
                (SlotRole::Scratch, _) => place(slot, tensor, executable.scratch[&index].clone(), 0, written),
                (_, Some(Bound::Buffer(view))) => state.resolve(slot, tensor, view, written),
                (_, Some(Bound::Host(span))) => {
                    place(slot, tensor, Arc::new(Memory::Imported(span)), 0, written)
                }
                (_, None) => Err(Error::invalid(format!("slot `{}` is not bound", slot.name))),
            }
        };
        list.slots.iter().enumerate().map(view).collect()
    }

    /// The failure of a waited-for value, if there is one.
    fn dependencies(&self, waits: &[TimelineValue]) -> Result<Result<()>> {
        let state = lock(&self.state);
        if let Some(unknown) = waits.iter().find(|value| value.0 == 0 || value.0 > state.last_value) {
            return Err(Error::unknown(HandleKind::TimelineValue, unknown.0));
        }
        let failure = waits.iter().find_map(|value| Some((value.0, state.failed.get(&value.0)?)));
        Ok(match failure {
            None => Ok(()),
            Some((value, error)) => Err(Error::dependency_failed(format!("value {value}: {error}"))),
        })
    }
}

fn describe(options: &Options, threads: usize) -> DeviceDescription {
    let arithmetic = if options.arithmetic == "true" {
        "true f64: the activation quantisation that operations state is left out"
    } else {
        "f64 sums after the activation quantisation that operations state"
    };
    DeviceDescription {
        name: "reference".into(),
        description: "f64 oracle: every operation as a plain loop, results rounded once".into(),
        tolerance: engine_core::backend::ToleranceClass::Exact64,
        memory_bytes: options.memory_limit.unwrap_or(0),
        alignment: 1,
        imports_host_memory: true,
        needs_constant_weights: false,
        max_buffer_bytes: 0,
        notes: vec![
            format!("arithmetic: {arithmetic}"),
            format!("threads: {threads} (they change no result)"),
        ],
    }
}

impl ComputeBackend for Reference {
    fn describe(&self) -> &DeviceDescription {
        &self.description
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        support::supports(list, index)
    }

    fn allocate(&self, bytes: u64, _purpose: BufferUse) -> Result<BufferId> {
        if bytes == 0 {
            return Err(Error::invalid("a buffer of 0 bytes"));
        }
        let mut state = lock(&self.state);
        state.reserve(bytes, self.options.memory_limit)?;
        match Memory::allocate(bytes) {
            Ok(memory) => {
                let id = BufferId(state.next_handle());
                state.buffers.insert(id, Arc::new(memory));
                Ok(id)
            }
            Err(error) => {
                state.bytes -= bytes;
                Err(error)
            }
        }
    }

    fn import(&self, span: HostSpan) -> Result<BufferId> {
        if span.is_empty() || span.address() == 0 || (span.address() as u64).checked_add(span.len()).is_none()
        {
            return Err(Error::invalid(format!(
                "an import of {} bytes at address {:#x}",
                span.len(),
                span.address()
            )));
        }
        let mut state = lock(&self.state);
        let id = BufferId(state.next_handle());
        state.buffers.insert(id, Arc::new(Memory::Imported(span)));
        Ok(id)
    }

    fn free(&self, buffer: BufferId) -> Result<()> {
        let mut state = lock(&self.state);
        let memory =
            state.buffers.remove(&buffer).ok_or_else(|| Error::unknown(HandleKind::Buffer, buffer.0))?;
        state.bytes -= memory.owned_bytes();
        Ok(())
    }

    fn prepare(&self, list: &OperationList) -> Result<ExecutableId> {
        list.validate()?;
        (0..list.operations.len()).try_for_each(|index| support::check(list, index))?;
        let mut written = vec![false; list.slots.len()];
        for operand in list.operations.iter().flat_map(|operation| operation.kind.operands()) {
            written[operand.slot.0 as usize] |= operand.access != Access::Read;
        }
        let mut state = lock(&self.state);
        for slot in &list.slots {
            if let SlotRole::Constant(view) = slot.role {
                state.resolve(slot, slot.tensor, view, false)?;
            }
        }
        let before = state.bytes;
        let mut scratch = BTreeMap::new();
        for (index, slot) in list.slots.iter().enumerate().filter(|(_, s)| s.role == SlotRole::Scratch) {
            let bytes = slot.tensor.bytes();
            let memory =
                state.reserve(bytes, self.options.memory_limit).and_then(|()| Memory::allocate(bytes));
            match memory {
                Ok(memory) => scratch.insert(index, Arc::new(memory)),
                Err(error) => {
                    state.bytes = before;
                    return Err(Error::out_of_memory(format!("scratch `{}`: {}", slot.name, error.detail())));
                }
            };
        }
        let id = ExecutableId(state.next_handle());
        state.executables.insert(id, Arc::new(Executable { list: list.clone(), scratch, written }));
        Ok(id)
    }

    fn release(&self, executable: ExecutableId) -> Result<()> {
        let _running = lock(&self.execution);
        let mut state = lock(&self.state);
        let released = state
            .executables
            .remove(&executable)
            .ok_or_else(|| Error::unknown(HandleKind::Executable, executable.0))?;
        state.bytes -= released.scratch.values().map(|memory| memory.owned_bytes()).sum::<u64>();
        Ok(())
    }

    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue> {
        let _running = lock(&self.execution);
        let prepared = lock(&self.state)
            .executables
            .get(&executable)
            .cloned()
            .ok_or_else(|| Error::unknown(HandleKind::Executable, executable.0))?;
        bindings.validate(&prepared.list)?;
        let views = self.resolve(&prepared, bindings)?;
        let dependencies = self.dependencies(waits)?;
        let executes = dependencies.is_ok();
        let result = dependencies.and_then(|()| {
            // All ones is NaN: a value that no operation wrote does not pass for one.
            prepared.scratch.keys().for_each(|index| views[*index].fill(0xff));
            let run = Run {
                list: &prepared.list,
                views,
                tokens: bindings.tokens as usize,
                sequences: bindings.sequences,
                ranges: bindings.ranges,
                stated: self.options.arithmetic != "true",
                threads: self.threads,
            };
            run.execute()
        });
        let mut state = lock(&self.state);
        state.last_value += 1;
        state.submissions += u64::from(executes);
        let value = state.last_value;
        if let Err(error) = result {
            state.failed.insert(value, error);
        }
        Ok(TimelineValue(value))
    }

    fn wait(&self, value: TimelineValue, _timeout: Duration) -> Result<Reached> {
        let state = lock(&self.state);
        if value.0 == 0 || value.0 > state.last_value {
            return Err(Error::unknown(HandleKind::TimelineValue, value.0));
        }
        state.failed.get(&value.0).map_or(Ok(Reached::Done), |error| Err(error.clone()))
    }

    fn counters(&self) -> Vec<Counter> {
        let state = lock(&self.state);
        [
            ("submissions", state.submissions),
            ("bytes_allocated", state.bytes),
            ("bytes_allocated_peak", state.bytes_peak),
        ]
        .map(|(name, value)| Counter { name: name.into(), value })
        .to_vec()
    }
}
