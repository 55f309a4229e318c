//! The feed-forward part of a layer: one operation per share of the plan, with the share's sparsity policy.

use super::Kind;
use super::builder::Builder;
use super::experts::{self, Routed};
use super::layer::add_normed;
use crate::Result;
use crate::conversions::Use;
use engine_core::operation::{
    Accumulation, Activation, Arithmetic, Bitplane, DownLayout, Ffn, OperationKind, Quantization, Selection,
    SlotId,
};
use engine_core::planner::{FfnShare, SparsityPolicy};
use engine_core::{ClusterSet, DType};
use formats::model::{self, Down};

/// The plan's shares of a layer.
fn shares<'a>(builder: &Builder<'a>, index: usize) -> Result<&'a [FfnShare]> {
    let plan = builder.options.plan;
    plan.get(index).map(|layer| &layer.ffn[..]).ok_or_else(|| {
        builder.unsupported(format!("a plan without layer {index}"), "make a plan for this model")
    })
}

/// The mask of a layer's neurons by its predictor, where the plan has one work; `input` is what the predictor is given.
pub(super) fn predict(builder: &mut Builder<'_>, index: usize, input: SlotId) -> Result<Option<SlotId>> {
    let mut thresholds = shares(builder, index)?.iter().filter_map(|share| match share.sparsity {
        SparsityPolicy::Predictor { threshold } => Some(threshold),
        _ => None,
    });
    let Some(threshold) = thresholds.next() else { return Ok(None) };
    if !thresholds.all(|other| other == threshold) {
        let what = format!("a plan with several predictor thresholds in layer {index}");
        return Err(builder.unsupported(what, "plan one threshold per layer"));
    }
    let ffn = &builder.options.model.layers[index].ffn;
    let Some(predictor) = &ffn.predictor else {
        let what = format!("sparsity policy `predictor` in layer {index}, which has none (blk.{index}.fc1)");
        return Err(builder.unsupported(what, "plan it as gate-first or dense"));
    };
    let fc1 = builder.weight(Use::Predictor, &predictor.fc1)?;
    let fc2 = builder.weight(Use::Predictor, &predictor.fc2)?;
    let mask = builder.scratch_of("mask", DType::U8, ffn.n_ff as u64)?;
    builder.push(format!("blk.{index}.predict"), OperationKind::Predict { input, fc1, fc2, mask, threshold });
    Ok(Some(mask))
}

pub(super) fn emit(
    builder: &mut Builder<'_>,
    index: usize,
    (input, residual): (SlotId, SlotId),
    mask: Option<SlotId>,
    routed: Option<Routed>,
) -> Result<()> {
    let model = builder.options.model;
    let layer = &model.layers[index];
    let label = |part: &str| format!("blk.{index}.{part}");
    // With a norm behind it the network has an output of its own, which its first share writes.
    let mut accumulate = layer.ffn_post_norm.is_none();
    let output = if accumulate { residual } else { builder.scratch("branch", model.n_embd as u64)? };

    if let Some(routed) = routed {
        let shares = shares(builder, index)?;
        experts::emit(builder, index, (input, output), routed, shares, accumulate)?;
        return post_norm(builder, index, (output, residual));
    }
    let all = ClusterSet::all(u32::try_from(layer.ffn.n_ff).unwrap_or(u32::MAX));
    for share in shares(builder, index)?.iter().filter(|share| !share.clusters.is_empty()) {
        let selection = match share.sparsity {
            SparsityPolicy::Bitplane { deviations, threshold } => {
                bitplane(builder, index, deviations, threshold)?
            }
            policy => sparse_selection(builder, policy, mask)?,
        };
        if share.clusters != all {
            let operation = builder.list.operations.len() as u32;
            builder.ranges.push((operation, share.clusters.ranges().to_vec()));
        }
        network(builder, index, (input, output), selection, accumulate)?;
        accumulate = true;
    }
    if let Some(bias) = &layer.ffn.down.linear().bias {
        let right = builder.vector(bias)?;
        builder.push(label("ffn_down.bias"), OperationKind::Add { left: output, right, output });
    }
    post_norm(builder, index, (output, residual))
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
    Ok(Selection::Bitplane(Bitplane {
        gate_deviation: builder.vector(&planes.gate_deviation)?,
        up_deviation: planes.up_deviation.as_ref().map(|of| builder.vector(of)).transpose()?,
        down_norm: planes.down_norm.as_ref().map(|of| builder.vector(of)).transpose()?,
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
    let neurons = ffn.n_ff as u64;
    let hidden = if builder.wanted.hidden { Some(builder.scratch("hidden", neurons)?) } else { None };
    // Without a gate the description's gate only repeats up.
    let gate = ffn.gated.then_some(&ffn.gate);
    let gate_bias = gate.and_then(|gate| gate.bias.as_ref());
    let planes = ffn.planes.as_ref();
    let up_low = planes.and_then(|planes| planes.up_low.as_ref());
    // Halves are what they are: there is no other type to bring them in.
    let rows = |builder: &mut Builder<'_>, of: &formats::TensorInfo, in_planes: bool| match in_planes {
        true => builder.stored(of),
        false => builder.weight(Use::Neurons, of),
    };
    let ffn = Ffn {
        input,
        gate: gate.map(|gate| rows(builder, &gate.weight, planes.is_some())).transpose()?,
        up: rows(builder, &ffn.up.weight, up_low.is_some())?,
        gate_low: planes.map(|planes| builder.stored(&planes.gate_low)).transpose()?,
        up_low: up_low.map(|low| builder.stored(low)).transpose()?,
        down: builder.weight(Use::Neurons, down)?,
        gate_bias: gate_bias.map(|bias| builder.vector(bias)).transpose()?,
        up_bias: ffn.up.bias.as_ref().map(|bias| builder.vector(bias)).transpose()?,
        output,
        hidden,
        active_count,
        down_layout,
        function,
        up_function,
        selection,
        accumulate,
    };
    builder.list.push(format!("blk.{index}.ffn"), OperationKind::Ffn(ffn), arithmetic);
    if let Some(hidden) = hidden {
        builder.observe(index, Kind::Hidden, hidden, neurons)?;
    }
    active_count.map_or(Ok(()), |count| builder.count_to_host(index, count))
}
