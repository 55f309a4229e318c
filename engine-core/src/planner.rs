//! `Planner`: where each neuron cluster lives and how each layer skips, from profiles of model and hardware.

use crate::{ClusterSet, Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a planner knows of a model. Bytes are those of the tensors as stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// Layers in order.
    pub layers: Vec<LayerProfile>,
}

/// What a planner knows of one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// What a planner knows of one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
}

/// What a planner knows of the hardware.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// Seconds per token by the planner's own model; 0 where it has none.
    pub predicted_seconds: f64,
}

/// Version of the plan schema.
pub const PLAN_VERSION: u32 = 1;

/// Features that plans may require of this version.
const KNOWN_FEATURES: &[&str] = &[];

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
            let ranges = layer.ffn.iter().flat_map(|share| share.clusters.ranges().iter().copied()).collect();
            let all = ClusterSet::from_ranges(ranges).map_err(|e| {
                Error::invalid(format!("plan by `{}`: layer {index}: {}", self.planner, e.detail()))
            })?;
            if all != ClusterSet::all(profile.neurons) {
                return fail(format!(
                    "layer {index} does not place each of its {} neurons once",
                    profile.neurons
                ));
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

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    /// From JSON; [`Plan::validate`] is still to be called.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the text is no plan.
    pub fn from_json(text: &str) -> Result<Plan> {
        serde_json::from_str(text).map_err(|error| Error::invalid(format!("the plan is malformed: {error}")))
    }
}

/// Decides placements. May be called from any thread; the same question gets the same answer.
pub trait Planner: Send + Sync {
    /// A placement that keeps every budget.
    ///
    /// # Errors
    /// [`Infeasible`](crate::Error::Infeasible) with the smallest budget that would work.
    fn plan(&self, model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) -> Result<Plan>;
}
