//! Architecture `llama` (Llama 1 to 3, Mistral, SmolLM, ...) and PowerInfer's `bamboo`, which is the same with dReLU.

use super::reader::{Reader, Wanted};
use super::rope::{self, RopeStyle};
use super::{
    Activation, Attention, Down, FeedForward, Layer, ModelDescription, OutputHead, Prediction, Predictor,
    PredictorInput,
};
use crate::gguf::{Container, GgufFile};
use crate::{FormatError, Result};

pub(super) fn read(file: &GgufFile) -> Result<ModelDescription> {
    let metadata = file.metadata();
    let architecture = metadata.string("general.architecture")?.unwrap_or("llama");
    let reader = &Reader::new(file, architecture);
    if let Some(experts) = metadata.uint(&reader.key("expert_count"))?.filter(|&count| count > 0) {
        return Err(FormatError::Unsupported {
            path: file.path().to_path_buf(),
            what: format!("a mixture of {experts} experts (`{}`)", reader.key("expert_count")),
            advice: "models with one feed-forward network per layer are".into(),
        });
    }

    let n_layer = reader.size("block_count")?;
    if n_layer > file.tensors().len() {
        let problem = format!("is {n_layer}, but the file has only {} tensors", file.tensors().len());
        return Err(metadata.bad_value(&reader.key("block_count"), problem));
    }
    let n_embd = reader.size("embedding_length")?;
    let context_length = reader.size("context_length")?;
    let rms_epsilon = reader.float("attention.layer_norm_rms_epsilon")?;
    if !(0.0..1.0).contains(&rms_epsilon) {
        let problem = format!("is {rms_epsilon}; 0 to 1 is allowed");
        return Err(metadata.bad_value(&reader.key("attention.layer_norm_rms_epsilon"), problem));
    }

    let token_embd = reader.any_tensor("token_embd.weight")?;
    let vocab_size = token_embd.rows();
    let reason = format!("`{}` by any number of tokens", reader.key("embedding_length"));
    let token_embd =
        reader.tensor("token_embd.weight", Wanted { dims: &[n_embd as u64, vocab_size], reason: &reason })?;
    let mut notices = Vec::new();
    let sampleable_vocab = sampleable(reader, vocab_size, &mut notices)?;
    let wanted = Wanted { dims: &[n_embd as u64], reason: "one element per residual element" };
    let output_norm = reader.tensor("output_norm.weight", wanted)?;
    let wanted = Wanted { dims: &[n_embd as u64, vocab_size], reason: "the shape of `token_embd.weight`" };
    let output = match reader.optional_tensor("output.weight", wanted)? {
        Some(tensor) => OutputHead::Separate(tensor),
        None => OutputHead::Tied,
    };

    let heads = heads(reader, n_layer, n_embd)?;
    let n_ff = reader.sizes("feed_forward_length", n_layer)?;
    let activation = activation(reader)?;
    let mut layers = Vec::with_capacity(n_layer);
    for (index, (heads, n_ff)) in heads.iter().zip(n_ff).enumerate() {
        layers.push(layer(reader, index, n_embd, heads, n_ff, activation)?);
    }
    let narrowest = heads.iter().map(|heads| heads.head_dim).min().unwrap_or(0);
    let rope = rope::read(reader, narrowest, context_length, RopeStyle::Interleaved)?;

    let layers_without_predictor = predictor_gaps(file.container(), activation, &layers, &mut notices);
    let prediction = match layers.iter().any(|layer| layer.ffn.predictor.is_some()) {
        true => Some(prediction(reader)?),
        false => None,
    };
    reader.refuse_unused()?;
    let file_name = || file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(ModelDescription {
        path: file.path().to_path_buf(),
        container: file.container(),
        architecture: architecture.to_owned(),
        name: metadata.string("general.name")?.map_or_else(file_name, str::to_owned),
        n_embd,
        vocab_size: usize::try_from(vocab_size).unwrap_or(usize::MAX),
        sampleable_vocab,
        context_length,
        rms_epsilon: rms_epsilon as f32,
        rope,
        token_embd,
        layers,
        output_norm,
        output,
        prediction,
        layers_without_predictor,
        notices,
    })
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

struct Heads {
    n_head: usize,
    n_head_kv: usize,
    head_dim: usize,
    value_dim: usize,
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

fn activation(reader: &Reader<'_>) -> Result<Activation> {
    let named = reader.choice("feed_forward_activation", Activation::NAMES)?;
    let bamboo = reader.key("") == "bamboo.";
    Ok(match (named, reader.file.container()) {
        (Some(activation), _) => activation,
        (None, _) if bamboo => Activation::DRelu,
        (None, Container::PowerInfer) => Activation::Relu,
        (None, Container::Gguf) => Activation::Silu,
    })
}

fn layer(
    reader: &Reader<'_>,
    index: usize,
    n_embd: usize,
    heads: &Heads,
    n_ff: usize,
    activation: Activation,
) -> Result<Layer> {
    let name = |part: &str| format!("blk.{index}.{part}");
    let (embd, ff) = (n_embd as u64, n_ff as u64);
    // Products of two sizes under 2^32 each.
    let q_width = heads.n_head as u64 * heads.head_dim as u64;
    let k_width = heads.n_head_kv as u64 * heads.head_dim as u64;
    let v_width = heads.n_head_kv as u64 * heads.value_dim as u64;
    let o_width = heads.n_head as u64 * heads.value_dim as u64;
    let norm = |part| {
        reader.tensor(&name(part), Wanted { dims: &[embd], reason: "one element per residual element" })
    };
    let matrix = |part, inputs, outputs, reason| {
        reader.linear(&name(part), Wanted { dims: &[inputs, outputs], reason }, outputs)
    };
    let by_heads = "embedding width by heads x head width";
    let attention = Attention {
        n_head: heads.n_head,
        n_head_kv: heads.n_head_kv,
        head_dim: heads.head_dim,
        value_dim: heads.value_dim,
        q: matrix("attn_q", embd, q_width, by_heads)?,
        k: matrix("attn_k", embd, k_width, "embedding width by key heads x head width")?,
        v: matrix("attn_v", embd, v_width, "embedding width by value heads x head width")?,
        o: matrix("attn_output", o_width, embd, "heads x head width by embedding width")?,
    };
    let by_neurons = "embedding width by feed-forward length";
    let down = if reader.file.tensor(&name("ffn_down_t.weight")).is_some() {
        // The matrix is transposed, so its rows are not the outputs: the bias has one element per residual element.
        Down::Transposed(reader.linear(
            &name("ffn_down_t"),
            Wanted { dims: &[embd, ff], reason: by_neurons },
            embd,
        )?)
    } else {
        Down::Plain(matrix("ffn_down", ff, embd, "feed-forward length by embedding width")?)
    };
    // Turning angles stored per layer by very old converters; they follow from the keys.
    reader.ignore(&name("attn_rot_embd"));
    reader.ignore(&name("attn_rot_embd.weight"));
    Ok(Layer {
        attn_norm: norm("attn_norm.weight")?,
        attention,
        ffn_norm: norm("ffn_norm.weight")?,
        ffn: FeedForward {
            n_ff,
            activation,
            gate: matrix("ffn_gate", embd, ff, by_neurons)?,
            up: matrix("ffn_up", embd, ff, by_neurons)?,
            down,
            predictor: predictor(reader, index, embd, ff)?,
        },
    })
}

fn predictor(reader: &Reader<'_>, index: usize, embd: u64, ff: u64) -> Result<Option<Predictor>> {
    let (fc1, fc2) = (format!("blk.{index}.fc1.weight"), format!("blk.{index}.fc2.weight"));
    match (reader.file.tensor(&fc1), reader.file.tensor(&fc2)) {
        (None, None) => Ok(None),
        (Some(first), _) => {
            let rank = first.rows();
            let wanted = Wanted { dims: &[embd, rank], reason: "embedding width by any rank" };
            let first = reader.tensor(&fc1, wanted)?;
            let reason = "rank of fc1 by feed-forward length";
            let second = reader.tensor(&fc2, Wanted { dims: &[rank, ff], reason })?;
            Ok(Some(Predictor { rank: usize::try_from(rank).unwrap_or(usize::MAX), fc1: first, fc2: second }))
        }
        (None, Some(_)) => reader.any_tensor(&fc1).map(|_| None), // names what is missing
    }
}

fn prediction(reader: &Reader<'_>) -> Result<Prediction> {
    const KEY: &str = "powerinfer.sparse_threshold";
    let inputs = &[("residual", PredictorInput::Residual)];
    let input = reader.choice("feed_forward_predictor_input", inputs)?.unwrap_or(PredictorInput::Residual);
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
