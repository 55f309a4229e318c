//! How much memory of its own each thread may come to hold for a list: it grows when it is first needed, and is counted
//! before.

use engine_core::operation::{OperationKind, OperationList, SlotId, SlotRole};

use crate::kernels::prefill::tile_rows;

/// The most rows that a thread claims of a matrix at a time.
const PART_ROWS: u64 = 48;

/// An upper bound of the bytes of one thread's [`Local`](crate::run::Local), once every operation has run with as many
/// tokens as the list allows.
pub(crate) fn bytes_per_thread(list: &OperationList) -> u64 {
    let tensor = |id: SlotId| list.slot(id).map(|slot| slot.tensor);
    let rows = |id: SlotId| tensor(id).map_or(0, |tensor| tensor.rows);
    let columns = |id: SlotId| tensor(id).map_or(0, |tensor| tensor.columns);
    let tokens = u64::from(list.token_capacity);
    let weights = list.slots.iter().filter(|slot| matches!(slot.role, SlotRole::Constant(_)));
    let widest = weights.map(|slot| slot.tensor.columns).max().unwrap_or(0).next_multiple_of(64);
    // Unpacked weights: values, or codes and two scales a block.
    let row_bytes = usize::try_from(widest.saturating_mul(4)).unwrap_or(usize::MAX);
    let tile = if tokens > 1 { (tile_rows(row_bytes) as u64).saturating_mul(row_bytes as u64) } else { 0 };
    // One row quantised, twice: codes, values and scales.
    let quantised = widest.saturating_mul(2 * 6);
    let (mut scores, mut neurons, mut saved, mut choices, mut angles) = (0, 0, 0, 0, 0);
    for operation in &list.operations {
        match &operation.kind {
            OperationKind::Attention { cache, .. } => scores = rows(*cache).next_multiple_of(256).max(scores),
            OperationKind::Rope(rope) => angles = u64::from(rope.rotary_dim).max(angles),
            OperationKind::Ffn(ffn) => {
                neurons = rows(ffn.up).max(neurons);
                saved = tokens;
            }
            OperationKind::Experts(experts) => {
                neurons = (rows(experts.up) / u64::from(experts.experts.max(1))).max(neurons);
                saved = tokens;
                choices = tokens.saturating_mul(columns(experts.chosen)).max(choices);
            }
            OperationKind::Predict { fc1, fc2, .. } => neurons = rows(*fc1).max(rows(*fc2)).max(neurons),
            _ => {}
        }
    }
    // A list that grows by doubling may hold twice what it needs.
    let lists = [(neurons, 4), (saved * PART_ROWS, 4), (choices, 12)];
    let lists = lists.map(|(elements, size): (u64, u64)| elements.saturating_mul(2 * size));
    let values = scores.saturating_add(angles).saturating_mul(4);
    [tile, tile / 4, quantised, values].into_iter().chain(lists).fold(0, u64::saturating_add)
}
