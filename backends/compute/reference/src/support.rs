//! What the oracle can run: everything that this version of `engine_core` describes.

use crate::operations::functions;
use crate::{dequantise, quantise};
use engine_core::backend::Support;
use engine_core::operation::{
    Accumulation, Arithmetic, Gating, NormKind, OperationKind, OperationList, RopeScaling, RopeStyle,
    Selection,
};
use engine_core::{DType, Error, Result};

/// The answer for operation `index` of a list.
pub(crate) fn supports(list: &OperationList, index: usize) -> Support {
    match check(list, index) {
        Ok(()) => Support::Yes,
        Err(error) => Support::no(error.detail()),
    }
}

/// Fails for an operation that cannot be run, saying why.
pub(crate) fn check(list: &OperationList, index: usize) -> Result<()> {
    let Some(operation) = list.operations.get(index) else {
        return Err(Error::invalid(format!("the list has no operation {index}")));
    };
    let at = |what: String| Err(Error::unsupported(format!("{}: {what}", operation.label)));
    let Arithmetic { input, hidden, accumulation } = operation.arithmetic;
    if !quantise::is_known(input) || !quantise::is_known(hidden) {
        return at(format!("activation quantisation {input:?} or {hidden:?}"));
    }
    if !matches!(accumulation, Accumulation::F32 | Accumulation::F16) {
        return at(format!("accumulation {accumulation:?}"));
    }
    if !is_known_kind(&operation.kind) {
        return at(format!("operation {} or a parameter of it: {:?}", operation.kind.name(), operation.kind));
    }
    // Copies move bytes, ids and masks are integers: everything else is read as a row of weights.
    for operand in operation.kind.operands() {
        let Some(slot) = list.slot(operand.slot) else {
            return Err(Error::invalid(format!(
                "{}: slot {} does not exist",
                operation.label, operand.slot.0
            )));
        };
        let dtype = slot.tensor.dtype;
        let moved = matches!(operation.kind, OperationKind::Copy { .. });
        if !moved && !dequantise::is_known(dtype) && !matches!(dtype, DType::I32 | DType::U8 | DType::I8) {
            return at(format!("{} `{}` of type {dtype}", operand.field, slot.name));
        }
    }
    Ok(())
}

/// Whether kind and parameters are ones that the loops have a branch for.
fn is_known_kind(kind: &OperationKind) -> bool {
    match kind {
        OperationKind::Copy { .. }
        | OperationKind::Embed { .. }
        | OperationKind::Linear { .. }
        | OperationKind::KvAppend { .. }
        | OperationKind::Attention { .. }
        | OperationKind::Predict { .. }
        | OperationKind::Add { .. }
        | OperationKind::Multiply { .. }
        | OperationKind::KvExport { .. }
        | OperationKind::KvImport { .. } => true,
        OperationKind::Norm { norm, .. } => matches!(norm, NormKind::Rms | NormKind::Layer),
        OperationKind::Rope(rope) => {
            matches!(rope.style, RopeStyle::Interleaved | RopeStyle::Halves)
                && matches!(
                    rope.scaling,
                    RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Yarn { .. }
                )
        }
        OperationKind::Ffn(ffn) => {
            functions::is_known(ffn.function)
                && functions::is_known(ffn.up_function)
                && matches!(
                    ffn.selection,
                    Selection::All
                        | Selection::Mask(_)
                        | Selection::GateFirst
                        | Selection::Threshold(_)
                        | Selection::Bitplane(_)
                )
        }
        OperationKind::Route { gating, .. } => matches!(gating, Gating::Softmax | Gating::Sigmoid),
        OperationKind::Experts(op) => {
            functions::is_known(op.function)
                && functions::is_known(op.up_function)
                && matches!(op.selection, Selection::All | Selection::GateFirst | Selection::Threshold(_))
        }
        OperationKind::Activate { function, .. } => functions::is_known(*function),
        _ => false,
    }
}
