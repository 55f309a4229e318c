//! Cuts a graph into stages.

use super::{Bind, Program, Stage, StageKind};
use crate::graph::{Graph, Places};
use crate::weight::Weight;
use crate::{Result, RuntimeError};
use engine_core::operation::{
    Access, Arithmetic, OperationKind, OperationList, Place, Slot, SlotId, SlotRole,
};
use engine_core::{Error, TensorType};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Operations that become one stage.
#[derive(Default)]
struct Part {
    device: u32,
    operations: Vec<usize>,
    waits: BTreeSet<usize>,
    /// Every part that is done before this one begins.
    after: BTreeSet<usize>,
}

/// A value: what one operation left in a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Value {
    operation: usize,
    part: usize,
}

/// Which operations go together, and what passes between them.
#[derive(Default)]
struct Plan {
    parts: Vec<Part>,
    /// What an operation reads that another device wrote: the operation that wrote it, and that device.
    imports: BTreeMap<(usize, SlotId), (usize, u32)>,
    /// What an operation writes and another device reads.
    exports: BTreeSet<(usize, SlotId)>,
    /// What stays on a device from one part to another.
    kept: BTreeSet<(u32, SlotId)>,
    /// The device of each slot that is bound from outside.
    owners: HashMap<SlotId, u32>,
}

pub(super) fn cut(graph: Graph, places: &[Places]) -> Result<Program> {
    let plan = plan(&graph)?;
    let mut emitter = Emitter::new(&graph, &plan, places);
    for (index, part) in plan.parts.iter().enumerate() {
        emitter.part(index, part)?;
    }
    let Emitter { stages, kinds, exchanges, kept, weights, .. } = emitter;
    let bytes = |slot: &SlotId| graph.list.slot(*slot).map_or(0, |slot| slot.tensor.bytes());
    let owner = |slot| plan.owners.get(slot).copied().unwrap_or(0);
    Ok(Program {
        stages,
        kinds,
        exchanges: in_order(exchanges),
        kept: in_order(kept),
        weights,
        caches: graph.caches.iter().map(|slot| (owner(slot), bytes(slot))).collect(),
        active: graph.active.iter().map(|(layer, _)| *layer).collect(),
        observed: graph.observed.iter().map(|seen| (seen.layer, seen.kind, bytes(&seen.slot))).collect(),
    })
}

fn mistake(what: String) -> RuntimeError {
    RuntimeError::device("host", "dividing a list between devices")(Error::internal(what))
}

/// Divides the operations, in their order: each goes to the part that is open on its device, unless it needs a value that
/// is not there when that part begins.
fn plan(graph: &Graph) -> Result<Plan> {
    let mut plan = Plan::default();
    let mut open: HashMap<u32, usize> = HashMap::new();
    let mut latest: HashMap<u32, usize> = HashMap::new();
    let mut values: HashMap<SlotId, Value> = HashMap::new();
    // Parts of other devices that read what a device gave the host last, by slot.
    let mut readers: HashMap<(SlotId, u32), BTreeSet<usize>> = HashMap::new();
    for (index, operation) in graph.list.operations.iter().enumerate() {
        let device =
            *graph.at.get(index).ok_or_else(|| mistake(format!("operation {index} has no device")))?;
        let operands = operation.kind.operands();
        let mut needs = BTreeSet::new();
        for operand in &operands {
            let Some(slot) = graph.list.slot(operand.slot) else { continue };
            if slot.role != SlotRole::Scratch {
                let constant = matches!(slot.role, SlotRole::Constant(_));
                if !constant && *plan.owners.entry(operand.slot).or_insert(device) != device {
                    return Err(mistake(format!("`{}` is used on two devices", slot.name)));
                }
                continue;
            }
            if operand.access != Access::Write
                && let Some(value) = values.get(&operand.slot)
                && plan.parts[value.part].device != device
            {
                needs.insert(value.part);
            }
            if operand.access != Access::Read
                && let Some(readers) = readers.get(&(operand.slot, device))
            {
                needs.extend(readers);
            }
        }
        // What is waited for is complete.
        open.retain(|_, part| !needs.contains(part));
        let part = match open.get(&device) {
            Some(&part) if needs.is_subset(&plan.parts[part].after) => part,
            _ => {
                let mut after = needs.clone();
                needs.iter().chain(latest.get(&device)).for_each(|before| {
                    after.insert(*before);
                    after.extend(&plan.parts[*before].after);
                });
                plan.parts.push(Part { device, operations: Vec::new(), waits: needs, after });
                plan.parts.len() - 1
            }
        };
        open.insert(device, part);
        latest.insert(device, part);
        plan.parts[part].operations.push(index);
        let scratch = |slot: SlotId| graph.list.slot(slot).is_some_and(|slot| slot.role == SlotRole::Scratch);
        for operand in operands.iter().filter(|operand| scratch(operand.slot)) {
            if operand.access != Access::Write
                && let Some(value) = values.get(&operand.slot)
            {
                let from = plan.parts[value.part].device;
                if from != device {
                    plan.imports.insert((index, operand.slot), (value.operation, from));
                    plan.exports.insert((value.operation, operand.slot));
                    readers.entry((operand.slot, from)).or_default().insert(part);
                } else if value.part != part {
                    plan.kept.insert((device, operand.slot));
                }
            }
        }
        for operand in operands.iter().filter(|operand| scratch(operand.slot)) {
            if operand.access != Access::Read {
                values.insert(operand.slot, Value { operation: index, part });
                readers.remove(&(operand.slot, device));
            }
        }
    }
    Ok(plan)
}

/// Makes the lists of parts.
struct Emitter<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    places: &'a [Places],
    /// Slots that are bound from outside.
    bound: HashMap<SlotId, Bind>,
    constants: HashMap<SlotId, &'a Weight>,
    stages: Vec<Stage>,
    kinds: Vec<StageKind>,
    /// By slot and the device that writes it: index and bytes.
    exchanges: BTreeMap<(SlotId, u32), (usize, u64)>,
    kept: BTreeMap<(SlotId, u32), (usize, (u32, u64))>,
    weights: BTreeMap<u32, Vec<Weight>>,
}

/// The values of a map by their index.
fn in_order<K, V>(map: BTreeMap<K, (usize, V)>) -> Vec<V> {
    let by_index: BTreeMap<usize, V> = map.into_values().collect();
    by_index.into_values().collect()
}

/// A list in the making.
struct Local {
    device: u32,
    list: OperationList,
    slots: HashMap<SlotId, SlotId>,
    binds: Vec<(SlotId, Bind)>,
    /// The operation whose value each slot holds.
    present: HashMap<SlotId, usize>,
}

impl<'a> Emitter<'a> {
    fn new(graph: &'a Graph, plan: &'a Plan, places: &'a [Places]) -> Emitter<'a> {
        let mut bound = HashMap::new();
        let single = [
            (graph.ids, Bind::Ids),
            (graph.positions, Bind::Positions),
            (graph.logits, Bind::Logits),
            (graph.residual, Bind::Residual),
        ];
        bound.extend(single.into_iter().filter_map(|(slot, bind)| Some((slot?, bind))));
        bound.extend(graph.caches.iter().enumerate().map(|(layer, slot)| (*slot, Bind::Cache(layer))));
        bound.extend(graph.active.iter().enumerate().map(|(at, (_, slot))| (*slot, Bind::Active(at))));
        bound.extend(graph.observed.iter().enumerate().map(|(at, seen)| (seen.slot, Bind::Seen(at))));
        Emitter {
            graph,
            plan,
            places,
            bound,
            constants: graph.constants.iter().copied().zip(&graph.weights).collect(),
            stages: Vec::new(),
            kinds: Vec::new(),
            exchanges: BTreeMap::new(),
            kept: BTreeMap::new(),
            weights: BTreeMap::new(),
        }
    }

    fn part(&mut self, index: usize, part: &Part) -> Result<()> {
        let capacity = self.graph.list.token_capacity;
        let mut local = Local {
            device: part.device,
            list: OperationList::new(capacity),
            slots: HashMap::new(),
            binds: Vec::new(),
            present: HashMap::new(),
        };
        let mut ranges = Vec::new();
        for &at in &part.operations {
            let Some(operation) = self.graph.list.operations.get(at) else { continue };
            let mut operation = operation.clone();
            let operands = operation.kind.operands();
            for operand in operands.iter().filter(|operand| operand.access != Access::Write) {
                self.import(&mut local, at, operand.slot)?;
            }
            let mut failed = None;
            operation.kind.visit(&mut |_, slot, _| match self.slot(&mut local, *slot) {
                Ok(found) => *slot = found,
                Err(error) => failed = Some(error),
            });
            if let Some(error) = failed {
                return Err(error);
            }
            if let Some((_, of)) = self.graph.ranges.iter().find(|(operation, _)| *operation as usize == at) {
                ranges.push((local.list.operations.len() as u32, of.clone()));
            }
            local.list.operations.push(operation);
            for operand in operands.iter().filter(|operand| operand.access != Access::Read) {
                local.present.insert(operand.slot, at);
                if self.plan.exports.contains(&(at, operand.slot)) {
                    self.export(&mut local, operand.slot)?;
                }
            }
        }
        local.list.validate().map_err(|error| mistake(format!("stage {index}: {error}")))?;
        let kind = self.kind(part);
        let waits = part.waits.iter().copied().collect();
        let Local { device, list, binds, .. } = local;
        self.stages.push(Stage { device, kind, list, binds, ranges, waits });
        Ok(())
    }

    /// The slot of a list for one of the graph's.
    fn slot(&mut self, local: &mut Local, id: SlotId) -> Result<SlotId> {
        if let Some(&known) = local.slots.get(&id) {
            return Ok(known);
        }
        let slot =
            self.graph.list.slot(id).ok_or_else(|| mistake(format!("slot {} does not exist", id.0)))?;
        let mut slot = slot.clone();
        let mut bind = self.bound.get(&id).copied();
        if let Some(&weight) = self.constants.get(&id) {
            let place = self.places.get(local.device as usize).map(|places| places.of(weight));
            slot.role = place.map_or(slot.role, SlotRole::Constant);
            let known = self.weights.entry(local.device).or_default();
            if !known.iter().any(|known| known.name == weight.name) {
                known.push(weight.clone());
            }
        } else if self.plan.kept.contains(&(local.device, id)) {
            slot.role = SlotRole::State;
            let next = self.kept.len();
            let bytes = slot.tensor.bytes();
            let (at, _) = *self.kept.entry((id, local.device)).or_insert((next, (local.device, bytes)));
            bind = Some(Bind::Kept(at));
        }
        let found = local.list.add_slot(slot);
        local.slots.insert(id, found);
        local.binds.extend(bind.map(|bind| (found, bind)));
        Ok(found)
    }

    /// Brings a value that another device wrote, unless it is there.
    fn import(&mut self, local: &mut Local, at: usize, id: SlotId) -> Result<()> {
        let Some(&(value, from)) = self.plan.imports.get(&(at, id)) else { return Ok(()) };
        if local.present.get(&id) == Some(&value) {
            return Ok(());
        }
        let to = self.slot(local, id)?;
        let host = self.host(local, id, from, SlotRole::Input)?;
        let label = format!("{} from the host", self.name(id));
        local.list.push(label, OperationKind::Copy { from: host, to }, Arithmetic::F32);
        local.present.insert(id, value);
        Ok(())
    }

    /// Gives a value to the host.
    fn export(&mut self, local: &mut Local, id: SlotId) -> Result<()> {
        let from = self.slot(local, id)?;
        let host = self.host(local, id, local.device, SlotRole::Output)?;
        let label = format!("{} to the host", self.name(id));
        local.list.push(label, OperationKind::Copy { from, to: host }, Arithmetic::F32);
        Ok(())
    }

    fn name(&self, id: SlotId) -> &str {
        self.graph.list.slot(id).map_or("", |slot| &slot.name)
    }

    /// A slot of the host's memory for what `writer` leaves in a slot.
    fn host(&mut self, local: &mut Local, id: SlotId, writer: u32, role: SlotRole) -> Result<SlotId> {
        let slot =
            self.graph.list.slot(id).ok_or_else(|| mistake(format!("slot {} does not exist", id.0)))?;
        let TensorType { dtype, rows, columns, .. } = slot.tensor;
        let tensor = TensorType::matrix(dtype, rows, columns).map_err(|error| mistake(error.detail()))?;
        let next = self.exchanges.len();
        let (at, _) = *self.exchanges.entry((id, writer)).or_insert((next, tensor.bytes()));
        let name = format!("{} of device {writer} on the host", slot.name);
        let per_token = slot.per_token;
        let host = local.list.add_slot(Slot { name, role, place: Place::Host, tensor, per_token });
        local.binds.push((host, Bind::Exchange(at)));
        Ok(host)
    }

    /// The kind of a part: what it begins and ends with.
    fn kind(&mut self, part: &Part) -> usize {
        let label = |at: Option<&usize>| {
            let operation = at.and_then(|at| self.graph.list.operations.get(*at));
            operation.map_or("", |operation| without_layer(&operation.label)).to_owned()
        };
        let (first, last) = (label(part.operations.first()), label(part.operations.last()));
        let what = if first == last { first } else { format!("{first}..{last}") };
        let kind = StageKind { device: part.device, what };
        match self.kinds.iter().position(|known| *known == kind) {
            Some(known) => known,
            None => {
                self.kinds.push(kind);
                self.kinds.len() - 1
            }
        }
    }
}

/// `ffn` of `blk.3.ffn`.
fn without_layer(label: &str) -> &str {
    label.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(label, |(_, what)| what)
}
