//! Lists of operations as they cross the boundary: flat descriptors.

use crate::{Accumulation, Bytes, DType, OperationCode, Place, Quantization, SlotRole};
use abi_stable::StableAbi;

/// One operand of a list: a matrix whose rows start `row_stride` bytes apart.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Slot {
    /// For messages.
    pub name: Bytes,
    /// Who provides the memory.
    pub role: SlotRole,
    /// Where it lies.
    pub place: Place,
    /// Element type.
    pub dtype: DType,
    /// 1 where row `t` belongs to token `t` (then `rows` is the list's token capacity), else 0.
    pub per_token: u32,
    /// Number of rows.
    pub rows: u64,
    /// Elements in a row.
    pub columns: u64,
    /// Bytes from the start of one row to the start of the next.
    pub row_stride: u64,
    /// Where a constant lies; zero for other roles.
    pub constant: BufferView,
    /// Zero.
    pub reserved: [u64; 4],
}

/// A place within a buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct BufferView {
    /// The buffer.
    pub buffer: u64,
    /// Byte offset of the slot's first row.
    pub offset: u64,
}

/// One operation. [`OperationCode`] says what slots and parameters mean.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Operation {
    /// Bytes of this struct.
    pub struct_size: u32,
    /// What is computed.
    pub code: OperationCode,
    /// For messages.
    pub label: Bytes,
    /// Quantisation of the input rows before they meet a weight.
    pub input: Quantization,
    /// Quantisation of an FFN's hidden activations before they meet `down`.
    pub hidden: Quantization,
    /// The type of sums.
    pub accumulation: Accumulation,
    /// Zero.
    pub reserved_flags: u32,
    /// Operands by index into the list's slots; `UINT32_MAX` where there is none.
    pub slots: [u32; 16],
    /// Whole-number parameters.
    pub u: [u64; 8],
    /// Other parameters.
    pub f: [f64; 12],
    /// Zero.
    pub reserved: [u64; 4],
}

/// Operations with their slots, in the order in which they take effect.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct OperationList {
    /// Bytes of this struct.
    pub struct_size: u32,
    /// The most tokens that one submission may carry.
    pub token_capacity: u32,
    /// The operands.
    pub slots: *const Slot,
    /// Number of slots.
    pub slots_len: usize,
    /// The operations.
    pub operations: *const Operation,
    /// Number of operations.
    pub operations_len: usize,
    /// Zero.
    pub reserved: [u64; 4],
}
