//! Runs a model: graph, weights, KV cache, sampling and generation over whatever backends, tier, policy and planner
//! the caller brings.
//!
//! [`Engine::load`] reads a model's description, asks the planner where everything goes, brings the weights to the
//! device and prepares its lists of operations. A [`Session`] is one sequence with its KV cache. [`generate`] samples
//! text from a session, [`bench::bench`] measures one, [`check::check_tensors`] looks for damaged weights.
//!
//! # What decides the output
//! Only the model, the ids, the activations' arithmetic, the sparsity policy, the backend and (for sampling) the seed:
//! sums have a fixed order in the backends, the sampler breaks ties by id, and nothing here depends on time, threads
//! or the storage tier.
//!
//! # Arithmetic
//! [`Activations::Int8`] quantises what meets quantised weights (Q8_0, Q4_0, ...); weights in F32, F16 or BF16, and
//! predictors, always meet f32 activations. [`Activations::F32`] quantises nothing.

#![deny(unsafe_code)] // allowed in `host_binding`, the one place that passes host memory to devices

pub mod bench;
mod caches;
pub mod check;
mod conversions;
mod engine;
#[cfg(test)]
mod engine_tests;
mod error;
#[cfg(test)]
mod fakes;
mod fit;
mod generate;
mod graph;
mod held;
#[cfg(test)]
mod held_tests;
mod host_binding;
#[cfg(test)]
mod hybrid_tests;
mod need;
mod observe;
mod options;
mod planning;
mod profile;
mod resource;
mod sampling;
mod session;
mod stages;
mod statistics;
mod step_bytes;
mod stop;
mod support;
pub mod trace;
mod weight;
mod weight_types;
mod weights;

pub use engine::{Engine, Placement, Stack};
pub use error::RuntimeError;
pub use generate::{FinishReason, GenerateOptions, Generation, Timings, generate};
pub use observe::{Observed, Observer, Wanted};
pub use options::{Activations, EngineOptions, SparsityChoice};
pub use planning::describe;
pub use sampling::{Sampler, SamplingOptions};
pub use session::Session;
pub use stages::StageTimes;
pub use statistics::{DeviceCounters, Statistics};
pub use step_bytes::StepBytes;
pub use weight_types::{WeightType, plan_with_types};

/// Result of what runs a model.
pub type Result<T, E = RuntimeError> = std::result::Result<T, E>;
