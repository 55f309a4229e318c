//! `Planner`: where each neuron cluster lives and how each layer skips, from profiles of model and hardware.

use crate::{ClusterSet, Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// What a planner knows of a model. Bytes are those of the tensors as stored.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelProfile {
    /// For people.
    pub name: String,
    /// Hash of the file or of what identifies it; copied into the plan.
    pub hash: String,
    /// Embedding table, head and final norm.
    pub embedding_bytes: u64,
    /// KV cache bytes of all layers at the context that was asked for.
    pub kv_bytes: u64,
    /// Activations, logits and scratch on the device that runs attention.
    pub activation_bytes: u64,
    /// What each device needs for one layer that is divided between devices, beside the weights: lists of their own
    /// have scratch memory of their own.
    #[serde(default)]
    pub divided_bytes: u64,
    /// Layers in order.
    pub layers: Vec<LayerProfile>,
}

/// What a planner knows of one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerProfile {
    /// Attention and norm weights.
    pub attention_bytes: u64,
    /// Neurons of the FFN.
    pub neurons: u32,
    /// Bytes of one neuron: its gate, up and down rows.
    pub neuron_bytes: u64,
    /// Whether the activation function is zero for what is not positive, so that gate-first is exact.
    pub zero_below: bool,
    /// Bytes of the predictor; 0 where there is none.
    pub predictor_bytes: u64,
    /// Share of tokens for which each neuron fires; empty where nothing was measured.
    pub frequency: Vec<f32>,
    /// The policies with numbers that the model offers for it, at most one of a kind.
    #[serde(default)]
    pub calibrated: Vec<SparsityPolicy>,
    /// Whether its neurons must be on one device: those of a mixture of experts.
    #[serde(default)]
    pub whole: bool,
    /// Neurons that are stored in one block (of a quantised `down` by output): ranges that begin and end at multiples of
    /// it can be held alone. 0 is as 1.
    #[serde(default)]
    pub block: u32,
}

impl LayerProfile {
    /// The policy of a kind with the layer's own numbers; `None` where the model has none.
    pub fn policy(&self, kind: SparsityKind) -> Option<SparsityPolicy> {
        match kind {
            SparsityKind::Dense => Some(SparsityPolicy::Dense),
            SparsityKind::GateFirst => Some(SparsityPolicy::GateFirst),
            _ => self.calibrated.iter().copied().find(|policy| policy.kind() == kind),
        }
    }
}

/// A part of a layer that a device may run where it cannot run the whole model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Part {
    /// The products before and behind attention: queries, keys, values and output.
    Projections,
    /// The feed-forward network, dense, over ranges of its neurons.
    Ffn,
}

/// What a planner knows of one device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// Name, as in the config.
    pub name: String,
    /// Bytes that may be used on it.
    pub memory_bytes: u64,
    /// Bytes per second at which it reads weights; 0 where it was not measured.
    pub bandwidth: f64,
    /// Seconds that one exchange with the host costs (T_sync of PowerInfer, section 6.3).
    pub sync_seconds: f64,
    /// Operations of this model that it cannot run, each with its reason; empty where it can run all.
    pub unsupported: Vec<String>,
    /// Whether it runs sparse FFN selections.
    pub sparse: bool,
    /// Where it cannot run all: the parts that it can run all the same.
    #[serde(default)]
    pub parts: Vec<Part>,
}

impl DeviceProfile {
    /// Whether it can run every operation of the model.
    pub fn runs_all(&self) -> bool {
        self.unsupported.is_empty()
    }

    /// Whether it can run a part.
    pub fn runs(&self, part: Part) -> bool {
        self.runs_all() || self.parts.contains(&part)
    }
}

/// What a planner knows of the hardware.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HardwareProfile {
    /// Hash of what identifies it; copied into the plan.
    pub hash: String,
    /// The devices that the config lists, in its order.
    pub devices: Vec<DeviceProfile>,
}

/// What the user allows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Share by which decode may be slower than the best plan in exchange for memory; 0 for none.
    pub slowdown: f64,
    /// Whether a fallback is an error.
    pub strict: bool,
    /// The kind of sparsity policy asked for; `None` lets the planner choose.
    pub sparsity: Option<SparsityKind>,
    /// Greatest share of every layer's neurons on devices before the last; `None` is as many as their memory holds.
    #[serde(default)]
    pub hot: Option<f64>,
    /// Name of the device that is to have embedding, attention and KV cache while text is generated.
    #[serde(default)]
    pub attention: Option<String>,
    /// Name of the device that is to run as much as it can of batches of tokens.
    #[serde(default)]
    pub prefill: Option<String>,
}

/// How cold neurons of a layer are skipped.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "policy")]
#[non_exhaustive]
pub enum SparsityPolicy {
    /// Not at all.
    Dense,
    /// Exact for functions that are zero below zero.
    GateFirst,
    /// By PowerInfer's low-rank predictor.
    Predictor {
        /// Compared with the predictor's score.
        threshold: f32,
    },
    /// Where the activated gate is small (CATS).
    Threshold {
        /// Greatest magnitude that is skipped.
        threshold: f32,
    },
    /// What the high halves of weights in planes rule out.
    Bitplane {
        /// Standard deviations that are allowed for.
        deviations: f32,
        /// Greatest score that is skipped.
        threshold: f32,
    },
}

/// A sparsity policy without its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SparsityKind {
    /// See [`SparsityPolicy::Dense`].
    Dense,
    /// See [`SparsityPolicy::GateFirst`].
    GateFirst,
    /// See [`SparsityPolicy::Predictor`].
    Predictor,
    /// See [`SparsityPolicy::Threshold`].
    Threshold,
    /// See [`SparsityPolicy::Bitplane`].
    Bitplane,
}

impl fmt::Display for SparsityKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SparsityKind::Dense => "dense",
            SparsityKind::GateFirst => "gate-first",
            SparsityKind::Predictor => "predictor",
            SparsityKind::Threshold => "threshold",
            SparsityKind::Bitplane => "bitplane",
        })
    }
}

impl SparsityPolicy {
    /// Its kind.
    pub fn kind(self) -> SparsityKind {
        match self {
            SparsityPolicy::Dense => SparsityKind::Dense,
            SparsityPolicy::GateFirst => SparsityKind::GateFirst,
            SparsityPolicy::Predictor { .. } => SparsityKind::Predictor,
            SparsityPolicy::Threshold { .. } => SparsityKind::Threshold,
            SparsityPolicy::Bitplane { .. } => SparsityKind::Bitplane,
        }
    }

    /// Whether it leaves the output of every layer that may have it as it is.
    pub fn is_exact(self) -> bool {
        matches!(self, SparsityPolicy::Dense | SparsityPolicy::GateFirst)
    }
}

impl fmt::Display for SparsityPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SparsityPolicy::Dense => f.write_str("dense"),
            SparsityPolicy::GateFirst => f.write_str("gate-first"),
            SparsityPolicy::Predictor { threshold } => write!(f, "predictor (threshold {threshold})"),
            SparsityPolicy::Threshold { threshold } => write!(f, "threshold ({threshold})"),
            SparsityPolicy::Bitplane { deviations, threshold } => {
                write!(f, "bitplane ({deviations} deviations, threshold {threshold})")
            }
        }
    }
}

/// The part of one FFN that one device runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FfnShare {
    /// Index into [`Plan::devices`].
    pub device: u32,
    /// Its neurons.
    pub clusters: ClusterSet,
    /// How they are skipped.
    pub sparsity: SparsityPolicy,
}

/// Where one layer runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerPlan {
    /// Index into [`Plan::devices`].
    pub attention: u32,
    /// Shares that together hold every neuron once.
    pub ffn: Vec<FfnShare>,
    /// Where batches of tokens run, where that is elsewhere than a single token does. A plan with one requires
    /// [`FEATURE_PREFILL`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillPlan>,
}

/// Where one layer runs for batches of tokens; devices are indices into [`Plan::devices`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillPlan {
    /// The device with norms, attention and the KV cache that a batch writes. Where it is not that of single tokens, the
    /// cache is exported and imported between the two.
    pub attention: u32,
    /// The device with the products before and behind attention.
    pub projections: u32,
    /// Shares that together hold every neuron once, dense: with many tokens whole tiles are faster than skipping.
    pub ffn: Vec<PrefillShare>,
}

/// The part of one FFN that one device runs for batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillShare {
    /// Index into [`Plan::devices`].
    pub device: u32,
    /// Its neurons.
    pub clusters: ClusterSet,
}

impl LayerPlan {
    /// Every device that has a part of the layer, each once, ascending.
    pub fn devices(&self) -> BTreeSet<u32> {
        let shares = self.ffn.iter().filter(|share| !share.clusters.is_empty()).map(|share| share.device);
        let prefill = self.prefill.iter().flat_map(|prefill| {
            let shares = prefill.ffn.iter().filter(|share| !share.clusters.is_empty());
            shares.map(|share| share.device).chain([prefill.attention, prefill.projections])
        });
        shares.chain(prefill).chain([self.attention]).collect()
    }

    /// The neurons that a device needs of the layer, for single tokens and for batches.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where shares overlap.
    pub fn neurons_of(&self, device: u32) -> Result<ClusterSet> {
        let of = |sets: Vec<&ClusterSet>| {
            ClusterSet::from_ranges(sets.into_iter().flat_map(|set| set.ranges().iter().copied()).collect())
        };
        let single = self.ffn.iter().filter(|share| share.device == device).map(|share| &share.clusters);
        let batch = self.prefill.iter().flat_map(|prefill| &prefill.ffn);
        let batch = batch.filter(|share| share.device == device).map(|share| &share.clusters);
        let (single, batch) = (of(single.collect())?, of(batch.collect())?);
        Ok(single.union(&batch))
    }
}

/// Something that runs elsewhere or otherwise than was asked for, and why. An error under `strict = true`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallback {
    /// What, such as `blk.3 ffn`.
    pub what: String,
    /// Where or how it was wanted.
    pub wanted: String,
    /// Where or how it is.
    pub got: String,
    /// Why.
    pub reason: String,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: wanted {}, got {}, because {}", self.what, self.wanted, self.got, self.reason)
    }
}

/// A placement, versioned and bound to model and hardware.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`PLAN_VERSION`] of the writer.
    pub version: u32,
    /// Features that a reader must know; unknown ones are refused.
    #[serde(default)]
    pub requires: Vec<String>,
    /// The model that it is for.
    pub model_hash: String,
    /// The hardware that it is for.
    pub hardware_hash: String,
    /// Name of the planner.
    pub planner: String,
    /// Device names, in the config's order; shares name them by index.
    pub devices: Vec<String>,
    /// Index of the device with embedding table and head.
    pub embedding: u32,
    /// Layers in order.
    pub layers: Vec<LayerPlan>,
    /// What did not go as asked.
    pub fallbacks: Vec<Fallback>,
    /// What a person should know of it, though it is as asked: a sentence each.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Seconds per token by the planner's own model; 0 where it has none.
    pub predicted_seconds: f64,
}

/// Version of the plan schema. Version 1 had no placement of batches and no notes; such plans are read as plans without.
pub const PLAN_VERSION: u32 = 2;

/// The feature that a plan with a [`PrefillPlan`] requires.
pub const FEATURE_PREFILL: &str = "prefill";

/// Features that plans may require of this version.
const KNOWN_FEATURES: &[&str] = &[FEATURE_PREFILL];

impl Plan {
    /// Checks that a plan is one that this version understands, for this model, placing every neuron exactly once on a
    /// device that exists. Done for every plan, whoever made it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming layer and neuron range.
    pub fn validate(&self, model: &ModelProfile) -> Result<()> {
        let fail = |what: String| Err(Error::invalid(format!("plan by `{}`: {what}", self.planner)));
        if self.version != PLAN_VERSION {
            return fail(format!("version {}, this program understands {PLAN_VERSION}", self.version));
        }
        if let Some(unknown) = self.requires.iter().find(|r| !KNOWN_FEATURES.contains(&r.as_str())) {
            return fail(format!("requires `{unknown}`, which this version does not know"));
        }
        if self.model_hash != model.hash {
            return fail(format!("it is for model {}, not {}", self.model_hash, model.hash));
        }
        if self.layers.len() != model.layers.len() {
            return fail(format!("{} layers, the model has {}", self.layers.len(), model.layers.len()));
        }
        let exists = |device: u32| (device as usize) < self.devices.len();
        if !exists(self.embedding) {
            return fail(format!("device {} does not exist", self.embedding));
        }
        for (index, (layer, profile)) in self.layers.iter().zip(&model.layers).enumerate() {
            if !exists(layer.attention) || layer.ffn.iter().any(|share| !exists(share.device)) {
                return fail(format!("layer {index} names a device that does not exist"));
            }
            self.once(index, profile.neurons, layer.ffn.iter().map(|share| &share.clusters), "")?;
            if let Some(prefill) = &layer.prefill {
                let mut named = prefill.ffn.iter().map(|share| share.device);
                if !named.all(exists) || !exists(prefill.attention) || !exists(prefill.projections) {
                    return fail(format!("layer {index} names a device for batches that does not exist"));
                }
                if !self.requires.iter().any(|feature| feature == FEATURE_PREFILL) {
                    return fail(format!(
                        "layer {index} says where batches run, but the plan does not require `{FEATURE_PREFILL}`"
                    ));
                }
                let shares = prefill.ffn.iter().map(|share| &share.clusters);
                self.once(index, profile.neurons, shares, " for batches")?;
            }
            let divided = |sets: usize| profile.whole && sets > 1;
            let sets = layer.ffn.iter().filter(|share| !share.clusters.is_empty()).count();
            let batch = layer.prefill.iter().flat_map(|prefill| &prefill.ffn);
            if divided(sets) || divided(batch.filter(|share| !share.clusters.is_empty()).count()) {
                return fail(format!("layer {index} is a mixture of experts, which is not divided"));
            }
            let inexact = |s: &FfnShare| s.sparsity == SparsityPolicy::GateFirst && !profile.zero_below;
            if layer.ffn.iter().any(inexact) {
                return fail(format!(
                    "layer {index} is gate-first, but its activation is not zero below zero"
                ));
            }
        }
        Ok(())
    }

    /// Checks that shares hold every neuron of a layer once.
    fn once<'a>(
        &self,
        index: usize,
        neurons: u32,
        shares: impl Iterator<Item = &'a ClusterSet>,
        what: &str,
    ) -> Result<()> {
        let ranges = shares.flat_map(|clusters| clusters.ranges().iter().copied()).collect();
        let fail = |problem: String| {
            Err(Error::invalid(format!("plan by `{}`: layer {index}{what}: {problem}", self.planner)))
        };
        match ClusterSet::from_ranges(ranges) {
            Ok(all) if all == ClusterSet::all(neurons) => Ok(()),
            Ok(_) => fail(format!("it does not place each of its {neurons} neurons once")),
            Err(error) => fail(error.detail()),
        }
    }

    /// Indices of the devices that have a part of the model, ascending.
    pub fn used_devices(&self) -> BTreeSet<u32> {
        self.layers.iter().flat_map(LayerPlan::devices).chain([self.embedding]).collect()
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    /// From JSON, an older version's brought to this one; [`Plan::validate`] is still to be called.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the text is no plan, or one of a version that this program does not know.
    pub fn from_json(text: &str) -> Result<Plan> {
        let malformed = |error| Error::invalid(format!("the plan is malformed: {error}"));
        // The version first: what else a later one says, this program cannot judge.
        let About { version } = serde_json::from_str(text).map_err(malformed)?;
        if !(1..=PLAN_VERSION).contains(&version) {
            return Err(Error::invalid(format!(
                "the plan has version {version}, this program understands 1 to {PLAN_VERSION}"
            )));
        }
        let plan: Plan = serde_json::from_str(text).map_err(malformed)?;
        // What version 2 added may be absent: no more is to be done.
        Ok(Plan { version: PLAN_VERSION, ..plan })
    }
}

/// What every version of a plan says of itself.
#[derive(Deserialize)]
struct About {
    version: u32,
}

/// Decides placements. May be called from any thread; the same question gets the same answer.
pub trait Planner: Send + Sync {
    /// A placement that keeps every budget.
    ///
    /// # Errors
    /// [`Infeasible`](crate::Error::Infeasible) with the smallest budget that would work.
    fn plan(&self, model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) -> Result<Plan>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelProfile {
        let layer = LayerProfile { neurons: 8, neuron_bytes: 1, ..LayerProfile::default() };
        ModelProfile { hash: "m".into(), layers: vec![layer], ..ModelProfile::default() }
    }

    fn set(start: u32, end: u32) -> ClusterSet {
        ClusterSet::from_ranges(vec![crate::ClusterRange::new(start, end)]).unwrap()
    }

    fn plan() -> Plan {
        let share = |device, start, end| FfnShare {
            device,
            clusters: set(start, end),
            sparsity: SparsityPolicy::Dense,
        };
        Plan {
            version: PLAN_VERSION,
            requires: vec![],
            model_hash: "m".into(),
            hardware_hash: "h".into(),
            planner: "p".into(),
            devices: vec!["a".into(), "b".into()],
            embedding: 0,
            layers: vec![LayerPlan {
                attention: 0,
                ffn: vec![share(1, 0, 3), share(0, 3, 8)],
                prefill: None,
            }],
            fallbacks: vec![],
            notes: vec![],
            predicted_seconds: 0.0,
        }
    }

    /// The text of a plan as version 1 wrote it.
    const VERSION_1: &str = r#"{"version":1,"model_hash":"m","hardware_hash":"h","planner":"p","devices":["a","b"],
        "embedding":0,"layers":[{"attention":0,"ffn":[
            {"device":1,"clusters":[{"start":0,"end":3}],"sparsity":{"policy":"dense"}},
            {"device":0,"clusters":[{"start":3,"end":8}],"sparsity":{"policy":"dense"}}]}],
        "fallbacks":[],"predicted_seconds":0.0}"#;

    #[test]
    fn an_older_plan_is_read_and_a_newer_one_refused() {
        assert_eq!(Plan::from_json(VERSION_1).unwrap(), plan());
        assert_eq!(Plan::from_json(&plan().to_json()).unwrap(), plan());
        let newer = VERSION_1.replace("\"version\":1", "\"version\":3, \"layers\":7");
        let error = Plan::from_json(&newer).unwrap_err().detail();
        assert!(error.contains("version 3") && error.contains("1 to 2"), "{error}");
        assert!(Plan::from_json(&VERSION_1.replace("\"version\":1", "\"version\":0")).is_err());
    }

    #[test]
    fn a_placement_of_batches_is_required_and_complete() {
        let mut plan = plan();
        plan.layers[0].prefill = Some(PrefillPlan {
            attention: 1,
            projections: 1,
            ffn: vec![PrefillShare { device: 1, clusters: set(0, 8) }],
        });
        let error = plan.validate(&model()).unwrap_err().detail();
        assert!(error.contains("does not require `prefill`"), "{error}");
        plan.requires.push(FEATURE_PREFILL.into());
        plan.validate(&model()).unwrap();
        assert_eq!(Plan::from_json(&plan.to_json()).unwrap(), plan);
        assert_eq!(plan.layers[0].neurons_of(1).unwrap(), set(0, 8));
        assert_eq!(plan.layers[0].neurons_of(0).unwrap(), set(3, 8));
        assert_eq!(plan.used_devices().len(), 2);
        plan.layers[0].prefill.as_mut().unwrap().ffn[0].clusters = set(0, 7);
        let error = plan.validate(&model()).unwrap_err().detail();
        assert!(error.contains("layer 0 for batches") && error.contains("8 neurons once"), "{error}");
        plan.requires.push("telepathy".into());
        assert!(plan.validate(&model()).unwrap_err().detail().contains("telepathy"));
    }

    #[test]
    fn a_mixture_is_not_divided() {
        let mut model = model();
        model.layers[0].whole = true;
        assert!(plan().validate(&model).unwrap_err().detail().contains("mixture"));
    }
}
