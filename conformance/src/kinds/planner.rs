//! Planners: every plan is valid and keeps every budget, the same question gets the same answer, and what cannot be
//! had is said with the smallest budget that would do.

use super::must;
use crate::finding::{Fallible, Finding, Outcome};
use engine_core::planner::{
    Budget, DeviceProfile, HardwareProfile, LayerProfile, ModelProfile, Part, Plan, SparsityKind,
    SparsityPolicy,
};
use engine_core::{Error, Planner};

type Case = fn(&dyn Planner) -> Fallible<Outcome>;

/// Every case.
pub(super) const CASES: &[(&str, Case)] = &[
    ("planner/one-device", one_device),
    ("planner/two-devices", two_devices),
    ("planner/replay", replay),
    ("planner/infeasible", infeasible),
    ("planner/no-device", no_device),
    ("planner/gate-first-only-where-exact", gate_first),
    ("planner/strict", strict),
    ("planner/json", json),
    ("planner/what-was-asked", what_was_asked),
    ("planner/a-device-with-parts", a_device_with_parts),
];

fn model(layers: u32, zero_below: bool) -> ModelProfile {
    let layer = |i: u32| LayerProfile {
        attention_bytes: 1000,
        neurons: 40 + i,
        neuron_bytes: 30,
        zero_below,
        predictor_bytes: 0,
        frequency: (0..40 + i).map(|n| 1.0 / (1.0 + n as f32)).collect(),
        ..LayerProfile::default()
    };
    ModelProfile {
        name: "a model".into(),
        hash: "m".into(),
        embedding_bytes: 5000,
        kv_bytes: 400,
        activation_bytes: 100,
        divided_bytes: 10,
        layers: (0..layers).map(layer).collect(),
    }
}

fn device(name: &str, memory_bytes: u64, bandwidth: f64) -> DeviceProfile {
    DeviceProfile {
        name: name.into(),
        memory_bytes,
        bandwidth,
        sync_seconds: 1e-5,
        sparse: true,
        ..DeviceProfile::default()
    }
}

fn hardware(devices: Vec<DeviceProfile>) -> HardwareProfile {
    HardwareProfile { hash: "h".into(), devices }
}

/// What a plan puts on each device, in bytes of weights.
fn weights(plan: &Plan, model: &ModelProfile) -> Vec<u64> {
    let mut bytes = vec![0u64; plan.devices.len()];
    bytes[plan.embedding as usize] += model.embedding_bytes;
    for (layer, profile) in plan.layers.iter().zip(&model.layers) {
        bytes[layer.attention as usize] += profile.attention_bytes;
        for share in &layer.ffn {
            bytes[share.device as usize] += u64::from(share.clusters.len()) * profile.neuron_bytes;
        }
    }
    bytes
}

fn checked(
    planner: &dyn Planner,
    model: &ModelProfile,
    hardware: &HardwareProfile,
    budget: &Budget,
) -> Fallible<Plan> {
    let plan = planner.plan(model, hardware, budget)?;
    plan.validate(model)?;
    must(plan.hardware_hash == hardware.hash, "plan", || {
        format!("it is for hardware {}", plan.hardware_hash)
    })?;
    let names: Vec<&String> = hardware.devices.iter().map(|d| &d.name).collect();
    must(plan.devices.iter().eq(names.iter().copied()), "plan", || {
        format!("devices {:?}, wanted the config's {names:?}", plan.devices)
    })?;
    for (held, device) in weights(&plan, model).iter().zip(&hardware.devices) {
        must(*held <= device.memory_bytes, "budget", || {
            format!("{held} bytes of weights on `{}`, which has {}", device.name, device.memory_bytes)
        })?;
    }
    Ok(plan)
}

fn one_device(p: &dyn Planner) -> Fallible<Outcome> {
    let model = model(3, true);
    let plan = checked(p, &model, &hardware(vec![device("cpu", 1 << 20, 1e9)]), &Budget::default())?;
    must(plan.fallbacks.is_empty(), "plan", || {
        format!("fallbacks where nothing is short: {:?}", plan.fallbacks)
    })?;
    Ok(Outcome::OK)
}

fn two_devices(p: &dyn Planner) -> Fallible<Outcome> {
    // From a first device that holds all to one that holds next to nothing.
    for memory in [1 << 20, 12_000, 9_000, 7_000, 6_000] {
        let devices = vec![device("gpu", memory, 1e11), device("cpu", 1 << 20, 1e9)];
        checked(p, &model(4, true), &hardware(devices), &Budget::default())
            .map_err(|f| f.during(&format!("a first device of {memory} bytes")))?;
    }
    Ok(Outcome::OK)
}

fn replay(p: &dyn Planner) -> Fallible<Outcome> {
    let hardware = hardware(vec![device("gpu", 9_000, 1e11), device("cpu", 1 << 20, 1e9)]);
    let (a, b) = (
        p.plan(&model(4, true), &hardware, &Budget::default())?,
        p.plan(&model(4, true), &hardware, &Budget::default())?,
    );
    must(a == b, "replay", || "the same question got two answers".into())?;
    Ok(Outcome::OK)
}

fn infeasible(p: &dyn Planner) -> Fallible<Outcome> {
    match p.plan(&model(4, true), &hardware(vec![device("cpu", 100, 1e9)]), &Budget::default()) {
        Err(Error::Infeasible { detail }) => {
            must(detail.chars().any(|c| c.is_ascii_digit()), "error paths", || {
                format!("it does not say the smallest budget that would work: {detail}")
            })?;
            Ok(Outcome::OK)
        }
        other => Err(Finding::new(
            "error paths",
            format!("100 bytes for a model: wanted Infeasible, got {other:?}"),
        )),
    }
}

fn no_device(p: &dyn Planner) -> Fallible<Outcome> {
    match p.plan(&model(1, true), &hardware(vec![]), &Budget::default()) {
        Err(Error::Infeasible { .. } | Error::InvalidArgument { .. }) => Ok(Outcome::OK),
        other => Err(Finding::new("error paths", format!("no device at all: got {other:?}"))),
    }
}

fn gate_first(p: &dyn Planner) -> Fallible<Outcome> {
    let hardware = hardware(vec![device("cpu", 1 << 20, 1e9)]);
    let smooth = model(2, false);
    let plan = checked(p, &smooth, &hardware, &Budget::default())?;
    let inexact = plan.layers.iter().flat_map(|l| &l.ffn).any(|s| s.sparsity != SparsityPolicy::Dense);
    must(!inexact, "exactness", || {
        "a model that cannot be skipped exactly is skipped without being asked".into()
    })?;
    // Asked for, it is refused or falls back visibly.
    let budget = Budget { sparsity: Some(SparsityKind::GateFirst), ..Budget::default() };
    match p.plan(&smooth, &hardware, &budget) {
        Err(_) => {}
        Ok(plan) => {
            plan.validate(&smooth)?;
            must(!plan.fallbacks.is_empty(), "fallbacks", || {
                "gate-first was asked for, something else was planned, and no fallback says so".into()
            })?;
        }
    }
    Ok(Outcome::OK)
}

fn strict(p: &dyn Planner) -> Fallible<Outcome> {
    let mut first = device("gpu", 1 << 20, 1e11);
    first.unsupported = vec!["ffn: no kernel for Q9_9".into()];
    let hardware = hardware(vec![first, device("cpu", 1 << 20, 1e9)]);
    let plan = checked(p, &model(2, true), &hardware, &Budget::default())?;
    must(!plan.fallbacks.is_empty(), "fallbacks", || {
        "the first device cannot run the model, and no fallback says so".into()
    })?;
    let uses = weights(&plan, &model(2, true))[0];
    must(uses == 0, "plan", || format!("{uses} bytes are on a device that cannot run the model"))?;
    let budget = Budget { strict: true, ..Budget::default() };
    match p.plan(&model(2, true), &hardware, &budget) {
        Err(_) => Ok(Outcome::OK),
        Ok(_) => Err(Finding::new("strict", "a fallback is an error under strict, but it planned one")),
    }
}

fn what_was_asked(p: &dyn Planner) -> Fallible<Outcome> {
    let hardware = hardware(vec![device("gpu", 1 << 20, 1e11), device("cpu", 1 << 20, 1e9)]);
    let model = model(4, true);
    let budget = Budget {
        hot: Some(0.5),
        attention: Some("cpu".into()),
        prefill: Some("gpu".into()),
        ..Budget::default()
    };
    let plan = checked(p, &model, &hardware, &budget)?;
    for (index, (layer, profile)) in plan.layers.iter().zip(&model.layers).enumerate() {
        let hot = layer.ffn.iter().filter(|share| share.device == 0).map(|share| share.clusters.len());
        let (hot, most) = (hot.sum::<u32>(), profile.neurons / 2);
        must(hot <= most, "plan", || {
            format!("layer {index} has {hot} neurons before the last device, {most} were allowed")
        })?;
    }
    let elsewhere = plan.layers.iter().any(|layer| layer.attention != 1) || plan.embedding != 1;
    must(!elsewhere || !plan.fallbacks.is_empty(), "fallbacks", || {
        "attention is not where it was asked for, and no fallback says so".into()
    })?;
    let unknown = Budget { attention: Some("tpu".into()), ..Budget::default() };
    match p.plan(&model, &hardware, &unknown) {
        Err(_) => Ok(Outcome::OK),
        Ok(plan) if !plan.fallbacks.is_empty() => Ok(Outcome::OK),
        Ok(_) => Err(Finding::new("fallbacks", "attention was asked for on a device that is not there")),
    }
}

fn a_device_with_parts(p: &dyn Planner) -> Fallible<Outcome> {
    for parts in [vec![Part::Ffn], vec![Part::Projections], vec![Part::Projections, Part::Ffn]] {
        let npu = DeviceProfile {
            unsupported: vec!["attention".into()],
            sparse: false,
            parts: parts.clone(),
            ..device("npu", 1 << 20, 1e11)
        };
        let hardware = hardware(vec![npu, device("cpu", 1 << 20, 1e9)]);
        let budget = Budget { hot: Some(0.5), attention: Some("cpu".into()), ..Budget::default() };
        let plan = checked(p, &model(4, true), &hardware, &budget)?;
        must(plan.embedding == 1, "plan", || "embedding and head are where they cannot run".into())?;
        for (index, layer) in plan.layers.iter().enumerate() {
            let fail = |what: &str| {
                Finding::new("plan", format!("layer {index}: {what} on a device with {parts:?}"))
            };
            let prefill = layer.prefill.as_ref();
            if layer.attention == 0 || prefill.is_some_and(|prefill| prefill.attention == 0) {
                return Err(fail("attention"));
            }
            if !parts.contains(&Part::Projections) && prefill.is_some_and(|prefill| prefill.projections == 0)
            {
                return Err(fail("projections"));
            }
            let single = layer.ffn.iter().any(|share| share.device == 0 && !share.clusters.is_empty());
            let batch =
                prefill.is_some_and(|p| p.ffn.iter().any(|s| s.device == 0 && !s.clusters.is_empty()));
            if !parts.contains(&Part::Ffn) && (single || batch) {
                return Err(fail("neurons"));
            }
            if layer.ffn.iter().any(|share| share.device == 0 && share.sparsity != SparsityPolicy::Dense) {
                return Err(fail("a sparse share"));
            }
        }
    }
    Ok(Outcome::OK)
}

fn json(p: &dyn Planner) -> Fallible<Outcome> {
    let hardware = hardware(vec![device("gpu", 9_000, 1e11), device("cpu", 1 << 20, 1e9)]);
    let plan = p.plan(&model(4, true), &hardware, &Budget::default())?;
    let back = Plan::from_json(&plan.to_json())?;
    must(back == plan, "plan", || "it does not survive JSON".into())?;
    Ok(Outcome::OK)
}
