//! Greedy placement: attention where it is wanted and fits, then the neuron clusters that fire most per byte, device by
//! device in the config's order, the rest on the last one.
//!
//! After PowerInfer (Song et al., SOSP'24, section 6.3): a layer puts on a device either no neuron or enough of them to
//! pay for one exchange with the host. Greedy is fast and always within the budgets, but not optimal.

#![forbid(unsafe_code)]

mod clusters;
mod place;
mod plan;
mod seconds;
mod skipping;

pub use plan::Greedy;

use engine_core::config::Config;
use engine_core::module::{Module, PlannerModule, PluginInfo, PluginKind};
use engine_core::options::{OptionTable, Schema};
use engine_core::{Planner, Result, options};

/// The name that the config uses.
const NAME: &str = "greedy";

options! {
    /// Options of the planner.
    pub struct Options {
        /// Neurons that are placed together.
        group: u32 = 64, in 1..=65536;
        /// Under `sparsity = "auto"`, gate-first is chosen where neurons fire for less than this share of tokens on
        /// average: skipping saves two of three rows, but reads what is left in small pieces.
        gate_first_below: f32 = 0.5, in 0.0..=1.0;
    }
}

/// The plug-in.
pub struct GreedyModule;

impl Module for GreedyModule {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!(NAME, "Places the most active neurons per byte first, device by device.")
    }

    fn schema(&self) -> Schema {
        Options::schema()
    }
}

impl PlannerModule for GreedyModule {
    fn open(&self, options: &OptionTable) -> Result<Box<dyn Planner>> {
        let options = Options::from_table(options, &Config::options_place(PluginKind::Planner, NAME))?;
        Ok(Box::new(Greedy::new(options)))
    }
}

engine_plugin::export_plugin!(planner: GreedyModule);
