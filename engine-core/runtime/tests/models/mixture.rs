//! The seeded tiny mixture with ReLU experts, end to end: against the oracle, exact skipping, experts that are not used.

use crate::exact::{changed, decoded, poison, scored};
use crate::stack::{Outcome, Setup, ensure, show};
use crate::synth::made;
use engine_core::DType;
use engine_runtime::{Activations, SparsityChoice};
use libtest_mimic::{Failed, Trial};
use std::path::Path;
use synthetic_models::{Shape, sample_ids};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = vec![
        Trial::test("mixture::greedy_ids_are_the_oracles", greedy),
        Trial::test("mixture::unused_experts_may_hold_anything", unused),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q4K] {
        trials.push(Trial::test(format!("mixture::gate_first_is_dense::{dtype}"), move || gate_first(dtype)));
    }
    trials
}

/// Greedy ids and the logits that chose them.
fn generated(setup: Setup, path: &Path) -> Result<(Vec<u32>, Vec<Vec<f32>>), Failed> {
    let mut session = setup.load(path)?.session()?;
    let (mut ids, mut rows) = (vec![300u32], Vec::new());
    for _ in 0..24 {
        let logits = session.decode(ids[ids.len() - 1])?;
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        rows.push(logits.to_vec());
        ids.push(best as u32);
    }
    Ok((ids, rows))
}

fn greedy() -> Outcome {
    let (_folder, path) = made(&Shape::preset("tiny-moe")?)?;
    let setup = Setup { activations: Activations::F32, ..Setup::on("cpu") };
    let (wanted, oracle) = generated(Setup { device: "reference", ..setup }, &path)?;
    ensure(wanted[1..].windows(2).any(|pair| pair[0] != pair[1]), || {
        format!("it says one thing: {wanted:?}")
    })?;
    for sparsity in [SparsityChoice::Dense, SparsityChoice::GateFirst] {
        let (ids, rows) = generated(Setup { sparsity, ..setup }, &path)?;
        ensure(ids == wanted, || format!("{sparsity:?}: {ids:?}, not {wanted:?}"))?;
        let largest = oracle.iter().flatten().fold(0f32, |most, logit| most.max(logit.abs()));
        let apart = rows.iter().flatten().zip(oracle.iter().flatten());
        let apart = apart.map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        show(|| format!("mixture, {sparsity:?}: {apart:.2e} of {largest:.2}"));
        ensure(apart <= 1e-4 * largest, || format!("logits differ by {apart} of {largest}"))?;
    }
    Ok(())
}

fn gate_first(dtype: DType) -> Outcome {
    let shape = Shape { dtype, ..Shape::preset("tiny-moe")? };
    let (_folder, path) = made(&shape)?;
    let ids = sample_ids(&shape, 3, 12);
    for activations in [Activations::F32, Activations::Int8] {
        let dense = Setup { activations, ..Setup::on("cpu") };
        let wanted = decoded(dense, &path, &ids)?;
        for threads in [1, 2] {
            let sparse = Setup { threads, sparsity: SparsityChoice::GateFirst, ..dense };
            ensure(decoded(sparse, &path, &ids)? == wanted, || format!("gate-first, {threads} threads"))?;
            ensure(scored(Setup { batch: 5, ..sparse }, &path, &ids)? == wanted, || "batches of 5".into())?;
        }
    }
    Ok(())
}

/// A token uses two of eight experts: any of the six others may hold NaN throughout, and no more than six.
fn unused() -> Outcome {
    let shape = Shape::preset("tiny-moe")?;
    let (folder, path) = made(&shape)?;
    let setup = Setup { sparsity: SparsityChoice::GateFirst, ..Setup::on("cpu") };
    let wanted = decoded(setup, &path, &[300])?;
    let hidden = shape.hidden as usize;
    let mut same = 0;
    for expert in 0..8 {
        let bad = folder.path().join(format!("bad-{expert}.gguf"));
        changed(&path, &bad, &mut |name, bytes, row| {
            if name.starts_with("blk.1.ffn_") && name.ends_with("_exps.weight") {
                (expert * hidden..(expert + 1) * hidden).for_each(|at| poison(bytes, row, at));
            }
        })?;
        // A used one makes logits that are no numbers, which is an error.
        if let Ok(found) = decoded(setup, &bad, &[300]) {
            ensure(found == wanted, || format!("expert {expert} of layer 1 changes logits"))?;
            same += 1;
        }
    }
    ensure(same == 6, || format!("{same} of 8 experts are not used"))
}
