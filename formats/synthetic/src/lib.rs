//! Seeded models of any shape whose neurons behave as those of trained sparse models do: for benchmarks and tests that
//! need a shape, a type or a sparsity for which there is no small real model.
//!
//! # How they are made
//! Every embedding row holds one constant direction `s` (elements +1 and -1) beside a part of its own, and nothing in the
//! layers writes along `s`. So the part of the normed residual along `s` is the same for every token, and a gate row with
//! a part along `s` has a bias of its own: a neuron that is to be active for a share `P` of tokens gets the bias at which
//! a normal variable exceeds 0 with probability `P`. `P` falls exponentially over the neurons of a layer, in an order
//! that is shuffled ([`activity`]).
//!
//! The rest of a gate row is low rank (share [`LOW_RANK`] of its variance) plus noise, so a low-rank predictor can learn
//! most of what decides, and not all. The predictor that is written, if any, is that low-rank part with a margin: it
//! knows no noise, so it misses some neurons and computes others in vain, as trained ones do.
//!
//! Ids come in topics: rows of one topic share half of their variance, and the head foretells the next id of the topic,
//! so that generated text stays in its topic and a token's active neurons resemble those of the token before.
//!
//! What a model of this kind really does is measured by running it; the numbers here are what it is made for.
//!
//! Bytes depend on shape, type and seed alone, not on the number of threads.

#![forbid(unsafe_code)]

pub mod activity;
mod error;
mod random;
mod shape;
mod vocabulary;
mod weights;
mod write;

pub use error::SyntheticError;
pub use shape::{Experts, PRESETS, Shape};
pub use vocabulary::{sample_ids, sample_text};
pub use weights::LOW_RANK;
pub use write::write;

/// Result of making a model.
pub type Result<T, E = SyntheticError> = std::result::Result<T, E>;
