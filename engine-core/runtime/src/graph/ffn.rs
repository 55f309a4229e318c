//! The feed-forward part of a layer: one operation per share of the plan, with the share's sparsity policy.

use super::builder::Builder;
use crate::{Result, RuntimeError};
use engine_core::operation::{
    Accumulation, Activation, Arithmetic, DownLayout, Ffn, OperationKind, Quantization, Selection, SlotId,
};
use engine_core::planner::SparsityPolicy;
use engine_core::{ClusterSet, DType};
use formats::model::{self, Down};

pub(super) fn emit(builder: &mut Builder<'_>, index: usize, normed: SlotId, residual: SlotId) -> Result<()> {
    let model = builder.options.model;
    let layer = &model.layers[index];
    let label = |part: &str| format!("blk.{index}.{part}");
    let plan = builder.options.plan;
    let Some(shares) = plan.get(index).map(|layer| &layer.ffn) else {
        return Err(unsupported(
            builder,
            format!("a plan without layer {index}"),
            "make a plan for this model",
        ));
    };
    // The predictor is fed the residual, so it runs before anything is added to that.
    let mut thresholds = shares.iter().filter_map(|share| match share.sparsity {
        SparsityPolicy::Predictor { threshold } => Some(threshold),
        _ => None,
    });
    let mask = match thresholds.next() {
        None => None,
        Some(first) if thresholds.all(|threshold| threshold == first) => {
            Some(predict(builder, index, residual, first)?)
        }
        Some(_) => {
            let what = format!("a plan with several predictor thresholds in layer {index}");
            return Err(unsupported(builder, what, "plan one threshold per layer"));
        }
    };
    builder.norm(label("ffn_norm"), &layer.ffn_norm, (residual, normed))?;

    let all = ClusterSet::all(u32::try_from(layer.ffn.n_ff).unwrap_or(u32::MAX));
    for share in shares.iter().filter(|share| !share.clusters.is_empty()) {
        let selection = match (share.sparsity, mask) {
            (SparsityPolicy::Dense, _) => Selection::All,
            // Exact skipping equals computing all, and with many tokens whole tiles are faster.
            (SparsityPolicy::GateFirst, _) if builder.many_tokens => Selection::All,
            (SparsityPolicy::GateFirst, _) => Selection::GateFirst,
            (SparsityPolicy::Threshold { threshold }, _) => Selection::Threshold(threshold),
            (SparsityPolicy::Predictor { .. }, Some(mask)) => Selection::Mask(mask),
            (other, _) => {
                return Err(unsupported(builder, format!("sparsity policy {other:?}"), "choose another one"));
            }
        };
        if share.clusters != all {
            let operation = builder.list.operations.len() as u32;
            builder.ranges.push((operation, share.clusters.ranges().to_vec()));
        }
        network(builder, index, (normed, residual), selection)?;
    }
    if let Some(bias) = &layer.ffn.down.linear().bias {
        let right = builder.vector(bias)?;
        builder.push(label("ffn_down.bias"), OperationKind::Add { left: residual, right, output: residual });
    }
    Ok(())
}

fn predict(builder: &mut Builder<'_>, index: usize, input: SlotId, threshold: f32) -> Result<SlotId> {
    let ffn = &builder.options.model.layers[index].ffn;
    let Some(predictor) = &ffn.predictor else {
        let what = format!("sparsity policy `predictor` in layer {index}, which has none (blk.{index}.fc1)");
        return Err(unsupported(builder, what, "plan it as gate-first or dense"));
    };
    let fc1 = builder.weight(&predictor.fc1)?;
    let fc2 = builder.weight(&predictor.fc2)?;
    let mask = builder.scratch_of("mask", DType::U8, ffn.n_ff as u64)?;
    builder.push(format!("blk.{index}.predict"), OperationKind::Predict { input, fc1, fc2, mask, threshold });
    Ok(mask)
}

fn network(
    builder: &mut Builder<'_>,
    index: usize,
    (input, output): (SlotId, SlotId),
    selection: Selection,
) -> Result<()> {
    let ffn = &builder.options.model.layers[index].ffn;
    let (function, up_function) = match ffn.activation {
        model::Activation::Silu => (Activation::Silu, Activation::Identity),
        model::Activation::Relu => (Activation::Relu, Activation::Identity),
        model::Activation::DRelu => (Activation::Relu, Activation::Relu),
        other => {
            let what = format!("activation `{}`", other.name());
            return Err(unsupported(builder, what, "silu, relu and drelu are"));
        }
    };
    let (down, down_layout) = match &ffn.down {
        Down::Plain(linear) => (&linear.weight, DownLayout::OutputRows),
        Down::Transposed(linear) => (&linear.weight, DownLayout::NeuronRows),
        other => return Err(unsupported(builder, format!("{other:?}"), "convert the model again")),
    };
    // A neuron's row of `down` is scaled by one hidden value, so quantising those gains nothing there.
    let hidden = match down_layout {
        DownLayout::OutputRows => builder.activations(&[down]),
        DownLayout::NeuronRows => Quantization::None,
    };
    let arithmetic = Arithmetic {
        input: builder.activations(&[&ffn.gate.weight, &ffn.up.weight]),
        hidden,
        accumulation: Accumulation::F32,
    };
    let active_count = match builder.options.count_active && !builder.many_tokens {
        true => Some(builder.scratch_of("active count", DType::I32, 1)?),
        false => None,
    };
    let ffn = Ffn {
        input,
        gate: Some(builder.weight(&ffn.gate.weight)?),
        up: builder.weight(&ffn.up.weight)?,
        down: builder.weight(down)?,
        gate_bias: ffn.gate.bias.as_ref().map(|bias| builder.vector(bias)).transpose()?,
        up_bias: ffn.up.bias.as_ref().map(|bias| builder.vector(bias)).transpose()?,
        output,
        hidden: None,
        active_count,
        down_layout,
        function,
        up_function,
        selection,
        accumulate: true,
    };
    builder.list.push(format!("blk.{index}.ffn"), OperationKind::Ffn(ffn), arithmetic);
    active_count.map_or(Ok(()), |count| builder.count_to_host(index, count))
}

fn unsupported(builder: &Builder<'_>, what: String, advice: &str) -> RuntimeError {
    RuntimeError::Model { path: builder.options.model.path.clone(), what, advice: advice.into() }
}
