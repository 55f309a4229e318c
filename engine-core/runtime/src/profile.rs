//! What the planner is told: the model's sizes, and what each device is and denies.

use crate::conversions::{Conversions, Use};
use crate::engine::SCORE_ROWS;
use crate::graph::{Graph, GraphOptions, OnDevice, body, step};
use crate::held::neuron_block;
use crate::need;
use crate::options::EngineOptions;
use crate::stages::Program;
use crate::support::{condensed, denied, distinct};
use crate::weight::Weight;
use crate::{Result, RuntimeError};
use engine_core::backend::DeviceDescription;
use engine_core::operation::{OperationKind, Selection, SlotRole};
use engine_core::planner::{
    DeviceProfile, FfnShare, HardwareProfile, LayerPlan, LayerProfile, ModelProfile, Part, PrefillPlan,
    PrefillShare, SparsityKind, SparsityPolicy,
};
use engine_core::{ClusterSet, ComputeBackend};
use formats::model::{FeedForward, Layer, Linear, OutputHead};
use formats::{GgufFile, ModelDescription, TensorInfo};
use std::collections::BTreeSet;
use std::sync::Arc;

/// FNV-1a of 64 bits: names a model or a machine, protects against nothing.
struct Fingerprint(u64);

impl Fingerprint {
    fn new() -> Fingerprint {
        Fingerprint(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        // A separator, so that "ab" + "c" differs from "a" + "bc".
        self.0 = (self.0 ^ 0xff).wrapping_mul(0x0000_0100_0000_01b3);
    }

    fn text(&self) -> String {
        format!("fnv1a-{:016x}", self.0)
    }
}

/// A model's hash without reading it all: length, tensor table, and the content of the final norm, which differs
/// between any two trainings.
fn model_hash(file: &GgufFile, model: &ModelDescription) -> String {
    let mut hash = Fingerprint::new();
    hash.add(&file.file_len().to_le_bytes());
    hash.add(model.architecture.as_bytes());
    for tensor in file.tensors() {
        hash.add(tensor.name.as_bytes());
        hash.add(tensor.dtype.name().as_bytes());
        for dim in &tensor.dims {
            hash.add(&dim.to_le_bytes());
        }
        hash.add(&tensor.file_range.start.to_le_bytes());
    }
    hash.add(file.tensor_bytes(&model.output_norm));
    hash.text()
}

/// Bytes of a model's parts as a device holds them: vectors in F32, matrices in the types that it is given.
#[derive(Clone, Copy)]
pub(crate) struct Sizes<'a> {
    pub(crate) model: &'a ModelDescription,
    pub(crate) conversions: &'a Conversions,
}

impl Sizes<'_> {
    fn matrix(&self, purpose: Use, tensor: &TensorInfo) -> u64 {
        let target = self.conversions.target(purpose, tensor.dtype);
        match target == tensor.dtype {
            true => tensor.byte_len(),
            false => target.row_bytes(tensor.elements()).unwrap_or(u64::MAX),
        }
    }

    fn linear(&self, purpose: Use, linear: &Linear) -> u64 {
        let whole = self.matrix(purpose, &linear.weight);
        let rows = linear.weight.rows().max(1);
        let bias = bias_bytes(linear);
        // A product of a size in bytes and a number of rows may not fit 64 bits.
        (u128::from(whole) * u128::from(linear.outputs()) / u128::from(rows)) as u64 + bias
    }

    /// Gate, up and down without biases.
    fn neurons(&self, ffn: &FeedForward) -> u64 {
        let gate = if ffn.gated { self.matrix(Use::Neurons, &ffn.gate.weight) } else { 0 };
        let (up, down) = (&ffn.up.weight, &ffn.down.linear().weight);
        let low = ffn.planes.iter().flat_map(|planes| [Some(&planes.gate_low), planes.up_low.as_ref()]);
        let low: u64 = low.flatten().map(TensorInfo::byte_len).sum();
        low + gate + self.matrix(Use::Neurons, up) + self.matrix(Use::Neurons, down)
    }

    /// The same, of a mixture only as many experts as a token uses.
    pub(crate) fn used_neurons(&self, ffn: &FeedForward) -> u64 {
        let all = self.neurons(ffn);
        match &ffn.experts {
            Some(experts) => all / (experts.count.max(1) as u64) * experts.used as u64,
            None => all,
        }
    }

    /// Of a mixture: those of this number in every expert.
    fn neuron(&self, ffn: &FeedForward) -> u64 {
        self.neurons(ffn).div_ceil((ffn.n_ff as u64).max(1))
    }

    /// Attention with the layer's norms and the network's biases, which are no part of a neuron.
    fn attention(&self, layer: &Layer) -> u64 {
        let (attention, ffn) = (&layer.attention, &layer.ffn);
        let matrices = [&attention.q, &attention.k, &attention.v, &attention.o];
        let mut norms = vec![Some(&layer.attn_norm), layer.attn_norm_bias.as_ref()];
        // The two may be one tensor.
        if layer.ffn_norm != layer.attn_norm {
            norms.extend([Some(&layer.ffn_norm), layer.ffn_norm_bias.as_ref()]);
        }
        norms.extend([&layer.attn_post_norm, &layer.ffn_post_norm].map(Option::as_ref));
        let router = ffn.experts.as_ref().map_or(0, |experts| self.linear(Use::Matrix, &experts.router));
        norms.extend([&attention.q_norm, &attention.k_norm].map(Option::as_ref));
        norms.push(ffn.gate.bias.as_ref().filter(|_| ffn.gated));
        norms.extend([ffn.up.bias.as_ref(), ffn.down.linear().bias.as_ref()]);
        let vectors: u64 = norms.into_iter().flatten().map(|tensor| tensor.elements() * 4).sum();
        vectors + router + matrices.map(|linear| self.linear(Use::Matrix, linear)).iter().sum::<u64>()
    }

    fn output_norm(&self) -> u64 {
        let vectors = [Some(&self.model.output_norm), self.model.output_norm_bias.as_ref()];
        vectors.into_iter().flatten().map(|tensor| tensor.elements() * 4).sum()
    }

    /// Embedding, positions, head and final norm, each tensor once (a tied one twice where its uses need two types).
    pub(crate) fn embedding(&self) -> u64 {
        let model = self.model;
        let (table, head) = (&model.token_embd, model.head());
        let types = [(Use::Table, table), (Use::Matrix, head)]
            .map(|(purpose, tensor)| self.conversions.target(purpose, tensor.dtype));
        let shared = matches!(model.output, OutputHead::Tied) && types[0] == types[1];
        let head = if shared { 0 } else { self.matrix(Use::Matrix, head) };
        let positions =
            model.positions.as_ref().map_or(0, |learned| self.matrix(Use::Table, &learned.tensor));
        self.matrix(Use::Table, table) + positions + head + self.output_norm()
    }

    /// Matrices that every token reads whole, whatever the sparsity.
    pub(crate) fn fixed(&self) -> Fixed {
        Fixed {
            attention: self.model.layers.iter().map(|layer| self.fixed_attention(layer)).sum(),
            head: self.matrix(Use::Matrix, self.model.head()),
        }
    }

    /// Those of a layer's attention, with the router of experts.
    pub(crate) fn fixed_attention(&self, layer: &Layer) -> u64 {
        let attention = &layer.attention;
        let matrices = [&attention.q, &attention.k, &attention.v, &attention.o].into_iter();
        let router = layer.ffn.experts.as_ref().map(|experts| &experts.router);
        matrices.chain(router).map(|linear| self.linear(Use::Matrix, linear) - bias_bytes(linear)).sum()
    }

    /// A layer's predictor, where it has one.
    pub(crate) fn predictor(&self, ffn: &FeedForward) -> u64 {
        ffn.predictor.as_ref().map_or(0, |predictor| {
            [&predictor.fc1, &predictor.fc2].map(|of| self.matrix(Use::Predictor, of)).iter().sum()
        })
    }

    /// Weights that one token reads where no neuron is skipped: one row of each table, the layers (without predictors),
    /// the final norm and the head.
    pub(crate) fn per_token(&self) -> u64 {
        let layers = self.model.layers.iter();
        let layers: u64 = layers.map(|layer| self.attention(layer) + self.used_neurons(&layer.ffn)).sum();
        let tables = [Some(&self.model.token_embd), self.model.positions.as_ref().map(|p| &p.tensor)];
        let rows = tables.into_iter().flatten();
        let rows: u64 = rows.map(|table| self.matrix(Use::Table, table) / table.rows().max(1)).sum();
        rows + layers + self.output_norm() + self.matrix(Use::Matrix, self.model.head())
    }
}

/// Bytes of matrices that every token reads.
pub(crate) struct Fixed {
    /// Of attention, with the routers of experts.
    pub(crate) attention: u64,
    /// Of the head.
    pub(crate) head: u64,
}

fn bias_bytes(linear: &Linear) -> u64 {
    if linear.bias.is_some() { linear.outputs() * 4 } else { 0 }
}

/// The profile of a model with these options; `graph` is its largest list.
pub(crate) fn model_profile(
    file: &GgufFile,
    options: GraphOptions<'_>,
    asked: &EngineOptions,
    graph: &Graph,
) -> ModelProfile {
    let (model, plain) = (options.model, OnDevice::plain(1));
    let conversions = &options.devices.first().unwrap_or(&plain).conversions;
    let sizes = Sizes { model, conversions };
    let of_role = |wanted: fn(&SlotRole) -> bool| -> u64 {
        graph.list.slots.iter().filter(|slot| wanted(&slot.role)).map(|slot| slot.tensor.bytes()).sum()
    };
    let kv_bytes =
        graph.caches.iter().filter_map(|&id| graph.list.slot(id)).map(|slot| slot.tensor.bytes()).sum();
    let state = of_role(|role| matches!(role, SlotRole::State));
    let layers = model.layers.iter().enumerate().map(|(index, layer)| {
        let ffn = &layer.ffn;
        LayerProfile {
            attention_bytes: sizes.attention(layer),
            neurons: u32::try_from(ffn.n_ff).unwrap_or(u32::MAX),
            neuron_bytes: sizes.neuron(ffn),
            zero_below: ffn.activation.is_sparse(),
            predictor_bytes: sizes.predictor(ffn),
            frequency: ffn.frequency.as_ref().map_or_else(Vec::new, |tensor| {
                mean_of_experts(frequencies(file, tensor), ffn.experts.as_ref().map_or(1, |e| e.count))
            }),
            calibrated: asked.calibrated(model, index),
            whole: ffn.experts.is_some(),
            block: neuron_block(ffn),
        }
    });
    ModelProfile {
        name: model.name.clone(),
        hash: model_hash(file, model),
        embedding_bytes: sizes.embedding(),
        kv_bytes,
        activation_bytes: of_role(|role| matches!(role, SlotRole::Scratch))
            + state.saturating_sub(kv_bytes)
            + beside_slots(model, graph),
        divided_bytes: divided_bytes(model, asked.batch),
        layers: layers.collect(),
    }
}

/// Each neuron's mean over the experts: a plan puts all of a mixture's experts in the same places.
fn mean_of_experts(frequencies: Vec<f32>, experts: usize) -> Vec<f32> {
    if experts <= 1 {
        return frequencies;
    }
    let each = frequencies.len() / experts;
    let mean = |i: usize| frequencies.iter().skip(i).step_by(each).sum::<f32>() / experts as f32;
    (0..each).map(mean).collect()
}

/// What a prepared file says of a layer's neurons; nothing where it is of another type than prepared files have.
fn frequencies(file: &GgufFile, tensor: &TensorInfo) -> Vec<f32> {
    if tensor.dtype != engine_core::DType::F32 {
        tracing::warn!("`{}` is {}, not F32: it is not used", tensor.name, tensor.dtype);
        return Vec::new();
    }
    let (numbers, _) = file.tensor_bytes(tensor).as_chunks::<4>();
    numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// What no slot of the list shows: both halves of the widest layer's neurons, which a device keeps for a batch between
/// its products, and the logits that a session keeps.
fn beside_slots(model: &ModelDescription, graph: &Graph) -> u64 {
    let batch = u64::from(graph.list.token_capacity);
    let widest = model.layers.iter().map(|layer| layer.ffn.n_ff as u64).max().unwrap_or(0);
    let logits = (model.vocab_size as u64).saturating_mul(u64::from(SCORE_ROWS).min(batch));
    batch.saturating_mul(widest).saturating_mul(2 * 4).saturating_add(logits.saturating_mul(4))
}

/// What a list of one layer needs for itself: its operands of a batch, and both halves of the widest layer's neurons.
fn divided_bytes(model: &ModelDescription, batch: u32) -> u64 {
    let widest = model.layers.iter().map(|layer| layer.ffn.n_ff).max().unwrap_or(0) as u64;
    let attention = |layer: &Layer| (layer.attention.n_head * layer.attention.head_dim) as u64;
    let widest_attention = model.layers.iter().map(attention).max().unwrap_or(0);
    let elements = 2 * widest + 4 * model.n_embd as u64 + 4 * widest_attention;
    u64::from(batch).saturating_mul(elements).saturating_mul(4)
}

/// A plan that puts everything on one device, with one sparsity policy: to ask the device what it denies.
pub(crate) fn uniform_plan(model: &ModelDescription, sparsity: SparsityPolicy) -> Vec<LayerPlan> {
    plan_of(model, |_| sparsity)
}

/// The same, with a policy per layer.
fn plan_of(model: &ModelDescription, sparsity: impl Fn(usize) -> SparsityPolicy) -> Vec<LayerPlan> {
    let layer = |(index, layer): (usize, &formats::model::Layer)| {
        let sparsity = sparsity(index);
        let clusters = ClusterSet::all(u32::try_from(layer.ffn.n_ff).unwrap_or(u32::MAX));
        LayerPlan { attention: 0, ffn: vec![FfnShare { device: 0, clusters, sparsity }], prefill: None }
    };
    model.layers.iter().enumerate().map(layer).collect()
}

/// The profile of all devices for this model. `resident` is the length of its files, where the storage tier keeps them in
/// memory.
///
/// # Errors
/// Where no device can run the whole model.
pub(crate) fn hardware_profile(
    model: &ModelDescription,
    compute: &[(String, Arc<dyn ComputeBackend>)],
    (options, asked): (&EngineOptions, Option<SparsityKind>),
    context: u32,
    resident: Option<u64>,
) -> Result<HardwareProfile> {
    let dense = uniform_plan(model, SparsityPolicy::Dense);
    let sparse = match model.layers.iter().all(|layer| layer.ffn.activation.is_sparse()) {
        true => uniform_plan(model, SparsityPolicy::GateFirst),
        false => uniform_plan(model, SparsityPolicy::Threshold { threshold: 0.0 }),
    };
    let asked = plan_of(model, |layer| {
        let policies = options.calibrated(model, layer);
        let policy = policies.into_iter().find(|policy| Some(policy.kind()) == asked);
        policy.unwrap_or(SparsityPolicy::Dense)
    });
    let common = GraphOptions {
        model,
        plan: &dense,
        embedding: 0,
        activations: options.activations,
        context,
        count_active: false,
        devices: &[],
    };
    let mut hash = Fingerprint::new();
    let mut devices = Vec::new();
    for (name, backend) in compute {
        let description = backend.describe();
        add_device(&mut hash, name, description);
        let conversions = Conversions::of(&**backend, model, options.activations);
        let on = [OnDevice::of(description, conversions)];
        let with = GraphOptions { devices: &on, ..common };
        let graphs = [step(with)?, body(with, options.batch)?];
        let predicted = step(GraphOptions { plan: &asked, ..with }).ok();
        let viewed = &predicted.as_ref().unwrap_or(&graphs[0]).weights;
        let reasons = distinct(graphs.iter().map(|graph| denied(&**backend, &graph.list)));
        let mut sparse_step = step(GraphOptions { plan: &sparse, ..with })?;
        sparse_step.list.operations.retain(
            |operation| matches!(&operation.kind, OperationKind::Ffn(ffn) if ffn.selection != Selection::All),
        );
        devices.push(DeviceProfile {
            name: name.clone(),
            memory_bytes: memory_bytes(description, resident, viewed),
            bandwidth: 0.0,
            sync_seconds: 0.0,
            parts: match reasons.is_empty() {
                true => Vec::new(),
                false => parts(&**backend, &on[0], with, options.batch)?,
            },
            unsupported: condensed(&reasons),
            sparse: denied(&**backend, &sparse_step.list).is_empty(),
        });
    }
    if let Some(error) = none_can(&devices) {
        return Err(error);
    }
    Ok(HardwareProfile { hash: hash.text(), devices })
}

/// The parts of layers that a device can run beside another one, where it denies the rest: asked as it would be given them,
/// with the copies that bring their input and take their output.
fn parts(
    backend: &dyn ComputeBackend,
    on: &OnDevice,
    options: GraphOptions<'_>,
    batch: u32,
) -> Result<Vec<Part>> {
    let devices = [OnDevice::plain(on.row_alignment), on.clone()];
    let mut found = Vec::new();
    for part in [Part::Projections, Part::Ffn] {
        let layer = |(index, layer): (usize, &LayerPlan)| {
            let ffn = u32::from(part == Part::Ffn);
            let neurons = options.model.layers.get(index).map_or(0, |layer| layer.ffn.n_ff);
            let clusters = ClusterSet::all(u32::try_from(neurons).unwrap_or(u32::MAX));
            let shares = layer.ffn.iter().map(|share| FfnShare { device: ffn, ..share.clone() });
            LayerPlan {
                attention: 0,
                ffn: shares.collect(),
                prefill: Some(PrefillPlan {
                    attention: 0,
                    projections: 1 - ffn,
                    ffn: vec![PrefillShare { device: ffn, clusters }],
                }),
            }
        };
        let plan: Vec<LayerPlan> = options.plan.iter().enumerate().map(layer).collect();
        let options = GraphOptions { plan: &plan, devices: &devices, ..options };
        let mut runs = true;
        for graph in [step(options)?, body(options, batch)?] {
            let program = Program::of(graph, &[])?;
            let own = program.stages.iter().filter(|stage| stage.device == 1);
            runs &= own.map(|stage| denied(backend, &stage.list)).all(|denied| denied.is_empty());
        }
        found.extend(runs.then_some(part));
    }
    Ok(found)
}

/// Bytes that may be used on a device as planners count: they count every weight, the device's limit only what it holds
/// itself. So the weights that it can view in the tier's memory come on top.
fn memory_bytes(description: &DeviceDescription, resident: Option<u64>, weights: &[Weight]) -> u64 {
    let limit = description.memory_bytes;
    if limit == 0 {
        return u64::MAX;
    }
    if !need::views(description, resident) {
        return limit;
    }
    let mut known = BTreeSet::new();
    let viewed = weights.iter().filter(|weight| weight.is_viewable(description.alignment));
    let viewed = viewed.filter(|weight| known.insert(&weight.name)).map(Weight::byte_len);
    viewed.fold(limit, u64::saturating_add)
}

fn none_can(devices: &[DeviceProfile]) -> Option<RuntimeError> {
    if devices.iter().any(|device| device.unsupported.is_empty()) {
        return None;
    }
    let reason =
        |device: &DeviceProfile| format!("`{}` denies {}", device.name, device.unsupported.join("; "));
    Some(RuntimeError::NoDevice { reasons: devices.iter().map(reason).collect() })
}

fn add_device(hash: &mut Fingerprint, name: &str, description: &DeviceDescription) {
    hash.add(name.as_bytes());
    hash.add(description.name.as_bytes());
    hash.add(description.description.as_bytes());
    hash.add(&description.memory_bytes.to_le_bytes());
}
