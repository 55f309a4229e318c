//! Mixtures of experts against the logits of Hugging Face's library (smallthinker: of `smallthinker.py`), as folders and
//! out of the GGUF files that convert makes of them.

use crate::architectures::{LIMIT, LIMIT_F16, distances, folder, follows, reference, scored};
use crate::stack::{Outcome, Setup, ensure, on_vulkan};
use engine_core::DType;
use engine_runtime::{Activations, SparsityChoice};
use formats::GgufFile;
use formats::convert::{self, Options, Types, WriteOptions};
use libtest_mimic::Trial;
use std::path::Path;
use std::sync::atomic::AtomicBool;

const FIXTURES: [&str; 3] = ["mixtral", "qwen3moe", "smallthinker"];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for name in FIXTURES {
        for device in ["cpu", "reference"] {
            let setup = Setup { context: 128, ..Setup::on(device) };
            let mut add = |what: &str, test: fn(Setup, &'static str) -> Outcome| {
                let trial = format!("experts::{name}::{device}::{what}");
                trials.push(Trial::test(trial, move || test(setup, name)));
            };
            add("f32", |setup, name| converted(setup, name, DType::F32, LIMIT));
            add("f16", |setup, name| converted(setup, name, DType::F16, LIMIT_F16));
            if device == "cpu" {
                add("folder_runs", folder_runs);
                add("q8_0", q8_0);
                add("ways_agree", ways_agree);
            }
        }
    }
    for name in FIXTURES {
        let setup = Setup { context: 128, ..Setup::on("vulkan") };
        trials.push(on_vulkan(format!("experts::{name}::vulkan::f16"), move || {
            converted(setup, name, DType::F16, LIMIT_F16)
        }));
    }
    trials.push(Trial::test("experts::smallthinker::cpu::gate_first_is_dense", || gate_first("cpu")));
    let skipped = "experts::smallthinker::vulkan::gate_first_is_dense".into();
    trials.push(on_vulkan(skipped, || gate_first("vulkan")));
    trials
}

fn convert(name: &str, path: &Path, dtype: DType) -> Outcome {
    let file = GgufFile::open(folder(name))?;
    let types = Types { matrices: Some(dtype), head: Some(dtype), embedding: Some(dtype) };
    let output = convert::plan(&file, &Options { types, ..Options::default() })?;
    let options = WriteOptions { threads: 2, force: false };
    output.write(path, &options, &mut |_, _| (), &AtomicBool::new(false))?;
    Ok(())
}

fn converted(setup: Setup, name: &str, dtype: DType, limit: f64) -> Outcome {
    let target = tempfile::tempdir()?;
    let path = target.path().join("model.gguf");
    convert(name, &path, dtype)?;
    follows(setup, &path, name, limit)
}

/// Quantised weights move scores of the router, and with them, in random models, its choices: the logits stay within a
/// tenth, and the device gives what the oracle gives.
fn q8_0(setup: Setup, name: &str) -> Outcome {
    let target = tempfile::tempdir()?;
    let path = target.path().join("model.gguf");
    convert(name, &path, DType::Q8_0)?;
    follows(setup, &path, name, 0.1)?;
    let ids = reference(name)?.ids;
    let oracle = scored(&Setup { device: "reference", ..setup }.load(&path)?, &ids)?;
    let oracle: Vec<Vec<f64>> =
        oracle.into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect();
    let (all, worst) = distances(&scored(&setup.load(&path)?, &ids)?, &oracle);
    ensure(all < LIMIT, || format!("from the oracle {all:.2e}, at the worst position {worst:.2e}"))
}

/// Threads, batches, the storage tier and decoding one by one change no bit, with int8 activations as with f32.
fn ways_agree(setup: Setup, name: &str) -> Outcome {
    let target = tempfile::tempdir()?;
    let path = target.path().join("model.gguf");
    convert(name, &path, DType::Q8_0)?;
    let ids = reference(name)?.ids;
    for activations in [Activations::F32, Activations::Int8] {
        let setup = Setup { activations, ..setup };
        let wanted = scored(&setup.load(&path)?, &ids)?;
        let others = [
            ("1 thread", Setup { threads: 1, ..setup }),
            ("batches of 5", Setup { batch: 5, ..setup }),
            ("tier ram", Setup { tier: "ram", ..setup }),
        ];
        for (what, setup) in others {
            ensure(scored(&setup.load(&path)?, &ids)? == wanted, || format!("{what} changes logits"))?;
        }
        let mut session = setup.load(&path)?.session()?;
        for (id, wanted) in ids.iter().zip(&wanted) {
            ensure(session.decode(*id)? == wanted, || format!("decoding differs at {}", session.past()))?;
        }
    }
    Ok(())
}

/// Experts whose gate is a ReLU can be skipped neuron by neuron.
fn gate_first(device: &'static str) -> Outcome {
    let target = tempfile::tempdir()?;
    let path = target.path().join("model.gguf");
    convert("smallthinker", &path, DType::F16)?;
    let ids = reference("smallthinker")?.ids;
    let setup = Setup { context: 128, ..Setup::on(device) };
    let mut dense = setup.load(&path)?.session()?;
    let mut sparse = Setup { sparsity: SparsityChoice::GateFirst, ..setup }.load(&path)?.session()?;
    for id in ids {
        let (wanted, found) = (dense.decode(id)?.to_vec(), sparse.decode(id)?.to_vec());
        ensure(found == wanted, || format!("gate-first changes logits at {}", sparse.past()))?;
    }
    Ok(())
}

/// A folder, with a tensor per expert or gate and up of all in one, runs as it is, and has the logits of the file that
/// convert makes of it: bit for bit, but where that turns queries and keys in other pairs and so sums in another order.
fn folder_runs(setup: Setup, name: &str) -> Outcome {
    follows(setup, &folder(name), name, LIMIT)?;
    let ids = reference(name)?.ids;
    let target = tempfile::tempdir()?;
    let path = target.path().join("model.gguf");
    convert(name, &path, DType::BF16)?;
    let wanted = scored(&setup.load(&path)?, &ids)?;
    let engine = setup.load(&folder(name))?;
    let found = scored(&engine, &ids)?;
    if name == "mixtral" {
        let exact: Vec<Vec<f64>> =
            wanted.iter().map(|row| row.iter().map(|logit| f64::from(*logit)).collect()).collect();
        let (all, _) = distances(&found, &exact);
        ensure(all < 1e-5, || format!("{all:.2e} from the converted file"))?;
    } else {
        ensure(found == wanted, || "not the converted file's logits".to_owned())?;
    }
    // The experts' tensors, gathered, are memory of the device.
    let experts = 2 * 3 * 4 * 32 * 64 * 2;
    ensure(engine.weight_bytes_copied() >= experts, || {
        format!("{} bytes are copied", engine.weight_bytes_copied())
    })?;
    let fused = tempfile::tempdir()?;
    fuse(name, fused.path())?;
    ensure(scored(&setup.load(fused.path())?, &ids)? == found, || {
        "gate and up in one tensor differ".to_owned()
    })
}

/// Makes of a folder with a tensor per expert one with `mlp.experts.gate_up_proj` and `down_proj`, as newer versions of
/// Hugging Face's library write them.
fn fuse(name: &str, target: &Path) -> Outcome {
    let bytes = std::fs::read(folder(name).join("model.safetensors"))?;
    let length = usize::try_from(u64::from_le_bytes(bytes[..8].try_into()?))?;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes[8..8 + length])?;
    let (mut entries, mut data) = (serde_json::Map::new(), Vec::new());
    let tensor = |name: &str| {
        let at = |index: usize| header[name]["data_offsets"][index].as_u64().unwrap_or(0) as usize;
        &bytes[8 + length..][at(0)..at(1)]
    };
    let mut add = |name: &str, shape: serde_json::Value, parts: &[&[u8]]| {
        let start = data.len();
        parts.iter().for_each(|part| data.extend_from_slice(part));
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, data.len()]});
        entries.insert(name.to_owned(), entry);
    };
    let single = header.keys().filter(|key| *key != "__metadata__" && !key.contains(".experts."));
    for key in single {
        add(key, header[key]["shape"].clone(), &[tensor(key)]);
    }
    let count = |part: &str| header.keys().filter(|key| key.contains(part)).count();
    let layers = count(".self_attn.q_proj.weight");
    let experts = count(".experts.") / 3 / layers;
    for layer in 0..layers {
        let expert = |expert: usize, names: [&str; 3]| {
            let ends = names.map(|part| format!(".experts.{expert}.{part}.weight"));
            let start = format!("model.layers.{layer}.");
            header.keys().find(|key| key.starts_with(&start) && ends.iter().any(|end| key.ends_with(end)))
        };
        let find = |number, names| expert(number, names).map(|key| tensor(key)).unwrap_or_default();
        let (gate, up, down) =
            (["w1", "gate_proj", "gate"], ["w3", "up_proj", "up"], ["w2", "down_proj", "down"]);
        let both: Vec<&[u8]> = (0..experts).flat_map(|e| [find(e, gate), find(e, up)]).collect();
        let downs: Vec<&[u8]> = (0..experts).map(|e| find(e, down)).collect();
        let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
        add(&name("gate_up_proj"), serde_json::json!([experts, 64, 64]), &both);
        add(&name("down_proj"), serde_json::json!([experts, 64, 32]), &downs);
    }
    let text = serde_json::to_vec(&entries)?;
    let written = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
    std::fs::write(target.join("model.safetensors"), written)?;
    std::fs::copy(folder(name).join("config.json"), target.join("config.json"))?;
    Ok(())
}
