//! Lists of operations.

use super::codes::{
    accumulation, accumulation_code, dtype, place, place_code, quantization, quantization_code,
};
use super::flatten::{Flat, flatten};
use super::raw::{check_size, flag, one, slice, unused};
use super::text::{bytes_of, text_from_abi};
use super::unflatten::unflatten;
use crate::{BufferView, Operation, OperationList, Slot, SlotRole};
use engine_core::backend::{self, BufferId};
use engine_core::operation::{self, Arithmetic};
use engine_core::{Error, Result, TensorType};
use std::marker::PhantomData;

/// A list as the boundary has it, borrowing names and labels of engine-core's.
pub struct ListDescriptor<'a> {
    token_capacity: u32,
    slots: Vec<Slot>,
    operations: Vec<Operation>,
    list: PhantomData<&'a operation::OperationList>,
}

impl<'a> ListDescriptor<'a> {
    /// Describes `list`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for what has no code in this version of the interface.
    pub fn new(list: &'a operation::OperationList) -> Result<ListDescriptor<'a>> {
        Ok(ListDescriptor {
            token_capacity: list.token_capacity,
            slots: list.slots.iter().map(slot_to_abi).collect::<Result<_>>()?,
            operations: list.operations.iter().map(operation_to_abi).collect::<Result<_>>()?,
            list: PhantomData,
        })
    }

    /// The struct to pass; it borrows from this value.
    pub fn as_abi(&self) -> OperationList {
        OperationList {
            struct_size: size_of::<OperationList>() as u32,
            token_capacity: self.token_capacity,
            slots: self.slots.as_ptr(),
            slots_len: self.slots.len(),
            operations: self.operations.as_ptr(),
            operations_len: self.operations.len(),
            reserved: [0; 4],
        }
    }
}

fn slot_to_abi(slot: &operation::Slot) -> Result<Slot> {
    let nothing = BufferView { buffer: 0, offset: 0 };
    let (role, constant) = match slot.role {
        operation::SlotRole::Constant(view) => {
            (SlotRole::CONSTANT, BufferView { buffer: view.buffer.0, offset: view.offset })
        }
        operation::SlotRole::Input => (SlotRole::INPUT, nothing),
        operation::SlotRole::Output => (SlotRole::OUTPUT, nothing),
        operation::SlotRole::State => (SlotRole::STATE, nothing),
        operation::SlotRole::Scratch => (SlotRole::SCRATCH, nothing),
        other => {
            return Err(Error::unsupported(format!(
                "slot role {other:?} has no code in this version of the interface"
            )));
        }
    };
    Ok(Slot {
        name: bytes_of(slot.name.as_bytes()),
        role,
        place: place_code(slot.place)?,
        dtype: crate::DType(slot.tensor.dtype.code()),
        per_token: slot.per_token.into(),
        rows: slot.tensor.rows,
        columns: slot.tensor.columns,
        row_stride: slot.tensor.row_stride,
        constant,
        reserved: [0; 4],
    })
}

fn operation_to_abi(operation: &operation::Operation) -> Result<Operation> {
    let Flat { code, slots, u, f } = flatten(&operation.kind)?;
    Ok(Operation {
        struct_size: size_of::<Operation>() as u32,
        code,
        label: bytes_of(operation.label.as_bytes()),
        input: quantization_code(operation.arithmetic.input)?,
        hidden: quantization_code(operation.arithmetic.hidden)?,
        accumulation: accumulation_code(operation.arithmetic.accumulation)?,
        reserved_flags: 0,
        slots,
        u,
        f,
        reserved: [0; 4],
    })
}

/// The list that a descriptor describes. Its rules ([`operation::OperationList::validate`]) are still to be checked.
///
/// # Errors
/// [`Error::InvalidArgument`] for pointers, sizes and text that are wrong; [`Error::Unsupported`] for codes and
/// parameters that are not known.
///
/// # Safety
/// Every pointer in the descriptor that is not null leads to as many values as its length says, unchanged during the
/// call.
pub unsafe fn list_from_abi(list: *const OperationList) -> Result<operation::OperationList> {
    // SAFETY: the caller's promise.
    let list = unsafe { one(list, "operation list") }?;
    check_size::<OperationList>(list.struct_size, "operation list")?;
    unused(&list.reserved, "operation list")?;
    // SAFETY: the caller's promise.
    let slots = unsafe { slice(list.slots, list.slots_len, "slots") }?;
    // SAFETY: the caller's promise.
    let operations = unsafe { slice(list.operations, list.operations_len, "operations") }?;
    Ok(operation::OperationList {
        token_capacity: list.token_capacity,
        // SAFETY: the caller's promise.
        slots: slots.iter().map(|slot| unsafe { slot_from_abi(slot) }).collect::<Result<_>>()?,
        // SAFETY: the caller's promise.
        operations: operations.iter().map(|op| unsafe { operation_from_abi(op) }).collect::<Result<_>>()?,
    })
}

unsafe fn slot_from_abi(slot: &Slot) -> Result<operation::Slot> {
    // SAFETY: the caller's promise.
    let name = unsafe { text_from_abi(slot.name, "slot name") }?.to_owned();
    let role = match slot.role {
        SlotRole::CONSTANT => operation::SlotRole::Constant(backend::BufferView {
            buffer: BufferId(slot.constant.buffer),
            offset: slot.constant.offset,
        }),
        SlotRole::INPUT => operation::SlotRole::Input,
        SlotRole::OUTPUT => operation::SlotRole::Output,
        SlotRole::STATE => operation::SlotRole::State,
        SlotRole::SCRATCH => operation::SlotRole::Scratch,
        SlotRole(other) => {
            return Err(Error::unsupported(format!(
                "slot `{name}`: role code {other} is not known to this version of the interface"
            )));
        }
    };
    if slot.reserved != [0; 4] {
        return Err(Error::unsupported(format!(
            "slot `{name}` has properties that this version of the interface does not know"
        )));
    }
    let tensor = TensorType {
        dtype: dtype(slot.dtype)?,
        rows: slot.rows,
        columns: slot.columns,
        row_stride: slot.row_stride,
    };
    Ok(operation::Slot {
        role,
        place: place(slot.place)?,
        tensor,
        per_token: flag(slot.per_token.into(), "per_token")?,
        name,
    })
}

unsafe fn operation_from_abi(operation: &Operation) -> Result<operation::Operation> {
    check_size::<Operation>(operation.struct_size, "operation")?;
    Ok(operation::Operation {
        // SAFETY: the caller's promise.
        label: unsafe { text_from_abi(operation.label, "operation label") }?.to_owned(),
        kind: unflatten(operation)?,
        arithmetic: Arithmetic {
            input: quantization(operation.input)?,
            hidden: quantization(operation.hidden)?,
            accumulation: accumulation(operation.accumulation)?,
        },
    })
}
