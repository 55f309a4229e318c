//! Reads one layer: its norms, attention and feed-forward network, every shape checked.

use super::decoder::{Heads, Layout};
use super::experts::{self, Mixture};
use super::reader::{Reader, Wanted};
use super::{Activation, Attention, Down, FeedForward, Layer, Planes, Predictor};
use crate::gguf::TensorInfo;
use crate::{FormatError, Result};
use engine_core::DType;

pub(super) fn read(
    reader: &Reader<'_>,
    index: usize,
    n_embd: usize,
    heads: &Heads,
    n_ff: usize,
    (layout, activation, mixture): (&Layout, Activation, Option<&Mixture>),
) -> Result<Layer> {
    let name = |part: &str| format!("blk.{index}.{part}");
    let embd = n_embd as u64;
    let (mut attn_norm, mut attn_norm_bias) = reader.norm(&name("attn_norm"), embd)?;
    let (ffn_norm, ffn_norm_bias);
    if layout.parallel {
        // One norm for both, or one each: then the second is attention's.
        (ffn_norm, ffn_norm_bias) = (attn_norm.clone(), attn_norm_bias.clone());
        if reader.file.tensor(&name("attn_norm_2.weight")).is_some() {
            (attn_norm, attn_norm_bias) = reader.norm(&name("attn_norm_2"), embd)?;
        }
    } else {
        (ffn_norm, ffn_norm_bias) = reader.norm(&name("ffn_norm"), embd)?;
    }
    let post_norm = |part: &str| match layout.post_norms {
        true => reader.norm(&name(part), embd).map(|norm| Some(norm.0)),
        false => Ok(None),
    };
    // Turning angles stored per layer by very old converters; they follow from the keys.
    reader.ignore(&name("attn_rot_embd"));
    reader.ignore(&name("attn_rot_embd.weight"));
    Ok(Layer {
        attn_norm,
        attn_norm_bias,
        attention: attention(reader, &name, embd, heads, layout)?,
        attn_post_norm: post_norm("post_attention_norm")?,
        ffn_norm,
        ffn_norm_bias,
        ffn: match mixture {
            Some(mixture) => experts::feed_forward(reader, index, (embd, n_ff), activation, mixture)?,
            None => feed_forward(reader, index, (embd, n_ff), layout, activation)?,
        },
        ffn_post_norm: post_norm("post_ffw_norm")?,
        parallel: layout.parallel,
        window: None,
        rope: None,
    })
}

fn attention(
    reader: &Reader<'_>,
    name: &dyn Fn(&str) -> String,
    embd: u64,
    heads: &Heads,
    layout: &Layout,
) -> Result<Attention> {
    // Products of two sizes under 2^32 each.
    let q_width = heads.n_head as u64 * heads.head_dim as u64;
    let k_width = heads.n_head_kv as u64 * heads.head_dim as u64;
    let v_width = heads.n_head_kv as u64 * heads.value_dim as u64;
    let o_width = heads.n_head as u64 * heads.value_dim as u64;
    let matrix = |part, inputs, outputs, reason| {
        reader.linear(&name(part), Wanted { dims: &[inputs, outputs], reason }, outputs)
    };
    let [q, k, v] = if reader.file.tensor(&name("attn_qkv.weight")).is_some() {
        reader.fused(&name("attn_qkv"), embd, [q_width, k_width, v_width])?
    } else if reader.file.tensor(&name("attn_qkv_by_group.weight")).is_some() {
        let groups = heads.n_head_kv as u64;
        reader.fused_by_group(&name("attn_qkv_by_group"), embd, groups, [q_width, k_width, v_width])?
    } else {
        [
            matrix("attn_q", embd, q_width, "embedding width by heads x head width")?,
            matrix("attn_k", embd, k_width, "embedding width by key heads x head width")?,
            matrix("attn_v", embd, v_width, "embedding width by value heads x head width")?,
        ]
    };
    let head_norm = |part: &str| match layout.qk_norm {
        true => {
            let wanted =
                Wanted { dims: &[heads.head_dim as u64], reason: "one element per element of a head" };
            reader.tensor(&name(part), wanted).map(Some)
        }
        false => Ok(None),
    };
    Ok(Attention {
        n_head: heads.n_head,
        n_head_kv: heads.n_head_kv,
        head_dim: heads.head_dim,
        value_dim: heads.value_dim,
        q,
        k,
        v,
        o: matrix("attn_output", o_width, embd, "heads x head width by embedding width")?,
        q_norm: head_norm("attn_q_norm.weight")?,
        k_norm: head_norm("attn_k_norm.weight")?,
        scale: None,
    })
}

fn feed_forward(
    reader: &Reader<'_>,
    index: usize,
    (embd, n_ff): (u64, usize),
    layout: &Layout,
    activation: Activation,
) -> Result<FeedForward> {
    let name = |part: &str| format!("blk.{index}.{part}");
    let ff = n_ff as u64;
    let by_neurons = "embedding width by feed-forward length";
    let dims = [embd, ff];
    let wanted = || Wanted { dims: &dims, reason: by_neurons };
    let down = if reader.file.tensor(&name("ffn_down_t.weight")).is_some() {
        // The matrix is transposed, so its rows are not the outputs: the bias has one element per residual element.
        Down::Transposed(reader.linear(&name("ffn_down_t"), wanted(), embd)?)
    } else {
        let reason = "feed-forward length by embedding width";
        Down::Plain(reader.linear(&name("ffn_down"), Wanted { dims: &[ff, embd], reason }, embd)?)
    };
    let planes = if layout.gated { planes(reader, index, embd, ff)? } else { None };
    let up_high = planes.as_ref().is_some_and(|planes| planes.up_low.is_some());
    let halves = |part: &str, high: bool| name(&if high { format!("{part}_high") } else { part.to_owned() });
    let up = reader.linear(&halves("ffn_up", up_high), wanted(), ff)?;
    let gate = match layout.gated {
        true => reader.linear(&halves("ffn_gate", planes.is_some()), wanted(), ff)?,
        false => up.clone(),
    };
    for high in [planes.as_ref().map(|_| &gate), up_high.then_some(&up)].into_iter().flatten() {
        if high.weight.dtype != DType::Q4_0 {
            return Err(wrong_type(reader, &high.weight, DType::Q4_0));
        }
    }
    let predictor = predictor(reader, index, embd, ff)?;
    let frequency = Wanted { dims: &[ff], reason: "one element per neuron" };
    let frequency = reader.optional_tensor(&name("ffn_frequency"), frequency)?;
    Ok(FeedForward {
        n_ff,
        activation,
        gated: layout.gated,
        gate,
        up,
        down,
        planes,
        predictor,
        frequency,
        experts: None,
    })
}

/// What stands beside the high halves of weights in planes; nothing where the gate is stored whole.
fn planes(reader: &Reader<'_>, index: usize, embd: u64, ff: u64) -> Result<Option<Planes>> {
    let name = |part: &str| format!("blk.{index}.{part}");
    if reader.file.tensor(&name("ffn_gate_high.weight")).is_none() {
        return Ok(None);
    }
    let reason = "half the embedding width by feed-forward length";
    let low = |part: &str| -> Result<TensorInfo> {
        let tensor = reader.tensor(&name(part), Wanted { dims: &[embd / 2, ff], reason })?;
        if tensor.dtype == DType::I8 { Ok(tensor) } else { Err(wrong_type(reader, &tensor, DType::I8)) }
    };
    let vector = |part: &str| -> Result<Option<TensorInfo>> {
        let wanted = Wanted { dims: &[ff], reason: "one element per neuron" };
        let Some(tensor) = reader.optional_tensor(&name(part), wanted)? else { return Ok(None) };
        if tensor.dtype == DType::F32 {
            Ok(Some(tensor))
        } else {
            Err(wrong_type(reader, &tensor, DType::F32))
        }
    };
    let needed = |part: &str| vector(part)?.map_or_else(|| reader.any_tensor(&name(part)), Ok);
    let up = reader.file.tensor(&name("ffn_up_high.weight")).is_some();
    Ok(Some(Planes {
        gate_low: low("ffn_gate_low.weight")?,
        up_low: up.then(|| low("ffn_up_low.weight")).transpose()?,
        gate_deviation: needed("ffn_gate_deviation")?,
        up_deviation: if up { Some(needed("ffn_up_deviation")?) } else { None },
        down_norm: vector("ffn_down_norm")?,
    }))
}

fn wrong_type(reader: &Reader<'_>, tensor: &TensorInfo, wanted: DType) -> FormatError {
    FormatError::Shape {
        path: reader.file.path().to_path_buf(),
        tensor: tensor.name.clone(),
        found: tensor.dtype.name().into(),
        wanted: wanted.name().into(),
        reason: "weights in planes; prepare the model again".into(),
    }
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
