//! The neuron clusters of a model in the order in which they are worth fast memory.

use engine_core::planner::{LayerProfile, ModelProfile};
use engine_core::{ClusterRange, Error, Result};

/// Neurons of one layer that are placed together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cluster {
    pub(crate) layer: usize,
    pub(crate) range: ClusterRange,
    pub(crate) bytes: u64,
    /// Neurons of the layer's clusters, the last perhaps less.
    pub(crate) unit: u32,
    /// Expected firings per token: the sum of the neurons' frequencies.
    pub(crate) activity: f64,
}

impl Cluster {
    /// Firings per byte.
    fn density(&self) -> f64 {
        self.activity / self.bytes.max(1) as f64
    }
}

/// Expected firings per token of some neurons; 1 each where nothing was measured.
pub(crate) fn activity(layer: &LayerProfile, range: ClusterRange) -> f64 {
    match layer.frequency.get(range.start as usize..range.end as usize) {
        Some(measured) => measured.iter().map(|f| f64::from(*f)).sum(),
        None => range.len().into(),
    }
}

/// All clusters of `group` neurons or a little more, so that each can be held alone (the last of a layer may be smaller),
/// densest first; equal ones in the order of layers, so that without measurements whole layers come together.
///
/// `hot`, where it is given, is the greatest share of a layer that devices before the last may have: clusters are no larger.
pub(crate) fn by_density(model: &ModelProfile, group: u32, hot: Option<f64>) -> Result<Vec<Cluster>> {
    let mut clusters = Vec::new();
    for (index, layer) in model.layers.iter().enumerate() {
        let measured = layer.frequency.len();
        if measured != 0 && measured != layer.neurons as usize {
            return Err(Error::invalid(format!(
                "layer {index} of `{}` has {} neurons and {measured} frequencies",
                model.name, layer.neurons
            )));
        }
        if let Some(neuron) = layer.frequency.iter().position(|f| !(f.is_finite() && *f >= 0.0)) {
            return Err(Error::invalid(format!(
                "layer {index} of `{}`: neuron {neuron} has frequency {}",
                model.name, layer.frequency[neuron]
            )));
        }
        let unit = match layer.whole {
            true => layer.neurons.max(1),
            false => {
                let most = hot.map_or(group, |hot| (hot * f64::from(layer.neurons)) as u32);
                group.min(most.max(1)).checked_next_multiple_of(layer.block.max(1)).unwrap_or(u32::MAX)
            }
        };
        let mut start = 0;
        while start < layer.neurons {
            let range = ClusterRange::new(start, start.saturating_add(unit).min(layer.neurons));
            let bytes = u64::from(range.len()).saturating_mul(layer.neuron_bytes);
            clusters.push(Cluster { layer: index, range, bytes, unit, activity: activity(layer, range) });
            start = range.end;
        }
    }
    clusters.sort_by(|a, b| {
        b.density().total_cmp(&a.density()).then((a.layer, a.range.start).cmp(&(b.layer, b.range.start)))
    });
    Ok(clusters)
}
