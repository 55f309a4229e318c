//! What changes with every submission and is read by shaders: positions, angles of rope, active neurons; and the words in
//! which shaders complain.
//!
//! One buffer that the host sees, in words: a complaint per embed and mixture, (position, cache base) per token, (cosine, sine) per
//! token and pair for each rope table, a bit per neuron for each ffn.

use std::sync::Arc;

use engine_core::operation::{OperationKind, OperationList};
use engine_core::{Error, Result};

use super::rope::Table;
use super::{Env, Shared};
use crate::device::Kind;
use crate::memory::{Memory, Place};

/// There is nothing to complain about.
const FINE: u32 = u32::MAX;

/// Where each part begins, in words.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Of the complaint of each embed and mixture, by operation.
    complaints: Vec<Option<u64>>,
    complaining: u64,
    positions: u64,
    /// Tables with their starts.
    ropes: Vec<(Table, u64)>,
    /// The table of each rope, by operation.
    rope_of: Vec<Option<usize>>,
    /// Of the bits of each ffn, by operation, and their number of words.
    ranges: Vec<Option<(u64, u64)>>,
    words: u64,
}

impl Layout {
    /// The layout for a list whose ropes have these tables.
    pub(crate) fn new(list: &OperationList, ropes: (Vec<Table>, Vec<Option<usize>>)) -> Result<Layout> {
        let tokens = u64::from(list.token_capacity);
        let mut layout = Layout { rope_of: ropes.1, ..Layout::default() };
        let mut next = 0u64;
        let mut take = |words: u64| {
            let start = next;
            next = next.saturating_add(words);
            start
        };
        for operation in &list.operations {
            let checks_ids =
                matches!(operation.kind, OperationKind::Embed { .. } | OperationKind::Experts(_));
            layout.complaints.push(checks_ids.then(|| take(1)));
            layout.complaining += u64::from(checks_ids);
        }
        let positioned = |kind: &OperationKind| {
            matches!(kind, OperationKind::KvAppend { .. } | OperationKind::Attention { .. })
        };
        if list.operations.iter().any(|o| positioned(&o.kind)) {
            layout.positions = take(2 * tokens);
        }
        for table in ropes.0 {
            let start = take(2 * tokens * table.pairs() as u64);
            layout.ropes.push((table, start));
        }
        for operation in &list.operations {
            layout.ranges.push(match &operation.kind {
                OperationKind::Ffn(ffn) => {
                    let words = list.slot(ffn.up).map_or(0, |s| s.tensor.rows).div_ceil(32);
                    Some((take(words), words))
                }
                _ => None,
            });
        }
        layout.words = next;
        if next > u64::from(u32::MAX) / 4 {
            return Err(Error::out_of_memory(
                "what changes per submission exceeds 4 GiB; use fewer tokens at once",
            ));
        }
        Ok(layout)
    }
}

/// The buffer.
pub(crate) struct Parameters {
    layout: Layout,
    pub(crate) place: Place,
}

impl Parameters {
    /// Takes the memory, where a list has anything of the kind.
    pub(crate) fn new(shared: &Shared, layout: Layout) -> Result<Option<Parameters>> {
        if layout.words == 0 {
            return Ok(None);
        }
        let bytes = layout.words * 4;
        if bytes > shared.limits.window() {
            return Err(Error::out_of_memory(format!(
                "what changes per submission takes {bytes} bytes, more than a shader of this device sees; use fewer \
                 tokens at once"
            )));
        }
        let memory = Memory::allocate(&shared.device, &shared.budget, bytes, Kind::Parameters)?;
        Ok(Some(Parameters { layout, place: Place::of(&Arc::new(memory), 0, bytes) }))
    }

    /// The word of an operation's complaint.
    pub(crate) fn complaint(&self, operation: usize) -> Option<u32> {
        self.layout.complaints.get(operation)?.map(|word| word as u32)
    }

    /// The first word of the positions.
    pub(crate) fn positions(&self) -> u32 {
        self.layout.positions as u32
    }

    /// The first word of a rope's angles.
    pub(crate) fn angles(&self, operation: usize) -> Option<u32> {
        let table = (*self.layout.rope_of.get(operation)?)?;
        self.layout.ropes.get(table).map(|(_, start)| *start as u32)
    }

    /// The first word of an ffn's active neurons.
    pub(crate) fn active(&self, operation: usize) -> Option<u32> {
        self.layout.ranges.get(operation)?.map(|(start, _)| start as u32)
    }

    fn write(&self, word: u64, words: &[u32]) -> Result<()> {
        self.place.memory.write_words(word * 4, words)
    }

    /// Writes what this submission needs.
    pub(crate) fn fill(&self, list: &OperationList, env: &Env) -> Result<()> {
        let layout = &self.layout;
        self.write(0, &vec![FINE; layout.complaining as usize])?;
        let tokens: Vec<(u32, u32)> = env
            .sequences
            .iter()
            .flat_map(|span| (0..span.tokens).map(|n| (span.past + n, span.cache_base)))
            .collect();
        if layout.words > layout.positions && has_positions(list) {
            let words: Vec<u32> = tokens.iter().flat_map(|(position, base)| [*position, *base]).collect();
            self.write(layout.positions, &words)?;
        }
        for (table, start) in &layout.ropes {
            let words: Vec<u32> = tokens.iter().flat_map(|(position, _)| table.angles(*position)).collect();
            self.write(*start, &words)?;
        }
        for (operation, ranges) in &env.ranges {
            let Some((start, words)) = layout.ranges.get(*operation as usize).copied().flatten() else {
                continue;
            };
            let mut bits = vec![0u32; words as usize];
            for neuron in ranges.iter().flat_map(|range| range.start..range.end) {
                bits[neuron as usize / 32] |= 1 << (neuron % 32);
            }
            self.write(start, &bits)?;
        }
        Ok(())
    }

    /// The error of a run that met an id outside of its table.
    pub(crate) fn complaints(&self, list: &OperationList) -> Result<()> {
        for (operation, word) in self.layout.complaints.iter().enumerate() {
            let Some(word) = word else { continue };
            let mut bytes = [0; 4];
            self.place.memory.read(word * 4, &mut bytes)?;
            let token = u32::from_ne_bytes(bytes);
            if token != FINE {
                let operation = &list.operations[operation];
                let rows = match &operation.kind {
                    OperationKind::Embed { table, .. } => list.slot(*table).map_or(0, |s| s.tensor.rows),
                    OperationKind::Experts(op) => {
                        return Err(Error::data(format!(
                            "{} (experts): the experts of token {token} are no ascending ids below {}",
                            operation.label, op.experts
                        )));
                    }
                    _ => 0,
                };
                return Err(Error::data(format!(
                    "{} (embed): the id of token {token} is not in the table's 0..{rows}",
                    operation.label
                )));
            }
        }
        Ok(())
    }
}

fn has_positions(list: &OperationList) -> bool {
    list.operations
        .iter()
        .any(|o| matches!(o.kind, OperationKind::KvAppend { .. } | OperationKind::Attention { .. }))
}
