//! One layer: attention and feed-forward network, each behind a norm and added to the residual, as the model's
//! description has them.

use super::builder::Builder;
use super::{Kind, Placed, experts, ffn, rope};
use crate::{Result, RuntimeError};
use engine_core::operation::{OperationKind, SlotId, SlotRole};
use engine_core::{DType, TensorType};
use formats::model::{PredictorInput, RouterInput};
use formats::{ModelDescription, TensorInfo};

pub(super) fn emit(builder: &mut Builder<'_>, index: usize, residual: SlotId) -> Result<()> {
    let model = builder.options.model;
    let layer = &model.layers[index];
    let label = |part: &str| format!("blk.{index}.{part}");
    let plan = builder.options.plan.get(index).ok_or_else(|| {
        builder.unsupported(format!("a plan without layer {index}"), "make a plan for this model")
    })?;
    let placed = &Placed::of(plan, builder.many_tokens);
    builder.on(placed.attention)?;
    let (attn_norm, ffn_norm) =
        ((&layer.attn_norm, layer.attn_norm_bias.as_ref()), (&layer.ffn_norm, layer.ffn_norm_bias.as_ref()));
    // A predictor is given a residual, so it runs before anything is added to that.
    let sees_input = model
        .prediction
        .as_ref()
        .map_or(layer.parallel, |prediction| prediction.input == PredictorInput::LayerInput);
    let width = model.n_embd as u64;
    if builder.wanted.residual && sees_input {
        builder.observe(index, Kind::Residual, residual, width)?;
    }
    let early = if sees_input { Some(ffn::predict(builder, index, residual, placed)?) } else { None };

    let routed = experts::route(builder, index, RouterInput::LayerInput, residual)?;

    let normed = builder.scratch("normed", width)?;
    builder.norm(label("attn_norm"), attn_norm, (residual, normed))?;
    let mut ffn_input = normed;
    if layer.parallel && ffn_norm != attn_norm {
        ffn_input = builder.scratch("normed for the network", model.n_embd as u64)?;
        builder.norm(label("ffn_norm"), ffn_norm, (residual, ffn_input))?;
    }
    attention(builder, index, (normed, residual), placed)?;
    if builder.wanted.residual && !sees_input {
        builder.observe(index, Kind::Residual, residual, width)?;
    }
    let masks = match early {
        Some(masks) => masks,
        None => ffn::predict(builder, index, residual, placed)?,
    };
    if !layer.parallel {
        builder.norm(label("ffn_norm"), ffn_norm, (residual, ffn_input))?;
    }
    if builder.wanted.input {
        builder.observe(index, Kind::Input, ffn_input, width)?;
    }
    let routed = match routed {
        None => experts::route(builder, index, RouterInput::Normed, ffn_input)?,
        early => early,
    };
    ffn::emit(builder, index, (ffn_input, residual), placed, (&masks, routed))
}

/// Adds `branch` to the residual behind a norm of its own.
pub(super) fn add_normed(
    builder: &mut Builder<'_>,
    label: String,
    norm: &TensorInfo,
    (branch, residual): (SlotId, SlotId),
) -> Result<()> {
    builder.norm(label.clone(), (norm, None), (branch, branch))?;
    let add = OperationKind::Add { left: residual, right: branch, output: residual };
    builder.push(format!("{label}.add"), add);
    Ok(())
}

fn attention(
    builder: &mut Builder<'_>,
    index: usize,
    (normed, residual): (SlotId, SlotId),
    placed: &Placed,
) -> Result<()> {
    let model = builder.options.model;
    let layer = &model.layers[index];
    let attention = &layer.attention;
    let label = |part: &str| format!("blk.{index}.{part}");
    if attention.value_dim != attention.head_dim {
        let (values, keys) = (attention.value_dim, attention.head_dim);
        let what = format!("attention with values of {values} and keys of {keys} elements (layer {index})");
        return Err(builder.unsupported(what, "models with heads of one width are"));
    }
    let heads = size(model, "attention.head_count", attention.n_head)?;
    let kv_heads = size(model, "attention.head_count_kv", attention.n_head_kv)?;
    let head_dim = size(model, "attention.key_length", attention.head_dim)?;
    let window = layer.window.map(|window| size(model, "attention.sliding_window", window)).transpose()?;
    let (width, kv_width) =
        (u64::from(heads) * u64::from(head_dim), u64::from(kv_heads) * u64::from(head_dim));

    let query = builder.scratch("query", width)?;
    let key = builder.scratch("key", kv_width)?;
    let value = builder.scratch("value", kv_width)?;
    builder.on(placed.projections)?;
    builder.linear(label("attn_q"), &attention.q, (normed, query), false)?;
    builder.linear(label("attn_k"), &attention.k, (normed, key), false)?;
    builder.linear(label("attn_v"), &attention.v, (normed, value), false)?;
    builder.on(placed.attention)?;
    if let Some(norm) = &attention.q_norm {
        builder.head_norm(label("attn_q_norm"), norm, (query, query))?;
    }
    if let Some(norm) = &attention.k_norm {
        builder.head_norm(label("attn_k_norm"), norm, (key, key))?;
    }
    let turns = layer.rope.as_ref().unwrap_or(&model.rope);
    rope::emit(builder, label("rope_q"), turns, query, head_dim)?;
    rope::emit(builder, label("rope_k"), turns, key, head_dim)?;

    let cache_type = TensorType::matrix(DType::F16, builder.options.context.into(), 2 * kv_width)
        .map_err(super::refused(model))?;
    let cache = builder.list.fixed(label("kv_cache"), SlotRole::State, cache_type);
    builder.caches.push(cache);
    builder.push(label("kv_append"), OperationKind::KvAppend { key, value, cache, kv_heads, head_dim });
    let output = builder.scratch("attended", width)?;
    let kind = OperationKind::Attention {
        query,
        cache,
        output,
        heads,
        kv_heads,
        head_dim,
        scale: attention.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
        window,
        soft_cap: None,
    };
    builder.push(label("attention"), kind);
    let elsewhere = placed.projections != placed.attention;
    if layer.attn_post_norm.is_none() && !elsewhere {
        return builder.linear(label("attn_output"), &attention.o, (output, residual), true);
    }
    let branch = builder.scratch("branch", model.n_embd as u64)?;
    builder.on(placed.projections)?;
    builder.linear(label("attn_output"), &attention.o, (output, branch), false)?;
    builder.on(placed.attention)?;
    match &layer.attn_post_norm {
        Some(norm) => add_normed(builder, label("post_attention_norm"), norm, (branch, residual)),
        None => {
            let add = OperationKind::Add { left: residual, right: branch, output: residual };
            builder.push(label("attn_output.add"), add);
            Ok(())
        }
    }
}

/// A size of the description as the descriptors' 32 bits.
pub(super) fn size(model: &ModelDescription, key: &str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| RuntimeError::Model {
        path: model.path.clone(),
        what: format!("`{}.{key}` of {value}", model.architecture),
        advice: format!("at most {} is", u32::MAX),
    })
}
