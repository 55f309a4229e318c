//! An executable: a list with the memory that it needs beside what is bound, and its command buffers, which are recorded
//! again only when something bound has moved.

use std::sync::{Arc, Mutex, PoisonError};

use engine_core::backend::{Bindings, Bound, SequenceSpan};
use engine_core::operation::{Access, OperationKind, OperationList, SlotId, SlotRole};
use engine_core::{ClusterRange, Error, HostSpan, Result, TensorType};

use crate::check::{Limits, Needs, check};
use crate::device::{Device, Kind};
use crate::emit::{Step, emit};
use crate::memory::{Budget, Buffers, Memory, Place, SlotAccess};
use crate::pipelines::Pipelines;
use crate::program::parameters::{Layout, Parameters};
use crate::program::transfer::{Stream, execute_stream, rows_of};
use crate::record::{Command, Recorded};

pub(crate) mod parameters;
mod rope;
pub(crate) mod transfer;

/// A host slot of at most this size is staged as a whole, as long as all of a list's are within [`STAGED`].
const STAGED_SLOT: u64 = 4 << 20;
const STAGED: u64 = 8 << 20;

/// What every executable of a device uses.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) device: Arc<Device>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) pipelines: Arc<Pipelines>,
    pub(crate) limits: Limits,
}

/// Memory that operations use one after the other.
#[derive(Clone, Default)]
pub(crate) struct Temporary {
    pub(crate) input: Option<Place>,
    pub(crate) hidden: Option<Place>,
    pub(crate) sums: Option<Place>,
    pub(crate) outputs: Option<Place>,
}

/// A prepared list.
pub(crate) struct Program {
    pub(crate) shared: Shared,
    pub(crate) list: OperationList,
    /// Of constants and scratch slots.
    fixed: Vec<Option<Place>>,
    pub(crate) temporary: Temporary,
    pub(crate) parameters: Option<Parameters>,
    /// Of host slots that are staged as a whole.
    staged: Vec<Option<Place>>,
    access: Vec<SlotAccess>,
    recorded: Mutex<Option<(Key, Vec<Segment>)>>,
}

/// What the recorded commands depend on.
#[derive(PartialEq)]
struct Key {
    tokens: u32,
    bound: Vec<(u64, u64)>,
    ranged: Vec<u32>,
    /// Only where an operation copies a part of a KV cache.
    sequences: Vec<SequenceSpan>,
}

enum Segment {
    Run(Recorded),
    Stream(Stream),
}

/// What was bound to one submission, as the emission sees it.
pub(crate) struct Env {
    pub(crate) tokens: u32,
    pub(crate) sequences: Vec<SequenceSpan>,
    /// Active ranges by operation.
    pub(crate) ranges: Vec<(u32, Vec<ClusterRange>)>,
    places: Vec<Option<Place>>,
    spans: Vec<Option<HostSpan>>,
}

impl Env {
    /// Where a device slot, or a staged host slot, lies.
    pub(crate) fn place(&self, id: SlotId) -> Option<&Place> {
        self.places.get(id.0 as usize)?.as_ref()
    }

    pub(crate) fn span(&self, id: SlotId) -> Option<HostSpan> {
        *self.spans.get(id.0 as usize)?
    }
}

/// A program with everything that one submission bound.
pub(crate) struct Submission {
    program: Arc<Program>,
    key: Key,
    env: Env,
}

impl Program {
    /// Checks a list and takes the memory that it needs.
    pub(crate) fn new(shared: &Shared, list: &OperationList, buffers: &Buffers) -> Result<Program> {
        list.validate()?;
        let mut needs = Needs::default();
        for (at, operation) in list.operations.iter().enumerate() {
            let of = check(list, at, shared.limits).map_err(|reason| {
                Error::unsupported(format!("{} ({}): {reason}", operation.label, operation.kind.name()))
            })?;
            needs = needs.most(of);
        }
        let mut access = vec![SlotAccess::default(); list.slots.len()];
        for operation in &list.operations {
            let copies = matches!(
                operation.kind,
                OperationKind::Copy { .. } | OperationKind::KvExport { .. } | OperationKind::KvImport { .. }
            );
            for operand in operation.kind.operands() {
                let of = &mut access[operand.slot.0 as usize];
                of.written |= operand.access != Access::Read;
                of.by_shader |= !copies;
            }
        }
        let mut fixed = vec![None; list.slots.len()];
        for (at, slot) in list.slots.iter().enumerate() {
            if let SlotRole::Constant(view) = slot.role {
                fixed[at] = Some(buffers.place(slot, view, slot.tensor.rows, access[at])?);
            }
        }
        let (scratch, temporary) = scratch(shared, list, needs)?;
        for (at, place) in scratch {
            fixed[at] = Some(place);
        }
        let ropes = rope::tables(shared, list, &fixed)?;
        let layout = Layout::new(list, ropes)?;
        Ok(Program {
            staged: staged(shared, list)?,
            parameters: Parameters::new(shared, layout)?,
            shared: shared.clone(),
            list: list.clone(),
            fixed,
            temporary,
            access,
            recorded: Mutex::default(),
        })
    }

    /// Checks everything about a submission and resolves its places.
    pub(crate) fn bind(
        self: &Arc<Program>,
        bindings: &Bindings<'_>,
        buffers: &Buffers,
    ) -> Result<Submission> {
        bindings.validate(&self.list)?;
        let mut places: Vec<Option<Place>> =
            self.fixed.iter().zip(&self.staged).map(|(f, s)| f.clone().or(s.clone())).collect();
        let mut spans = vec![None; self.list.slots.len()];
        let mut bound = vec![(0, 0); self.list.slots.len()];
        for (SlotId(at), binding) in bindings.slots {
            let at = *at as usize;
            let slot = &self.list.slots[at];
            let rows = if slot.per_token { u64::from(bindings.tokens) } else { slot.tensor.rows };
            match binding {
                Bound::Buffer(view) => {
                    places[at] = Some(buffers.place(slot, *view, rows, self.access[at])?);
                    bound[at] = (view.buffer.0, view.offset);
                }
                Bound::Host(span) => {
                    if span.address() == 0 {
                        return Err(Error::invalid(format!(
                            "slot `{}` is bound to the null address",
                            slot.name
                        )));
                    }
                    spans[at] = Some(span.slice(0, TensorType { rows, ..slot.tensor }.bytes())?);
                }
            }
        }
        let moves_cache = |kind: &OperationKind| {
            matches!(kind, OperationKind::KvExport { .. } | OperationKind::KvImport { .. })
        };
        let sequences = if self.list.operations.iter().any(|o| moves_cache(&o.kind)) {
            bindings.sequences.to_vec()
        } else {
            Vec::new()
        };
        Ok(Submission {
            program: self.clone(),
            key: Key {
                tokens: bindings.tokens,
                bound,
                ranged: bindings.ranges.iter().map(|r| r.operation).collect(),
                sequences,
            },
            env: Env {
                tokens: bindings.tokens,
                sequences: bindings.sequences.to_vec(),
                ranges: bindings.ranges.iter().map(|r| (r.operation, r.ranges.to_vec())).collect(),
                places,
                spans,
            },
        })
    }

    fn record(&self, env: &Env) -> Result<Vec<Segment>> {
        let mut segments = Vec::new();
        let mut commands: Vec<Command> = Vec::new();
        let device = &self.shared.device;
        for step in emit(self, env)? {
            match step {
                Step::Command(command) => commands.push(command),
                Step::Stream(stream) => {
                    if !commands.is_empty() {
                        segments.push(Segment::Run(Recorded::new(device, &std::mem::take(&mut commands))?));
                    }
                    segments.push(Segment::Stream(stream));
                }
            }
        }
        if !commands.is_empty() {
            segments.push(Segment::Run(Recorded::new(device, &commands)?));
        }
        Ok(segments)
    }
}

impl Submission {
    /// Runs the list once, on the queue's thread; answers how many dispatches the device executed.
    pub(crate) fn run(self) -> Result<u64> {
        let Submission { program, key, env } = self;
        let mut recorded = program.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        if recorded.as_ref().is_none_or(|(known, _)| *known != key) {
            *recorded = None;
            *recorded = Some((key, program.record(&env)?));
        }
        let Some((_, segments)) = &*recorded else { return Err(Error::internal("nothing was recorded")) };
        program.exchange(&env, false)?;
        if let Some(parameters) = &program.parameters {
            parameters.fill(&program.list, &env)?;
        }
        let mut dispatches = 0;
        for segment in segments {
            match segment {
                Segment::Run(run) => {
                    program.shared.device.execute(run.commands)?;
                    dispatches += run.dispatches;
                }
                Segment::Stream(stream) => execute_stream(&program.shared, stream, &env)?,
            }
        }
        if let Some(parameters) = &program.parameters {
            parameters.complaints(&program.list)?;
        }
        program.exchange(&env, true)?;
        Ok(dispatches)
    }
}

impl Program {
    /// Copies staged host slots in, or out.
    fn exchange(&self, env: &Env, out: bool) -> Result<()> {
        for (at, place) in self.staged.iter().enumerate() {
            let Some((place, span)) = place.as_ref().zip(env.spans[at]) else { continue };
            if self.access[at].written != out {
                continue;
            }
            for (offset, bytes) in rows_of(&self.list.slots[at], env.tokens) {
                let part = span.slice(offset, bytes)?;
                // SAFETY: the span is this submission's, which has not been reached.
                unsafe { place.memory.exchange(place.offset + offset, part, out)? };
            }
        }
        Ok(())
    }
}

struct Room(u64);

impl Room {
    /// A place of its own for `bytes`, apart from its neighbours by the device's alignment.
    fn take(&mut self, bytes: u64, alignment: u64) -> Result<u64> {
        let start = self.0.checked_next_multiple_of(alignment.max(64));
        let end = start.and_then(|start| start.checked_add(bytes));
        self.0 = end.ok_or_else(|| Error::out_of_memory("the list's scratch memory overflows"))?;
        Ok(start.unwrap_or(0))
    }
}

/// One piece of memory for all scratch slots and what operations need beside them.
fn scratch(shared: &Shared, list: &OperationList, needs: Needs) -> Result<(Vec<(usize, Place)>, Temporary)> {
    let (mut room, alignment) = (Room(0), shared.limits.offset_alignment);
    let mut slots = Vec::new();
    for (at, slot) in list.slots.iter().enumerate() {
        if slot.role == SlotRole::Scratch {
            slots.push((at, room.take(slot.tensor.bytes(), alignment)?, slot.tensor.bytes()));
        }
    }
    let mut temporary = Vec::new();
    for bytes in [needs.input, needs.hidden, needs.sums, needs.outputs] {
        temporary
            .push((bytes > 0).then(|| room.take(bytes, alignment)).transpose()?.map(|start| (start, bytes)));
    }
    if room.0 == 0 {
        return Ok((Vec::new(), Temporary::default()));
    }
    let memory = Arc::new(Memory::allocate(&shared.device, &shared.budget, room.0, Kind::Device)?);
    let place = |at: usize| temporary[at].map(|(start, bytes)| Place::of(&memory, start, bytes));
    let temporary = Temporary { input: place(0), hidden: place(1), sums: place(2), outputs: place(3) };
    Ok((
        slots.into_iter().map(|(at, start, bytes)| (at, Place::of(&memory, start, bytes))).collect(),
        temporary,
    ))
}

/// Staging for host slots that are small enough together.
fn staged(shared: &Shared, list: &OperationList) -> Result<Vec<Option<Place>>> {
    let mut room = Room(0);
    let mut starts = vec![None; list.slots.len()];
    for (at, slot) in list.slots.iter().enumerate() {
        let bytes = slot.tensor.bytes();
        if slot.place == engine_core::operation::Place::Host
            && bytes <= STAGED_SLOT
            && room.0 + bytes <= STAGED
        {
            starts[at] = Some((room.take(bytes, 64)?, bytes));
        }
    }
    if room.0 == 0 {
        return Ok(vec![None; list.slots.len()]);
    }
    let memory = Arc::new(Memory::allocate(&shared.device, &shared.budget, room.0, Kind::Staging)?);
    Ok(starts.into_iter().map(|s| s.map(|(start, bytes)| Place::of(&memory, start, bytes))).collect())
}
