//! Holds a planner's answer to what was asked: exact unless asked otherwise, nothing otherwise than asked without a line
//! that says so, and a way out named where nothing fits. Says what each device of a plan is given.

use crate::RuntimeError;
use crate::conversions::{Conversions, Use};
use crate::graph::OnDevice;
use crate::need;
use crate::weight::Weight;
use engine_core::backend::DeviceDescription;
use engine_core::planner::{
    Budget, Fallback, HardwareProfile, LayerPlan, ModelProfile, Plan, SparsityPolicy,
};
use engine_core::{ClusterSet, Error, Result};
use formats::ModelDescription;
use formats::model::{Down, FeedForward};

/// The most elements that a tensor of a list may have.
const MOST_ELEMENTS: u64 = 1 << 40;

/// Checks a valid plan against the question. Where something is otherwise than was asked for, though as exact, and the plan
/// does not say so, a fallback is added to it.
///
/// # Errors
/// [`Error::InvalidArgument`] for a plan that is for other hardware, and for one with a policy that changes the output
/// and was not asked for.
pub(crate) fn hold(
    plan: &mut Plan,
    model: &ModelProfile,
    hardware: &HardwareProfile,
    budget: &Budget,
) -> Result<()> {
    let planner = plan.planner.clone();
    if plan.hardware_hash != hardware.hash {
        let (found, wanted) = (&plan.hardware_hash, &hardware.hash);
        return Err(Error::invalid(format!("plan by `{planner}`: it is for hardware {found}, not {wanted}")));
    }
    hold_attention(plan, budget, &planner);
    hold_hot(plan, model, hardware, budget);
    hold_prefill(plan, budget);
    let asked = budget.sparsity;
    let mut otherwise: Vec<(usize, SparsityPolicy)> = Vec::new();
    for (index, (layer, profile)) in plan.layers.iter().zip(&model.layers).enumerate() {
        let asked = asked.map(|kind| (kind, profile.policy(kind)));
        let as_asked = |policy| asked.is_some_and(|(_, wanted)| wanted == Some(policy));
        let shares = || layer.ffn.iter().filter(|share| !share.clusters.is_empty());
        // The hot neurons of a layer run dense beside others that are skipped as asked: that is what dividing it is for.
        let divided = shares().any(|share| as_asked(share.sparsity));
        let hot = |policy| divided && policy == SparsityPolicy::Dense;
        for share in shares().filter(|share| !as_asked(share.sparsity) && !hot(share.sparsity)) {
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

/// Layers one behind the other, by name.
fn layers(of: &[usize], part: &str) -> Option<String> {
    match (of.first()?, of.last()?) {
        (first, last) if first == last => Some(format!("blk.{first} {part}")),
        (first, last) => Some(format!("blk.{first}-{last} {part}")),
    }
}

/// Every layer has neurons before the last device, and no more than was asked for.
fn hold_hot(plan: &mut Plan, model: &ModelProfile, hardware: &HardwareProfile, budget: &Budget) {
    let Some(hot) = budget.hot.filter(|hot| *hot > 0.0) else { return };
    let Some(last) = hardware.devices.iter().rfind(|device| device.runs_all()).map(|device| &device.name)
    else {
        return;
    };
    let away = |index: usize| -> f64 {
        let shares = plan.layers[index].ffn.iter();
        let away = shares.filter(|share| plan.devices.get(share.device as usize) != Some(last));
        away.map(|share| f64::from(share.clusters.len())).sum()
    };
    let (mut none, mut more) = (Vec::new(), Vec::new());
    for (index, profile) in model.layers.iter().enumerate().take(plan.layers.len()) {
        match away(index) {
            0.0 if profile.neurons > 0 => none.push(index),
            neurons if neurons > (hot * f64::from(profile.neurons)).max(1.0) => more.push(index),
            _ => {}
        }
    }
    let reason = if hardware.devices.len() == 1 {
        "there is no other device"
    } else if none.iter().any(|index| model.layers[*index].whole) {
        "a mixture of experts is not divided"
    } else {
        "no other device has the memory for it or can run such a layer dense, or the share is less than a cluster"
    };
    // As it was written: the number comes from an f32.
    let wanted = format!("hot = {}", hot as f32);
    let fallback = |what, got: String, reason: String| Fallback { what, wanted: wanted.clone(), got, reason };
    let lines = [
        layers(&none, "ffn").map(|what| fallback(what, format!("every neuron on {last}"), reason.to_owned())),
        layers(&more, "ffn").map(|what| {
            fallback(
                what,
                "a greater share".into(),
                format!("planner `{}` decided so, and does not say why", plan.planner),
            )
        }),
    ];
    plan.fallbacks.extend(lines.into_iter().flatten());
}

/// The device that was asked for has a part of every layer's batches.
fn hold_prefill(plan: &mut Plan, budget: &Budget) {
    let Some(asked) = &budget.prefill else { return };
    let at = plan.devices.iter().position(|device| device == asked);
    let has = |layer: &LayerPlan| {
        at.and_then(|at| u32::try_from(at).ok()).is_some_and(|at| match &layer.prefill {
            Some(prefill) => {
                let mut shares = prefill.ffn.iter().filter(|share| !share.clusters.is_empty());
                prefill.attention == at || prefill.projections == at || shares.any(|share| share.device == at)
            }
            None => layer.devices().contains(&at),
        })
    };
    let without: Vec<usize> = (0..plan.layers.len()).filter(|index| !has(&plan.layers[*index])).collect();
    if let Some(what) = layers(&without, "batches") {
        plan.fallbacks.push(Fallback {
            what,
            wanted: asked.clone(),
            got: "where single tokens run".into(),
            reason: format!("`{asked}` has not the memory for them, or cannot run them"),
        });
    }
}

/// The device with attention is the one asked for.
fn hold_attention(plan: &mut Plan, budget: &Budget, planner: &str) {
    let Some(asked) = &budget.attention else { return };
    let name = |at: u32| plan.devices.get(at as usize).map_or("?", String::as_str);
    let devices = plan.layers.iter().map(|layer| layer.attention).chain([plan.embedding]);
    let Some(got) = devices.map(name).find(|name| name != asked).map(str::to_owned) else { return };
    if plan.fallbacks.iter().all(|fallback| fallback.wanted != *asked) {
        plan.fallbacks.push(Fallback {
            what: "attention, embedding and KV cache".into(),
            wanted: asked.clone(),
            got,
            reason: format!("planner `{planner}` decided so, and does not say why"),
        });
    }
}

/// What one device of a plan asks of its lists, with the neurons whose weights it is given: all of a layer, where it views
/// these where the tier has them; the plan's alone, where it would copy them.
///
/// # Errors
/// Where a weight has a type that cannot be brought.
pub(crate) fn on_device(
    model: &ModelDescription,
    plan: &Plan,
    device: u32,
    description: &DeviceDescription,
    (conversions, resident): (Conversions, Option<u64>),
) -> crate::Result<OnDevice> {
    let views = need::views(description, resident);
    let mut held = Vec::with_capacity(plan.layers.len());
    for (layer, placed) in model.layers.iter().zip(&plan.layers) {
        let (ffn, neurons) = (&layer.ffn, u32::try_from(layer.ffn.n_ff).unwrap_or(u32::MAX));
        let failed = |source| RuntimeError::Plan { path: model.path.clone(), source };
        let own = placed.neurons_of(device).map_err(failed)?;
        let whole = own.is_empty() || own == ClusterSet::all(neurons) || ffn.experts.is_some();
        held.push(match whole || (views && views_neurons(model, ffn, description, &conversions)?) {
            true => None,
            false => Some(own.in_blocks(neuron_block(ffn), neurons)).filter(|own| own.len() < neurons),
        });
    }
    Ok(OnDevice { held, ..OnDevice::of(description, conversions) })
}

/// Whether a device can view every matrix of a network where the tier has it.
fn views_neurons(
    model: &ModelDescription,
    ffn: &FeedForward,
    description: &DeviceDescription,
    conversions: &Conversions,
) -> crate::Result<bool> {
    let gate = Some(&ffn.gate.weight).filter(|_| ffn.gated);
    for tensor in gate.into_iter().chain([&ffn.up.weight, &ffn.down.linear().weight]) {
        let dtype = match ffn.planes.is_some() {
            true => tensor.dtype,
            false => conversions.target(Use::Neurons, tensor.dtype),
        };
        if !Weight::matrix(model, tensor, dtype)?.is_viewable(description.alignment) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Neurons that lie in one block of a matrix, so that they cannot be told apart by the byte.
pub(crate) fn neuron_block(ffn: &FeedForward) -> u32 {
    match &ffn.down {
        Down::Plain(linear) => u32::try_from(linear.weight.dtype.block_elements()).unwrap_or(u32::MAX),
        _ => 1,
    }
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
