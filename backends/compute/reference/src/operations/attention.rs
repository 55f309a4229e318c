//! The KV cache and attention over it. A cache row is a position: its key heads, then its value heads.

use super::linear::dot;
use crate::execute::Run;
use engine_core::Result;
use engine_core::operation::SlotId;

/// Shape of an attention.
pub(crate) struct Heads {
    /// Query heads.
    pub(crate) query: usize,
    /// Key/value heads.
    pub(crate) kv: usize,
    /// Elements of a head.
    pub(crate) dim: usize,
}

/// What happens to a score before the softmax.
pub(crate) struct Scores {
    /// Factor.
    pub(crate) scale: f32,
    /// Positions that are seen, own position included.
    pub(crate) window: Option<u32>,
    /// `c * tanh(score / c)`.
    pub(crate) soft_cap: Option<f64>,
}

/// Stores key and value of each token at its position, rounded to f16 (ties to even).
pub(crate) fn append(run: &Run<'_>, key: SlotId, value: SlotId, cache: SlotId) -> Result<()> {
    for at in run.positions() {
        let both = run.row(key, at.token).into_iter().chain(run.row(value, at.token));
        // Back to f32 first, which is exact: the slots hold f32.
        let bytes: Vec<u8> = both.flat_map(|x| half::f16::from_f32(x as f32).to_le_bytes()).collect();
        run.write_row_bytes(cache, at.cache_base + at.position as usize, &bytes);
    }
    Ok(())
}

/// `softmax(scale * q.k) . v` of each head over the positions `first..=own`.
pub(crate) fn attention(
    run: &Run<'_>,
    query: SlotId,
    cache: SlotId,
    output: SlotId,
    heads: Heads,
    scores: Scores,
) -> Result<()> {
    let dim = heads.dim;
    for at in run.positions() {
        let first = scores.window.map_or(0, |window| (at.position + 1).saturating_sub(window));
        let seen: Vec<Vec<f64>> =
            (first..=at.position).map(|position| run.row(cache, at.cache_base + position as usize)).collect();
        let query = run.row(query, at.token);
        let mut out = vec![0.0; query.len()];
        for (head, (q, out)) in query.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            let kv_head = head / (heads.query / heads.kv);
            let (key, value) = (kv_head * dim, (heads.kv + kv_head) * dim);
            let mut weights: Vec<f64> = seen
                .iter()
                .map(|row| {
                    let score = f64::from(scores.scale) * dot(q, &row[key..key + dim]);
                    scores.soft_cap.map_or(score, |cap| cap * (score / cap).tanh())
                })
                .collect();
            let greatest = weights.iter().fold(f64::NEG_INFINITY, |greatest, w| greatest.max(*w));
            weights.iter_mut().for_each(|w| *w = (*w - greatest).exp());
            let total: f64 = weights.iter().sum();
            for (weight, row) in weights.iter().zip(&seen) {
                for (out, v) in out.iter_mut().zip(&row[value..value + dim]) {
                    *out += weight / total * v;
                }
            }
        }
        run.write_row(output, at.token, &out);
    }
    Ok(())
}

/// Positions of the one sequence, this submission's tokens included, and the cache row of the first.
fn whole_sequence(run: &Run<'_>) -> (usize, usize) {
    run.sequences
        .first()
        .map_or((0, 0), |span| (span.past as usize + span.tokens as usize, span.cache_base as usize))
}

/// Writes the sequence in the canonical layout: a row per position, keys apart from values.
pub(crate) fn export(run: &Run<'_>, cache: SlotId, key: SlotId, value: SlotId) -> Result<()> {
    let (positions, base) = whole_sequence(run);
    for position in 0..positions {
        let row = run.row_bytes(cache, base + position);
        let (keys, values) = row.split_at(row.len() / 2);
        run.write_row_bytes(key, position, keys);
        run.write_row_bytes(value, position, values);
    }
    Ok(())
}

/// The reverse of `export`.
pub(crate) fn import(run: &Run<'_>, key: SlotId, value: SlotId, cache: SlotId) -> Result<()> {
    let (positions, base) = whole_sequence(run);
    for position in 0..positions {
        let mut row = run.row_bytes(key, position);
        row.extend(run.row_bytes(value, position));
        run.write_row_bytes(cache, base + position, &row);
    }
    Ok(())
}
