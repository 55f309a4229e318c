//! A model's placement with everything that decided it: plan, device, plug-ins, fallbacks.

use crate::placement;
use crate::settings::Settings;
use crate::stack::{self, Opened, PluginInUse};
use anyhow::Result;
use engine_core::planner::{Fallback, Plan};
use engine_runtime::{EngineOptions, WeightType, plan_with_types};
use formats::GgufFile;
use serde_json::{Value, json};

/// What runs where, on which plug-ins, and why not as asked.
pub(crate) struct Placed {
    /// The plan.
    pub(crate) plan: Plan,
    /// The plug-ins in use.
    pub(crate) plugins: Vec<PluginInUse>,
    /// Choices that the device made.
    notes: Vec<String>,
    fallbacks: Vec<Fallback>,
}

impl Placed {
    /// Of a plan and the notes of its device; `fallbacks` are those from before the plan.
    pub(crate) fn new(
        plan: Plan,
        notes: Vec<String>,
        plugins: Vec<PluginInUse>,
        mut fallbacks: Vec<Fallback>,
    ) -> Placed {
        fallbacks.extend(plan.fallbacks.iter().cloned());
        Placed { plan, plugins, notes, fallbacks }
    }

    /// Where an open file would run, and how its weights would be held there: no weight is read.
    ///
    /// # Errors
    /// Where a plug-in cannot be had, or the model cannot run on those that can.
    pub(crate) fn would_be(file: &GgufFile, settings: &Settings) -> Result<(Placed, Vec<WeightType>)> {
        let Opened { stack, plugins, fallbacks } = stack::open(settings)?;
        let (found, types) = plan_with_types(file, &stack, EngineOptions::from_config(&settings.config)?)?;
        Ok((Placed::new(found.plan, found.device_notes, plugins, fallbacks), types))
    }

    /// What runs where, for `--json`.
    pub(crate) fn plan_json(&self) -> Value {
        let mut plan = placement::json(&self.plan, &self.fallbacks);
        plan["device_notes"] = json!(self.notes);
        plan
    }

    /// The plug-ins in use, for `--json`; `mapped` says whether the system shows the library in this process.
    pub(crate) fn plugins_json(&self) -> Value {
        let maps = std::fs::read_to_string("/proc/self/maps").ok();
        let mapped = |path: &std::path::Path| {
            let path = path.to_string_lossy();
            maps.as_ref().map(|maps| maps.lines().any(|line| line.ends_with(&*path)))
        };
        self.plugins
            .iter()
            .map(|plugin| {
                json!({
                    "kind": plugin.kind.name(),
                    "name": plugin.name,
                    "version": plugin.version,
                    "path": plugin.path,
                    "mapped": plugin.path.as_deref().and_then(mapped),
                })
            })
            .collect()
    }

    /// The start-up table with its fallbacks.
    pub(crate) fn table(&self) -> String {
        let mut text = placement::table(&self.plan);
        for fallback in &self.fallbacks {
            text.push_str(&format!("fallback: {fallback}\n"));
        }
        for note in &self.plan.notes {
            text.push_str(&format!("note: {note}\n"));
        }
        text
    }
}
