//! What the planner is told: the model's sizes, and what each device is and denies.

use crate::graph::{Graph, GraphOptions, Places, body, step};
use crate::options::EngineOptions;
use crate::support::{condensed, denied, distinct};
use crate::{Result, RuntimeError};
use engine_core::backend::DeviceDescription;
use engine_core::operation::{OperationKind, Selection, SlotRole};
use engine_core::planner::{
    DeviceProfile, FfnShare, HardwareProfile, LayerPlan, LayerProfile, ModelProfile, SparsityPolicy,
};
use engine_core::{ClusterSet, ComputeBackend};
use formats::model::{FeedForward, Linear, OutputHead};
use formats::{GgufFile, ModelDescription, TensorInfo};
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

fn linear_bytes(linear: &Linear) -> u64 {
    linear.weight.byte_len() + linear.bias.as_ref().map_or(0, TensorInfo::byte_len)
}

fn neuron_bytes(ffn: &FeedForward) -> u64 {
    let matrices =
        ffn.gate.weight.byte_len() + ffn.up.weight.byte_len() + ffn.down.linear().weight.byte_len();
    matrices.div_ceil((ffn.n_ff as u64).max(1))
}

/// Bytes of embedding, head and final norm, each tensor once.
pub(crate) fn embedding_bytes(model: &ModelDescription) -> u64 {
    let head = match &model.output {
        OutputHead::Separate(tensor) => tensor.byte_len(),
        _ => 0,
    };
    model.token_embd.byte_len() + head + model.output_norm.byte_len()
}

/// Bytes of weights that one token reads where no neuron is skipped: one row of the embedding, the layers (without
/// predictors), the final norm and the head.
pub(crate) fn weight_bytes_per_token(model: &ModelDescription) -> u64 {
    let layers: u64 = model.layers.iter().map(|layer| attention_bytes(layer) + ffn_bytes(&layer.ffn)).sum();
    let row = model.token_embd.byte_len() / model.token_embd.rows().max(1);
    row + layers + model.output_norm.byte_len() + model.head().byte_len()
}

fn attention_bytes(layer: &formats::model::Layer) -> u64 {
    let attention = &layer.attention;
    let matrices = [&attention.q, &attention.k, &attention.v, &attention.o];
    layer.attn_norm.byte_len()
        + layer.ffn_norm.byte_len()
        + matrices.into_iter().map(linear_bytes).sum::<u64>()
}

fn ffn_bytes(ffn: &FeedForward) -> u64 {
    linear_bytes(&ffn.gate) + linear_bytes(&ffn.up) + linear_bytes(ffn.down.linear())
}

/// The profile of a model with this context; `graph` is its largest list.
pub(crate) fn model_profile(file: &GgufFile, model: &ModelDescription, graph: &Graph) -> ModelProfile {
    let of_role = |wanted: fn(&SlotRole) -> bool| -> u64 {
        graph.list.slots.iter().filter(|slot| wanted(&slot.role)).map(|slot| slot.tensor.bytes()).sum()
    };
    let kv_bytes =
        graph.caches.iter().filter_map(|&id| graph.list.slot(id)).map(|slot| slot.tensor.bytes()).sum();
    let state = of_role(|role| matches!(role, SlotRole::State));
    let layers = model.layers.iter().map(|layer| {
        let ffn = &layer.ffn;
        let predictor = ffn.predictor.as_ref();
        LayerProfile {
            attention_bytes: attention_bytes(layer),
            neurons: u32::try_from(ffn.n_ff).unwrap_or(u32::MAX),
            neuron_bytes: neuron_bytes(ffn),
            zero_below: ffn.activation.is_sparse(),
            predictor_bytes: predictor.map_or(0, |p| p.fc1.byte_len() + p.fc2.byte_len()),
            frequency: Vec::new(),
        }
    });
    ModelProfile {
        name: model.name.clone(),
        hash: model_hash(file, model),
        embedding_bytes: embedding_bytes(model),
        kv_bytes,
        activation_bytes: of_role(|role| matches!(role, SlotRole::Scratch)) + state.saturating_sub(kv_bytes),
        layers: layers.collect(),
    }
}

/// A plan that puts everything on one device, with one sparsity policy: to ask the device what it denies.
pub(crate) fn uniform_plan(model: &ModelDescription, sparsity: SparsityPolicy) -> Vec<LayerPlan> {
    let layer = |layer: &formats::model::Layer| {
        let clusters = ClusterSet::all(u32::try_from(layer.ffn.n_ff).unwrap_or(u32::MAX));
        LayerPlan { attention: 0, ffn: vec![FfnShare { device: 0, clusters, sparsity }] }
    };
    model.layers.iter().map(layer).collect()
}

/// The profile of all devices for this model.
///
/// # Errors
/// Where no device can run the whole model.
pub(crate) fn hardware_profile(
    model: &ModelDescription,
    compute: &[(String, Arc<dyn ComputeBackend>)],
    options: &EngineOptions,
    context: u32,
) -> Result<HardwareProfile> {
    let dense = uniform_plan(model, SparsityPolicy::Dense);
    let sparse = match model.layers.iter().all(|layer| layer.ffn.activation.is_sparse()) {
        true => uniform_plan(model, SparsityPolicy::GateFirst),
        false => uniform_plan(model, SparsityPolicy::Threshold { threshold: 0.0 }),
    };
    let nowhere = &Places::nowhere();
    let with = |plan, description: &DeviceDescription| GraphOptions {
        model,
        plan,
        activations: options.activations,
        context,
        row_alignment: description.alignment,
        count_active: false,
    };
    let mut hash = Fingerprint::new();
    let mut devices = Vec::new();
    for (name, backend) in compute {
        let description = backend.describe();
        add_device(&mut hash, name, description);
        let graphs = [
            step(with(&dense, description), nowhere)?,
            body(with(&dense, description), nowhere, options.batch)?,
        ];
        let reasons = distinct(graphs.iter().map(|graph| denied(&**backend, &graph.list)));
        let mut sparse_step = step(with(&sparse, description), nowhere)?;
        sparse_step.list.operations.retain(
            |operation| matches!(&operation.kind, OperationKind::Ffn(ffn) if ffn.selection != Selection::All),
        );
        devices.push(DeviceProfile {
            name: name.clone(),
            memory_bytes: if description.memory_bytes == 0 { u64::MAX } else { description.memory_bytes },
            bandwidth: 0.0,
            sync_seconds: 0.0,
            unsupported: condensed(&reasons),
            sparse: denied(&**backend, &sparse_step.list).is_empty(),
        });
    }
    if let Some(error) = none_can(&devices) {
        return Err(error);
    }
    Ok(HardwareProfile { hash: hash.text(), devices })
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
