//! Which device holds what: attention, embedding and KV cache on one, the clusters by density, and batches on the device
//! that is best at them.

use crate::clusters::Cluster;
use engine_core::planner::{Budget, HardwareProfile, ModelProfile, Part};
use engine_core::{ClusterRange, ClusterSet, Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// A placement by indices of devices.
#[derive(Debug)]
pub(crate) struct Placement {
    /// The device with attention, embedding and KV cache.
    pub(crate) home: usize,
    /// The neurons of each layer on each device.
    pub(crate) clusters: Vec<Vec<ClusterSet>>,
    /// Where batches run, where that is elsewhere.
    pub(crate) batches: Option<Batches>,
}

/// Where batches of tokens run.
#[derive(Debug)]
pub(crate) struct Batches {
    pub(crate) attention: usize,
    pub(crate) projections: usize,
    /// The neurons of each layer on each device.
    pub(crate) clusters: Vec<Vec<ClusterSet>>,
    /// What the device that was to run them does not have, and why.
    pub(crate) notes: Vec<String>,
}

/// What is placed, where, and with how much memory.
pub(crate) struct Question<'a> {
    pub(crate) model: &'a ModelProfile,
    pub(crate) hardware: &'a HardwareProfile,
    pub(crate) budget: &'a Budget,
    /// Clusters, densest first.
    pub(crate) clusters: &'a [Cluster],
    /// Bytes of everything that is no neuron.
    pub(crate) fixed_bytes: u64,
    /// Bytes of predictors, where these are asked for; they are part of `fixed_bytes`.
    pub(crate) predictor_bytes: u64,
}

/// What a way of placing found.
struct Found {
    home: usize,
    last: usize,
    /// The device of every cluster.
    owners: Vec<usize>,
    /// Bytes that each device would hold.
    held: Vec<u64>,
}

impl Found {
    /// Whether a device beside the home has neurons.
    fn divided(&self) -> bool {
        self.owners.iter().any(|owner| *owner != self.home)
    }
}

impl Question<'_> {
    fn memory(&self, device: usize) -> u64 {
        self.hardware.devices[device].memory_bytes
    }

    fn name(&self, device: usize) -> &str {
        &self.hardware.devices[device].name
    }

    /// Devices that can run the whole model, in the order of preference.
    fn whole(&self) -> Vec<usize> {
        (0..self.hardware.devices.len()).filter(|at| self.hardware.devices[*at].runs_all()).collect()
    }

    /// The device with this name.
    fn named(&self, key: &str, name: &str) -> Result<usize> {
        self.hardware.devices.iter().position(|device| device.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.hardware.devices.iter().map(|device| device.name.as_str()).collect();
            Error::invalid(format!("{key} = {name:?} is no device that there is: {}", names.join(", ")))
        })
    }

    /// The devices that may have attention, the most wanted first: the one asked for, or those that have the memory.
    fn homes(&self, whole: &[usize], last: usize) -> Result<Vec<usize>> {
        let Some(asked) = &self.budget.attention else {
            let fits = whole.iter().copied().filter(|device| self.memory(*device) >= self.fixed_bytes);
            let fits: Vec<usize> = fits.collect();
            return Ok(if fits.is_empty() { vec![last] } else { fits });
        };
        let home = self.named("attention", asked)?;
        let device = &self.hardware.devices[home];
        if !device.runs_all() {
            let denied = device.unsupported.join("; ");
            return Err(Error::unsupported(format!("attention = {asked:?}: it cannot run {denied}")));
        }
        if device.memory_bytes < self.fixed_bytes {
            return Err(Error::infeasible(format!(
                "attention = {asked:?}: it may use {} bytes; attention, embedding, KV cache and activations need {}",
                device.memory_bytes, self.fixed_bytes
            )));
        }
        Ok(vec![home])
    }

    /// Answers with the minimum per layer that speed asks for, or, where memory does not allow that, without.
    pub(crate) fn answer(&self) -> Result<Placement> {
        let whole = self.whole();
        let last =
            *whole.last().ok_or_else(|| Error::internal("greedy: a question without a usable device"))?;
        let asked = self.budget.prefill.as_deref().map(|name| self.named("prefill", name)).transpose()?;
        // A model that one device holds needs no memory for what passes between devices, so that is tried first.
        let (mut needed, mut fixed) = (0, 0);
        for (at, home) in self.homes(&whole, last)?.into_iter().enumerate() {
            for (minimum, beside) in [(true, false), (true, true), (false, true)] {
                let found = self.assign(home, last, asked, minimum, beside);
                if found.divided() && !beside {
                    continue;
                }
                if at == 0 {
                    (needed, fixed) =
                        (found.held[last], found.held[last] - self.neurons(&found.owners, last));
                }
                // The home, too: what divided layers need beside weights may be more than it has.
                if found.held.iter().enumerate().all(|(device, held)| *held <= self.memory(device)) {
                    let batches = self.batches(&found, asked)?;
                    return Ok(Placement { home, clusters: self.sets(&found.owners)?, batches });
                }
            }
        }
        let device = &self.hardware.devices[last];
        Err(Error::infeasible(format!(
            "`{}` does not fit: device `{}` may use {} bytes and would need {needed}, with the other devices filled; \
             {fixed} bytes of that are attention, embedding, KV cache and activations",
            self.model.name, device.name, device.memory_bytes,
        )))
    }

    /// Bytes that a device needs beside weights for layers that are divided.
    fn beside(&self) -> u64 {
        self.model.divided_bytes.saturating_mul(self.model.layers.len() as u64)
    }

    /// Bytes of neurons that a device owns.
    fn neurons(&self, owners: &[usize], device: usize) -> u64 {
        let own = owners.iter().zip(self.clusters).filter(|(owner, _)| **owner == device);
        own.fold(0, |sum, (_, cluster)| sum.saturating_add(cluster.bytes))
    }

    /// Attention, KV cache and activations, which a device needs to run batches that it is not the home of.
    fn batch_bytes(&self) -> u64 {
        let layers = self.model.layers.iter().map(|layer| layer.attention_bytes);
        [self.model.kv_bytes, self.model.activation_bytes]
            .into_iter()
            .chain(layers)
            .fold(0, u64::saturating_add)
    }

    /// The device of every cluster. With `beside`, memory is left for lists of divided layers.
    fn assign(&self, home: usize, last: usize, asked: Option<usize>, minimum: bool, beside: bool) -> Found {
        let devices = self.hardware.devices.len();
        let mut owners = vec![last; self.clusters.len()];
        let mut fixed = vec![if beside { self.beside() } else { 0 }; devices];
        fixed[home] = fixed[home].saturating_add(self.fixed_bytes);
        if beside && last != home {
            fixed[last] = fixed[last].saturating_add(self.predictor_bytes);
        }
        let helpers = (0..devices).filter(|at| *at != last && self.hardware.devices[*at].runs(Part::Ffn));
        for device in helpers {
            let mut budget = self.memory(device).saturating_sub(fixed[device]);
            if asked == Some(device) && device != home && self.hardware.devices[device].runs_all() {
                // Batches were asked for there, so what they need comes before neurons.
                budget = budget.checked_sub(self.batch_bytes()).unwrap_or(budget);
            }
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
        if owners.iter().all(|owner| *owner == home) {
            // Nothing passes between devices.
            fixed = vec![0; devices];
            fixed[home] = self.fixed_bytes;
        }
        let held = (0..devices).map(|device| {
            let neurons = self.neurons(&owners, device);
            let takes_part = device == home || neurons > 0;
            neurons.saturating_add(if takes_part { fixed[device] } else { 0 })
        });
        Found { home, last, held: held.collect(), owners }
    }

    /// Neurons of a layer that devices before the last may have: whole clusters.
    fn most(&self, cluster: &Cluster) -> u32 {
        let neurons = self.model.layers[cluster.layer].neurons;
        match self.budget.hot {
            Some(hot) if hot < 1.0 => {
                let most = (hot * f64::from(neurons)) as u32;
                most - most % cluster.unit.max(1)
            }
            _ => neurons,
        }
    }

    /// The clusters without an owner that fit `budget`, densest first.
    fn fill(&self, owners: &[usize], last: usize, budget: u64, excluded: &BTreeSet<usize>) -> Vec<usize> {
        let mut left = budget;
        let mut chosen = Vec::new();
        let mut taken: BTreeMap<usize, u32> = BTreeMap::new();
        let away = owners.iter().zip(self.clusters).filter(|(owner, _)| **owner != last);
        away.for_each(|(_, cluster)| *taken.entry(cluster.layer).or_default() += cluster.range.len());
        for (index, cluster) in self.clusters.iter().enumerate() {
            let taken = taken.entry(cluster.layer).or_default();
            if owners[index] == last
                && !excluded.contains(&cluster.layer)
                && cluster.bytes <= left
                && taken.saturating_add(cluster.range.len()) <= self.most(cluster)
            {
                left -= cluster.bytes;
                *taken += cluster.range.len();
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

    /// Where batches run: as much of them as its memory allows on the device asked for, or on the first one with hot neurons,
    /// or with nothing but products to offer.
    fn batches(&self, found: &Found, asked: Option<usize>) -> Result<Option<Batches>> {
        let helps = |at: &usize| {
            let device = &self.hardware.devices[*at];
            let only = !device.runs_all() && device.runs(Part::Projections) && !device.runs(Part::Ffn);
            *at != found.last && (only || found.owners.contains(at))
        };
        let first = (0..self.hardware.devices.len()).find(helps);
        let Some(device) = asked.or(first) else { return Ok(None) };
        let profile = &self.hardware.devices[device];
        let mut left = self.memory(device).saturating_sub(found.held[device]);
        let mut take = |bytes: u64| match left.checked_sub(bytes) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        };
        let (mut attention, mut projections, mut lacking) = (found.home, found.home, Vec::new());
        if device != found.home && profile.runs_all() {
            match take(self.batch_bytes()) {
                true => (attention, projections) = (device, device),
                false => lacking.push("attention and its KV cache"),
            }
        } else if device != found.home && profile.runs(Part::Projections) {
            // With lists of their own, as divided layers have.
            let beside = if found.held[device] == 0 { self.beside() } else { 0 };
            match take(self.batch_bytes().saturating_sub(self.model.kv_bytes).saturating_add(beside)) {
                true => projections = device,
                false => lacking.push("the products around attention"),
            }
        }
        let mut owners = found.owners.clone();
        let mut rest = false;
        if profile.runs(Part::Ffn) {
            for (owner, cluster) in
                owners.iter_mut().zip(self.clusters).filter(|(owner, _)| **owner != device)
            {
                match take(cluster.bytes) {
                    true => *owner = device,
                    false => rest = true,
                }
            }
        }
        if rest {
            lacking.push("every neuron");
        }
        let as_ever = attention == found.home && projections == found.home && owners == found.owners;
        if as_ever && (asked.is_none() || lacking.is_empty()) {
            return Ok(None);
        }
        // Where it was not asked for, it is as much as there was memory for.
        lacking.retain(|_| asked.is_some());
        let name = self.name(device);
        let note = |what| {
            format!("batches: `{name}` has no memory for {what}, which stays where single tokens have it")
        };
        let notes = lacking.into_iter().map(note).collect();
        Ok(Some(Batches { attention, projections, clusters: self.sets(&owners)?, notes }))
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
