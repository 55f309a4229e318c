//! What runs where, and why not elsewhere: the plan as a table for people and as JSON.

use crate::output;
use engine_core::planner::{Fallback, FfnShare, LayerPlan, Plan, PrefillPlan, PrefillShare};
use serde_json::{Value, json};

/// Layers in a row that are placed alike.
struct Group<'a> {
    first: usize,
    last: usize,
    layer: &'a LayerPlan,
}

fn groups(plan: &Plan) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (index, layer) in plan.layers.iter().enumerate() {
        match groups.last_mut() {
            Some(group) if group.layer == layer => group.last = index,
            _ => groups.push(Group { first: index, last: index, layer }),
        }
    }
    groups
}

impl Group<'_> {
    fn name(&self) -> String {
        if self.first == self.last {
            format!("blk.{}", self.first)
        } else {
            format!("blk.{}-{}", self.first, self.last)
        }
    }
}

fn device(plan: &Plan, index: u32) -> &str {
    plan.devices.get(index as usize).map_or("?", String::as_str)
}

fn neurons(share: &FfnShare) -> u64 {
    share.clusters.ranges().iter().map(|range| u64::from(range.len())).sum()
}

/// How the plan skips neurons, whatever was asked for: one policy, or all that some layer has.
pub(crate) fn policies(plan: &Plan) -> String {
    let shares = plan.layers.iter().flat_map(|layer| &layer.ffn).filter(|share| neurons(share) > 0);
    let mut names: Vec<String> = shares.map(|share| share.sparsity.kind().to_string()).collect();
    names.sort_unstable();
    names.dedup();
    names.join(" and ")
}

/// The start-up table.
pub(crate) fn table(plan: &Plan) -> String {
    let mut rows: Vec<Vec<String>> =
        vec![vec!["embedding, head".into(), device(plan, plan.embedding).into(), String::new()]];
    for group in groups(plan) {
        let name = group.name();
        rows.push(vec![
            format!("{name} attention"),
            device(plan, group.layer.attention).into(),
            String::new(),
        ]);
        for share in group.layer.ffn.iter().filter(|share| neurons(share) > 0) {
            let how = format!("{} neurons, {}", neurons(share), share.sparsity);
            rows.push(vec![format!("{name} ffn"), device(plan, share.device).into(), how]);
        }
        if let Some(prefill) = &group.layer.prefill {
            rows.extend(prefill_rows(plan, &name, prefill));
        }
    }
    output::table(&["what", "device", "how"], &rows)
}

/// Where batches of tokens run, where that is elsewhere.
fn prefill_rows(plan: &Plan, name: &str, prefill: &PrefillPlan) -> Vec<Vec<String>> {
    let row = |what: &str, at: u32, how: String| {
        vec![format!("{name} {what}, batches"), device(plan, at).to_owned(), how]
    };
    let mut rows = vec![row("attention", prefill.attention, String::new())];
    if prefill.projections != prefill.attention {
        rows.push(row("projections", prefill.projections, String::new()));
    }
    let shares = prefill.ffn.iter().filter(|share| !share.clusters.is_empty());
    rows.extend(
        shares.map(|share| row("ffn", share.device, format!("{} neurons, dense", share.clusters.len()))),
    );
    rows
}

/// The plan for programs, layers that are alike in one entry.
pub(crate) fn json(plan: &Plan, fallbacks: &[Fallback]) -> Value {
    let share = |share: &FfnShare| {
        json!({
            "device": device(plan, share.device),
            "neurons": neurons(share),
            "ranges": share.clusters.ranges().iter().map(|r| json!([r.start, r.end])).collect::<Vec<_>>(),
            "sparsity": share.sparsity,
        })
    };
    let prefill = |prefill: &PrefillPlan| {
        let share = |share: &PrefillShare| {
            json!({
                "device": device(plan, share.device),
                "neurons": share.clusters.len(),
                "ranges": share.clusters.ranges().iter().map(|r| json!([r.start, r.end])).collect::<Vec<_>>(),
            })
        };
        json!({
            "attention": device(plan, prefill.attention),
            "projections": device(plan, prefill.projections),
            "ffn": prefill.ffn.iter().map(share).collect::<Vec<_>>(),
        })
    };
    let layers: Vec<Value> = groups(plan)
        .iter()
        .map(|group| {
            json!({
                "first": group.first,
                "last": group.last,
                "attention": device(plan, group.layer.attention),
                "ffn": group.layer.ffn.iter().map(share).collect::<Vec<_>>(),
                "prefill": group.layer.prefill.as_ref().map(prefill),
            })
        })
        .collect();
    json!({
        "planner": plan.planner,
        "devices": plan.devices,
        "embedding": device(plan, plan.embedding),
        "layers": layers,
        "fallbacks": fallbacks,
        "notes": plan.notes,
        "predicted_seconds": plan.predicted_seconds,
        "model_hash": plan.model_hash,
        "hardware_hash": plan.hardware_hash,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine_core::planner::{FEATURE_PREFILL, PLAN_VERSION, SparsityPolicy};
    use engine_core::{ClusterRange, ClusterSet};

    fn plan() -> Plan {
        let share = |device, start, end, sparsity| FfnShare {
            device,
            clusters: ClusterSet::from_ranges(vec![ClusterRange::new(start, end)]).unwrap(),
            sparsity,
        };
        let plain =
            LayerPlan { attention: 0, ffn: vec![share(0, 0, 64, SparsityPolicy::GateFirst)], prefill: None };
        let split = LayerPlan {
            attention: 1,
            ffn: vec![share(1, 0, 16, SparsityPolicy::Dense), share(0, 16, 64, SparsityPolicy::GateFirst)],
            prefill: Some(PrefillPlan {
                attention: 1,
                projections: 1,
                ffn: vec![PrefillShare { device: 1, clusters: ClusterSet::all(64) }],
            }),
        };
        Plan {
            version: PLAN_VERSION,
            requires: vec![FEATURE_PREFILL.into()],
            model_hash: "m".into(),
            hardware_hash: "h".into(),
            planner: "greedy".into(),
            devices: vec!["cpu".into(), "vulkan:0".into()],
            embedding: 0,
            layers: vec![split, plain.clone(), plain],
            fallbacks: vec![],
            notes: vec![],
            predicted_seconds: 0.0,
        }
    }

    #[test]
    fn as_a_table() {
        insta::assert_snapshot!(table(&plan()), @r"
        what                      device    how
        embedding, head           cpu
        blk.0 attention           vulkan:0
        blk.0 ffn                 vulkan:0  16 neurons, dense
        blk.0 ffn                 cpu       48 neurons, gate-first
        blk.0 attention, batches  vulkan:0
        blk.0 ffn, batches        vulkan:0  64 neurons, dense
        blk.1-2 attention         cpu
        blk.1-2 ffn               cpu       64 neurons, gate-first
        ");
    }

    #[test]
    fn as_json() {
        let value = json(&plan(), &[]);
        assert_eq!(value["layers"].as_array().unwrap().len(), 2);
        assert_eq!(value["layers"][0]["ffn"][1]["ranges"], json!([[16, 64]]));
        assert_eq!(value["layers"][0]["prefill"]["attention"], "vulkan:0");
        assert_eq!((&value["layers"][1]["last"], &value["layers"][1]["prefill"]), (&json!(2), &Value::Null));
    }
}
