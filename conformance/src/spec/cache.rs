//! Problems with a KV cache: appending, attention, and moving a cache in the canonical layout.

use super::plain::token_rows;
use crate::finding::Fallible;
use crate::problem::{CacheContent, Content, Problem};
use crate::rng::Rng;
use crate::values::{FILL, ValueClass, f16_bits, u16_bytes};
use engine_core::backend::SequenceSpan;
use engine_core::operation::{Arithmetic, OperationKind, SlotRole};
use engine_core::{DType, TensorType};

/// One sequence of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceShape {
    /// Its tokens.
    pub tokens: u32,
    /// Positions in the cache before them.
    pub past: u32,
}

/// `KvAppend`, `KvExport` or `KvImport`.
#[derive(Clone, Debug)]
pub struct CacheSpec {
    /// `kv-append`, `kv-export` or `kv-import`.
    pub action: CacheAction,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Sequences; one for export and import.
    pub sequences: Vec<SequenceShape>,
    /// Values.
    pub values: ValueClass,
}

/// What is done with a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheAction {
    /// `KvAppend`.
    Append,
    /// `KvExport`.
    Export,
    /// `KvImport`.
    Import,
}

/// `Attention`.
#[derive(Clone, Debug)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Sequences.
    pub sequences: Vec<SequenceShape>,
    /// Window.
    pub window: Option<u32>,
    /// Soft cap.
    pub soft_cap: Option<f32>,
    /// Values.
    pub values: ValueClass,
}

/// Positions that lie free between two sequences in a cache, and after the last.
const GAP: u32 = 3;

/// Lays sequences out in one cache, each with a gap after it; returns the spans and the positions.
fn lay_out(sequences: &[SequenceShape]) -> (Vec<SequenceSpan>, u32) {
    let (mut token, mut base) = (0, 0);
    let mut spans = Vec::new();
    for s in sequences {
        spans.push(SequenceSpan { first_token: token, tokens: s.tokens, past: s.past, cache_base: base });
        token += s.tokens;
        base += s.past + s.tokens + GAP;
    }
    (spans, base)
}

/// A cache whose needed positions hold values and whose others hold NaN: what must not be read shows itself.
fn content(
    rng: &mut Rng,
    heads: (u32, u32),
    positions: u32,
    values: ValueClass,
    needed: impl Fn(u32) -> bool,
) -> CacheContent {
    let columns = (heads.0 * heads.1) as usize;
    let mut side = || {
        let mut bits = f16_bits(rng, values, positions as usize * columns);
        for position in (0..positions).filter(|p| !needed(*p)) {
            let start = position as usize * columns;
            bits[start..start + columns].fill(0x7E00);
        }
        bits
    };
    let (key, value) = (side(), side());
    CacheContent { kv_heads: heads.0, head_dim: heads.1, key, value, filled: positions, read: positions }
}

impl CacheSpec {
    pub(super) fn operation(&self) -> &'static str {
        match self.action {
            CacheAction::Append => "kv-append",
            CacheAction::Export => "kv-export",
            CacheAction::Import => "kv-import",
        }
    }

    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let tokens: u32 = self.sequences.iter().map(|s| s.tokens).sum();
        let (spans, positions) = lay_out(&self.sequences);
        let mut problem = Problem::new(tokens + 2, tokens);
        let (kv_heads, head_dim) = (self.kv_heads, self.head_dim);
        let columns = u64::from(kv_heads * head_dim);
        let cache = content(rng, (kv_heads, head_dim), positions, self.values, |_| true);
        let kind = match self.action {
            CacheAction::Append => {
                let capacity = problem.list.token_capacity;
                let rows = token_rows(rng, self.values, capacity, tokens, columns);
                let key = problem.rows_in("key", DType::F32, columns, rows)?;
                let rows = token_rows(rng, self.values, capacity, tokens, columns);
                let value = problem.rows_in("value", DType::F32, columns, rows)?;
                let cache = problem.cache(cache)?;
                OperationKind::KvAppend { key, value, cache, kv_heads, head_dim }
            }
            CacheAction::Export | CacheAction::Import => {
                let used = spans.iter().map(|s| s.past + s.tokens).sum::<u32>();
                // One row more than is moved: it must stay as it is.
                let side = TensorType::matrix(DType::F16, u64::from(used) + 1, columns)?;
                let export = self.action == CacheAction::Export;
                let slot = |problem: &mut Problem, rng: &mut Rng, name: &str| {
                    let mut bytes = vec![FILL; side.bytes() as usize];
                    let role = if export {
                        SlotRole::State
                    } else {
                        let bits = f16_bits(rng, self.values, used as usize * columns as usize);
                        bytes[..bits.len() * 2].copy_from_slice(&u16_bytes(&bits));
                        SlotRole::Input
                    };
                    problem.fixed(name, role, side, Content::Bytes(bytes))
                };
                let key = slot(&mut problem, rng, "key");
                let value = slot(&mut problem, rng, "value");
                let cache = problem.cache(cache)?;
                if export {
                    OperationKind::KvExport { cache, key, value, kv_heads, head_dim }
                } else {
                    OperationKind::KvImport { key, value, cache, kv_heads, head_dim }
                }
            }
        };
        problem.sequences = spans;
        problem.push(kind, Arithmetic::F32);
        Ok(problem)
    }
}

impl AttentionSpec {
    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let tokens: u32 = self.sequences.iter().map(|s| s.tokens).sum();
        let (spans, positions) = lay_out(&self.sequences);
        let mut problem = Problem::new(tokens + 1, tokens);
        let columns = u64::from(self.heads * self.head_dim);
        let bytes = token_rows(rng, self.values, tokens + 1, tokens, columns);
        let query = problem.rows_in("query", DType::F32, columns, bytes)?;
        let needed = |position: u32| {
            spans.iter().any(|s| {
                let first = self.window.map_or(0, |w| (s.past + 1).saturating_sub(w));
                (s.cache_base + first..s.cache_base + s.past + s.tokens).contains(&position)
            })
        };
        let cache = content(rng, (self.kv_heads, self.head_dim), positions, self.values, needed);
        let cache = problem.cache(cache)?;
        let output = problem.rows_out("output", DType::F32, columns)?;
        problem.sequences = spans;
        let kind = OperationKind::Attention {
            query,
            cache,
            output,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: self.window,
            soft_cap: self.soft_cap,
        };
        problem.push(kind, Arithmetic::F32);
        Ok(problem)
    }
}
