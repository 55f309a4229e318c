//! Which device holds what: attention, embedding and KV cache on one, the clusters by density.

use crate::clusters::Cluster;
use engine_core::planner::{HardwareProfile, ModelProfile};
use engine_core::{ClusterRange, ClusterSet, Error, Result};
use std::collections::BTreeSet;

/// A placement by indices of devices.
#[derive(Debug)]
pub(crate) struct Placement {
    /// The device with attention, embedding and KV cache.
    pub(crate) home: usize,
    /// The neurons of each layer on each device.
    pub(crate) clusters: Vec<Vec<ClusterSet>>,
}

/// What is placed, where, and with how much memory.
pub(crate) struct Question<'a> {
    pub(crate) model: &'a ModelProfile,
    pub(crate) hardware: &'a HardwareProfile,
    /// Clusters, densest first.
    pub(crate) clusters: &'a [Cluster],
    /// Devices that can run the model, in the order of preference; at least one.
    pub(crate) usable: &'a [usize],
    /// Bytes of everything that is no neuron.
    pub(crate) fixed_bytes: u64,
}

impl Question<'_> {
    fn memory(&self, device: usize) -> u64 {
        self.hardware.devices[device].memory_bytes
    }

    /// Answers with the minimum per layer that speed asks for, or, where memory does not allow that, without.
    pub(crate) fn answer(&self) -> Result<Placement> {
        let last = *self
            .usable
            .last()
            .ok_or_else(|| Error::internal("greedy: a question without a usable device"))?;
        let fits = self.usable.iter().copied().find(|device| self.memory(*device) >= self.fixed_bytes);
        let home = fits.unwrap_or(last);
        let mut needed = 0;
        for minimum in [true, false] {
            let (owners, rest) = self.assign(home, last, minimum);
            needed = rest.saturating_add(if home == last { self.fixed_bytes } else { 0 });
            if needed <= self.memory(last) {
                return Ok(Placement { home, clusters: self.sets(&owners)? });
            }
        }
        let device = &self.hardware.devices[last];
        Err(Error::infeasible(format!(
            "`{}` does not fit: device `{}` may use {} bytes and would need {needed}, with the other devices filled; \
             {} bytes of that are attention, embedding, KV cache and activations",
            self.model.name,
            device.name,
            device.memory_bytes,
            if home == last { self.fixed_bytes } else { 0 },
        )))
    }

    /// The device of every cluster, and the bytes of those left for the last one.
    fn assign(&self, home: usize, last: usize, minimum: bool) -> (Vec<usize>, u64) {
        let mut owners = vec![last; self.clusters.len()];
        for &device in self.usable.iter().filter(|device| **device != last) {
            let fixed = if device == home { self.fixed_bytes } else { 0 };
            let budget = self.memory(device).saturating_sub(fixed);
            let mut excluded = BTreeSet::new();
            let chosen = loop {
                let chosen = self.fill(&owners, last, budget, &excluded);
                let unpaid = if minimum { self.unpaid(&chosen, device, home, last) } else { None };
                match unpaid {
                    Some(layer) => excluded.insert(layer),
                    None => break chosen,
                };
            };
            chosen.into_iter().for_each(|cluster| owners[cluster] = device);
        }
        let rest = owners.iter().zip(self.clusters).filter(|(owner, _)| **owner == last);
        let bytes = rest.fold(0u64, |sum, (_, cluster)| sum.saturating_add(cluster.bytes));
        (owners, bytes)
    }

    /// The clusters without an owner that fit `budget`, densest first.
    fn fill(&self, owners: &[usize], last: usize, budget: u64, excluded: &BTreeSet<usize>) -> Vec<usize> {
        let mut left = budget;
        let mut chosen = Vec::new();
        for (index, cluster) in self.clusters.iter().enumerate() {
            if owners[index] == last && !excluded.contains(&cluster.layer) && cluster.bytes <= left {
                left -= cluster.bytes;
                chosen.push(index);
            }
        }
        chosen
    }

    /// The least active layer whose share does not pay for the exchange that it costs.
    fn unpaid(&self, chosen: &[usize], device: usize, home: usize, last: usize) -> Option<usize> {
        let mut shares = vec![(0u32, 0f64); self.model.layers.len()];
        for cluster in chosen.iter().map(|index| &self.clusters[*index]) {
            shares[cluster.layer].0 += cluster.range.len();
            shares[cluster.layer].1 += cluster.activity;
        }
        let pays = |layer: usize, neurons: u32| {
            // A layer that is wholly beside its attention needs no exchange.
            let undivided = device == home && neurons == self.model.layers[layer].neurons;
            neurons == 0 || undivided || f64::from(neurons) >= self.least_neurons(layer, device, last)
        };
        let unpaid = shares.iter().enumerate().filter(|(layer, (neurons, _))| !pays(*layer, *neurons));
        unpaid.min_by(|a, b| a.1.1.total_cmp(&b.1.1).then(b.0.cmp(&a.0))).map(|(layer, _)| layer)
    }

    /// `C_l = ceil(T_sync / (M / BW_last - M / BW_device))`: the fewest neurons with which the device gains what one
    /// exchange costs. Infinite where it is no faster, 0 where a bandwidth is not known.
    fn least_neurons(&self, layer: usize, device: usize, last: usize) -> f64 {
        let (device, last) = (&self.hardware.devices[device], &self.hardware.devices[last]);
        if !(device.bandwidth > 0.0 && last.bandwidth > 0.0) {
            return 0.0;
        }
        let bytes = self.model.layers[layer].neuron_bytes as f64;
        let gain = bytes / last.bandwidth - bytes / device.bandwidth;
        if gain > 0.0 { (device.sync_seconds / gain).ceil() } else { f64::INFINITY }
    }

    /// Owners as sets per layer and device.
    fn sets(&self, owners: &[usize]) -> Result<Vec<Vec<ClusterSet>>> {
        let devices = self.hardware.devices.len();
        let mut ranges: Vec<Vec<Vec<ClusterRange>>> = vec![vec![vec![]; devices]; self.model.layers.len()];
        for (cluster, owner) in self.clusters.iter().zip(owners) {
            ranges[cluster.layer][*owner].push(cluster.range);
        }
        ranges
            .into_iter()
            .map(|layer| layer.into_iter().map(ClusterSet::from_ranges).collect::<Result<Vec<_>>>())
            .collect()
    }
}
