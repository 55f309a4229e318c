//! The oracle: every operation in plain f64, against which all other devices are held.
//!
//! It does the arithmetic that a descriptor states (quantised activations, the f16 KV cache), then sums in f64 from the
//! first element to the last, and rounds each result to f32 once. With `arithmetic = "true"` it leaves the stated
//! quantisation out. It shares no code with any other backend, and prefers the obvious loop to the fast one.

#![deny(unsafe_code)]

mod backend;
mod dequantise;
mod execute;
mod memory;
mod operations;
mod parallel;
mod quantise;
mod support;
#[cfg(test)]
mod tests;

pub use backend::Reference;

use engine_core::backend::DeviceDescription;
use engine_core::config::Config;
use engine_core::module::{ComputeModule, Module, PluginInfo, PluginKind};
use engine_core::options::{OptionTable, Schema};
use engine_core::{ComputeBackend, Error, Result, options};

/// The name that the config uses.
const NAME: &str = "reference";

options! {
    /// Options of the oracle.
    pub struct Options {
        /// Bytes that may be allocated; absent means no limit.
        memory_limit: Option<u64> = None;
        /// `stated` does the activation quantisation that operations state, `true` leaves it out.
        arithmetic: String = "stated".into(), one_of ["stated", "true"];
        /// Threads to use; 0 takes all that the process may. They change no result.
        threads: u32 = 0, in 0..=1024;
    }
}

/// The plug-in.
pub struct ReferenceModule;

impl Module for ReferenceModule {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!(
            NAME,
            "The f64 oracle: slow, plain, and what the other devices are measured against."
        )
    }

    fn schema(&self) -> Schema {
        Options::schema()
    }
}

fn read(options: &OptionTable) -> Result<Options> {
    Options::from_table(options, &Config::options_place(PluginKind::Compute, NAME))
}

impl ComputeModule for ReferenceModule {
    fn devices(&self, options: &OptionTable) -> Result<Vec<DeviceDescription>> {
        Ok(vec![Reference::new(read(options)?).describe().clone()])
    }

    fn open(&self, index: u32, options: &OptionTable) -> Result<Box<dyn ComputeBackend>> {
        if index != 0 {
            return Err(Error::invalid(format!(
                "the reference plug-in has one device; there is no device {index}"
            )));
        }
        Ok(Box::new(Reference::new(read(options)?)))
    }
}

engine_plugin::export_plugin!(compute: ReferenceModule);
