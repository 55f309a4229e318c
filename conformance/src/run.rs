//! Runs one problem on a backend: places operands between guard regions, submits, reads back, and looks at the guards.

use crate::finding::{Fallible, Finding};
use crate::problem::{CacheContent, Content, Problem};
use crate::values::{FILL, u16_bytes};
use engine_core::backend::{
    ActiveRanges, Bindings, Bound, BufferId, BufferUse, BufferView, ExecutableId, SequenceSpan, TimelineValue,
};
use engine_core::operation::{Arithmetic, OperationKind, OperationList, Place, Slot, SlotId, SlotRole};
use engine_core::{ComputeBackend, DType, HostMemory, HostSpan, Reached, TensorType};
use std::collections::BTreeMap;
use std::time::Duration;

/// Bytes of a guard region on each side of an operand, before alignment.
const GUARD: u64 = 256;

/// Longer than any submission of the suite takes; the parent process ends a case well before.
const PATIENCE: Duration = Duration::from_secs(600);

/// What a problem wrote: bytes of outputs and states by slot, from the first row that was used to the last.
pub type Outputs = BTreeMap<u32, Vec<u8>>;

/// A backend with the few composed steps that every case needs.
#[derive(Clone, Copy)]
pub struct Lab<'a> {
    /// The device.
    pub backend: &'a dyn ComputeBackend,
}

/// A span over memory that the caller keeps alive and does not touch until the work that uses it was waited for.
pub(crate) fn span_of(memory: &HostMemory) -> HostSpan {
    // SAFETY: every caller in this crate owns the memory across the submission and its wait; where a wait fails to
    // be reached, the memory is leaked (see `Lab::finish`).
    unsafe { memory.span() }
}

/// An operand on the device.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Its buffer.
    pub buffer: BufferId,
    /// Where it starts.
    pub offset: u64,
    /// Its own bytes.
    pub bytes: u64,
    /// Bytes of the buffer.
    pub total: u64,
}

impl Placed {
    /// As a view.
    pub fn view(&self) -> BufferView {
        BufferView { buffer: self.buffer, offset: self.offset }
    }
}

impl<'a> Lab<'a> {
    /// A lab for this backend.
    pub fn new(backend: &'a dyn ComputeBackend) -> Lab<'a> {
        Lab { backend }
    }

    /// Waits until a value is reached.
    ///
    /// # Errors
    /// The work's own error, or that it was not reached in ten minutes.
    pub fn finish(&self, value: TimelineValue) -> engine_core::Result<()> {
        match self.backend.wait(value, PATIENCE)? {
            Reached::Done => Ok(()),
            Reached::TimedOut => {
                Err(engine_core::Error::internal(format!("timeline value {} was not reached", value.0)))
            }
        }
    }

    /// Prepares, submits, waits and releases.
    ///
    /// # Errors
    /// Of any of these.
    pub fn once(&self, list: &OperationList, bindings: &Bindings<'_>) -> engine_core::Result<()> {
        let executable = self.backend.prepare(list)?;
        let done = self.backend.submit(executable, bindings, &[]).and_then(|value| self.finish(value));
        let released = self.backend.release(executable);
        done.and(released)
    }

    fn transfer(&self, buffer: BufferId, memory: &HostMemory, to_device: bool) -> engine_core::Result<()> {
        let tensor = TensorType::matrix(DType::U8, 1, memory.len())?;
        let mut list = OperationList::new(1);
        let mut slot = |name: &str, role, place| {
            list.add_slot(Slot { name: name.into(), role, place, tensor, per_token: false })
        };
        let (host_role, device_role) =
            if to_device { (SlotRole::Input, SlotRole::Output) } else { (SlotRole::Output, SlotRole::Input) };
        let host = slot("host bytes", host_role, Place::Host);
        let device = slot("device bytes", device_role, Place::Device);
        let (from, to) = if to_device { (host, device) } else { (device, host) };
        list.push("transfer", OperationKind::Copy { from, to }, Arithmetic::F32);
        let slots =
            [(host, Bound::Host(span_of(memory))), (device, Bound::Buffer(BufferView { buffer, offset: 0 }))];
        self.once(&list, &Bindings { tokens: 1, slots: &slots, sequences: &[], ranges: &[] })
    }

    /// Overwrites a buffer from its start.
    ///
    /// # Errors
    /// Of the copy.
    pub fn write(&self, buffer: BufferId, bytes: &[u8]) -> engine_core::Result<()> {
        let mut memory = HostMemory::allocate(bytes.len() as u64)?;
        memory.bytes_mut().copy_from_slice(bytes);
        let done = self.transfer(buffer, &memory, true);
        keep_if_unreached(memory, &done);
        done
    }

    /// Reads the first `len` bytes of a buffer.
    ///
    /// # Errors
    /// Of the copy.
    pub fn read(&self, buffer: BufferId, len: u64) -> engine_core::Result<Vec<u8>> {
        let memory = HostMemory::allocate(len)?;
        let done = self.transfer(buffer, &memory, false);
        let bytes = done.is_ok().then(|| memory.bytes().to_vec());
        keep_if_unreached(memory, &done);
        done.map(|()| bytes.unwrap_or_default())
    }

    /// Allocates room for an operand between guards and fills it; everything else in the buffer is [`FILL`].
    ///
    /// # Errors
    /// Of the allocation or the copy.
    pub fn place(&self, tensor: &TensorType, bytes: &[u8], purpose: BufferUse) -> Fallible<Placed> {
        let placed = self.room(tensor, purpose)?;
        let mut all = vec![FILL; placed.total as usize];
        let start = placed.offset as usize;
        all[start..start + bytes.len()].copy_from_slice(bytes);
        self.write(placed.buffer, &all)
            .map_err(|e| Finding::new("copy", format!("filling a buffer by a copy of bytes failed: {e}")))?;
        Ok(placed)
    }

    /// The offset is aligned as the device asks, and to no more than that: kernels that rely on more are found out.
    fn room(&self, tensor: &TensorType, purpose: BufferUse) -> Fallible<Placed> {
        let natural = match tensor.dtype {
            DType::F32 | DType::I32 => 4,
            DType::I64 | DType::F64 => 8,
            DType::I8 | DType::U8 | DType::MXFP4 => 1,
            _ => 2,
        };
        let align = self.backend.describe().alignment.max(natural);
        let offset = GUARD.next_multiple_of(2 * align) + align;
        let bytes = tensor.bytes();
        let total = (offset + bytes + GUARD).next_multiple_of(64.max(align));
        let buffer = self.backend.allocate(total, purpose).map_err(|e| {
            Finding::new("allocate", format!("allocating {total} bytes for {tensor} failed: {e}"))
        })?;
        Ok(Placed { buffer, offset, bytes, total })
    }

    /// Imports positions `0..filled` of a cache, or exports `0..read` into bytes (keys, then values).
    fn exchange(&self, cache: &Placed, content: &CacheContent, import: bool) -> Fallible<Vec<u8>> {
        let positions = if import { content.filled } else { content.read };
        if positions == 0 {
            return Ok(Vec::new());
        }
        let name = if import { "kv-import" } else { "kv-export" };
        let inner = || -> Fallible<Vec<u8>> {
            let columns = content.columns();
            let side = TensorType::matrix(DType::F16, positions.into(), columns as u64)?;
            let whole = TensorType::matrix(DType::F16, content.positions().into(), 2 * columns as u64)?;
            let used = positions as usize * columns;
            let role = if import { SlotRole::Input } else { SlotRole::Output };
            let mut list = OperationList::new(1);
            let key = list.fixed("key", role, side);
            let value = list.fixed("value", role, side);
            let slot = list.fixed("cache", SlotRole::State, whole);
            let (kv_heads, head_dim) = (content.kv_heads, content.head_dim);
            let kind = if import {
                OperationKind::KvImport { key, value, cache: slot, kv_heads, head_dim }
            } else {
                OperationKind::KvExport { cache: slot, key, value, kv_heads, head_dim }
            };
            list.push(name, kind, Arithmetic::F32);
            let (k, v) = if import {
                (u16_bytes(&content.key[..used]), u16_bytes(&content.value[..used]))
            } else {
                (Vec::new(), Vec::new())
            };
            let keys = self.place(&side, &k, BufferUse::Activations)?;
            let values = self.place(&side, &v, BufferUse::Activations)?;
            let slots = [
                (key, Bound::Buffer(keys.view())),
                (value, Bound::Buffer(values.view())),
                (slot, Bound::Buffer(cache.view())),
            ];
            let span = SequenceSpan { first_token: 0, tokens: 1, past: positions - 1, cache_base: 0 };
            let bindings = Bindings { tokens: 1, slots: &slots, sequences: &[span], ranges: &[] };
            self.once(&list, &bindings)?;
            let mut bytes = Vec::new();
            for placed in [keys, values] {
                if !import {
                    bytes.extend(self.collect(&placed, name)?);
                }
                self.backend.free(placed.buffer)?;
            }
            Ok(bytes)
        };
        inner().map_err(|f| f.during(&format!("{name} of {positions} positions")))
    }

    /// Reads an operand back and checks that the guards around it are as they were.
    fn collect(&self, placed: &Placed, name: &str) -> Fallible<Vec<u8>> {
        let all = self.read(placed.buffer, placed.total)?;
        let (start, end) = (placed.offset as usize, (placed.offset + placed.bytes) as usize);
        let outside = |at: &usize| !(start..end).contains(at) && all[*at] != FILL;
        if let Some(at) = (0..all.len()).find(outside) {
            let side = if at < start { "before" } else { "after" };
            let distance = if at < start { start - at } else { at - end + 1 };
            return Err(Finding::new(
                "guard regions",
                format!(
                    "a byte outside of slot `{name}` was overwritten, {distance} bytes {side} it \
                     (a write beyond the operand)"
                ),
            ));
        }
        Ok(all[start..end].to_vec())
    }
}

/// Memory that work may still write must not be given back.
fn keep_if_unreached(memory: HostMemory, done: &engine_core::Result<()>) {
    if done.is_err() {
        std::mem::forget(memory);
    }
}

/// A problem prepared on a backend, with its constants placed.
pub struct Prepared<'a> {
    lab: Lab<'a>,
    /// The executable.
    pub executable: ExecutableId,
    constants: Vec<(u32, Placed)>,
}

/// One set of bound operands.
pub struct Operands<'a> {
    lab: Lab<'a>,
    placed: Vec<(u32, Placed)>,
}

/// Prepares a problem: constants are placed, the list is validated and prepared.
///
/// # Errors
/// Where the list is invalid (a fault of the suite), or the backend fails after its `supports` said yes.
pub fn prepare<'a>(lab: Lab<'a>, problem: &Problem) -> Fallible<Prepared<'a>> {
    problem
        .list
        .validate()
        .map_err(|e| Finding::new("suite", format!("the suite made an invalid list: {e}")))?;
    let mut list = problem.list.clone();
    let mut constants = Vec::new();
    for (index, slot) in list.slots.iter_mut().enumerate() {
        if matches!(slot.role, SlotRole::Constant(_)) {
            let bytes = problem.bytes(SlotId(index as u32));
            let placed = lab.place(&slot.tensor, bytes, BufferUse::Weights)?;
            slot.role = SlotRole::Constant(placed.view());
            constants.push((index as u32, placed));
        }
    }
    let executable = lab.backend.prepare(&list).map_err(|e| {
        Finding::new("supports", format!("`supports` said yes, but preparing the list failed: {e}"))
    })?;
    Ok(Prepared { lab, executable, constants })
}

impl<'a> Prepared<'a> {
    /// Prepares a problem whose constants are placed already, by somebody else.
    ///
    /// # Errors
    /// The backend's.
    pub fn of(lab: Lab<'a>, problem: &Problem) -> Fallible<Prepared<'a>> {
        let executable = lab.backend.prepare(&problem.list).map_err(|e| {
            Finding::new("supports", format!("`supports` said yes, but preparing the list failed: {e}"))
        })?;
        Ok(Prepared { lab, executable, constants: Vec::new() })
    }

    /// Places the operands that are bound at submit.
    ///
    /// # Errors
    /// Of allocations and copies.
    pub fn bind(&self, problem: &Problem) -> Fallible<Operands<'a>> {
        let mut placed = Vec::new();
        for (index, (slot, content)) in problem.list.slots.iter().zip(&problem.content).enumerate() {
            if matches!(slot.role, SlotRole::Constant(_) | SlotRole::Scratch) {
                continue;
            }
            let at = match content {
                Content::Cache(cache) => {
                    let at = self.lab.place(&slot.tensor, &[], BufferUse::KvCache)?;
                    self.lab.exchange(&at, cache, true)?;
                    at
                }
                Content::Bytes(bytes) => self.lab.place(&slot.tensor, bytes, BufferUse::Activations)?,
                Content::Unset => self.lab.place(&slot.tensor, &[], BufferUse::Activations)?,
            };
            placed.push((index as u32, at));
        }
        Ok(Operands { lab: self.lab, placed })
    }

    /// Submits; the operands must stay until the value is reached.
    ///
    /// # Errors
    /// The backend's.
    pub fn submit(
        &self,
        problem: &Problem,
        operands: &Operands<'_>,
        waits: &[TimelineValue],
    ) -> Fallible<TimelineValue> {
        self.try_submit(problem, operands, waits).map_err(|e| {
            Finding::new("supports", format!("`supports` said yes, but submitting the list failed: {e}"))
        })
    }

    /// Submits, with the backend's own error.
    ///
    /// # Errors
    /// The backend's.
    pub fn try_submit(
        &self,
        problem: &Problem,
        operands: &Operands<'_>,
        waits: &[TimelineValue],
    ) -> engine_core::Result<TimelineValue> {
        let slots = operands.bound();
        let ranges: Vec<ActiveRanges<'_>> = problem
            .ranges
            .iter()
            .map(|(operation, ranges)| ActiveRanges { operation: *operation, ranges })
            .collect();
        let bindings = Bindings {
            tokens: problem.tokens,
            slots: &slots,
            sequences: &problem.sequences,
            ranges: &ranges,
        };
        bindings.validate(&problem.list)?;
        self.lab.backend.submit(self.executable, &bindings, waits)
    }

    /// Binds, submits, waits, collects and frees.
    ///
    /// # Errors
    /// Of any of these, and where a guard was touched.
    pub fn run(&self, problem: &Problem) -> Fallible<Outputs> {
        let operands = self.bind(problem)?;
        let value = self.submit(problem, &operands, &[])?;
        self.lab.finish(value).map_err(|e| {
            Finding::new("supports", format!("`supports` said yes, but the submission failed: {e}"))
        })?;
        let outputs = operands.outputs(problem)?;
        operands.free()?;
        Ok(outputs)
    }

    /// Checks that constants are unchanged, and gives everything back.
    ///
    /// # Errors
    /// Where the backend does not know its own handles, or a constant was written.
    pub fn close(self, problem: &Problem) -> Fallible<()> {
        self.lab.backend.release(self.executable)?;
        for (index, placed) in self.constants {
            let name = &problem.list.slots[index as usize].name;
            let bytes = self.lab.collect(&placed, name)?;
            if bytes != problem.bytes(SlotId(index)) {
                return Err(Finding::new("guard regions", format!("the constant `{name}` was changed")));
            }
            self.lab.backend.free(placed.buffer)?;
        }
        Ok(())
    }
}

impl Operands<'_> {
    /// As bindings.
    pub fn bound(&self) -> Vec<(SlotId, Bound)> {
        self.placed.iter().map(|(slot, at)| (SlotId(*slot), Bound::Buffer(at.view()))).collect()
    }

    /// Where a slot was placed.
    pub fn placed(&self, slot: SlotId) -> Option<Placed> {
        self.placed.iter().find(|(s, _)| *s == slot.0).map(|(_, at)| *at)
    }

    /// Fills the operands anew from a problem of the same list, except those named.
    ///
    /// # Errors
    /// Of the copies.
    pub fn refill(&self, problem: &Problem, except: &[SlotId]) -> Fallible<()> {
        for (index, placed) in &self.placed {
            if except.contains(&SlotId(*index)) {
                continue;
            }
            let bytes = problem.bytes(SlotId(*index));
            let mut all = vec![FILL; placed.total as usize];
            let start = placed.offset as usize;
            all[start..start + bytes.len()].copy_from_slice(bytes);
            self.lab.write(placed.buffer, &all)?;
        }
        Ok(())
    }

    /// Reads outputs and states back, and looks at guards, unused rows and inputs.
    ///
    /// # Errors
    /// Where something was written that must not be.
    pub fn outputs(&self, problem: &Problem) -> Fallible<Outputs> {
        let mut outputs = Outputs::new();
        for (index, placed) in &self.placed {
            let slot = &problem.list.slots[*index as usize];
            let content = &problem.content[*index as usize];
            if let Content::Cache(cache) = content {
                self.lab.collect(placed, &slot.name)?;
                outputs.insert(*index, self.lab.exchange(placed, cache, false)?);
                continue;
            }
            let mut bytes = self.lab.collect(placed, &slot.name)?;
            if slot.role == SlotRole::Input {
                if bytes != problem.bytes(SlotId(*index)) {
                    return Err(Finding::new(
                        "guard regions",
                        format!("the input `{}` was changed", slot.name),
                    ));
                }
                continue;
            }
            let before = match content {
                Content::Bytes(bytes) => bytes.clone(),
                _ => vec![FILL; bytes.len()],
            };
            let used = TensorType { rows: problem.used_rows(SlotId(*index)), ..slot.tensor };
            let (row, stride) = (used.row_bytes() as usize, used.row_stride as usize);
            let written = |at: usize| (at as u64) < used.bytes() && at % stride < row;
            if let Some(at) = (0..bytes.len()).find(|&at| !written(at) && bytes[at] != before[at]) {
                return Err(Finding::new(
                    "guard regions",
                    format!(
                        "byte {at} of slot `{}` was overwritten; it lies in row {}, and the submission's {} tokens \
                         use {} rows of {row} bytes",
                        slot.name,
                        at / stride,
                        problem.tokens,
                        used.rows
                    ),
                ));
            }
            bytes.truncate(used.bytes() as usize);
            outputs.insert(*index, bytes);
        }
        Ok(outputs)
    }

    /// Frees the buffers.
    ///
    /// # Errors
    /// Where the backend does not know its own handles.
    pub fn free(self) -> Fallible<()> {
        for (_, placed) in self.placed {
            self.lab.backend.free(placed.buffer)?;
        }
        Ok(())
    }
}

/// Prepares, runs once and closes.
///
/// # Errors
/// Of any of these.
pub fn run_once(backend: &dyn ComputeBackend, problem: &Problem) -> Fallible<Outputs> {
    let prepared = prepare(Lab::new(backend), problem)?;
    let outputs = prepared.run(problem)?;
    prepared.close(problem)?;
    Ok(outputs)
}
