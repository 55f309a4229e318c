//! Reads a decoder-only transformer by its architecture's [`Layout`]: sizes, embeddings, norms, head, then the layers.

use std::path::Path;

use super::calibration::{self, Calibration};
use super::experts::{self, ExpertLayout};
use super::reader::{Reader, Wanted};
use super::rope::{self, Rope, RopeStyle};
use super::{
    Activation, Architecture, Layer, ModelDescription, Norm, OutputHead, Prediction, PredictorInput, layer,
};
use crate::gguf::{Container, GgufFile};
use crate::{FormatError, Result};

/// What an architecture is made of; everything else is in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// The kind of every norm but those of queries and keys (which are RMS norms).
    pub(super) norm: Norm,
    /// Which elements turn; `None` where positions are learned.
    pub(super) rope: Option<RopeStyle>,
    /// Base of the turning frequencies where the file names none.
    pub(super) rope_base: f64,
    /// The activation where neither key nor container says otherwise.
    pub(super) activation: Activation,
    /// Whether there is a gate matrix.
    pub(super) gated: bool,
    /// Whether each head of queries and keys is normed.
    pub(super) qk_norm: bool,
    /// Whether attention and feed-forward have a norm behind them, too.
    pub(super) post_norms: bool,
    /// Whether attention and feed-forward see the same input.
    pub(super) parallel: bool,
    /// How experts are used, where files may have them.
    pub(super) experts: Option<ExpertLayout>,
}

/// The layout that the others are told apart from.
pub(super) const LLAMA: Layout = Layout {
    norm: Norm::Rms,
    rope: Some(RopeStyle::Interleaved),
    rope_base: 10_000.0,
    activation: Activation::Silu,
    gated: true,
    qk_norm: false,
    post_norms: false,
    parallel: false,
    experts: None,
};

pub(super) fn read(file: &GgufFile, architecture: &Architecture) -> Result<ModelDescription> {
    let metadata = file.metadata();
    let layout = &architecture.layout;
    let reader = &Reader::new(file, architecture.name);
    let mixture = experts::mixture(reader, layout)?;

    let n_layer = reader.size("block_count")?;
    if n_layer > file.tensors().len() {
        let problem = format!("is {n_layer}, but the file has only {} tensors", file.tensors().len());
        return Err(metadata.bad_value(&reader.key("block_count"), problem));
    }
    let n_embd = reader.size("embedding_length")?;
    let context_length = reader.size("context_length")?;
    let epsilon_key = match layout.norm {
        Norm::Rms => "attention.layer_norm_rms_epsilon",
        Norm::Layer => "attention.layer_norm_epsilon",
    };
    let epsilon = reader.float(epsilon_key)?;
    if !(0.0..1.0).contains(&epsilon) {
        return Err(metadata.bad_value(&reader.key(epsilon_key), format!("is {epsilon}; 0 to 1 is allowed")));
    }

    let token_embd = reader.any_tensor("token_embd.weight")?;
    let vocab_size = token_embd.rows();
    let reason = format!("`{}` by any number of tokens", reader.key("embedding_length"));
    let token_embd =
        reader.tensor("token_embd.weight", Wanted { dims: &[n_embd as u64, vocab_size], reason: &reason })?;
    let mut notices = Vec::new();
    let sampleable_vocab = sampleable(reader, vocab_size, &mut notices)?;
    let (output_norm, output_norm_bias) = reader.norm("output_norm", n_embd as u64)?;
    let wanted = Wanted { dims: &[n_embd as u64, vocab_size], reason: "the shape of `token_embd.weight`" };
    let output = match reader.optional_tensor("output.weight", wanted)? {
        Some(tensor) => OutputHead::Separate(tensor),
        None => OutputHead::Tied,
    };

    let heads = heads(reader, n_layer, n_embd)?;
    let n_ff = reader.sizes("feed_forward_length", n_layer)?;
    let activation = activation(reader, layout.activation)?;
    let mut layers = Vec::with_capacity(n_layer);
    for (index, (heads, n_ff)) in heads.iter().zip(n_ff).enumerate() {
        layers.push(layer::read(reader, index, n_embd, heads, n_ff, (layout, activation, mixture.as_ref()))?);
    }
    let narrowest = heads.iter().map(|heads| heads.head_dim).min().unwrap_or(0);
    let rope = match layout.rope {
        Some(style) => {
            let pairs = &[("interleaved", RopeStyle::Interleaved), ("split", RopeStyle::Split)];
            let style = reader.choice("rope.pairs", pairs)?.unwrap_or(style);
            rope::read(reader, narrowest, context_length, (style, layout.rope_base))?
        }
        None => Rope::none(),
    };

    let layers_without_predictor = predictor_gaps(file.container(), activation, &layers, &mut notices);
    let prediction = match layers.iter().any(|layer| layer.ffn.predictor.is_some()) {
        true => Some(prediction(reader, layout)?),
        false => None,
    };
    let file_name = || file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut model = ModelDescription {
        path: file.path().to_path_buf(),
        files: file.files().map(Path::to_path_buf).collect(),
        container: file.container(),
        architecture: architecture.name.to_owned(),
        name: metadata.string("general.name")?.map_or_else(file_name, str::to_owned),
        n_embd,
        vocab_size: usize::try_from(vocab_size).unwrap_or(usize::MAX),
        sampleable_vocab,
        context_length,
        norm: layout.norm,
        norm_offset: reader.optional_float("norm_offset")?.unwrap_or(0.0) as f32,
        rms_epsilon: epsilon as f32,
        rope,
        token_embd,
        embedding_scale: 1.0,
        positions: None,
        layers,
        output_norm,
        output_norm_bias,
        output,
        prediction,
        calibration: Calibration::default(),
        layers_without_predictor,
        notices,
    };
    model.calibration = calibration::read(reader, &model.layers)?;
    (architecture.finish)(reader, &mut model)?;
    reader.refuse_unused()?;
    Ok(model)
}

/// How many ids may be sampled: those that have both a row in the embedding and a token in the vocabulary.
fn sampleable(reader: &Reader<'_>, rows: u64, notices: &mut Vec<String>) -> Result<usize> {
    const KEY: &str = "tokenizer.ggml.tokens";
    let metadata = reader.file.metadata();
    if let Some(claimed) = metadata.uint(&reader.key("vocab_size"))?.filter(|&claimed| claimed != rows) {
        let key = reader.key("vocab_size");
        notices
            .push(format!("`{key}` is {claimed}, but `token_embd.weight` has {rows} rows: the rows count"));
    }
    let Some(tokens) = metadata.strings(KEY)? else {
        notices.push(format!("`{KEY}` is missing: the file has no vocabulary, ids are all there is"));
        return Ok(usize::try_from(rows).unwrap_or(usize::MAX));
    };
    let count = tokens.len() as u64;
    if count > rows {
        return Err(FormatError::Shape {
            path: reader.file.path().to_path_buf(),
            tensor: "token_embd.weight".into(),
            found: format!("{rows} rows"),
            wanted: format!("at least {count} rows"),
            reason: format!("`{KEY}` lists {count} tokens; the vocabulary is of another model"),
        });
    }
    if count < rows {
        notices.push(format!(
            "`{KEY}` lists {count} tokens for {rows} embedding rows: later ids are never sampled"
        ));
    }
    Ok(tokens.len())
}

/// Sizes of one layer's attention.
pub(super) struct Heads {
    pub(super) n_head: usize,
    pub(super) n_head_kv: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
}

fn heads(reader: &Reader<'_>, n_layer: usize, n_embd: usize) -> Result<Vec<Heads>> {
    let metadata = reader.file.metadata();
    let n_head = reader.sizes("attention.head_count", n_layer)?;
    let n_head_kv = match reader.optional_sizes("attention.head_count_kv", n_layer)? {
        Some(counts) => counts,
        None => n_head.clone(),
    };
    let key_length = reader.optional_size("attention.key_length")?;
    let value_length = reader.optional_size("attention.value_length")?;
    let mut heads = Vec::with_capacity(n_layer);
    for (index, (&n_head, &n_head_kv)) in n_head.iter().zip(&n_head_kv).enumerate() {
        if !n_head.is_multiple_of(n_head_kv) {
            let problem =
                format!("is {n_head_kv} in layer {index}, which does not divide its {n_head} heads");
            return Err(metadata.bad_value(&reader.key("attention.head_count_kv"), problem));
        }
        if key_length.is_none() && !n_embd.is_multiple_of(n_head) {
            let problem = format!(
                "is {n_head} in layer {index}, which does not divide the width {n_embd}, and `{}` is absent",
                reader.key("attention.key_length")
            );
            return Err(metadata.bad_value(&reader.key("attention.head_count"), problem));
        }
        let head_dim = key_length.unwrap_or(n_embd / n_head);
        heads.push(Heads { n_head, n_head_kv, head_dim, value_dim: value_length.unwrap_or(head_dim) });
    }
    Ok(heads)
}

fn activation(reader: &Reader<'_>, default: Activation) -> Result<Activation> {
    let named = reader.choice("feed_forward_activation", Activation::NAMES)?;
    Ok(match (named, reader.file.container()) {
        (Some(activation), _) => activation,
        // Models for PowerInfer were trained with ReLU, whatever their architecture had before.
        (None, Container::PowerInfer) if !default.is_sparse() => Activation::Relu,
        (None, _) => default,
    })
}

fn prediction(reader: &Reader<'_>, layout: &Layout) -> Result<Prediction> {
    const KEY: &str = "powerinfer.sparse_threshold";
    let inputs = &[("residual", PredictorInput::Residual), ("layer-input", PredictorInput::LayerInput)];
    let default = if layout.parallel { PredictorInput::LayerInput } else { PredictorInput::Residual };
    let input = reader.choice("feed_forward_predictor_input", inputs)?.unwrap_or(default);
    let threshold = reader.file.metadata().float(KEY)?.unwrap_or(0.0) as f32;
    Ok(Prediction { input, threshold })
}

/// The layers that lack a predictor in a model that has some or was made to have them, and the line that says so.
fn predictor_gaps(
    container: Container,
    activation: Activation,
    layers: &[Layer],
    notices: &mut Vec<String>,
) -> Vec<usize> {
    let without: Vec<usize> =
        (0..layers.len()).filter(|&index| layers[index].ffn.predictor.is_none()).collect();
    if without.len() < layers.len() {
        if !without.is_empty() {
            let list: Vec<String> = without.iter().map(usize::to_string).collect();
            notices.push(format!(
                "predictors (blk.N.fc1/fc2) incomplete for layer {}: dense there",
                list.join(", ")
            ));
        }
        return without;
    }
    if container == Container::PowerInfer || activation.is_sparse() {
        notices
            .push("no predictors (blk.N.fc1/fc2) in the file: dense, or exact skipping by gate".to_owned());
        return without;
    }
    Vec::new()
}
