//! Logits and greedy ids of the f32 reference that came with the models.

use crate::stack::{Outcome, Setup, ensure, on_vulkan, shared, show, story, trial_with};
use engine_runtime::{Activations, Engine, Session, SparsityChoice};
use libtest_mimic::{Failed, Trial};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Largest difference allowed, as a share of the largest logit. f32 differs by the f16 KV cache and the order of sums;
/// int8 by the activations' rounding. Measured on the cpu (SHOW_DISTANCES=1 prints it), the ten logits and what a greedy
/// id is short of: story model f32 1.3e-4 and 0, int8 3.7e-3 and 5.7e-4; 135M model f32 5.4e-5 and 0, int8 9.1e-3 and
/// 5.5e-3.
pub(crate) fn limit(activations: Activations) -> f64 {
    match activations {
        Activations::F32 => 1e-3,
        Activations::Int8 => 2e-2,
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let story_reference = "reference-tiny-story-9m.json";
    let models: [(&str, PathBuf, &str); 3] = [
        ("story", story(), story_reference),
        ("story-pwri", shared("tiny-story-9m-f16.powerinfer.gguf"), story_reference),
        ("drelu-135m", shared("smol-drelu-135m-q8_0.gguf"), "reference-smol-drelu-135m.json"),
    ];
    let mut trials = Vec::new();
    for (name, model, reference) in models {
        let reference = shared(reference);
        let mut add = |setup: Setup| {
            let policy = match setup.sparsity {
                SparsityChoice::GateFirst => "gate-first",
                _ => "dense",
            };
            let trial =
                format!("reference::{name}::{}::{}::{policy}", setup.device, setup.activations.name());
            let files = [model.clone(), reference.clone()];
            let (model, reference) = (model.clone(), reference.clone());
            trials.push(trial_with(trial, &files, move || follows(setup, &model, &reference)));
        };
        for activations in [Activations::F32, Activations::Int8] {
            for sparsity in [SparsityChoice::Dense, SparsityChoice::GateFirst] {
                add(Setup { activations, sparsity, ..Setup::on("cpu") });
            }
        }
        if name != "drelu-135m" {
            add(Setup::on("reference")); // the oracle takes minutes for the larger one
        }
    }
    let reference = shared(story_reference);
    if reference.is_file() {
        for activations in [Activations::F32, Activations::Int8] {
            for sparsity in [SparsityChoice::Dense, SparsityChoice::GateFirst] {
                let setup = Setup { activations, sparsity, ..Setup::on("vulkan") };
                let policy = if sparsity == SparsityChoice::Dense { "dense" } else { "gate-first" };
                let name = format!("reference::story::vulkan::{}::{policy}", activations.name());
                let reference = reference.clone();
                trials.push(on_vulkan(name, move || follows(setup, &story(), &reference)));
            }
        }
    }
    trials
}

fn follows(setup: Setup, model: &Path, reference: &Path) -> Outcome {
    let engine = setup.load(model)?;
    let (logits, greedy) = follows_on(&engine, limit(setup.activations), reference)?;
    let (path, device, activations) = (model.display(), setup.device, setup.activations.name());
    show(|| format!("{path} {device} {activations}: logits {logits:.1e}, greedy {greedy:.1e}"));
    Ok(())
}

/// Holds an engine to a reference at every step; returns the largest differences of the ten logits, and of what a greedy
/// id is short of, as shares of the largest logit.
pub(crate) fn follows_on(engine: &Engine, limit: f64, reference: &Path) -> Result<(f64, f64), Failed> {
    let mut worst = (0.0f64, 0.0f64);
    let text = std::fs::read_to_string(reference)?;
    let reference: Value = serde_json::from_str(&text)?;
    for prompt in reference["prompts"].as_array().ok_or("no prompts in the reference")? {
        let mut session = engine.session()?;
        session.prefill(&ids(&prompt["token_ids"])?)?;
        let dense = &prompt["dense"];
        worst.0 = worst.0.max(check_top_ten(&session, &dense["top10"], limit)?);
        for (step, id) in ids(&dense["greedy_ids"])?.into_iter().enumerate() {
            let logits = session.logits();
            let largest = logits.iter().copied().fold(f32::MIN, f32::max);
            let short = f64::from((largest - logits[id as usize]) / largest.abs());
            ensure(short <= limit, || {
                format!("{}: step {step}: id {id} is {short:.2e} under the largest", prompt["prompt"])
            })?;
            worst.1 = worst.1.max(short);
            session.decode(id)?;
        }
    }
    Ok(worst)
}

/// The largest difference, as a share of the largest logit.
fn check_top_ten(session: &Session, top: &Value, limit: f64) -> Result<f64, Failed> {
    let mut worst = 0.0f64;
    let top = top.as_array().ok_or("no top10 in the reference")?;
    let number = |value: &Value| value.as_f64().ok_or("no number in the reference");
    let largest = number(&top[0][1])?.abs();
    for pair in top {
        let (id, wanted) = (number(&pair[0])? as usize, number(&pair[1])?);
        let found = f64::from(session.logits()[id]);
        ensure((found - wanted).abs() <= limit * largest, || {
            format!("logit of {id}: {found}, wanted {wanted}")
        })?;
        worst = worst.max((found - wanted).abs() / largest);
    }
    Ok(worst)
}

fn ids(value: &Value) -> Result<Vec<u32>, Failed> {
    let ids = value.as_array().ok_or("no ids in the reference")?;
    ids.iter().map(|id| Ok(id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or("no id")?)).collect()
}
