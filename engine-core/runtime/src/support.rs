//! Asks a device which operations of a list it denies, each distinct question once.

use crate::RuntimeError;
use engine_core::ComputeBackend;
use engine_core::backend::{BufferId, BufferView, Support};
use engine_core::operation::{OperationList, SlotRole};
use std::collections::{BTreeSet, HashMap};

/// An operation that a device denies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Denied {
    /// Label, kind and weights with their types.
    pub(crate) operation: String,
    /// Kind and types: what several complaints can have in common, whatever their shapes.
    subject: String,
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
                denied.push(Denied {
                    operation: describe(&single),
                    subject: subject(&single),
                    reason,
                    times: 1,
                });
                Some(denied.len() - 1)
            }
            Support::Yes | Support::Preferred => None,
        };
        answers.insert(question, answer);
    }
    denied
}

/// Lines that a message about one device shows; the rest is counted.
const SHOWN: usize = 3;

/// What several lists of one model are denied, each kind of operation with its types once: the first of its shapes stands
/// for the others, and the list with the most of them counts.
pub(crate) fn distinct(lists: impl IntoIterator<Item = Vec<Denied>>) -> Vec<Denied> {
    let mut all: Vec<Denied> = Vec::new();
    for list in lists {
        let mut of_list: Vec<Denied> = Vec::new();
        for denied in list {
            match of_list.iter_mut().find(|known| known.subject == denied.subject) {
                Some(known) => known.times += denied.times,
                None => of_list.push(denied),
            }
        }
        for denied in of_list {
            match all.iter_mut().find(|known| known.subject == denied.subject) {
                Some(known) => known.times = known.times.max(denied.times),
                None => all.push(denied),
            }
        }
    }
    all
}

/// The first few as text, and how many more there are.
pub(crate) fn condensed(denied: &[Denied]) -> Vec<String> {
    let mut lines: Vec<String> = denied.iter().take(SHOWN).map(Denied::to_string).collect();
    if denied.len() > SHOWN {
        lines.push(format!("and {} more", denied.len() - SHOWN));
    }
    lines
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

/// Kind of the one operation and types of its constants: `linear Q6_K`.
fn subject(single: &OperationList) -> String {
    let Some(operation) = single.operations.first() else { return String::new() };
    let constants = single.slots.iter().filter(|slot| matches!(slot.role, SlotRole::Constant(_)));
    let types: BTreeSet<&str> = constants.map(|slot| slot.tensor.dtype.name()).collect();
    types.into_iter().fold(operation.kind.name().to_owned(), |text, dtype| text + " " + dtype)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn complaint(subject: &str, at: usize, times: usize) -> Denied {
        let operation = format!("blk.{at} ({subject})");
        Denied { operation, subject: subject.into(), reason: "no kernel".into(), times }
    }

    #[test]
    fn complaints_are_told_once_and_few() {
        let step =
            vec![complaint("linear Q6_K", 0, 8), complaint("linear Q6_K", 1, 4), complaint("rope", 0, 8)];
        let body = vec![complaint("linear Q6_K", 0, 8), complaint("predict F16", 0, 1)];
        let all = distinct([step, body]);
        let lines = condensed(&all);
        let wanted = [
            "blk.0 (linear Q6_K): no kernel (and 11 more like it)",
            "blk.0 (rope): no kernel (and 7 more like it)",
            "blk.0 (predict F16): no kernel",
        ];
        assert_eq!(lines, wanted);
        let many: Vec<Denied> = (0..9).map(|at| complaint(&format!("kind {at}"), at, 1)).collect();
        let lines = condensed(&distinct([many]));
        assert_eq!((lines.len(), lines[3].as_str()), (4, "and 6 more"));
    }
}
