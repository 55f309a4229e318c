//! Architecture `gemma3`: norms before and behind, five layers with a window for each that sees all, scaled embeddings.

use super::decoder::{LLAMA, Layout};
use super::reader::Reader;
use super::rope::{RopeScaling, RopeStyle};
use super::{Activation, Architecture, ModelDescription};
use crate::{FormatError, Result};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "gemma3",
    layout: Layout {
        rope: Some(RopeStyle::Split),
        rope_base: 1_000_000.0,
        activation: Activation::GeluTanh,
        qk_norm: true,
        post_norms: true,
        ..LLAMA
    },
    finish,
};

/// Layers with a window for each that sees all, that one included.
const PERIOD: usize = 6;
/// The layers with a window turn faster, and are not stretched.
const LOCAL_BASE: f32 = 10_000.0;
/// Layers of the 27B model, whose scores are scaled by the width per head rather than by the head's own width.
const LAYERS_27B: usize = 62;

fn finish(reader: &Reader<'_>, model: &mut ModelDescription) -> Result<()> {
    for suffix in ["final_logit_softcapping", "attn_logit_softcapping"] {
        if reader.optional_float(suffix)?.is_some_and(|cap| cap != 0.0) {
            return Err(FormatError::Unsupported {
                path: model.path.clone(),
                what: format!("a soft cap on logits (`{}`)", reader.key(suffix)),
                advice: "models without one are, as Gemma 3 was published".into(),
            });
        }
    }
    model.embedding_scale = (model.n_embd as f32).sqrt();
    let window = reader.size("attention.sliding_window")?;
    let period = reader.optional_size("attention.sliding_window_pattern")?.unwrap_or(PERIOD);
    let mut local = model.rope.clone();
    local.base = reader.optional_float("rope.freq_base_swa")?.map_or(LOCAL_BASE, |base| base as f32);
    (local.scaling, local.factors) = (RopeScaling::None, None);
    let stated = reader.optional_float("attention.scale")?.map(|scale| scale as f32);
    let wide = (model.layers.len() == LAYERS_27B).then_some(model.n_embd);
    for (index, layer) in model.layers.iter_mut().enumerate() {
        if (index + 1) % period != 0 {
            layer.window = Some(window);
            layer.rope = Some(local.clone());
        }
        let attention = &mut layer.attention;
        let by_width = || wide.map(|n_embd| (n_embd as f32 / attention.n_head as f32).sqrt().recip());
        attention.scale = stated.or_else(by_width);
    }
    Ok(())
}
