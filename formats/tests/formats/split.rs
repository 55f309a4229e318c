//! Models split over several files (facts/traps.md, row 4).

use std::path::{Path, PathBuf};

use formats::gguf::{Container, GgufFile, GgufWriter};
use formats::model::ModelDescription;

use crate::sample::{self, SIZES, says};

/// Writes the sample in `count` files, `change` applied to each, and gives their paths.
fn split(folder: &Path, count: usize, change: impl Fn(usize, &mut GgufWriter<'_>)) -> Vec<PathBuf> {
    let whole = GgufFile::parse("sample", sample::model(SIZES).to_bytes()).unwrap();
    let total = whole.tensors().len();
    let mut paths = Vec::new();
    for number in 0..count {
        let mut writer = match number {
            0 => GgufWriter::copy_of(&whole),
            _ => GgufWriter::new(Container::Gguf),
        };
        writer.set("split.no", number as u16).set("split.count", count as u16);
        writer.set("split.tensors.count", total as i32);
        for (at, tensor) in whole.tensors().iter().enumerate() {
            writer.remove_tensor(&tensor.name);
            if at * count / total == number {
                // Bytes that tell one tensor from another.
                let bytes = vec![at as u8; tensor.byte_len() as usize];
                writer.tensor(&tensor.name, tensor.dtype, &tensor.dims, bytes).unwrap();
            }
        }
        change(number, &mut writer);
        let path = folder.join(format!("sample-{:05}-of-{count:05}.gguf", number + 1));
        writer.write(&path).unwrap();
        paths.push(path);
    }
    paths
}

fn refused(path: &Path, parts: &[&str]) {
    says(&GgufFile::open(path).map(drop).unwrap_err(), parts);
}

#[test]
fn any_shard_or_the_folder_is_the_whole_model() {
    let folder = tempfile::tempdir().unwrap();
    let paths = split(folder.path(), 3, |_, _| {});
    std::fs::write(folder.path().join("README.md"), "no model").unwrap();
    for start in paths.iter().map(PathBuf::as_path).chain([folder.path()]) {
        let file = GgufFile::open(start).unwrap();
        assert_eq!(file.files().collect::<Vec<_>>(), paths);
        assert_eq!((file.path(), file.tensors().len()), (paths[0].as_path(), 20));
        for (at, tensor) in file.tensors().iter().enumerate() {
            assert_eq!(tensor.file, at * 3 / 20);
            assert!(file.tensor_bytes(tensor).iter().all(|&byte| byte == at as u8), "{}", tensor.name);
        }
        let model = ModelDescription::describe(&file).unwrap();
        assert_eq!(model.files, paths);
        assert_eq!(model.output_norm.file, 0);
        says(&ModelDescription::from_gguf(&file).unwrap_err(), &["3 files", "not supported"]);
        // Joined again.
        let joined = GgufFile::parse("joined", GgufWriter::copy_of(&file).to_bytes()).unwrap();
        assert_eq!((joined.files().len(), joined.tensors().len()), (1, 20));
        ModelDescription::from_gguf(&joined).unwrap();
    }
}

#[test]
fn a_set_of_one_is_a_plain_file() {
    let folder = tempfile::tempdir().unwrap();
    let paths = split(folder.path(), 1, |_, _| {});
    assert!(paths[0].ends_with("sample-00001-of-00001.gguf"));
    let file = GgufFile::open(folder.path()).unwrap();
    ModelDescription::from_gguf(&file).unwrap();
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let paths = split(folder.path(), 3, |_, _| {});
    std::fs::remove_file(&paths[2]).unwrap();
    refused(&paths[0], &["sample-00003-of-00003.gguf", "missing", "shard 3 of 3"]);
    refused(folder.path(), &["sample-00003-of-00003.gguf", "missing"]);
    // Renamed to what is missing.
    std::fs::rename(&paths[1], &paths[2]).unwrap();
    refused(&paths[0], &["sample-00002-of-00003.gguf", "missing"]);
    refused(&paths[2], &["sample-00002-of-00003.gguf", "missing"]);
    std::fs::copy(&paths[2], &paths[1]).unwrap();
    refused(&paths[0], &["sample-00003-of-00003.gguf", "split.no", "is 1", "shard 3 of 3", "is 2"]);
    // Renamed to something else.
    let other = folder.path().join("other.gguf");
    std::fs::rename(&paths[0], &other).unwrap();
    refused(&other, &["other.gguf", "split.count", "is 3", "not named", "old name"]);
    refused(folder.path(), &["2 models", "other.gguf", "give the path of one"]);
    let zero = folder.path().join("sample-00000-of-00003.gguf");
    std::fs::rename(&other, &zero).unwrap();
    refused(&zero, &["not named"]);
    let empty = tempfile::tempdir().unwrap();
    refused(empty.path(), &["folder without .gguf files"]);
    refused(&empty.path().join("absent.gguf"), &["absent.gguf", "cannot open"]);
}

#[test]
fn shards_that_do_not_belong_together() {
    let check = |change: &dyn Fn(usize, &mut GgufWriter<'_>), parts: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let paths = split(folder.path(), 3, change);
        refused(&paths[1], parts);
    };
    let on = |number: usize, key: &'static str, value: i32| {
        move |at: usize, w: &mut GgufWriter<'_>| {
            if at == number {
                w.set(key, value);
            }
        }
    };
    check(&on(2, "split.count", 4), &["-00003-of-00003", "split.count", "is 4"]);
    check(&on(0, "split.no", 1), &["-00001-of-00003", "split.no", "is 1"]);
    check(&on(0, "split.tensors.count", 21), &["split.tensors.count", "is 21", "20 tensors"]);
    check(
        &|at, w| {
            if at == 2 {
                w.remove("split.no");
            }
        },
        &["-00003-of-00003", "split.no", "is missing"],
    );
    check(
        &|at, w| {
            if at == 2 {
                w.tensor("token_embd.weight", engine_core::DType::F32, &[1], vec![0; 4]).unwrap();
            }
        },
        &["-00003-of-00003", "token_embd.weight", "-00001-of-00003", "different models"],
    );
}
