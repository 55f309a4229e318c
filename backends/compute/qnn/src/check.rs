//! Which operations the device runs, and the reason where it does not.

use engine_core::DType;
use engine_core::operation::{
    Accumulation, Activation, Arithmetic, Ffn, Operation, OperationKind, OperationList, Place, Quantization,
    Selection, Slot, SlotId, SlotRole,
};

use crate::weights;

/// Tokens of the graphs that are built: a list with room for more runs in chunks of the largest, the last one padded.
const SHAPES: [u32; 3] = [1, 32, 128];

/// Tokens of the graph for lists of this capacity. One shape per list, so that a token's result cannot depend on how many
/// others come along.
pub(crate) fn shape(capacity: u32) -> u32 {
    SHAPES.into_iter().find(|shape| *shape >= capacity).unwrap_or(SHAPES[SHAPES.len() - 1])
}

/// How weights are held in graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// f16, and Q4_0 as it is where `four_bits` says that the system-on-chip has that.
    Exact {
        /// Whether 4-bit codes with a scale per 32 elements can be had.
        four_bits: bool,
    },
    /// 8 bits with a scale per row: asked for by name, since it is not the file's values.
    EightBits,
}

/// The largest tensor that the library takes.
const LARGEST: u64 = u32::MAX as u64;

struct Checker<'a> {
    list: &'a OperationList,
    operation: &'a Operation,
    form: Form,
}

/// `Err` with the reason why operation `index` is not run.
pub(crate) fn check(list: &OperationList, index: usize, form: Form) -> Result<(), String> {
    let operation = list.operations.get(index).ok_or_else(|| format!("the list has no operation {index}"))?;
    Checker { list, operation, form }.check()
}

impl Checker<'_> {
    fn slot(&self, id: SlotId) -> Result<&Slot, String> {
        self.list.slot(id).ok_or_else(|| format!("slot {} does not exist", id.0))
    }

    /// A device slot of f32 that fits a tensor in f16 with the graph's tokens.
    fn numbers(&self, id: SlotId) -> Result<&Slot, String> {
        let slot = self.slot(id)?;
        if slot.tensor.dtype != DType::F32 || slot.place != Place::Device {
            return Err(format!("`{}` is no F32 on the device", slot.name));
        }
        let rows = if slot.per_token { u64::from(shape(self.list.token_capacity)) } else { slot.tensor.rows };
        self.fits(&slot.name, rows, slot.tensor.columns)?;
        Ok(slot)
    }

    fn fits(&self, name: &str, rows: u64, columns: u64) -> Result<(), String> {
        let bytes = rows.saturating_mul(columns).saturating_mul(2);
        if bytes > LARGEST || rows == 0 || columns == 0 {
            return Err(format!(
                "`{name}` is {rows} x {columns}, {bytes} bytes in f16; a tensor of the library has 1 to {LARGEST}"
            ));
        }
        Ok(())
    }

    fn weight(&self, id: SlotId) -> Result<&Slot, String> {
        let slot = self.slot(id)?;
        let dtype = slot.tensor.dtype;
        if !weights::is_known(dtype) {
            return Err(format!(
                "`{}` is {dtype}; weights are F32, F16, BF16, Q8_0, Q4_0 or Q4_1 here",
                slot.name
            ));
        }
        self.fits(&slot.name, slot.tensor.rows, slot.tensor.columns)?;
        match (slot.role, self.form) {
            (SlotRole::Constant(_), _) => Ok(slot),
            (SlotRole::Input, Form::Exact { four_bits }) if dtype != DType::Q4_0 || !four_bits => Ok(slot),
            (SlotRole::Input, _) => Err(format!(
                "`{}` is {dtype} and bound at submit; such weights are compiled into graphs, so they must be constants",
                slot.name
            )),
            _ => Err(format!("`{}` is written by the list; weights are constants or inputs", slot.name)),
        }
    }

    fn check(&self) -> Result<(), String> {
        if matches!(self.operation.kind, OperationKind::Copy { .. }) {
            return Ok(());
        }
        let Arithmetic { input, hidden, accumulation } = self.operation.arithmetic;
        if input != Quantization::None || hidden != Quantization::None {
            return Err("activations are f16 here, never int8 blocks (ask for activations in f32)".into());
        }
        if !matches!(accumulation, Accumulation::F32 | Accumulation::F16) {
            return Err("an unknown type of sums".into());
        }
        match &self.operation.kind {
            OperationKind::Linear { input, weight, bias, output, accumulate: _ } => {
                self.numbers(*input)?;
                self.weight(*weight)?;
                self.numbers(*output)?;
                bias.map_or(Ok(()), |bias| self.numbers(bias).map(|_| ()))
            }
            OperationKind::Ffn(ffn) => self.ffn(ffn),
            other => Err(format!(
                "{} is not done by the qnn backend, which has projections and dense feed-forward layers",
                other.name()
            )),
        }
    }

    fn function(&self, function: Activation) -> Result<(), String> {
        match function {
            Activation::Identity
            | Activation::Relu
            | Activation::ReluSquared
            | Activation::Silu
            | Activation::GeluTanh
            | Activation::GeluErf => Ok(()),
            _ => Err("an unknown activation function".into()),
        }
    }

    fn ffn(&self, ffn: &Ffn) -> Result<(), String> {
        if ffn.selection != Selection::All {
            return Err(
                "a graph computes all neurons of its ranges: only a dense layer (selection `all`) runs here"
                    .into(),
            );
        }
        if ffn.gate_low.is_some() || ffn.up_low.is_some() {
            return Err("weights in planes (high and low halves of codes) have no graph here".into());
        }
        self.numbers(ffn.input)?;
        self.numbers(ffn.output)?;
        for id in [ffn.gate, Some(ffn.up), Some(ffn.down)].into_iter().flatten() {
            self.weight(id)?;
        }
        for id in [ffn.gate_bias, ffn.up_bias, ffn.hidden].into_iter().flatten() {
            self.numbers(id)?;
        }
        self.function(ffn.function)?;
        self.function(ffn.up_function)?;
        let neurons = self.slot(ffn.up)?.tensor.rows;
        self.fits("hidden activations", shape(self.list.token_capacity).into(), neurons)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine_core::TensorType;

    #[test]
    fn shapes_of_lists() {
        assert_eq!([1, 2, 32, 33, 128, 129, 4096].map(shape), [1, 32, 32, 128, 128, 128, 128]);
    }

    #[test]
    fn what_is_denied_has_a_reason() {
        let mut list = OperationList::new(2);
        let input = list.per_token("x", SlotRole::Input, DType::F32, 32).unwrap();
        let output = list.per_token("y", SlotRole::Output, DType::F32, 8).unwrap();
        let weight = list.fixed("w", SlotRole::Input, TensorType::matrix(DType::Q4_0, 8, 32).unwrap());
        let kind = OperationKind::Linear { input, weight, bias: None, output, accumulate: false };
        list.push("linear", kind, Arithmetic::F32);
        let ask = |list: &OperationList, four_bits| check(list, 0, Form::Exact { four_bits });
        assert_eq!(ask(&list, false), Ok(()));
        assert!(ask(&list, true).unwrap_err().contains("must be constants"));
        list.slots[2].tensor = TensorType::matrix(DType::MXFP4, 8, 32).unwrap();
        assert!(ask(&list, false).unwrap_err().contains("`w` is MXFP4"));
        list.slots[2].tensor = TensorType::matrix(DType::F16, 8, 32).unwrap();
        list.operations[0].arithmetic = Arithmetic::INT8;
        assert!(ask(&list, false).unwrap_err().contains("int8"));
        list.token_capacity = u32::MAX;
        list.operations[0].arithmetic = Arithmetic::F32;
        assert_eq!(ask(&list, false), Ok(()));
    }
}
