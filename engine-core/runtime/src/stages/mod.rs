//! A list cut into stages: each is one list on one device, and what passes between devices goes through host memory.
//!
//! [`cut`](cut::cut) divides a [`Graph`](crate::graph::Graph) where the device changes. A value that another device reads
//! is copied to host memory right behind the operation that wrote it, and from there to the other device in front of the
//! first operation that reads it; a value that its own device needs in a later stage stays in a buffer there. A stage
//! waits for the stages whose values it reads, and for those that read what it overwrites, and for nothing else: so the
//! shares of a network, which read one input and write a sum each, run at the same time, and their sums are added in the
//! order of the list. A graph on one device is one stage: the list as it is.
//!
//! [`Chain`](crate::host_binding::Chain) runs stages. Waits within a device are the device's; the host waits between
//! devices, as the contract has it.

mod cut;
pub(crate) mod kv;
mod memory;
mod times;

use crate::graph::{Graph, Kind, Places};
use crate::resource::Executable;
use crate::weight::Weight;
use crate::{Result, RuntimeError};
use engine_core::operation::{OperationList, SlotId};
use engine_core::{ClusterRange, ComputeBackend};
use std::collections::BTreeMap;
use std::sync::Arc;

pub(crate) use memory::{Bound, ProgramMemory};
pub use times::StageTimes;
pub(crate) use times::{Span, Times};

/// What a slot of a stage is bound to when it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Bind {
    /// Host: the ids.
    Ids,
    /// Host: rows of learned positions.
    Positions,
    /// Host: the logits.
    Logits,
    /// The residual between body and head.
    Residual,
    /// The KV cache of a layer.
    Cache(usize),
    /// Host: one of the program's `active` counts.
    Active(usize),
    /// Host: one of the program's `observed` rows.
    Seen(usize),
    /// Host: what passes from one device to others, by index into `exchanges`.
    Exchange(usize),
    /// What stays on its device from one stage to the next, by index into `kept`.
    Kept(usize),
}

/// One list on one device.
pub(crate) struct Stage {
    /// Index into the plan's devices.
    pub(crate) device: u32,
    /// Index into the program's `kinds`.
    pub(crate) kind: usize,
    pub(crate) list: OperationList,
    pub(crate) binds: Vec<(SlotId, Bind)>,
    /// FFN operations that cover a part of their neurons.
    pub(crate) ranges: Vec<(u32, Vec<ClusterRange>)>,
    /// Stages, all before this one, that must be done before it begins.
    pub(crate) waits: Vec<usize>,
}

/// What stages have in common whatever their layer: for statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StageKind {
    pub(crate) device: u32,
    /// Its first operation and its last, without layers: `attn_norm..ffn_norm`.
    pub(crate) what: String,
}

/// The stages of one list.
pub(crate) struct Program {
    pub(crate) stages: Vec<Stage>,
    pub(crate) kinds: Vec<StageKind>,
    /// Bytes of host memory for what passes between devices.
    pub(crate) exchanges: Vec<u64>,
    /// Device and bytes of what stays there between stages.
    pub(crate) kept: Vec<(u32, u64)>,
    /// The weights that each device reads, each once.
    pub(crate) weights: BTreeMap<u32, Vec<Weight>>,
    /// Per layer: the device of its KV cache, and the cache's bytes.
    pub(crate) caches: Vec<(u32, u64)>,
    /// The layer of each count of active neurons.
    pub(crate) active: Vec<usize>,
    /// Layer, kind and bytes of each thing that is observed.
    pub(crate) observed: Vec<(usize, Kind, u64)>,
}

impl Program {
    /// The stages of a graph; weights lie where `places` has them, by device.
    pub(crate) fn of(graph: Graph, places: &[Places]) -> Result<Program> {
        cut::cut(graph, places)
    }
}

/// A program with its executables.
pub(crate) struct Prepared {
    /// One per stage.
    pub(crate) executables: Vec<Executable>,
    pub(crate) program: Program,
}

/// A device of the plan, by its name in the config.
#[derive(Clone)]
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) backend: Arc<dyn ComputeBackend>,
}

impl Prepared {
    pub(crate) fn new(program: Program, devices: &[Named], what: &str) -> Result<Prepared> {
        let prepare = |stage: &Stage| {
            let Named { name, backend } = named(devices, stage.device)?;
            Executable::prepare(backend, &stage.list)
                .map_err(RuntimeError::device(name, &format!("preparing {what}")))
        };
        let executables = program.stages.iter().map(prepare).collect::<Result<_>>()?;
        Ok(Prepared { executables, program })
    }
}

/// A device by its index in the plan.
pub(crate) fn named(devices: &[Named], at: u32) -> Result<&Named> {
    devices.get(at as usize).ok_or_else(|| {
        let source = engine_core::Error::internal(format!("the plan has no device {at}"));
        RuntimeError::device("host", "looking for a device")(source)
    })
}

#[cfg(test)]
mod tests;
