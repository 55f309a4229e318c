//! PowerInfer's container for each of the four families that it runs: down transposed, predictors beside the network.

use crate::architectures::{LIMIT, distances, folder, reference, scored};
use crate::stack::{Outcome, Setup, ensure};
use engine_core::DType;
use engine_runtime::SparsityChoice;
use formats::convert::{self, Options, Types, WriteOptions};
use formats::gguf::{Container, GgufWriter};
use formats::quantise::dequantise;
use formats::{GgufFile, ModelDescription};
use libtest_mimic::{Failed, Trial};
use std::path::Path;
use std::sync::atomic::AtomicBool;

const FAMILIES: [&str; 4] = ["llama", "falcon", "opt", "bamboo"];
const RANK: u64 = 16;

pub(crate) fn trials() -> Vec<Trial> {
    let families = FAMILIES.iter();
    families.map(|name| Trial::test(format!("powerinfer::{name}"), move || predicts(name))).collect()
}

/// Numbers that repeat: small, of both signs.
fn numbers(seed: u64, count: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..count).flat_map(|_| next().to_le_bytes()).collect()
}

/// The fixture as PowerInfer's converter leaves a model, with predictors that mean nothing.
fn write(name: &str, path: &Path) -> Outcome {
    let plain = path.with_extension("gguf");
    let folder = GgufFile::open(folder(name))?;
    let types = Types { matrices: Some(DType::F32), ..Types::default() };
    let output = convert::plan(&folder, &Options { types, ..Options::default() })?;
    let options = WriteOptions { threads: 2, force: false };
    output.write(&plain, &options, &mut |_, _| (), &AtomicBool::new(false))?;

    let file = GgufFile::open(&plain)?;
    let mut writer = GgufWriter::copy_of(&file);
    writer.set_container(Container::PowerInfer);
    for (layer, tensor) in (0u64..).zip(file.tensors().iter().filter(|t| t.name.ends_with("ffn_down.weight")))
    {
        let &[neurons, width] = &tensor.dims[..] else { return Err("no matrix".into()) };
        let mut values = vec![0f32; (neurons * width) as usize];
        dequantise(tensor.dtype, file.tensor_bytes(tensor), &mut values)?;
        let turned: Vec<u8> = (0..neurons as usize)
            .flat_map(|i| values.iter().skip(i).step_by(neurons as usize))
            .flat_map(|value| value.to_le_bytes())
            .collect();
        writer.remove_tensor(&tensor.name);
        let name = |part: &str| tensor.name.replace("ffn_down", part);
        writer.tensor(&name("ffn_down_t"), DType::F32, &[width, neurons], turned)?;
        writer.tensor(&name("fc1"), DType::F32, &[width, RANK], numbers(2 * layer + 1, width * RANK))?;
        writer.tensor(&name("fc2"), DType::F32, &[RANK, neurons], numbers(2 * layer + 2, RANK * neurons))?;
        let bias = tensor.name.replace(".weight", ".bias");
        if let Some(bias) = file.tensor(&bias) {
            let bytes = file.tensor_bytes(bias).to_vec();
            writer.remove_tensor(&bias.name);
            writer.tensor(&name("ffn_down_t").replace(".weight", ".bias"), bias.dtype, &bias.dims, bytes)?;
        }
    }
    writer.write(path)?;
    Ok(())
}

/// It loads, its predictors decide, and the device does as the oracle does; without them it is the dense model.
fn predicts(name: &'static str) -> Outcome {
    let target = tempfile::tempdir()?;
    let path = target.path().join("model.powerinfer");
    write(name, &path)?;
    let model = ModelDescription::describe(&GgufFile::open(&path)?)?;
    ensure(model.container == Container::PowerInfer && model.layers_without_predictor.is_empty(), || {
        format!("without a predictor: {:?}", model.layers_without_predictor)
    })?;
    let ids = reference(name)?.ids;
    let logits = |device, sparsity| -> Result<Vec<Vec<f32>>, Failed> {
        scored(&Setup { context: 64, sparsity, ..Setup::on(device) }.load(&path)?, &ids)
    };
    let apart = |a: &[Vec<f32>], b: &[Vec<f32>]| {
        let b: Vec<Vec<f64>> = b.iter().map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect();
        distances(a, &b).0
    };
    let (dense, predicted) =
        (logits("cpu", SparsityChoice::Dense)?, logits("cpu", SparsityChoice::Predictor)?);
    let dense_oracle = logits("reference", SparsityChoice::Dense)?;
    let oracle = logits("reference", SparsityChoice::Predictor)?;
    let (a, b, c) = (apart(&dense, &dense_oracle), apart(&predicted, &oracle), apart(&predicted, &dense));
    ensure(a < LIMIT && b < LIMIT, || format!("from the oracle {a:.2e} dense, {b:.2e} predicted"))?;
    ensure(c > 10.0 * LIMIT, || format!("random predictors change the logits by {c:.2e} only"))
}
