//! An executable: a list cut into copies and graphs; graphs that are built for the ranges that are asked for; one run.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine_core::backend::{Bindings, Bound};
use engine_core::operation::{Access, OperationKind, OperationList, SlotId, SlotRole};
use engine_core::{ClusterRange, Error, Result};

use crate::check::{Form, check};
use crate::driver::Driver;
use crate::emit::{Emitted, In, Out, emit, segments};
use crate::ffi::tensor_type;
use crate::graph::{Port, Spec};
use crate::session::Compiled;
use crate::store::{Store, Stored};
use engine_plugin::buffers::{Budget, Buffers, Owned, Place, Reservation, check_alignment};

/// What a device did.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) submissions: AtomicU64,
    pub(crate) executed: AtomicU64,
    pub(crate) compiled: AtomicU64,
    pub(crate) loaded: AtomicU64,
}

/// What every executable of a device uses.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) driver: Arc<Driver>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) store: Option<Store>,
    pub(crate) form: Form,
    pub(crate) counts: Arc<Counts>,
    pub(crate) compile_limit: Duration,
    pub(crate) run_limit: Duration,
}

/// Bytes of a graph's inputs and of its outputs, one buffer per port.
pub(crate) type Staging = (Vec<Vec<u8>>, Vec<Vec<u8>>);

/// A finished graph with its staging memory.
pub(crate) struct Built {
    pub(crate) shared: Shared,
    pub(crate) compiled: Option<Arc<Compiled>>,
    pub(crate) ins: Vec<In>,
    pub(crate) outs: Vec<Out>,
    /// For each output, the inputs that it depends on.
    pub(crate) depends: Vec<Vec<usize>>,
    pub(crate) active: Vec<u32>,
    /// Bytes of inputs and outputs between submissions.
    pub(crate) staging: Mutex<Staging>,
    _reservation: Reservation,
}

impl Drop for Built {
    fn drop(&mut self) {
        if let Some(compiled) = self.compiled.take() {
            self.shared.driver.discard(compiled);
        }
    }
}

/// Graphs of one layer, by active ranges; the one that was used last comes last.
pub(crate) type Kept = Vec<(Vec<ClusterRange>, Arc<Built>)>;

/// What a run does one after the other.
pub(crate) enum Step {
    Copy { from: SlotId, to: SlotId },
    Graph(Arc<Built>),
    Ffn { operation: usize, kept: Mutex<Kept> },
}

/// A prepared list.
pub(crate) struct Program {
    shared: Shared,
    pub(crate) list: OperationList,
    constants: Vec<Option<Place>>,
    scratch: Vec<Option<usize>>,
    written: Vec<bool>,
    pub(crate) steps: Vec<Step>,
    /// One operation a graph, for submissions whose operands overlap in memory.
    pub(crate) careful: Mutex<Option<Arc<Vec<Step>>>>,
    memory: Owned,
}

/// A program with everything that one submission bound.
pub(crate) struct Submission {
    pub(crate) program: Arc<Program>,
    pub(crate) addresses: Vec<*mut u8>,
    pub(crate) tokens: u32,
    pub(crate) ranges: HashMap<usize, Vec<ClusterRange>>,
    pub(crate) overlaps: bool,
    /// Keeps buffers alive.
    _places: Vec<Place>,
}

// SAFETY: addresses of memory that the host leaves alone until the submission is reached, or of the program's own.
unsafe impl Send for Submission {}

impl Program {
    /// Checks a list, takes the memory that it needs and compiles what does not depend on active ranges.
    pub(crate) fn new(shared: &Shared, list: &OperationList, buffers: &Buffers) -> Result<Program> {
        list.validate()?;
        for (at, operation) in list.operations.iter().enumerate() {
            check(list, at, shared.form).map_err(|reason| {
                Error::unsupported(format!("{} ({}): {reason}", operation.label, operation.kind.name()))
            })?;
        }
        let mut written = vec![false; list.slots.len()];
        for operand in list.operations.iter().flat_map(|o| o.kind.operands()) {
            written[operand.slot.0 as usize] |= operand.access != Access::Read;
        }
        let (mut constants, mut scratch, mut end) = (Vec::new(), Vec::new(), 0u64);
        for slot in &list.slots {
            constants.push(match slot.role {
                SlotRole::Constant(view) => Some(buffers.place(slot, view, slot.tensor.rows, false)?),
                _ => None,
            });
            scratch.push(match slot.role {
                SlotRole::Scratch => {
                    let start = end.next_multiple_of(64);
                    end = start.checked_add(slot.tensor.bytes()).ok_or_else(|| {
                        Error::out_of_memory("the list's scratch memory exceeds the address space")
                    })?;
                    Some(start as usize)
                }
                _ => None,
            });
        }
        let memory = Owned::allocate(&shared.budget, end.max(1), "an executable's scratch memory")?;
        let mut program = Program {
            shared: shared.clone(),
            list: list.clone(),
            constants,
            scratch,
            written,
            steps: Vec::new(),
            careful: Mutex::default(),
            memory,
        };
        program.steps = program.plan(true)?;
        Ok(program)
    }

    pub(crate) fn plan(&self, fuse: bool) -> Result<Vec<Step>> {
        segments(&self.list, fuse)
            .into_iter()
            .map(|segment| match &self.list.operations[segment.start].kind {
                OperationKind::Copy { from, to } => Ok(Step::Copy { from: *from, to: *to }),
                OperationKind::Ffn(_) => Ok(Step::Ffn { operation: segment.start, kept: Mutex::default() }),
                _ => Ok(Step::Graph(Arc::new(self.build(segment, Vec::new())?))),
            })
            .collect()
    }

    fn constant(&self, slot: SlotId) -> Option<&[u8]> {
        let place = self.constants.get(slot.0 as usize)?.as_ref()?;
        // SAFETY: the buffer is kept alive by the place, has that many bytes, and the host leaves constants unchanged for
        // as long as the executable lives.
        Some(unsafe { std::slice::from_raw_parts(place.address, place.bytes as usize) })
    }

    /// Compiles the graph of a run of operations, or loads it from the disk.
    pub(crate) fn build(&self, segment: std::ops::Range<usize>, active: Vec<u32>) -> Result<Built> {
        let shared = &self.shared;
        let label = self.list.operations[segment.start].label.clone();
        let constants = |slot| self.constant(slot);
        let Emitted { spec, ins, outs, depends } =
            emit(&self.list, segment, &active, shared.form, &constants)?;
        let weights: usize = spec.tensors.iter().map(|tensor| tensor.data.len()).sum();
        let ports = |kind| {
            let of = spec.tensors.iter().filter(move |tensor| tensor.kind == kind);
            of.map(|tensor| vec![0u8; crate::graph::Port::of(tensor).bytes()]).collect::<Vec<_>>()
        };
        let staging = (ports(crate::ffi::tensor_type::APP_WRITE), ports(crate::ffi::tensor_type::APP_READ));
        let staged: usize = staging.0.iter().chain(&staging.1).map(Vec::len).sum();
        let reservation =
            shared.budget.reserve((weights + staged) as u64, &format!("the graph of {label}"))?;
        let ours = spec.bytes();
        let file = shared
            .store
            .as_ref()
            .filter(|store| store.keeps(weights))
            .map(|store| (store, store.file(&spec)));
        // What lives for as long as the graph is made: here what was emitted, and the file's bytes or what the library takes.
        let binary = file.as_ref().map_or(0, |(_, (path, _))| Store::bytes(path));
        let (made, making) = match binary {
            0 if file.is_none() => (weights as u64 * COMPILING, "compiling"),
            // The binary, which is as large as the weights, is written from memory.
            0 => (weights as u64 * (COMPILING + 1), "compiling"),
            binary => (binary, "loading"),
        };
        let making =
            shared.budget.reserve(ours.saturating_add(made), &format!("{making} the graph of {label}"))?;
        let stored = match &file {
            Some((store, (path, key))) => {
                store.read(path, key)?.map(|stored| checked(stored, &spec, path)).transpose()?
            }
            None => None,
        };
        let limit = shared.compile_limit;
        let compiled = match (stored, file) {
            (Some(stored), file) => {
                let what = format!("loading the context binary of {label}");
                let load = shared.driver.call(limit, (&what, COMPILE_OPTION), move |session| {
                    session.load(&stored.binary, stored.inputs, stored.outputs)
                });
                let compiled = load.map_err(|error| named(error, file.map(|(_, (path, _))| path)))?;
                shared.counts.loaded.fetch_add(1, Relaxed);
                compiled
            }
            (None, file) => {
                let keep = file.is_some();
                let what = format!("compiling the graph of {label}");
                let (compiled, binary) =
                    shared.driver.call(limit, (&what, COMPILE_OPTION), move |session| {
                        let compiled = session.compile(&spec)?;
                        let binary = keep.then(|| compiled.binary()).transpose()?;
                        Ok((compiled, binary))
                    })?;
                shared.counts.compiled.fetch_add(1, Relaxed);
                if let Some(((store, (path, key)), binary)) = file.zip(binary) {
                    let ports = (&compiled.inputs[..], &compiled.outputs[..]);
                    if let Err(error) = store.write(&path, &key, ports, &binary) {
                        // Freed where the library's calls are made.
                        shared.driver.discard(Arc::new(compiled));
                        return Err(error);
                    }
                }
                compiled
            }
        };
        drop(making);
        Ok(Built {
            shared: shared.clone(),
            compiled: Some(Arc::new(compiled)),
            ins,
            outs,
            depends,
            active,
            staging: Mutex::new(staging),
            _reservation: reservation,
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
                (None, Some(offset)) => self.memory.address().wrapping_add(offset),
                (None, None) => std::ptr::null_mut(),
            })
            .collect();
        let (mut places, mut extents) = (Vec::new(), Vec::new());
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
                        let name = &slot.name;
                        return Err(Error::invalid(format!("slot `{name}` is bound to the null address")));
                    }
                    check_alignment(slot, span.address())?;
                    addresses[at] = span.address() as *mut u8;
                    extents.push((span.address(), span.len() as usize, written));
                }
            }
        }
        let ranges = bindings.ranges.iter().map(|r| (r.operation as usize, r.ranges.to_vec())).collect();
        Ok(Submission {
            program: self.clone(),
            addresses,
            tokens: bindings.tokens,
            ranges,
            overlaps: overlaps(extents),
            _places: places,
        })
    }
}

/// What a file says that a run binds is what the graph binds: it decides how much memory is taken.
fn checked(stored: Stored, spec: &Spec, path: &std::path::Path) -> Result<Stored> {
    let fits = |kind: u32, found: &[Port]| {
        let wanted: Vec<Port> =
            spec.tensors.iter().filter(|tensor| tensor.kind == kind).map(Port::of).collect();
        wanted.len() == found.len()
            && wanted.into_iter().zip(found).all(|(wanted, found)| Port { id: found.id, ..wanted } == *found)
    };
    match fits(tensor_type::APP_WRITE, &stored.inputs) && fits(tensor_type::APP_READ, &stored.outputs) {
        true => Ok(stored),
        false => Err(Error::Data {
            detail: format!(
                "{}: the inputs and outputs that it names are not the graph's; remove the file",
                path.display()
            ),
        }),
    }
}

/// Copies of a graph's weights that the library holds while it compiles, beside the one that it keeps: the emulator was seen to
/// grow by 5.9 copies at most, one of them this plug-in's own.
const COMPILING: u64 = 4;

const COMPILE_OPTION: &str = "compile_timeout_s";

/// An error of loading a binary, with its file and what to do.
fn named(error: Error, file: Option<std::path::PathBuf>) -> Error {
    match (error, file) {
        (Error::Internal { detail }, Some(file)) => Error::Data {
            detail: format!(
                "{}: the library refuses the context binary; remove the file: {detail}",
                file.display()
            ),
        },
        (error, _) => error,
    }
}

/// Whether anything written overlaps anything else: then operations that share a graph would read what is old.
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
