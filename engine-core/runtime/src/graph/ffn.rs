//! The feed-forward part of a layer: one operation per share of the plan, with the share's sparsity policy.

use super::builder::Builder;
use super::experts::{self, Routed};
use super::layer::add_normed;
use super::{Kind, Placed};
use crate::Result;
use crate::conversions::Use;
use engine_core::operation::{
    Accumulation, Activation, Arithmetic, Bitplane, DownLayout, Ffn, OperationKind, Quantization, Selection,
    SlotId,
};
use engine_core::planner::{FfnShare, SparsityPolicy};
use engine_core::{ClusterSet, DType};
use formats::model::{self, Down};
use std::collections::BTreeMap;

/// Masks of a layer's neurons, by the device that they are on.
pub(super) type Masks = BTreeMap<u32, SlotId>;

/// The masks of a layer's neurons by its predictor, on every device where the plan has it work; `input` is what the
/// predictor is given.
pub(super) fn predict(
    builder: &mut Builder<'_>,
    index: usize,
    input: SlotId,
    placed: &Placed,
) -> Result<Masks> {
    let mut masks = Masks::new();
    let mut common = None;
    for share in &placed.shares {
        let SparsityPolicy::Predictor { threshold } = share.sparsity else { continue };
        if *common.get_or_insert(threshold) != threshold {
            let what = format!("a plan with several predictor thresholds in layer {index}");
            return Err(builder.unsupported(what, "plan one threshold per layer"));
        }
        if masks.contains_key(&share.device) {
            continue;
        }
        let ffn = &builder.options.model.layers[index].ffn;
        let Some(predictor) = &ffn.predictor else {
            let what =
                format!("sparsity policy `predictor` in layer {index}, which has none (blk.{index}.fc1)");
            return Err(builder.unsupported(what, "plan it as gate-first or dense"));
        };
        builder.on(share.device)?;
        let fc1 = builder.weight(Use::Predictor, &predictor.fc1)?;
        let fc2 = builder.neuron_rows(Use::Predictor, &predictor.fc2, index)?;
        let name = match share.device == placed.attention {
            true => "mask".to_owned(),
            false => format!("mask of device {}", share.device),
        };
        let mask = builder.scratch_of(&name, DType::U8, builder.neurons(index))?;
        let kind = OperationKind::Predict { input, fc1, fc2, mask, threshold };
        let arithmetic = Arithmetic {
            input: builder.activations(Use::Predictor, &[&predictor.fc1]),
            hidden: builder.activations(Use::Predictor, &[&predictor.fc2]),
            ..Arithmetic::F32
        };
        builder.push_with(format!("blk.{index}.predict"), kind, arithmetic);
        masks.insert(share.device, mask);
    }
    builder.on(placed.attention)?;
    Ok(masks)
}

/// The network on the devices that have shares of it, and their sum on the device with the residual: first its own
/// shares, then those of the others in the plan's order.
pub(super) fn emit(
    builder: &mut Builder<'_>,
    index: usize,
    (input, residual): (SlotId, SlotId),
    placed: &Placed,
    (masks, routed): (&Masks, Option<Routed>),
) -> Result<()> {
    let model = builder.options.model;
    let layer = &model.layers[index];
    let label = |part: &str| format!("blk.{index}.{part}");
    let home = placed.attention;
    // Those of other devices first: what is submitted first begins first.
    let mut partial_sums: Vec<(u32, SlotId)> = Vec::new();
    for share in placed.shares.iter().filter(|share| share.device != home) {
        builder.on(share.device)?;
        let known = partial_sums.iter().find(|(device, _)| *device == share.device).map(|(_, slot)| *slot);
        let output = match known {
            Some(slot) => slot,
            None => {
                let name = format!("partial sum of device {}", share.device);
                let slot = builder.scratch(&name, model.n_embd as u64)?;
                partial_sums.push((share.device, slot));
                slot
            }
        };
        share_of(builder, index, share, (input, output, known.is_some()), (masks, routed))?;
    }
    builder.on(home)?;
    // With a norm behind it the network has an output of its own, which its first share writes.
    let mut accumulate = layer.ffn_post_norm.is_none();
    let mut output = if accumulate { residual } else { builder.scratch("branch", model.n_embd as u64)? };
    for share in placed.shares.iter().filter(|share| share.device == home) {
        share_of(builder, index, share, (input, output, accumulate), (masks, routed))?;
        accumulate = true;
    }
    for (_, right) in partial_sums {
        if accumulate {
            builder.push(label("ffn.merge"), OperationKind::Add { left: output, right, output });
        } else {
            (output, accumulate) = (right, true);
        }
    }
    if let Some(bias) = layer.ffn.down.linear().bias.as_ref().filter(|_| routed.is_none()) {
        let right = builder.vector(bias)?;
        builder.push(label("ffn_down.bias"), OperationKind::Add { left: output, right, output });
    }
    post_norm(builder, index, (output, residual))
}

/// One share of a network, on the builder's device.
fn share_of(
    builder: &mut Builder<'_>,
    index: usize,
    share: &FfnShare,
    (input, output, accumulate): (SlotId, SlotId, bool),
    (masks, routed): (&Masks, Option<Routed>),
) -> Result<()> {
    if let Some(routed) = routed {
        return experts::emit(builder, index, (input, output), routed, share, accumulate);
    }
    let selection = match share.sparsity {
        SparsityPolicy::Bitplane { deviations, threshold } => {
            bitplane(builder, index, deviations, threshold)?
        }
        policy => sparse_selection(builder, policy, masks.get(&share.device).copied())?,
    };
    let ranges = match builder.held(index) {
        None => Some(share.clusters.ranges().to_vec()),
        Some(held) => held.within(&share.clusters),
    };
    let ranges = ranges.ok_or_else(|| {
        let what = format!("a plan with neurons of layer {index} on a device that was not given them");
        builder.unsupported(what, "plan it again")
    })?;
    let all = ClusterSet::all(u32::try_from(builder.neurons(index)).unwrap_or(u32::MAX));
    if ranges != all.ranges() {
        let operation = builder.list.operations.len() as u32;
        builder.ranges.push((operation, ranges));
    }
    network(builder, index, (input, output), selection, accumulate)
}

fn post_norm(builder: &mut Builder<'_>, index: usize, (output, residual): (SlotId, SlotId)) -> Result<()> {
    match &builder.options.model.layers[index].ffn_post_norm {
        Some(norm) => add_normed(builder, format!("blk.{index}.post_ffw_norm"), norm, (output, residual)),
        None => Ok(()),
    }
}

/// What a sparsity policy selects.
pub(super) fn sparse_selection(
    builder: &Builder<'_>,
    policy: SparsityPolicy,
    mask: Option<SlotId>,
) -> Result<Selection> {
    Ok(match (policy, mask) {
        (SparsityPolicy::Dense, _) => Selection::All,
        // Exact skipping equals computing all, and with many tokens whole tiles are faster.
        (SparsityPolicy::GateFirst, _) if builder.many_tokens => Selection::All,
        (SparsityPolicy::GateFirst, _) => Selection::GateFirst,
        (SparsityPolicy::Threshold { threshold }, _) => Selection::Threshold(threshold),
        (SparsityPolicy::Predictor { .. }, Some(mask)) => Selection::Mask(mask),
        (other, _) => {
            return Err(builder.unsupported(format!("sparsity policy {other:?}"), "choose another one"));
        }
    })
}

/// What the high halves of a layer's weights rule out.
fn bitplane(builder: &mut Builder<'_>, index: usize, deviations: f32, threshold: f32) -> Result<Selection> {
    let model = builder.options.model;
    let Some(planes) = &model.layers[index].ffn.planes else {
        let what = format!("sparsity policy `bitplane` in layer {index}, whose weights are not in planes");
        return Err(builder.unsupported(what, "prepare the model in planes, or plan it as dense"));
    };
    let mut of_neurons = |of| builder.neuron_vector(of, index);
    Ok(Selection::Bitplane(Bitplane {
        gate_deviation: of_neurons(&planes.gate_deviation)?,
        up_deviation: planes.up_deviation.as_ref().map(&mut of_neurons).transpose()?,
        down_norm: planes.down_norm.as_ref().map(&mut of_neurons).transpose()?,
        deviations,
        threshold,
    }))
}

/// The functions of gate and up.
pub(super) fn functions(builder: &Builder<'_>, ffn: &model::FeedForward) -> Result<(Activation, Activation)> {
    let function = match ffn.activation {
        model::Activation::Silu => Activation::Silu,
        model::Activation::Relu | model::Activation::DRelu => Activation::Relu,
        model::Activation::GeluTanh => Activation::GeluTanh,
        model::Activation::GeluErf => Activation::GeluErf,
        other => {
            let what = format!("activation `{}`", other.name());
            return Err(builder.unsupported(what, "silu, relu, drelu, gelu-tanh and gelu-erf are"));
        }
    };
    let up_function = match ffn.activation {
        model::Activation::DRelu if ffn.gated => Activation::Relu,
        _ => Activation::Identity,
    };
    Ok((function, up_function))
}

fn network(
    builder: &mut Builder<'_>,
    index: usize,
    (input, output): (SlotId, SlotId),
    selection: Selection,
    accumulate: bool,
) -> Result<()> {
    let ffn = &builder.options.model.layers[index].ffn;
    let (function, up_function) = functions(builder, ffn)?;
    let (down, down_layout) = match &ffn.down {
        Down::Plain(linear) => (&linear.weight, DownLayout::OutputRows),
        Down::Transposed(linear) => (&linear.weight, DownLayout::NeuronRows),
        other => return Err(builder.unsupported(format!("{other:?}"), "convert the model again")),
    };
    // A neuron's row of `down` is scaled by one hidden value, so quantising those gains nothing there.
    let hidden = match down_layout {
        DownLayout::OutputRows => builder.activations(Use::Neurons, &[down]),
        DownLayout::NeuronRows => Quantization::None,
    };
    let arithmetic = Arithmetic {
        input: builder.activations(Use::Neurons, &[&ffn.gate.weight, &ffn.up.weight]),
        hidden,
        accumulation: Accumulation::F32,
    };
    let active_count = match builder.options.count_active && !builder.many_tokens {
        true => Some(builder.scratch_of("active count", DType::I32, 1)?),
        false => None,
    };
    let neurons = builder.neurons(index);
    let hidden = if builder.wanted.hidden { Some(builder.scratch("hidden", neurons)?) } else { None };
    // Without a gate the description's gate only repeats up.
    let gate = ffn.gated.then_some(&ffn.gate);
    let gate_bias = gate.and_then(|gate| gate.bias.as_ref());
    let planes = ffn.planes.as_ref();
    let up_low = planes.and_then(|planes| planes.up_low.as_ref());
    // Halves are what they are: there is no other type to bring them in.
    let rows = |builder: &mut Builder<'_>, of: &formats::TensorInfo, in_planes: bool| match in_planes {
        true => builder.stored_rows(of, index),
        false => builder.neuron_rows(Use::Neurons, of, index),
    };
    let ffn = Ffn {
        input,
        gate: gate.map(|gate| rows(builder, &gate.weight, planes.is_some())).transpose()?,
        up: rows(builder, &ffn.up.weight, up_low.is_some())?,
        gate_low: planes.map(|planes| builder.stored_rows(&planes.gate_low, index)).transpose()?,
        up_low: up_low.map(|low| builder.stored_rows(low, index)).transpose()?,
        down: match down_layout {
            DownLayout::OutputRows => builder.neuron_columns(Use::Neurons, down, index)?,
            DownLayout::NeuronRows => builder.neuron_rows(Use::Neurons, down, index)?,
        },
        gate_bias: gate_bias.map(|bias| builder.neuron_vector(bias, index)).transpose()?,
        up_bias: ffn.up.bias.as_ref().map(|bias| builder.neuron_vector(bias, index)).transpose()?,
        output,
        hidden,
        active_count,
        down_layout,
        function,
        up_function,
        selection,
        accumulate,
    };
    builder.push_with(format!("blk.{index}.ffn"), OperationKind::Ffn(ffn), arithmetic);
    if let Some(hidden) = hidden {
        builder.observe(index, Kind::Hidden, hidden, neurons)?;
    }
    active_count.map_or(Ok(()), |count| builder.count_to_host(index, count))
}
