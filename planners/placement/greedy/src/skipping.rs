//! How the neurons of a share are skipped: as asked, or the exact way that pays.

use crate::clusters::activity;
use engine_core::ClusterSet;
use engine_core::planner::{DeviceProfile, LayerProfile, SparsityPolicy};

/// Mean firings per neuron and token of a share; `None` where nothing was measured.
pub(crate) fn mean_frequency(layer: &LayerProfile, clusters: &ClusterSet) -> Option<f64> {
    if layer.frequency.is_empty() || clusters.is_empty() {
        return None;
    }
    let sum: f64 = clusters.ranges().iter().map(|range| activity(layer, *range)).sum();
    Some(sum / f64::from(clusters.len()))
}

/// Why a policy cannot be had for a layer on a device; `None` where it can.
pub(crate) fn obstacle(
    policy: SparsityPolicy,
    layer: &LayerProfile,
    device: &DeviceProfile,
) -> Option<String> {
    match policy {
        SparsityPolicy::Dense => None,
        SparsityPolicy::GateFirst if !layer.zero_below => Some(
            "its activation is not zero below zero, so skipping by the gate would change the output".into(),
        ),
        SparsityPolicy::Predictor { .. } if layer.predictor_bytes == 0 => {
            Some("the model has no predictor for it".into())
        }
        _ if !device.sparse => Some(format!("device `{}` runs no sparse selections", device.name)),
        _ => None,
    }
}

/// The policy where none was asked for: gate-first where it is exact and the measured frequency says that it pays.
pub(crate) fn choose(
    layer: &LayerProfile,
    clusters: &ClusterSet,
    device: &DeviceProfile,
    gate_first_below: f32,
) -> SparsityPolicy {
    let pays = mean_frequency(layer, clusters).is_some_and(|mean| mean < f64::from(gate_first_below));
    if pays && obstacle(SparsityPolicy::GateFirst, layer, device).is_none() {
        SparsityPolicy::GateFirst
    } else {
        SparsityPolicy::Dense
    }
}
