//! From a model's description to lists of operations.
//!
//! Three lists run a model: one token through everything ([`step`], decode), a batch of tokens through the layers
//! ([`body`], prefill), and final norm and head on rows that a body left ([`head`]). A list is made whole, with the device
//! of each operation beside it; [`Program`](crate::stages::Program) cuts it where devices change.

mod builder;
mod experts;
mod ffn;
mod layer;
mod rope;
#[cfg(test)]
mod tests;

use crate::conversions::Conversions;
use crate::observe::Wanted;
use crate::options::Activations;
use crate::weight::Weight;
use crate::{Result, RuntimeError};
use builder::Builder;
use engine_core::backend::{BufferId, BufferView, DeviceDescription, ToleranceClass};
use engine_core::operation::{Accumulation, OperationKind, OperationList, SlotId};
use engine_core::planner::{FfnShare, LayerPlan, PrefillShare, SparsityPolicy};
use engine_core::{ClusterRange, ClusterSet};
use formats::ModelDescription;
use std::collections::HashMap;

/// Everything but the weights' places that decides a list.
#[derive(Clone, Copy)]
pub(crate) struct GraphOptions<'a> {
    pub(crate) model: &'a ModelDescription,
    pub(crate) plan: &'a [LayerPlan],
    /// Index of the device with embedding table and head.
    pub(crate) embedding: u32,
    pub(crate) activations: Activations,
    /// Positions of the KV cache.
    pub(crate) context: u32,
    /// Whether the neurons that took part are counted.
    pub(crate) count_active: bool,
    /// The plan's devices.
    pub(crate) devices: &'a [OnDevice],
}

/// What a device asks of the operations that it is given.
#[derive(Clone, Debug)]
pub(crate) struct OnDevice {
    /// Weight types that it is given as others.
    pub(crate) conversions: Conversions,
    /// Alignment of the residual's rows in bytes, so that each can be bound on its own.
    pub(crate) row_alignment: u64,
    /// The type in which it sums.
    pub(crate) accumulation: Accumulation,
    /// Whether activations are quantised for it, where that was asked for.
    pub(crate) quantises: bool,
    /// Per layer: the neurons whose weights it is given, where these are not all; may be shorter than the layers.
    pub(crate) held: Vec<Option<ClusterSet>>,
}

impl OnDevice {
    /// A device of this numeric class that takes every weight whole.
    pub(crate) fn of(description: &DeviceDescription, conversions: Conversions) -> OnDevice {
        let f16 = description.tolerance == ToleranceClass::F16;
        OnDevice {
            conversions,
            row_alignment: description.alignment,
            accumulation: if f16 { Accumulation::F16 } else { Accumulation::F32 },
            // What multiplies f16 takes activations as they are: rounding them to 8 bits first gains nothing there.
            quantises: !f16,
            held: Vec::new(),
        }
    }

    /// A device that takes every weight whole and as it is stored.
    pub(crate) fn plain(row_alignment: u64) -> OnDevice {
        OnDevice {
            conversions: Conversions::default(),
            row_alignment,
            accumulation: Accumulation::F32,
            quantises: true,
            held: Vec::new(),
        }
    }
}

impl GraphOptions<'_> {
    /// Whether single tokens (or batches) need more than one device.
    pub(crate) fn is_divided(&self, batch: bool) -> bool {
        let elsewhere = |layer: &LayerPlan| {
            let placed = Placed::of(layer, batch);
            placed.devices().any(|device| device != self.embedding)
        };
        self.plan.iter().any(elsewhere)
    }
}

/// Where one layer runs, for single tokens or for batches.
pub(crate) struct Placed {
    pub(crate) attention: u32,
    pub(crate) projections: u32,
    pub(crate) shares: Vec<FfnShare>,
}

impl Placed {
    pub(crate) fn of(layer: &LayerPlan, batch: bool) -> Placed {
        let has_neurons = |share: &FfnShare| !share.clusters.is_empty();
        match layer.prefill.as_ref().filter(|_| batch) {
            None => Placed {
                attention: layer.attention,
                projections: layer.attention,
                shares: layer.ffn.iter().filter(|share| has_neurons(share)).cloned().collect(),
            },
            Some(prefill) => {
                let share = |share: &PrefillShare| FfnShare {
                    device: share.device,
                    clusters: share.clusters.clone(),
                    sparsity: SparsityPolicy::Dense,
                };
                Placed {
                    attention: prefill.attention,
                    projections: prefill.projections,
                    shares: prefill.ffn.iter().map(share).filter(has_neurons).collect(),
                }
            }
        }
    }

    fn devices(&self) -> impl Iterator<Item = u32> + '_ {
        self.shares.iter().map(|share| share.device).chain([self.attention, self.projections])
    }
}

/// Where weights lie on the device.
#[derive(Default)]
pub(crate) struct Places {
    by_name: HashMap<String, BufferView>,
}

impl Places {
    pub(crate) fn set(&mut self, weight: &Weight, view: BufferView) {
        self.by_name.insert(weight.name.clone(), view);
    }

    /// Where a weight lies; a buffer that no device has where it was given no place, for lists that are only asked about.
    pub(crate) fn of(&self, weight: &Weight) -> BufferView {
        self.by_name.get(&weight.name).copied().unwrap_or(BufferView { buffer: BufferId(0), offset: 0 })
    }
}

/// A list, with the slots that are bound when it is submitted.
pub(crate) struct Graph {
    pub(crate) list: OperationList,
    /// The device of each operation.
    pub(crate) at: Vec<u32>,
    /// Weights that it reads, each once.
    pub(crate) weights: Vec<Weight>,
    /// Their slots, in the same order.
    pub(crate) constants: Vec<SlotId>,
    /// Host: I32 [T x 1].
    pub(crate) ids: Option<SlotId>,
    /// Host: I32 [T x 1], the row of each token's position in the table of learned positions, where there is one.
    pub(crate) positions: Option<SlotId>,
    /// The residual after the last layer (a body's) or before the final norm (a head's): F32 [T x n_embd].
    pub(crate) residual: Option<SlotId>,
    /// Host: F32 [T x vocabulary].
    pub(crate) logits: Option<SlotId>,
    /// Per layer.
    pub(crate) caches: Vec<SlotId>,
    /// Layer and host slot, I32 [T x 1], of every FFN operation whose neurons are counted.
    pub(crate) active: Vec<(usize, SlotId)>,
    /// What the host is given to look at, layer after layer.
    pub(crate) observed: Vec<Seen>,
    /// FFN operations that cover a part of their neurons.
    pub(crate) ranges: Vec<(u32, Vec<ClusterRange>)>,
}

/// Rows of a layer that the host is given.
pub(crate) struct Seen {
    pub(crate) layer: usize,
    pub(crate) kind: Kind,
    /// Host: F32, or I32 where experts are chosen, a row per token.
    pub(crate) slot: SlotId,
}

/// What rows that are observed hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// What the network is given.
    Input,
    /// What a predictor is given.
    Residual,
    /// Every neuron's `h`.
    Hidden,
    /// The experts that tokens use.
    Chosen,
}

/// One token: embedding, layers, final norm, head.
pub(crate) fn step(options: GraphOptions<'_>) -> Result<Graph> {
    let mut builder = Builder::new(options, 1, false)?;
    let residual = builder.scratch("residual", options.model.n_embd as u64)?;
    let embedded = builder.embed(residual)?;
    builder.layers(residual)?;
    builder.on(options.embedding)?;
    let logits = builder.head(residual)?;
    builder.finish(|graph| {
        (graph.ids, graph.positions) = (Some(embedded.ids), embedded.positions);
        graph.logits = Some(logits);
    })
}

/// A batch: embedding and layers; the residual stays in the buffer that is bound for it.
pub(crate) fn body(options: GraphOptions<'_>, capacity: u32) -> Result<Graph> {
    let mut builder = Builder::new(options, capacity, true)?;
    let divided = options.is_divided(true);
    let mut residual = if divided {
        builder.scratch("residual", options.model.n_embd as u64)?
    } else {
        builder.residual()?
    };
    let embedded = builder.embed(residual)?;
    builder.layers(residual)?;
    if divided {
        // Wherever the last layer left it, the head is here.
        builder.on(options.embedding)?;
        let to = builder.residual()?;
        builder.push("residual", OperationKind::Copy { from: residual, to });
        residual = to;
    }
    builder.finish(|graph| {
        (graph.ids, graph.positions) = (Some(embedded.ids), embedded.positions);
        graph.residual = Some(residual);
    })
}

/// A body that gives the host what is wanted of every layer, for layers that have one network and one share of it.
pub(crate) fn observed(options: GraphOptions<'_>, capacity: u32, wanted: Wanted) -> Result<Graph> {
    let mut builder = Builder::new(options, capacity, true)?;
    builder.wanted = wanted;
    let residual = builder.residual()?;
    let embedded = builder.embed(residual)?;
    builder.layers(residual)?;
    builder.finish(|graph| {
        (graph.ids, graph.positions) = (Some(embedded.ids), embedded.positions);
        graph.residual = Some(residual);
    })
}

/// Final norm and head on rows of a body's residual.
pub(crate) fn head(options: GraphOptions<'_>, capacity: u32) -> Result<Graph> {
    let mut builder = Builder::new(options, capacity, true)?;
    let residual = builder.residual()?;
    let logits = builder.head(residual)?;
    builder.finish(|graph| (graph.residual, graph.logits) = (Some(residual), Some(logits)))
}

/// Bytes from one row of the residual to the next.
pub(crate) fn residual_stride(model: &ModelDescription, row_alignment: u64) -> u64 {
    (model.n_embd as u64 * 4).next_multiple_of(row_alignment.max(4))
}

/// A list that a person should never see refused: the description was checked, so this is our mistake or a dtype that
/// cannot stand where the file has it.
fn refused(model: &ModelDescription) -> impl Fn(engine_core::Error) -> RuntimeError + '_ {
    move |source| RuntimeError::Model {
        path: model.path.clone(),
        what: format!("a tensor of this shape or type ({})", source.detail()),
        advice: "store it in another type".into(),
    }
}
