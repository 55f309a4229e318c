//! Exact skipping is exact on prepared files: gate-first gives the bits of dense, whatever the type, the number of
//! threads and the batch, and rows that are not selected may hold anything.

use crate::stack::{Outcome, Setup, ensure, shared, story, trial_with};
use crate::synth::{made, observed};
use calibration::activity::LayerActivity;
use engine_core::DType;
use engine_runtime::{Activations, Observer, SparsityChoice, Wanted};
use formats::convert::{self, Neurons, Options, Types, WriteOptions};
use formats::gguf::{GgufFile, GgufWriter};
use libtest_mimic::{Failed, Trial};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use synthetic_models::{Shape, sample_ids};

const LEGACY: [DType; 6] = [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1];
/// Ids that every model here has.
const IDS: [u32; 10] = [5, 431, 300, 301, 17, 511, 44, 300, 2, 90];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for dtype in LEGACY {
        trials.push(Trial::test(format!("exact::relu::{dtype}"), move || gate_first(&story(), dtype)));
        let drelu = shared("smol-drelu-135m-q8_0.gguf");
        let run = {
            let drelu = drelu.clone();
            move || gate_first(&drelu, dtype)
        };
        trials.push(trial_with(format!("exact::drelu::{dtype}"), &[drelu], run));
    }
    for dtype in [DType::Q4K, DType::Q6K, DType::Q8_0] {
        let run = move || gate_first(&made(&Shape { dtype, ..Shape::preset("wide")? })?.1, dtype);
        trials.push(Trial::test(format!("exact::wide::{dtype}"), run));
    }
    for dtype in [DType::F16, DType::Q8_0, DType::Q4_0] {
        let run = move || poisoned_by_gate(dtype);
        trials.push(Trial::test(format!("exact::poisoned_by_gate::{dtype}"), run));
    }
    trials.push(Trial::test("exact::poisoned_by_gate::Q4_K", || poisoned_by_gate(DType::Q4K)));
    trials.push(Trial::test("exact::poisoned_by_predictor", poisoned_by_predictor));
    trials
}

/// Logits after each of the ids, as bits; -0 as +0.
pub(crate) type Bits = Vec<Vec<u32>>;

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| (logit + 0.0).to_bits()).collect()
}

/// All ids in batches.
pub(crate) fn scored(setup: Setup, path: &Path, ids: &[u32]) -> Result<Bits, Failed> {
    let mut rows = Vec::new();
    setup.load(path)?.session()?.score(ids, &mut |_, logits| rows.push(bits(logits)))?;
    Ok(rows)
}

/// One id after the other.
pub(crate) fn decoded(setup: Setup, path: &Path, ids: &[u32]) -> Result<Bits, Failed> {
    let mut session = setup.load(path)?.session()?;
    ids.iter().map(|&id| Ok(bits(session.decode(id)?))).collect()
}

/// Writes `source` as `thermocline prepare` does, its matrices in another type: neurons by how often [`IDS`] make them
/// active, `down` with a row per neuron.
fn prepared(source: &Path, dtype: DType, target: &Path) -> Outcome {
    let file = GgufFile::open(source)?;
    let engine = Setup { context: 64, ..Setup::on("cpu") }.load(source)?;
    let seen = observed(&engine, &IDS)?;
    let neurons = |layer: &LayerActivity| {
        let (order, frequency) = (layer.order(), layer.frequency());
        let frequency = order.iter().map(|&i| frequency[i as usize]).collect();
        Neurons { frequency, order, ..Neurons::default() }
    };
    let types = Types { matrices: Some(dtype), head: Some(DType::Q8_0), embedding: Some(DType::Q8_0) };
    let options = Options { types, neurons: Some(seen.iter().map(neurons).collect()), ..Options::default() };
    let output = convert::plan(&file, &options)?;
    let write = WriteOptions { threads: 2, force: false };
    output.write(target, &write, &mut |_, _| (), &AtomicBool::new(false))?;
    Ok(())
}

fn gate_first(source: &Path, dtype: DType) -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("prepared.gguf");
    prepared(source, dtype, &path)?;
    let stored = GgufFile::open(&path)?;
    let of_type =
        stored.tensors().iter().filter(|tensor| tensor.name.contains("ffn_")).any(|t| t.dtype == dtype);
    ensure(of_type, || format!("nothing is stored as {dtype}"))?;
    let base = Setup { context: 64, ..Setup::on("cpu") };
    // What is not quantised meets f32 either way.
    let both = [Activations::Int8, Activations::F32];
    for &activations in if dtype.is_quantised() { &both[..] } else { &both[..1] } {
        let dense = Setup { activations, sparsity: SparsityChoice::Dense, ..base };
        let sparse = Setup { sparsity: SparsityChoice::GateFirst, count_active: true, ..dense };
        let wanted = decoded(dense, &path, &IDS)?;
        let name = activations.name();
        for threads in [1, 2] {
            let found = decoded(Setup { threads, ..sparse }, &path, &IDS)?;
            ensure(found == wanted, || format!("gate-first changes logits: {threads} threads, {name}"))?;
        }
        let found = scored(Setup { batch: 3, ..sparse }, &path, &IDS)?;
        ensure(found == wanted, || format!("batches of 3 change logits ({name})"))?;
    }
    Ok(())
}

/// A copy of a file with some rows of some tensors replaced: `change(tensor, its bytes, bytes of a row)`.
pub(crate) fn changed(
    source: &Path,
    target: &Path,
    change: &mut dyn FnMut(&str, &mut [u8], usize),
) -> Outcome {
    let file = GgufFile::open(source)?;
    let mut writer = GgufWriter::copy_of(&file);
    for tensor in file.tensors() {
        let mut bytes = file.tensor_bytes(tensor).to_vec();
        let row = tensor.dtype.row_bytes(tensor.row_elements()).unwrap_or(1) as usize;
        change(&tensor.name, &mut bytes, row);
        writer.tensor(&tensor.name, tensor.dtype, &tensor.dims, bytes)?;
    }
    writer.write(target)?;
    Ok(())
}

/// Bytes of 0xff are NaN in every float type, and NaN scales in every block type.
pub(crate) fn poison(bytes: &mut [u8], row: usize, at: usize) {
    bytes[at * row..(at + 1) * row].fill(0xff);
}

/// Rows of up and down whose gate is never positive are not looked at.
fn poisoned_by_gate(dtype: DType) -> Outcome {
    let source = match dtype {
        DType::Q4K => None,
        _ => Some(story()),
    };
    let wide = made(&Shape { dtype: DType::Q8_0, ..Shape::preset("wide")? })?;
    let source = source.unwrap_or_else(|| wide.1.clone());
    let folder = tempfile::tempdir()?;
    let (clean, bad) = (folder.path().join("clean.gguf"), folder.path().join("bad.gguf"));
    prepared(&source, dtype, &clean)?;
    let base = Setup { context: 64, activations: Activations::Int8, ..Setup::on("cpu") };
    let engine = base.load(&clean)?;
    let mut off: Vec<Vec<bool>> =
        engine.model().layers.iter().map(|layer| vec![true; layer.ffn.n_ff]).collect();
    let wanted = Wanted { hidden: true, ..Wanted::default() };
    Observer::new(&engine, wanted)?.run(&IDS, &mut |layer, rows| {
        for row in rows.hidden.chunks_exact(off[layer].len()) {
            off[layer].iter_mut().zip(row).for_each(|(off, h)| *off &= *h == 0.0);
        }
    })?;
    let mut poisoned = 0;
    changed(&clean, &bad, &mut |name, bytes, row| {
        let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            return;
        };
        if !matches!(part, "ffn_up.weight" | "ffn_down_t.weight") {
            return;
        }
        let off = layer.parse().ok().and_then(|layer: usize| off.get(layer));
        for (at, _) in off.into_iter().flatten().enumerate().filter(|(_, off)| **off) {
            poison(bytes, row, at);
            poisoned += 1;
        }
    })?;
    ensure(poisoned > 200, || format!("only {poisoned} rows are never selected"))?;
    let dense = decoded(base, &clean, &IDS)?;
    for threads in [1, 2] {
        let sparse = Setup { threads, sparsity: SparsityChoice::GateFirst, ..base };
        let found = decoded(sparse, &bad, &IDS)?;
        ensure(found == dense, || format!("{threads} threads: rows that are not selected change logits"))?;
    }
    ensure(base.load(&bad)?.session()?.prefill(&IDS).is_err(), || {
        "dense does not see NaN: nothing was tested".into()
    })
}

/// Rows of gate, up and down that the predictor never selects are not looked at. Every fourth neuron is made one: its
/// row of `fc2` is negative throughout, and what `fc1` gives is not.
fn poisoned_by_predictor() -> Outcome {
    let (folder, source): (_, PathBuf) = made(&Shape::preset("tiny")?)?;
    let (clean, bad) = (folder.path().join("clean.gguf"), folder.path().join("bad.gguf"));
    let negative = |name: &str, bytes: &mut [u8], row: usize| {
        if name.ends_with("fc2.weight") {
            for at in (0..bytes.len() / row).step_by(4) {
                // Q8_0: a scale of 1, codes of -1.
                for block in bytes[at * row..(at + 1) * row].chunks_exact_mut(34) {
                    block.fill(0xff);
                    block[..2].copy_from_slice(&0x3c00u16.to_le_bytes());
                }
            }
        }
    };
    changed(&source, &clean, &mut |name, bytes, row| negative(name, bytes, row))?;
    changed(&source, &bad, &mut |name, bytes, row| {
        negative(name, bytes, row);
        if ["ffn_gate.weight", "ffn_up.weight", "ffn_down_t.weight"].iter().any(|part| name.ends_with(part)) {
            (0..bytes.len() / row).step_by(4).for_each(|at| poison(bytes, row, at));
        }
    })?;
    let ids = sample_ids(&Shape::preset("tiny")?, 3, 10);
    for threads in [1, 2] {
        let setup = Setup { threads, sparsity: SparsityChoice::Predictor, ..Setup::on("cpu") };
        let wanted = decoded(setup, &clean, &ids)?;
        ensure(decoded(setup, &bad, &ids)? == wanted, || "poisoned rows change logits by decoding".into())?;
        let batches = Setup { batch: 4, ..setup };
        ensure(scored(batches, &bad, &ids)? == scored(batches, &clean, &ids)?, || "so in batches".into())?;
    }
    Ok(())
}
