//! The planner: placement, sparsity per share, fallbacks, prediction.

use crate::place::Question;
use crate::{NAME, Options, clusters, seconds, skipping};
use engine_core::planner::{
    Budget, DeviceProfile, FEATURE_PREFILL, Fallback, FfnShare, HardwareProfile, LayerPlan, LayerProfile,
    ModelProfile, PLAN_VERSION, Part, Plan, PrefillPlan, PrefillShare, SparsityKind, SparsityPolicy,
};
use engine_core::{ClusterSet, Error, Planner, Result};
use std::collections::BTreeMap;

/// The greedy planner. `Budget::slowdown` is an allowance that it does not make use of.
pub struct Greedy {
    options: Options,
}

impl Greedy {
    /// A planner with these options.
    pub fn new(options: Options) -> Greedy {
        Greedy { options }
    }
}

/// Bytes of predictors, where these are asked for.
fn predictor_bytes(model: &ModelProfile, sparsity: Option<SparsityKind>) -> u64 {
    let predicts = sparsity == Some(SparsityKind::Predictor);
    let layers = model.layers.iter().filter(|_| predicts).map(|layer| layer.predictor_bytes);
    layers.fold(0, u64::saturating_add)
}

/// Bytes of everything that is no neuron, all on the device that runs attention.
fn fixed_bytes(model: &ModelProfile, predictor_bytes: u64) -> u64 {
    let layers = model.layers.iter().map(|layer| layer.attention_bytes);
    [model.embedding_bytes, model.kv_bytes, model.activation_bytes, predictor_bytes]
        .into_iter()
        .chain(layers)
        .fold(0, u64::saturating_add)
}

/// Lines for the devices that can run no part of the model.
///
/// # Errors
/// Where none can run all of it.
fn idle(hardware: &HardwareProfile) -> Result<Vec<Fallback>> {
    if hardware.devices.is_empty() {
        return Err(Error::invalid("the hardware profile has no device"));
    }
    let reason = |device: &DeviceProfile| format!("it cannot run: {}", device.unsupported.join("; "));
    if !hardware.devices.iter().any(DeviceProfile::runs_all) {
        let reasons: Vec<String> = hardware
            .devices
            .iter()
            .map(|device| format!("device {}: {}", device.name, reason(device)))
            .collect();
        return Err(Error::unsupported(format!("no device can run the model: {}", reasons.join("; "))));
    }
    let idle =
        hardware.devices.iter().filter(|device| !device.runs(Part::Ffn) && !device.runs(Part::Projections));
    let line = |device: &DeviceProfile| Fallback {
        what: format!("device {}", device.name),
        wanted: "a part of the model".into(),
        got: "none".into(),
        reason: reason(device),
    };
    Ok(idle.map(line).collect())
}

/// Why the device that is wanted most does not have what only one device can have.
fn moved(model: &ModelProfile, hardware: &HardwareProfile, home: usize) -> Option<Fallback> {
    let first = hardware
        .devices
        .iter()
        .position(|device| device.runs(Part::Ffn) || device.runs(Part::Projections))?;
    let (wanted, got) = (&hardware.devices[first], &hardware.devices[home]);
    let needed = fixed_bytes(model, 0);
    let reason = match wanted.runs_all() {
        // How much there is beside what its lists need, the host knows better, so no number is told here.
        true => format!("{} has no memory left for the {needed} bytes that they need", wanted.name),
        false => format!("{} cannot run: {}", wanted.name, wanted.unsupported.join("; ")),
    };
    (home != first).then(|| Fallback {
        what: "attention, embedding and KV cache".into(),
        wanted: wanted.name.clone(),
        got: got.name.clone(),
        reason,
    })
}

/// Layers that fall back in the same way, for one line.
#[derive(Default)]
struct Skipped {
    /// Layers by device and reason.
    layers: BTreeMap<(usize, String), Vec<usize>>,
}

impl Skipped {
    fn lines(self, wanted: SparsityKind, hardware: &HardwareProfile) -> impl Iterator<Item = Fallback> {
        self.layers.into_iter().map(move |((device, reason), layers)| Fallback {
            what: format!("{} ffn on {}", runs(&layers), hardware.devices[device].name),
            wanted: wanted.to_string(),
            got: SparsityPolicy::Dense.to_string(),
            reason,
        })
    }
}

/// `blk.0-3, blk.7` for ascending layers 0, 1, 2, 3, 7.
fn runs(layers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &layer in layers {
        match runs.last_mut() {
            Some((_, end)) if *end + 1 == layer => *end = layer,
            _ => runs.push((layer, layer)),
        }
    }
    let texts = runs.iter().map(|(a, b)| if a == b { format!("blk.{a}") } else { format!("blk.{a}-{b}") });
    texts.collect::<Vec<_>>().join(", ")
}

/// What is to be said of frequencies, where they decided which neurons of a layer are the hot ones.
fn frequency_notes(model: &ModelProfile, layers: &[LayerPlan]) -> Vec<String> {
    let divided = |index: &usize| layers[*index].ffn.len() > 1;
    let of = |wanted: &dyn Fn(&LayerProfile) -> bool| -> Vec<usize> {
        (0..layers.len()).filter(divided).filter(|index| wanted(&model.layers[*index])).collect()
    };
    let unmeasured = of(&|layer| layer.frequency.is_empty());
    let unsorted = of(&|layer| !layer.frequency.is_sorted_by(|a, b| a >= b));
    let mut notes = Vec::new();
    if !unmeasured.is_empty() {
        notes.push(format!(
            "{}: how often neurons fire was not measured, so the first ones are taken as the hot ones; `thermocline \
             prepare` measures and sorts them",
            runs(&unmeasured)
        ));
    }
    if !unsorted.is_empty() {
        notes.push(format!(
            "{}: neurons are not sorted by how often they fire, so that the hot ones are several ranges; `thermocline \
             prepare` sorts them",
            runs(&unsorted)
        ));
    }
    notes
}

impl Greedy {
    /// The shares of a layer, with how each is skipped.
    fn shares(
        &self,
        (index, profile): (usize, &LayerProfile),
        sets: Vec<ClusterSet>,
        (hardware, budget): (&HardwareProfile, &Budget),
        skipped: &mut Skipped,
    ) -> Vec<FfnShare> {
        let shares: Vec<(usize, ClusterSet)> =
            sets.into_iter().enumerate().filter(|(_, set)| !set.is_empty()).collect();
        let last = hardware.devices.iter().rposition(DeviceProfile::runs_all);
        let cold = shares.iter().rev().map(|(device, _)| *device).find(|device| Some(*device) == last);
        let divided = shares.len() > 1;
        let below = self.options.gate_first_below;
        let share = |(device, clusters): (usize, ClusterSet)| {
            let at = &hardware.devices[device];
            let sparsity = match budget.sparsity {
                // Hot neurons fire so often that skipping them costs more than it saves: these run dense.
                _ if divided && cold.is_some_and(|cold| cold != device) => SparsityPolicy::Dense,
                None if divided => skipping::choose_cold(profile, &clusters, at, below),
                None => skipping::choose(profile, &clusters, at, below),
                Some(kind) => match skipping::policy(kind, profile, at) {
                    Ok(policy) => policy,
                    Err(reason) => {
                        skipped.layers.entry((device, reason)).or_default().push(index);
                        SparsityPolicy::Dense
                    }
                },
            };
            FfnShare { device: device as u32, clusters, sparsity }
        };
        shares.into_iter().map(share).collect()
    }
}

impl Planner for Greedy {
    fn plan(&self, model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) -> Result<Plan> {
        let mut fallbacks = idle(hardware)?;
        let clusters = clusters::by_density(model, self.options.group, budget.hot)?;
        let predictor_bytes = predictor_bytes(model, budget.sparsity);
        let fixed_bytes = fixed_bytes(model, predictor_bytes);
        let question =
            Question { model, hardware, budget, clusters: &clusters, fixed_bytes, predictor_bytes };
        let placement = question.answer()?;
        let home = placement.home;
        if budget.attention.is_none() {
            fallbacks.extend(moved(model, hardware, home));
        }
        let mut skipped = Skipped::default();
        let mut layers = Vec::with_capacity(model.layers.len());
        for (index, (profile, sets)) in model.layers.iter().zip(placement.clusters).enumerate() {
            let ffn = self.shares((index, profile), sets, (hardware, budget), &mut skipped);
            layers.push(LayerPlan { attention: home as u32, ffn, prefill: None });
        }
        let (mut requires, mut notes) = (Vec::new(), frequency_notes(model, &layers));
        if let Some(batches) = placement.batches {
            notes.extend(batches.notes);
            requires.push(FEATURE_PREFILL.to_owned());
            for (layer, sets) in layers.iter_mut().zip(batches.clusters) {
                let shares = sets.into_iter().enumerate().filter(|(_, set)| !set.is_empty());
                layer.prefill = Some(PrefillPlan {
                    attention: batches.attention as u32,
                    projections: batches.projections as u32,
                    ffn: shares.map(|(at, clusters)| PrefillShare { device: at as u32, clusters }).collect(),
                });
            }
        }
        if let Some(wanted) = budget.sparsity {
            fallbacks.extend(skipped.lines(wanted, hardware));
        }
        if budget.strict && !fallbacks.is_empty() {
            let lines: Vec<String> = fallbacks.iter().map(Fallback::to_string).collect();
            return Err(Error::unsupported(format!("strict = true forbids {}", lines.join("; and "))));
        }
        let mut plan = Plan {
            version: PLAN_VERSION,
            requires,
            model_hash: model.hash.clone(),
            hardware_hash: hardware.hash.clone(),
            planner: NAME.into(),
            devices: hardware.devices.iter().map(|device| device.name.clone()).collect(),
            embedding: home as u32,
            layers,
            fallbacks,
            notes,
            predicted_seconds: 0.0,
        };
        plan.predicted_seconds = seconds::predict(&plan, model, hardware);
        Ok(plan)
    }
}

#[cfg(test)]
mod tests;
