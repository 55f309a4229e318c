//! Seconds per decoded token by bytes and bandwidths: weights are read once, devices of a layer work at the same time.

use crate::skipping::mean_frequency;
use engine_core::planner::{FfnShare, HardwareProfile, ModelProfile, Plan, SparsityPolicy};

/// The prediction; 0 where a device that has a part is of unknown bandwidth.
///
/// Embedding and head count as read once (a plain table lookup reads less), the KV cache does not count.
pub(crate) fn predict(plan: &Plan, model: &ModelProfile, hardware: &HardwareProfile) -> f64 {
    let seconds = |device: u32, bytes: f64| {
        let bandwidth = hardware.devices[device as usize].bandwidth;
        if bandwidth > 0.0 { Some(bytes / bandwidth) } else { None }
    };
    let total = || {
        let mut sum = seconds(plan.embedding, model.embedding_bytes as f64)?;
        for (index, layer) in plan.layers.iter().enumerate() {
            sum += seconds(layer.attention, model.layers[index].attention_bytes as f64)?;
            let mut longest = 0f64;
            for share in &layer.ffn {
                let away = share.device != layer.attention;
                let sync = if away { hardware.devices[share.device as usize].sync_seconds } else { 0.0 };
                longest = longest.max(seconds(share.device, bytes_read(model, index, share))? + sync);
            }
            sum += longest;
        }
        Some(sum)
    };
    total().unwrap_or(0.0)
}

/// Bytes of weights that one token reads of a share.
fn bytes_read(model: &ModelProfile, index: usize, share: &FfnShare) -> f64 {
    let layer = &model.layers[index];
    let all = f64::from(share.clusters.len()) * layer.neuron_bytes as f64;
    let active = mean_frequency(layer, &share.clusters).unwrap_or(1.0).min(1.0);
    match share.sparsity {
        SparsityPolicy::GateFirst | SparsityPolicy::Threshold { .. } => all * (1.0 + 2.0 * active) / 3.0,
        SparsityPolicy::Predictor { .. } => all * active + layer.predictor_bytes as f64,
        // Half of the gate, then what is left of the neurons that fire.
        SparsityPolicy::Bitplane { .. } => all * (0.5 + 2.5 * active) / 3.0,
        _ => all,
    }
}
