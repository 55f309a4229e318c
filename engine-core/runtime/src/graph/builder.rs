//! Builds one list: slots by name, weights as constants, embedding and head.

use super::{Graph, GraphOptions, Places, refused, residual_stride};
use crate::{Activations, Result};
use engine_core::operation::{
    Accumulation, Arithmetic, NormKind, OperationKind, OperationList, Place, Quantization, Slot, SlotId,
    SlotRole,
};
use engine_core::{ClusterRange, DType, TensorType};
use formats::TensorInfo;
use std::collections::HashMap;

pub(super) struct Builder<'a> {
    pub(super) options: GraphOptions<'a>,
    places: &'a Places,
    pub(super) list: OperationList,
    weights: Vec<TensorInfo>,
    /// By tensor name, and by scratch name and width: layers share what does not outlive them.
    constants: HashMap<String, SlotId>,
    scratch: HashMap<(&'static str, u64), SlotId>,
    pub(super) caches: Vec<SlotId>,
    pub(super) active: Vec<(usize, SlotId)>,
    pub(super) ranges: Vec<(u32, Vec<ClusterRange>)>,
    /// Whether many tokens are expected: then exact skipping gives way to whole tiles.
    pub(super) many_tokens: bool,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        options: GraphOptions<'a>,
        places: &'a Places,
        capacity: u32,
        many_tokens: bool,
    ) -> Self {
        Builder {
            options,
            places,
            list: OperationList::new(capacity),
            weights: Vec::new(),
            constants: HashMap::new(),
            scratch: HashMap::new(),
            caches: Vec::new(),
            active: Vec::new(),
            ranges: Vec::new(),
            many_tokens,
        }
    }

    pub(super) fn finish(self, set: impl FnOnce(&mut Graph)) -> Result<Graph> {
        self.list.validate().map_err(refused(self.options.model))?;
        let mut graph = Graph {
            list: self.list,
            weights: self.weights,
            ids: None,
            residual: None,
            logits: None,
            caches: self.caches,
            active: self.active,
            ranges: self.ranges,
        };
        set(&mut graph);
        Ok(graph)
    }

    /// The constant slot of a matrix, a row per output.
    pub(super) fn weight(&mut self, tensor: &TensorInfo) -> Result<SlotId> {
        self.constant(tensor, tensor.rows(), tensor.row_elements())
    }

    /// The constant slot of a vector.
    pub(super) fn vector(&mut self, tensor: &TensorInfo) -> Result<SlotId> {
        self.constant(tensor, 1, tensor.elements())
    }

    fn constant(&mut self, tensor: &TensorInfo, rows: u64, columns: u64) -> Result<SlotId> {
        if let Some(&slot) = self.constants.get(&tensor.name) {
            return Ok(slot);
        }
        let shape = TensorType::matrix(tensor.dtype, rows, columns).map_err(refused(self.options.model))?;
        let role = SlotRole::Constant(self.places.of(tensor));
        let slot = self.list.fixed(&tensor.name, role, shape);
        self.constants.insert(tensor.name.clone(), slot);
        self.weights.push(tensor.clone());
        Ok(slot)
    }

    /// Scratch with a row of f32 per token, the same slot for the same name and width.
    pub(super) fn scratch(&mut self, name: &'static str, columns: u64) -> Result<SlotId> {
        self.scratch_of(name, DType::F32, columns)
    }

    pub(super) fn scratch_of(&mut self, name: &'static str, dtype: DType, columns: u64) -> Result<SlotId> {
        if let Some(&slot) = self.scratch.get(&(name, columns)) {
            return Ok(slot);
        }
        let slot = self
            .list
            .per_token(name, SlotRole::Scratch, dtype, columns)
            .map_err(refused(self.options.model))?;
        self.scratch.insert((name, columns), slot);
        Ok(slot)
    }

    /// The residual in a buffer that is bound at submit.
    pub(super) fn residual(&mut self) -> Result<SlotId> {
        let model = self.options.model;
        let columns = model.n_embd as u64;
        let stride = residual_stride(model, self.options.row_alignment);
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
        self.list.push(label, kind, Arithmetic::F32);
    }

    /// Quantisation of activations that meet these weights.
    pub(super) fn activations(&self, weights: &[&TensorInfo]) -> Quantization {
        let quantised = weights.iter().all(|tensor| tensor.dtype.is_quantised());
        match self.options.activations {
            Activations::Int8 if quantised => Quantization::Int8Blocks,
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
        let weight = self.weight(&linear.weight)?;
        let bias = linear.bias.as_ref().map(|bias| self.vector(bias)).transpose()?;
        let arithmetic = Arithmetic {
            input: self.activations(&[&linear.weight]),
            hidden: Quantization::None,
            accumulation: Accumulation::F32,
        };
        self.list.push(label, OperationKind::Linear { input, weight, bias, output, accumulate }, arithmetic);
        Ok(())
    }

    /// `output = rms_norm(input) * weight`.
    pub(super) fn norm(
        &mut self,
        label: String,
        weight: &TensorInfo,
        (input, output): (SlotId, SlotId),
    ) -> Result<()> {
        let weight = self.vector(weight)?;
        let epsilon = self.options.model.rms_epsilon;
        let kind = OperationKind::Norm { norm: NormKind::Rms, epsilon, input, weight, bias: None, output };
        self.push(label, kind);
        Ok(())
    }

    /// Ids from the host, and their rows of the embedding; returns the host's slot.
    pub(super) fn embed(&mut self, output: SlotId) -> Result<SlotId> {
        let from = self.host("ids", SlotRole::Input, DType::I32, 1)?;
        let ids = self.scratch_of("ids on the device", DType::I32, 1)?;
        self.push("ids", OperationKind::Copy { from, to: ids });
        let table = self.weight(&self.options.model.token_embd)?;
        self.push("token_embd", OperationKind::Embed { ids, table, output, scale: 1.0 });
        Ok(from)
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
        self.norm("output_norm".into(), &model.output_norm, (residual, normed))?;
        let logits = self.scratch("logits on the device", model.vocab_size as u64)?;
        let weight = self.weight(model.head())?;
        let arithmetic = Arithmetic {
            input: self.activations(&[model.head()]),
            hidden: Quantization::None,
            accumulation: Accumulation::F32,
        };
        let kind =
            OperationKind::Linear { input: normed, weight, bias: None, output: logits, accumulate: false };
        self.list.push("output", kind, arithmetic);
        let to = self.host("logits", SlotRole::Output, DType::F32, model.vocab_size as u64)?;
        self.push("logits", OperationKind::Copy { from: logits, to });
        Ok(to)
    }

    /// Counts of one layer, given to the host.
    pub(super) fn count_to_host(&mut self, layer: usize, count: SlotId) -> Result<()> {
        let to = self.host(&format!("blk.{layer}.active"), SlotRole::Output, DType::I32, 1)?;
        self.push(format!("blk.{layer}.active"), OperationKind::Copy { from: count, to });
        self.active.push((layer, to));
        Ok(())
    }
}
