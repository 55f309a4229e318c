//! Which operations the shaders can do, decided by types and shapes alone; the rest is denied with a reason.

use engine_core::operation::{
    Accumulation, Activation, Arithmetic, DownLayout, Experts, Ffn, Gating, NormKind, Operation,
    OperationKind, OperationList, Quantization, RopeScaling, RopeStyle, Selection, Slot, SlotId, SlotRole,
};
use engine_core::{DType, TensorType};

use crate::kernels::{
    CHUNK, DOWN_TILE, LONGEST_HEAD, MOST_EXPERTS, PRODUCT_ROWS, WEIGHT_TYPES, format_name, function_code,
};

/// What the device allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes of a buffer that a shader may see at once.
    pub(crate) max_range: u64,
    /// Alignment of what it sees.
    pub(crate) offset_alignment: u64,
    /// Workgroups in one dimension of a dispatch.
    pub(crate) max_groups: u64,
}

impl Limits {
    /// Bytes that an operand may have: it may begin behind an aligned place.
    pub(crate) fn window(&self) -> u64 {
        (self.max_range - self.max_range.min(self.offset_alignment)) & !3
    }
}

/// Memory that an operation needs beside its operands, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Quantised input rows.
    pub(crate) input: u64,
    /// Hidden activations.
    pub(crate) hidden: u64,
    /// Scores of a predictor, or partial sums.
    pub(crate) sums: u64,
    /// Outputs of the experts of each token.
    pub(crate) outputs: u64,
}

impl Needs {
    pub(crate) fn most(self, other: Needs) -> Needs {
        Needs {
            input: self.input.max(other.input),
            hidden: self.hidden.max(other.hidden),
            sums: self.sums.max(other.sums),
            outputs: self.outputs.max(other.outputs),
        }
    }
}

/// Tokens whose partial sums are kept at once, and the bytes of one token's.
pub(crate) fn partials(neurons: u64, width: u64, tokens: u64, limits: Limits) -> (u64, u64) {
    let bytes = neurons.div_ceil(CHUNK).saturating_mul(width).saturating_mul(4);
    let fit = limits.window().min(64 << 20) / bytes.max(1);
    let whole = fit - fit % DOWN_TILE;
    (if whole == 0 { 1 } else { whole }.min(tokens), bytes)
}

/// Checks one operation; answers what it needs.
pub(crate) fn check(list: &OperationList, index: usize, limits: Limits) -> Result<Needs, String> {
    let operation = list.operations.get(index).ok_or_else(|| format!("the list has no operation {index}"))?;
    Checker { list, operation, limits }.check()
}

struct Checker<'a> {
    list: &'a OperationList,
    operation: &'a Operation,
    limits: Limits,
}

impl Checker<'_> {
    fn slot(&self, id: SlotId) -> Result<&Slot, String> {
        self.list.slot(id).ok_or_else(|| format!("slot {} does not exist", id.0))
    }

    fn tensor(&self, id: SlotId) -> Result<TensorType, String> {
        Ok(self.slot(id)?.tensor)
    }

    /// An operand that a shader sees whole, with rows at multiples of `unit`.
    fn whole(&self, id: SlotId, unit: u64) -> Result<TensorType, String> {
        let slot = self.slot(id)?;
        let t = slot.tensor;
        if !t.row_stride.is_multiple_of(unit) && t.rows > 1 {
            return Err(format!(
                "`{}`: a row stride of {} bytes is no multiple of {unit}",
                slot.name, t.row_stride
            ));
        }
        if t.bytes() > self.limits.window() {
            return Err(format!(
                "`{}` has {} bytes; a shader of this device sees at most {} (fewer tokens at once need less)",
                slot.name,
                t.bytes(),
                self.limits.window()
            ));
        }
        Ok(t)
    }

    fn words(&self, id: SlotId) -> Result<TensorType, String> {
        self.whole(id, 4)
    }

    fn optional(&self, id: Option<SlotId>) -> Result<(), String> {
        id.map_or(Ok(()), |id| self.words(id).map(|_| ()))
    }

    /// Weights of a product, which are seen in parts of whole workgroups.
    fn weight(&self, id: SlotId) -> Result<TensorType, String> {
        self.weight_of(id, PRODUCT_ROWS)
    }

    /// Weights that are seen in parts of a multiple of `rows`.
    fn weight_of(&self, id: SlotId, rows: u64) -> Result<TensorType, String> {
        let slot = self.slot(id)?;
        let t = slot.tensor;
        if format_name(t.dtype).is_none() {
            let known = WEIGHT_TYPES.map(DType::name).join(", ");
            return Err(format!("`{}` is {}; there are shaders for {known}", slot.name, t.dtype));
        }
        let unit = if t.dtype == DType::F32 { 4 } else { 2 };
        if !t.row_stride.is_multiple_of(unit) && t.rows > 1 {
            return Err(format!(
                "`{}`: a row stride of {} bytes is no multiple of {unit}",
                slot.name, t.row_stride
            ));
        }
        if t.row_stride.saturating_mul(rows.min(t.rows)) > self.limits.window() {
            return Err(format!(
                "`{}`: rows {} bytes apart are too far for this device",
                slot.name, t.row_stride
            ));
        }
        Ok(t)
    }

    fn temporary(&self, what: &str, columns: u64) -> Result<u64, String> {
        let bytes = columns.saturating_mul(4).saturating_mul(self.list.token_capacity.into());
        if bytes > self.limits.window() {
            return Err(format!(
                "{what} of {} tokens take {bytes} bytes; a shader of this device sees at most {} (fewer tokens at once \
                 need less)",
                self.list.token_capacity,
                self.limits.window()
            ));
        }
        Ok(bytes)
    }

    fn function(&self, function: Activation) -> Result<(), String> {
        function_code(function).map(|_| ()).ok_or_else(|| format!("no shader for {}", function.name()))
    }

    fn quantises(&self, quantization: Quantization) -> Result<bool, String> {
        match quantization {
            Quantization::None => Ok(false),
            Quantization::Int8Blocks => Ok(true),
            other => Err(format!("an unknown quantisation of activations, {other:?}")),
        }
    }

    fn input(&self, columns: u64) -> Result<u64, String> {
        if self.quantises(self.operation.arithmetic.input)? {
            self.temporary("quantised rows", columns)
        } else {
            Ok(0)
        }
    }

    fn cache(&self, cache: SlotId, columns: u64) -> Result<(), String> {
        let slot = self.slot(cache)?;
        if !columns.is_multiple_of(2) {
            return Err(format!(
                "`{}`: {columns} elements of keys per position are an odd number",
                slot.name
            ));
        }
        if slot.tensor.bytes() / 2 > self.limits.window() {
            return Err(format!(
                "`{}`: the keys of {} positions take {} bytes; a shader of this device sees at most {} (a smaller context \
                 needs less)",
                slot.name,
                slot.tensor.rows,
                slot.tensor.bytes() / 2,
                self.limits.window()
            ));
        }
        Ok(())
    }

    fn check(&self) -> Result<Needs, String> {
        let Arithmetic { input: _, hidden, accumulation } = self.operation.arithmetic;
        if accumulation != Accumulation::F32 {
            return Err("the shaders sum in f32 only".into());
        }
        if u64::from(self.list.token_capacity) > self.limits.max_groups {
            return Err(format!("more than {} tokens at once", self.limits.max_groups));
        }
        let mut needs = Needs::default();
        match &self.operation.kind {
            OperationKind::Copy { .. } => {}
            OperationKind::Embed { ids, table, output, scale: _ } => {
                self.words(*ids)?;
                self.weight_of(*table, 1)?;
                self.words(*output)?;
            }
            OperationKind::Norm { norm, epsilon: _, input, weight, bias, output } => {
                if !matches!(norm, NormKind::Rms | NormKind::Layer) {
                    return Err("an unknown kind of normalisation".into());
                }
                let columns = self.words(*input)?.columns;
                let group = self.words(*weight)?.columns;
                if columns / group.max(1) > self.limits.max_groups {
                    return Err(format!("more than {} groups in a row", self.limits.max_groups));
                }
                self.optional(*bias)?;
                self.words(*output)?;
            }
            OperationKind::Linear { input, weight, bias, output, accumulate: _ } => {
                needs.input = self.input(self.words(*input)?.columns)?;
                self.weight(*weight)?;
                self.optional(*bias)?;
                self.words(*output)?;
            }
            OperationKind::Rope(rope) => {
                self.words(rope.input)?;
                self.words(rope.output)?;
                if !matches!(rope.style, RopeStyle::Interleaved | RopeStyle::Halves) {
                    return Err("an unknown rope style".into());
                }
                if !matches!(
                    rope.scaling,
                    RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Yarn { .. }
                ) {
                    return Err("an unknown rope scaling".into());
                }
                if let Some(factors) = rope.factors {
                    let slot = self.slot(factors)?;
                    if !matches!(slot.role, SlotRole::Constant(_)) {
                        return Err(format!("`{}`: factors of rope must be a constant", slot.name));
                    }
                }
            }
            OperationKind::KvAppend { key, value, cache, kv_heads, head_dim } => {
                self.words(*key)?;
                self.words(*value)?;
                self.cache(*cache, u64::from(*kv_heads) * u64::from(*head_dim))?;
            }
            OperationKind::Attention { query, cache, output, heads, kv_heads, head_dim, .. } => {
                self.words(*query)?;
                self.words(*output)?;
                self.cache(*cache, u64::from(*kv_heads) * u64::from(*head_dim))?;
                if *head_dim > LONGEST_HEAD {
                    return Err(format!(
                        "heads of {head_dim} elements; the shader has room for {LONGEST_HEAD}"
                    ));
                }
                if u64::from(*heads) > self.limits.max_groups {
                    return Err(format!("more than {} heads", self.limits.max_groups));
                }
            }
            OperationKind::KvExport { cache, key: _, value: _, kv_heads, head_dim }
            | OperationKind::KvImport { key: _, value: _, cache, kv_heads, head_dim } => {
                self.cache(*cache, u64::from(*kv_heads) * u64::from(*head_dim))?;
            }
            OperationKind::Ffn(ffn) => needs = self.ffn(ffn, hidden)?,
            OperationKind::Predict { input, fc1, fc2, mask, threshold: _ } => {
                needs.input = self.input(self.words(*input)?.columns)?;
                let rank = self.weight(*fc1)?.rows;
                let neurons = self.weight(*fc2)?.rows;
                self.quantises(hidden)?;
                self.whole(*mask, 1)?;
                needs.hidden = self.temporary("a predictor's activations", rank)?;
                needs.sums = self.temporary("a predictor's scores", neurons)?;
            }
            OperationKind::Activate { function, input, output } => {
                self.function(*function)?;
                self.words(*input)?;
                self.words(*output)?;
            }
            OperationKind::Add { left, right, output } | OperationKind::Multiply { left, right, output } => {
                for id in [left, right, output] {
                    self.words(*id)?;
                }
            }
            OperationKind::Route { scores, chosen, weights, gating, normalise: _, scale: _ } => {
                let experts = self.words(*scores)?.columns;
                self.words(*chosen)?;
                self.words(*weights)?;
                if experts > MOST_EXPERTS {
                    return Err(format!("{experts} experts; the shader has room for {MOST_EXPERTS}"));
                }
                if !matches!(gating, Gating::Softmax | Gating::Sigmoid) {
                    return Err("an unknown gating".into());
                }
            }
            OperationKind::Experts(experts) => needs = self.experts(experts, hidden)?,
            other => return Err(format!("the vulkan backend has no shader for {}", other.name())),
        }
        Ok(needs)
    }

    fn ffn(&self, ffn: &Ffn, hidden: Quantization) -> Result<Needs, String> {
        if ffn.gate_low.is_some() || ffn.up_low.is_some() {
            return Err("there are no shaders for weights in planes (high and low halves of codes)".into());
        }
        let width = self.words(ffn.input)?.columns;
        self.words(ffn.output)?;
        for weight in [ffn.gate, Some(ffn.up)].into_iter().flatten() {
            self.weight(weight)?;
        }
        match ffn.down_layout {
            DownLayout::OutputRows => self.weight(ffn.down)?,
            DownLayout::NeuronRows => self.weight_of(ffn.down, CHUNK)?,
        };
        for id in [ffn.gate_bias, ffn.up_bias, ffn.hidden, ffn.active_count] {
            self.optional(id)?;
        }
        self.function(ffn.function)?;
        self.function(ffn.up_function)?;
        self.quantises(hidden)?;
        if ffn.gate_low.is_some() || ffn.up_low.is_some() {
            return Err("weights in planes have no shader here".into());
        }
        match ffn.selection {
            Selection::All | Selection::GateFirst | Selection::Threshold(_) => {}
            Selection::Mask(mask) => {
                self.whole(mask, 1)?;
            }
            _ => return Err("this selection of neurons is not known here".into()),
        }
        let neurons = self.tensor(ffn.up)?.rows;
        let mut needs = Needs {
            input: self.input(width)?,
            hidden: self.temporary("hidden activations", neurons)?,
            ..Needs::default()
        };
        if ffn.down_layout == DownLayout::NeuronRows {
            let (tokens, bytes) = partials(neurons, width, self.list.token_capacity.into(), self.limits);
            if bytes > self.limits.window() {
                return Err(format!(
                    "partial sums of {bytes} bytes are more than a shader of this device sees"
                ));
            }
            needs.sums = tokens * bytes;
        }
        Ok(needs)
    }
}

impl Checker<'_> {
    fn experts(&self, op: &Experts, hidden: Quantization) -> Result<Needs, String> {
        let width = self.words(op.input)?.columns;
        for id in [op.chosen, op.weights, op.output] {
            self.words(id)?;
        }
        self.optional(op.active_count)?;
        // One expert is seen whole.
        let count = u64::from(op.experts.max(1));
        for id in [op.gate, Some(op.up), Some(op.down)].into_iter().flatten() {
            self.weight_of(id, self.tensor(id)?.rows / count)?;
        }
        self.function(op.function)?;
        self.function(op.up_function)?;
        self.quantises(hidden)?;
        if !matches!(op.selection, Selection::All | Selection::GateFirst | Selection::Threshold(_)) {
            return Err("this selection of an expert's neurons is not known here".into());
        }
        let neurons = self.tensor(op.up)?.rows / count;
        let each = self.tensor(op.chosen)?.columns;
        let rows = u64::from(self.list.token_capacity).saturating_mul(each);
        if rows > self.limits.max_groups {
            return Err(format!("{rows} experts of tokens at once; fewer tokens at once need less"));
        }
        let mut needs = Needs {
            input: self.input(width)?,
            hidden: self.temporary("hidden activations of experts", neurons.saturating_mul(each))?,
            outputs: self.temporary("outputs of experts", width.saturating_mul(each))?,
            sums: 0,
        };
        if op.down_layout == DownLayout::NeuronRows {
            let (at_once, bytes) = partials(neurons, width, rows, self.limits);
            if bytes > self.limits.window() {
                return Err(format!(
                    "partial sums of {bytes} bytes are more than a shader of this device sees"
                ));
            }
            needs.sums = at_once * bytes;
        }
        Ok(needs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { max_range: 1 << 27, offset_alignment: 64, max_groups: 65535 };

    #[test]
    fn partial_sums_fit_a_window() {
        for (neurons, width) in [(64, 64), (14336, 4096), (100_000, 8192), (1 << 20, 16384)] {
            let (tokens, bytes) = partials(neurons, width, 512, LIMITS);
            assert!(tokens >= 1 && (tokens == 1 || tokens * bytes <= LIMITS.window()), "{neurons} x {width}");
        }
        assert_eq!(partials(64, 64, 3, LIMITS).0, 3);
    }

    #[test]
    fn what_is_denied_has_a_reason() {
        let mut list = OperationList::new(2);
        let input = list.per_token("x", SlotRole::Input, DType::F32, 32).unwrap();
        let output = list.per_token("y", SlotRole::Output, DType::F32, 8).unwrap();
        let weight = TensorType::matrix(DType::MXFP4, 8, 32).unwrap();
        let weight = list.fixed("w", SlotRole::Input, weight);
        let kind = OperationKind::Linear { input, weight, bias: None, output, accumulate: false };
        list.push("linear", kind, Arithmetic::F32);
        assert!(check(&list, 0, LIMITS).unwrap_err().contains("`w` is MXFP4"));
        list.slots[2].tensor = TensorType::matrix(DType::Q8_0, 8, 32).unwrap();
        assert_eq!(check(&list, 0, LIMITS), Ok(Needs::default()));
        list.operations[0].arithmetic = Arithmetic::INT8;
        assert_eq!(check(&list, 0, LIMITS), Ok(Needs { input: 2 * 32 * 4, ..Needs::default() }));
        list.operations[0].arithmetic.accumulation = Accumulation::F16;
        assert!(check(&list, 0, LIMITS).is_err());
    }
}
