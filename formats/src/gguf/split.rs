//! Models split over several files: from any shard, or the folder, to the whole ordered set.
//!
//! The rule of gguf-split: file k of n is named `NAME-0000k-of-0000n.gguf` (from 1), says `split.no` = k - 1 and
//! `split.count` = n, and every shard says how many tensors all have together (`split.tensors.count`). The first shard
//! holds the model's metadata.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::header::Header;
use super::mapping::Bytes;
use super::{TensorInfo, header};
use crate::{FormatError, Result};

/// A file of a model, its header read.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Bytes,
}

/// The parts of `NAME-00001-of-00003.gguf`: what stands before the number, the number and the count.
fn parse_name(name: &str) -> Option<(&str, u64, u64)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| match text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => text.parse().ok(),
        false => None,
    };
    Some((stem, digits(number)?, digits(count)?))
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// The file to start from: `path` itself, or the one model in the folder `path`.
pub(super) fn entry(path: &Path) -> Result<PathBuf> {
    if !fs::metadata(path).is_ok_and(|found| found.is_dir()) {
        return Ok(path.to_path_buf()); // what is wrong with it, if anything, is said where it is opened
    }
    let io = |source| FormatError::Io { path: path.to_path_buf(), operation: "list", source };
    let mut models: Vec<(String, PathBuf)> = Vec::new();
    for file in fs::read_dir(path).map_err(io)? {
        let file = file.map_err(io)?.path();
        let name = name_of(&file);
        if !name.ends_with(".gguf") || !file.is_file() {
            continue;
        }
        // All shards of a set count once.
        let model = parse_name(name).map_or(name.to_owned(), |(stem, _, count)| format!("{stem} of {count}"));
        models.push((model, file));
    }
    models.sort();
    models.dedup_by(|later, first| later.0 == first.0);
    match models.as_slice() {
        [(_, only)] => Ok(only.clone()),
        [] => Err(FormatError::NotGguf {
            path: path.to_path_buf(),
            found: "it is a folder without .gguf files; give the path of a model".into(),
        }),
        several => Err(FormatError::NotGguf {
            path: path.to_path_buf(),
            found: format!(
                "it is a folder of {} models ({}); give the path of one",
                several.len(),
                several.iter().map(|model| name_of(&model.1)).collect::<Vec<_>>().join(", ")
            ),
        }),
    }
}

/// How many files the model of this header is in, by its own word.
pub(super) fn count(header: &Header) -> Result<u64> {
    Ok(header.metadata.uint("split.count")?.unwrap_or(1).max(1))
}

/// All shards of the set that `path`, whose header is `header`, is one of; the header is that of the whole.
pub(super) fn gather(path: &Path, header: Header, bytes: Bytes) -> Result<(Vec<Shard>, Header)> {
    let count = count(&header)?;
    let Some((stem, number, _)) = parse_name(name_of(path))
        .filter(|&(_, number, named)| named == count && (1..=count).contains(&number))
    else {
        let problem = format!(
            "is {count}, so the file is one of {count} shards, but it is not named NAME-00001-of-{count:05}.gguf: \
             the others cannot be found; give it its old name"
        );
        return Err(header.metadata.bad_value("split.count", problem));
    };
    let mut given = Some((header, bytes));
    let mut shards = Vec::new();
    let mut whole: Option<Header> = None;
    let mut seen: HashMap<String, usize> = HashMap::new();
    for at in 1..=count {
        let path = path.with_file_name(format!("{stem}-{at:05}-of-{count:05}.gguf"));
        let (mut header, bytes) = match given.take() {
            Some(given) if at == number => given,
            kept => {
                given = kept;
                open(&path, at, count)?
            }
        };
        check(&header, at, count)?;
        let file = shards.len();
        for tensor in &mut header.tensors {
            tensor.file = file;
            if let Some(&earlier) = seen.get(&tensor.name) {
                let shards: &[Shard] = &shards;
                let problem = format!(
                    "is in {}, too; the shards are of different models",
                    shards[earlier].path.display()
                );
                return Err(FormatError::Tensor { path, tensor: tensor.name.clone(), problem });
            }
            seen.insert(tensor.name.clone(), file);
        }
        shards.push(Shard { path, bytes });
        match &mut whole {
            Some(whole) => whole.tensors.append(&mut header.tensors),
            None => whole = Some(header),
        }
    }
    let Some(whole) = whole else {
        return Err(FormatError::NotGguf {
            path: path.to_path_buf(),
            found: "it is a set of no files".into(),
        });
    };
    check_total(&whole)?;
    Ok((shards, whole))
}

fn open(path: &Path, number: u64, count: u64) -> Result<(Header, Bytes)> {
    if !path.exists() {
        return Err(FormatError::MissingShard { path: path.to_path_buf(), number, count });
    }
    let bytes = Bytes::map(path)?;
    Ok((header::parse(path, &bytes)?, bytes))
}

/// What a shard says of itself must be what its name says.
fn check(header: &Header, number: u64, count: u64) -> Result<()> {
    let metadata = &header.metadata;
    for (key, wanted) in [("split.count", count), ("split.no", number - 1)] {
        match metadata.uint(key)? {
            Some(found) if found == wanted => {}
            Some(found) => {
                let problem = format!(
                    "is {found}, but by its name the file is shard {number} of {count}, whose `{key}` is {wanted}; \
                     it was renamed, or is of another set"
                );
                return Err(metadata.bad_value(key, problem));
            }
            None => {
                return Err(metadata.missing(key, format!("the file is named as shard {number} of {count}")));
            }
        }
    }
    Ok(())
}

fn check_total(whole: &Header) -> Result<()> {
    const KEY: &str = "split.tensors.count";
    let total = whole.tensors.len() as u64;
    match whole.metadata.uint(KEY)? {
        Some(found) if found != total => {
            let problem =
                format!("is {found}, but the shards hold {total} tensors; they are of different models");
            Err(whole.metadata.bad_value(KEY, problem))
        }
        _ => Ok(()),
    }
}

/// The tensors' places by their names.
pub(super) fn index(tensors: &[TensorInfo]) -> HashMap<String, usize> {
    tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), at)).collect()
}

#[cfg(test)]
mod tests {
    use super::parse_name;

    #[test]
    fn names_of_shards() {
        assert_eq!(parse_name("a-b-00002-of-00003.gguf"), Some(("a-b", 2, 3)));
        for other in ["model.gguf", "m-2-of-3.gguf", "m-00001-of-00003.bin", "m-0000x-of-00003.gguf", ""] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }
}
