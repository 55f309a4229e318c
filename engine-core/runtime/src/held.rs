//! Holds a planner's answer to what was asked: exact unless asked otherwise, nothing otherwise than asked without a line
//! that says so, and a way out named where nothing fits.

use engine_core::planner::{Fallback, HardwareProfile, ModelProfile, Plan, SparsityKind, SparsityPolicy};
use engine_core::{Error, Result};
use formats::ModelDescription;

/// The most elements that a tensor of a list may have.
const MOST_ELEMENTS: u64 = 1 << 40;

/// Checks a valid plan against the question; `asked` is the kind of sparsity policy, where one was asked for. Where layers run
/// otherwise, though as exactly, and the plan does not say so, a fallback is added to it.
///
/// # Errors
/// [`Error::InvalidArgument`] for a plan that is for other hardware, and for one with a policy that changes the output
/// and was not asked for.
pub(crate) fn hold(
    plan: &mut Plan,
    model: &ModelProfile,
    hardware: &HardwareProfile,
    asked: Option<SparsityKind>,
) -> Result<()> {
    let planner = &plan.planner;
    if plan.hardware_hash != hardware.hash {
        let (found, wanted) = (&plan.hardware_hash, &hardware.hash);
        return Err(Error::invalid(format!("plan by `{planner}`: it is for hardware {found}, not {wanted}")));
    }
    let mut otherwise: Vec<(usize, SparsityPolicy)> = Vec::new();
    for (index, (layer, profile)) in plan.layers.iter().zip(&model.layers).enumerate() {
        let asked = asked.map(|kind| (kind, profile.policy(kind)));
        let as_asked = |policy| asked.is_some_and(|(_, wanted)| wanted == Some(policy));
        for share in layer.ffn.iter().filter(|share| !share.clusters.is_empty() && !as_asked(share.sparsity))
        {
            if !share.sparsity.is_exact() {
                let asked =
                    asked.map(|(kind, policy)| policy.map_or_else(|| kind.to_string(), |p| p.to_string()));
                let asked = asked.unwrap_or_else(|| "an exact policy".to_owned());
                return Err(Error::invalid(format!(
                    "plan by `{planner}`: layer {index} would run by {}, which changes the output, where {asked} was \
                     asked for; ask for it in [planner] sparsity, or choose another planner",
                    share.sparsity
                )));
            }
            otherwise.push((index, share.sparsity));
        }
    }
    let Some(asked) = asked.map(|policy| policy.to_string()) else { return Ok(()) };
    if plan.fallbacks.iter().any(|fallback| fallback.wanted == asked) {
        return Ok(());
    }
    if let (Some(&(first, got)), Some(&(last, _))) = (otherwise.first(), otherwise.last()) {
        plan.fallbacks.push(Fallback {
            what: if first == last { format!("blk.{first} ffn") } else { format!("blk.{first}-{last} ffn") },
            wanted: asked,
            got: got.to_string(),
            reason: format!("planner `{planner}` decided so, and does not say why"),
        });
    }
    Ok(())
}

/// What to do where nothing fits: the cache is what a person can make smaller.
pub(crate) fn with_remedy(error: Error, model: &ModelProfile, context: u32) -> Error {
    match error {
        Error::Infeasible { detail } => Error::infeasible(format!(
            "{detail}; the KV cache of {context} positions takes {} bytes: a smaller --context (or [runtime] context) \
             lowers it",
            model.kv_bytes
        )),
        other => other,
    }
}

/// Why no KV cache of so many positions can be; `None` where it can.
pub(crate) fn cache_problem(model: &ModelDescription, context: u32) -> Option<String> {
    let widths = model.layers.iter().map(|layer| {
        let attention = &layer.attention;
        attention.n_head_kv as u64 * (attention.head_dim as u64).saturating_add(attention.value_dim as u64)
    });
    let most = MOST_ELEMENTS / widths.max()?.max(1);
    (u64::from(context) > most).then(|| {
        format!(
            "is {context} (the model's own is {}), but the KV cache of a layer can have at most {most} positions; give \
             as many as you need with --context (or [runtime] context)",
            model.context_length
        )
    })
}
