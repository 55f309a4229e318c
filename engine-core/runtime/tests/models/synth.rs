//! Synthetic models behave as they are said to: activity, its skew, its likeness from token to token, the head's
//! foretelling, and the predictor that is written with them.

use crate::stack::{Outcome, Setup, ensure, show};
use calibration::activity::LayerActivity;
use engine_runtime::{Engine, Observer, SparsityChoice, Wanted};
use formats::model::Activation;
use libtest_mimic::{Failed, Trial};
use std::path::PathBuf;
use synthetic_models::{Shape, activity, sample_ids};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("synth::relu_has_its_statistics", || statistics(Activation::Relu)),
        Trial::test("synth::drelu_has_its_statistics", || statistics(Activation::DRelu)),
        Trial::test("synth::experts_have_their_activity", experts),
        Trial::test("synth::predictor_finds_most_of_what_is_active", predictor),
        Trial::test("synth::bytes_read_are_counted", bytes),
        Trial::test("synth::greedy_text_stays_in_its_topic", topics),
    ]
}

/// A model of this shape in a folder of its own.
pub(crate) fn made(shape: &Shape) -> Result<(tempfile::TempDir, PathBuf), Failed> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    synthetic_models::write(shape, &path, 2, &mut |_| ())?;
    Ok((folder, path))
}

/// What the neurons of a model whose function is zero below zero do with one text.
pub(crate) fn observed(engine: &Engine, ids: &[u32]) -> Result<Vec<LayerActivity>, libtest_mimic::Failed> {
    let layers = &engine.model().layers;
    let mut seen: Vec<LayerActivity> =
        layers.iter().map(|layer| LayerActivity::new(layer.ffn.n_ff)).collect();
    let wanted = Wanted { hidden: true, ..Wanted::default() };
    Observer::new(engine, wanted)?.run(ids, &mut |layer, rows| seen[layer].see(rows.hidden, true))?;
    Ok(seen)
}

fn statistics(function: Activation) -> Outcome {
    let shape = Shape { activation: function, ..Shape::preset("tiny")? };
    let (_folder, path) = made(&shape)?;
    let engine = Setup { context: 512, ..Setup::on("cpu") }.load(&path)?;
    let layers = observed(&engine, &sample_ids(&shape, 9, 512))?;
    for (index, layer) in layers.iter().enumerate() {
        let (active, hottest, overlap) = (layer.active(), layer.hottest(), layer.overlap());
        show(|| format!("{} {index}: {active:.4} {hottest:.4} {overlap:.4}", function.name()));
        let within = |what: &str, found: f64, wanted: f64, off: f64| {
            ensure((found - wanted).abs() <= off, || {
                format!("layer {index}: {what} {found:.3}, not {wanted} +- {off}")
            })
        };
        within("active", active, activity::ACTIVE, 0.02)?;
        within("part of the hottest", hottest, activity::HOTTEST_PART, 0.05)?;
        within("overlap", overlap, activity::OVERLAP, 0.06)?;
    }
    Ok(())
}

fn experts() -> Outcome {
    let shape = Shape::preset("tiny-moe")?;
    let (_folder, path) = made(&shape)?;
    let mut session = Setup { count_active: true, ..Setup::on("cpu") }.load(&path)?.session()?;
    for id in sample_ids(&shape, 9, 200) {
        session.decode(id)?;
    }
    let shares = session.statistics().active_neurons;
    ensure(shares.len() == 2 && shares.iter().all(|share| (share - activity::ACTIVE).abs() < 0.03), || {
        format!("active: {shares:?}")
    })
}

/// The device's count of bytes is what arithmetic says: all rows of gate, and of up and down those of active neurons.
fn bytes() -> Outcome {
    let shape = Shape::preset("tiny")?;
    let (_folder, path) = made(&shape)?;
    let ids = sample_ids(&shape, 9, 50);
    let row = f64::from(shape.width) / 32.0 * 34.0;
    let neurons = f64::from(shape.layers * shape.hidden);
    for sparsity in [SparsityChoice::Dense, SparsityChoice::GateFirst] {
        let engine = Setup { count_active: true, sparsity, ..Setup::on("cpu") }.load(&path)?;
        let mut session = engine.session()?;
        let before = engine.weight_bytes_read();
        ids.iter().try_for_each(|&id| session.decode(id).map(|_| ()))?;
        let read = engine.weight_bytes_read() - before;
        let found = engine.step_bytes(read as f64 / ids.len() as f64, ids.len() as u32).ffn;
        let active: f64 = session.statistics().active_neurons.iter().sum::<f64>() * f64::from(shape.hidden);
        let wanted = match sparsity {
            SparsityChoice::Dense => 3.0 * neurons * row,
            _ => (neurons + 2.0 * active) * row,
        };
        ensure((found / wanted - 1.0).abs() < 1e-9, || format!("{sparsity:?}: {found} bytes, not {wanted}"))?;
    }
    Ok(())
}

/// The predictor lets through more neurons than are active, misses few of them, and so changes logits a little.
fn predictor() -> Outcome {
    let shape = Shape::preset("tiny")?;
    let (_folder, path) = made(&shape)?;
    let setup = Setup { count_active: true, ..Setup::on("cpu") };
    let mut dense = setup.load(&path)?.session()?;
    let mut sparse = Setup { sparsity: SparsityChoice::Predictor, ..setup }.load(&path)?.session()?;
    let mut same = 0;
    let ids = sample_ids(&shape, 9, 200);
    let best = |logits: &[f32]| (0..logits.len()).fold(0, |b, i| if logits[i] > logits[b] { i } else { b });
    for &id in &ids {
        same += usize::from(best(dense.decode(id)?) == best(sparse.decode(id)?));
    }
    let mean = |shares: Vec<f64>| shares.iter().sum::<f64>() / shares.len() as f64;
    let kept = mean(sparse.statistics().active_neurons) / mean(dense.statistics().active_neurons);
    show(|| format!("predictor: {kept:.3} of the active neurons, {same} of {} alike", ids.len()));
    ensure(kept > 0.9 && kept < 1.0, || format!("{kept:.3} of the active neurons are kept"))?;
    ensure(same * 100 >= ids.len() * 85, || format!("{same} of {} best ids are the same", ids.len()))
}

fn topics() -> Outcome {
    let shape = Shape::preset("tiny")?;
    let (_folder, path) = made(&shape)?;
    let mut session = Setup::on("cpu").load(&path)?.session()?;
    let (mut id, mut stays) = (700u32, 0);
    for _ in 0..100 {
        let logits = session.decode(id)?;
        let next = (0..logits.len()).fold(0, |b, i| if logits[i] > logits[b] { i } else { b }) as u32;
        stays += u32::from(next / 64 == id / 64);
        id = next;
    }
    ensure(stays >= 90, || format!("only {stays} of 100 ids follow one of their topic"))
}
