//! Mixtures of experts against the logits of Hugging Face's library (smallthinker: of `smallthinker.py`), out of the
//! GGUF files that convert makes of them.

use crate::architectures::{LIMIT, LIMIT_F16, distances, folder, follows, reference, scored};
use crate::stack::{Outcome, Setup, ensure};
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
                add("q8_0", q8_0);
                add("ways_agree", ways_agree);
            }
        }
    }
    trials.push(Trial::test("experts::smallthinker::cpu::gate_first_is_dense", gate_first));
    trials.push(Trial::test("experts::mixtral::folder_is_refused", folder_is_refused));
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
fn gate_first() -> Outcome {
    let target = tempfile::tempdir()?;
    let path = target.path().join("model.gguf");
    convert("smallthinker", &path, DType::F16)?;
    let ids = reference("smallthinker")?.ids;
    let setup = Setup { context: 128, ..Setup::on("cpu") };
    let mut dense = setup.load(&path)?.session()?;
    let mut sparse = Setup { sparsity: SparsityChoice::GateFirst, ..setup }.load(&path)?.session()?;
    for id in ids {
        let (wanted, found) = (dense.decode(id)?.to_vec(), sparse.decode(id)?.to_vec());
        ensure(found == wanted, || format!("gate-first changes logits at {}", sparse.past()))?;
    }
    Ok(())
}

/// A folder has a tensor per expert, which nothing runs: the error says what to do.
fn folder_is_refused() -> Outcome {
    match Setup::on("cpu").load(&folder("mixtral")) {
        Ok(_) => Err("a folder with a tensor per expert was loaded".into()),
        Err(error) => {
            let text = format!("{error:?}");
            ensure(text.contains("convert"), || text)
        }
    }
}
