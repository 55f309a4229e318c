//! A backend that passes everything on to another one, except for its fault.

use super::Fault;
use crate::diverge::single;
use crate::problem::{Content, Problem};
use crate::run::{Lab, run_once};
use crate::values::{f32_bytes, f32_values};
use engine_core::backend::{
    ActiveRanges, Bindings, Bound, BufferId, BufferUse, BufferView, Counter, DeviceDescription, ExecutableId,
    SequenceSpan, Support, TimelineValue, ToleranceClass,
};
use engine_core::operation::{OperationKind, OperationList, RopeStyle, Selection, SlotId, SlotRole};
use engine_core::{ClusterRange, ComputeBackend, DType, Error, HostSpan, Reached, Result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A backend with a fault.
pub(super) struct Wrapper {
    inner: Arc<dyn ComputeBackend>,
    fault: Fault,
    description: DeviceDescription,
    lists: Mutex<HashMap<u64, OperationList>>,
    runs: AtomicU64,
}

impl Wrapper {
    pub(super) fn new(inner: Arc<dyn ComputeBackend>, fault: Fault) -> Wrapper {
        let mut description = inner.describe().clone();
        description.tolerance = ToleranceClass::F32;
        Wrapper { inner, fault, description, lists: Mutex::new(HashMap::new()), runs: AtomicU64::new(0) }
    }

    fn lists(&self) -> std::sync::MutexGuard<'_, HashMap<u64, OperationList>> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The list as the faulty device understands it.
    fn misread(&self, list: &OperationList) -> OperationList {
        let mut list = list.clone();
        for operation in &mut list.operations {
            match (&mut operation.kind, self.fault) {
                (OperationKind::Rope(rope), Fault::RopeOrder) => {
                    rope.style = match rope.style {
                        RopeStyle::Halves => RopeStyle::Interleaved,
                        _ => RopeStyle::Halves,
                    };
                }
                (OperationKind::Ffn(ffn), Fault::PeekingPredictor) => {
                    if matches!(ffn.selection, Selection::Mask(_)) {
                        ffn.selection = if ffn.function.is_zero_below() {
                            Selection::GateFirst
                        } else {
                            Selection::Threshold(0.0)
                        };
                    }
                }
                _ => {}
            }
        }
        list
    }

    fn view(list: &OperationList, bindings: &Bindings<'_>, slot: SlotId) -> Option<BufferView> {
        if let Some(SlotRole::Constant(view)) = list.slot(slot).map(|s| s.role) {
            return Some(view);
        }
        bindings.slots.iter().find_map(|(id, bound)| match bound {
            Bound::Buffer(view) if *id == slot => Some(*view),
            _ => None,
        })
    }

    /// The bytes of a slot on the device.
    fn peek(&self, list: &OperationList, bindings: &Bindings<'_>, slot: SlotId) -> Result<Vec<u8>> {
        let lost = || Error::internal("a slot of a planted fault is not bound");
        let view = Self::view(list, bindings, slot).ok_or_else(lost)?;
        let bytes = list.slot(slot).map_or(0, |s| s.tensor.bytes());
        let all = Lab::new(self.inner.as_ref()).read(view.buffer, view.offset + bytes)?;
        Ok(all[view.offset as usize..].to_vec())
    }

    /// Overwrites bytes from a slot's start on the device.
    fn poke(&self, list: &OperationList, bindings: &Bindings<'_>, slot: SlotId, bytes: &[u8]) -> Result<()> {
        let lost = || Error::internal("a slot of a planted fault is not bound");
        let view = Self::view(list, bindings, slot).ok_or_else(lost)?;
        let lab = Lab::new(self.inner.as_ref());
        let mut all = lab.read(view.buffer, view.offset)?;
        all.extend_from_slice(bytes);
        lab.write(view.buffer, &all)
    }

    /// The first operation's output, for faults of projections and layers.
    fn output(list: &OperationList) -> Option<(SlotId, bool)> {
        match list.operations.first().map(|o| &o.kind) {
            Some(OperationKind::Linear { output, .. }) => Some((*output, true)),
            Some(OperationKind::Ffn(ffn)) => Some((ffn.output, false)),
            _ => None,
        }
    }

    /// The single operation of a list with what is on the device.
    fn snapshot(&self, list: &OperationList, bindings: &Bindings<'_>) -> Result<Problem> {
        let problem = Problem {
            content: vec![Content::Unset; list.slots.len()],
            list: list.clone(),
            tokens: bindings.tokens,
            sequences: bindings.sequences.to_vec(),
            ranges: bindings.ranges.iter().map(|r| (r.operation, r.ranges.to_vec())).collect(),
        };
        let mut bytes = Vec::new();
        for index in 0..list.slots.len() {
            let slot = SlotId(index as u32);
            bytes.push(self.peek(list, bindings, slot).unwrap_or_default());
        }
        single(&problem, 0, &bytes).map(|(one, _)| one).map_err(|f| Error::internal(f.to_string()))
    }

    /// What one block of the last row contributes, by token.
    fn block_share(&self, list: &OperationList, bindings: &Bindings<'_>) -> Result<Vec<f32>> {
        let mut one = self.snapshot(list, bindings)?;
        let Some(OperationKind::Linear { weight, bias, output, accumulate, .. }) =
            one.list.operations.first_mut().map(|o| &mut o.kind)
        else {
            return Ok(Vec::new());
        };
        (*bias, *accumulate) = (None, false);
        let (weight, output) = (*weight, *output);
        one.list.slots[output.0 as usize].role = SlotRole::Output;
        one.content[output.0 as usize] = Content::Unset;
        let tensor = one.tensor(weight);
        let start = ((tensor.rows - 1) * tensor.row_stride) as usize;
        let block = tensor.dtype.block_bytes() as usize;
        if let Some(bytes) = one.bytes_mut(weight) {
            bytes[..start].fill(0);
            bytes[start + block..].fill(0);
        }
        let outputs = run_once(self.inner.as_ref(), &one).map_err(|f| Error::internal(f.to_string()))?;
        let columns = tensor.rows as usize;
        let values = f32_values(outputs.get(&output.0).map_or(&[][..], |b| b));
        Ok(values.chunks(columns).map(|row| row[columns - 1]).collect())
    }

    /// The layer over all neurons of the active ranges, selected or not.
    fn dense(&self, list: &OperationList, bindings: &Bindings<'_>) -> Result<Option<Vec<f32>>> {
        let mut one = self.snapshot(list, bindings)?;
        let Some(OperationKind::Ffn(ffn)) = one.list.operations.first_mut().map(|o| &mut o.kind) else {
            return Ok(None);
        };
        if ffn.selection == Selection::All {
            return Ok(None);
        }
        ffn.selection = Selection::All;
        let output = ffn.output;
        let outputs = run_once(self.inner.as_ref(), &one).map_err(|f| Error::internal(f.to_string()))?;
        Ok(outputs.get(&output.0).map(|b| f32_values(b)))
    }

    fn spoil(
        &self,
        list: &OperationList,
        bindings: &Bindings<'_>,
        before: Option<Vec<u8>>,
        share: &[f32],
        dense: Option<Vec<f32>>,
    ) -> Result<()> {
        if let (Fault::StaleCache, Some(OperationKind::KvAppend { cache, .. })) =
            (self.fault, list.operations.first().map(|o| &o.kind))
        {
            return before.map_or(Ok(()), |bytes| self.poke(list, bindings, *cache, &bytes));
        }
        let Some((slot, linear)) = Self::output(list) else { return Ok(()) };
        let mut bytes = self.peek(list, bindings, slot)?;
        let columns = list.slot(slot).map_or(0, |s| s.tensor.columns) as usize;
        let flip_first = |bytes: &mut Vec<u8>| bytes[0] ^= 1;
        match self.fault {
            Fault::ScaleOff if linear => {
                for (token, share) in share.iter().enumerate() {
                    let at = (token * columns + columns - 1) * 4;
                    let old = f32_values(&bytes[at..at + 4]);
                    bytes[at..at + 4].copy_from_slice(&f32_bytes(&[old[0] + share / 4096.0]));
                }
            }
            Fault::LastRow if linear => {
                let Some(before) = before else { return Ok(()) };
                for token in 0..bindings.tokens as usize {
                    let at = (token * columns + columns - 1) * 4;
                    bytes[at..at + 4].copy_from_slice(&before[at..at + 4]);
                }
            }
            Fault::Racing if self.runs.fetch_add(1, Ordering::Relaxed) % 2 == 1 => flip_first(&mut bytes),
            Fault::BatchDependent if bindings.tokens > 1 => flip_first(&mut bytes),
            Fault::ReadsUnselected => {
                let Some(dense) = dense else { return Ok(()) };
                let mut values = f32_values(&bytes);
                for (value, unselected) in values.iter_mut().zip(dense) {
                    *value += 0.0 * unselected;
                }
                bytes = f32_bytes(&values);
            }
            Fault::WritesPast => bytes.extend_from_slice(&[0; 4]),
            _ => return Ok(()),
        }
        self.poke(list, bindings, slot, &bytes)
    }
}

/// Every range one neuron longer, where there is room.
fn longer(list: &OperationList, active: &ActiveRanges<'_>) -> Vec<ClusterRange> {
    let neurons = match list.operations.get(active.operation as usize).map(|o| &o.kind) {
        Some(OperationKind::Ffn(ffn)) => list.slot(ffn.up).map_or(0, |s| s.tensor.rows as u32),
        _ => 0,
    };
    let next = active.ranges.iter().skip(1).map(|r| r.start).chain([neurons]);
    active
        .ranges
        .iter()
        .zip(next)
        .map(|(r, next)| ClusterRange::new(r.start, (r.end + 1).min(next)))
        .collect()
}

/// Every sequence one position further, where the cache has room.
fn further(list: &OperationList, spans: &[SequenceSpan]) -> Vec<SequenceSpan> {
    let positions = list.operations.iter().find_map(|o| match &o.kind {
        OperationKind::Attention { cache, .. } => list.slot(*cache).map(|s| s.tensor.rows as u32),
        _ => None,
    });
    let appends = list.operations.iter().any(|o| matches!(o.kind, OperationKind::KvAppend { .. }));
    let Some(positions) = positions.filter(|_| !appends) else { return spans.to_vec() };
    spans
        .iter()
        .map(|s| SequenceSpan {
            past: s.past + u32::from(s.cache_base + s.past + s.tokens < positions),
            ..*s
        })
        .collect()
}

impl ComputeBackend for Wrapper {
    fn describe(&self) -> &DeviceDescription {
        &self.description
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        self.inner.supports(list, index)
    }

    fn allocate(&self, bytes: u64, purpose: BufferUse) -> Result<BufferId> {
        self.inner.allocate(bytes, purpose)
    }

    fn import(&self, span: HostSpan) -> Result<BufferId> {
        self.inner.import(span)
    }

    fn free(&self, buffer: BufferId) -> Result<()> {
        self.inner.free(buffer)
    }

    fn prepare(&self, list: &OperationList) -> Result<ExecutableId> {
        let executable = self.inner.prepare(&self.misread(list))?;
        self.lists().insert(executable.0, list.clone());
        Ok(executable)
    }

    fn release(&self, executable: ExecutableId) -> Result<()> {
        self.lists().remove(&executable.0);
        self.inner.release(executable)
    }

    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue> {
        let Some(list) = self.lists().get(&executable.0).cloned() else {
            return self.inner.submit(executable, bindings, waits);
        };
        let q8 = list.operations.iter().any(|o| match &o.kind {
            OperationKind::Linear { weight, .. } => {
                list.slot(*weight).is_some_and(|s| s.tensor.dtype == DType::Q8_0)
            }
            _ => false,
        });
        match self.fault {
            Fault::Aborts if q8 => std::process::abort(),
            Fault::Hangs if q8 => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            _ => {}
        }
        let touched = match self.fault {
            Fault::StaleCache => match list.operations.first().map(|o| &o.kind) {
                Some(OperationKind::KvAppend { cache, .. })
                    if bindings.sequences.iter().any(|s| s.past > 0) =>
                {
                    Some(*cache)
                }
                _ => None,
            },
            _ => Self::output(&list).map(|(slot, _)| slot),
        };
        let before = touched.map(|slot| self.peek(&list, bindings, slot)).transpose()?;
        let share = match self.fault {
            Fault::ScaleOff => self.block_share(&list, bindings)?,
            _ => Vec::new(),
        };
        let dense = match self.fault {
            Fault::ReadsUnselected => self.dense(&list, bindings)?,
            _ => None,
        };
        let ranges: Vec<(u32, Vec<ClusterRange>)> = bindings
            .ranges
            .iter()
            .map(|active| match self.fault {
                Fault::PastCluster => (active.operation, longer(&list, active)),
                _ => (active.operation, active.ranges.to_vec()),
            })
            .collect();
        let ranges: Vec<ActiveRanges<'_>> =
            ranges.iter().map(|(operation, ranges)| ActiveRanges { operation: *operation, ranges }).collect();
        let sequences = match self.fault {
            Fault::MaskOffByOne => further(&list, bindings.sequences),
            _ => bindings.sequences.to_vec(),
        };
        let altered = Bindings { ranges: &ranges, sequences: &sequences, ..*bindings };
        let value = self.inner.submit(executable, &altered, waits)?;
        if before.is_some() && Lab::new(self.inner.as_ref()).finish(value).is_ok() {
            self.spoil(&list, bindings, before, &share, dense)?;
        }
        Ok(value)
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        self.inner.wait(value, timeout)
    }

    fn counters(&self) -> Vec<Counter> {
        self.inner.counters()
    }
}
