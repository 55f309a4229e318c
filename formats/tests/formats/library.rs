//! `tokenizer.json` by the crate `tokenizers`: kinds that GGUF does not have, streams, and row 14 of facts/traps.md.

use std::fs;

use formats::gguf::{Container, GgufFile, GgufWriter};
use formats::tokenizer::{StreamDecoder, Tokenizer, TokenizerOptions};
use serde_json::{Value as Json, json};

use crate::safetensors::{added, byte_level};
use crate::sample::says;

/// The tokenizer of this `tokenizer.json`.
fn with(json: Json) -> formats::Result<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::from_folder(folder.path(), &TokenizerOptions::default())
}

/// One that is kept beside the table of ids.
fn kept(name: &str) -> Json {
    let path = format!("{}/tests/fixtures/tokenizers/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = StreamDecoder::new(true);
    let text: String = ids.iter().map(|&id| decoder.push(tokenizer, id)).collect();
    text + &decoder.finish()
}

/// What the tokenizer.json says cannot be overridden key by key; which ids are special can.
#[test]
fn overrides_of_a_folder() {
    let folder = folder_with(&kept("smollm"));
    let mut file = GgufFile::open(folder.path()).unwrap();
    says(
        &file.override_key("tokenizer.ggml.pre", "gpt-2").unwrap_err(),
        &["tokenizer.ggml.pre", "as its tokenizer.json says"],
    );
    file.override_key("tokenizer.ggml.eos_token_id", "3").unwrap();
    let tokenizer = Tokenizer::from_gguf(&file, &TokenizerOptions::default()).unwrap();
    assert!(tokenizer.is_end_of_generation(3));
    let pre = Tokenizer::from_gguf(&file, &TokenizerOptions::with_pre("gpt-2")).unwrap_err();
    says(&pre, &["the pre-tokenizer override `gpt-2`", "only GGUF files name it"]);
}

/// Kinds that GGUF does not have are tokenized, too.
#[test]
fn tokenizers_of_other_kinds() {
    let pieces = json!({
        "added_tokens": [added(0, "[UNK]", true)], "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"}, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": false},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "to": 1, "##ken": 2, "izer": 3, "a": 4}},
    });
    let found = with(pieces).unwrap();
    assert_eq!(found.encode("TOKEN to x", false, false).unwrap(), [1, 2, 1, 0]);
    assert_eq!(found.decode(&[1, 2, 1]), b"token to");
    let mut decoder = StreamDecoder::new(false);
    let texts: Vec<String> = [1, 2, 0, 1].iter().map(|&id| decoder.push(&found, id)).collect();
    assert_eq!(texts, ["to", "ken", "", " to"]);
    let mut decoder = StreamDecoder::continuing(false);
    assert_eq!(decoder.push(&found, 2), "ken", "what goes on after a prompt");
    assert_eq!(decoder.push(&found, 1), " to");
    let words = |unknown: &str| {
        json!({"pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "one": 1, "two": 2}, "unk_token": unknown}})
    };
    let found = with(words("<unk>")).unwrap();
    assert_eq!(found.encode("one  two three", false, true).unwrap(), [1, 2, 0]);
    assert_eq!(found.special_ids().unknown, Some(0));
    assert_eq!(found.decode(&[1, 2]), b"one two");
    // What a text cannot be made of is said, with the file.
    let error = with(words("none")).unwrap().encode("three", false, true).unwrap_err();
    says(&error, &["tokenizer.json", "cannot tokenize the text"]);
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
    let mut normalised = byte_level(level.clone());
    normalised["normalizer"] = json!({"type": "Lowercase"});
    assert_eq!(with(normalised.clone()).unwrap().encode("aB", false, false).unwrap(), [3]);
    normalised["normalizer"] = json!({"type": "Invented"});
    says(&with(normalised).unwrap_err(), &["tokenizer.json", "cannot be used by the crate `tokenizers`"]);
    let mut greedy = byte_level(level);
    greedy["added_tokens"][2]["rstrip"] = json!(true);
    let greedy = with(greedy).unwrap();
    assert_eq!(greedy.encode("::  a", false, false).unwrap(), [8, 0]);
    assert!(!greedy.notices().join("").contains("::"), "{:?}", greedy.notices());
    says(
        &with(json!({"model": {"type": "Invented"}})).unwrap_err(),
        &["`Invented of tokenizer.json`", "accepted: BPE"],
    );
    let unigram =
        |vocab: Json| json!({"added_tokens": [], "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}});
    says(&with(unigram(json!([["a"]]))).unwrap_err(), &["no list `model.vocab` of tokens with scores"]);
    let found = with(unigram(json!([["<unk>", 0.0], ["a", -1.0], ["ab", -1.5], ["b", -3.0]]))).unwrap();
    assert_eq!(found.encode("abxxb", false, false).unwrap(), [2, 0, 3]);
}

/// A folder of safetensors with this tokenizer.
fn folder_with(json: &Json) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let config = json!({"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1, "intermediate_size": 1,
        "num_attention_heads": 1, "max_position_embeddings": 1, "tie_word_embeddings": true});
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let header = json!({"t": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).to_string();
    let shard = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 2]].concat();
    fs::write(folder.path().join("model.safetensors"), shard).unwrap();
    folder
}

/// The same by our own means, from the keys that a converted file has.
fn converted(json: &Json) -> Tokenizer {
    let folder = folder_with(json);
    let read = GgufFile::open(folder.path()).unwrap();
    let mut writer = GgufWriter::new(Container::Gguf);
    for (key, value) in read.metadata().iter() {
        writer.set(key, value.clone());
    }
    let written = GgufFile::parse("written.gguf", writer.to_bytes()).unwrap();
    Tokenizer::from_gguf(&written, &TokenizerOptions::default()).unwrap()
}

/// Every byte is a token; ids are the bytes in the alphabet's order.
fn bytes() -> Tokenizer {
    with(kept("gpt-2")).unwrap()
}

#[test]
fn streams_hold_back_parts_of_characters() {
    let tokenizer = bytes();
    let text = "\u{80}é😀!語 \u{fffd}x";
    let ids = tokenizer.encode(text, false, false).unwrap();
    assert_eq!(streamed(&tokenizer, &ids), text);
    let mut decoder = StreamDecoder::new(false);
    let face = tokenizer.encode("\u{10348}", false, false).unwrap();
    assert!(face.len() > 1, "{face:?}");
    let texts: Vec<String> = face.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
    assert_eq!(texts.concat(), "\u{10348}");
    assert!(texts[..face.len() - 1].iter().all(String::is_empty));
    // Cut short: what is held back is U+FFFD, once.
    assert_eq!(decoder.push(&tokenizer, face[0]), "");
    assert_eq!((decoder.finish(), decoder.finish()), ("\u{fffd}".into(), String::new()));
    // Bytes that are never a character do not hold the rest back for ever.
    let mut decoder = StreamDecoder::new(false);
    let given: String = (0..40).map(|_| decoder.push(&tokenizer, face[0])).collect();
    assert!(given.chars().count() >= 32 && given.chars().all(|c| c == '\u{fffd}'), "{given:?}");
}

/// SentencePiece's decoder takes the first space of a text away, not that of a text that goes on.
#[test]
fn streams_that_go_on_keep_their_space() {
    let mut json = kept("llama-2");
    json["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    let tokenizer = with(json).unwrap();
    let text = "the 語 of\u{1}\u{301} é";
    let ids = tokenizer.encode(text, false, false).unwrap();
    assert_eq!(tokenizer.decode(&ids), text.as_bytes());
    assert_eq!(streamed(&tokenizer, &ids), text);
    let mut decoder = StreamDecoder::continuing(false);
    let given: String = ids.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
    assert_eq!(given + &decoder.finish(), format!(" {text}"));
}

/// The same ids as our own splitters make, whose time is linear by construction.
#[test]
fn row_14_long_runs_have_the_right_ids() {
    for name in ["gpt-2", "llama-bpe", "smollm", "falcon", "deepseek-coder", "llama-2", "unigram-bytes"] {
        let json = kept(name);
        let (theirs, ours) = (with(json.clone()).unwrap(), converted(&json));
        for unit in ["a", " ", "7", "\u{301}", "^", "\n", " \n", "'", "<|", "中", "a'", "'s", "\t"] {
            // Quadratic time would be minutes here; the test ends or it does not. Of white space as much as is taken; one
            // tokenizer on a megabyte, the others on an eighth of it.
            let most = if unit.trim().is_empty() { 500_000 } else { 1 << 20 };
            let most = if name == "llama-bpe" { most } else { most / 8 };
            let text = unit.repeat(most / unit.len()) + "x";
            let ids = theirs.encode(&text, false, true).unwrap();
            assert!(ids == ours.encode(&text, false, true).unwrap(), "{name}: {unit:?}");
        }
    }
}

/// Where the crate would split wrongly without a word, and past what it can hold, a text is refused.
#[test]
fn row_14_what_is_too_long_is_refused() {
    let tokenizer = bytes();
    let refused = |text: String| tokenizer.encode(&text, false, true).unwrap_err();
    says(&refused("x".repeat((1 << 24) + 1)), &["tokenizer.json", "16777217 bytes", "at most 16777216"]);
    let run = "a".to_owned() + &" \n".repeat(250_000) + " b";
    says(&refused(run), &["tokenizer.json", "a run of 500001", "at most 500000"]);
}

/// A pattern that tries ever more ways through a run gives up: the crate bounds the tries.
#[test]
fn row_14_a_pattern_that_backtracks_ends() {
    let mut json = byte_level(json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "(a|a)*(?=b)c"}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]}));
    json["model"]["merges"] = json!([]);
    let text = "a".repeat(200);
    assert_eq!(with(json).unwrap().encode(&text, false, true).unwrap(), vec![0; 200]);
}
