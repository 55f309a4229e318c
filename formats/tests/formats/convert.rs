//! What `convert` writes: order, names, keys, types; what it refuses, and that nothing is left of a failure.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use engine_core::DType;
use formats::convert::{Options, Types, WriteOptions, plan};
use formats::gguf::{GgufFile, Value};
use formats::model::{ModelDescription, RopeStyle};
use formats::quantise::dequantise;
use formats::{FormatError, Result};
use serde_json::json;

use crate::pickle;
use crate::sample::says;

/// The models that Hugging Face's library made, with its logits (see `fixtures.py` there).
fn made(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine-core/runtime/tests/fixtures").join(name);
    assert!(path.is_dir(), "{}", path.display());
    path
}

fn story() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-story-9m-q8_0.gguf")
}

fn types(dtype: DType) -> Options {
    Options { types: Types { matrices: Some(dtype), ..Types::default() }, ..Options::default() }
}

fn write_to(input: &Path, target: &Path, options: &Options, force: bool) -> Result<Vec<String>> {
    let file = GgufFile::open(input)?;
    let output = plan(&file, options)?;
    let mut last = 0;
    output.write(
        target,
        &WriteOptions { threads: 3, force },
        &mut |_, done| last = done,
        &AtomicBool::new(false),
    )?;
    assert_eq!(last, output.bytes());
    Ok(output.lines.clone())
}

fn converted(input: &Path, options: &Options) -> (GgufFile, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out.gguf");
    let lines = write_to(input, &target, options, false).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "only the file itself is left");
    (GgufFile::parse("out.gguf", fs::read(&target).unwrap()).unwrap(), lines)
}

fn refused(input: &Path, options: &Options, parts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    says(&write_to(input, &folder.path().join("out.gguf"), options, false).unwrap_err(), parts);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

fn values(file: &GgufFile, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap_or_else(|| panic!("{name}"));
    let mut out = vec![0.0; tensor.elements() as usize];
    dequantise(tensor.dtype, file.tensor_bytes(tensor), &mut out).unwrap();
    out
}

#[test]
fn what_llama_cpp_reads() {
    let (file, _) = converted(&made("llama"), &types(DType::F32));
    let metadata = file.metadata();
    // One type per key; token ids and sizes are u32, floats f32.
    for (key, value) in metadata.iter() {
        assert!(!matches!(value, Value::F64(_) | Value::U64(_)), "{key}");
        for private in ["rope.pairs", "norm_offset", "rope.scaling"] {
            assert!(!key.contains(private), "{key}");
        }
    }
    let model = ModelDescription::describe(&file).unwrap();
    assert_eq!(model.rope.style, RopeStyle::Interleaved);
    // Llama 3's stretching is a tensor.
    let factors = values(&file, "rope_freqs.weight");
    assert!(factors[0] == 1.0 && factors.windows(2).all(|pair| pair[0] <= pair[1]), "{factors:?}");
    // Queries and keys, biases included, are in another order; values are not.
    let source = GgufFile::open(made("llama")).unwrap();
    let (old, new) = (values(&source, "blk.1.attn_q.weight"), values(&file, "blk.1.attn_q.weight"));
    let row = |list: &[f32], row: usize| list[row * 64..][..64].to_vec();
    assert_eq!(row(&new, 16 + 3), row(&old, 16 + 9), "pair 1's second half of head 1: heads are 16 wide");
    let (old, new) = (values(&source, "blk.0.attn_k.bias"), values(&file, "blk.0.attn_k.bias"));
    assert_eq!((new[4], new[5]), (old[2], old[10]));
    assert_eq!(values(&source, "blk.0.attn_v.weight"), values(&file, "blk.0.attn_v.weight"));

    let (file, _) = converted(&made("mistral"), &Options::default());
    assert_eq!(file.metadata().string("general.architecture").unwrap(), Some("llama"));
    let (file, _) = converted(&made("gemma3"), &types(DType::F16));
    let source = GgufFile::open(made("gemma3")).unwrap();
    let plus_one: Vec<f32> = values(&source, "output_norm.weight").iter().map(|value| value + 1.0).collect();
    assert_eq!(values(&file, "output_norm.weight"), plus_one);
    assert!(file.metadata().get("gemma3.attention.scale").is_none());
}

#[test]
fn experts_are_stacked() {
    for (name, down) in [("mixtral", "w2"), ("qwen3moe", "down_proj")] {
        let (file, _) = converted(&made(name), &Options::default());
        let source = GgufFile::open(made(name)).unwrap();
        let stacked = file.tensor("blk.1.ffn_down_exps.weight").unwrap();
        assert_eq!(stacked.dims, [32, 64, 4], "{down}");
        let all = values(&file, "blk.1.ffn_down_exps.weight");
        let of = |expert: usize| values(&source, &format!("blk.1.ffn_down.{expert}.weight"));
        assert_eq!(all, (0..4).flat_map(of).collect::<Vec<f32>>());
        assert_eq!(file.tensor("blk.0.ffn_gate_inp.weight").unwrap().dtype, DType::F32);
        assert_eq!(file.tensor("blk.0.ffn_up_exps.weight").unwrap().dtype, DType::BF16);
    }
}

/// A copy of a made model with another configuration or other tensors.
fn changed(
    name: &str,
    change: impl Fn(&mut serde_json::Value, &mut serde_json::Map<String, serde_json::Value>),
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let read = |file: &str| fs::read(made(name).join(file)).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&read("config.json")).unwrap();
    let bytes = read("model.safetensors");
    let (length, rest) = bytes.split_at(8);
    let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
    let mut header: serde_json::Map<_, _> = serde_json::from_slice(&rest[..length]).unwrap();
    change(&mut config, &mut header);
    let text = serde_json::to_vec(&header).unwrap();
    let bytes = [&(text.len() as u64).to_le_bytes()[..], &text, &rest[length..]].concat();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn renamed(header: &mut serde_json::Map<String, serde_json::Value>, old: &str, new: &str) {
    let entry = header.remove(old).unwrap_or_else(|| panic!("{old}"));
    header.insert(new.to_owned(), entry);
}

#[test]
fn what_has_no_place_is_refused() {
    let none = &Options::default();
    let strange = changed("qwen2", |_, header| renamed(header, "model.norm.weight", "model.mystery.weight"));
    refused(strange.path(), none, &["model.mystery.weight", "no place"]);
    let missing = changed("qwen2", |config, _| config["num_hidden_layers"] = json!(3));
    refused(missing.path(), none, &["out.gguf", "not be whole", "blk.2."]);
    let expert = "model.layers.0.block_sparse_moe.experts.";
    let gap = changed("mixtral", |_, header| {
        renamed(header, &format!("{expert}3.w1.weight"), &format!("{expert}4.w1.weight"));
    });
    refused(gap.path(), none, &["blk.0.ffn_gate.3.weight", "expert 4"]);
    let wide = changed("llama", |config, _| config["head_dim"] = json!(24));
    refused(wide.path(), none, &["blk.", ".attn_", "heads of 24"]);
    let parts = changed("falcon-new", |config, _| config["num_kv_heads"] = json!(4));
    refused(parts.path(), none, &["attn_qkv_by_group", "4 groups of 1 query heads"]);
    // Tokenizers that a folder may have, and GGUF has no name for.
    let with = |tokenizer: serde_json::Value| {
        let folder = changed("qwen2", |_, _| ());
        fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        folder
    };
    let words = with(json!({"model": {"type": "WordPiece", "vocab": {"a": 0}}}));
    refused(words.path(), none, &["tokenizer `WordPiece of tokenizer.json`", "--no-tokenizer"]);
    let mut level = json!({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel"}, "normalizer": {"type": "Lowercase"}});
    refused(with(level.clone()).path(), none, &["kind Lowercase", "--no-tokenizer"]);
    level["normalizer"] = json!(null);
    level["pre_tokenizer"] = json!({"type": "Whitespace"});
    refused(with(level.clone()).path(), none, &["Whitespace", "--pre-tokenizer"]);
    level["model"]["end_of_word_suffix"] = json!("</w>");
    refused(with(level).path(), none, &["BPE with `end_of_word_suffix`", "--no-tokenizer"]);
    let secret = changed("falcon", |config, _| config["alibi"] = json!(true));
    refused(secret.path(), none, &["config.json", "alibi"]);
}

#[test]
fn types_and_what_they_fall_back_to() {
    let (file, lines) = converted(&story(), &types(DType::Q4K));
    let dtype = |name: &str| file.tensor(name).unwrap().dtype;
    assert_eq!(dtype("blk.0.ffn_down.weight"), DType::Q4K);
    assert_eq!(dtype("token_embd.weight"), DType::Q6K, "it is the head, too");
    assert_eq!(dtype("blk.0.attn_norm.weight"), DType::F32);
    assert_eq!((dtype("blk.0.fc1.weight"), dtype("blk.0.fc2.weight")), (DType::Q8_0, DType::Q8_0));
    assert_eq!(file.metadata().uint("general.file_type").unwrap(), Some(14));
    assert!(lines.iter().any(|line| line.contains("quantised already (Q8_0)")), "{lines:?}");
    // Rows of 64 and 96 have no blocks of 256, and each substitution is told.
    let (file, lines) = converted(&made("qwen2"), &types(DType::Q6K));
    assert_eq!(file.tensor("blk.0.ffn_down.weight").unwrap().dtype, DType::Q8_0);
    let told =
        |part: &str| lines.iter().any(|line| line.starts_with(part) && line.contains("Q8_0 instead of Q6_K"));
    assert!(told("blk.*.ffn_down.weight (2 tensors)") && told("token_embd.weight"), "{lines:?}");
    // Named types.
    let named = Options {
        types: Types { matrices: Some(DType::Q4_0), head: Some(DType::F16), embedding: Some(DType::Q4_1) },
        ..Options::default()
    };
    let (file, _) = converted(&made("mistral"), &named);
    let dtype = |name: &str| file.tensor(name).unwrap().dtype;
    assert_eq!((dtype("output.weight"), dtype("token_embd.weight")), (DType::F16, DType::Q4_1));
    assert_eq!(dtype("blk.0.attn_q.weight"), DType::Q4_0);
    let wrong = types(DType::Q5K);
    refused(&made("mistral"), &wrong, &["Q5_K", "not written"]);
}

#[test]
fn copies_and_round_trips() {
    let source = GgufFile::open(story()).unwrap();
    let same = |file: &GgufFile| {
        for tensor in source.tensors() {
            let copy = file.tensor(&tensor.name).unwrap();
            assert_eq!((copy.dtype, &copy.dims), (tensor.dtype, &tensor.dims), "{}", tensor.name);
            assert_eq!(file.tensor_bytes(copy), source.tensor_bytes(tensor), "{}", tensor.name);
        }
        assert_eq!(file.tensors().len(), source.tensors().len());
    };
    same(&converted(&story(), &Options::default()).0);
    // Decoding Q8_0 is exact, and its blocks are found again.
    let folder = tempfile::tempdir().unwrap();
    let wide = folder.path().join("wide.gguf");
    write_to(&story(), &wide, &types(DType::F32), false).unwrap();
    let back = converted(&wide, &types(DType::Q8_0)).0;
    let differing = |tensor: &formats::TensorInfo| {
        tensor.dtype == DType::Q8_0
            && back.tensor_bytes(back.tensor(&tensor.name).unwrap()) != source.tensor_bytes(tensor)
    };
    assert_eq!(source.tensors().iter().filter(|tensor| differing(tensor)).count(), 0);
}

#[test]
fn a_target_is_whole_or_untouched() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("out.gguf");
    let source = folder.path().join("in.gguf");
    fs::copy(story(), &source).unwrap();
    let (none, story) = (Options::default(), source.as_path());
    says(&write_to(story, story, &none, true).unwrap_err(), &["in.gguf", "file that is read"]);
    std::os::unix::fs::symlink(&source, folder.path().join("link.gguf")).unwrap();
    says(
        &write_to(story, &folder.path().join("link.gguf"), &none, true).unwrap_err(),
        &["file that is read"],
    );
    fs::write(&target, "precious").unwrap();
    says(&write_to(story, &target, &none, false).unwrap_err(), &["out.gguf", "exists", "--force"]);
    // A failure in the middle, with force: 1e30 fits no F16.
    let bad = folder.path().join("bad.gguf");
    let file = GgufFile::open(story).unwrap();
    let mut writer = formats::gguf::GgufWriter::copy_of(&file);
    let tensor = file.tensor("blk.5.ffn_up.weight").unwrap();
    let huge: Vec<u8> = (0..tensor.elements()).flat_map(|_| 1e30_f32.to_le_bytes()).collect();
    writer.tensor(&tensor.name, DType::F32, &tensor.dims, huge).unwrap();
    writer.write(&bad).unwrap();
    says(
        &write_to(&bad, &target, &types(DType::F16), true).unwrap_err(),
        &["blk.5.ffn_up.weight", "F16", "65504"],
    );
    assert_eq!(fs::read(&target).unwrap(), b"precious");
    // Stopped.
    let output = plan(&file, &none).unwrap();
    let stop = AtomicBool::new(false);
    let mut told = 0;
    let mut progress = |_: &str, _: u64| {
        told += 1;
        stop.store(told == 3, std::sync::atomic::Ordering::Relaxed);
    };
    let options = WriteOptions { threads: 2, force: true };
    let stopped = output.write(&target, &options, &mut progress, &stop).unwrap_err();
    assert!(matches!(stopped, FormatError::Cancelled { .. }), "{stopped}");
    assert_eq!(fs::read(&target).unwrap(), b"precious");
    let mut names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["bad.gguf", "in.gguf", "link.gguf", "out.gguf"]);
    write_to(story, &target, &none, true).unwrap();
    GgufFile::open(&target).unwrap();
}

/// PowerInfer's predictors, of the right and the wrong shape.
#[test]
fn predictors_are_added() {
    let folder = tempfile::tempdir().unwrap();
    let predictor = |layer: u32, neurons: i32| {
        let (first, second) = (vec![0_u8; 4 * 64 * 8], vec![0_u8; 4 * 8 * neurons as usize]);
        let pickle = pickle::dictionary(&[
            ("fc1.weight", pickle::tensor("0", 64 * 8, 0, &[8, 64], &[64, 1])),
            ("fc2.weight", pickle::tensor("1", 8 * neurons, 0, &[neurons, 8], &[8, 1])),
        ]);
        let file = pickle::zip(&[("m/data.pkl", &pickle), ("m/data/0", &first), ("m/data/1", &second)]);
        fs::write(folder.path().join(format!("model_{layer}.pt")), file).unwrap();
    };
    let options = Options { predictors: Some(folder.path().into()), ..types(DType::F16) };
    refused(&made("bamboo"), &options, &["no predictors", "model_0.pt"]);
    predictor(0, 95);
    refused(&made("bamboo"), &options, &["model_0.pt", "fc2.weight", "[8, 95]", "[8, 96]"]);
    predictor(0, 96);
    predictor(7, 96);
    fs::write(folder.path().join("config.json"), r#"{"sparse_threshold": 0.25}"#).unwrap();
    let (file, lines) = converted(&made("bamboo"), &options);
    let model = ModelDescription::describe(&file).unwrap();
    assert_eq!(model.layers[0].ffn.predictor.as_ref().unwrap().rank, 8);
    assert_eq!((model.layers_without_predictor, model.prediction.unwrap().threshold), (vec![1], 0.25));
    let told = |part: &str| lines.iter().any(|line| line.contains(part));
    assert!(told("1 of 2 layers") && told("incomplete for layer 1") && told("model_7.pt"), "{lines:?}");
    // Again onto what has them.
    let path = folder.path().join("with.gguf");
    write_to(&made("bamboo"), &path, &options, false).unwrap();
    refused(&path, &options, &["blk.0.fc1.weight", "already", "--no-predictors"]);
    let replaced = Options { without_predictors: true, ..options };
    assert_eq!(converted(&path, &replaced).0.tensors().len(), file.tensors().len());
    let left_out = Options { without_predictors: true, ..Options::default() };
    assert_eq!(converted(&path, &left_out).0.tensors().len(), file.tensors().len() - 2);
    let error = fs::write(folder.path().join("model_1.pt"), b"cut").and(Ok(()));
    error.unwrap();
    refused(&made("bamboo"), &options_of(folder.path()), &["model_1.pt", "no zip archive"]);
}

fn options_of(predictors: &Path) -> Options {
    Options { predictors: Some(predictors.into()), ..Options::default() }
}
