//! The keys that are written: those that llama.cpp reads, in the types that it wants.

use super::Options;
use crate::gguf::{Array, Container, GgufFile, StringArray, Value};
use crate::model::ModelDescription;
use crate::tokenizer::normalise::Normaliser;
use crate::tokenizer::read::NORMALISER;
use crate::{FormatError, Result};

/// Keys whose meaning the conversion has put into the tensors, or that only stood for safetensors.
const PUT_INTO_TENSORS: [&str; 3] = ["rope.pairs", "norm_offset", "attention.scale"];
/// Of Llama 3's stretching, which becomes a tensor.
const STRETCHING: &str = "rope.scaling.";
const ACTIVATION: &str = "feed_forward_activation";
/// What an architecture does where no key says so; anything else keeps the key.
const ACTIVATIONS: &[(&str, &str)] = &[
    ("llama", "silu"),
    ("qwen2", "silu"),
    ("qwen3", "silu"),
    ("qwen3moe", "silu"),
    ("gemma3", "gelu-tanh"),
    ("falcon", "gelu-erf"),
    ("opt", "relu"),
    ("bamboo", "drelu"),
    ("smallthinker", "relu"),
];
const UNUSED: i32 = 5;

type Metadata = Vec<(String, Value)>;

pub(super) fn collect(file: &GgufFile, options: &Options, lines: &mut Vec<String>) -> Result<Metadata> {
    let mut metadata = match file.container() {
        Container::Safetensors => of_safetensors(file, options, lines)?,
        Container::Gguf | Container::PowerInfer => of_gguf(file)?,
    };
    if let Some(name) = &options.pre_tokenizer {
        let known = crate::tokenizer::pre_tokenizers();
        if !known.contains(&name.as_str()) {
            return Err(FormatError::Unsupported {
                path: file.path().to_path_buf(),
                what: format!("pre-tokenizer `{name}`"),
                advice: format!("accepted: {}", known.join(", ")),
            });
        }
        set(&mut metadata, "tokenizer.ggml.pre", Value::from(name.as_str()));
    }
    if options.without_tokenizer {
        metadata.retain(|(key, _)| !key.starts_with("tokenizer."));
        set(&mut metadata, "tokenizer.ggml.model", Value::from("no_vocab"));
    }
    Ok(metadata)
}

fn set(metadata: &mut Metadata, key: &str, value: Value) {
    match metadata.iter_mut().find(|entry| entry.0 == key) {
        Some(entry) => entry.1 = value,
        None => metadata.push((key.to_owned(), value)),
    }
}

/// Nearly everything as it is: a split model becomes one file, and what PowerInfer's magic says becomes a key.
fn of_gguf(file: &GgufFile) -> Result<Metadata> {
    let kept = file.metadata().iter().filter(|(key, _)| !key.starts_with("split."));
    let mut metadata: Metadata = kept.map(|(key, value)| (key.to_owned(), value.clone())).collect();
    if file.container() == Container::PowerInfer {
        let model = ModelDescription::describe(file)?;
        if let Some(layer) = model.layers.first() {
            let key = format!("{}.{ACTIVATION}", model.architecture);
            set(&mut metadata, &key, Value::from(layer.ffn.activation.name()));
        }
    }
    Ok(metadata)
}

fn of_safetensors(file: &GgufFile, options: &Options, lines: &mut Vec<String>) -> Result<Metadata> {
    let found = file.metadata();
    let old = found.string("general.architecture")?.unwrap_or_default().to_owned();
    // GGUF has no name of its own for Mistral.
    let architecture = if old == "mistral" { "llama" } else { &old };
    let usual = ACTIVATIONS.iter().find(|row| row.0 == architecture).map(|row| row.1);
    let stretched = found.string(&format!("{old}.{STRETCHING}type"))? == Some("llama3");
    let mut metadata = Metadata::new();
    for (key, value) in found.iter() {
        let Some(suffix) = key.strip_prefix(&old).and_then(|rest| rest.strip_prefix('.')) else {
            metadata.push((key.to_owned(), narrow(key, value)));
            continue;
        };
        let zero_cap = suffix.ends_with("_softcapping") && value.float() == Some(0.0);
        let usual_activation = suffix == ACTIVATION && usual.map(Value::from).as_ref() == Some(value);
        if PUT_INTO_TENSORS.contains(&suffix)
            || (stretched && suffix.starts_with(STRETCHING))
            || zero_cap
            || usual_activation
        {
            continue;
        }
        metadata.push((format!("{architecture}.{suffix}"), narrow(key, value)));
    }
    set(&mut metadata, "general.architecture", Value::from(architecture));
    if found.get("general.name").is_none() {
        let name = file.path().parent().and_then(|folder| folder.canonicalize().ok());
        let name =
            name.as_deref().and_then(|folder| folder.file_name()).unwrap_or_default().to_string_lossy();
        set(&mut metadata, "general.name", Value::from(&*name));
    }
    sizes(file, &old, architecture, &mut metadata)?;
    if architecture == "falcon" {
        // The order of the fused matrix, after the program that first had it.
        set(&mut metadata, "falcon.tensor_data_layout", Value::from("jploski"));
    }
    if !options.without_tokenizer {
        tokenizer(file, options, &mut metadata, lines)?;
    }
    Ok(metadata)
}

/// llama.cpp takes a key in one type only.
fn narrow(key: &str, value: &Value) -> Value {
    match value {
        Value::F64(value) => Value::F32(*value as f32),
        Value::U64(value) if key.ends_with("_token_id") => {
            u32::try_from(*value).map_or(Value::U64(*value), Value::U32)
        }
        other => other.clone(),
    }
}

/// Sizes that follow from others, but are looked for.
fn sizes(file: &GgufFile, old: &str, architecture: &str, metadata: &mut Metadata) -> Result<()> {
    let number = |suffix: &str| file.metadata().u32(&format!("{old}.{suffix}"));
    let (heads, width) = (number("attention.head_count")?, number("embedding_length")?);
    let head_width = match (number("attention.key_length")?, heads, width) {
        (Some(length), ..) => Some(length),
        (None, Some(heads), Some(width)) => width.checked_div(heads),
        _ => None,
    };
    if let Some(head_width) = head_width.filter(|_| architecture != "opt") {
        set(metadata, &format!("{architecture}.rope.dimension_count"), Value::U32(head_width));
    }
    if let Some(rows) = file.tensor("token_embd.weight").and_then(|tensor| u32::try_from(tensor.rows()).ok())
    {
        set(metadata, &format!("{architecture}.vocab_size"), Value::U32(rows));
    }
    Ok(())
}

/// Refuses a tokenizer that GGUF has no name for, and gives every row of the embedding a token.
fn tokenizer(
    file: &GgufFile,
    options: &Options,
    metadata: &mut Metadata,
    lines: &mut Vec<String>,
) -> Result<()> {
    const MODEL: &str = "tokenizer.ggml.model";
    const PRE: &str = "tokenizer.ggml.pre";
    let found = file.metadata();
    let unsupported = |what: String, advice: &str| FormatError::Unsupported {
        path: file.path().to_path_buf(),
        what,
        advice: advice.to_owned(),
    };
    match found.string(MODEL)? {
        None => {
            lines.push("there is no tokenizer.json: the file gets no tokenizer".into());
            set(metadata, MODEL, Value::from("no_vocab"));
            return Ok(());
        }
        // Names of what was not understood hold a space.
        Some(kind) if kind.contains(' ') => {
            return Err(unsupported(format!("tokenizer `{kind}`"), "--no-tokenizer leaves it out"));
        }
        Some(kind) => {
            let normaliser = found.string(NORMALISER)?.map(serde_json::from_str).and_then(Result::ok);
            let known = normaliser.map(|json| Normaliser::from_json(&json, kind != "gpt2")).transpose();
            known.map_err(|problem| {
                unsupported(format!("a tokenizer.json that {problem}"), "--no-tokenizer leaves it out")
            })?;
        }
    }
    if let Some(pre) = found.string(PRE)?.filter(|pre| pre.contains(' ') && options.pre_tokenizer.is_none()) {
        let what = format!("pre-tokenizer {pre}");
        return Err(unsupported(
            what,
            "--pre-tokenizer names the one of GGUF that splits text in the same way",
        ));
    }
    let rows = file.tensor("token_embd.weight").map_or(0, |tensor| tensor.rows());
    let Some(tokens) = found.strings("tokenizer.ggml.tokens")? else { return Ok(()) };
    let missing = rows.saturating_sub(tokens.len() as u64);
    if missing == 0 {
        return Ok(());
    }
    let first = tokens.len() as u64;
    let padding = (first..rows).map(|id| format!("[PAD{id}]").into_bytes());
    let tokens: StringArray = tokens.iter().map(<[u8]>::to_vec).chain(padding).collect();
    set(metadata, "tokenizer.ggml.tokens", Array::Strings(tokens).into());
    let length = usize::try_from(rows).unwrap_or(usize::MAX); // rows of a tensor in memory
    for (_, value) in metadata.iter_mut().filter(|(key, _)| key.starts_with("tokenizer.ggml.")) {
        match value {
            Value::Array(Array::I32(kinds)) => kinds.resize(length, UNUSED),
            Value::Array(Array::F32(scores)) => scores.resize(length, -1000.0),
            _ => {}
        }
    }
    lines.push(format!(
        "{missing} rows of the embedding have no token: they are named [PAD{first}] and so on, unused"
    ));
    Ok(())
}
