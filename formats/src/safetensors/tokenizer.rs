//! Translates `tokenizer.json` and what belongs to it to the keys that GGUF has for a tokenizer.
//!
//! A folder's text is tokenized by the crate `tokenizers`; of the keys it needs the tokens, the special ids and the
//! template. The others are for `convert`: byte-level BPE, SentencePiece's BPE as Hugging Face writes it
//! (`byte_fallback`), and its unigram model. What GGUF has no key for (normaliser, where a space is put) goes into keys
//! of our own. What GGUF has no name for is named where its name belongs, with a space in it, and `convert` refuses it.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use super::json;
use crate::gguf::{Array, Metadata, StringArray, Value};
use crate::tokenizer::read::{FIRST_ONLY, GREEDY, NORMALISER, SPLIT_WORDS, UNLESS_THERE, WORDS};
use crate::{FormatError, Result};

pub(crate) const FILE: &str = "tokenizer.json";
/// What the crate `tokenizers` knows.
pub(crate) const MODELS: &[&str] = &["BPE", "Unigram", "WordPiece", "WordLevel"];
/// GGUF's codes of token kinds.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

const LLAMA3: &str = r"Split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"Split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Steps of pre-tokenizers as [`step`] writes them, with the names that they have in GGUF without and with
/// `ignore_merges`.
const PRE_TOKENIZERS: &[(&[&str], &str, Option<&str>)] = &[
    (&["ByteLevel with words"], "gpt-2", None),
    (&["each digit", "ByteLevel with words"], "smollm", None),
    (&[LLAMA3, "ByteLevel"], "dbrx", Some("llama-bpe")),
    (&[QWEN2, "ByteLevel"], "qwen2", None),
    (&["Punctuation Contiguous", "ByteLevel with words", "digits", "Split [0-9][0-9][0-9]"], "falcon", None),
    (
        &[
            "Split [\r\n]",
            r"Split \s?\p{L}+",
            r"Split \s?\p{P}+",
            "Split [一-龥ࠀ-一가-\u{d7ff}]+",
            "each digit",
            "ByteLevel",
        ],
        "deepseek-coder",
        None,
    ),
];

/// Adds the tokenizer of `folder` to `metadata`, where there is one.
pub(crate) fn read(folder: &Path, metadata: &mut Metadata) -> Result<()> {
    let path = folder.join(FILE);
    if !path.is_file() {
        return Ok(());
    }
    let tokenizer = json(&path)?;
    let kind = kind(&tokenizer);
    metadata.push("tokenizer.ggml.model".into(), Value::from(kind.as_str()));
    let known = tokenizer["model"]["type"].as_str().is_some_and(|name| MODELS.contains(&name));
    if known {
        let sentence = matches!(kind.as_str(), "llama" | "t5");
        let vocabulary = Vocabulary::read(&path, &tokenizer, sentence)?;
        if !kind.contains(' ') {
            for_gguf(&tokenizer, &vocabulary, sentence, metadata);
        }
        specials(folder, &tokenizer, &vocabulary, metadata)?;
        metadata
            .push("tokenizer.ggml.tokens".into(), Array::Strings(vocabulary.tokens.iter().collect()).into());
        metadata.push("tokenizer.ggml.token_type".into(), Array::I32(vocabulary.kinds).into());
    }
    chat_template(folder, metadata)
}

/// GGUF's name of the kind; where it has none, what is out of the ordinary.
fn kind(tokenizer: &Json) -> String {
    let model = &tokenizer["model"];
    let name = match (model["type"].as_str(), model["byte_fallback"] == true) {
        (Some("Unigram"), _) => "t5",
        (Some("BPE"), true) => "llama",
        (Some("BPE"), false) => "gpt2",
        (other, _) => return format!("{} of {FILE}", other.unwrap_or("unnamed")),
    };
    let affix = |key: &&&str| model[**key].as_str().is_some_and(|text| !text.is_empty());
    let affix = ["continuing_subword_prefix", "end_of_word_suffix"].iter().find(affix);
    let own = |step: &&&Json| {
        step["type"] == "Metaspace"
            || step["type"] == "WhitespaceSplit"
            || (step["type"] == "Split" && step["pattern"]["String"] == " ")
    };
    let steps = steps(&tokenizer["pre_tokenizer"], "pretokenizers");
    // Those of byte-level BPE are looked up by their name.
    let odd = steps.iter().find(|step| name != "gpt2" && !own(step)).map(|odd| step(odd));
    match affix.map(|key| format!("`{key}`")).or(odd) {
        Some(odd) => format!("{} with {odd} of {FILE}", model["type"].as_str().unwrap_or_default()),
        None => name.to_owned(),
    }
}

/// How text is split and joined, in GGUF's keys and ours.
fn for_gguf(tokenizer: &Json, vocabulary: &Vocabulary, sentence: bool, metadata: &mut Metadata) {
    if sentence {
        let scores = vocabulary.scores.clone().unwrap_or_else(|| vocabulary.scores_of_merges());
        metadata.push("tokenizer.ggml.scores".into(), Array::F32(scores).into());
        spaces(tokenizer, metadata);
    } else {
        metadata.push("tokenizer.ggml.pre".into(), Value::from(pre(tokenizer).as_str()));
        let prefix = byte_level(tokenizer).is_some_and(|level| level["add_prefix_space"] == true);
        metadata.push("tokenizer.ggml.add_space_prefix".into(), Value::Bool(prefix));
        if prefix {
            metadata.push(UNLESS_THERE.into(), Value::Bool(true));
        }
        metadata.push("tokenizer.ggml.merges".into(), Array::Strings(vocabulary.merges()).into());
    }
    if let Some(normaliser) = normaliser(tokenizer, sentence) {
        metadata.push(NORMALISER.into(), Value::from(normaliser.to_string().as_str()));
    }
    let greedy = greedy(tokenizer);
    if !greedy.is_empty() {
        metadata.push(GREEDY.into(), Value::from(greedy.join(", ").as_str()));
    }
}

/// The tokens by id, and the merges in order.
struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<i32>,
    ids: HashMap<String, u32>,
    merges: Vec<(String, String)>,
    /// Where the file states them (unigram).
    scores: Option<Vec<f32>>,
}

/// What a unigram model has as `vocab`: pairs of token and score, by id.
fn scored(vocab: &Json) -> Option<Vec<(&str, f32)>> {
    vocab.as_array()?.iter().map(|pair| Some((pair[0].as_str()?, pair[1].as_f64()? as f32))).collect()
}

impl Vocabulary {
    fn read(path: &Path, tokenizer: &Json, sentence: bool) -> Result<Vocabulary> {
        let bad = |problem: String| FormatError::NotSafetensors { path: path.to_path_buf(), problem };
        let model = &tokenizer["model"];
        let none = Vec::new();
        let added = tokenizer["added_tokens"].as_array().unwrap_or(&none);
        let mut rows: Vec<(u64, &str, i32)> = Vec::new();
        // Bytes stand for themselves only where the model says so; elsewhere they are texts like any other.
        let bytes = sentence && model["byte_fallback"] == true;
        let kind = |token: &str| {
            let is_byte = bytes && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
            if is_byte { BYTE } else { NORMAL }
        };
        let mut scores = None;
        if model["type"] == "Unigram" {
            let pairs = scored(&model["vocab"])
                .ok_or_else(|| bad("has no list `model.vocab` of tokens with scores".into()))?;
            rows.extend((0..).zip(&pairs).map(|(id, (token, _))| (id, *token, kind(token))));
            scores = Some(pairs.iter().map(|pair| pair.1).collect::<Vec<f32>>());
        } else {
            let Some(vocab) = model["vocab"].as_object() else {
                return Err(bad("has no object `model.vocab`".into()));
            };
            for (token, id) in vocab {
                let id = id.as_u64().ok_or_else(|| bad(format!("gives token {token:?} the id {id}")))?;
                rows.push((id, token, kind(token)));
            }
        }
        for token in added {
            let (Some(id), Some(content)) = (token["id"].as_u64(), token["content"].as_str()) else {
                return Err(bad(format!("holds an added token without id or content: {token}")));
            };
            let kind = match token["special"] == true {
                true => CONTROL,
                // Looked for in the text before its spaces become U+2581: never found, so it is made by merges or not.
                false if sentence && token["normalized"] == false && content.contains('\u{2581}') => NORMAL,
                false => USER_DEFINED,
            };
            rows.push((id, content, kind));
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
        if let Some(id) = unknown(model, &ids).filter(|&id| (id as usize) < kinds.len()) {
            kinds[id as usize] = UNKNOWN;
        }
        if let Some(scores) = &mut scores {
            scores.resize(tokens.len(), 0.0); // added tokens have none
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
        let mut vocabulary = Vocabulary { tokens, kinds, ids, merges, scores };
        if sentence && vocabulary.scores.is_none() {
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
    fn scores_of_merges(&self) -> Vec<f32> {
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
    let steps: Vec<String> =
        steps(&tokenizer["pre_tokenizer"], "pretokenizers").into_iter().map(step).collect();
    let merged = tokenizer["model"]["ignore_merges"] == true;
    let row = PRE_TOKENIZERS.iter().find(|row| row.0 == steps);
    let name = row.and_then(|row| if merged { row.2 } else { Some(row.1) });
    let flag = if merged { " with ignore_merges" } else { "" };
    name.map_or_else(|| format!("{}{flag} of {FILE}", steps.join(" + ")), str::to_owned)
}

/// A step of a pre-tokenizer in words.
fn step(step: &Json) -> String {
    let text = |key: &str| step[key].as_str().unwrap_or("?");
    match step["type"].as_str() {
        Some("ByteLevel") if step["use_regex"] == false => "ByteLevel".into(),
        Some("ByteLevel") => "ByteLevel with words".into(),
        Some("Digits") if step["individual_digits"] == true => "each digit".into(),
        Some("Digits") => "digits".into(),
        Some("Punctuation") => format!("Punctuation {}", text("behavior")),
        Some("Split") => {
            let pattern = step["pattern"]["Regex"].as_str().or_else(|| step["pattern"]["String"].as_str());
            let pattern = pattern.unwrap_or("?");
            match (text("behavior"), step["invert"] == true) {
                ("Isolated", false) => format!("Split {pattern}"),
                (behaviour, invert) => format!("Split {behaviour} {invert} {pattern}"),
            }
        }
        other => other.unwrap_or("unnamed").into(),
    }
}

/// The id of the unknown token.
fn unknown(model: &Json, ids: &HashMap<String, u32>) -> Option<u32> {
    let by_name = model["unk_token"].as_str().and_then(|unknown| ids.get(unknown)).copied();
    by_name.or_else(|| u32::try_from(model["unk_id"].as_u64()?).ok())
}

/// Added tokens that take more of the text than themselves, or less often.
fn greedy(tokenizer: &Json) -> Vec<String> {
    let asks = |token: &&Json| ["lstrip", "rstrip", "single_word"].iter().any(|flag| token[*flag] == true);
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    added.filter(asks).map(|token| format!("`{}`", token["content"].as_str().unwrap_or_default())).collect()
}

/// Where SentencePiece's spaces are put and cut.
fn spaces(tokenizer: &Json, metadata: &mut Metadata) {
    let pre = steps(&tokenizer["pre_tokenizer"], "pretokenizers");
    let metaspace = pre.iter().find(|step| step["type"] == "Metaspace");
    let puts =
        metaspace.is_some_and(|meta| meta["prepend_scheme"] != "never" && meta["add_prefix_space"] != false);
    let prepends = prepends(tokenizer);
    let mut flag = |key: &str, value: bool| metadata.push(key.into(), Value::Bool(value));
    flag("tokenizer.ggml.add_space_prefix", prepends || puts);
    for (key, value) in [
        (UNLESS_THERE, puts && !prepends),
        (FIRST_ONLY, puts && !prepends && metaspace.is_some_and(|meta| meta["prepend_scheme"] == "first")),
        (SPLIT_WORDS, metaspace.is_some_and(|meta| meta["split"] != false)),
        (WORDS, pre.iter().any(|step| step["type"] == "WhitespaceSplit")),
    ] {
        if value {
            flag(key, value);
        }
    }
}

/// Whether the normaliser is what puts SentencePiece's space before a text.
fn prepends(tokenizer: &Json) -> bool {
    steps(&tokenizer["normalizer"], "normalizers").iter().any(|step| is_space_prefix(step))
}

fn is_space_prefix(step: &Json) -> bool {
    step["type"] == "Prepend" && step["prepend"] == "\u{2581}"
}

/// The normaliser, less SentencePiece's own: a space put before the text or written as U+2581.
fn normaliser(tokenizer: &Json, sentence: bool) -> Option<Json> {
    let writes_space = |step: &Json| {
        step["type"] == "Replace" && step["pattern"]["String"] == " " && step["content"] == "\u{2581}"
    };
    let steps = steps(&tokenizer["normalizer"], "normalizers");
    let kept: Vec<Json> = steps
        .into_iter()
        .filter(|step| !(sentence && (is_space_prefix(step) || writes_space(step))))
        .cloned()
        .collect();
    (!kept.is_empty()).then(|| serde_json::json!({ "type": "Sequence", "normalizers": kept }))
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
    if let Some(id) = unknown(&tokenizer["model"], &vocabulary.ids) {
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
