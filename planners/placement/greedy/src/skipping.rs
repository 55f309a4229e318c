//! How the neurons of a share are skipped: as asked, or the exact way that pays.

use crate::clusters::activity;
use engine_core::ClusterSet;
use engine_core::planner::{DeviceProfile, LayerProfile, SparsityKind, SparsityPolicy};

/// Mean firings per neuron and token of a share; `None` where nothing was measured.
pub(crate) fn mean_frequency(layer: &LayerProfile, clusters: &ClusterSet) -> Option<f64> {
    if layer.frequency.is_empty() || clusters.is_empty() {
        return None;
    }
    let sum: f64 = clusters.ranges().iter().map(|range| activity(layer, *range)).sum();
    Some(sum / f64::from(clusters.len()))
}

/// The policy of a kind for a layer on a device.
///
/// # Errors
/// Why it cannot be had.
pub(crate) fn policy(
    kind: SparsityKind,
    layer: &LayerProfile,
    device: &DeviceProfile,
) -> Result<SparsityPolicy, String> {
    if kind == SparsityKind::GateFirst && !layer.zero_below {
        return Err(
            "its activation is not zero below zero, so skipping by the gate would change the output".into()
        );
    }
    let policy = layer.policy(kind).ok_or_else(|| match kind {
        SparsityKind::Predictor => "the model has no predictor for it".to_owned(),
        SparsityKind::Threshold => {
            "the model has no calibrated threshold for it (`thermocline prepare` makes them)".to_owned()
        }
        SparsityKind::Bitplane => {
            "its weights are not in planes (`thermocline prepare` stores them so)".to_owned()
        }
        _ => format!("the model has no numbers for {kind}"),
    })?;
    if policy != SparsityPolicy::Dense && !device.sparse {
        return Err(format!("device `{}` runs no sparse selections", device.name));
    }
    Ok(policy)
}

/// The policy of the cold rest of a layer whose hot neurons are on other devices, where none was asked for: gate-first where
/// it is exact, unless the measured frequency says that it does not pay. What was not measured is cold because it was
/// put there.
pub(crate) fn choose_cold(
    layer: &LayerProfile,
    clusters: &ClusterSet,
    device: &DeviceProfile,
    gate_first_below: f32,
) -> SparsityPolicy {
    match mean_frequency(layer, clusters) {
        None if policy(SparsityKind::GateFirst, layer, device).is_ok() => SparsityPolicy::GateFirst,
        _ => choose(layer, clusters, device, gate_first_below),
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
    if pays && policy(SparsityKind::GateFirst, layer, device).is_ok() {
        SparsityPolicy::GateFirst
    } else {
        SparsityPolicy::Dense
    }
}
