//! The planner: placement, sparsity per share, fallbacks, prediction.

use crate::place::Question;
use crate::{NAME, Options, clusters, seconds, skipping};
use engine_core::planner::{
    Budget, Fallback, FfnShare, HardwareProfile, LayerPlan, ModelProfile, PLAN_VERSION, Plan, SparsityKind,
    SparsityPolicy,
};
use engine_core::{Error, Planner, Result};
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

/// Bytes of everything that is no neuron, all on the device that runs attention. Predictors count where they are asked
/// for.
fn fixed_bytes(model: &ModelProfile, sparsity: Option<SparsityKind>) -> u64 {
    let predicts = sparsity == Some(SparsityKind::Predictor);
    let layers = model
        .layers
        .iter()
        .map(|layer| layer.attention_bytes.saturating_add(if predicts { layer.predictor_bytes } else { 0 }));
    [model.embedding_bytes, model.kv_bytes, model.activation_bytes]
        .into_iter()
        .chain(layers)
        .fold(0, u64::saturating_add)
}

/// Devices that can run the model, and a line for each that cannot.
fn usable(hardware: &HardwareProfile) -> Result<(Vec<usize>, Vec<Fallback>)> {
    let mut fallbacks = Vec::new();
    let mut usable = Vec::new();
    for (index, device) in hardware.devices.iter().enumerate() {
        if device.unsupported.is_empty() {
            usable.push(index);
        } else {
            fallbacks.push(Fallback {
                what: format!("device {}", device.name),
                wanted: "a part of the model".into(),
                got: "none".into(),
                reason: format!("it cannot run: {}", device.unsupported.join("; ")),
            });
        }
    }
    if hardware.devices.is_empty() {
        return Err(Error::invalid("the hardware profile has no device"));
    }
    if usable.is_empty() {
        let reasons: Vec<String> = fallbacks.iter().map(|f| format!("{}: {}", f.what, f.reason)).collect();
        return Err(Error::unsupported(format!("no device can run the model: {}", reasons.join("; "))));
    }
    Ok((usable, fallbacks))
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

impl Planner for Greedy {
    fn plan(&self, model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) -> Result<Plan> {
        let (usable, mut fallbacks) = usable(hardware)?;
        let clusters = clusters::by_density(model, self.options.group)?;
        let fixed_bytes = fixed_bytes(model, budget.sparsity);
        let question = Question { model, hardware, clusters: &clusters, usable: &usable, fixed_bytes };
        let placement = question.answer()?;
        let (home, first) = (placement.home, usable[0]);
        if home != first {
            fallbacks.push(Fallback {
                what: "attention, embedding and KV cache".into(),
                wanted: hardware.devices[first].name.clone(),
                got: hardware.devices[home].name.clone(),
                reason: format!(
                    "they need {fixed_bytes} bytes and {} may use {}",
                    hardware.devices[first].name, hardware.devices[first].memory_bytes
                ),
            });
        }
        let mut skipped = Skipped::default();
        let mut layers = Vec::with_capacity(model.layers.len());
        for (index, (profile, sets)) in model.layers.iter().zip(placement.clusters).enumerate() {
            let shares = sets.into_iter().enumerate().filter(|(_, set)| !set.is_empty());
            let ffn = shares.map(|(device, clusters)| {
                let at = &hardware.devices[device];
                let sparsity = match budget.sparsity {
                    None => skipping::choose(profile, &clusters, at, self.options.gate_first_below),
                    Some(kind) => match skipping::policy(kind, profile, at) {
                        Ok(policy) => policy,
                        Err(reason) => {
                            skipped.layers.entry((device, reason)).or_default().push(index);
                            SparsityPolicy::Dense
                        }
                    },
                };
                FfnShare { device: device as u32, clusters, sparsity }
            });
            layers.push(LayerPlan { attention: home as u32, ffn: ffn.collect() });
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
            requires: vec![],
            model_hash: model.hash.clone(),
            hardware_hash: hardware.hash.clone(),
            planner: NAME.into(),
            devices: hardware.devices.iter().map(|device| device.name.clone()).collect(),
            embedding: home as u32,
            layers,
            fallbacks,
            predicted_seconds: 0.0,
        };
        plan.predicted_seconds = seconds::predict(&plan, model, hardware);
        Ok(plan)
    }
}

#[cfg(test)]
mod tests;
