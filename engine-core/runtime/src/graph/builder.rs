//! Builds one list: slots by name, weights as constants, embedding and head.

use super::{Graph, GraphOptions, Kind, OnDevice, Seen, refused, residual_stride};
use crate::conversions::Use;
use crate::observe::Wanted;
use crate::weight::Weight;
use crate::{Activations, Result, RuntimeError};
use engine_core::backend::{BufferId, BufferView};
use engine_core::operation::{
    Accumulation, Arithmetic, NormKind, OperationKind, OperationList, Place, Quantization, Slot, SlotId,
    SlotRole,
};
use engine_core::{ClusterRange, ClusterSet, DType, TensorType};
use formats::{TensorInfo, model};
use std::collections::HashMap;

/// Host slots that say which rows are looked up.
pub(super) struct Embedded {
    pub(super) ids: SlotId,
    pub(super) positions: Option<SlotId>,
}

pub(super) struct Builder<'a> {
    pub(super) options: GraphOptions<'a>,
    pub(super) list: OperationList,
    /// The device of what is pushed, as an index and as what it asks.
    at: u32,
    pub(super) device: &'a OnDevice,
    /// The device of each operation.
    placed: Vec<u32>,
    weights: Vec<Weight>,
    slots: Vec<SlotId>,
    /// By the weight's name, and by scratch name and width: layers share what does not outlive them.
    constants: HashMap<String, SlotId>,
    scratch: HashMap<(String, u64), SlotId>,
    pub(super) caches: Vec<SlotId>,
    pub(super) active: Vec<(usize, SlotId)>,
    pub(super) ranges: Vec<(u32, Vec<ClusterRange>)>,
    /// What is given to the host to look at, layer after layer.
    observed: Vec<Seen>,
    /// What that is to be.
    pub(super) wanted: Wanted,
    /// Whether many tokens are expected: then exact skipping gives way to whole tiles.
    pub(super) many_tokens: bool,
}

impl<'a> Builder<'a> {
    /// Begins on the device with embedding table and head.
    pub(super) fn new(options: GraphOptions<'a>, capacity: u32, many_tokens: bool) -> Result<Self> {
        let at = options.embedding;
        Ok(Builder {
            options,
            list: OperationList::new(capacity),
            at,
            device: device(&options, at)?,
            placed: Vec::new(),
            weights: Vec::new(),
            slots: Vec::new(),
            constants: HashMap::new(),
            scratch: HashMap::new(),
            caches: Vec::new(),
            active: Vec::new(),
            ranges: Vec::new(),
            observed: Vec::new(),
            wanted: Wanted::default(),
            many_tokens,
        })
    }

    /// What is pushed from now on runs on this device.
    pub(super) fn on(&mut self, at: u32) -> Result<()> {
        (self.at, self.device) = (at, device(&self.options, at)?);
        Ok(())
    }

    pub(super) fn finish(self, set: impl FnOnce(&mut Graph)) -> Result<Graph> {
        self.list.validate().map_err(refused(self.options.model))?;
        let mut graph = Graph {
            list: self.list,
            at: self.placed,
            weights: self.weights,
            constants: self.slots,
            ids: None,
            positions: None,
            residual: None,
            logits: None,
            caches: self.caches,
            active: self.active,
            observed: self.observed,
            ranges: self.ranges,
        };
        set(&mut graph);
        Ok(graph)
    }

    /// The constant slot of a matrix, a row per output.
    pub(super) fn weight(&mut self, purpose: Use, tensor: &TensorInfo) -> Result<SlotId> {
        let dtype = self.device.conversions.target(purpose, tensor.dtype);
        let weight = Weight::matrix(self.options.model, tensor, dtype)?;
        Ok(self.constant(weight))
    }

    /// The constant slot of the matrix of a linear map, wherever its rows are.
    pub(super) fn matrix(&mut self, purpose: Use, linear: &formats::model::Linear) -> Result<SlotId> {
        let dtype = self.device.conversions.target(purpose, linear.weight.dtype);
        let weight = Weight::linear(self.options.model, linear, dtype)?;
        Ok(self.constant(weight))
    }

    /// The constant slot of a vector.
    pub(super) fn vector(&mut self, tensor: &TensorInfo) -> Result<SlotId> {
        let weight = Weight::vector(self.options.model, tensor, 0.0)?;
        Ok(self.constant(weight))
    }

    /// The constant slot of a weight.
    pub(super) fn constant(&mut self, weight: Weight) -> SlotId {
        if let Some(&slot) = self.constants.get(&weight.name) {
            return slot;
        }
        // Where it lies is known, and may differ by device, when the list is cut.
        let role = SlotRole::Constant(BufferView { buffer: BufferId(0), offset: 0 });
        let slot = self.list.fixed(&weight.name, role, weight.shape);
        self.constants.insert(weight.name.clone(), slot);
        self.slots.push(slot);
        self.weights.push(weight);
        slot
    }

    /// Scratch with a row of f32 per token, the same slot for the same name and width.
    pub(super) fn scratch(&mut self, name: &str, columns: u64) -> Result<SlotId> {
        self.scratch_of(name, DType::F32, columns)
    }

    pub(super) fn scratch_of(&mut self, name: &str, dtype: DType, columns: u64) -> Result<SlotId> {
        let key = (name.to_owned(), columns);
        if let Some(&slot) = self.scratch.get(&key) {
            return Ok(slot);
        }
        let slot = self
            .list
            .per_token(name, SlotRole::Scratch, dtype, columns)
            .map_err(refused(self.options.model))?;
        self.scratch.insert(key, slot);
        Ok(slot)
    }

    /// The residual in a buffer that is bound at submit.
    pub(super) fn residual(&mut self) -> Result<SlotId> {
        let model = self.options.model;
        let columns = model.n_embd as u64;
        let stride = residual_stride(model, self.device.row_alignment);
        let tensor = TensorType::strided(DType::F32, self.list.token_capacity.into(), columns, stride)
            .map_err(refused(model))?;
        let name = "residual".to_owned();
        Ok(self.list.add_slot(Slot {
            name,
            role: SlotRole::State,
            place: Place::Device,
            tensor,
            per_token: true,
        }))
    }

    /// A slot in host memory with a row per token.
    fn host(&mut self, name: &str, role: SlotRole, dtype: DType, columns: u64) -> Result<SlotId> {
        let tensor = TensorType::matrix(dtype, self.list.token_capacity.into(), columns)
            .map_err(refused(self.options.model))?;
        let name = name.to_owned();
        Ok(self.list.add_slot(Slot { name, role, place: Place::Host, tensor, per_token: true }))
    }

    pub(super) fn push(&mut self, label: impl Into<String>, kind: OperationKind) {
        self.push_with(label, kind, Arithmetic::F32);
    }

    /// Adds an operation that multiplies; its sums are of the type that the device has.
    pub(super) fn push_with(
        &mut self,
        label: impl Into<String>,
        kind: OperationKind,
        arithmetic: Arithmetic,
    ) {
        let multiplies =
            matches!(kind, OperationKind::Linear { .. } | OperationKind::Ffn(_) | OperationKind::Experts(_));
        let accumulation = if multiplies { self.device.accumulation } else { arithmetic.accumulation };
        self.list.push(label, kind, Arithmetic { accumulation, ..arithmetic });
        self.placed.push(self.at);
    }

    /// Quantisation of activations that meet weights of these types.
    pub(super) fn activations(&self, purpose: Use, weights: &[&TensorInfo]) -> Quantization {
        let conversions = &self.device.conversions;
        let quantised = weights.iter().all(|tensor| conversions.target(purpose, tensor.dtype).is_quantised());
        match self.options.activations {
            Activations::Int8 if quantised && self.device.quantises => Quantization::Int8Blocks,
            _ => Quantization::None,
        }
    }

    /// `output (+)= weight . input + bias`.
    pub(super) fn linear(
        &mut self,
        label: String,
        linear: &formats::model::Linear,
        (input, output): (SlotId, SlotId),
        accumulate: bool,
    ) -> Result<()> {
        let model = self.options.model;
        let dtype = self.device.conversions.target(Use::Matrix, linear.weight.dtype);
        let weight = self.constant(Weight::linear(model, linear, dtype)?);
        let bias = Weight::bias(model, linear)?.map(|bias| self.constant(bias));
        let arithmetic = Arithmetic {
            input: self.activations(Use::Matrix, &[&linear.weight]),
            hidden: Quantization::None,
            accumulation: Accumulation::F32,
        };
        self.push_with(label, OperationKind::Linear { input, weight, bias, output, accumulate }, arithmetic);
        Ok(())
    }

    /// `output = norm(input) * weight + bias` by the model's kind of norm.
    pub(super) fn norm(
        &mut self,
        label: String,
        (weight, bias): (&TensorInfo, Option<&TensorInfo>),
        (input, output): (SlotId, SlotId),
    ) -> Result<()> {
        let norm = match self.options.model.norm {
            model::Norm::Rms => NormKind::Rms,
            model::Norm::Layer => NormKind::Layer,
            other => return Err(self.unsupported(format!("norm {other:?}"), "RMS norm and LayerNorm are")),
        };
        self.norm_of(norm, label, (weight, bias), (input, output))
    }

    /// `output = rms_norm(input) * weight` for each head of a row.
    pub(super) fn head_norm(
        &mut self,
        label: String,
        weight: &TensorInfo,
        (input, output): (SlotId, SlotId),
    ) -> Result<()> {
        self.norm_of(NormKind::Rms, label, (weight, None), (input, output))
    }

    fn norm_of(
        &mut self,
        norm: NormKind,
        label: String,
        (weight, bias): (&TensorInfo, Option<&TensorInfo>),
        (input, output): (SlotId, SlotId),
    ) -> Result<()> {
        let model = self.options.model;
        let weight = self.constant(Weight::vector(model, weight, model.norm_offset)?);
        let bias = bias.map(|bias| self.vector(bias)).transpose()?;
        let epsilon = model.rms_epsilon;
        self.push(label, OperationKind::Norm { norm, epsilon, input, weight, bias, output });
        Ok(())
    }

    /// Ids from the host, and their rows of the embedding, with those of the positions where these are learned.
    pub(super) fn embed(&mut self, output: SlotId) -> Result<Embedded> {
        let model = self.options.model;
        let ids = self.host("ids", SlotRole::Input, DType::I32, 1)?;
        let scale = model.embedding_scale;
        self.look_up(("ids", "ids on the device"), ids, ("token_embd", &model.token_embd), (output, scale))?;
        let mut positions = None;
        if let Some(learned) = &model.positions {
            let from = self.host("positions", SlotRole::Input, DType::I32, 1)?;
            let rows = self.scratch("position rows", model.n_embd as u64)?;
            let names = ("positions", "positions on the device");
            self.look_up(names, from, ("position_embd", &learned.tensor), (rows, 1.0))?;
            let add = OperationKind::Add { left: output, right: rows, output };
            self.push("position_embd.add", add);
            positions = Some(from);
        }
        Ok(Embedded { ids, positions })
    }

    /// The rows of a table that numbers on the host name.
    fn look_up(
        &mut self,
        (label, device): (&str, &str),
        from: SlotId,
        (name, table): (&str, &TensorInfo),
        (output, scale): (SlotId, f32),
    ) -> Result<()> {
        let ids = self.scratch_of(device, DType::I32, 1)?;
        self.push(label, OperationKind::Copy { from, to: ids });
        let table = self.weight(Use::Table, table)?;
        self.push(name, OperationKind::Embed { ids, table, output, scale });
        Ok(())
    }

    /// The neurons of a layer whose weights the device is given, where these are not all.
    pub(super) fn held(&self, layer: usize) -> Option<&'a ClusterSet> {
        self.device.held.get(layer).and_then(Option::as_ref)
    }

    /// How many these are.
    pub(super) fn neurons(&self, layer: usize) -> u64 {
        let all = self.options.model.layers.get(layer).map_or(0, |layer| layer.ffn.n_ff as u64);
        self.held(layer).map_or(all, |held| held.len().into())
    }

    /// The constant slot of a matrix with a row per neuron, of the device's neurons.
    pub(super) fn neuron_rows(&mut self, purpose: Use, tensor: &TensorInfo, layer: usize) -> Result<SlotId> {
        let dtype = self.device.conversions.target(purpose, tensor.dtype);
        self.rows_as(tensor, dtype, layer)
    }

    /// The same as it is stored, whatever the device would like.
    pub(super) fn stored_rows(&mut self, tensor: &TensorInfo, layer: usize) -> Result<SlotId> {
        self.rows_as(tensor, tensor.dtype, layer)
    }

    fn rows_as(&mut self, tensor: &TensorInfo, dtype: DType, layer: usize) -> Result<SlotId> {
        let model = self.options.model;
        let weight = match self.held(layer) {
            None => Weight::matrix(model, tensor, dtype)?,
            Some(held) => Weight::neuron_rows(model, tensor, dtype, held)?,
        };
        Ok(self.constant(weight))
    }

    /// The constant slot of a matrix with a column per neuron, of the device's neurons.
    pub(super) fn neuron_columns(
        &mut self,
        purpose: Use,
        tensor: &TensorInfo,
        layer: usize,
    ) -> Result<SlotId> {
        let dtype = self.device.conversions.target(purpose, tensor.dtype);
        let model = self.options.model;
        let weight = match self.held(layer) {
            None => Weight::matrix(model, tensor, dtype)?,
            Some(held) => Weight::neuron_columns(model, tensor, dtype, held)?,
        };
        Ok(self.constant(weight))
    }

    /// The constant slot of a vector with an element per neuron, of the device's neurons.
    pub(super) fn neuron_vector(&mut self, tensor: &TensorInfo, layer: usize) -> Result<SlotId> {
        let model = self.options.model;
        let weight = match self.held(layer) {
            None => Weight::vector(model, tensor, 0.0)?,
            Some(held) => Weight::neuron_vector(model, tensor, held)?,
        };
        Ok(self.constant(weight))
    }

    /// An error that names the model.
    pub(super) fn unsupported(&self, what: String, advice: &str) -> RuntimeError {
        RuntimeError::Model { path: self.options.model.path.clone(), what, advice: advice.into() }
    }

    /// Every layer on the residual.
    pub(super) fn layers(&mut self, residual: SlotId) -> Result<()> {
        for index in 0..self.options.model.layers.len() {
            super::layer::emit(self, index, residual)?;
        }
        Ok(())
    }

    /// Final norm and head; returns the host's slot of the logits.
    pub(super) fn head(&mut self, residual: SlotId) -> Result<SlotId> {
        let model = self.options.model;
        let normed = self.scratch("normed", model.n_embd as u64)?;
        let norm = (&model.output_norm, model.output_norm_bias.as_ref());
        self.norm("output_norm".into(), norm, (residual, normed))?;
        let logits = self.scratch("logits on the device", model.vocab_size as u64)?;
        let weight = self.weight(Use::Matrix, model.head())?;
        let arithmetic = Arithmetic {
            input: self.activations(Use::Matrix, &[model.head()]),
            hidden: Quantization::None,
            accumulation: Accumulation::F32,
        };
        let kind =
            OperationKind::Linear { input: normed, weight, bias: None, output: logits, accumulate: false };
        self.push_with("output", kind, arithmetic);
        let to = self.host("logits", SlotRole::Output, DType::F32, model.vocab_size as u64)?;
        self.push("logits", OperationKind::Copy { from: logits, to });
        Ok(to)
    }

    /// Rows of one layer, given to the host to look at.
    pub(super) fn observe(&mut self, layer: usize, kind: Kind, from: SlotId, columns: u64) -> Result<()> {
        let name = match kind {
            Kind::Input => "input",
            Kind::Residual => "residual",
            Kind::Hidden => "hidden",
            Kind::Chosen => "chosen",
        };
        let dtype = if kind == Kind::Chosen { DType::I32 } else { DType::F32 };
        let slot = self.host(&format!("blk.{layer}.{name}"), SlotRole::Output, dtype, columns)?;
        self.push(format!("blk.{layer}.{name}"), OperationKind::Copy { from, to: slot });
        self.observed.push(Seen { layer, kind, slot });
        Ok(())
    }

    /// Counts of one layer, given to the host.
    pub(super) fn count_to_host(&mut self, layer: usize, count: SlotId) -> Result<()> {
        let to = self.host(&format!("blk.{layer}.active"), SlotRole::Output, DType::I32, 1)?;
        self.push(format!("blk.{layer}.active"), OperationKind::Copy { from: count, to });
        self.active.push((layer, to));
        Ok(())
    }
}

/// What a device of the plan asks.
fn device<'a>(options: &GraphOptions<'a>, at: u32) -> Result<&'a OnDevice> {
    options.devices.get(at as usize).ok_or_else(|| RuntimeError::Model {
        path: options.model.path.clone(),
        what: format!("a plan that names device {at} of {}", options.devices.len()),
        advice: "plan it again".into(),
    })
}
