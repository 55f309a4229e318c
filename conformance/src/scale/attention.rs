//! Scales of attention: errors of the scores come out as relative errors of the weights.

use super::{Scale, Scales, TINY, input_rows};
use crate::problem::{CacheContent, Content, Problem};
use engine_core::operation::OperationKind;
use half::f16;

fn head(content: &CacheContent, side: &[u16], position: usize, head: usize) -> Vec<f64> {
    let start = position * content.columns() + head * content.head_dim as usize;
    side[start..start + content.head_dim as usize].iter().map(|b| f16::from_bits(*b).to_f64()).collect()
}

pub(super) fn attention(problem: &Problem, kind: &OperationKind) -> Scales {
    let OperationKind::Attention { query, cache, output, heads, kv_heads, head_dim, scale, window, soft_cap } =
        kind
    else {
        return Scales::new();
    };
    let Some(Content::Cache(content)) = problem.content.get(cache.0 as usize) else { return Scales::new() };
    let mut all = Vec::new();
    let rows = input_rows(problem, *query);
    for span in &problem.sequences {
        for t in 0..span.tokens {
            let own = span.past + t;
            let first = window.map_or(0, |w| (own + 1).saturating_sub(w));
            let positions: Vec<usize> = (first..=own).map(|p| (span.cache_base + p) as usize).collect();
            let row = &rows[(span.first_token + t) as usize];
            for (h, q) in row.chunks(*head_dim as usize).enumerate() {
                let kv = h / (heads / kv_heads) as usize;
                let scored: Vec<(f64, f64)> = positions
                    .iter()
                    .map(|p| score(q, &head(content, &content.key, *p, kv), f64::from(*scale), *soft_cap))
                    .collect();
                all.extend(mix(content, &positions, kv, &scored));
            }
        }
    }
    Scales::from([(output.0, all)])
}

/// A score with its sum of absolute products.
fn score(q: &[f64], k: &[f64], scale: f64, soft_cap: Option<f32>) -> (f64, f64) {
    let products = || q.iter().zip(k).map(|(q, k)| q * k * scale);
    let sum: f64 = products().sum();
    let capped = soft_cap.map_or(sum, |c| f64::from(c) * (sum / f64::from(c)).tanh());
    (capped, products().map(f64::abs).sum())
}

fn mix(content: &CacheContent, positions: &[usize], kv: usize, scored: &[(f64, f64)]) -> Vec<Scale> {
    let most = scored.iter().fold(f64::NEG_INFINITY, |m, s| m.max(s.0));
    let weights: Vec<f64> = scored.iter().map(|s| (s.0 - most).exp()).collect();
    let total: f64 = weights.iter().sum();
    let mean_condition: f64 = weights.iter().zip(scored).map(|(w, s)| w / total * s.1).sum();
    let mut out = vec![Scale { floor: 16.0 * TINY, ..Scale::default() }; content.head_dim as usize];
    for ((position, weight), (_, condition)) in positions.iter().zip(&weights).zip(scored) {
        let value = head(content, &content.value, *position, kv);
        for (scale, v) in out.iter_mut().zip(&value) {
            scale.sum += weight / total * v.abs() * (1.0 + condition + mean_condition);
            scale.floor += v.abs() * 16.0 * TINY;
        }
    }
    out
}
