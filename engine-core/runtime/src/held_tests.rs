//! Plans against what was asked, and what fits against what a device may hold.

use crate::fakes::{FakeCache, FakeDevice, FakePlanner, FakeTier, load_planned, story};
use crate::{Engine, EngineOptions, RuntimeError, SparsityChoice, Stack};
use engine_core::backend::DeviceDescription;
use engine_core::planner::{Budget, HardwareProfile, ModelProfile, Plan, SparsityPolicy};
use engine_core::{Error, Planner};
use std::sync::Arc;

fn options(sparsity: SparsityChoice) -> EngineOptions {
    EngineOptions { context: 32, batch: 8, sparsity, ..EngineOptions::default() }
}

fn planned(change: fn(&mut Plan, &Budget), options: EngineOptions) -> crate::Result<Engine> {
    load_planned(&Arc::new(FakeDevice::new()), FakePlanner(change), options)
}

fn refusal(result: crate::Result<Engine>) -> String {
    let error = result.err().expect("an error");
    assert!(matches!(error, RuntimeError::Plan { .. } | RuntimeError::Strict { .. }), "{error}");
    error.to_string()
}

#[test]
fn what_changes_the_output_must_be_asked_for() {
    let predicts: fn(&mut Plan, &Budget) =
        |plan, _| plan.layers[5].ffn[0].sparsity = SparsityPolicy::Predictor { threshold: 0.5 };
    let skips: fn(&mut Plan, &Budget) =
        |plan, _| plan.layers[5].ffn[0].sparsity = SparsityPolicy::Threshold { threshold: 0.5 };
    for choice in [SparsityChoice::Auto, SparsityChoice::Dense, SparsityChoice::GateFirst] {
        for (change, name) in [(predicts, "predictor (threshold 0.5)"), (skips, "threshold (0.5)")] {
            let text = refusal(planned(change, options(choice)));
            for part in ["`fake-planner`", "layer 5", name, "changes the output", "[planner] sparsity"] {
                assert!(text.contains(part), "{choice:?}: {text}");
            }
        }
    }
    // By the model's own threshold it was asked for, by another one it was not.
    let text = refusal(planned(predicts, options(SparsityChoice::Predictor)));
    assert!(text.contains("where predictor (threshold"), "{text}");
    planned(|_, _| (), options(SparsityChoice::Predictor)).unwrap();
    planned(skips, options(SparsityChoice::Threshold(Some(0.5)))).unwrap();
    refusal(planned(skips, options(SparsityChoice::Threshold(Some(0.4)))));
}

#[test]
fn what_is_exact_but_not_as_asked_is_a_fallback() {
    let dense: fn(&mut Plan, &Budget) = |plan, _| {
        plan.layers[2].ffn[0].sparsity = SparsityPolicy::Dense;
        plan.layers[6].ffn[0].sparsity = SparsityPolicy::Dense;
    };
    let engine = planned(dense, options(SparsityChoice::GateFirst)).unwrap();
    let [fallback] = &engine.plan().fallbacks[..] else { panic!("{:?}", engine.plan().fallbacks) };
    assert_eq!(
        fallback.to_string(),
        "blk.2-6 ffn: wanted gate-first, got dense, because planner `fake-planner` decided so, and does not say why"
    );
    let strict = EngineOptions { strict: true, ..options(SparsityChoice::GateFirst) };
    let text = refusal(planned(dense, strict.clone()));
    assert!(text.contains("strict") && text.contains("wanted gate-first, got dense"), "{text}");
    planned(|_, _| (), strict).unwrap();
    // Under auto every exact choice is as asked.
    let auto = EngineOptions { strict: true, ..options(SparsityChoice::Auto) };
    planned(|plan, _| plan.layers[2].ffn[0].sparsity = SparsityPolicy::GateFirst, auto).unwrap();
}

#[test]
fn the_share_of_hot_neurons_is_as_asked_or_told() {
    let hot = |hot| EngineOptions { hot: Some(hot), ..options(SparsityChoice::Auto) };
    let told = |change: fn(&mut Plan, &Budget), share| {
        let engine = planned(change, hot(share)).unwrap();
        engine.plan().fallbacks.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    // The fake planner puts every neuron on the first of two devices.
    let more = told(|_, _| (), 0.3);
    assert!(
        more.len() == 1 && more[0].contains("blk.0-7 ffn: wanted hot = 0.3, got a greater share"),
        "{more:?}"
    );
    assert!(told(|_, _| (), 1.0).is_empty());
    let cold: fn(&mut Plan, &Budget) =
        |plan, _| plan.layers.iter_mut().for_each(|layer| layer.ffn[0].device = 1);
    let none = told(cold, 0.3);
    assert!(none.len() == 1 && none[0].contains("wanted hot = 0.3, got every neuron on second"), "{none:?}");
    assert!(told(cold, 0.0).is_empty());
}

#[test]
fn a_plan_for_other_hardware_is_refused() {
    let text = refusal(planned(|plan, _| plan.hardware_hash = "other".into(), options(SparsityChoice::Auto)));
    assert!(text.contains("it is for hardware other, not fnv1a-"), "{text}");
}

/// Counts as planners do: every weight, the cache and the activations, on the first device.
struct Counting;

impl Planner for Counting {
    fn plan(
        &self,
        model: &ModelProfile,
        hardware: &HardwareProfile,
        budget: &Budget,
    ) -> engine_core::Result<Plan> {
        let layers = model.layers.iter();
        let layers: u64 = layers.map(|l| l.attention_bytes + l.neuron_bytes * u64::from(l.neurons)).sum();
        let needed = model.embedding_bytes + model.kv_bytes + model.activation_bytes + layers;
        match hardware.devices[0].memory_bytes {
            may_use if needed > may_use => {
                Err(Error::infeasible(format!("needs {needed} bytes, may use {may_use}")))
            }
            _ => FakePlanner(|_, _| ()).plan(model, hardware, budget),
        }
    }
}

fn counted(change: impl FnOnce(&mut DeviceDescription), context: u32) -> crate::Result<Engine> {
    let stack = Stack {
        compute: vec![("first".into(), Arc::new(FakeDevice::describing(change)) as _)],
        storage: Arc::new(FakeTier::new(&story(), true)),
        cache: Box::new(FakeCache),
        planner: Arc::new(Counting),
    };
    Engine::load(story(), stack, EngineOptions { context, ..options(SparsityChoice::Auto) })
}

/// The model has 9 MiB of weights; what is neither weight nor cache of 32 positions takes less than one.
#[test]
fn weights_that_a_device_views_are_no_part_of_its_limit() {
    const LIMIT: u64 = 2 << 20;
    counted(|device| device.memory_bytes = LIMIT, 32).unwrap();
    let copies = |device: &mut DeviceDescription| {
        device.memory_bytes = LIMIT;
        device.imports_host_memory = false;
    };
    assert!(refusal(counted(copies, 32)).contains("may use 2097152"));
    // A file is viewed whole or not at all, and where its tensors start is where they start.
    let small = |device: &mut DeviceDescription| {
        device.memory_bytes = LIMIT;
        device.max_buffer_bytes = 1 << 20;
    };
    assert!(refusal(counted(small, 32)).contains("may use 2097152"));
    let aligned = |device: &mut DeviceDescription| {
        device.memory_bytes = LIMIT;
        device.alignment = 1 << 20;
    };
    refusal(counted(aligned, 32));
    counted(|device| device.memory_bytes = 20 << 20, 32).unwrap();
}

#[test]
fn a_context_that_is_too_long_names_its_remedy() {
    let text = refusal(counted(|device| device.memory_bytes = 2 << 20, 4096));
    for part in ["the KV cache of 4096 positions takes", "--context", "[runtime] context"] {
        assert!(text.contains(part), "{text}");
    }
}

/// What no tensor can hold is refused for its key, before a list is made of it.
#[test]
fn a_cache_that_cannot_be_is_a_matter_of_the_context() {
    let file = formats::GgufFile::open(story()).unwrap();
    let mut model = formats::ModelDescription::from_gguf(&file).unwrap();
    assert_eq!(crate::held::cache_problem(&model, 1 << 24), None);
    let attention = &mut model.layers[3].attention;
    (attention.n_head_kv, attention.head_dim, attention.value_dim) = (8, 128, 128);
    assert_eq!(crate::held::cache_problem(&model, 1 << 29), None);
    let problem = crate::held::cache_problem(&model, (1 << 29) + 1).unwrap();
    for part in ["is 536870913", "the model's own is 256", "at most 536870912 positions", "--context"] {
        assert!(problem.contains(part), "{problem}");
    }
}
