//! The planner table as [`Planner`].

use super::{Handle, call_text, function, named, open};
use engine_abi::PlannerTable;
use engine_abi::convert::{self, bytes_of};
use engine_core::options::OptionTable;
use engine_core::planner::{Budget, HardwareProfile, ModelProfile, Plan, Planner};
use engine_core::{Error, Result};

/// An open planner of a plug-in.
pub(crate) struct Placer {
    table: PlannerTable,
    handle: Handle,
}

impl Placer {
    /// Opens the planner.
    pub(crate) fn open(table: PlannerTable, plugin: &str, options: &OptionTable) -> Result<Placer> {
        let (open_planner, close) = (function!(table, open, plugin), function!(table, close, plugin));
        let options = options.to_string();
        let handle = open(plugin, close, |out, detail| {
            // SAFETY: the table was checked; text, out parameter and sink live until the call returns.
            unsafe { open_planner(bytes_of(options.as_bytes()), out, detail) }
        })?;
        Ok(Placer { table, handle })
    }
}

impl Planner for Placer {
    fn plan(&self, model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) -> Result<Plan> {
        let plugin = &self.handle.plugin;
        let plan = function!(self.table, plan, plugin);
        let request = convert::request_to_json(model, hardware, budget)?;
        let json = call_text(plugin, |out, detail| {
            // SAFETY: the table was checked, the instance is open; all else lives until the call returns.
            unsafe { plan(self.handle.instance, bytes_of(request.as_bytes()), out, detail) }
        })?;
        Plan::from_json(&json).map_err(|error| named(plugin, Error::internal(error.detail())))
    }
}
