//! Plans of small models, and the promises for any model.

use super::*;
use engine_core::ClusterSet;
use engine_core::planner::{DeviceProfile, LayerProfile, Part};
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
            "attention, embedding and KV cache: wanted gpu, got cpu, because gpu has no memory left for the \
         600 bytes that they need",
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

/// Two layers of 8 neurons: 100 + 2 * 100 bytes beside them, 10 each.
fn two() -> ModelProfile {
    model(vec![layer(8, (0..8).map(|at| 1.0 - at as f32 / 8.0).collect()); 2])
}

fn pair(first: u64) -> HardwareProfile {
    hardware(vec![device("gpu", first, 0.0), device("cpu", 9999, 0.0)])
}

#[test]
fn a_share_that_was_asked_for_is_kept_in_every_layer() {
    let hot = |hot| {
        let budget = Budget { hot: Some(hot), ..Budget::default() };
        let found = plan(&two(), &pair(9999), &budget).unwrap();
        let of =
            |at: usize| found.layers[at].ffn.iter().find(|s| s.device == 0).map_or(0, |s| s.clusters.len());
        (of(0), of(1))
    };
    assert_eq!((hot(0.0), hot(0.05), hot(0.5), hot(0.6), hot(1.0)), ((0, 0), (0, 0), (4, 4), (4, 4), (8, 8)));
    let budget = Budget { hot: Some(0.5), ..Budget::default() };
    let found = plan(&two(), &pair(9999), &budget).unwrap();
    let shares: Vec<(u32, &ClusterSet, SparsityPolicy)> =
        found.layers[1].ffn.iter().map(|share| (share.device, &share.clusters, share.sparsity)).collect();
    let (first, rest) = (set(&[(0, 4)]), set(&[(4, 8)]));
    assert_eq!(shares, [(0, &first, SparsityPolicy::Dense), (1, &rest, SparsityPolicy::GateFirst)]);
    assert!(found.notes.is_empty() && found.fallbacks.is_empty(), "{:?} {:?}", found.notes, found.fallbacks);
    // Batches are dense on the device with the hot neurons, which has memory for all.
    let prefill = found.layers[1].prefill.as_ref().unwrap();
    assert_eq!((prefill.attention, prefill.projections, prefill.ffn.len()), (0, 0, 1));
    assert_eq!((prefill.ffn[0].device, &prefill.ffn[0].clusters), (0, &ClusterSet::all(8)));
    assert_eq!(found.requires, [FEATURE_PREFILL]);
    // With memory for the hot neurons alone, batches are divided as single tokens are.
    let found = plan(&two(), &pair(300 + 80), &Budget::default()).unwrap();
    assert_eq!(found.layers[0].ffn.len(), 2);
    assert!(found.layers.iter().all(|layer| layer.prefill.is_none()) && found.requires.is_empty());
}

#[test]
fn what_is_taken_for_hot_without_measurements_is_said() {
    let budget = Budget { hot: Some(0.5), ..Budget::default() };
    let notes = |frequency: Vec<f32>| {
        plan(&model(vec![layer(8, frequency); 3]), &pair(9999), &budget).unwrap().notes.join("; ")
    };
    assert!(notes(vec![]).starts_with("blk.0-2: how often neurons fire was not measured"));
    let unsorted = notes(vec![0.1, 0.1, 0.9, 0.9, 0.2, 0.2, 0.8, 0.8]);
    assert!(unsorted.starts_with("blk.0-2: neurons are not sorted"), "{unsorted}");
}

#[test]
fn attention_and_batches_are_where_they_were_asked_for() {
    let asked = Budget {
        hot: Some(0.5),
        attention: Some("cpu".into()),
        prefill: Some("gpu".into()),
        ..Budget::default()
    };
    let found = plan(&two(), &pair(9999), &asked).unwrap();
    assert_eq!((found.embedding, found.layers[0].attention), (1, 1));
    assert_eq!(found.layers[0].prefill.as_ref().unwrap().attention, 0);
    assert!(found.fallbacks.is_empty(), "it is as asked: {:?}", found.fallbacks);
    // What batches need comes before neurons: 2 * 100 + 30 + 20.
    let found = plan(&two(), &pair(250 + 40), &Budget { hot: None, ..asked.clone() }).unwrap();
    let neurons: u32 =
        found.layers.iter().flat_map(|l| &l.ffn).filter(|s| s.device == 0).map(|s| s.clusters.len()).sum();
    assert_eq!((neurons, found.layers[0].prefill.as_ref().unwrap().attention), (4, 0));
    // Without that memory the cache stays where it is, and a line says so.
    let found = plan(&two(), &pair(40), &Budget { hot: None, ..asked.clone() }).unwrap();
    assert_eq!(found.layers[0].prefill.as_ref().unwrap().attention, 1);
    assert!(found.notes[0].contains("`gpu` has no memory for attention"), "{:?}", found.notes);
    let unknown = Budget { attention: Some("npu".into()), ..Budget::default() };
    assert!(plan(&two(), &pair(9999), &unknown).unwrap_err().detail().contains("gpu, cpu"));
    let small = Budget { attention: Some("gpu".into()), ..Budget::default() };
    assert!(matches!(plan(&two(), &pair(299), &small), Err(Error::Infeasible { .. })));
}

#[test]
fn a_device_that_runs_a_part_has_that_part() {
    let mut devices = pair(9999);
    devices.devices[0].unsupported = vec!["attention".into()];
    devices.devices[0].sparse = false;
    devices.devices[0].parts = vec![Part::Ffn];
    let budget = Budget { hot: Some(0.5), attention: Some("cpu".into()), strict: true, ..Budget::default() };
    let found = plan(&two(), &devices, &budget).unwrap();
    let prefill = found.layers[0].prefill.as_ref().unwrap();
    assert_eq!((found.layers[0].attention, prefill.attention, prefill.projections), (1, 1, 1));
    assert_eq!((found.layers[0].ffn.len(), prefill.ffn.len()), (2, 1));
    devices.devices[0].parts.push(Part::Projections);
    let found = plan(&two(), &devices, &budget).unwrap();
    assert_eq!(found.layers[0].prefill.as_ref().unwrap().projections, 0);
    // Where attention was not asked for elsewhere, the first device was wanted for it.
    let found = plan(&two(), &devices, &Budget { attention: None, strict: false, ..budget.clone() }).unwrap();
    assert!(
        found.fallbacks[0].to_string().contains("wanted gpu, got cpu, because gpu cannot run: attention")
    );
    assert!(plan(&two(), &devices, &Budget { attention: None, ..budget.clone() }).is_err());
    let wrong = Budget { attention: Some("gpu".into()), ..budget };
    assert!(plan(&two(), &devices, &wrong).unwrap_err().detail().contains("it cannot run attention"));
}

#[test]
fn mixtures_and_blocks_are_not_cut() {
    let mut profile = two();
    profile.layers[0].whole = true;
    profile.layers[1].block = 4;
    let budget = Budget { hot: Some(0.5), ..Budget::default() };
    let found = plan(&profile, &pair(9999), &budget).unwrap();
    assert_eq!(found.layers[0].ffn.len(), 1);
    assert_eq!(found.layers[1].ffn[0].clusters, set(&[(0, 4)]));
    // Lists of divided layers need memory of their own, which a model on one device does not.
    profile.divided_bytes = 50;
    let found = plan(&profile, &pair(300 + 160), &Budget::default()).unwrap();
    assert_eq!(found.used_devices().len(), 1);
    let found = plan(&profile, &pair(300 + 159), &Budget::default()).unwrap();
    let neurons: u32 =
        found.layers.iter().flat_map(|l| &l.ffn).filter(|s| s.device == 0).map(|s| s.clusters.len()).sum();
    assert!(neurons * 10 <= 59, "{neurons}");
    // Attention fits the first device, what divided layers need beside it does not: then attention is on the other.
    let found = plan(&profile, &pair(300 + 50), &Budget::default()).unwrap();
    assert_eq!(found.embedding, 1);
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
    let predictors = budget.sparsity == Some(SparsityKind::Predictor);
    used[plan.embedding as usize] += model.embedding_bytes + model.kv_bytes + model.activation_bytes;
    let mut batches = std::collections::BTreeSet::new();
    for (layer, profile) in plan.layers.iter().zip(&model.layers) {
        used[layer.attention as usize] += profile.attention_bytes;
        if predictors {
            used[layer.attention as usize] += profile.predictor_bytes;
        }
        for device in layer.devices() {
            let neurons = u64::from(layer.neurons_of(device).unwrap().len());
            used[device as usize] += neurons * profile.neuron_bytes;
        }
        if let Some(prefill) = layer.prefill.as_ref().filter(|prefill| prefill.attention != layer.attention) {
            used[prefill.attention as usize] += profile.attention_bytes;
            batches.insert(prefill.attention);
        }
    }
    batches.into_iter().for_each(|device| used[device as usize] += model.kv_bytes + model.activation_bytes);
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
        hot in prop_oneof![Just(None), (0.0..=1.0f64).prop_map(Some)],
        prefill in prop_oneof![Just(None), Just(Some("device 0".to_owned()))],
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
        let budget = Budget { sparsity, strict, hot, prefill, ..Budget::default() };
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
                let again = plan(&model, &hardware, &Budget { strict: false, ..budget.clone() });
                prop_assert!(again.is_ok(), "{again:?}");
            }
            Err(Error::Unsupported { .. }) => {
                prop_assert!(strict || hardware.devices.iter().all(|d| !d.unsupported.is_empty()));
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
