//! Which tensor is which: Hugging Face's names to GGUF's.

use super::config::Family;

/// Where a tensor belongs.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Its name in GGUF.
    Named(String),
    /// It follows from the configuration.
    Needless,
    /// Nowhere.
    Unknown,
}

/// Outside of layers; the same for all families.
const WHOLE: &[(&str, &str)] = &[
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.decoder.embed_tokens", "token_embd"),
    ("model.decoder.embed_positions", "position_embd"),
    ("model.decoder.final_layer_norm", "output_norm"),
];

/// In a layer.
const LAYER: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn_layer_norm", "attn_norm"),
    ("final_layer_norm", "ffn_norm"),
    ("fc1", "ffn_up"),
    ("fc2", "ffn_down"),
];

/// In a layer, of families with one norm before each half.
const PLAIN_NORMS: &[(&str, &str)] = &[("post_attention_layernorm", "ffn_norm")];
/// In a layer of Gemma 3.
const GEMMA_NORMS: &[(&str, &str)] = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// The place of a tensor.
pub(super) fn translate(name: &str, family: Family) -> Place {
    let named = |table: &[(&str, &str)], part: &str| {
        table.iter().find(|(from, _)| *from == part).map(|(_, to)| (*to).to_owned())
    };
    let Some((part, kind)) = name.rsplit_once('.').filter(|(_, kind)| matches!(*kind, "weight" | "bias"))
    else {
        return if name.ends_with(".rotary_emb.inv_freq") { Place::Needless } else { Place::Unknown };
    };
    if let Some(to) = named(WHOLE, part) {
        return Place::Named(format!("{to}.{kind}"));
    }
    let rest = part.strip_prefix("model.layers.").or_else(|| part.strip_prefix("model.decoder.layers."));
    let Some((number, part)) = rest.and_then(|rest| rest.split_once('.')) else { return Place::Unknown };
    let Ok(number) = number.parse::<u32>() else { return Place::Unknown };
    let norms = if family == Family::Gemma3 { GEMMA_NORMS } else { PLAIN_NORMS };
    match named(norms, part).or_else(|| named(LAYER, part)) {
        Some(to) => Place::Named(format!("blk.{number}.{to}.{kind}")),
        None => Place::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_by_family() {
        let to = |name, family| match translate(name, family) {
            Place::Named(name) => name,
            other => format!("{other:?}"),
        };
        let norm = "model.layers.3.post_attention_layernorm.weight";
        assert_eq!(to(norm, Family::Llama), "blk.3.ffn_norm.weight");
        assert_eq!(to(norm, Family::Gemma3), "blk.3.post_attention_norm.weight");
        assert_eq!(to("model.layers.0.self_attn.q_proj.bias", Family::Llama), "blk.0.attn_q.bias");
        assert_eq!(to("model.decoder.layers.1.fc1.bias", Family::Opt), "blk.1.ffn_up.bias");
        assert_eq!(to("model.layers.0.self_attn.rotary_emb.inv_freq", Family::Llama), "Needless");
        for name in ["model.layers.x.fc1.weight", "vision.weight", "weight", "model.layers.0.mlp.gate.weight"]
        {
            assert_eq!(to(name, Family::Llama), "Unknown", "{name}");
        }
    }
}
