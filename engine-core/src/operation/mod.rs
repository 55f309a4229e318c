//! Operation descriptors: what a backend is asked to compute, with shapes, dtypes and arithmetic stated.
//!
//! A list of operations names its operands by *slots*. Fixed when a list is prepared: operations, dtypes, shapes, the
//! token capacity and the constants. Bound when it is submitted: buffers, the number of tokens, sequence positions and
//! active cluster ranges. The rules that a list must obey are checked by [`OperationList::validate`] on both sides of
//! the plug-in boundary, so a backend sees only lists that satisfy them.
//!
//! # Arithmetic
//! Every operation reads and writes f32 unless a slot's dtype says otherwise. Sums over a row run in a fixed order of
//! the backend's choosing that depends on nothing but the row's length: not on threads, not on the number of tokens,
//! not on other rows, not on what else is active. See [`Arithmetic`] for what the descriptor itself fixes.
//!
//! # Values that are not finite
//! An output element that depends on a NaN or an infinity through the operation's formula may be any value that is not
//! finite, and must be one where the f64 oracle's is NaN; elements that do not depend on it are unaffected. A neuron
//! that is not selected is not an operand: its rows of gate and up, and of a down stored by neuron, may hold anything
//! and are never read; a down stored by output may be read there, and what it holds changes no result.
//!
//! A device of class [`F16`](crate::backend::ToleranceClass::F16) may take a value on the way for infinite that leaves f16's
//! range. What depends on such a value is then not finite either, or right: never another number.

mod bindings;
mod describe;
mod kinds;
mod validate;

pub use describe::{Access, Operand};
pub use kinds::{
    Activation, Bitplane, DownLayout, Experts, Ffn, Gating, NormKind, OperationKind, Rope, RopeScaling,
    RopeStyle, Selection,
};

use crate::backend::BufferView;
use crate::{Result, TensorType};

/// The index of a slot within its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// What a slot holds and who provides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlotRole {
    /// Weights: bound when the list is prepared, unchanged for as long as the executable lives. `supports` must not
    /// look at the view (the buffer may not exist yet). `prepare` may read and convert the bytes, so they are complete
    /// by then: the host has waited for whatever wrote them.
    Constant(BufferView),
    /// Bound at submit, read only. Weights that are streamed in are inputs, too.
    Input,
    /// Bound at submit, written.
    Output,
    /// Bound at submit, read and written: a KV cache, or a value that is accumulated into.
    State,
    /// Memory that the executable provides itself; its content does not outlive the submission.
    Scratch,
}

/// Where a slot's memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// In a buffer of the backend.
    Device,
    /// In host memory, bound as a [`crate::HostSpan`]; only [`OperationKind::Copy`] may name such a slot.
    Host,
}

/// One operand of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// For messages and for the divergence finder, such as `blk.3.ffn_gate.weight`.
    pub name: String,
    /// Who provides it.
    pub role: SlotRole,
    /// Where it lies.
    pub place: Place,
    /// Its type. Where `per_token` is set, `rows` is the list's token capacity.
    pub tensor: TensorType,
    /// Whether row `t` belongs to token `t`: then only the first `tokens` rows are read or written.
    pub per_token: bool,
}

/// How an operand is quantised before it is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Quantization {
    /// As it is.
    None,
    /// Blocks of 32 consecutive elements of a row: with `amax` the largest absolute value, `scale = amax / 127` and
    /// `code = round_ties_even(x * (127 / amax))`, all in f32; `amax = 0` gives zero scale and codes; a block that
    /// holds a value that is not finite has scale NaN; where `127 / amax` overflows, codes saturate at +-127 and zero stays
    /// zero. The last block of a row may be shorter. A product with a
    /// quantised weight block is `scale_w * scale_x * sum(code_w * code_x)` with an exact integer sum.
    Int8Blocks,
}

/// The type that sums are kept in. Whether factors are rounded before they are multiplied is the device's class, not the
/// operation's: an NPU that multiplies f16 and adds in f32 runs lists that state f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Accumulation {
    /// f32 (or better).
    F32,
    /// f16 products and sums: what an NPU offers.
    F16,
}

/// The arithmetic that an operation states, and that the f64 oracle repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Arithmetic {
    /// Quantisation of the input rows before they meet a weight.
    pub input: Quantization,
    /// Quantisation of an FFN's hidden activations before they meet `down`, and of a predictor's before they meet `fc2`.
    pub hidden: Quantization,
    /// The type of sums.
    pub accumulation: Accumulation,
}

impl Arithmetic {
    /// f32 activations, f32 sums.
    pub const F32: Arithmetic =
        Arithmetic { input: Quantization::None, hidden: Quantization::None, accumulation: Accumulation::F32 };
    /// int8 activations in blocks of 32, f32 sums over blocks.
    pub const INT8: Arithmetic = Arithmetic {
        input: Quantization::Int8Blocks,
        hidden: Quantization::Int8Blocks,
        accumulation: Accumulation::F32,
    };
}

/// One operation of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// For messages, such as `blk.3.ffn`.
    pub label: String,
    /// What is computed, on which slots.
    pub kind: OperationKind,
    /// How.
    pub arithmetic: Arithmetic,
}

/// Operations with their slots, in the order in which they take effect.
///
/// An operation reads what the operations before it wrote; a backend may overlap what does not depend on each other.
#[derive(Clone, Debug, PartialEq)]
pub struct OperationList {
    /// The most tokens that one submission may carry; a backend with static shapes pads to it.
    pub token_capacity: u32,
    /// The operands.
    pub slots: Vec<Slot>,
    /// The operations.
    pub operations: Vec<Operation>,
}

impl OperationList {
    /// An empty list.
    pub fn new(token_capacity: u32) -> OperationList {
        OperationList { token_capacity, slots: Vec::new(), operations: Vec::new() }
    }

    /// Adds a slot.
    pub fn add_slot(&mut self, slot: Slot) -> SlotId {
        self.slots.push(slot);
        SlotId((self.slots.len() - 1) as u32)
    }

    /// Adds a device slot that holds the same value for all tokens.
    pub fn fixed(&mut self, name: impl Into<String>, role: SlotRole, tensor: TensorType) -> SlotId {
        self.add_slot(Slot { name: name.into(), role, place: Place::Device, tensor, per_token: false })
    }

    /// Adds a device slot with a row of `columns` elements per token.
    ///
    /// # Errors
    /// Where a row of `columns` elements of this dtype cannot exist.
    pub fn per_token(
        &mut self,
        name: impl Into<String>,
        role: SlotRole,
        dtype: crate::DType,
        columns: u64,
    ) -> Result<SlotId> {
        let tensor = TensorType::matrix(dtype, self.token_capacity.into(), columns)?;
        Ok(self.add_slot(Slot { name: name.into(), role, place: Place::Device, tensor, per_token: true }))
    }

    /// Adds an operation.
    pub fn push(&mut self, label: impl Into<String>, kind: OperationKind, arithmetic: Arithmetic) {
        self.operations.push(Operation { label: label.into(), kind, arithmetic });
    }

    /// The slot with this id, if the list has it.
    pub fn slot(&self, id: SlotId) -> Option<&Slot> {
        self.slots.get(id.0 as usize)
    }

    /// A list with just operation `index` and the slots it names (renumbered, scratch become inputs and outputs):
    /// what the divergence finder and per-operation support questions work on. `None` for an index out of range.
    pub fn single(&self, index: usize) -> Option<OperationList> {
        describe::single(self, index)
    }
}
