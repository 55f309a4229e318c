//! Translates `tokenizer.json` and what belongs to it to the keys that GGUF has for a tokenizer.
//!
//! Byte-level BPE, and SentencePiece's BPE as Hugging Face writes it (`byte_fallback`). A tokenizer of another kind
//! does not keep the model from being opened: its name stands where the kind belongs, and is refused when it is used.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use super::json;
use crate::gguf::{Array, Metadata, StringArray, Value};
use crate::{FormatError, Result};

const FILE: &str = "tokenizer.json";
/// GGUF's codes of token kinds.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Expressions of pre-tokenizers, with the names that they have in GGUF without and with `ignore_merges`.
const SPLITS: &[(&str, &str, &str)] = &[
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "dbrx",
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        "qwen2",
        "qwen2 with ignore_merges",
    ),
];

/// Adds the tokenizer of `folder` to `metadata`, where there is one.
pub(super) fn read(folder: &Path, metadata: &mut Metadata) -> Result<()> {
    let path = folder.join(FILE);
    if !path.is_file() {
        return Ok(());
    }
    let tokenizer = json(&path)?;
    let model = &tokenizer["model"];
    let sentence = model["byte_fallback"] == true;
    let kind = match (model["type"].as_str(), sentence) {
        (Some("BPE"), true) => "llama".to_owned(),
        (Some("BPE"), false) => "gpt2".to_owned(),
        (other, _) => format!("{} of {FILE}", other.unwrap_or("unnamed")),
    };
    let known = !kind.contains(' ');
    metadata.push("tokenizer.ggml.model".into(), Value::from(kind.as_str()));
    if known {
        let vocabulary = Vocabulary::read(&path, &tokenizer, sentence)?;
        if sentence {
            metadata.push("tokenizer.ggml.scores".into(), Array::F32(vocabulary.scores()).into());
            metadata.push("tokenizer.ggml.add_space_prefix".into(), Value::Bool(puts_space(&tokenizer)));
        } else {
            metadata.push("tokenizer.ggml.pre".into(), Value::from(pre(&tokenizer).as_str()));
            let prefix = byte_level(&tokenizer).is_some_and(|level| level["add_prefix_space"] == true);
            metadata.push("tokenizer.ggml.add_space_prefix".into(), Value::Bool(prefix));
            metadata.push("tokenizer.ggml.merges".into(), Array::Strings(vocabulary.merges()).into());
        }
        if let Some(name) = normalizer(&tokenizer, sentence) {
            metadata.push("tokenizer.normalizer".into(), Value::from(name.as_str()));
        }
        specials(folder, &tokenizer, &vocabulary, metadata)?;
        metadata
            .push("tokenizer.ggml.tokens".into(), Array::Strings(vocabulary.tokens.iter().collect()).into());
        metadata.push("tokenizer.ggml.token_type".into(), Array::I32(vocabulary.kinds).into());
    }
    chat_template(folder, metadata)
}

/// The tokens by id, and the merges in order.
struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i32>,
    ids: HashMap<String, u32>,
    merges: Vec<(String, String)>,
}

impl Vocabulary {
    fn read(path: &Path, tokenizer: &Json, sentence: bool) -> Result<Vocabulary> {
        let bad = |problem: String| FormatError::NotSafetensors { path: path.to_path_buf(), problem };
        let model = &tokenizer["model"];
        let Some(vocab) = model["vocab"].as_object() else {
            return Err(bad("has no object `model.vocab`".into()));
        };
        let none = Vec::new();
        let added = tokenizer["added_tokens"].as_array().unwrap_or(&none);
        let mut rows: Vec<(u64, &str, i32)> = Vec::new();
        for (token, id) in vocab {
            let id = id.as_u64().ok_or_else(|| bad(format!("gives token {token:?} the id {id}")))?;
            let is_byte = sentence && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
            rows.push((id, token, if is_byte { BYTE } else { NORMAL }));
        }
        for token in added {
            let (Some(id), Some(content)) = (token["id"].as_u64(), token["content"].as_str()) else {
                return Err(bad(format!("holds an added token without id or content: {token}")));
            };
            rows.push((id, content, if token["special"] == true { CONTROL } else { USER_DEFINED }));
        }
        // Ids may have gaps, but not so many that a wrong id asks for all memory.
        let count = rows.iter().map(|row| row.0).max().map_or(0, |last| last.saturating_add(1));
        if count > 2 * rows.len() as u64 + 65_536 {
            return Err(bad(format!("has {} tokens with ids up to {}", rows.len(), count - 1)));
        }
        let mut tokens: Vec<String> = (0..count).map(|id| format!("[unused {id}]")).collect();
        let mut kinds = vec![UNUSED; tokens.len()];
        let mut ids = HashMap::with_capacity(rows.len());
        for (id, token, kind) in rows {
            tokens[id as usize] = token.to_owned(); // below `count`, which is a length
            kinds[id as usize] = kind;
            ids.insert(token.to_owned(), id as u32);
        }
        if let Some(&id) = model["unk_token"].as_str().and_then(|unknown| ids.get(unknown)) {
            kinds[id as usize] = UNKNOWN;
        }
        let mut merges = Vec::new();
        for (index, rule) in model["merges"].as_array().unwrap_or(&none).iter().enumerate() {
            let pair = match rule {
                Json::String(rule) => rule.split_once(' '),
                rule => rule[0].as_str().zip(rule[1].as_str()),
            };
            let (left, right) =
                pair.ok_or_else(|| bad(format!("has merge {index} of an unknown form: {rule}")))?;
            merges.push((left.to_owned(), right.to_owned()));
        }
        let mut vocabulary = Vocabulary { tokens, kinds, ids, merges };
        if sentence {
            vocabulary.leave_out_unmade();
        }
        Ok(vocabulary)
    }

    /// Tokens of several characters that no merge makes are never made of text.
    fn leave_out_unmade(&mut self) {
        let mut made = vec![false; self.tokens.len()];
        for (left, right) in &self.merges {
            if let Some(&id) = self.ids.get(&format!("{left}{right}")) {
                made[id as usize] = true;
            }
        }
        for ((token, kind), made) in self.tokens.iter().zip(&mut self.kinds).zip(made) {
            if *kind == NORMAL && !made && token.chars().count() > 1 {
                *kind = UNUSED;
            }
        }
    }

    /// Earlier merges score higher, as in the SentencePiece model that they were made from.
    fn scores(&self) -> Vec<f32> {
        let mut scores = vec![0.0; self.tokens.len()];
        for (rank, (left, right)) in self.merges.iter().enumerate().rev() {
            if let Some(&id) = self.ids.get(&format!("{left}{right}")) {
                scores[id as usize] = -(rank as f32) - 1.0;
            }
        }
        scores
    }

    fn merges(&self) -> StringArray {
        self.merges.iter().map(|(left, right)| format!("{left} {right}")).collect()
    }
}

/// The parts of a step, where it is a sequence; itself alone otherwise.
fn steps<'a>(step: &'a Json, parts: &str) -> Vec<&'a Json> {
    match step[parts].as_array() {
        Some(parts) => parts.iter().collect(),
        None if step.is_null() => Vec::new(),
        None => vec![step],
    }
}

fn byte_level(tokenizer: &Json) -> Option<&Json> {
    steps(&tokenizer["pre_tokenizer"], "pretokenizers").into_iter().find(|step| step["type"] == "ByteLevel")
}

/// GGUF's name of the pre-tokenizer; what it is made of, where there is none.
fn pre(tokenizer: &Json) -> String {
    let steps = steps(&tokenizer["pre_tokenizer"], "pretokenizers");
    let kinds: Vec<&str> = steps.iter().map(|step| step["type"].as_str().unwrap_or("unnamed")).collect();
    let own_split = steps.last().is_some_and(|level| level["use_regex"] != false);
    let merged = tokenizer["model"]["ignore_merges"] == true;
    let name = match (kinds.as_slice(), own_split) {
        (["ByteLevel"], true) if !merged => Some("gpt-2"),
        (["Digits", "ByteLevel"], true) if !merged && steps[0]["individual_digits"] == true => Some("smollm"),
        (["Split", "ByteLevel"], false) => {
            let plain = steps[0]["behavior"] == "Isolated" && steps[0]["invert"] != true;
            let found = SPLITS.iter().find(|row| plain && steps[0]["pattern"]["Regex"] == row.0);
            found.map(|row| if merged { row.2 } else { row.1 })
        }
        _ => None,
    };
    let detail = steps.iter().find_map(|step| step["pattern"]["Regex"].as_str()).unwrap_or_default();
    name.map_or_else(|| format!("{} {detail} of {FILE}", kinds.join(" + ")), str::to_owned)
}

/// A normaliser that is not repeated here.
fn normalizer(tokenizer: &Json, sentence: bool) -> Option<String> {
    let foreign = |step: &&Json| !(sentence && matches!(step["type"].as_str(), Some("Prepend" | "Replace")));
    let steps = steps(&tokenizer["normalizer"], "normalizers");
    let names: Vec<&str> =
        steps.into_iter().filter(foreign).map(|step| step["type"].as_str().unwrap_or("unnamed")).collect();
    (!names.is_empty()).then(|| names.join(" + "))
}

/// Whether SentencePiece's space is put before a text.
fn puts_space(tokenizer: &Json) -> bool {
    let prepends =
        steps(&tokenizer["normalizer"], "normalizers").iter().any(|step| step["type"] == "Prepend");
    let pre = steps(&tokenizer["pre_tokenizer"], "pretokenizers");
    let meta = pre.iter().find(|step| step["type"] == "Metaspace");
    prepends
        || meta.is_some_and(|meta| meta["prepend_scheme"] != "never" && meta["add_prefix_space"] != false)
}

/// A JSON file of the folder; nothing where it is absent.
fn beside(folder: &Path, name: &str) -> Result<Json> {
    let path = folder.join(name);
    if path.is_file() { json(&path) } else { Ok(Json::Null) }
}

/// Beginning and ends, out of every file that may name them.
fn specials(folder: &Path, tokenizer: &Json, vocabulary: &Vocabulary, metadata: &mut Metadata) -> Result<()> {
    let (config, generation) = (beside(folder, super::CONFIG)?, beside(folder, "generation_config.json")?);
    let settings = beside(folder, "tokenizer_config.json")?;
    let named = |key: &str| {
        let text = settings[key].as_str().or_else(|| settings[key]["content"].as_str())?;
        vocabulary.ids.get(text).map(|&id| u64::from(id))
    };
    let bos = named("bos_token").or_else(|| config["bos_token_id"].as_u64());
    let mut set =
        |name: &str, id: u64| metadata.push(format!("tokenizer.ggml.{name}_token_id"), Value::U64(id));
    if let Some(id) = bos {
        set("bos", id);
    }
    if let Some(id) = named("pad_token") {
        set("padding", id);
    }
    if let Some(&id) = tokenizer["model"]["unk_token"].as_str().and_then(|token| vocabulary.ids.get(token)) {
        set("unknown", id.into());
    }
    let mut ends = Vec::new();
    for source in [&generation["eos_token_id"], &config["eos_token_id"]] {
        match source.as_array() {
            Some(list) => ends.extend(list.iter().filter_map(Json::as_u64)),
            None => ends.extend(source.as_u64()),
        }
    }
    ends.extend(named("eos_token"));
    let mut kept: Vec<u64> = Vec::new();
    for id in ends {
        if !kept.contains(&id) {
            kept.push(id);
        }
    }
    // GGUF has three keys for ends; a fourth has never been seen.
    for (name, id) in ["eos", "eot", "eom"].iter().zip(kept) {
        set(name, id);
    }
    let processors = steps(&tokenizer["post_processor"], "processors");
    let first = processors.iter().find_map(|step| step["single"][0]["SpecialToken"]["id"].as_str());
    let template = first.is_some_and(|first| vocabulary.ids.get(first).map(|&id| u64::from(id)) == bos);
    let add = settings["add_bos_token"].as_bool().unwrap_or(template);
    metadata.push("tokenizer.ggml.add_bos_token".into(), Value::Bool(add && bos.is_some()));
    Ok(())
}

fn chat_template(folder: &Path, metadata: &mut Metadata) -> Result<()> {
    let path = folder.join("chat_template.jinja");
    let settings = beside(folder, "tokenizer_config.json")?;
    let listed = || {
        let list = settings["chat_template"].as_array()?;
        list.iter().find(|entry| entry["name"] == "default")?["template"].as_str()
    };
    let text = if path.is_file() {
        let io = |source| FormatError::Io { path: path.clone(), operation: "read", source };
        Some(fs::read_to_string(&path).map_err(io)?)
    } else {
        settings["chat_template"].as_str().or_else(listed).map(str::to_owned)
    };
    if let Some(text) = text {
        metadata.push("tokenizer.chat_template".into(), Value::from(text.as_str()));
    }
    Ok(())
}
