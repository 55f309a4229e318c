//! Asks a device which operations of a list it denies, each distinct question once.

use crate::RuntimeError;
use engine_core::ComputeBackend;
use engine_core::backend::{BufferId, BufferView, Support};
use engine_core::operation::{OperationList, SlotRole};
use std::collections::HashMap;

/// An operation that a device denies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Denied {
    /// Label, kind and weights with their types.
    pub(crate) operation: String,
    /// The device's own words.
    pub(crate) reason: String,
    /// Operations of the list that are denied for the same reason.
    pub(crate) times: usize,
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.operation, self.reason)?;
        if self.times > 1 { write!(f, " (and {} more like it)", self.times - 1) } else { Ok(()) }
    }
}

impl Denied {
    pub(crate) fn error(&self, device: &str) -> RuntimeError {
        RuntimeError::Unsupported {
            device: device.to_owned(),
            operation: self.operation.clone(),
            reason: self.reason.clone(),
        }
    }
}

/// What `backend` denies of `list`, in order.
pub(crate) fn denied(backend: &dyn ComputeBackend, list: &OperationList) -> Vec<Denied> {
    let mut denied: Vec<Denied> = Vec::new();
    // Layers ask the same question again and again; a question is an operation with its slots less all names.
    let mut answers: HashMap<String, Option<usize>> = HashMap::new();
    for index in 0..list.operations.len() {
        let Some(single) = list.single(index) else { continue };
        let question = question(&single);
        if let Some(answer) = answers.get(&question) {
            if let Some(at) = *answer {
                denied[at].times += 1;
            }
            continue;
        }
        let answer = match backend.supports(&single, 0) {
            Support::No { reason } => {
                denied.push(Denied { operation: describe(&single), reason, times: 1 });
                Some(denied.len() - 1)
            }
            Support::Yes | Support::Preferred => None,
        };
        answers.insert(question, answer);
    }
    denied
}

fn question(single: &OperationList) -> String {
    let mut nameless = single.clone();
    for slot in &mut nameless.slots {
        slot.name.clear();
        if let SlotRole::Constant(view) = &mut slot.role {
            *view = BufferView { buffer: BufferId(0), offset: 0 };
        }
    }
    for operation in &mut nameless.operations {
        operation.label.clear();
    }
    format!("{nameless:?}")
}

/// The one operation of `single` for people: `blk.0.attn_q (linear) with blk.0.attn_q.weight (Q6_K [2 x 3])`.
fn describe(single: &OperationList) -> String {
    let Some(operation) = single.operations.first() else { return String::new() };
    let constants: Vec<String> = single
        .slots
        .iter()
        .filter(|slot| matches!(slot.role, SlotRole::Constant(_)))
        .map(|slot| format!("{} ({})", slot.name, slot.tensor))
        .collect();
    let text = format!("{} ({})", operation.label, operation.kind.name());
    if constants.is_empty() { text } else { format!("{text} with {}", constants.join(", ")) }
}
