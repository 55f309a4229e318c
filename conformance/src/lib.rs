//! The conformance suite: proves a plug-in right against the contracts of `engine-core`, whoever wrote it.
//!
//! [`run()`] sends cases one by one to child processes of the calling program (whose `main` calls [`main_if_child`]
//! first), which open the plug-in and the oracle through engine-loader: a crash or a hang is a failure of that case.
//! A device is compared with the `reference` plug-in twice: doing the descriptor's own arithmetic, under tight limits,
//! and in true f64, under looser ones ([`limits`]). Errors are measured against the sum of the absolute products that
//! an element was made from ([`scale`]).
//!
//! The suite knows no plug-in: device under test and oracle are both [`engine_core::ComputeBackend`] objects.

pub mod bench;
pub mod case;
pub mod compare;
pub mod describe;
pub mod diverge;
pub mod errors;
pub mod expectations;
pub mod finding;
pub mod kinds;
pub mod limits;
pub mod matrix;
pub mod mutants;
pub mod open;
pub mod problem;
pub mod properties;
pub mod protocol;
pub mod random;
pub mod report;
pub mod rng;
pub mod run;
pub mod scale;
pub mod spec;
mod suite;
pub mod values;

pub use expectations::Expectation;
pub use finding::{Finding, Outcome};
pub use open::{PluginRef, Target};
pub use protocol::main_if_child;
pub use report::{Report, Status};
pub use suite::{SuiteOptions, run};
