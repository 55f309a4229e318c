//! Executables: a list compiled, scheduled and given its memory; and one run of it on the pool.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use engine_core::backend::{Bindings, Bound};
use engine_core::operation::{Access, OperationList, SlotId, SlotRole};
use engine_core::{Error, Result};

use crate::compile::{Kind, RopeKey, compile};
use crate::kernels::Kernels;
use crate::kernels::rope::frequencies;
use crate::kernels::simd::BLOCK;
use crate::pool::{Pool, Stopped, Worker};
use crate::run::attention::{self, RopeTable};
use crate::run::input::Area;
use crate::run::{
    Claims, Env, Local, Position, Run, Shared, SharedLayout, elementwise, experts, ffn, index, linear,
};
use crate::schedule::{Step, schedule};
use engine_plugin::buffers::{Budget, Buffers, Owned, Place, check_alignment};

/// The most tokens that a sparse layer handles at a time: its masks take four bytes per neuron and token.
pub(crate) const SPARSE_TOKENS: usize = 64;

/// A prepared list.
pub(crate) struct Program {
    list: OperationList,
    steps: Vec<Step>,
    tables: Vec<RopeTable>,
    constants: Vec<Option<Place>>,
    /// Offset of each scratch slot within the executable's memory.
    scratch: Vec<Option<usize>>,
    /// Offsets of the rows that mixtures of experts keep: [`experts::STAGING`].
    staging: Vec<usize>,
    written: Vec<bool>,
    shared: Shared,
    claims: Vec<Claims>,
    locals: Vec<Mutex<Local>>,
    /// Bytes of weights that were multiplied and not yet told.
    read: AtomicU64,
    /// What `shared` and `scratch` point into.
    _memory: Owned,
}

/// A program with everything that one submission bound.
pub(crate) struct Submission {
    program: Arc<Program>,
    env: Env,
    careful: bool,
    /// Keeps buffers alive.
    _places: Vec<Place>,
}

struct Layout(usize);

impl Layout {
    /// Room for `count` rows of `bytes`, on a cache line of its own.
    fn take(&mut self, count: usize, bytes: usize) -> Result<usize> {
        let start = self.0.next_multiple_of(64);
        let end =
            count.checked_mul(bytes).and_then(|n| n.checked_add(start)).filter(|&n| n <= isize::MAX as usize);
        self.0 =
            end.ok_or_else(|| Error::out_of_memory("the list's scratch memory exceeds the address space"))?;
        Ok(start)
    }

    fn area(&mut self, tokens: usize, widest: usize, values: bool) -> Result<Area> {
        let stride = widest.next_multiple_of(BLOCK);
        Ok(Area {
            codes: self.take(tokens, stride)?,
            scales: self.take(tokens, stride / BLOCK * 4)?,
            values: self.take(if values { tokens } else { 0 }, stride * 4)?,
            stride,
        })
    }
}

impl Program {
    /// Compiles a list and takes the memory that it needs.
    pub(crate) fn new(
        list: &OperationList,
        buffers: &Buffers,
        budget: &Arc<Budget>,
        threads: usize,
    ) -> Result<Program> {
        list.validate()?;
        let mut keys = Vec::new();
        let mut kinds = Vec::with_capacity(list.operations.len());
        for (at, operation) in list.operations.iter().enumerate() {
            kinds.push(compile(list, at, &mut keys).map_err(|reason| {
                Error::unsupported(format!("{} ({}): {reason}", operation.label, operation.kind.name()))
            })?);
        }
        let mut written = vec![false; list.slots.len()];
        for operand in list.operations.iter().flat_map(|o| o.kind.operands()) {
            written[index(operand.slot)] |= operand.access != Access::Read;
        }
        let mut constants = Vec::with_capacity(list.slots.len());
        for slot in &list.slots {
            constants.push(match slot.role {
                SlotRole::Constant(view) => Some(buffers.place(slot, view, slot.tensor.rows, false)?),
                _ => None,
            });
        }
        let tables = keys.iter().map(|key| rope_table(key, &constants)).collect::<Result<Vec<_>>>()?;
        let mut layout = Layout(0);
        let mut scratch = Vec::with_capacity(list.slots.len());
        for slot in &list.slots {
            scratch.push(match slot.role {
                SlotRole::Scratch => Some(layout.take(1, slot.tensor.bytes() as usize)?),
                _ => None,
            });
        }
        let staging = staging(&kinds, list.token_capacity as usize, &mut layout)?;
        let shared = shared_layout(list, &kinds, &tables, &mut layout)?;
        let memory = Owned::allocate(budget, shared.bytes.max(1) as u64, "an executable's scratch memory")?;
        let shared = Shared { base: memory.address(), layout: shared };
        let steps = schedule(list, kinds);
        let claims = steps.iter().map(|_| Claims::default()).collect();
        let locals = (0..threads).map(|_| Mutex::default()).collect();
        Ok(Program {
            list: list.clone(),
            steps,
            tables,
            constants,
            scratch,
            staging,
            written,
            shared,
            claims,
            locals,
            read: AtomicU64::new(0),
            _memory: memory,
        })
    }

    /// Checks everything about a submission and resolves its addresses.
    pub(crate) fn bind(
        self: &Arc<Program>,
        bindings: &Bindings<'_>,
        buffers: &Buffers,
    ) -> Result<Submission> {
        bindings.validate(&self.list)?;
        let mut addresses: Vec<*mut u8> = (0..self.list.slots.len())
            .map(|slot| match (&self.constants[slot], self.scratch[slot]) {
                (Some(place), _) => place.address,
                (None, Some(offset)) => self.shared.at::<u8>(offset),
                (None, None) => std::ptr::null_mut(),
            })
            .collect();
        addresses.extend(self.staging.iter().map(|offset| self.shared.at::<u8>(*offset)));
        let mut places = Vec::with_capacity(bindings.slots.len());
        // Address, length and whether it is written, of everything bound.
        let mut extents = Vec::with_capacity(bindings.slots.len());
        for (SlotId(at), bound) in bindings.slots {
            let at = *at as usize;
            let (slot, written) = (&self.list.slots[at], self.written[at]);
            let rows = if slot.per_token { u64::from(bindings.tokens) } else { slot.tensor.rows };
            match bound {
                Bound::Buffer(view) => {
                    let place = buffers.place(slot, *view, rows, written)?;
                    addresses[at] = place.address;
                    extents.push((place.address as usize, place.bytes as usize, written));
                    places.push(place);
                }
                Bound::Host(span) => {
                    if span.address() == 0 {
                        return Err(Error::invalid(format!(
                            "slot `{}` is bound to the null address",
                            slot.name
                        )));
                    }
                    check_alignment(slot, span.address())?;
                    addresses[at] = span.address() as *mut u8;
                    extents.push((span.address(), span.len() as usize, written));
                }
            }
        }
        let mut positions = Vec::new();
        for span in bindings.sequences {
            let base = span.cache_base;
            positions.extend((0..span.tokens).map(|i| Position { position: span.past + i, base }));
        }
        let ranges = bindings.ranges.iter().map(|r| (r.operation as usize, r.ranges.to_vec())).collect();
        let env = Env {
            addresses,
            tokens: bindings.tokens as usize,
            positions,
            sequences: bindings.sequences.to_vec(),
            ranges,
        };
        Ok(Submission { program: self.clone(), env, careful: overlaps(extents), _places: places })
    }

    fn step(&self, run: &Run<'_>, kind: &Kind, local: &mut Local) -> Result<(), Stopped> {
        match kind {
            Kind::Copy(op) => elementwise::copy(run, op),
            Kind::Embed(op) => elementwise::embed(run, op)?,
            Kind::Norm(op) => elementwise::norm(run, op),
            Kind::Linear(op) => linear::linear(run, op, local)?,
            Kind::Rope(op) => attention::rope(run, op, local)?,
            Kind::KvAppend(op) => attention::append(run, op),
            Kind::Attention(op) => attention::attention(run, op, local),
            Kind::Ffn(op) => ffn::ffn(run, op, local)?,
            Kind::Route(op) => experts::route(run, op, local),
            Kind::Experts(op) => experts::experts(run, op, local)?,
            Kind::Predict(op) => linear::predict(run, op, local)?,
            Kind::Activate(op) => elementwise::activate(run, op),
            Kind::Binary(op) => elementwise::binary(run, op),
            Kind::KvTransfer(op) => attention::transfer(run, op),
        }
        Ok(())
    }

    fn work(
        &self,
        worker: &Worker<'_>,
        env: &Env,
        careful: bool,
        kernels: &'static Kernels,
    ) -> Result<(), Stopped> {
        let mut local = self.locals[worker.index].lock().unwrap_or_else(PoisonError::into_inner);
        let run = |claims| Run { kernels, worker, env, shared: &self.shared, claims, careful };
        if let (Some(claims), false) = (self.claims.first(), self.tables.is_empty()) {
            attention::rope_tables(&run(claims), &self.tables);
            worker.barrier()?;
        }
        for (at, (step, claims)) in self.steps.iter().zip(&self.claims).enumerate() {
            let conflict = if env.tokens == 1 { step.barrier_one } else { step.barrier_many };
            if conflict || (careful && at > 0) {
                worker.barrier()?;
            }
            self.step(&run(claims), &step.kind, &mut local)?;
        }
        self.read.fetch_add(std::mem::take(&mut local.tile.read), Relaxed);
        Ok(())
    }
}

impl Submission {
    /// Runs the list once.
    pub(crate) fn run(&self, pool: &Pool, kernels: &'static Kernels) -> Result<()> {
        let program = &*self.program;
        for counter in program.claims.iter().flatten() {
            AtomicUsize::store(counter, 0, Relaxed);
        }
        pool.run(&|worker| program.work(worker, &self.env, self.careful, kernels))
    }

    /// Bytes of weights that the run multiplied, each row once per operation; told once.
    pub(crate) fn take_read(&self) -> u64 {
        self.program.read.swap(0, Relaxed)
    }
}

fn rope_table(key: &RopeKey, constants: &[Option<Place>]) -> Result<RopeTable> {
    let factors: &[f32] = match key.factors.and_then(|id| constants[index(id)].as_ref()) {
        // SAFETY: the constant was validated as an f32 vector with an element per pair; it is aligned and long enough.
        Some(place) => unsafe {
            std::slice::from_raw_parts(place.address.cast(), (key.rotary_dim / 2) as usize)
        },
        None => &[],
    };
    let (frequencies, magnitude) = frequencies(key.rotary_dim, key.base, key.scaling, factors)
        .ok_or_else(|| Error::unsupported("an unknown rope scaling"))?;
    Ok(RopeTable { frequencies, magnitude })
}

/// Room for the rows of one expert, where the list has any.
fn staging(kinds: &[Kind], tokens: usize, layout: &mut Layout) -> Result<Vec<usize>> {
    let layers =
        || kinds.iter().filter_map(|kind| if let Kind::Experts(op) = kind { Some(&op.layer) } else { None });
    let Some(stride) = layers().map(|layer| layer.input.stride).max() else { return Ok(Vec::new()) };
    Ok(vec![layout.take(tokens, stride)?, layout.take(tokens, stride)?, layout.take(tokens, 64)?])
}

fn shared_layout(
    list: &OperationList,
    kinds: &[Kind],
    tables: &[RopeTable],
    layout: &mut Layout,
) -> Result<SharedLayout> {
    let tokens = list.token_capacity as usize;
    let (mut input, mut input_values, mut hidden, mut hidden_values) = (0, false, 0, false);
    let (mut neurons, mut sparse) = (0, false);
    for kind in kinds {
        let (from, needs) = match kind {
            Kind::Linear(op) => (op.input.columns, op.needs),
            Kind::Ffn(_) | Kind::Experts(_) => {
                let op = match kind {
                    Kind::Experts(op) => &op.layer,
                    Kind::Ffn(op) => op,
                    _ => continue,
                };
                let width = op.up.operand.rows;
                neurons = neurons.max(width);
                // Active ranges may make any layer sparse.
                sparse = true;
                if op.hidden_needs.quantised {
                    hidden = hidden.max(width);
                    hidden_values |= op.hidden_needs.values;
                }
                (op.input.columns, op.needs)
            }
            Kind::Predict(op) => {
                neurons = neurons.max(op.fc1.operand.rows).max(op.fc2.operand.rows);
                if op.hidden_needs.quantised {
                    hidden = hidden.max(op.fc1.operand.rows);
                    hidden_values |= op.hidden_needs.values;
                }
                (op.input.columns, op.needs)
            }
            _ => continue,
        };
        if needs.quantised {
            input = input.max(from);
            input_values |= needs.values;
        }
    }
    // One token is quantised in each thread's own memory.
    let shared_tokens = if tokens == 1 { 0 } else { tokens };
    let sparse_tokens = SPARSE_TOKENS.min(tokens);
    let neurons = neurons.next_multiple_of(BLOCK);
    let row =
        neurons.checked_mul(4).ok_or_else(|| Error::out_of_memory("a layer exceeds the address space"))?;
    let mut result = SharedLayout {
        input: layout.area(shared_tokens, input, input_values)?,
        hidden: layout.area(shared_tokens, hidden, hidden_values)?,
        gate: layout.take(tokens, row)?,
        up: layout.take(tokens, row)?,
        keep: layout.take(if sparse { sparse_tokens } else { 0 }, row)?,
        neurons,
        sparse_tokens,
        angles: Vec::new(),
        bytes: 0,
    };
    for table in tables {
        result.angles.push(layout.take(tokens, table.frequencies.len() * 8)?);
    }
    result.bytes = layout.0;
    Ok(result)
}

/// Whether anything written overlaps anything else: then the schedule, which knows slots only, may not be trusted.
fn overlaps(mut extents: Vec<(usize, usize, bool)>) -> bool {
    extents.sort_unstable();
    // The end of what lies before, and whether any of what reaches that far is written.
    let (mut end, mut written_end) = (0usize, 0usize);
    for (start, len, written) in extents {
        if start < written_end || (written && start < end) {
            return true;
        }
        end = end.max(start + len);
        if written {
            written_end = written_end.max(start + len);
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::overlaps;

    #[test]
    fn overlap_is_found_only_where_something_is_written() {
        assert!(!overlaps(vec![(0, 10, true), (10, 5, true)]));
        assert!(!overlaps(vec![(0, 10, false), (5, 10, false)]));
        assert!(overlaps(vec![(0, 10, false), (5, 1, true)]));
        assert!(overlaps(vec![(0, 10, true), (5, 1, false)]));
        assert!(overlaps(vec![(4, 4, true), (0, 5, false)]));
    }
}
