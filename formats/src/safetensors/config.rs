//! Translates `config.json` to the keys that GGUF has for the same.

use std::path::Path;

use serde_json::Value as Json;

use super::experts;
use crate::gguf::{Metadata, Value};
use crate::{FormatError, Result};

/// Architectures whose folders are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// Llama, Mistral, Qwen 2 and 3.
    Llama,
    Gemma3,
    Opt,
    Falcon,
}

/// What the configuration says.
pub(super) struct Config {
    pub(super) family: Family,
    /// Whether the embedding is the head, too.
    pub(super) tied: bool,
    pub(super) metadata: Metadata,
}

struct Row {
    model_type: &'static str,
    architecture: &'static str,
    family: Family,
    /// Where the file does not say.
    tied: bool,
    /// Keys of a mixture of experts.
    experts: Option<ReadExperts>,
}

type ReadExperts = fn(&Keys<'_>, &mut dyn FnMut(&str, Value)) -> Result<()>;

const LLAMA: Row =
    Row { model_type: "llama", architecture: "llama", family: Family::Llama, tied: false, experts: None };

const TABLE: &[Row] = &[
    LLAMA,
    Row { model_type: "mistral", architecture: "mistral", ..LLAMA },
    Row { model_type: "bamboo", architecture: "bamboo", ..LLAMA },
    Row { model_type: "qwen2", architecture: "qwen2", ..LLAMA },
    Row { model_type: "qwen3", architecture: "qwen3", ..LLAMA },
    Row { model_type: "gemma3_text", architecture: "gemma3", family: Family::Gemma3, tied: true, ..LLAMA },
    Row { model_type: "opt", architecture: "opt", family: Family::Opt, tied: true, ..LLAMA },
    Row { model_type: "falcon", architecture: "falcon", family: Family::Falcon, tied: true, ..LLAMA },
    // GGUF knows Mixtral as `llama` with experts.
    Row { model_type: "mixtral", experts: Some(experts::mixtral), ..LLAMA },
    Row { model_type: "qwen3_moe", architecture: "qwen3moe", experts: Some(experts::qwen3), ..LLAMA },
    Row {
        model_type: "smallthinker",
        architecture: "smallthinker",
        experts: Some(experts::smallthinker),
        ..LLAMA
    },
];

/// Reads keys of one JSON object.
pub(super) struct Keys<'a> {
    path: &'a Path,
    json: &'a Json,
}

impl Keys<'_> {
    pub(super) fn get(&self, key: &str) -> Option<&Json> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, found: &Json, wanted: &str) -> FormatError {
        let found: String = found.to_string().chars().take(60).collect();
        FormatError::KeyType { path: self.path.to_path_buf(), key: key.into(), found, wanted: wanted.into() }
    }

    pub(super) fn bad(&self, key: &str, problem: String) -> FormatError {
        FormatError::KeyValue { path: self.path.to_path_buf(), key: key.into(), problem }
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<u32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| u32::try_from(size).ok()).filter(|&size| size > 0);
        size.map(Some).ok_or_else(|| self.wrong(key, value, "a whole number from 1"))
    }

    pub(super) fn size(&self, key: &str) -> Result<u32> {
        let missing = || FormatError::MissingKey {
            path: self.path.to_path_buf(),
            key: key.into(),
            advice: "the model cannot be run without it".into(),
        };
        self.optional_size(key)?.ok_or_else(missing)
    }

    fn float(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.wrong(key, value, "a number"))
    }

    pub(super) fn truth(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false"))
    }

    fn text(&self, key: &str) -> Result<Option<&str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, value, "a string"))
    }
}

pub(super) fn read(path: &Path, json: &Json) -> Result<Config> {
    let keys = Keys { path, json };
    let found = keys.text("model_type")?.unwrap_or("none");
    let Some(row) = TABLE.iter().find(|row| row.model_type == found) else {
        let accepted: Vec<&str> = TABLE.iter().map(|row| row.model_type).collect();
        return Err(FormatError::Unsupported {
            path: path.to_path_buf(),
            what: format!("`model_type` {found:?}"),
            advice: format!("accepted: {}; other models may exist as GGUF", accepted.join(", ")),
        });
    };
    let mut metadata = Metadata::new(path);
    metadata.push("general.architecture".into(), Value::from(row.architecture));
    if let Some(name) = keys.text("_name_or_path")?.filter(|name| !name.is_empty()) {
        metadata.push("general.name".into(), Value::from(name));
    }
    let mut set = |suffix: &str, value: Value| metadata.push(format!("{}.{suffix}", row.architecture), value);
    set("block_count", keys.size("num_hidden_layers")?.into());
    set("embedding_length", keys.size("hidden_size")?.into());
    // Falcon's older files do not say it.
    let fixed = (row.family == Family::Falcon).then_some(2048);
    let context = match keys.optional_size("max_position_embeddings")?.or(fixed) {
        Some(context) => context,
        None => keys.size("max_position_embeddings")?,
    };
    set("context_length", context.into());
    let heads = keys.size("num_attention_heads")?;
    set("attention.head_count", heads.into());
    let mut activation = "hidden_act";
    if row.family == Family::Opt {
        opt(&keys)?;
        activation = "activation_function";
        set("feed_forward_length", keys.size("ffn_dim")?.into());
        set("attention.layer_norm_epsilon", Value::F32(1e-5)); // fixed in the model's code
    } else if row.family == Family::Falcon {
        activation = "activation";
        falcon(&keys, heads, &mut set)?;
    } else {
        match row.experts {
            Some(read) => read(&keys, &mut set)?,
            None => set("feed_forward_length", keys.size("intermediate_size")?.into()),
        }
        set("attention.layer_norm_rms_epsilon", keys.float("rms_norm_eps", 1e-6)?.into());
        set("attention.head_count_kv", keys.optional_size("num_key_value_heads")?.unwrap_or(heads).into());
        if let Some(width) = keys.optional_size("head_dim")? {
            set("attention.key_length", width.into());
            set("attention.value_length", width.into());
        }
        set("rope.pairs", Value::from("split")); // as the library turns, whatever GGUF files of the family do
        rope(&keys, &mut set)?;
        // Only Qwen has the switch.
        if keys.truth(
            "use_sliding_window",
            row.model_type == "mixtral" || matches!(row.architecture, "mistral" | "gemma3"),
        )? && let Some(window) = keys.optional_size("sliding_window")?
        {
            if row.architecture.starts_with("qwen") {
                return Err(keys.bad("use_sliding_window", "is true, which is not read for Qwen yet".into()));
            }
            set("attention.sliding_window", window.into());
        }
    }
    if row.family == Family::Gemma3 {
        gemma3(&keys, &mut set)?;
        activation = "hidden_activation";
    }
    // Bamboo's name says it; SmallThinker has none.
    let named = if row.architecture == "bamboo" { None } else { keys.text(activation)? };
    if let Some(name) = named {
        let known =
            [("silu", "silu"), ("relu", "relu"), ("gelu_pytorch_tanh", "gelu-tanh"), ("gelu", "gelu-erf")];
        let Some((_, name)) = known.iter().find(|(theirs, _)| *theirs == name) else {
            let accepted = known.map(|(theirs, _)| theirs).join(", ");
            return Err(keys.bad(activation, format!("is {name:?}; accepted: {accepted}")));
        };
        set("feed_forward_activation", Value::from(*name));
    }
    Ok(Config { family: row.family, tied: keys.truth("tie_word_embeddings", row.tied)?, metadata })
}

/// Variants of OPT that its description has no place for.
fn opt(keys: &Keys<'_>) -> Result<()> {
    if !keys.truth("do_layer_norm_before", true)? {
        return Err(
            keys.bad("do_layer_norm_before", "is false; only models with norms before are read".into())
        );
    }
    let (width, hidden) = (keys.optional_size("word_embed_proj_dim")?, keys.size("hidden_size")?);
    match width {
        Some(width) if width != hidden => {
            let problem =
                format!("is {width}, but `hidden_size` {hidden}; models with a projection are not read");
            Err(keys.bad("word_embed_proj_dim", problem))
        }
        _ => Ok(()),
    }
}

fn falcon(keys: &Keys<'_>, heads: u32, set: &mut dyn FnMut(&str, Value)) -> Result<()> {
    let grouped = keys.truth("new_decoder_architecture", false)?;
    if keys.truth("alibi", false)? {
        return Err(keys.bad("alibi", "is true; only models with rope are read".into()));
    }
    if !grouped && !keys.truth("parallel_attn", true)? {
        return Err(keys.bad("parallel_attn", "is false; only models with it are read".into()));
    }
    let kv_heads = match (grouped, keys.truth("multi_query", true)?) {
        (true, _) => keys.optional_size("num_kv_heads")?.unwrap_or(heads),
        (false, true) => 1,
        (false, false) => heads,
    };
    let width = keys.size("hidden_size")?;
    let neurons = keys.optional_size("ffn_hidden_size")?.or(width.checked_mul(4));
    let neurons = neurons.ok_or_else(|| keys.bad("hidden_size", format!("is {width}, far too much")))?;
    set("attention.head_count_kv", kv_heads.into());
    set("feed_forward_length", neurons.into());
    set("attention.layer_norm_epsilon", keys.float("layer_norm_epsilon", 1e-5)?.into());
    rope(keys, set)
}

fn gemma3(keys: &Keys<'_>, set: &mut dyn FnMut(&str, Value)) -> Result<()> {
    set("norm_offset", Value::F32(1.0)); // weights are stored less 1
    if let Some(period) = keys.optional_size("sliding_window_pattern")? {
        set("attention.sliding_window_pattern", period.into());
    }
    if let Some(kinds) = keys.get("layer_types").and_then(Json::as_array) {
        // The same as a period: every n-th layer sees all.
        let is_full = |kind: &Json| kind == "full_attention";
        let period = kinds.iter().position(is_full).map_or(kinds.len() + 1, |first| first + 1);
        if kinds.iter().enumerate().any(|(at, kind)| is_full(kind) != ((at + 1) % period == 0)) {
            return Err(keys
                .bad("layer_types", "is no regular pattern of sliding_attention and full_attention".into()));
        }
        set("attention.sliding_window_pattern", Value::U32(u32::try_from(period).unwrap_or(u32::MAX)));
    }
    let nested =
        keys.get("rope_parameters").and_then(|all| all.get("sliding_attention")?.get("rope_theta")?.as_f64());
    set("rope.freq_base_swa", keys.float("rope_local_base_freq", nested.unwrap_or(10_000.0))?.into());
    for key in ["final_logit_softcapping", "attn_logit_softcapping"] {
        set(key, keys.float(key, 0.0)?.into());
    }
    let wanted = f64::from(keys.optional_size("head_dim")?.unwrap_or(256));
    let scalar = keys.float("query_pre_attn_scalar", wanted)?;
    if scalar > 0.0 && scalar != wanted {
        set("attention.scale", Value::F64(scalar.sqrt().recip()));
    }
    Ok(())
}

/// The rope's keys, wherever this version of the library keeps them.
fn rope(keys: &Keys<'_>, set: &mut dyn FnMut(&str, Value)) -> Result<()> {
    let scaling = keys.get("rope_scaling").or_else(|| keys.get("rope_parameters"));
    // One object per kind of layer, in newer files.
    let scaling = scaling.map(|all| all.get("full_attention").unwrap_or(all));
    if let Some(base) = keys.get("rope_theta").or_else(|| scaling?.get("rope_theta")) {
        let base = base.as_f64().ok_or_else(|| keys.wrong("rope_theta", base, "a number"))?;
        set("rope.freq_base", base.into());
    }
    let Some(scaling) = scaling else { return Ok(()) };
    let inner = Keys { path: keys.path, json: scaling };
    let kind = match inner.text("rope_type")? {
        Some(kind) => kind,
        None => inner.text("type")?.unwrap_or("default"),
    };
    match kind {
        "default" => return Ok(()),
        "linear" | "llama3" | "yarn" => set("rope.scaling.type", Value::from(kind)),
        other => {
            let problem = format!("has type {other:?}; accepted: default, linear, llama3, yarn");
            return Err(keys.bad("rope_scaling", problem));
        }
    }
    set("rope.scaling.factor", inner.float("factor", 1.0)?.into());
    if let Some(original) = inner.optional_size("original_max_position_embeddings")? {
        set("rope.scaling.original_context_length", original.into());
    }
    let renamed = [
        ("low_freq_factor", "rope.scaling.low_freq_factor"),
        ("high_freq_factor", "rope.scaling.high_freq_factor"),
        ("beta_fast", "rope.scaling.yarn_beta_fast"),
        ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ];
    for (theirs, suffix) in renamed {
        if inner.get(theirs).is_some() {
            set(suffix, inner.float(theirs, 0.0)?.into());
        }
    }
    if kind == "yarn"
        && let Some(key) =
            ["attention_factor", "mscale", "mscale_all_dim"].iter().find(|key| inner.get(key).is_some())
    {
        return Err(keys.bad("rope_scaling", format!("holds `{key}`, which is not read yet")));
    }
    Ok(())
}
