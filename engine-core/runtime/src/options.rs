//! What a caller decides about an engine.

use crate::{Result, RuntimeError};
use engine_core::config::Config;
use engine_core::planner::{SparsityKind, SparsityPolicy};
use formats::ModelDescription;

/// How activations meet quantised weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activations {
    /// As int8 blocks of 32: fast. Weights that are not quantised still meet f32.
    #[default]
    Int8,
    /// As they are: closest to the model.
    F32,
}

impl Activations {
    /// The name in the config.
    pub fn name(self) -> &'static str {
        match self {
            Activations::Int8 => "int8",
            Activations::F32 => "f32",
        }
    }

    /// By the name in the config.
    ///
    /// # Errors
    /// Where there is none of that name.
    pub fn from_name(name: &str) -> Result<Activations> {
        match name {
            "int8" => Ok(Activations::Int8),
            "f32" => Ok(Activations::F32),
            other => Err(RuntimeError::Option {
                option: "activations",
                problem: format!("is `{other}`; accepted: int8, f32"),
            }),
        }
    }
}

/// How neurons are skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum SparsityChoice {
    /// The policy that the model was prepared for; of others the planner chooses among the exact ones.
    #[default]
    Auto,
    /// Not at all.
    Dense,
    /// Exactly, by the gate.
    GateFirst,
    /// By the model's predictors, with the model's threshold.
    Predictor,
    /// Where the activated gate is at most this, or at most what the model was calibrated for (CATS).
    Threshold(Option<f32>),
    /// By the high halves of weights in planes, as the model was calibrated.
    Bitplane,
}

impl SparsityChoice {
    /// By the name in the config.
    ///
    /// # Errors
    /// Where there is none of that name.
    pub fn from_name(name: &str) -> Result<SparsityChoice> {
        match name {
            "auto" => Ok(SparsityChoice::Auto),
            "dense" => Ok(SparsityChoice::Dense),
            "gate-first" => Ok(SparsityChoice::GateFirst),
            "predictor" => Ok(SparsityChoice::Predictor),
            "threshold" => Ok(SparsityChoice::Threshold(None)),
            "bitplane" => Ok(SparsityChoice::Bitplane),
            other => Err(RuntimeError::Option {
                option: "sparsity",
                problem: format!(
                    "is `{other}`; accepted: auto, dense, gate-first, predictor, threshold, bitplane"
                ),
            }),
        }
    }

    /// The kind of policy that a model is to run by; `None` leaves the choice among the exact ones to the planner.
    ///
    /// # Errors
    /// Where the model was prepared for a policy that is not known.
    pub(crate) fn kind(self, model: &ModelDescription) -> Result<Option<SparsityKind>> {
        Ok(match self {
            SparsityChoice::Auto => match model.calibration.policy.as_deref() {
                None | Some("auto") => None,
                Some(name) => match SparsityChoice::from_name(name) {
                    Ok(choice) => choice.kind(model)?,
                    Err(_) => {
                        return Err(RuntimeError::Model {
                            path: model.path.clone(),
                            what: format!("`thermocline.policy` {name:?}"),
                            advice: "name another policy in [planner] sparsity, or prepare the model again"
                                .into(),
                        });
                    }
                },
            },
            SparsityChoice::Dense => Some(SparsityKind::Dense),
            SparsityChoice::GateFirst => Some(SparsityKind::GateFirst),
            SparsityChoice::Predictor => Some(SparsityKind::Predictor),
            SparsityChoice::Threshold(_) => Some(SparsityKind::Threshold),
            SparsityChoice::Bitplane => Some(SparsityKind::Bitplane),
        })
    }
}

impl EngineOptions {
    /// The policies with numbers that a model offers for a layer.
    pub(crate) fn calibrated(&self, model: &ModelDescription, layer: usize) -> Vec<SparsityPolicy> {
        let calibration = &model.calibration;
        let Some(ffn) = model.layers.get(layer).map(|layer| &layer.ffn) else { return Vec::new() };
        let share = |default: f32| if self.skip > 0.0 { self.skip } else { default };
        let of_layer = |numbers: &Option<Vec<f32>>| numbers.as_ref().and_then(|n| n.get(layer)).copied();
        let predictor = ffn.predictor.as_ref().map(|_| {
            let common = || model.prediction.as_ref().map_or(0.0, |prediction| prediction.threshold);
            let threshold = of_layer(&calibration.predictor).unwrap_or_else(common);
            SparsityPolicy::Predictor { threshold }
        });
        let explicit = match self.sparsity {
            SparsityChoice::Threshold(explicit) => explicit,
            _ => None,
        };
        let cats = calibration.cats.as_ref().map(|levels| levels.at(layer, share(levels.default)));
        let cats = explicit.or(cats).map(|threshold| SparsityPolicy::Threshold { threshold });
        let planes = ffn.planes.as_ref().zip(calibration.bitplane.as_ref());
        let bitplane = planes.map(|(_, levels)| SparsityPolicy::Bitplane {
            deviations: of_layer(&calibration.deviations).unwrap_or(0.0),
            threshold: levels.at(layer, share(levels.default)),
        });
        [predictor, cats, bitplane].into_iter().flatten().collect()
    }
}

/// How an engine is to run.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineOptions {
    /// Positions of each session's KV cache; 0 takes the model's trained context.
    pub context: u32,
    /// Tokens of a prefill batch; at least 1. Does not change any result.
    pub batch: u32,
    /// How activations meet quantised weights.
    pub activations: Activations,
    /// How neurons are skipped.
    pub sparsity: SparsityChoice,
    /// Share of neurons that thresholds and bit planes skip; 0 takes what the model was calibrated for.
    pub skip: f32,
    /// Whether running otherwise than asked for is an error.
    pub strict: bool,
    /// Whether active neurons are counted while decoding (a little slower).
    pub count_active: bool,
    /// Greatest share of every layer's neurons on devices before the last; `None` is as many as their memory holds.
    pub hot: Option<f32>,
    /// Name of the device that is to have embedding, attention and KV cache while text is generated.
    pub attention: Option<String>,
    /// Name of the device that is to run as much as it can of batches of tokens.
    pub prefill: Option<String>,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            context: 0,
            batch: 256,
            activations: Activations::Int8,
            sparsity: SparsityChoice::Auto,
            skip: 0.0,
            strict: false,
            count_active: false,
            hot: None,
            attention: None,
            prefill: None,
        }
    }
}

impl EngineOptions {
    /// As the config says.
    ///
    /// # Errors
    /// Where a word is not known (a parsed config has none such).
    pub fn from_config(config: &Config) -> Result<EngineOptions> {
        Ok(EngineOptions {
            context: config.runtime.context,
            batch: config.runtime.batch,
            activations: Activations::from_name(&config.runtime.activations)?,
            sparsity: SparsityChoice::from_name(&config.planner.sparsity)?,
            skip: config.planner.skip,
            strict: config.general.strict,
            count_active: false,
            hot: config.planner.hot,
            attention: Some(config.planner.attention.clone()).filter(|name| !name.is_empty()),
            prefill: Some(config.planner.prefill.clone()).filter(|name| !name.is_empty()),
        })
    }
}
