//! Layers with a mixture of experts: the router's choice, and one operation for the experts chosen.

use super::Kind;
use super::builder::Builder;
use super::ffn::{functions, sparse_selection};
use super::layer::size;
use crate::Result;
use crate::conversions::Use;
use engine_core::operation::{
    Accumulation, Arithmetic, DownLayout, Experts, Gating, OperationKind, Quantization, SlotId,
};
use engine_core::planner::FfnShare;
use engine_core::{ClusterSet, DType};
use formats::model::{self, Down, RouterInput};

/// What a router said.
#[derive(Clone, Copy)]
pub(super) struct Routed {
    chosen: SlotId,
    weights: SlotId,
}

/// Emits the router of a layer whose experts are chosen by what it is given at this point; nothing elsewhere.
pub(super) fn route(
    builder: &mut Builder<'_>,
    index: usize,
    given: RouterInput,
    input: SlotId,
) -> Result<Option<Routed>> {
    let model = builder.options.model;
    let Some(experts) = model.layers[index].ffn.experts.as_ref().filter(|e| e.router_input == given) else {
        return Ok(None);
    };
    let label = |part: &str| format!("blk.{index}.{part}");
    let gating = match experts.gating {
        model::Gating::Softmax => Gating::Softmax,
        model::Gating::Sigmoid => Gating::Sigmoid,
        other => {
            return Err(builder.unsupported(format!("gating {other:?}"), "softmax and sigmoid are"));
        }
    };
    let scores = builder.scratch("expert scores", experts.count as u64)?;
    builder.linear(label("ffn_gate_inp"), &experts.router, (input, scores), false)?;
    let chosen = builder.scratch_of("experts", DType::I32, experts.used as u64)?;
    let weights = builder.scratch("expert weights", experts.used as u64)?;
    let (normalise, scale) = (experts.normalise, experts.scale);
    builder
        .push(label("ffn_route"), OperationKind::Route { scores, chosen, weights, gating, normalise, scale });
    if builder.wanted.chosen {
        builder.observe(index, Kind::Chosen, chosen, experts.used as u64)?;
    }
    Ok(Some(Routed { chosen, weights }))
}

/// The chosen experts of a layer, added to `output` or written there.
pub(super) fn emit(
    builder: &mut Builder<'_>,
    index: usize,
    (input, output): (SlotId, SlotId),
    routed: Routed,
    share: &FfnShare,
    accumulate: bool,
) -> Result<()> {
    let model = builder.options.model;
    let ffn = &model.layers[index].ffn;
    let count = ffn.experts.as_ref().map_or(0, |experts| experts.count);
    let all = ClusterSet::all(u32::try_from(ffn.n_ff).unwrap_or(u32::MAX));
    if share.clusters != all {
        let what = format!("a plan that divides the experts of layer {index}");
        return Err(builder.unsupported(what, "plan all neurons of a mixture on one device"));
    }
    let selection = sparse_selection(builder, share.sparsity, None)?;
    let (function, up_function) = functions(builder, ffn)?;
    let (down, down_layout) = match &ffn.down {
        Down::Plain(linear) => (linear, DownLayout::OutputRows),
        Down::Transposed(linear) => (linear, DownLayout::NeuronRows),
        other => return Err(builder.unsupported(format!("{other:?}"), "convert the model again")),
    };
    let hidden = match down_layout {
        DownLayout::OutputRows => builder.activations(Use::Neurons, &[&down.weight]),
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
    let experts = Experts {
        input,
        chosen: routed.chosen,
        weights: routed.weights,
        gate: match ffn.gated {
            true => Some(builder.matrix(Use::Neurons, &ffn.gate)?),
            false => None,
        },
        up: builder.matrix(Use::Neurons, &ffn.up)?,
        down: builder.matrix(Use::Neurons, down)?,
        output,
        active_count,
        experts: size(model, "expert_count", count)?,
        down_layout,
        function,
        up_function,
        selection,
        accumulate,
    };
    builder.push_with(format!("blk.{index}.experts"), OperationKind::Experts(experts), arithmetic);
    active_count.map_or(Ok(()), |count| builder.count_to_host(index, count))
}
