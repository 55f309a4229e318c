//! The CPU as a compute plug-in: kernels chosen at run time, a pinned pool, and the contract of `engine-core` over them.
//!
//! ```text
//! module    who we are, options                     kernels/  arithmetic, generic over a vector, once per tier
//! backend   handles, queue thread                   run/      what each thread does for each operation
//! program   an executable: compile, schedule            pool, threads   who computes, and where
//! own       what each thread may come to hold
//! ```

mod backend;
mod compile;
mod kernels;
mod module;
mod own;
mod pool;
mod program;
mod run;
mod schedule;
#[cfg(test)]
mod tests;
mod threads;

pub use kernels::FEATURES_VARIABLE;
pub use module::{CpuModule, CpuOptions};

engine_plugin::export_plugin!(compute: CpuModule);
