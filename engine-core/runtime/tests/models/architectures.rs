//! Every architecture against the logits of Hugging Face's library on the tiny models of `fixtures.py`, straight out of
//! safetensors, and out of what can be made of them: other types, files in parts, tensors at odd addresses.

use crate::stack::{Outcome, Setup, ensure, on_vulkan, show};
use engine_core::DType;
use engine_runtime::{Engine, SparsityChoice};
use formats::gguf::{GgufFile, GgufWriter};
use formats::quantise::{dequantise, quantise};
use libtest_mimic::{Failed, Trial};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The fixtures that are run as they are, with the most positions; `opt` learned 64.
const FIXTURES: [(&str, u32); 10] = [
    ("llama", 128),
    ("mistral", 128),
    ("qwen2", 128),
    ("qwen2-yarn", 128),
    ("qwen3", 128),
    ("gemma3", 128),
    ("opt", 64),
    ("falcon", 128),
    ("falcon-new", 128),
    ("bamboo", 128),
];

/// Relative L2 of the logits: the KV cache is f16, and the library's sums are f32.
pub(crate) const LIMIT: f64 = 1e-3;
/// With weights rounded to f16.
pub(crate) const LIMIT_F16: f64 = 1e-2;

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (name, context) in FIXTURES {
        for device in ["cpu", "reference"] {
            let setup = Setup { context, ..Setup::on(device) };
            let mut add = |what: &str, test: fn(Setup, &'static str) -> Outcome| {
                let trial = format!("architectures::{name}::{device}::{what}");
                trials.push(Trial::test(trial, move || test(setup, name)));
            };
            add("as_stored", as_stored);
            add("f16", f16);
            if device == "cpu" {
                add("ways_agree", ways_agree);
                add("in_parts", in_parts);
                add("odd_addresses", odd_addresses);
            }
        }
    }
    for (name, context) in FIXTURES {
        let setup = Setup { context, ..Setup::on("vulkan") };
        let trial = format!("architectures::{name}::vulkan::as_stored");
        trials.push(on_vulkan(trial, move || as_stored(setup, name)));
    }
    for dtype in [DType::Q5_0, DType::Q5_1, DType::IQ4NL, DType::MXFP4] {
        let trial = format!("architectures::types_without_kernels::{dtype}");
        trials.push(Trial::test(trial, move || converted(dtype)));
    }
    trials
}

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The file of a fixture with its weights: its own, or those of the fixture that it is a variant of.
fn weights(name: &str) -> PathBuf {
    const FILE: &str = "model.safetensors";
    let own = folder(name).join(FILE);
    match name.split_once('-') {
        Some((base, _)) if !own.is_file() => folder(base).join(FILE),
        _ => own,
    }
}

/// A folder with the model of a fixture; `tensors` writes its weights.
fn model_with(name: &str, tensors: impl FnOnce(&Path) -> Outcome) -> Result<TempDir, Failed> {
    let target = tempfile::tempdir()?;
    std::fs::copy(folder(name).join("config.json"), target.path().join("config.json"))?;
    tensors(target.path())?;
    Ok(target)
}

fn model(name: &str) -> Result<TempDir, Failed> {
    model_with(name, |target| {
        std::fs::copy(weights(name), target.join("model.safetensors"))?;
        Ok(())
    })
}

/// Ids, and the logits after each.
pub(crate) struct Reference {
    pub(crate) ids: Vec<u32>,
    logits: Vec<Vec<f64>>,
}

pub(crate) fn reference(name: &str) -> Result<Reference, Failed> {
    let text = std::fs::read_to_string(folder(name).join("reference.json"))?;
    let value: Value = serde_json::from_str(&text)?;
    let numbers = |value: &Value| -> Result<Vec<f64>, Failed> {
        let list = value.as_array().ok_or("no list in the reference")?;
        list.iter().map(|number| Ok(number.as_f64().ok_or("no number in the reference")?)).collect()
    };
    let ids = numbers(&value["ids"])?.into_iter().map(|id| id as u32).collect();
    let logits = value["logits"].as_array().ok_or("no logits in the reference")?;
    Ok(Reference { ids, logits: logits.iter().map(numbers).collect::<Result<_, _>>()? })
}

pub(crate) fn scored(engine: &Engine, ids: &[u32]) -> Result<Vec<Vec<f32>>, Failed> {
    let mut found = Vec::new();
    engine.session()?.score(ids, &mut |_, logits| found.push(logits.to_vec()))?;
    Ok(found)
}

/// Relative L2 over all positions, and of the worst one.
pub(crate) fn distances(found: &[Vec<f32>], wanted: &[Vec<f64>]) -> (f64, f64) {
    let of = |rows: &mut dyn Iterator<Item = (&Vec<f32>, &Vec<f64>)>| {
        let (mut difference, mut size) = (0.0, 0.0);
        for (a, b) in rows.flat_map(|(found, wanted)| found.iter().zip(wanted)) {
            difference += (f64::from(*a) - b).powi(2);
            size += b * b;
        }
        (difference / size).sqrt()
    };
    let all = of(&mut found.iter().zip(wanted));
    let worst = found.iter().zip(wanted).map(|row| of(&mut std::iter::once(row))).fold(0.0, f64::max);
    (all, worst)
}

pub(crate) fn follows(setup: Setup, model: &Path, name: &str, limit: f64) -> Outcome {
    let wanted = reference(name)?;
    let found = scored(&setup.load(model)?, &wanted.ids)?;
    let same_shape = found.len() == wanted.logits.len()
        && found.iter().zip(&wanted.logits).all(|(found, wanted)| found.len() == wanted.len());
    ensure(same_shape, || "another number of logits than in the reference".into())?;
    let (all, worst) = distances(&found, &wanted.logits);
    show(|| format!("{name} {}: relative L2 {all:.2e}, worst {worst:.2e}", setup.device));
    ensure(all < limit, || format!("relative L2 {all:.2e}, at the worst position {worst:.2e}"))
}

fn as_stored(setup: Setup, name: &str) -> Outcome {
    follows(setup, model(name)?.path(), name, LIMIT)
}

/// The model as one GGUF file, matrices (not vectors) in another type.
fn rewritten(name: &str, path: &Path, dtype: DType) -> Outcome {
    let folder = model(name)?;
    let file = GgufFile::open(folder.path())?;
    let mut writer = GgufWriter::copy_of(&file);
    for tensor in file.tensors().iter().filter(|tensor| tensor.dims.len() > 1) {
        let mut values = vec![0f32; usize::try_from(tensor.elements())?];
        dequantise(tensor.dtype, file.tensor_bytes(tensor), &mut values)?;
        writer.tensor(&tensor.name, dtype, &tensor.dims, quantise(dtype, &values)?)?;
    }
    writer.write(path)?;
    Ok(())
}

fn f16(setup: Setup, name: &str) -> Outcome {
    let target = tempfile::tempdir()?;
    let path = target.path().join("f16.gguf");
    rewritten(name, &path, DType::F16)?;
    follows(setup, &path, name, LIMIT_F16)
}

/// Threads, batches and the storage tier change no bit; one id at a time gives the same logits as all at once.
fn ways_agree(setup: Setup, name: &str) -> Outcome {
    let ids = reference(name)?.ids;
    let model = model(name)?;
    let wanted = scored(&setup.load(model.path())?, &ids)?;
    let others = [
        ("1 thread", Setup { threads: 1, ..setup }),
        ("batches of 5", Setup { batch: 5, ..setup }),
        ("tier ram", Setup { tier: "ram", ..setup }),
    ];
    for (what, setup) in others {
        ensure(scored(&setup.load(model.path())?, &ids)? == wanted, || format!("{what} changes logits"))?;
    }
    // Skipping neurons that are exactly 0 changes nothing either, where there are such.
    let engine = setup.load(model.path())?;
    let sparse = engine.model().layers.iter().all(|layer| layer.ffn.activation.is_sparse());
    let skipping = if sparse { SparsityChoice::GateFirst } else { SparsityChoice::Dense };
    for sparsity in [SparsityChoice::Dense, skipping] {
        let mut session = Setup { sparsity, ..setup }.load(model.path())?.session()?;
        for (id, wanted) in ids.iter().zip(&wanted) {
            let past = session.past();
            let same = session.decode(*id)? == wanted;
            ensure(same, || format!("decoding ({sparsity:?}) differs at position {past}"))?;
        }
    }
    Ok(())
}

/// A type that the CPU has no kernels for, and the oracle has: what it is converted to gives the same logits.
fn converted(dtype: DType) -> Outcome {
    let folder = model("llama")?;
    let file = GgufFile::open(folder.path())?;
    let mut writer = GgufWriter::copy_of(&file);
    let mut state = 1u32;
    for tensor in file.tensors().iter().filter(|tensor| tensor.dims.len() > 1) {
        let blocks = tensor.elements() / dtype.block_elements();
        let mut bytes = vec![0u8; usize::try_from(blocks * dtype.block_bytes())?];
        for block in bytes.chunks_exact_mut(usize::try_from(dtype.block_bytes())?) {
            for byte in block.iter_mut() {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *byte = (state >> 24) as u8;
            }
            // What is no code: a scale that makes elements of about 0.1.
            match dtype {
                DType::MXFP4 => block[0] = 122,                                 // 2^-5
                DType::Q5_1 => block[..4].copy_from_slice(&[31, 33, 205, 176]), // 0.01, and -0.15 for code 0
                DType::IQ4NL => block[..2].copy_from_slice(&[25, 20]),          // 0.001
                _ => block[..2].copy_from_slice(&[31, 33]),
            }
        }
        writer.tensor(&tensor.name, dtype, &tensor.dims, bytes)?;
    }
    let path = folder.path().join("other.gguf");
    writer.write(&path)?;
    let ids = reference("llama")?.ids;
    ensure(Setup::on("cpu").load(&path).is_err(), || "strict, and converted all the same".into())?;
    let cpu = Setup { strict: false, ..Setup::on("cpu") }.load(&path)?;
    let oracle = Setup::on("reference").load(&path)?;
    let copied = |engine: &Engine| engine.weight_bytes_copied() as f64 / engine.weight_bytes() as f64;
    ensure(copied(&cpu) > 0.9 && copied(&oracle) < 0.1, || {
        format!("the CPU holds {:.2} itself, the oracle {:.2}", copied(&cpu), copied(&oracle))
    })?;
    let exact = |row: &Vec<f32>| row.iter().map(|logit| f64::from(*logit)).collect();
    let wanted: Vec<Vec<f64>> = scored(&oracle, &ids)?.iter().map(exact).collect();
    let size = wanted.iter().flatten().fold(0f64, |most, logit| most.max(logit.abs()));
    ensure(size > 0.1, || format!("the largest logit is {size}: nothing is compared"))?;
    let (all, worst) = distances(&scored(&cpu, &ids)?, &wanted);
    ensure(all < LIMIT, || format!("relative L2 {all:.2e}, at the worst position {worst:.2e}"))
}

/// Tensors of `model.safetensors` with their bytes, in its order.
type Tensors = Vec<(String, Value, Vec<u8>)>;

fn tensors(name: &str) -> Result<Tensors, Failed> {
    let bytes = std::fs::read(weights(name))?;
    let (length, rest) = bytes.split_first_chunk::<8>().ok_or("no safetensors file")?;
    let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length))?);
    let header: serde_json::Map<String, Value> = serde_json::from_slice(header)?;
    let mut tensors = Vec::new();
    for (name, entry) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let at = |index: usize| entry["data_offsets"][index].as_u64().and_then(|at| usize::try_from(at).ok());
        let range = at(0).zip(at(1)).ok_or("no offsets")?;
        tensors.push((name, entry.clone(), data[range.0..range.1].to_vec()));
    }
    Ok(tensors)
}

/// A safetensors file whose data starts at an address that is `odd` bytes off a multiple of 8.
fn write_safetensors(path: &Path, tensors: &[(String, Value, Vec<u8>)], odd: usize) -> Outcome {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, entry, bytes) in tensors {
        let mut entry = entry.clone();
        entry["data_offsets"] = serde_json::json!([data.len(), data.len() + bytes.len()]);
        header.insert(name.clone(), entry);
        data.extend_from_slice(bytes);
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8) + odd, b' ');
    let length = header.len() as u64;
    std::fs::write(path, [&length.to_le_bytes()[..], &header, &data].concat())?;
    Ok(())
}

/// The folder again with a model in shards: the logits are the same to the last bit.
fn in_parts(setup: Setup, name: &str) -> Outcome {
    let target = model_with(name, |target| {
        let all = tensors(name)?;
        let mut places = serde_json::Map::new();
        for (number, part) in all.chunks(all.len().div_ceil(3)).enumerate() {
            let file = format!("model-{:05}-of-00003.safetensors", number + 1);
            write_safetensors(&target.join(&file), part, 0)?;
            places.extend(part.iter().map(|(tensor, ..)| (tensor.clone(), Value::from(file.clone()))));
        }
        let index = serde_json::json!({ "weight_map": places }).to_string();
        std::fs::write(target.join("model.safetensors.index.json"), index)?;
        Ok(())
    })?;
    same_bits(setup, name, target.path())?;

    // And the GGUF file of it in two parts, as gguf-split makes them.
    let whole = target.path().join("whole.gguf");
    rewritten(name, &whole, DType::F32)?;
    let file = GgufFile::open(&whole)?;
    let half = file.tensors().len() / 2;
    for (number, names) in [&file.tensors()[..half], &file.tensors()[half..]].into_iter().enumerate() {
        let mut writer = GgufWriter::copy_of(&file);
        for tensor in file.tensors().iter().filter(|tensor| !names.contains(tensor)) {
            writer.remove_tensor(&tensor.name);
        }
        writer.set("split.no", u16::try_from(number)?).set("split.count", 2u16);
        writer.set("split.tensors.count", i32::try_from(file.tensors().len())?);
        writer.write(target.path().join(format!("part-{:05}-of-00002.gguf", number + 1)))?;
    }
    drop(file);
    same_bits(setup, name, &target.path().join("part-00002-of-00002.gguf"))
}

fn same_bits(setup: Setup, name: &str, model: &Path) -> Outcome {
    let ids = reference(name)?.ids;
    let wanted = scored(&setup.load(self::model(name)?.path())?, &ids)?;
    let found = scored(&setup.load(model)?, &ids)?;
    ensure(found == wanted, || format!("{} gives other logits", model.display()))
}

/// Data at odd addresses, which no kernel reads: everything is copied, and counted as memory of the device.
fn odd_addresses(setup: Setup, name: &str) -> Outcome {
    let target =
        model_with(name, |target| write_safetensors(&target.join("model.safetensors"), &tensors(name)?, 1))?;
    same_bits(setup, name, target.path())?;
    let plain = model(name)?;
    let (odd, even) = (setup.load(target.path())?, setup.load(plain.path())?);
    let allocated = |engine: &Engine| {
        let counters = engine.backends()[0].counters();
        counters.iter().find(|counter| counter.name == "bytes_allocated").map_or(0, |counter| counter.value)
    };
    ensure(odd.weight_bytes_copied() == odd.weight_bytes() && !odd.weights_imported(), || {
        format!("{} of {} bytes are copied", odd.weight_bytes_copied(), odd.weight_bytes())
    })?;
    ensure(even.weight_bytes_copied() < even.weight_bytes() / 4 && even.weights_imported(), || {
        format!("{} of {} bytes are copied", even.weight_bytes_copied(), even.weight_bytes())
    })?;
    // What the device holds beside the weights is the same for both.
    let (more, copied) =
        (allocated(&odd) - allocated(&even), odd.weight_bytes_copied() - even.weight_bytes_copied());
    ensure(more == copied, || format!("{copied} bytes more are copied, the device holds {more} more"))
}
