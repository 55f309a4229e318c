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
    ("transformer.word_embeddings", "token_embd"),
    ("transformer.ln_f", "output_norm"),
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
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.primary_router", "ffn_gate_inp"),
    ("mlp.gate", "ffn_gate_inp"),
];

/// In a layer of Falcon.
const FALCON: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("ln_mlp", "attn_norm"),
    ("ln_attn", "attn_norm_2"),
    ("self_attention.query_key_value", FUSED_BY_GROUP),
    ("self_attention.dense", "attn_output"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
];

/// Of one expert: what it is in GGUF.
const EXPERT: &[(&str, &str)] = &[
    ("w1", "ffn_gate"),
    ("w2", "ffn_down"),
    ("w3", "ffn_up"),
    ("gate_proj", "ffn_gate"),
    ("up_proj", "ffn_up"),
    ("down_proj", "ffn_down"),
    ("gate", "ffn_gate"),
    ("up", "ffn_up"),
    ("down", "ffn_down"),
];

/// Of all experts together, and without a last part `weight`.
const EXPERTS: &[(&str, &str)] =
    &[("mlp.experts.gate_up_proj", GATE_AND_UP), ("mlp.experts.down_proj", "ffn_down_exps")];

/// Queries, keys and values in one matrix, group by group, which `convert` takes apart.
pub(crate) const FUSED_BY_GROUP: &str = "attn_qkv_by_group";
/// Gate and up of every expert in turn.
pub(crate) const GATE_AND_UP: &str = "ffn_gate_up_exps";

/// The tensor of one expert: layer, part and expert of `blk.3.ffn_up.17.weight`, which is what GGUF files had before
/// experts were stacked.
pub(crate) fn of_expert(name: &str) -> Option<(u32, &str, u32)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, expert) = rest.strip_suffix(".weight")?.split_once('.')?;
    Some((layer.parse().ok()?, part, expert.parse().ok()?))
}

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
    let (part, kind) = match name.rsplit_once('.') {
        Some((part, kind @ ("weight" | "bias"))) => (part, kind),
        _ if name.starts_with("model.layers.") && EXPERTS.iter().any(|(end, _)| name.ends_with(end)) => {
            (name, "weight")
        }
        _ => {
            return if name.ends_with(".rotary_emb.inv_freq") { Place::Needless } else { Place::Unknown };
        }
    };
    if let Some(to) = named(WHOLE, part) {
        return Place::Named(format!("{to}.{kind}"));
    }
    let mut prefixes = ["model.layers.", "model.decoder.layers.", "transformer.h."].iter();
    let rest = prefixes.find_map(|prefix| part.strip_prefix(prefix));
    let Some((number, part)) = rest.and_then(|rest| rest.split_once('.')) else { return Place::Unknown };
    let Ok(number) = number.parse::<u32>() else { return Place::Unknown };
    let norms = if family == Family::Gemma3 { GEMMA_NORMS } else { PLAIN_NORMS };
    if let Some(rest) = part.split_once(".experts.").map(|(_, rest)| rest)
        && let Some((expert, part)) = rest.split_once('.')
    {
        return match (expert.parse::<u32>(), named(EXPERT, part)) {
            (Ok(expert), Some(to)) => Place::Named(format!("blk.{number}.{to}.{expert}.{kind}")),
            _ => Place::Unknown,
        };
    }
    let layer = if family == Family::Falcon { FALCON } else { LAYER };
    match named(norms, part).or_else(|| named(layer, part)).or_else(|| named(EXPERTS, part)) {
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
        let expert = "model.layers.2.block_sparse_moe.experts.7.w3.weight";
        assert_eq!(to(expert, Family::Llama), "blk.2.ffn_up.7.weight");
        assert_eq!(of_expert("blk.2.ffn_up.7.weight"), Some((2, "ffn_up", 7)));
        let all = "model.layers.2.mlp.experts.gate_up_proj";
        assert_eq!(to(all, Family::Llama), "blk.2.ffn_gate_up_exps.weight");
        assert_eq!(of_expert("blk.2.ffn_up.weight"), None);
        let norm = "model.layers.3.post_attention_layernorm.weight";
        assert_eq!(to(norm, Family::Llama), "blk.3.ffn_norm.weight");
        assert_eq!(to(norm, Family::Gemma3), "blk.3.post_attention_norm.weight");
        assert_eq!(to("model.layers.0.self_attn.q_proj.bias", Family::Llama), "blk.0.attn_q.bias");
        assert_eq!(to("model.decoder.layers.1.fc1.bias", Family::Opt), "blk.1.ffn_up.bias");
        assert_eq!(to("model.layers.0.self_attn.rotary_emb.inv_freq", Family::Llama), "Needless");
        for name in
            ["model.layers.x.fc1.weight", "vision.weight", "weight", "model.layers.0.mlp.gates.weight"]
        {
            assert_eq!(to(name, Family::Llama), "Unknown", "{name}");
        }
    }
}
