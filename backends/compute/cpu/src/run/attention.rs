//! Positions, the KV cache and attention.
//!
//! The cache's row for a position holds the keys of all heads, then their values: the canonical layout of an export is
//! the two halves of its rows.

use super::{Local, Operand, Run};
use crate::kernels::attention::Head;
use crate::kernels::rope::{angles, frequencies, rotate};
use crate::pool::Stopped;
use engine_core::Error;
use engine_core::operation::{RopeScaling, RopeStyle};

/// Frequencies that are known when a list is prepared.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeTable {
    pub(crate) frequencies: Vec<f64>,
    pub(crate) magnitude: f64,
}

/// `OperationKind::Rope`.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    pub(crate) input: Operand,
    pub(crate) output: Operand,
    pub(crate) style: RopeStyle,
    pub(crate) head_dim: usize,
    pub(crate) pairs: usize,
    pub(crate) source: RopeSource,
}

/// Where the angles come from.
#[derive(Clone, Debug)]
pub(crate) enum RopeSource {
    /// A table of the executable.
    Table(usize),
    /// Factors that are bound at submit.
    Factors { factors: Operand, base: f32, scaling: RopeScaling },
}

/// Fills the angles of all tables for this submission's tokens, a share per thread.
pub(crate) fn rope_tables(run: &Run<'_>, tables: &[RopeTable]) {
    let (start, end) = run.worker.share(run.env.tokens, 1);
    for (table, &offset) in tables.iter().zip(&run.shared.layout.angles) {
        let pairs = table.frequencies.len();
        for t in start..end {
            let Some(at) = run.env.positions.get(t) else { continue };
            // SAFETY: prepare sized the table for the list's capacity; each token has one thread.
            let out = unsafe {
                std::slice::from_raw_parts_mut(run.shared.at::<[f32; 2]>(offset).add(t * pairs), pairs)
            };
            angles(&table.frequencies, table.magnitude, at.position, out);
        }
    }
}

/// Rotates every head.
pub(crate) fn rope(run: &Run<'_>, op: &Rope, local: &mut Local) -> Result<(), Stopped> {
    let env = run.env;
    let dynamic = match &op.source {
        RopeSource::Table(_) => None,
        RopeSource::Factors { factors, base, scaling } => {
            // SAFETY: the slot has an element per pair.
            let factors = unsafe { std::slice::from_raw_parts(env.f32(factors, 0), op.pairs) };
            let known = frequencies(op.pairs as u32 * 2, *base, *scaling, factors);
            Some(known.ok_or_else(|| run.worker.fail(Error::unsupported("an unknown rope scaling")))?)
        }
    };
    let (start, end) = run.worker.share(env.tokens, 1);
    for t in start..end {
        let table: &[[f32; 2]] = match (&op.source, &dynamic) {
            (RopeSource::Table(index), _) => {
                let table = run.shared.at::<[f32; 2]>(run.shared.layout.angles[*index]);
                // SAFETY: `rope_tables` filled it for every token.
                unsafe { std::slice::from_raw_parts(table.add(t * op.pairs), op.pairs) }
            }
            (_, Some((frequencies, magnitude))) => {
                local.angles.resize(op.pairs, [0.0; 2]);
                let position = env.positions.get(t).map_or(0, |p| p.position);
                angles(frequencies, *magnitude, position, &mut local.angles);
                &local.angles
            }
            (_, None) => &[],
        };
        let (from, to) = (env.f32(&op.input, t), env.f32(&op.output, t));
        if from != to {
            // SAFETY: rows of equal length.
            unsafe { std::ptr::copy(from, to, op.input.columns) };
        }
        for head in 0..op.input.columns / op.head_dim {
            // SAFETY: heads tile the row, which this thread alone has.
            let head = unsafe { std::slice::from_raw_parts_mut(to.add(head * op.head_dim), op.head_dim) };
            rotate(head, table, op.style);
        }
    }
    Ok(())
}

/// `OperationKind::KvAppend`.
#[derive(Clone, Debug)]
pub(crate) struct KvAppend {
    pub(crate) key: Operand,
    pub(crate) value: Operand,
    pub(crate) cache: Operand,
}

/// Each token's key and value, rounded to f16, to its row.
pub(crate) fn append(run: &Run<'_>, op: &KvAppend) {
    let env = run.env;
    let (start, end) = run.worker.share(env.tokens, 1);
    for t in start..end {
        let Some(at) = env.positions.get(t) else { continue };
        let row = env.row(&op.cache, (at.base + at.position) as usize).cast::<u16>();
        // SAFETY: `Bindings::validate` keeps positions within the cache.
        unsafe {
            (run.kernels.to_f16)(env.f32(&op.key, t), row, op.key.columns);
            (run.kernels.to_f16)(env.f32(&op.value, t), row.add(op.key.columns), op.key.columns);
        }
    }
}

/// `OperationKind::Attention`.
#[derive(Clone, Debug)]
pub(crate) struct Attention {
    pub(crate) query: Operand,
    pub(crate) cache: Operand,
    pub(crate) output: Operand,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: f32,
    pub(crate) window: Option<u32>,
    pub(crate) soft_cap: f32,
}

/// Head by head of every token.
pub(crate) fn attention(run: &Run<'_>, op: &Attention, local: &mut Local) {
    let env = run.env;
    let group = op.heads / op.kv_heads;
    let grain = if env.tokens == 1 { 1 } else { op.heads };
    while let Some(part) = run.claim(0, env.tokens * op.heads, grain) {
        for task in part {
            // Later tokens attend to more: begin with them, so that the last claims are short.
            let (t, head) = (env.tokens - 1 - task / op.heads, task % op.heads);
            let Some(at) = env.positions.get(t) else { continue };
            let first = op.window.map_or(0, |w| (at.position + 1).saturating_sub(w));
            let positions = (at.position + 1 - first) as usize;
            if local.scores.len() < positions {
                local.scores.resize(positions.next_multiple_of(256), 0.0);
            }
            let row = env.row(&op.cache, (at.base + first) as usize).cast::<u16>();
            let keys = row.wrapping_add(head / group * op.head_dim);
            let job = Head {
                query: env.f32(&op.query, t).wrapping_add(head * op.head_dim),
                head_dim: op.head_dim,
                keys,
                values: keys.wrapping_add(op.kv_heads * op.head_dim),
                stride: op.cache.stride / 2,
                positions,
                scale: op.scale,
                soft_cap: op.soft_cap,
                scores: local.scores.as_mut_ptr(),
                out: env.f32(&op.output, t).wrapping_add(head * op.head_dim),
            };
            // SAFETY: positions lie within the cache, heads within their rows; scores were sized above.
            unsafe { (run.kernels.attention)(&job) };
        }
    }
}

/// `OperationKind::KvExport` and `OperationKind::KvImport`.
#[derive(Clone, Debug)]
pub(crate) struct KvTransfer {
    pub(crate) import: bool,
    pub(crate) cache: Operand,
    pub(crate) key: Operand,
    pub(crate) value: Operand,
}

/// The two halves of every row of the submission's sequence.
pub(crate) fn transfer(run: &Run<'_>, op: &KvTransfer) {
    let env = run.env;
    let Some(span) = env.sequences.first() else { return };
    let bytes = op.key.columns * 2;
    let (start, end) = run.worker.share((span.past + span.tokens) as usize, 1);
    for p in start..end {
        let row = env.row(&op.cache, span.cache_base as usize + p);
        let (key, value) = (env.row(&op.key, p), env.row(&op.value, p));
        // SAFETY: `Bindings::validate` keeps positions within the cache and within the exports.
        unsafe {
            if op.import {
                std::ptr::copy(key, row, bytes);
                std::ptr::copy(value, row.add(bytes), bytes);
            } else {
                std::ptr::copy(row, key, bytes);
                std::ptr::copy(row.add(bytes), value, bytes);
            }
        }
    }
}
