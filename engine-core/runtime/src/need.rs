//! What a plan needs of each device's memory, beside what the device views in the storage tier: the weights that it holds,
//! the buffers of a session, and what its lists take once they are prepared.
//!
//! The last only the device knows, so it is asked: each list is prepared as it would be when the model is loaded, one after
//! the other, with a stand-in for the weights. Nothing is computed, and everything is given back.

use crate::graph::residual_stride;
use crate::host_binding::StandIn;
use crate::planning::Drawn;
use crate::resource::Executable;
use crate::stages::{Named, Program};
use crate::weight::Weight;
use crate::weights::{AT_ONCE, TOGETHER};
use engine_core::backend::DeviceDescription;
use engine_core::operation::{OperationList, Place, SlotRole};
use engine_core::{ComputeBackend, Error};
use formats::ModelDescription;
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of one device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// Weights that it holds.
    pub(crate) weights: u64,
    /// KV caches, the residual, and what stays between stages.
    pub(crate) buffers: u64,
    /// What its lists take.
    pub(crate) lists: u64,
    /// The most that is held for a while: when weights are copied, before there are lists and buffers.
    copying: u64,
    /// The same, while a list runs.
    running: u64,
}

impl Need {
    /// The most at any time.
    pub(crate) fn total(&self) -> u64 {
        let ready = self.buffers.saturating_add(self.lists).saturating_add(self.running);
        self.weights.saturating_add(ready.max(self.copying))
    }
}

/// Devices round the length of an allocation up; none is known to round further.
const ROUNDED: u64 = 256;

fn rounded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(ROUNDED).unwrap_or(u64::MAX)
}

/// Whether a device views what it can of a file of so many bytes that the storage tier keeps in memory.
pub(crate) fn views(description: &DeviceDescription, resident: Option<u64>) -> bool {
    let whole = description.max_buffer_bytes; // files are viewed whole
    // What compiles its weights into graphs holds them itself.
    let views = description.imports_host_memory && !description.needs_constant_weights;
    views && resident.is_some_and(|bytes| whole == 0 || bytes <= whole)
}

/// Asks devices what lists take; remembers the answers, for layers are alike.
#[derive(Default)]
pub(crate) struct Scales {
    known: HashMap<(String, String), u64>,
}

impl Scales {
    /// What each device of a plan needs, in the plan's order; nothing for those whose memory has no known limit.
    ///
    /// # Errors
    /// Those of devices, with the name: [`Error::OutOfMemory`] where even one list by itself is too much.
    pub(crate) fn needs(
        &mut self,
        model: &ModelDescription,
        drawn: &Drawn,
        (batch, resident): (u32, Option<u64>),
    ) -> Result<Vec<Need>, (usize, Error)> {
        let devices = drawn.devices.iter().enumerate();
        devices
            .map(|(at, device)| {
                let description = device.backend.describe();
                if description.memory_bytes == 0 {
                    return Ok(Need::default());
                }
                let mut need = Need::default();
                let views = views(description, resident);
                let held = drawn.weights.get(at).into_iter().flatten();
                for weight in held.filter(|weight| !(views && weight.is_viewable(description.alignment))) {
                    need.hold(weight);
                }
                if at == drawn.plan.embedding as usize {
                    let stride = drawn.on.get(at).map_or(1, |on| on.row_alignment);
                    need.buffers += rounded(u64::from(batch).saturating_mul(residual_stride(model, stride)));
                }
                need.buffers += buffers(&drawn.programs, at);
                for list in lists(&drawn.programs, at) {
                    let taken = self.list(device, list).map_err(|error| (at, error))?;
                    need.lists = need.lists.saturating_add(taken);
                    need.running = need.running.max(passing(list, taken));
                }
                Ok(need)
            })
            .collect()
    }

    /// What a list takes once it is prepared.
    fn list(&mut self, device: &Named, list: &OperationList) -> engine_core::Result<u64> {
        let key = (device.name.clone(), anonymous(list));
        if let Some(known) = self.known.get(&key) {
            return Ok(*known);
        }
        let taken = match device.backend.describe().needs_constant_weights {
            // Compiling takes long, and what comes of it depends on the weights: such a device counts that itself.
            true => None,
            false => measured(&device.backend, list)?,
        };
        let taken = taken.unwrap_or_else(|| of_slots(list));
        self.known.insert(key, taken);
        Ok(taken)
    }
}

impl Need {
    fn hold(&mut self, weight: &Weight) {
        let bytes = rounded(weight.byte_len());
        self.weights = self.weights.saturating_add(bytes);
        self.copying = self.copying.max(TOGETHER + bytes.min(AT_ONCE)).min(self.weights);
    }
}

/// Device buffers of a session that are not the residual.
fn buffers(programs: &[Program], device: usize) -> u64 {
    let here = |(at, bytes): &(u32, u64)| if *at as usize == device { rounded(*bytes) } else { 0 };
    let kept = programs.iter().flat_map(|program| &program.kept).map(here).fold(0, u64::saturating_add);
    let mut with_caches = programs.iter().filter(|program| !program.caches.is_empty());
    let (Some(step), Some(body)) = (with_caches.next(), with_caches.next()) else { return kept };
    let own = step.caches.iter().zip(&body.caches).map(|(step, body)| {
        let second = if step.0 == body.0 { 0 } else { here(body) };
        here(step).saturating_add(second)
    });
    own.fold(kept, u64::saturating_add)
}

fn lists(programs: &[Program], device: usize) -> impl Iterator<Item = &OperationList> {
    let stages = programs.iter().flat_map(|program| &program.stages);
    stages.filter(move |stage| stage.device as usize == device).map(|stage| &stage.list)
}

/// What a device may hold while a list runs, for host memory that it passes through memory of its own and has no room for
/// yet.
fn passing(list: &OperationList, taken: u64) -> u64 {
    let host = list.slots.iter().filter(|slot| slot.place == Place::Host).map(|slot| slot.tensor.bytes());
    if taken >= of_slots(list) { 0 } else { host.max().unwrap_or(0).min(AT_ONCE) }
}

/// Bytes of a list's scratch slots and of what it exchanges with the host.
fn of_slots(list: &OperationList) -> u64 {
    let own = list.slots.iter().filter(|slot| slot.role == SlotRole::Scratch || slot.place == Place::Host);
    own.map(|slot| slot.tensor.bytes()).fold(0, u64::saturating_add)
}

/// A list without names and places: what lists of layers that are alike have in common.
fn anonymous(list: &OperationList) -> String {
    let mut list = list.clone();
    for slot in &mut list.slots {
        slot.name.clear();
    }
    for operation in &mut list.operations {
        operation.label.clear();
    }
    format!("{list:?}")
}

/// The most that a device counts more with this list prepared; nothing where it does not count.
fn measured(backend: &Arc<dyn ComputeBackend>, list: &OperationList) -> engine_core::Result<Option<u64>> {
    let constant = |role: &SlotRole| matches!(role, SlotRole::Constant(_));
    let constants = list.slots.iter().filter(|slot| constant(&slot.role)).map(|slot| slot.tensor.bytes());
    let stand_in = constants.max().map(|bytes| StandIn::new(backend, bytes)).transpose()?;
    let mut list = list.clone();
    for slot in &mut list.slots {
        if let (true, Some(stand_in)) = (constant(&slot.role), &stand_in) {
            slot.role = SlotRole::Constant(stand_in.view());
        }
    }
    let before = allocated(&**backend);
    let _prepared = Executable::prepare(backend, &list)?;
    Ok(before.zip(allocated(&**backend)).map(|(before, after)| after.saturating_sub(before)))
}

/// Bytes in use by the device's own count.
fn allocated(backend: &dyn ComputeBackend) -> Option<u64> {
    let counters = backend.counters();
    counters.into_iter().find(|counter| counter.name == "bytes_allocated").map(|counter| counter.value)
}
