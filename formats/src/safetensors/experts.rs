//! Translates the keys of mixtures of experts.

use super::config::Keys;
use crate::Result;
use crate::gguf::Value;

type Set<'a> = &'a mut dyn FnMut(&str, Value);

pub(super) fn mixtral(keys: &Keys<'_>, set: Set<'_>) -> Result<()> {
    set("feed_forward_length", keys.size("intermediate_size")?.into());
    set("expert_count", keys.size("num_local_experts")?.into());
    set("expert_used_count", keys.size("num_experts_per_tok")?.into());
    Ok(())
}

pub(super) fn qwen3(keys: &Keys<'_>, set: Set<'_>) -> Result<()> {
    if keys.optional_size("decoder_sparse_step")?.is_some_and(|step| step != 1) {
        return Err(keys.bad("decoder_sparse_step", "is not 1; every layer must have experts".into()));
    }
    if keys.get("mlp_only_layers").is_some_and(|list| list.as_array().is_none_or(|list| !list.is_empty())) {
        return Err(keys.bad("mlp_only_layers", "is not empty; every layer must have experts".into()));
    }
    let count = if keys.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    set("feed_forward_length", keys.size("intermediate_size")?.into());
    set("expert_count", keys.size(count)?.into());
    set("expert_used_count", keys.size("num_experts_per_tok")?.into());
    set("expert_feed_forward_length", keys.size("moe_intermediate_size")?.into());
    set("expert_weights_norm", keys.truth("norm_topk_prob", false)?.into());
    Ok(())
}

/// Layers with a window and a rope, for each that sees all and has none.
const PERIOD: usize = 4;

pub(super) fn smallthinker(keys: &Keys<'_>, set: Set<'_>) -> Result<()> {
    let neurons = keys.size("moe_ffn_hidden_size")?;
    set("feed_forward_length", neurons.into());
    set("expert_feed_forward_length", neurons.into());
    set("expert_count", keys.size("moe_num_primary_experts")?.into());
    set("expert_used_count", keys.size("moe_num_active_primary_experts")?.into());
    let softmax = keys.truth("moe_primary_router_apply_softmax", false)?;
    set("expert_gating_func", Value::U32(if softmax { 1 } else { 2 }));
    set("expert_weights_norm", keys.truth("norm_topk_prob", true)?.into());
    if keys.truth("moe_enable_secondary_experts", false)? {
        return Err(keys.bad("moe_enable_secondary_experts", "is true, which is not read".into()));
    }
    if let Some(layout) = flags(keys, "moe_layer_layout")?
        && layout.contains(&false)
    {
        return Err(keys.bad("moe_layer_layout", "leaves layers without experts".into()));
    }
    let windows = flags(keys, "sliding_window_layout")?.unwrap_or_default();
    let ropes = flags(keys, "rope_layout")?;
    if !windows.contains(&true) {
        return match ropes {
            Some(ropes) if ropes.contains(&false) => {
                Err(keys.bad("rope_layout", "leaves layers without rope, but no layer has a window".into()))
            }
            _ => Ok(()),
        };
    }
    // The one pattern that GGUF's description of this architecture stands for.
    let regular = |layout: &[bool]| layout.iter().enumerate().all(|(at, &on)| on == (at % PERIOD != 0));
    for (key, layout) in [("sliding_window_layout", Some(windows)), ("rope_layout", ropes)] {
        if !layout.is_some_and(|layout| regular(&layout)) {
            let problem =
                format!("is not off in every {PERIOD}th layer from the first, and on in the others");
            return Err(keys.bad(key, problem));
        }
    }
    set("attention.sliding_window", keys.size("sliding_window_size")?.into());
    Ok(())
}

/// A list of 0 and 1.
fn flags(keys: &Keys<'_>, key: &str) -> Result<Option<Vec<bool>>> {
    let Some(value) = keys.get(key) else { return Ok(None) };
    let one = |value: &serde_json::Value| match value.as_u64() {
        Some(0) => Some(false),
        Some(1) => Some(true),
        _ => value.as_bool(),
    };
    let list = value.as_array().and_then(|list| list.iter().map(one).collect());
    list.map(Some).ok_or_else(|| keys.bad(key, "is no list of 0 and 1".into()))
}
