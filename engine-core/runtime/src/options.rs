//! What a caller decides about an engine.

use crate::{Result, RuntimeError};
use engine_core::config::Config;
use engine_core::planner::SparsityPolicy;

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
    /// The planner chooses among the exact policies.
    #[default]
    Auto,
    /// Not at all.
    Dense,
    /// Exactly, by the gate.
    GateFirst,
    /// By the model's predictors, with the model's threshold.
    Predictor,
    /// Where the activated gate is at most this (CATS).
    Threshold(f32),
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
            other => Err(RuntimeError::Option {
                option: "sparsity",
                problem: format!("is `{other}`; accepted: auto, dense, gate-first, predictor"),
            }),
        }
    }

    /// What the planner is asked for; `threshold` is the model's own for its predictors.
    pub(crate) fn policy(self, threshold: f32) -> Option<SparsityPolicy> {
        match self {
            SparsityChoice::Auto => None,
            SparsityChoice::Dense => Some(SparsityPolicy::Dense),
            SparsityChoice::GateFirst => Some(SparsityPolicy::GateFirst),
            SparsityChoice::Predictor => Some(SparsityPolicy::Predictor { threshold }),
            SparsityChoice::Threshold(threshold) => Some(SparsityPolicy::Threshold { threshold }),
        }
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
    /// Whether running otherwise than asked for is an error.
    pub strict: bool,
    /// Whether active neurons are counted while decoding (a little slower).
    pub count_active: bool,
}

impl Default for EngineOptions {
    fn default() -> EngineOptions {
        EngineOptions {
            context: 0,
            batch: 256,
            activations: Activations::Int8,
            sparsity: SparsityChoice::Auto,
            strict: false,
            count_active: false,
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
            strict: config.general.strict,
            count_active: false,
        })
    }
}
