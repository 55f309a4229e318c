//! Ids beside those of llama.cpp, Hugging Face and SentencePiece, on hard cases (fixtures/make_tokenizer_table.py).
//!
//! Where a peer differs is listed here with the reason; a difference that is listed and is not there fails, too. The
//! page docs/tokenizers.md has the same table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use formats::gguf::{Container, GgufFile, GgufWriter};
use formats::tokenizer::{Tokenizer, TokenizerOptions};
use serde_json::Value as Json;

/// Cases (by number) in which a peer's ids are not ours, and why.
struct Difference {
    tokenizer: &'static str,
    peer: &'static str,
    cases: &'static [usize],
    why: &'static str,
}

const INVALID: &str =
    "bytes that are no UTF-8: there one U+FFFD per byte, and overlong forms count as characters";
const INVALID_KEPT: &str = "bytes that are no UTF-8 are byte tokens there, U+FFFD here";
const LOW_LINE: &str = "a U+2581 in the text is itself here, a space there";
const LLAMA_CPP: &str = "llama.cpp";
const HUGGING_FACE: &str = "hugging face";
const SENTENCEPIECE: &str = "sentencepiece";

const fn differs(
    tokenizer: &'static str,
    peer: &'static str,
    cases: &'static [usize],
    why: &'static str,
) -> Difference {
    Difference { tokenizer, peer, cases, why }
}

const DIFFERENCES: &[Difference] = &[
    differs("gpt-2", LLAMA_CPP, &[30, 31], INVALID),
    differs("llama-bpe", LLAMA_CPP, &[30, 31], INVALID),
    differs("qwen2", LLAMA_CPP, &[13], "the tokenizer.json asks for NFC, which is not done there"),
    differs("qwen2", LLAMA_CPP, &[30, 31], INVALID),
    differs("smollm", LLAMA_CPP, &[30, 31], INVALID),
    differs("falcon", LLAMA_CPP, &[30, 31], INVALID),
    differs("deepseek-coder", LLAMA_CPP, &[30, 31], INVALID),
    differs("llama-2", LLAMA_CPP, &[29], LOW_LINE),
    differs("llama-2", LLAMA_CPP, &[30, 31], INVALID_KEPT),
    differs("llama-2, converted", HUGGING_FACE, &[29], LOW_LINE),
    differs("llama-2", SENTENCEPIECE, &[29], LOW_LINE),
    differs("unigram", LLAMA_CPP, &[29], LOW_LINE),
    differs("unigram", LLAMA_CPP, &[30, 31], INVALID),
    differs("unigram, converted", HUGGING_FACE, &[29], LOW_LINE),
    differs("unigram", SENTENCEPIECE, &[29], LOW_LINE),
    differs(
        "unigram-bytes",
        LLAMA_CPP,
        &[5, 6, 7, 8, 12, 17, 18, 20, 27, 28],
        "unigram models have no byte fallback there",
    ),
    differs("unigram-bytes", LLAMA_CPP, &[1, 21], "no space is put before a text of spaces there"),
    differs("unigram-bytes", LLAMA_CPP, &[29], LOW_LINE),
    differs("unigram-bytes", LLAMA_CPP, &[30, 31], INVALID),
    differs("unigram-bytes, converted", HUGGING_FACE, &[27], "the text `<0x41>` is a byte token there"),
    differs("unigram-bytes, converted", HUGGING_FACE, &[29], LOW_LINE),
    differs("unigram-bytes", SENTENCEPIECE, &[18], "of equal sums of scores, f32 there takes another way"),
    differs("unigram-bytes", SENTENCEPIECE, &[29], LOW_LINE),
    differs("SmolLM2-135M", LLAMA_CPP, &[30, 31], INVALID),
    differs(
        "Qwen2.5-Coder-1.5B",
        LLAMA_CPP,
        &[27],
        "`</s>` is an end marker there in every vocabulary that has it",
    ),
    differs("Qwen2.5-Coder-1.5B", LLAMA_CPP, &[30, 31], INVALID),
    differs("Gemma 3 270M", LLAMA_CPP, &[29], LOW_LINE),
    differs("Gemma 3 270M", LLAMA_CPP, &[30, 31], INVALID_KEPT),
    differs(
        "Gemma 3 270M",
        HUGGING_FACE,
        &[18, 21],
        "runs of spaces are merged there, one token of up to 31 here and in SentencePiece",
    ),
    differs("Gemma 3 270M", HUGGING_FACE, &[29], LOW_LINE),
];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers")
}

fn cases() -> Vec<Vec<u8>> {
    const SEPARATOR: &[u8] = b"\n=====\n";
    let text = std::fs::read(fixtures().join("hard.txt")).unwrap();
    let mut cases = vec![Vec::new()];
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with(SEPARATOR) {
            cases.push(Vec::new());
            at += SEPARATOR.len();
        } else {
            cases.last_mut().unwrap().push(text[at]);
            at += 1;
        }
    }
    cases
}

fn table() -> Json {
    serde_json::from_slice(&std::fs::read(fixtures().join("table.json")).unwrap()).unwrap()
}

/// The tokenizer in this GGUF file.
fn from_gguf(path: &Path) -> Tokenizer {
    let file = GgufFile::open(path).unwrap();
    Tokenizer::from_gguf(&file, &TokenizerOptions::default()).unwrap()
}

/// The tokenizer in this `tokenizer.json`, which need not have that name.
fn from_json(path: &Path) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(path, folder.path().join("tokenizer.json")).unwrap();
    Tokenizer::from_folder(folder.path(), &TokenizerOptions::default()).unwrap()
}

/// The small tokenizers: Hugging Face's is the same `tokenizer.json`, once as it is and once as the keys that a converted
/// file has of it; the others have the same GGUF file where there is one, or those keys.
pub(crate) fn small_tokenizers() {
    let table = table();
    let mut rows = Vec::new();
    for (name, peers) in table["rows"].as_object().unwrap() {
        let json = fixtures().join(format!("{name}.json"));
        let gguf = fixtures().join(format!("{name}.gguf"));
        if !json.is_file() {
            continue; // a real one
        }
        let converted = converted(&json);
        for peer in peers.as_object().unwrap().keys() {
            let ours = if gguf.is_file() { from_gguf(&gguf) } else { converted.clone() };
            let mut compared = vec![(name.clone(), ours)];
            if peer == HUGGING_FACE {
                compared =
                    vec![(name.clone(), from_json(&json)), (format!("{name}, converted"), converted.clone())];
            }
            for (row, tokenizer) in compared {
                // A tokenizer.json alone names no end.
                let odd =
                    tokenizer.notices().iter().find(|notice| !notice.starts_with("no end-of-text token"));
                assert!(odd.is_none(), "{row}: {odd:?}");
                rows.push(Row { tokenizer: row, ..compare(&table, name, peer, &tokenizer) });
            }
        }
    }
    assert_eq!(rows.len(), 30);
    check(&rows);
}

/// What `convert` writes of this `tokenizer.json`, read back.
fn converted(json: &Path) -> Tokenizer {
    let folder = super::folder_with(json);
    let read = GgufFile::open(folder.path()).unwrap();
    let mut writer = GgufWriter::new(Container::Gguf);
    for (key, value) in read.metadata().iter() {
        writer.set(key, value.clone());
    }
    let written = GgufFile::parse("written.gguf", writer.to_bytes()).unwrap();
    Tokenizer::from_gguf(&written, &TokenizerOptions::default()).unwrap()
}

/// A real tokenizer out of the model's GGUF file.
pub(crate) fn real_tokenizer(name: &str, path: &Path) {
    let table = table();
    let tokenizer = from_gguf(path);
    let peers = table["rows"][name].as_object().unwrap();
    let rows: Vec<Row> = peers.keys().map(|peer| compare(&table, name, peer, &tokenizer)).collect();
    assert_eq!(rows.len(), 2);
    check(&rows);
}

/// One tokenizer beside one peer.
struct Row {
    tokenizer: String,
    peer: String,
    /// By case: what differs.
    differing: BTreeMap<usize, String>,
    cases: usize,
}

fn compare(table: &Json, name: &str, peer: &str, tokenizer: &Tokenizer) -> Row {
    let all = table["rows"][name][peer].as_array().unwrap();
    let cases = cases();
    assert_eq!(cases.len(), all.len());
    let mut differing = BTreeMap::new();
    for (number, (case, wanted)) in cases.iter().zip(all).enumerate() {
        // SentencePiece reads no special tokens in text.
        let ids = tokenizer.encode_bytes(case, false, peer != "sentencepiece").unwrap();
        if serde_json::json!(ids) != *wanted {
            let wanted: Vec<u32> = serde_json::from_value(wanted.clone()).unwrap();
            let common = ids.iter().zip(&wanted).take_while(|(a, b)| a == b).count();
            let show = |ids: &[u32]| {
                let some = &ids[common..ids.len().min(common + 6)];
                let texts: Vec<_> = some
                    .iter()
                    .map(|&id| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap_or(b"?")))
                    .collect();
                format!("{some:?} {texts:?}")
            };
            let text = String::from_utf8_lossy(&tokenizer.decode(&ids[..common])).into_owned();
            differing.insert(number, format!("after {text:?} {} instead of {}", show(&ids), show(&wanted)));
        }
    }
    Row { tokenizer: name.to_owned(), peer: peer.to_owned(), differing, cases: all.len() }
}

/// Differences are those that are listed, and the page says so.
fn check(rows: &[Row]) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/tokenizers.md");
    let page = std::fs::read_to_string(page).unwrap_or_default();
    let mut wrong = String::new();
    for row in rows {
        let listed: Vec<&Difference> = DIFFERENCES
            .iter()
            .filter(|difference| difference.tokenizer == row.tokenizer && difference.peer == row.peer)
            .collect();
        let mut expected: Vec<usize> =
            listed.iter().flat_map(|difference| difference.cases).copied().collect();
        expected.sort_unstable();
        let found: Vec<usize> = row.differing.keys().copied().collect();
        if found != expected {
            writeln!(
                wrong,
                "{} beside {}: cases {found:?} differ, {expected:?} are listed",
                row.tokenizer, row.peer
            )
            .unwrap();
            for (case, what) in row.differing.iter().filter(|(case, _)| !expected.contains(case)) {
                writeln!(wrong, "  case {case}: {what}").unwrap();
            }
        }
        let equal = row.cases - found.len();
        let whys: Vec<&str> = listed.iter().map(|difference| difference.why).collect();
        let why = if whys.is_empty() { "-".to_owned() } else { whys.join("; ") };
        let line = format!("| {} | {} | {equal} of {} | {why} |", row.tokenizer, row.peer, row.cases);
        if !page.contains(&line) {
            writeln!(wrong, "docs/tokenizers.md lacks the line\n{line}").unwrap();
        }
    }
    assert!(wrong.is_empty(), "\n{wrong}"); // the page's lines come from here
}
