//! A planner plug-in for the loader's tests: everything on the first device.

use engine_core::module::{Module, PlannerModule, PluginInfo};
use engine_core::options::{OptionTable, Schema};
use engine_core::planner::{
    Budget, FfnShare, HardwareProfile, LayerPlan, LayerProfile, ModelProfile, PLAN_VERSION, Plan, Planner,
    SparsityPolicy,
};
use engine_core::{ClusterSet, Error, Result};

struct Fixture;

impl Module for Fixture {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!("fixture", "Places everything on the first device.")
    }
    fn schema(&self) -> Schema {
        Schema::default()
    }
}

impl PlannerModule for Fixture {
    fn open(&self, _: &OptionTable) -> Result<Box<dyn Planner>> {
        Ok(Box::new(First))
    }
}

struct First;

impl Planner for First {
    fn plan(&self, model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) -> Result<Plan> {
        if hardware.devices.is_empty() {
            return Err(Error::infeasible("at least one device is needed"));
        }
        let layer = |profile: &LayerProfile| {
            let asked = budget.sparsity.and_then(|kind| profile.policy(kind));
            let sparsity = asked.unwrap_or(SparsityPolicy::Dense);
            let clusters = ClusterSet::all(profile.neurons);
            LayerPlan { attention: 0, ffn: vec![FfnShare { device: 0, clusters, sparsity }], prefill: None }
        };
        Ok(Plan {
            version: PLAN_VERSION,
            requires: vec![],
            model_hash: model.hash.clone(),
            hardware_hash: hardware.hash.clone(),
            planner: "fixture".into(),
            devices: hardware.devices.iter().map(|device| device.name.clone()).collect(),
            embedding: 0,
            layers: model.layers.iter().map(layer).collect(),
            fallbacks: vec![],
            notes: vec![],
            predicted_seconds: model.layers.iter().flat_map(|l| &l.frequency).map(|f| f64::from(*f)).sum(),
        })
    }
}

engine_plugin::export_plugin!(planner: Fixture);
