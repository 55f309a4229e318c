//! The operands of an operation as a list, for code that treats all operations alike.

use super::{Experts, Ffn, OperationKind, OperationList, Selection, Slot, SlotId, SlotRole};
use std::collections::BTreeMap;

/// How an operation uses a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes it without reading it.
    Write,
    /// Reads and writes it.
    ReadWrite,
}

/// A use of a slot by an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The field's name, such as `gate`.
    pub field: &'static str,
    /// The slot.
    pub slot: SlotId,
    /// How it is used.
    pub access: Access,
}

impl OperationKind {
    /// A short name, such as `ffn`.
    pub fn name(&self) -> &'static str {
        match self {
            OperationKind::Copy { .. } => "copy",
            OperationKind::Embed { .. } => "embed",
            OperationKind::Norm { .. } => "norm",
            OperationKind::Linear { .. } => "linear",
            OperationKind::Rope(_) => "rope",
            OperationKind::KvAppend { .. } => "kv-append",
            OperationKind::Attention { .. } => "attention",
            OperationKind::Ffn(_) => "ffn",
            OperationKind::Route { .. } => "route",
            OperationKind::Experts(_) => "experts",
            OperationKind::Predict { .. } => "predict",
            OperationKind::Activate { .. } => "activate",
            OperationKind::Add { .. } => "add",
            OperationKind::Multiply { .. } => "multiply",
            OperationKind::KvExport { .. } => "kv-export",
            OperationKind::KvImport { .. } => "kv-import",
        }
    }

    /// Every slot that the operation names, in the order of its fields.
    pub fn operands(&self) -> Vec<Operand> {
        let mut uses = Vec::new();
        self.clone().visit(&mut |field, slot, access| uses.push(Operand { field, slot: *slot, access }));
        uses
    }

    /// Calls `f` with every slot field; `f` may change the slot.
    pub fn visit(&mut self, f: &mut dyn FnMut(&'static str, &mut SlotId, Access)) {
        use Access::{Read, ReadWrite, Write};
        let written = |accumulate: bool| if accumulate { ReadWrite } else { Write };
        match self {
            OperationKind::Copy { from, to } => {
                f("from", from, Read);
                f("to", to, Write);
            }
            OperationKind::Embed { ids, table, output, scale: _ } => {
                f("ids", ids, Read);
                f("table", table, Read);
                f("output", output, Write);
            }
            OperationKind::Norm { norm: _, epsilon: _, input, weight, bias, output } => {
                f("input", input, Read);
                f("weight", weight, Read);
                if let Some(bias) = bias {
                    f("bias", bias, Read);
                }
                f("output", output, Write);
            }
            OperationKind::Linear { input, weight, bias, output, accumulate } => {
                f("input", input, Read);
                f("weight", weight, Read);
                if let Some(bias) = bias {
                    f("bias", bias, Read);
                }
                f("output", output, written(*accumulate));
            }
            OperationKind::Rope(rope) => {
                f("input", &mut rope.input, Read);
                if let Some(factors) = &mut rope.factors {
                    f("factors", factors, Read);
                }
                f("output", &mut rope.output, Write);
            }
            OperationKind::KvAppend { key, value, cache, kv_heads: _, head_dim: _ } => {
                f("key", key, Read);
                f("value", value, Read);
                f("cache", cache, ReadWrite);
            }
            OperationKind::Attention { query, cache, output, .. } => {
                f("query", query, Read);
                f("cache", cache, Read);
                f("output", output, Write);
            }
            OperationKind::Ffn(ffn) => visit_ffn(ffn, f),
            OperationKind::Route { scores, chosen, weights, .. } => {
                f("scores", scores, Read);
                f("chosen", chosen, Write);
                f("weights", weights, Write);
            }
            OperationKind::Experts(experts) => visit_experts(experts, f),
            OperationKind::Predict { input, fc1, fc2, mask, threshold: _ } => {
                f("input", input, Read);
                f("fc1", fc1, Read);
                f("fc2", fc2, Read);
                f("mask", mask, Write);
            }
            OperationKind::Activate { function: _, input, output } => {
                f("input", input, Read);
                f("output", output, Write);
            }
            OperationKind::Add { left, right, output } | OperationKind::Multiply { left, right, output } => {
                f("left", left, Read);
                f("right", right, Read);
                f("output", output, Write);
            }
            OperationKind::KvExport { cache, key, value, .. } => {
                f("cache", cache, Read);
                f("key", key, Write);
                f("value", value, Write);
            }
            OperationKind::KvImport { key, value, cache, .. } => {
                f("key", key, Read);
                f("value", value, Read);
                f("cache", cache, ReadWrite);
            }
        }
    }
}

fn visit_ffn(ffn: &mut Ffn, f: &mut dyn FnMut(&'static str, &mut SlotId, Access)) {
    use Access::{Read, ReadWrite, Write};
    f("input", &mut ffn.input, Read);
    if let Some(gate) = &mut ffn.gate {
        f("gate", gate, Read);
    }
    f("up", &mut ffn.up, Read);
    f("down", &mut ffn.down, Read);
    if let Some(low) = &mut ffn.gate_low {
        f("gate_low", low, Read);
    }
    if let Some(low) = &mut ffn.up_low {
        f("up_low", low, Read);
    }
    if let Some(bias) = &mut ffn.gate_bias {
        f("gate_bias", bias, Read);
    }
    if let Some(bias) = &mut ffn.up_bias {
        f("up_bias", bias, Read);
    }
    visit_selection(&mut ffn.selection, f);
    f("output", &mut ffn.output, if ffn.accumulate { ReadWrite } else { Write });
    if let Some(hidden) = &mut ffn.hidden {
        f("hidden", hidden, Write);
    }
    if let Some(count) = &mut ffn.active_count {
        f("active_count", count, Write);
    }
}

fn visit_selection(selection: &mut Selection, f: &mut dyn FnMut(&'static str, &mut SlotId, Access)) {
    match selection {
        Selection::Mask(mask) => f("mask", mask, Access::Read),
        Selection::Bitplane(rule) => {
            f("gate_deviation", &mut rule.gate_deviation, Access::Read);
            if let Some(deviation) = &mut rule.up_deviation {
                f("up_deviation", deviation, Access::Read);
            }
            if let Some(norm) = &mut rule.down_norm {
                f("down_norm", norm, Access::Read);
            }
        }
        Selection::All | Selection::GateFirst | Selection::Threshold(_) => {}
    }
}

fn visit_experts(experts: &mut Experts, f: &mut dyn FnMut(&'static str, &mut SlotId, Access)) {
    use Access::{Read, ReadWrite, Write};
    f("input", &mut experts.input, Read);
    f("chosen", &mut experts.chosen, Read);
    f("weights", &mut experts.weights, Read);
    if let Some(gate) = &mut experts.gate {
        f("gate", gate, Read);
    }
    f("up", &mut experts.up, Read);
    f("down", &mut experts.down, Read);
    visit_selection(&mut experts.selection, f);
    f("output", &mut experts.output, if experts.accumulate { ReadWrite } else { Write });
    if let Some(count) = &mut experts.active_count {
        f("active_count", count, Write);
    }
}

/// [`OperationList::single`].
pub(super) fn single(list: &OperationList, index: usize) -> Option<OperationList> {
    let operation = list.operations.get(index)?;
    let mut one = OperationList::new(list.token_capacity);
    let mut renumbered: BTreeMap<SlotId, SlotId> = BTreeMap::new();
    let mut accesses: BTreeMap<SlotId, Access> = BTreeMap::new();
    for operand in operation.kind.operands() {
        let merged = match accesses.get(&operand.slot) {
            Some(&before) if before != operand.access => Access::ReadWrite,
            _ => operand.access,
        };
        accesses.insert(operand.slot, merged);
    }
    for (&slot, &access) in &accesses {
        let original: &Slot = list.slot(slot)?;
        let role = match (original.role, access) {
            (SlotRole::Scratch, Access::Read) => SlotRole::Input,
            (SlotRole::Scratch, Access::Write) => SlotRole::Output,
            (SlotRole::Scratch, Access::ReadWrite) => SlotRole::State,
            (role, _) => role,
        };
        renumbered.insert(slot, one.add_slot(Slot { role, ..original.clone() }));
    }
    let mut operation = operation.clone();
    operation.kind.visit(&mut |_, slot, _| *slot = renumbered[slot]);
    one.operations.push(operation);
    Some(one)
}
