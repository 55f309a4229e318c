//! One layer of the llama family: attention and feed-forward, each behind an RMS norm and added to the residual.

use super::builder::Builder;
use crate::{Result, RuntimeError};
use engine_core::operation::{OperationKind, Rope, RopeScaling, RopeStyle, SlotId, SlotRole};
use engine_core::{DType, TensorType};
use formats::ModelDescription;
use formats::model;

pub(super) fn emit(builder: &mut Builder<'_>, index: usize, residual: SlotId) -> Result<()> {
    let model = builder.options.model;
    let layer = &model.layers[index];
    let label = |part: &str| format!("blk.{index}.{part}");
    let normed = builder.scratch("normed", model.n_embd as u64)?;

    builder.norm(label("attn_norm"), &layer.attn_norm, (residual, normed))?;
    attention(builder, index, normed, residual)?;
    super::ffn::emit(builder, index, normed, residual)
}

fn attention(builder: &mut Builder<'_>, index: usize, normed: SlotId, residual: SlotId) -> Result<()> {
    let model = builder.options.model;
    let attention = &model.layers[index].attention;
    let label = |part: &str| format!("blk.{index}.{part}");
    if attention.value_dim != attention.head_dim {
        return Err(RuntimeError::Model {
            path: model.path.clone(),
            what: format!(
                "attention with values of {} and keys of {} elements (layer {index})",
                attention.value_dim, attention.head_dim
            ),
            advice: "models with heads of one width are".into(),
        });
    }
    let heads = size(model, "attention.head_count", attention.n_head)?;
    let kv_heads = size(model, "attention.head_count_kv", attention.n_head_kv)?;
    let head_dim = size(model, "attention.key_length", attention.head_dim)?;
    let (width, kv_width) =
        (u64::from(heads) * u64::from(head_dim), u64::from(kv_heads) * u64::from(head_dim));

    let query = builder.scratch("query", width)?;
    let key = builder.scratch("key", kv_width)?;
    let value = builder.scratch("value", kv_width)?;
    builder.linear(label("attn_q"), &attention.q, (normed, query), false)?;
    builder.linear(label("attn_k"), &attention.k, (normed, key), false)?;
    builder.linear(label("attn_v"), &attention.v, (normed, value), false)?;
    rope(builder, label("rope_q"), query, head_dim)?;
    rope(builder, label("rope_k"), key, head_dim)?;

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
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: None,
        soft_cap: None,
    };
    builder.push(label("attention"), kind);
    builder.linear(label("attn_output"), &attention.o, (output, residual), true)
}

fn rope(builder: &mut Builder<'_>, label: String, slot: SlotId, head_dim: u32) -> Result<()> {
    let model = builder.options.model;
    let factors = model.rope.factors.as_ref().map(|factors| builder.vector(factors)).transpose()?;
    let style = match model.rope.style {
        model::RopeStyle::Interleaved => RopeStyle::Interleaved,
        model::RopeStyle::Split => RopeStyle::Halves,
        other => {
            return Err(RuntimeError::Model {
                path: model.path.clone(),
                what: format!("rope style {other:?}"),
                advice: "interleaved and split pairs are".into(),
            });
        }
    };
    let rope = Rope {
        input: slot,
        output: slot,
        factors,
        style,
        head_dim,
        rotary_dim: size(model, "rope.dimension_count", model.rope.dim)?,
        base: model.rope.base,
        scaling: scaling(model)?,
    };
    builder.push(label, OperationKind::Rope(rope));
    Ok(())
}

fn scaling(model: &ModelDescription) -> Result<RopeScaling> {
    let refused = |what: String| RuntimeError::Model {
        path: model.path.clone(),
        what,
        advice: "an ext_factor of 1 (YaRN) or 0 without attention factor (linear) is".into(),
    };
    Ok(match model.rope.scaling {
        model::RopeScaling::None => RopeScaling::None,
        model::RopeScaling::Linear { factor } => RopeScaling::Linear { factor },
        model::RopeScaling::Yarn {
            factor,
            original_context,
            ext_factor,
            attn_factor,
            beta_fast,
            beta_slow,
        } => {
            if ext_factor == 0.0 && attn_factor == 1.0 {
                return Ok(RopeScaling::Linear { factor });
            }
            if ext_factor != 1.0 {
                return Err(refused(format!("rope scaling `yarn` with ext_factor {ext_factor}")));
            }
            RopeScaling::Yarn {
                factor,
                original_context: size(model, "rope.scaling.original_context_length", original_context)?,
                attention_factor: attn_factor,
                beta_fast,
                beta_slow,
            }
        }
        other => return Err(refused(format!("rope scaling {other:?}"))),
    })
}

/// A size of the description as the descriptors' 32 bits.
fn size(model: &ModelDescription, key: &str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| RuntimeError::Model {
        path: model.path.clone(),
        what: format!("`{}.{key}` of {value}", model.architecture),
        advice: format!("at most {} is", u32::MAX),
    })
}
