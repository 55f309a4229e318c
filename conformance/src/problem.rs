//! A list of operations with everything that one submission of it needs, as bytes on the host.

use engine_core::backend::{BufferId, BufferView, SequenceSpan};
use engine_core::operation::{Arithmetic, OperationKind, OperationList, Place, Slot, SlotId, SlotRole};
use engine_core::{ClusterRange, DType, Result, TensorType};

/// What a slot holds before a submission.
#[derive(Clone, Debug)]
pub enum Content {
    /// These bytes, from the slot's first row to its last.
    Bytes(Vec<u8>),
    /// A KV cache, which only the backend can lay out: filled through `KvImport`, read through `KvExport`.
    Cache(CacheContent),
    /// Nothing: an output, or scratch.
    Unset,
}

/// A KV cache in the canonical layout.
#[derive(Clone, Debug)]
pub struct CacheContent {
    /// Key/value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// f16 bits of the keys, `[positions x kv_heads*head_dim]`, indexed by position of the cache.
    pub key: Vec<u16>,
    /// The values alike.
    pub value: Vec<u16>,
    /// Positions `0..filled` of the cache are written before the submission.
    pub filled: u32,
    /// Positions `0..read` of the cache are compared afterwards.
    pub read: u32,
}

impl CacheContent {
    /// Elements of a position's key.
    pub fn columns(&self) -> usize {
        self.kv_heads as usize * self.head_dim as usize
    }

    /// Positions that the cache has room for.
    pub fn positions(&self) -> u32 {
        (self.key.len() / self.columns().max(1)) as u32
    }
}

/// A list, its operands and its bindings.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The operations; constants have a view that [`crate::run()`] replaces.
    pub list: OperationList,
    /// What each slot holds, by slot index.
    pub content: Vec<Content>,
    /// Tokens of the submission.
    pub tokens: u32,
    /// Sequences of the submission.
    pub sequences: Vec<SequenceSpan>,
    /// Active ranges by operation index.
    pub ranges: Vec<(u32, Vec<ClusterRange>)>,
}

/// The role of a constant whose buffer is not known yet.
pub const UNPLACED: SlotRole = SlotRole::Constant(BufferView { buffer: BufferId(0), offset: 0 });

impl Problem {
    /// An empty problem.
    pub fn new(capacity: u32, tokens: u32) -> Problem {
        Problem {
            list: OperationList::new(capacity),
            content: Vec::new(),
            tokens,
            sequences: Vec::new(),
            ranges: Vec::new(),
        }
    }

    fn add(&mut self, slot: Slot, content: Content) -> SlotId {
        self.content.push(content);
        self.list.add_slot(slot)
    }

    /// A device slot that holds the same for all tokens.
    pub fn fixed(&mut self, name: &str, role: SlotRole, tensor: TensorType, content: Content) -> SlotId {
        let slot = Slot { name: name.into(), role, place: Place::Device, tensor, per_token: false };
        self.add(slot, content)
    }

    /// A device slot with a row of `columns` per token, read only.
    ///
    /// # Errors
    /// Where such a row cannot exist.
    pub fn rows_in(&mut self, name: &str, dtype: DType, columns: u64, bytes: Vec<u8>) -> Result<SlotId> {
        self.rows(name, SlotRole::Input, dtype, columns, Content::Bytes(bytes))
    }

    /// A device slot with a row of `columns` per token, written.
    ///
    /// # Errors
    /// Where such a row cannot exist.
    pub fn rows_out(&mut self, name: &str, dtype: DType, columns: u64) -> Result<SlotId> {
        self.rows(name, SlotRole::Output, dtype, columns, Content::Unset)
    }

    /// A device slot with a row of `columns` per token.
    ///
    /// # Errors
    /// Where such a row cannot exist.
    pub fn rows(
        &mut self,
        name: &str,
        role: SlotRole,
        dtype: DType,
        columns: u64,
        content: Content,
    ) -> Result<SlotId> {
        let tensor = TensorType::matrix(dtype, self.list.token_capacity.into(), columns)?;
        let slot = Slot { name: name.into(), role, place: Place::Device, tensor, per_token: true };
        Ok(self.add(slot, content))
    }

    /// A KV cache.
    ///
    /// # Errors
    /// Where its size overflows.
    pub fn cache(&mut self, content: CacheContent) -> Result<SlotId> {
        let tensor =
            TensorType::matrix(DType::F16, content.positions().into(), 2 * content.columns() as u64)?;
        Ok(self.fixed("cache", SlotRole::State, tensor, Content::Cache(content)))
    }

    /// Adds an operation, labelled by its kind.
    pub fn push(&mut self, kind: OperationKind, arithmetic: Arithmetic) {
        self.list.push(kind.name(), kind, arithmetic);
    }

    /// The bytes of a slot, empty where it has none.
    pub fn bytes(&self, slot: SlotId) -> &[u8] {
        match self.content.get(slot.0 as usize) {
            Some(Content::Bytes(bytes)) => bytes,
            _ => &[],
        }
    }

    /// The bytes of a slot, for changing them.
    pub fn bytes_mut(&mut self, slot: SlotId) -> Option<&mut Vec<u8>> {
        match self.content.get_mut(slot.0 as usize) {
            Some(Content::Bytes(bytes)) => Some(bytes),
            _ => None,
        }
    }

    /// The type of a slot.
    pub fn tensor(&self, slot: SlotId) -> TensorType {
        self.list.slot(slot).map_or(TensorType::f32_vector(0), |s| s.tensor)
    }

    /// Rows of a slot that one submission uses.
    pub fn used_rows(&self, slot: SlotId) -> u64 {
        self.list.slot(slot).map_or(0, |s| if s.per_token { self.tokens.into() } else { s.tensor.rows })
    }

    /// The same problem for the tokens `first..first + count` only: per-token rows are cut out, and the sequences too.
    pub fn slice_tokens(&self, first: u32, count: u32) -> Problem {
        let mut part = self.clone();
        part.tokens = count;
        for (slot, content) in part.list.slots.iter().zip(&mut part.content) {
            if let (true, Content::Bytes(bytes)) = (slot.per_token, content) {
                let stride = slot.tensor.row_stride as usize;
                let start = (first as usize * stride).min(bytes.len());
                let mut cut = bytes[start..].to_vec();
                cut.resize(bytes.len(), crate::values::FILL);
                *bytes = cut;
            }
        }
        part.sequences = self.sequences.iter().filter_map(|span| cut_span(span, first, count)).collect();
        part
    }
}

fn cut_span(span: &SequenceSpan, first: u32, count: u32) -> Option<SequenceSpan> {
    let start = span.first_token.max(first);
    let end = (span.first_token + span.tokens).min(first + count);
    (start < end).then(|| SequenceSpan {
        first_token: start - first,
        tokens: end - start,
        past: span.past + (start - span.first_token),
        cache_base: span.cache_base,
    })
}
