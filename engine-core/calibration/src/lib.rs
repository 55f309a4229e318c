//! What a model is prepared with: how active its neurons are, how wide a margin bit planes need, which thresholds skip
//! how much, and predictors that are trained. Arithmetic on weights and on what was observed; no device is known here.
//!
//! [`layer::calibrate`] does one layer from the inputs that the engine's observer recorded ([`rows::Rows`]) and the
//! weights as they will be stored ([`network::Network`]). Layers are independent, so they may run side by side; within a
//! layer one thread works and sums run in a fixed order: results depend on nothing but the inputs.
//!
//! Of mixtures of experts ([`mixture`]) only activity is measured.
//!
//! Texts are divided in three ([`split`]): most train, some set margins, thresholds and ranks, and some are held out for
//! what is reported.

#![forbid(unsafe_code)]

pub mod activity;
pub mod coactivation;
mod error;
pub mod layer;
pub mod levels;
pub mod margin;
pub mod mixture;
pub mod network;
pub mod outcome;
pub mod planes;
pub mod predictor;
mod product;
pub mod rows;
pub mod split;
pub mod weights;

pub use error::CalibrationError;

/// Result of calibrating.
pub type Result<T, E = CalibrationError> = std::result::Result<T, E>;
