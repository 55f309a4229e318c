//! SentencePiece tokenizers: ids as the sentencepiece library has them (fixtures/make_pieces.py), and traps 15 and 16.

use std::sync::LazyLock;

use formats::gguf::{Array, Container, GgufFile, GgufWriter};
use formats::tokenizer::{StreamDecoder, Tokenizer, TokenizerOptions};
use formats::{FormatError, Result};
use proptest::prelude::*;

use crate::sample::{remove, says, set, strings};

fn fixture() -> serde_json::Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pieces.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A file that holds the tokenizer of this name, changed.
fn read(name: &str, change: impl FnOnce(&mut GgufWriter<'static>)) -> Result<Tokenizer> {
    let model = &fixture()[name];
    let list = |key: &str| model[key].as_array().unwrap().clone();
    let mut w = GgufWriter::new(Container::Gguf);
    w.set("tokenizer.ggml.model", "llama").set("tokenizer.ggml.pre", "default");
    w.set("tokenizer.ggml.tokens", strings(list("tokens").iter().map(|t| t.as_str().unwrap())));
    let scores = list("scores").iter().map(|s| s.as_f64().unwrap() as f32).collect();
    w.set("tokenizer.ggml.scores", Array::F32(scores));
    let kinds = list("types").iter().map(|t| t.as_i64().unwrap() as i32).collect();
    w.set("tokenizer.ggml.token_type", Array::I32(kinds));
    for (key, id) in [("unknown", 0_u32), ("bos", 1), ("eos", 2)] {
        w.set(&format!("tokenizer.ggml.{key}_token_id"), id);
    }
    if name == "gemma" {
        w.set("tokenizer.ggml.add_space_prefix", false);
    }
    change(&mut w);
    Tokenizer::from_gguf(&GgufFile::parse("pieces.gguf", w.to_bytes())?, &TokenizerOptions::default())
}

static TOKENIZERS: LazyLock<[Tokenizer; 2]> =
    LazyLock::new(|| ["llama", "gemma"].map(|name| read(name, |_| {}).unwrap()));

fn tokenizer(name: &str) -> &'static Tokenizer {
    &TOKENIZERS[usize::from(name == "gemma")]
}

fn refused(change: impl FnOnce(&mut GgufWriter<'static>)) -> FormatError {
    read("llama", change).unwrap_err()
}

#[test]
fn ids_equal_sentencepiece() {
    let fixture = fixture();
    for name in ["llama", "gemma"] {
        let tokenizer = tokenizer(name);
        assert!(tokenizer.notices().is_empty(), "{:?}", tokenizer.notices());
        let texts = fixture["texts"].as_array().unwrap();
        for (text, wanted) in texts.iter().zip(fixture[name]["ids"].as_array().unwrap()) {
            let text = text.as_str().unwrap();
            let ids = tokenizer.encode(text, false, false).unwrap();
            assert_eq!(serde_json::json!(ids), *wanted, "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&ids), text.as_bytes(), "{name}: {text:?}");
        }
    }
}

#[test]
fn row_15_the_space_before_a_text() {
    let (llama, gemma) = (tokenizer("llama"), tokenizer("gemma"));
    assert!(llama.adds_bos() && gemma.adds_bos(), "SentencePiece models want BOS unless they say otherwise");
    assert!(!read("llama", set("tokenizer.ggml.add_bos_token", false)).unwrap().adds_bos());
    for (tokenizer, first) in [(llama, b" "), (gemma, b"z")] {
        assert_eq!(
            tokenizer.token_bytes(tokenizer.encode("z", false, false).unwrap()[0]).unwrap()[0],
            first[0]
        );
    }
    let off = read("llama", set("tokenizer.ggml.add_space_prefix", false)).unwrap();
    assert_eq!(off.token_bytes(off.encode("z", false, false).unwrap()[0]), Some(&b"z"[..]));
    for tokenizer in [llama, gemma, &off] {
        for text in ["", " a", "a ", "  ", "\n\n", "</s>a", "</s> a", "a</s></s>\n", "\u{2581} \u{2581}"] {
            for parse_special in [false, true] {
                let ids = tokenizer.encode(text, false, parse_special).unwrap();
                assert_eq!(tokenizer.decode(&ids), text.as_bytes(), "{text:?}");
            }
        }
    }
    // What goes on after a prompt keeps its own space.
    let ids = llama.encode("a", false, false).unwrap();
    let mut decoder = StreamDecoder::continuing(false);
    assert_eq!(ids.iter().map(|&id| decoder.push(llama, id)).collect::<String>(), " a");
}

#[test]
fn row_15_a_megabyte() {
    let letters = "aé▁ \n語🙂\u{301}0";
    let text: String = letters
        .chars()
        .cycle()
        .scan(7_usize, |state, character| {
            *state = *state * 31 % 10_007;
            Some(if *state % 3 == 0 { ' ' } else { character })
        })
        .take(400_000)
        .collect();
    for name in ["llama", "gemma"] {
        let tokenizer = tokenizer(name);
        for text in [&text, &" ".repeat(1 << 20), &"a".repeat(1 << 20)] {
            assert!(tokenizer.decode(&tokenizer.encode(text, false, true).unwrap()) == text.as_bytes());
        }
    }
}

#[test]
fn row_16_ends_of_generation() {
    let gemma = tokenizer("gemma");
    let turn_end = gemma.special_token("<end_of_turn>").unwrap();
    assert!(gemma.is_end_of_generation(turn_end) && gemma.is_end_of_generation(2));
    let without = read("gemma", remove("tokenizer.ggml.eos_token_id")).unwrap();
    assert_eq!(without.ends_of_generation(), [turn_end]);
}

#[test]
fn what_is_missing_or_wrong_is_named() {
    let scores = "tokenizer.ggml.scores";
    says(&refused(remove(scores)), &[scores, "is missing"]);
    says(&refused(set(scores, Array::F32(vec![0.0; 3]))), &[scores, "3 scores", "1100 tokens"]);
    let mut wrong = vec![0.0; 1100];
    wrong[7] = f32::NAN;
    says(&refused(set(scores, Array::F32(wrong))), &[scores, "token 7", "NaN"]);
    says(&refused(set("tokenizer.ggml.model", "bert")), &["`bert`", "accepted: gpt2", "llama", "t5"]);
    let notices = read("llama", remove("tokenizer.ggml.token_type")).unwrap().notices().join("\n");
    assert!(notices.contains("bytes have no token") && notices.contains("unknown token"), "{notices}");
}

proptest! {
    #[test]
    fn any_text_comes_back(text in "\\PC{0,60}|[ \u{2581}a</s>\n]{0,30}") {
        for name in ["llama", "gemma"] {
            let tokenizer = tokenizer(name);
            let ids = tokenizer.encode(&text, false, true).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids), text.as_bytes());
        }
    }
}

/// One of the small files beside the table of ids (fixtures/make_tokenizer_table.py), changed.
fn unigram(name: &str, change: impl FnOnce(&mut GgufWriter<'static>)) -> Result<Tokenizer> {
    let path = format!("{}/tests/fixtures/tokenizers/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
    let file = GgufFile::open(path)?;
    let mut w = GgufWriter::new(Container::Gguf);
    for (key, value) in file.metadata().iter() {
        w.set(key, value.clone());
    }
    change(&mut w);
    Tokenizer::from_gguf(&GgufFile::parse("unigram.gguf", w.to_bytes())?, &TokenizerOptions::default())
}

#[test]
fn row_14_and_15_unigram_on_long_runs() {
    let (bytes, words) = (unigram("unigram-bytes", |_| {}).unwrap(), unigram("unigram", |_| {}).unwrap());
    // Quadratic time would be minutes here; the test ends or it does not.
    for unit in ["a", " ", "7", "\u{301}", "^", "\n", "中", "a ", "\u{fffd}", "</s", "🙂"] {
        let text = unit.repeat((1 << 20) / unit.len());
        let ids = bytes.encode(&text, false, true).unwrap();
        assert!(bytes.decode(&ids) == text.as_bytes(), "{unit:?}");
        assert!(words.encode(&text, false, true).unwrap().len() <= text.len() + 1);
    }
    for text in
        ["", " a", "a ", "  ", "\n\n", "</s>a", "</s> a", "a</s></s>\n", "\u{2581} \u{2581}", "\0\u{7f}é 🙂"]
    {
        for parse_special in [false, true] {
            let ids = bytes.encode(text, false, parse_special).unwrap();
            assert_eq!(bytes.decode(&ids), text.as_bytes(), "{text:?}");
        }
    }
    let off = unigram("unigram-bytes", set("tokenizer.ggml.add_space_prefix", false)).unwrap();
    assert_eq!(off.decode(&off.encode("a", false, false).unwrap()), b"a");
    assert_ne!(off.encode("a", false, false).unwrap(), bytes.encode("a", false, false).unwrap());
    // Rewriting rules and spaces that are made one.
    assert_eq!(words.encode("ﬁ \t x", false, false).unwrap(), words.encode("  fi x ", false, false).unwrap());
    let kept = unigram("unigram", remove("tokenizer.ggml.precompiled_charsmap")).unwrap();
    assert_ne!(kept.encode("ﬁ", false, false).unwrap(), kept.encode("fi", false, false).unwrap());
}

#[test]
fn what_is_wrong_with_a_unigram_file_is_named() {
    let key = "tokenizer.ggml.precompiled_charsmap";
    let refused = |change: &dyn Fn(&mut GgufWriter<'static>)| unigram("unigram", |w| change(w)).unwrap_err();
    says(&refused(&set(key, Array::U8(vec![1, 0]))), &[key, "2 bytes"]);
    says(&refused(&set(key, Array::U8(vec![9, 0, 0, 0, 1]))), &[key, "trie of 9 bytes"]);
    says(&refused(&set(key, "x")), &[key, "an array of bytes"]);
    says(&refused(&set("tokenizer.ggml.scores", Array::F32(vec![0.0]))), &["1 scores"]);
    let own = "thermocline.tokenizer.normalizer";
    says(&refused(&set(own, "{")), &[own, "no JSON"]);
    says(&refused(&set(own, "{\"type\": \"Nmt\"}")), &[own, "Nmt"]);
}
