//! What one decoded token reads, in bytes: the one place where this is told apart by part.
//!
//! The sum of weights is the devices' own count (`weight_bytes_read`): rows that a sparsity policy skips are not in it,
//! whatever the policy. A device that keeps no count and skips nothing reads what it has, which is known by arithmetic. So
//! is what every token reads whole (attention, head, predictors), and the networks' part is the rest. Norms, biases and the
//! row of the embedding are too small to be counted.

use crate::Engine;
use crate::profile::Fixed;
use engine_core::ComputeBackend;
use engine_core::planner::SparsityPolicy;
use formats::model::Layer;
use serde::Serialize;
use std::sync::Arc;

/// The counter of a device that counts the bytes of weights that it multiplies.
const READ: &str = "weight_bytes_read";
/// Bytes of an element of the KV cache.
const KV_ELEMENT: u64 = 2;

/// Bytes per decoded token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StepBytes {
    /// Matrices of attention, and routers of experts.
    pub attention: u64,
    /// The matrix that makes logits.
    pub head: u64,
    /// Predictors, in layers that are planned by them.
    pub predictors: u64,
    /// Rows of gate, up and down that were read, on average.
    pub ffn: f64,
    /// Keys and values of the positions so far, on average.
    pub kv: f64,
}

impl StepBytes {
    /// Of everything.
    pub fn total(&self) -> f64 {
        (self.attention + self.head + self.predictors) as f64 + self.ffn + self.kv
    }
}

impl Engine {
    /// Bytes of weights that the devices have multiplied since they were opened, those that do not count them left out:
    /// [`Engine::weight_bytes_uncounted`].
    pub fn weight_bytes_read(&self) -> u64 {
        self.backends().iter().filter_map(|backend| counted(backend)).sum()
    }

    /// Bytes of weights that devices which count none read for one token; `None` where one skips neurons, so that nobody
    /// knows.
    pub fn weight_bytes_uncounted(&self) -> Option<u64> {
        let plan = self.plan();
        let devices = self.devices().iter().enumerate();
        let uncounted = devices.filter(|(_, device)| counted(&device.backend).is_none());
        let of = |(at, _): (usize, _)| -> Option<u64> {
            let sizes = self.sizes_on(at);
            let mut bytes = if plan.embedding as usize == at { sizes.fixed().head } else { 0 };
            for (layer, placed) in self.model().layers.iter().zip(&plan.layers) {
                if placed.attention as usize == at {
                    bytes += sizes.fixed_attention(layer);
                }
                let shares = placed.ffn.iter().filter(|share| share.device as usize == at);
                for share in shares.filter(|share| !share.clusters.is_empty()) {
                    if share.sparsity != SparsityPolicy::Dense {
                        return None;
                    }
                    let all = u128::from(sizes.used_neurons(&layer.ffn));
                    let neurons = u128::from(share.clusters.len());
                    bytes += (all * neurons / (layer.ffn.n_ff.max(1) as u128)) as u64;
                }
            }
            Some(bytes)
        };
        uncounted.map(of).sum()
    }

    /// The parts of `read` bytes of weights per token (the mean that the device counted) of a sequence of `tokens` tokens
    /// decoded from position 0 on.
    pub fn step_bytes(&self, read: f64, tokens: u32) -> StepBytes {
        let Fixed { attention, head } = self.sizes().fixed();
        let predicted = |index: usize| {
            let plan = self.plan().layers.get(index);
            let shares = plan.into_iter().flat_map(|plan| &plan.ffn);
            shares.map(|share| share.sparsity).any(|s| matches!(s, SparsityPolicy::Predictor { .. }))
        };
        let layers = self.model().layers.iter().enumerate();
        let predictors = layers
            .filter(|(index, _)| predicted(*index))
            .map(|(_, layer)| self.sizes().predictor(&layer.ffn));
        let predictors = predictors.sum();
        let kv = self.model().layers.iter().map(|layer| kv_bytes(layer, tokens)).sum();
        let ffn = (read - (attention + head + predictors) as f64).max(0.0);
        StepBytes { attention, head, predictors, ffn, kv }
    }
}

/// Bytes of weights that a device has multiplied since it was opened, where it counts them.
fn counted(backend: &Arc<dyn ComputeBackend>) -> Option<u64> {
    let counters = backend.counters();
    counters.into_iter().find(|counter| counter.name == READ).map(|counter| counter.value)
}

/// Mean bytes of keys and values that one of `tokens` tokens sees in a layer.
fn kv_bytes(layer: &Layer, tokens: u32) -> f64 {
    let attention = &layer.attention;
    let row = attention.n_head_kv as u64 * (attention.head_dim + attention.value_dim) as u64 * KV_ELEMENT;
    let window = layer.window.unwrap_or(usize::MAX) as u64;
    let seen: u64 = (1..=u64::from(tokens)).map(|seen| seen.min(window)).sum();
    row as f64 * seen as f64 / f64::from(tokens.max(1))
}
