//! Where barriers must stand between operations, and where quantised inputs can be used again.
//!
//! Threads walk a list at their own pace; an operation that reads or overwrites what another one touched since the
//! last barrier needs a barrier before it. One token is scheduled apart from several: it is quantised by each thread
//! for itself, which takes no shared memory and no barrier.

use std::collections::BTreeSet;

use engine_core::operation::{Access, OperationList, SlotId};

use crate::compile::Kind;
use crate::run::input::Needs;

/// An operation and its place in the schedule.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// What to run.
    pub(crate) kind: Kind,
    /// Whether a barrier comes first when the submission has one token.
    pub(crate) barrier_one: bool,
    /// Whether a barrier comes first when it has several.
    pub(crate) barrier_many: bool,
}

/// Something that operations share: a slot or a part of the executable's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Thing {
    Slot(SlotId),
    InputArea,
    NeuronRows,
}

#[derive(Default)]
struct Uses {
    reads: BTreeSet<Thing>,
    writes: BTreeSet<Thing>,
}

/// Schedules the kinds of a list.
pub(crate) fn schedule(list: &OperationList, kinds: Vec<Kind>) -> Vec<Step> {
    let kinds = mark_reuse(list, kinds);
    let one = barriers(list, &kinds, true);
    let many = barriers(list, &kinds, false);
    kinds
        .into_iter()
        .zip(one)
        .zip(many)
        .map(|((kind, barrier_one), barrier_many)| Step { kind, barrier_one, barrier_many })
        .collect()
}

/// The slot that an operation quantises first, and for which weights, if it quantises.
fn quantised_input(kind: &Kind) -> Option<(usize, Needs)> {
    let (slot, needs) = match kind {
        Kind::Linear(op) => (op.input.slot, op.needs),
        Kind::Ffn(op) => (op.input.slot, op.needs),
        Kind::Predict(op) => (op.input.slot, op.needs),
        Kind::Experts(op) => (op.input.slot, op.layer.needs),
        _ => return None,
    };
    needs.quantised.then_some((slot, needs))
}

/// Linear layers whose input the last quantising operation has quantised already.
fn mark_reuse(list: &OperationList, mut kinds: Vec<Kind>) -> Vec<Kind> {
    let mut last: Option<(usize, Needs)> = None;
    for (operation, kind) in list.operations.iter().zip(&mut kinds) {
        if let Some((slot, needs)) = quantised_input(kind) {
            let stands = last.is_some_and(|(had_slot, had)| {
                had_slot == slot && (had.codes || !needs.codes) && (had.values || !needs.values)
            });
            match kind {
                Kind::Linear(op) if stands => op.reuse = true,
                // It quantises the rows of one expert after the other.
                Kind::Experts(_) => last = None,
                _ => last = Some((slot, needs)),
            }
        }
        let writes = |slot| {
            let operands = operation.kind.operands();
            operands.iter().any(|o| o.access != Access::Read && o.slot.0 as usize == slot)
        };
        if last.is_some_and(|(slot, _)| writes(slot)) {
            last = None;
        }
    }
    kinds
}

fn barriers(list: &OperationList, kinds: &[Kind], one_token: bool) -> Vec<bool> {
    let mut pending = Uses::default();
    let mut result = Vec::with_capacity(kinds.len());
    for (operation, kind) in list.operations.iter().zip(kinds) {
        let mut uses = Uses::default();
        for operand in operation.kind.operands() {
            if operand.access != Access::Write {
                uses.reads.insert(Thing::Slot(operand.slot));
            }
            if operand.access != Access::Read {
                uses.writes.insert(Thing::Slot(operand.slot));
            }
        }
        let shares_input = !one_token && quantised_input(kind).is_some();
        let reuses = matches!(kind, Kind::Linear(op) if op.reuse);
        if shares_input {
            uses.reads.insert(Thing::InputArea);
            if !reuses {
                uses.writes.insert(Thing::InputArea);
            }
        }
        let own_phases = matches!(kind, Kind::Ffn(_) | Kind::Predict(_) | Kind::Experts(_));
        if own_phases {
            uses.reads.insert(Thing::NeuronRows);
            uses.writes.insert(Thing::NeuronRows);
        }
        let conflict = uses.reads.iter().any(|t| pending.writes.contains(t))
            || uses.writes.iter().any(|t| pending.reads.contains(t) || pending.writes.contains(t));
        result.push(conflict);
        let has_barrier = own_phases || (shares_input && !reuses);
        if conflict || has_barrier {
            pending = Uses::default();
        }
        if has_barrier {
            // The quantised rows were written before the operation's own barrier; what follows only reads them.
            uses.writes.remove(&Thing::InputArea);
        }
        pending.reads.append(&mut uses.reads);
        pending.writes.append(&mut uses.writes);
    }
    result
}
