//! Adds PowerInfer's predictors to a model: `model_0.pt`, `model_1.pt`, ... with `fc1.weight` and `fc2.weight` each.

use std::fs;
use std::path::Path;

use super::{Data, Source, Tensor};
use crate::gguf::{GgufFile, Value};
use crate::pickle::{Checkpoint, StoredTensor};
use crate::{FormatError, Result};

/// Beside the predictors, perhaps: `sparse_threshold`.
const CONFIG: &str = "config.json";
/// A longer one is none.
const CONFIG_LIMIT: u64 = 1 << 20;

pub(super) fn add(
    folder: &Path,
    file: &GgufFile,
    tensors: &mut Vec<Tensor<'_>>,
    metadata: &mut Vec<(String, Value)>,
    lines: &mut Vec<String>,
) -> Result<()> {
    let found = file.metadata();
    let architecture = found.string("general.architecture")?.unwrap_or_default().to_owned();
    let layers = found.u32(&format!("{architecture}.block_count"))?.unwrap_or(0);
    if let Some(there) = tensors.iter().find(|tensor| tensor.name.ends_with(".fc1.weight")) {
        return Err(FormatError::Tensor {
            path: file.path().to_path_buf(),
            tensor: there.name.clone(),
            problem: "the model has predictors already; --no-predictors leaves these out".into(),
        });
    }
    let name = |layer: u32| format!("model_{layer}.pt");
    let mut missing = Vec::new();
    let mut added = 0;
    for layer in 0..layers {
        let path = folder.join(name(layer));
        if !path.exists() {
            missing.push(layer.to_string());
            continue;
        }
        for tensor in of_layer(&path, layer, tensors)? {
            let end = tensors.iter().rposition(|other| other.name.starts_with(&format!("blk.{layer}.")));
            tensors.insert(end.map_or(tensors.len(), |at| at + 1), tensor);
        }
        added += 1;
    }
    let stray = stray(folder, layers)?;
    if added == 0 {
        let problem =
            format!("has no predictors: no {} and so on up to {}", name(0), name(layers.saturating_sub(1)));
        return Err(FormatError::Checkpoint { path: folder.to_path_buf(), problem });
    }
    lines.push(format!("predictors of {added} of {layers} layers added"));
    if !missing.is_empty() {
        lines.push(format!("predictors incomplete for layer {}: dense there", missing.join(", ")));
    }
    if !stray.is_empty() {
        lines.push(format!("{}: not of any layer, left out: {}", folder.display(), stray.join(", ")));
    }
    if let Some(threshold) = threshold(&folder.join(CONFIG))? {
        const KEY: &str = "powerinfer.sparse_threshold";
        metadata.retain(|(key, _)| key != KEY);
        metadata.push((KEY.to_owned(), Value::F32(threshold)));
    }
    Ok(())
}

/// Both tensors of a layer, held against the layer's network.
fn of_layer<'a>(path: &Path, layer: u32, model: &[Tensor<'_>]) -> Result<[Tensor<'a>; 2]> {
    let checkpoint = Checkpoint::open(path)?;
    let of = |key: &str| {
        checkpoint.tensor(key).ok_or_else(|| FormatError::MissingTensor {
            path: path.to_path_buf(),
            tensor: key.to_owned(),
            advice: "a predictor has fc1.weight and fc2.weight, no other names".into(),
        })
    };
    let (first, second) = (of("fc1.weight")?, of("fc2.weight")?);
    if let Some(other) =
        checkpoint.tensors().iter().find(|tensor| !["fc1.weight", "fc2.weight"].contains(&&*tensor.name))
    {
        return Err(FormatError::Tensor {
            path: path.to_path_buf(),
            tensor: other.name.clone(),
            problem: "a predictor has fc1.weight and fc2.weight alone; with this the results would be others"
                .into(),
        });
    }
    let up = model.iter().find(|tensor| tensor.name == format!("blk.{layer}.ffn_up.weight"));
    let Some(up) = up else {
        return Err(FormatError::Checkpoint {
            path: path.to_path_buf(),
            problem: format!("is for layer {layer}, which has no `blk.{layer}.ffn_up.weight` in the model"),
        });
    };
    let rank = first.dims.get(1).copied().unwrap_or(1);
    let (width, neurons) = (up.dims[0], up.dims.get(1).copied().unwrap_or(1));
    let wanted = [
        (first, [width, rank], "the model's width by any rank"),
        (second, [rank, neurons], "the rank of fc1 by the neurons of the layer"),
    ];
    for (tensor, wanted, reason) in wanted {
        if tensor.dims != wanted {
            return Err(FormatError::Shape {
                path: path.to_path_buf(),
                tensor: tensor.name.clone(),
                found: format!("{:?}", tensor.dims),
                wanted: format!("{wanted:?}"),
                reason: reason.into(),
            });
        }
    }
    let tensor = |stored: &StoredTensor| {
        let (bytes, range) = checkpoint.shared(stored);
        Tensor {
            name: format!("blk.{layer}.{}", stored.name),
            dtype: stored.dtype,
            dims: stored.dims.clone(),
            source: Source::as_stored(Data::Shared(bytes, range), stored.dtype, stored.dims[0]),
        }
    };
    Ok([tensor(first), tensor(second)])
}

/// Files that look like predictors of layers that are not there.
fn stray(folder: &Path, layers: u32) -> Result<Vec<String>> {
    let io = |source| FormatError::Io { path: folder.to_path_buf(), operation: "list", source };
    let mut stray = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if let Some(stem) = name.strip_suffix(".pt") {
            let number = stem.strip_prefix("model_").and_then(|number| number.parse::<u32>().ok());
            if number.is_none_or(|number| number >= layers) {
                stray.push(name);
            }
        }
    }
    stray.sort();
    Ok(stray)
}

/// The score from which on a neuron counts as active, where the predictors come with one.
fn threshold(path: &Path) -> Result<Option<f32>> {
    if !path.is_file() {
        return Ok(None);
    }
    let io = |source| FormatError::Io { path: path.to_path_buf(), operation: "read", source };
    let bad = |problem: String| FormatError::Checkpoint { path: path.to_path_buf(), problem };
    if fs::metadata(path).map_err(io)?.len() > CONFIG_LIMIT {
        return Err(bad("is far too long for a predictor's configuration".into()));
    }
    let json: serde_json::Value = serde_json::from_slice(&fs::read(path).map_err(io)?)
        .map_err(|error| bad(format!("is no JSON: {error}")))?;
    match json.get("sparse_threshold") {
        None | Some(serde_json::Value::Null) => Ok(None),
        Some(value) => match value.as_f64().map(|value| value as f32).filter(|value| value.is_finite()) {
            Some(value) => Ok(Some(value)),
            None => Err(bad(format!("`sparse_threshold` is {value}; a number is wanted"))),
        },
    }
}
