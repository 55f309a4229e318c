//! Plans of small models, and the promises for any model.

use super::*;
use engine_core::ClusterSet;
use engine_core::planner::{DeviceProfile, LayerProfile};
use proptest::prelude::*;

fn layer(neurons: u32, frequency: Vec<f32>) -> LayerProfile {
    LayerProfile {
        attention_bytes: 100,
        neurons,
        neuron_bytes: 10,
        zero_below: true,
        predictor_bytes: 0,
        frequency,
        ..LayerProfile::default()
    }
}

fn model(layers: Vec<LayerProfile>) -> ModelProfile {
    ModelProfile {
        name: "model".into(),
        hash: "m".into(),
        embedding_bytes: 50,
        kv_bytes: 30,
        activation_bytes: 20,
        divided_bytes: 0,
        layers,
    }
}

fn device(name: &str, memory_bytes: u64, bandwidth: f64) -> DeviceProfile {
    DeviceProfile {
        name: name.into(),
        memory_bytes,
        bandwidth,
        sync_seconds: 0.0,
        sparse: true,
        ..DeviceProfile::default()
    }
}

fn hardware(devices: Vec<DeviceProfile>) -> HardwareProfile {
    HardwareProfile { hash: "h".into(), devices }
}

fn plan(model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) -> Result<Plan> {
    let plan = Greedy::new(Options { group: 2, ..Options::default() }).plan(model, hardware, budget)?;
    plan.validate(model).unwrap();
    Ok(plan)
}

fn set(ranges: &[(u32, u32)]) -> ClusterSet {
    let ranges = ranges.iter().map(|(a, b)| engine_core::ClusterRange::new(*a, *b));
    ClusterSet::from_ranges(ranges.collect()).unwrap()
}

#[test]
fn one_device_has_everything() {
    let model = model(vec![layer(8, vec![]); 2]);
    // 100 + 2 * 100 + 2 * 80 bytes.
    let found = plan(&model, &hardware(vec![device("cpu", 460, 230.0)]), &Budget::default()).unwrap();
    assert_eq!((found.embedding, found.fallbacks.len(), found.devices.len()), (0, 0, 1));
    for layer in &found.layers {
        assert_eq!(layer.ffn[0].clusters, ClusterSet::all(8));
        assert_eq!(layer.ffn[0].sparsity, SparsityPolicy::Dense);
    }
    // Embedding 50, attention 200, neurons 160 bytes at 230 a second.
    assert!((found.predicted_seconds - 410.0 / 230.0).abs() < 1e-12);
    let error = plan(&model, &hardware(vec![device("cpu", 459, 0.0)]), &Budget::default()).unwrap_err();
    assert!(
        matches!(&error, Error::Infeasible { detail } if detail.contains("may use 459 bytes and would need 460"))
    );
}

#[test]
fn hot_clusters_go_first() {
    let hot = vec![0.1, 0.1, 0.9, 0.9, 0.0, 0.0, 0.8, 0.8];
    let model = model(vec![layer(8, hot.clone()), layer(8, hot.iter().map(|f| f / 10.0).collect())]);
    // Room for two clusters beside attention and the rest.
    let devices = hardware(vec![device("gpu", 340, 1000.0), device("cpu", 1000, 100.0)]);
    let found = plan(&model, &devices, &Budget::default()).unwrap();
    assert_eq!((found.embedding, found.layers[0].attention), (0, 0));
    assert_eq!(found.layers[0].ffn[0].clusters, set(&[(2, 4), (6, 8)]));
    assert_eq!((found.layers[0].ffn[0].device, found.layers[0].ffn[1].device), (0, 1));
    assert_eq!(found.layers[1].ffn.len(), 1);
    // Measured and rare: gate-first; the hot share fires too often for that.
    assert_eq!(found.layers[0].ffn[0].sparsity, SparsityPolicy::Dense);
    assert_eq!(found.layers[0].ffn[1].sparsity, SparsityPolicy::GateFirst);
    assert_eq!(found.layers[1].ffn[0].sparsity, SparsityPolicy::GateFirst);
}

#[test]
fn a_share_must_pay_for_its_exchange() {
    let model = model(vec![layer(8, vec![]); 2]);
    let with = |sync_seconds, cpu_memory| {
        let gpu = DeviceProfile { sync_seconds, ..device("gpu", 300 + 120, 1000.0) };
        let devices = hardware(vec![gpu, device("cpu", cpu_memory, 100.0)]);
        let found = plan(&model, &devices, &Budget::default()).unwrap();
        found
            .layers
            .iter()
            .map(|l| l.ffn.iter().find(|s| s.device == 0).map_or(0, |s| s.clusters.len()))
            .collect()
    };
    // A neuron gains 10 / 100 - 10 / 1000 = 0.09 s. The gpu has room for 12: one whole layer, half of the other.
    let counts: Vec<u32> = with(0.09 * 3.9, 1000);
    assert_eq!(counts, [8, 4]);
    assert_eq!(with(0.09 * 4.1, 1000), [8, 0]);
    // Memory goes before speed.
    assert_eq!(with(0.09 * 4.1, 40), [8, 4]);
}

#[test]
fn what_does_not_go_as_asked_is_said() {
    let mut silu = layer(4, vec![]);
    silu.zero_below = false;
    let model = model(vec![layer(4, vec![]), silu.clone(), silu.clone(), layer(4, vec![]), silu]);
    let mut devices = vec![device("npu", 9999, 0.0), device("gpu", 10, 0.0), device("cpu", 9999, 0.0)];
    devices[0].unsupported = vec!["attention: no f16 cache".into(), "rope".into()];
    let devices = hardware(devices);
    let budget = Budget { sparsity: Some(SparsityKind::GateFirst), ..Budget::default() };
    let found = plan(&model, &devices, &budget).unwrap();
    let lines: Vec<String> = found.fallbacks.iter().map(Fallback::to_string).collect();
    assert_eq!(
        lines,
        [
            "device npu: wanted a part of the model, got none, because it cannot run: attention: no f16 cache; rope",
            "attention, embedding and KV cache: wanted gpu, got cpu, because they need 600 bytes and gpu may use 10",
            "blk.1-2, blk.4 ffn on cpu: wanted gate-first, got dense, because its activation is not zero below zero, \
         so skipping by the gate would change the output",
        ]
    );
    assert_eq!(found.layers[0].ffn[0].sparsity, SparsityPolicy::GateFirst);
    let error = plan(&model, &devices, &Budget { strict: true, ..budget }).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { detail } if detail.starts_with("strict = true forbids device npu"))
    );
    for (kind, reason) in [
        (SparsityKind::Predictor, "the model has no predictor for it"),
        (
            SparsityKind::Threshold,
            "the model has no calibrated threshold for it (`thermocline prepare` makes them)",
        ),
        (SparsityKind::Bitplane, "its weights are not in planes (`thermocline prepare` stores them so)"),
    ] {
        let asked = Budget { sparsity: Some(kind), ..Budget::default() };
        assert_eq!(plan(&model, &devices, &asked).unwrap().fallbacks[2].reason, reason);
    }
}

#[test]
fn each_layer_has_its_own_numbers() {
    let policies = [0.1, 0.2].map(|threshold| SparsityPolicy::Bitplane { deviations: 1.0, threshold });
    let layers = policies.map(|policy| LayerProfile { calibrated: vec![policy], ..layer(4, vec![]) });
    let asked = Budget { sparsity: Some(SparsityKind::Bitplane), ..Budget::default() };
    let devices = hardware(vec![device("cpu", 9999, 0.0)]);
    let found = plan(&model(layers.into()), &devices, &asked).unwrap();
    let got: Vec<SparsityPolicy> = found.layers.iter().map(|layer| layer.ffn[0].sparsity).collect();
    assert_eq!(got, policies);
}

#[test]
fn wrong_profiles_are_errors() {
    let good = hardware(vec![device("cpu", 9999, 0.0)]);
    let mut lame = good.clone();
    lame.devices[0].unsupported = vec!["linear in Q3_K".into()];
    for (model, hardware, wanted) in [
        (model(vec![layer(4, vec![0.5; 3])]), &good, "4 neurons and 3 frequencies"),
        (model(vec![layer(2, vec![0.5, f32::NAN])]), &good, "neuron 1 has frequency NaN"),
        (model(vec![]), &hardware(vec![]), "no device"),
        (model(vec![]), &lame, "linear in Q3_K"),
    ] {
        let error = plan(&model, hardware, &Budget::default()).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

fn layers() -> impl Strategy<Value = LayerProfile> {
    (0u64..300, 0u32..40, 1u64..30, any::<bool>(), 0u64..50, any::<bool>()).prop_flat_map(
        |(attention_bytes, neurons, neuron_bytes, zero_below, predictor_bytes, measured)| {
            let count = if measured { neurons as usize } else { 0 };
            prop::collection::vec(0f32..1.0, count).prop_map(move |frequency| LayerProfile {
                attention_bytes,
                neurons,
                neuron_bytes,
                zero_below,
                predictor_bytes,
                frequency,
                calibrated: vec![
                    SparsityPolicy::Predictor { threshold: 0.5 },
                    SparsityPolicy::Threshold { threshold: 0.1 },
                ],
                ..LayerProfile::default()
            })
        },
    )
}

fn devices() -> impl Strategy<Value = Vec<DeviceProfile>> {
    let one = (0u64..4000, prop_oneof![Just(0.0), 10.0..1000.0f64], 0.0..1.0f64, 0u8..8, any::<bool>());
    prop::collection::vec(one, 1..4).prop_map(|devices| {
        let make = |(index, (memory, bandwidth, sync_seconds, lame, sparse))| DeviceProfile {
            sync_seconds,
            sparse,
            unsupported: if lame == 0 { vec!["rope".into()] } else { vec![] },
            ..device(&format!("device {index}"), memory, bandwidth)
        };
        devices.into_iter().enumerate().map(make).collect()
    })
}

/// Bytes that a plan puts on each device.
fn used(plan: &Plan, model: &ModelProfile, budget: &Budget) -> Vec<u64> {
    let mut used = vec![0; plan.devices.len()];
    used[plan.embedding as usize] += model.embedding_bytes + model.kv_bytes + model.activation_bytes;
    for (layer, profile) in plan.layers.iter().zip(&model.layers) {
        used[layer.attention as usize] += profile.attention_bytes;
        if budget.sparsity == Some(SparsityKind::Predictor) {
            used[layer.attention as usize] += profile.predictor_bytes;
        }
        for share in &layer.ffn {
            used[share.device as usize] += u64::from(share.clusters.len()) * profile.neuron_bytes;
        }
    }
    used
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every plan is valid and within the budgets; where there is none, the memory that the error names works.
    #[test]
    fn budgets_are_kept(
        layers in prop::collection::vec(layers(), 0..6),
        devices in devices(),
        asked in 0usize..5,
        strict in any::<bool>(),
    ) {
        let model = model(layers);
        let mut hardware = hardware(devices);
        let sparsity = [
            None,
            Some(SparsityKind::Dense),
            Some(SparsityKind::GateFirst),
            Some(SparsityKind::Predictor),
            Some(SparsityKind::Threshold),
        ][asked];
        let budget = Budget { sparsity, strict, ..Budget::default() };
        let answer = plan(&model, &hardware, &budget);
        prop_assert_eq!(&answer, &plan(&model, &hardware, &budget));
        match answer {
            Ok(plan) => {
                prop_assert!(!strict || plan.fallbacks.is_empty());
                for (used, device) in used(&plan, &model, &budget).iter().zip(&hardware.devices) {
                    prop_assert!(*used <= device.memory_bytes, "{used} bytes on {}", device.name);
                    prop_assert!(*used == 0 || device.unsupported.is_empty());
                }
                let known = plan.layers.iter().flat_map(|l| l.ffn.iter().map(|s| s.device));
                let known = known.chain([plan.embedding]).all(|d| hardware.devices[d as usize].bandwidth > 0.0);
                prop_assert_eq!(plan.predicted_seconds > 0.0, known);
            }
            Err(Error::Infeasible { detail }) => {
                let needed: u64 = detail.split("would need ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
                let last = hardware.devices.iter().rposition(|d| d.unsupported.is_empty()).unwrap();
                prop_assert!(needed > hardware.devices[last].memory_bytes);
                hardware.devices[last].memory_bytes = needed;
                let again = plan(&model, &hardware, &Budget { strict: false, ..budget });
                prop_assert!(again.is_ok(), "{again:?}");
            }
            Err(Error::Unsupported { .. }) => {
                prop_assert!(strict || hardware.devices.iter().all(|d| !d.unsupported.is_empty()));
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
