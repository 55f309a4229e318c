//! Models as Hugging Face publishes them: a folder with `config.json` and `safetensors` files, read as if it were GGUF.
//!
//! Keys of the configuration and names of tensors are translated, so that everything behind the table (description,
//! writer, tools) is the same for both. Rules: a shard's length must be exactly what its header says (bytes behind the
//! last tensor are refused); the index names every shard; with tied embeddings a stored head is left out, as Hugging
//! Face does.

mod config;
mod experts;
pub(crate) mod names;
mod shard;
pub(crate) mod tokenizer;

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::gguf::header::Header;
use crate::gguf::split::Shard;
use crate::gguf::{Container, GgufFile};
use crate::{FormatError, Result};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Text files longer than this are refused; the largest real index has some MiB.
const TEXT_LIMIT: u64 = 1 << 26;

/// Tensors' names with the files that the index puts them into.
type Index = Vec<(String, PathBuf)>;

/// The folder of a model of this kind, where `path` is one, or a file of one.
pub(crate) fn folder(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        let (mut tensors, mut gguf) = (path.join(INDEX).is_file(), false);
        for file in fs::read_dir(path).ok()?.flatten() {
            tensors |= is_safetensors(&file.path());
            gguf |= file.path().extension().is_some_and(|extension| extension == "gguf");
        }
        return (tensors && !gguf).then(|| path.to_path_buf());
    }
    let name = path.file_name()?.to_str()?;
    let one_of_it = is_safetensors(path) || name == INDEX || name == CONFIG;
    (one_of_it && path.is_file()).then(|| match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_path_buf(),
        _ => PathBuf::from("."),
    })
}

fn is_safetensors(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}

/// Opens the model in `folder`.
pub(crate) fn open(folder: &Path) -> Result<GgufFile> {
    let config_path = folder.join(CONFIG);
    if !config_path.is_file() {
        return Err(FormatError::Unsupported {
            path: folder.to_path_buf(),
            what: format!("safetensors without `{CONFIG}`"),
            advice: "it says how to run the model; put the one of the model into the folder".into(),
        });
    }
    let mut config = config::read(&config_path, &json(&config_path)?)?;
    tokenizer::read(folder, &mut config.metadata)?;
    let (paths, index) = shard_paths(folder)?;
    let mut shards = Vec::new();
    let mut tensors = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for path in paths {
        let file = shards.len();
        let (bytes, found) = shard::read(&path)?;
        for (name, mut tensor) in found {
            tensor.file = file;
            if let Some(&earlier) = places.get(&name) {
                let shards: &[Shard] = &shards;
                let problem = format!(
                    "is in {}, too; the shards are of different models",
                    shards[earlier].path.display()
                );
                return Err(FormatError::Tensor { path, tensor: name, problem });
            }
            places.insert(name.clone(), file);
            match names::translate(&name, config.family) {
                names::Place::Named(gguf) if !(config.tied && gguf == "output.weight") => {
                    tensor.name = gguf;
                    tensors.push(tensor);
                }
                names::Place::Named(_) | names::Place::Needless => {}
                names::Place::Unknown => tensors.push(tensor), // refused by name where the model is described
            }
        }
        shards.push(Shard { path, bytes });
    }
    check_index(folder, &index, &places, &shards)?;
    if !config.tied && !tensors.iter().any(|tensor| tensor.name == "output.weight") {
        return Err(FormatError::MissingTensor {
            path: folder.to_path_buf(),
            tensor: "lm_head.weight".into(),
            advice: format!(
                "`tie_word_embeddings` in `{CONFIG}` is false, so the head is a matrix of its own"
            ),
        });
    }
    if config.metadata.uint("falcon.attention.head_count_kv")? == Some(1) {
        // One group is in the order that GGUF has.
        for tensor in &mut tensors {
            tensor.name = tensor.name.replace(names::FUSED_BY_GROUP, "attn_qkv");
        }
    }
    let mut seen = HashSet::new();
    if let Some(twice) = tensors.iter().find(|tensor| !seen.insert(tensor.name.as_str())) {
        let problem = "two tensors have this meaning; the folder holds several models".to_owned();
        return Err(FormatError::Tensor { path: folder.to_path_buf(), tensor: twice.name.clone(), problem });
    }
    let header = Header {
        container: Container::Safetensors,
        version: 3, // of what would be written
        alignment: 1,
        data_start: 0,
        metadata: config.metadata,
        tensors,
    };
    Ok(GgufFile::from_parts(shards, header))
}

/// A text file's JSON.
fn json(path: &Path) -> Result<Json> {
    let bad = |problem: String| FormatError::NotSafetensors { path: path.to_path_buf(), problem };
    serde_json::from_slice(&text(path)?).map_err(|error| bad(format!("is no JSON: {error}")))
}

/// A text file's bytes.
pub(crate) fn text(path: &Path) -> Result<Vec<u8>> {
    let io = |operation| move |source| FormatError::Io { path: path.to_path_buf(), operation, source };
    let length = fs::metadata(path).map_err(io("open"))?.len();
    let bad = |problem: String| FormatError::NotSafetensors { path: path.to_path_buf(), problem };
    if length > TEXT_LIMIT {
        return Err(bad(format!("has {length} bytes, far more than such a file needs")));
    }
    fs::read(path).map_err(io("read"))
}

/// The files that hold tensors, in order, and which tensors the index puts where.
fn shard_paths(folder: &Path) -> Result<(Vec<PathBuf>, Index)> {
    let index_path = folder.join(INDEX);
    let bad = |problem: String| FormatError::NotSafetensors { path: index_path.clone(), problem };
    if index_path.is_file() {
        let index = json(&index_path)?;
        let Some(map) = index.get("weight_map").and_then(Json::as_object) else {
            return Err(bad("has no object `weight_map`".into()));
        };
        let mut entries = Vec::new();
        for (tensor, file) in map {
            let plain =
                file.as_str().filter(|name| Path::new(name).file_name().is_some_and(|last| last == *name));
            let Some(name) = plain else {
                return Err(bad(format!("puts `{tensor}` into {file}; a file in the same folder is wanted")));
            };
            entries.push((tensor.clone(), folder.join(name)));
        }
        let mut paths: Vec<PathBuf> = entries.iter().map(|entry| entry.1.clone()).collect();
        paths.sort();
        paths.dedup();
        let count = paths.len() as u64;
        for (number, path) in (1..).zip(&paths) {
            if !path.is_file() {
                return Err(FormatError::MissingShard { path: path.clone(), number, count });
            }
        }
        if paths.is_empty() {
            return Err(bad("names no files".into()));
        }
        return Ok((paths, entries));
    }
    let single = folder.join(SINGLE);
    if single.is_file() {
        return Ok((vec![single], Vec::new()));
    }
    let io = |source| FormatError::Io { path: folder.to_path_buf(), operation: "list", source };
    let mut found = Vec::new();
    for file in fs::read_dir(folder).map_err(io)? {
        found.push(file.map_err(io)?.path());
    }
    found.retain(|path| is_safetensors(path));
    match found.len() {
        1 => Ok((found, Vec::new())),
        count => Err(bad(format!(
            "is missing, and the folder holds {count} safetensors files: it says which belong together"
        ))),
    }
}

/// Every tensor of the index must be where it says.
fn check_index(
    folder: &Path,
    index: &[(String, PathBuf)],
    places: &HashMap<String, usize>,
    shards: &[Shard],
) -> Result<()> {
    for (tensor, path) in index {
        match places.get(tensor).map(|&file| &shards[file].path) {
            Some(found) if found == path => {}
            found => {
                let found = found.map_or("in no file".into(), |found| format!("in {}", found.display()));
                let problem = format!("`{INDEX}` puts it into {}, but it is {found}", path.display());
                return Err(FormatError::Tensor {
                    path: folder.to_path_buf(),
                    tensor: tensor.clone(),
                    problem,
                });
            }
        }
    }
    Ok(())
}
