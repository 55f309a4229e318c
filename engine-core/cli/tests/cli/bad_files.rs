//! Model files that are damaged, cut, or something else: one clear error each, exit code 1, no signal.

use crate::Test;
use crate::program::{Outcome, changed_model, model, run};
use formats::gguf::Value;
use std::path::Path;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("must_show_5_not_a_model", must_show_5_not_a_model),
        ("must_show_5_cut_anywhere", must_show_5_cut_anywhere),
        ("must_show_5_header_fields", must_show_5_header_fields),
        ("must_show_5_metadata", must_show_5_metadata),
        ("trap_1_vocabulary_and_embedding", trap_1_vocabulary_and_embedding),
        ("trap_3_pre_tokenizer", trap_3_pre_tokenizer),
    ]
}

fn run_file(path: &Path) -> Outcome {
    run(&["run", "-m", path.to_str().unwrap(), "-p", "Once", "-n", "1", "--quiet"])
}

fn must_show_5_not_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    for (content, wanted) in [
        (&b""[..], "empty"),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "LFS"),
        (b"GGUF", "x.gguf"),
        (b"some text", "not a GGUF file"),
    ] {
        std::fs::write(&path, content).unwrap();
        run_file(&path).fails_with(&["x.gguf", wanted]);
    }
    run_file(Path::new("/nonexistent/x.gguf")).fails_with(&["/nonexistent/x.gguf", "No such file"]);
    run_file(folder.path()).fails_with(&[folder.path().to_str().unwrap()]);
}

fn must_show_5_cut_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    let whole = std::fs::read(model()).unwrap();
    for length in [1, 7, 23, 24, 100, 5000, 60_000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        run_file(&path).fails_with(&["cut.gguf"]);
    }
}

fn must_show_5_header_fields() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("header.gguf");
    let whole = std::fs::read(model()).unwrap();
    // Version, count of tensors, count of keys, length of the first key, type of its value.
    for (offset, width) in [(4, 4), (8, 8), (16, 8), (24, 8), (24 + 8 + "general.architecture".len(), 4)] {
        for value in [0u64, 1 << 31, 1 << 40, u64::MAX] {
            let mut bytes = whole.clone();
            bytes[offset..offset + width].copy_from_slice(&value.to_le_bytes()[..width]);
            if bytes == whole {
                continue;
            }
            std::fs::write(&path, &bytes).unwrap();
            run_file(&path).fails_with(&["header.gguf"]);
        }
    }
}

fn must_show_5_metadata() {
    let folder = tempfile::tempdir().unwrap();
    let cases: Vec<(&str, Value)> = vec![
        ("llama.block_count", Value::U32(0)),
        ("llama.block_count", Value::U32(u32::MAX)),
        ("llama.block_count", Value::F32(8.0)),
        ("llama.attention.head_count", Value::U32(0)),
        ("llama.attention.head_count", Value::U32(7)),
        ("llama.attention.head_count_kv", Value::U32(0)),
        ("llama.attention.head_count_kv", Value::U32(3)),
        ("llama.embedding_length", Value::U64(1 << 40)),
        ("llama.context_length", Value::from("many")),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(f32::NAN)),
        ("llama.rope.freq_base", Value::F32(0.0)),
        ("llama.feed_forward_length", Value::U32(1)),
        ("llama.feed_forward_activation", Value::from("tanh")),
        ("general.architecture", Value::from("gpt9")),
        ("general.architecture", Value::U8(1)),
        ("tokenizer.ggml.model", Value::from("magic")),
    ];
    for (key, value) in cases {
        let path = changed_model(folder.path(), |writer| {
            writer.set(key, value.clone());
        });
        run_file(Path::new(&path)).fails_with(&["changed.gguf"]);
    }
    for key in ["llama.block_count", "llama.embedding_length", "tokenizer.ggml.model"] {
        let path = changed_model(folder.path(), |writer| {
            writer.remove(key);
        });
        run_file(Path::new(&path)).fails_with(&["changed.gguf", key]);
    }
    for tensor in ["token_embd.weight", "blk.3.attn_k.weight", "output_norm.weight"] {
        let path = changed_model(folder.path(), |writer| {
            writer.remove_tensor(tensor);
        });
        run_file(Path::new(&path)).fails_with(&["changed.gguf", tensor]);
    }
}

fn trap_1_vocabulary_and_embedding() {
    let folder = tempfile::tempdir().unwrap();
    let file = formats::GgufFile::open(model()).unwrap();
    let tokens = file.metadata().strings("tokenizer.ggml.tokens").unwrap().unwrap();
    let more = tokens.iter().map(<[u8]>::to_vec).chain([b"q1".to_vec(), b"q2".to_vec()]);
    let more: formats::gguf::StringArray = more.collect();
    let path = changed_model(folder.path(), |writer| {
        writer.set("tokenizer.ggml.tokens", Value::Array(formats::gguf::Array::Strings(more)));
    });
    run_file(Path::new(&path)).fails_with(&["4098", "4096"]);
}

fn trap_3_pre_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let path = changed_model(folder.path(), |writer| {
        writer.set("tokenizer.ggml.pre", "invented");
    });
    run_file(Path::new(&path)).fails_with(&["invented", "accepted:", "--pre-tokenizer"]);
    let overridden =
        run(&["run", "-m", &path, "-p", "Once", "-n", "1", "--json", "--pre-tokenizer", "smollm"]);
    assert_eq!(overridden.json()["prompt_ids"], serde_json::json!([0, 731]));
    let path = changed_model(folder.path(), |writer| {
        writer.remove("tokenizer.ggml.pre");
    });
    let outcome = run(&["run", "-m", &path, "-p", "Once", "-n", "1"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("`tokenizer.ggml.pre` is missing"), "{}", outcome.stderr);
}
