//! The divergence finder: runs a model's operations one by one on a device beside the oracle, feeding both the
//! oracle's values, and names the first that departs beyond its limit, or from itself when it is run again or a token
//! at a time.
//!
//! The model comes from a [`Source`]: the runtime's lists with what is bound to them, one submission after the other.
//! Only the oracle's values go on, so an operation is blamed for its own error and not for an earlier one's.

use crate::compare::{Against, Comparison, compare, identical};
use crate::describe::{parameters_of, shape_of};
use crate::finding::{Fallible, Finding};
use crate::problem::{CacheContent, Content, Problem, UNPLACED};
use crate::properties::cut;
use crate::run::{Outputs, run_once};
use crate::scale::scales;
use engine_core::backend::{SequenceSpan, Support};
use engine_core::operation::{Access, OperationKind, OperationList, Place, SlotId, SlotRole};
use engine_core::{ClusterRange, ComputeBackend, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One submission of a model.
#[derive(Clone, Debug)]
pub struct Submission {
    /// Its list; constants may have any view, their bytes come from [`Source::bytes`].
    pub list: OperationList,
    /// Tokens.
    pub tokens: u32,
    /// Sequences.
    pub sequences: Vec<SequenceSpan>,
    /// Active ranges by operation.
    pub ranges: Vec<(u32, Vec<ClusterRange>)>,
    /// Names that states keep from one submission to the next, by slot; two slots with one key are one memory (a KV
    /// cache of a layer, a residual). A state without a key starts from [`Source::bytes`] each time.
    pub keys: BTreeMap<u32, String>,
}

/// Where submissions come from.
pub trait Source {
    /// The next submission; `None` at the end.
    ///
    /// # Errors
    /// Where it cannot be made.
    fn next(&mut self) -> Result<Option<Submission>>;

    /// The bytes of a constant or an input of a submission, from its first row to its last.
    ///
    /// # Errors
    /// Where they cannot be had.
    fn bytes(&mut self, submission: &Submission, slot: SlotId) -> Result<Vec<u8>>;
}

/// Where a device departs from the oracle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// Index of the submission.
    pub submission: u32,
    /// Index of the operation within its list.
    pub operation: u32,
    /// The operation's label, such as `blk.3.ffn`.
    pub label: String,
    /// The operation's kind.
    pub kind: String,
    /// Operand types, such as `input F32 [4 x 64]`.
    pub shape: String,
    /// What the operation takes beside them: positions, rope's base, activation.
    pub parameters: String,
    /// What was found: slot, element, both values, limit.
    pub finding: Finding,
}

/// What a run of the finder saw.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// The first departure.
    pub first: Option<Divergence>,
    /// Operations compared.
    pub compared: u64,
    /// Operations that the device does not run, by label, with its reason.
    pub not_supported: Vec<(String, String)>,
    /// By kind: the worst error in units of its limit.
    pub worst: BTreeMap<String, f64>,
}

/// Memory of one slot on the oracle's side, in the canonical form.
type Memory = BTreeMap<String, Vec<u8>>;

fn cache_shape(kind: &OperationKind) -> Option<(SlotId, u32, u32)> {
    match kind {
        OperationKind::KvAppend { cache, kv_heads, head_dim, .. }
        | OperationKind::Attention { cache, kv_heads, head_dim, .. }
        | OperationKind::KvExport { cache, kv_heads, head_dim, .. }
        | OperationKind::KvImport { cache, kv_heads, head_dim, .. } => Some((*cache, *kv_heads, *head_dim)),
        _ => None,
    }
}

/// The problem of operation `index` alone, its operands taken from `bytes` by slot; the second part maps the slots of
/// the problem to those of the list.
///
/// # Errors
/// Where the list has no such operation.
pub fn single(problem: &Problem, index: usize, bytes: &[Vec<u8>]) -> Fallible<(Problem, Vec<SlotId>)> {
    let missing = || Finding::new("suite", format!("there is no operation {index}"));
    let operation = problem.list.operations.get(index).ok_or_else(missing)?;
    let mut list = problem.list.single(index).ok_or_else(missing)?;
    // `single` keeps the slots' order, so the used slots of the list, ascending, are its slots.
    let used: BTreeSet<SlotId> = operation.kind.operands().iter().map(|o| o.slot).collect();
    let used: Vec<SlotId> = used.into_iter().collect();
    let shape = cache_shape(&operation.kind);
    let written =
        |slot: &SlotId| operation.kind.operands().iter().any(|o| o.slot == *slot && o.access != Access::Read);
    let read = |slot: &SlotId| {
        operation.kind.operands().iter().any(|o| o.slot == *slot && o.access != Access::Write)
    };
    let mut content = Vec::new();
    for (new, old) in list.slots.iter_mut().zip(&used) {
        let cache = shape.filter(|(slot, ..)| slot == old);
        if let Some((_, kv_heads, head_dim)) = cache {
            content.push(Content::Cache(canonical(
                &bytes[old.0 as usize],
                new.tensor.rows,
                kv_heads,
                head_dim,
            )));
            continue;
        }
        // A device's own operations are compared; where a slot lies on the host its copy is compared on the device.
        new.place = Place::Device;
        new.role = match (written(old), read(old), new.role) {
            (false, _, SlotRole::Constant(_)) => UNPLACED,
            (false, ..) => SlotRole::Input,
            (true, true, _) => SlotRole::State,
            (true, false, _) => SlotRole::Output,
        };
        let mut own = bytes[old.0 as usize].clone();
        own.resize(new.tensor.bytes() as usize, crate::values::FILL);
        content.push(if new.role == SlotRole::Output { Content::Unset } else { Content::Bytes(own) });
    }
    let ranges =
        problem.ranges.iter().filter(|(op, _)| *op as usize == index).map(|(_, r)| (0, r.clone())).collect();
    let one = Problem { list, content, tokens: problem.tokens, sequences: problem.sequences.clone(), ranges };
    Ok((one, used))
}

/// A cache kept as canonical bytes: keys of all positions, then values.
fn canonical(bytes: &[u8], positions: u64, kv_heads: u32, head_dim: u32) -> CacheContent {
    let elements = positions as usize * kv_heads as usize * head_dim as usize;
    let mut bits: Vec<u16> = bytes.chunks_exact(2).map(|c| u16::from_le_bytes([c[0], c[1]])).collect();
    // What was never written holds NaN: reading it shows.
    bits.resize(2 * elements, 0x7E00);
    let value = bits.split_off(elements);
    let positions = positions as u32;
    CacheContent { kv_heads, head_dim, key: bits, value, filled: positions, read: positions }
}

/// Runs operation `index` of a problem alone; outputs are by the list's slots.
///
/// # Errors
/// The backend's.
pub fn run_single(
    backend: &dyn ComputeBackend,
    problem: &Problem,
    index: usize,
    bytes: &[Vec<u8>],
) -> Fallible<(Outputs, Problem)> {
    let (one, used) = single(problem, index, bytes)?;
    let outputs = run_once(backend, &one)?;
    Ok((outputs.into_iter().map(|(slot, bytes)| (used[slot as usize].0, bytes)).collect(), one))
}

/// Runs all submissions of a source; stops at the first departure unless `whole`.
///
/// # Errors
/// Where the source or the oracle fails.
pub fn diverge(
    source: &mut dyn Source,
    dut: &dyn ComputeBackend,
    oracle: &dyn ComputeBackend,
    whole: bool,
) -> Fallible<Trace> {
    let mut trace = Trace::default();
    let mut states = Memory::new();
    let mut number = 0;
    while let Some(submission) = source.next()? {
        let mut bytes = load(source, &submission, &states)?;
        let problem = Problem {
            content: vec![Content::Unset; submission.list.slots.len()],
            list: submission.list.clone(),
            tokens: submission.tokens,
            sequences: submission.sequences.clone(),
            ranges: submission.ranges.clone(),
        };
        for index in 0..problem.list.operations.len() {
            let (one, used) = single(&problem, index, &bytes)?;
            let want = run_once(oracle, &one).map_err(|f| f.during("the oracle"))?;
            let found = compare_one(dut, oracle, &one, &want, &mut trace)?;
            if let (Some(finding), None) = (found, &trace.first) {
                let operation = &problem.list.operations[index];
                trace.first = Some(Divergence {
                    submission: number,
                    operation: index as u32,
                    label: operation.label.clone(),
                    kind: operation.kind.name().into(),
                    shape: shape_of(&one),
                    parameters: parameters_of(&one),
                    finding,
                });
                if !whole {
                    return Ok(trace);
                }
            }
            for (slot, new) in want {
                let target = &mut bytes[used[slot as usize].0 as usize];
                if target.len() < new.len() {
                    target.resize(new.len(), crate::values::FILL);
                }
                target[..new.len()].copy_from_slice(&new);
            }
        }
        for (slot, key) in &submission.keys {
            states.insert(key.clone(), std::mem::take(&mut bytes[*slot as usize]));
        }
        number += 1;
    }
    Ok(trace)
}

/// The bytes of every slot before a submission.
fn load(source: &mut dyn Source, submission: &Submission, states: &Memory) -> Fallible<Vec<Vec<u8>>> {
    let mut all = Vec::new();
    for (index, slot) in submission.list.slots.iter().enumerate() {
        let id = SlotId(index as u32);
        let kept = submission.keys.get(&id.0).and_then(|key| states.get(key));
        all.push(match (kept, slot.role) {
            (Some(bytes), _) => bytes.clone(),
            (None, SlotRole::Constant(_) | SlotRole::Input) => source.bytes(submission, id)?,
            (None, SlotRole::State) if !submission.keys.contains_key(&id.0) => {
                source.bytes(submission, id)?
            }
            _ => Vec::new(),
        });
    }
    Ok(all)
}

fn compare_one(
    dut: &dyn ComputeBackend,
    oracle: &dyn ComputeBackend,
    one: &Problem,
    want: &Outputs,
    trace: &mut Trace,
) -> Fallible<Option<Finding>> {
    let Some(operation) = one.list.operations.first() else { return Ok(None) };
    if let Support::No { reason } = dut.supports(&one.list, 0) {
        trace.not_supported.push((operation.label.clone(), reason));
        return Ok(None);
    }
    let got = match run_once(dut, one) {
        Ok(got) => got,
        Err(finding) => return Ok(Some(finding)),
    };
    trace.compared += 1;
    let class = dut.describe().tolerance;
    let scales = scales(one, oracle, want, class)?;
    let comparison =
        Comparison { problem: one, scales: &scales, class, against: Against::Stated, widen: 1.0 };
    match compare(&comparison, &got, want) {
        Ok(worst) => {
            let entry = trace.worst.entry(operation.kind.name().into()).or_default();
            *entry = entry.max(worst);
            Ok(alike(dut, one, &got).err())
        }
        Err(finding) => Ok(Some(finding)),
    }
}

/// The same operands again give the same bits, and so do the first and the last token alone.
fn alike(dut: &dyn ComputeBackend, one: &Problem, first: &Outputs) -> Fallible<()> {
    let fixed = "sums run in a fixed order: a result depends on the operands alone";
    identical(one, "repeats", fixed, &run_once(dut, one)?, first, false)?;
    let stateless =
        one.list.operations.first().is_some_and(|operation| cache_shape(&operation.kind).is_none());
    if one.tokens < 2 || !stateless {
        return Ok(());
    }
    let alone = "sums depend on nothing but the row's length: not on the number of tokens, not on other rows";
    for token in [0, one.tokens - 1] {
        let part = one.slice_tokens(token, 1);
        let what = format!("batch neighbours (token {token} alone)");
        identical(&part, &what, alone, &run_once(dut, &part)?, &cut(one, first, token, 1), false)?;
    }
    Ok(())
}
