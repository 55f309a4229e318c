//! The rules that lists obey, checked on both sides of the plug-in boundary.

use super::{
    Access, Activation, DownLayout, Experts, Ffn, Operation, OperationKind, OperationList, Place, Rope,
    RopeScaling, Selection, Slot, SlotId, SlotRole,
};
use crate::{DType, Error, Result};

/// More than any model or batch here needs, and small enough that products of dimensions stay in range.
const MAX_TOKENS: u32 = 1 << 20;
const MAX_OPERATIONS: usize = 1 << 20;
const MAX_ELEMENTS: u64 = 1 << 40;
const MAX_EXPERTS: u64 = 1 << 16;

impl OperationList {
    /// Checks every rule of the descriptors: slots exist and have the roles, dtypes and shapes that the formulas in
    /// [`OperationKind`] ask for; what is read was written or bound before.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], naming operation, field and both shapes.
    pub fn validate(&self) -> Result<()> {
        if self.token_capacity == 0 || self.token_capacity > MAX_TOKENS {
            return Err(Error::invalid(format!(
                "token capacity {} is not in 1..={MAX_TOKENS}",
                self.token_capacity
            )));
        }
        if self.operations.is_empty()
            || self.operations.len() > MAX_OPERATIONS
            || self.slots.len() > MAX_OPERATIONS
        {
            return Err(Error::invalid(format!(
                "a list has 1 to {MAX_OPERATIONS} operations and at most as many slots; this one has {} and {}",
                self.operations.len(),
                self.slots.len()
            )));
        }
        for slot in &self.slots {
            check_slot(self, slot)?;
        }
        let mut defined: Vec<bool> =
            self.slots.iter().map(|s| !matches!(s.role, SlotRole::Output | SlotRole::Scratch)).collect();
        for operation in &self.operations {
            check_operands(self, operation, &mut defined)?;
            Checker { list: self, operation }.check()?;
        }
        Ok(())
    }
}

fn check_slot(list: &OperationList, slot: &Slot) -> Result<()> {
    let fail = |what: String| Err(Error::invalid(format!("slot `{}`: {what}", slot.name)));
    slot.tensor.check().or_else(|e| fail(e.detail()))?;
    let t = &slot.tensor;
    if t.rows == 0 || t.columns == 0 || t.rows.saturating_mul(t.columns) > MAX_ELEMENTS {
        return fail(format!("{t} is empty or larger than 2^40 elements"));
    }
    if slot.per_token && t.rows != u64::from(list.token_capacity) {
        return fail(format!("{t} is per token, but the token capacity is {}", list.token_capacity));
    }
    if slot.place == Place::Host && !matches!(slot.role, SlotRole::Input | SlotRole::Output) {
        return fail("a host slot is an input or an output".into());
    }
    if matches!(slot.role, SlotRole::Constant(_)) && slot.per_token {
        return fail("a constant is not per token".into());
    }
    Ok(())
}

fn check_operands(list: &OperationList, operation: &Operation, defined: &mut [bool]) -> Result<()> {
    let at = |field: &str, what: String| {
        Error::invalid(format!("{} ({}), {field}: {what}", operation.label, operation.kind.name()))
    };
    let operands = operation.kind.operands();
    for operand in &operands {
        let Some(slot) = list.slot(operand.slot) else {
            return Err(at(operand.field, format!("slot {} does not exist", operand.slot.0)));
        };
        if slot.place == Place::Host && !matches!(operation.kind, OperationKind::Copy { .. }) {
            return Err(at(
                operand.field,
                format!("`{}` lies in host memory; only copy may use it", slot.name),
            ));
        }
        if operand.access != Access::Write && !defined[operand.slot.0 as usize] {
            return Err(at(operand.field, format!("`{}` is read before anything wrote it", slot.name)));
        }
        if operand.access != Access::Read && matches!(slot.role, SlotRole::Constant(_) | SlotRole::Input) {
            return Err(at(operand.field, format!("`{}` is written, but it is read only", slot.name)));
        }
    }
    for operand in &operands {
        if operand.access != Access::Read {
            defined[operand.slot.0 as usize] = true;
        }
    }
    Ok(())
}

/// Shape rules of one operation.
struct Checker<'a> {
    list: &'a OperationList,
    operation: &'a Operation,
}

impl Checker<'_> {
    fn slot(&self, id: SlotId) -> &Slot {
        // `check_operands` has seen that every operand exists.
        &self.list.slots[id.0 as usize]
    }

    fn fail<T>(&self, what: impl std::fmt::Display) -> Result<T> {
        Err(Error::invalid(format!("{} ({}): {what}", self.operation.label, self.operation.kind.name())))
    }

    /// The slot is per-token rows of this dtype; returns its columns.
    fn rows(&self, field: &str, id: SlotId, dtype: DType) -> Result<u64> {
        let slot = self.slot(id);
        if slot.tensor.dtype != dtype || !slot.per_token {
            return self.fail(format!(
                "{field} `{}` is {}, wanted {dtype} with a row per token",
                slot.name, slot.tensor
            ));
        }
        Ok(slot.tensor.columns)
    }

    fn rows_of(&self, field: &str, id: SlotId, dtype: DType, columns: u64) -> Result<()> {
        let found = self.rows(field, id, dtype)?;
        if found != columns {
            return self
                .fail(format!("{field} `{}` has {found} columns, wanted {columns}", self.slot(id).name));
        }
        Ok(())
    }

    /// The slot is one fixed f32 row of `columns`.
    fn vector(&self, field: &str, id: Option<SlotId>, columns: u64) -> Result<()> {
        let Some(id) = id else { return Ok(()) };
        let slot = self.slot(id);
        let t = &slot.tensor;
        if t.dtype != DType::F32 || t.rows != 1 || t.columns != columns || slot.per_token {
            return self.fail(format!("{field} `{}` is {t}, wanted F32 [1 x {columns}]", slot.name));
        }
        Ok(())
    }

    /// The slot is a fixed weight matrix of these dimensions.
    fn weight(&self, field: &str, id: SlotId, rows: u64, columns: u64) -> Result<()> {
        let slot = self.slot(id);
        let t = &slot.tensor;
        if t.rows != rows || t.columns != columns || slot.per_token {
            return self.fail(format!("{field} `{}` is {t}, wanted [{rows} x {columns}]", slot.name));
        }
        self.weight_dtype(field, slot)
    }

    fn weight_dtype(&self, field: &str, slot: &Slot) -> Result<()> {
        use DType::{F64, I8, I16, I32, I64, U8};
        if matches!(slot.tensor.dtype, I8 | I16 | I32 | I64 | F64 | U8) {
            return self
                .fail(format!("{field} `{}` is {}, which is no weight type", slot.name, slot.tensor.dtype));
        }
        Ok(())
    }

    fn positive(&self, field: &str, value: f32) -> Result<()> {
        if value.is_finite() && value > 0.0 {
            Ok(())
        } else {
            self.fail(format!("{field} is {value}, wanted more than 0"))
        }
    }

    fn finite(&self, field: &str, value: f32) -> Result<()> {
        if value.is_finite() { Ok(()) } else { self.fail(format!("{field} is {value}")) }
    }

    fn check(&self) -> Result<()> {
        match &self.operation.kind {
            OperationKind::Copy { from, to } => self.check_copy(*from, *to),
            OperationKind::Embed { ids, table, output, scale } => {
                self.rows_of("ids", *ids, DType::I32, 1)?;
                let columns = self.rows("output", *output, DType::F32)?;
                self.weight("table", *table, self.slot(*table).tensor.rows, columns)?;
                self.finite("scale", *scale)
            }
            OperationKind::Norm { norm: _, epsilon, input, weight, bias, output } => {
                let columns = self.rows("input", *input, DType::F32)?;
                self.rows_of("output", *output, DType::F32, columns)?;
                let group = self.slot(*weight).tensor.columns;
                self.vector("weight", Some(*weight), group)?;
                self.vector("bias", *bias, group)?;
                if !columns.is_multiple_of(group) {
                    return self.fail(format!("rows of {columns} are no whole number of groups of {group}"));
                }
                if !(epsilon.is_finite() && *epsilon >= 0.0) {
                    return self.fail(format!("epsilon is {epsilon}"));
                }
                Ok(())
            }
            OperationKind::Linear { input, weight, bias, output, accumulate: _ } => {
                let inputs = self.rows("input", *input, DType::F32)?;
                let outputs = self.rows("output", *output, DType::F32)?;
                self.weight("weight", *weight, outputs, inputs)?;
                self.vector("bias", *bias, outputs)?;
                self.distinct("output", *output, &[*input])
            }
            OperationKind::Rope(rope) => self.check_rope(rope),
            OperationKind::KvAppend { key, value, cache, kv_heads, head_dim } => {
                let columns = self.cache(*cache, *kv_heads, *head_dim)?;
                self.rows_of("key", *key, DType::F32, columns)?;
                self.rows_of("value", *value, DType::F32, columns)
            }
            OperationKind::Attention {
                query,
                cache,
                output,
                heads,
                kv_heads,
                head_dim,
                scale,
                window,
                soft_cap,
            } => {
                self.cache(*cache, *kv_heads, *head_dim)?;
                if *heads == 0 || !heads.is_multiple_of(*kv_heads) {
                    return self.fail(format!("{heads} heads are no multiple of {kv_heads} KV heads"));
                }
                let columns = u64::from(*heads) * u64::from(*head_dim);
                self.rows_of("query", *query, DType::F32, columns)?;
                self.rows_of("output", *output, DType::F32, columns)?;
                self.distinct("output", *output, &[*query])?;
                self.finite("scale", *scale)?;
                if *window == Some(0) {
                    return self.fail("a window of 0 positions");
                }
                soft_cap.map_or(Ok(()), |cap| self.positive("soft_cap", cap))
            }
            OperationKind::Ffn(ffn) => self.check_ffn(ffn),
            OperationKind::Route { scores, chosen, weights, gating: _, normalise: _, scale } => {
                let experts = self.rows("scores", *scores, DType::F32)?;
                let chosen = self.rows("chosen", *chosen, DType::I32)?;
                self.rows_of("weights", *weights, DType::F32, chosen)?;
                self.distinct("weights", *weights, &[*scores])?;
                if chosen > experts || experts > MAX_EXPERTS {
                    return self.fail(format!("{chosen} of {experts} experts (at most {MAX_EXPERTS})"));
                }
                self.finite("scale", *scale)
            }
            OperationKind::Experts(experts) => self.check_experts(experts),
            OperationKind::Predict { input, fc1, fc2, mask, threshold } => {
                let columns = self.rows("input", *input, DType::F32)?;
                let neurons = self.rows("mask", *mask, DType::U8)?;
                let rank = self.slot(*fc1).tensor.rows;
                self.weight("fc1", *fc1, rank, columns)?;
                self.weight("fc2", *fc2, neurons, rank)?;
                if threshold.is_nan() { self.fail("threshold is NaN") } else { Ok(()) }
            }
            OperationKind::Activate { function: _, input, output } => {
                let columns = self.rows("input", *input, DType::F32)?;
                self.rows_of("output", *output, DType::F32, columns)
            }
            OperationKind::Add { left, right, output } | OperationKind::Multiply { left, right, output } => {
                let columns = self.rows("left", *left, DType::F32)?;
                self.rows_of("output", *output, DType::F32, columns)?;
                if self.slot(*right).per_token {
                    self.rows_of("right", *right, DType::F32, columns)
                } else {
                    self.distinct("output", *output, &[*right])?;
                    self.vector("right", Some(*right), columns)
                }
            }
            OperationKind::KvExport { cache, key, value, kv_heads, head_dim }
            | OperationKind::KvImport { key, value, cache, kv_heads, head_dim } => {
                let columns = self.cache(*cache, *kv_heads, *head_dim)?;
                let positions = self.slot(*cache).tensor.rows;
                for (field, id) in [("key", *key), ("value", *value)] {
                    let slot = self.slot(id);
                    let t = &slot.tensor;
                    if t.dtype != DType::F16 || t.columns != columns || t.rows > positions || slot.per_token {
                        return self.fail(format!(
                            "{field} `{}` is {t}, wanted F16 [at most {positions} x {columns}]",
                            slot.name
                        ));
                    }
                }
                self.distinct("value", *value, &[*key])
            }
        }
    }

    fn check_copy(&self, from: SlotId, to: SlotId) -> Result<()> {
        let (a, b) = (self.slot(from), self.slot(to));
        let same = a.tensor.dtype == b.tensor.dtype
            && a.tensor.rows == b.tensor.rows
            && a.tensor.columns == b.tensor.columns
            && a.per_token == b.per_token;
        if !same {
            return self.fail(format!("`{}` is {}, `{}` is {}", a.name, a.tensor, b.name, b.tensor));
        }
        if a.place == Place::Host && b.place == Place::Host {
            return self.fail("both sides lie in host memory");
        }
        self.distinct("to", to, &[from])
    }

    fn distinct(&self, field: &str, id: SlotId, others: &[SlotId]) -> Result<()> {
        if others.contains(&id) {
            return self.fail(format!("{field} `{}` must not be one of the inputs", self.slot(id).name));
        }
        Ok(())
    }

    /// The KV cache slot has the agreed type; returns `kv_heads * head_dim`.
    fn cache(&self, id: SlotId, kv_heads: u32, head_dim: u32) -> Result<u64> {
        let columns = u64::from(kv_heads) * u64::from(head_dim);
        let slot = self.slot(id);
        let t = &slot.tensor;
        let packed = t.row_stride == t.row_bytes();
        if columns == 0
            || t.dtype != DType::F16
            || t.columns != 2 * columns
            || slot.role != SlotRole::State
            || !packed
        {
            return self.fail(format!(
                "cache `{}` is {t}, wanted packed F16 state of {} columns (2 x {kv_heads} heads x {head_dim})",
                slot.name,
                2 * columns
            ));
        }
        Ok(columns)
    }

    fn check_rope(&self, rope: &Rope) -> Result<()> {
        let columns = self.rows("input", rope.input, DType::F32)?;
        self.rows_of("output", rope.output, DType::F32, columns)?;
        let (head, rotary) = (rope.head_dim, rope.rotary_dim);
        if head == 0
            || !columns.is_multiple_of(head.into())
            || rotary == 0
            || rotary > head
            || !rotary.is_multiple_of(2)
        {
            return self.fail(format!("heads of {head} with {rotary} rotated elements in rows of {columns}"));
        }
        self.vector("factors", rope.factors, u64::from(rotary) / 2)?;
        self.positive("base", rope.base)?;
        match rope.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => self.positive("factor", factor),
            RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => {
                self.positive("factor", factor)?;
                self.positive("attention_factor", attention_factor)?;
                self.positive("beta_fast", beta_fast)?;
                self.positive("beta_slow", beta_slow)?;
                if original_context == 0 { self.fail("original_context is 0") } else { Ok(()) }
            }
        }
    }

    fn check_ffn(&self, ffn: &Ffn) -> Result<()> {
        let width = self.rows("input", ffn.input, DType::F32)?;
        self.rows_of("output", ffn.output, DType::F32, width)?;
        self.distinct("output", ffn.output, &[ffn.input])?;
        let neurons = self.slot(ffn.up).tensor.rows;
        if neurons > u64::from(u32::MAX) {
            return self.fail(format!("{neurons} neurons are more than a layer may have"));
        }
        self.weight("up", ffn.up, neurons, width)?;
        if let Some(gate) = ffn.gate {
            self.weight("gate", gate, neurons, width)?;
        } else if ffn.gate_bias.is_some() || ffn.up_function != Activation::Identity {
            return self.fail("a gate bias or a function of up needs a gate");
        }
        match ffn.down_layout {
            DownLayout::OutputRows => self.weight("down", ffn.down, width, neurons)?,
            DownLayout::NeuronRows => self.weight("down", ffn.down, neurons, width)?,
        }
        if ffn.gate.is_none() && ffn.gate_low.is_some() {
            return self.fail("gate_low needs a gate");
        }
        self.low_halves("gate_low", ffn.gate_low, ffn.gate.unwrap_or(ffn.up))?;
        self.low_halves("up_low", ffn.up_low, ffn.up)?;
        self.vector("gate_bias", ffn.gate_bias, neurons)?;
        self.vector("up_bias", ffn.up_bias, neurons)?;
        if let Some(hidden) = ffn.hidden {
            self.rows_of("hidden", hidden, DType::F32, neurons)?;
            self.distinct("hidden", hidden, &[ffn.input, ffn.output])?;
        }
        if let Some(count) = ffn.active_count {
            self.rows_of("active_count", count, DType::I32, 1)?;
        }
        if let Selection::Bitplane(rule) = ffn.selection
            && (ffn.gate_low.is_none() || (rule.up_deviation.is_some() && ffn.up_low.is_none()))
        {
            return self.fail("what bit planes estimate must be in planes: gate_low, or up_low, is missing");
        }
        self.selection(ffn.selection, ffn.function, neurons)
    }

    /// The low halves of the codes whose high halves are `high`.
    fn low_halves(&self, field: &str, low: Option<SlotId>, high: SlotId) -> Result<()> {
        let Some(low) = low else { return Ok(()) };
        let (low, high) = (self.slot(low), self.slot(high));
        let (found, wanted) = (&low.tensor, &high.tensor);
        if high.tensor.dtype != DType::Q4_0 {
            return self.fail(format!("{field}: the high halves `{}` are {wanted}, wanted Q4_0", high.name));
        }
        let shape = (wanted.rows, wanted.columns / 2);
        if found.dtype != DType::I8 || (found.rows, found.columns) != shape || low.per_token {
            return self
                .fail(format!("{field} `{}` is {found}, wanted I8 [{} x {}]", low.name, shape.0, shape.1));
        }
        Ok(())
    }

    fn selection(&self, selection: Selection, function: Activation, neurons: u64) -> Result<()> {
        match selection {
            Selection::All => Ok(()),
            Selection::Mask(mask) => self.rows_of("mask", mask, DType::U8, neurons),
            Selection::GateFirst if !function.is_zero_below() => self.fail(format!(
                "gate-first needs a function that is zero below zero, not {}",
                function.name()
            )),
            Selection::GateFirst => Ok(()),
            Selection::Threshold(t) if !(t.is_finite() && t >= 0.0) => self.fail(format!("threshold is {t}")),
            Selection::Threshold(_) => Ok(()),
            Selection::Bitplane(rule) => {
                self.vector("gate_deviation", Some(rule.gate_deviation), neurons)?;
                self.vector("up_deviation", rule.up_deviation, neurons)?;
                self.vector("down_norm", rule.down_norm, neurons)?;
                let (k, t) = (rule.deviations, rule.threshold);
                if k.is_nan() || k < 0.0 || !(t.is_finite() && t >= 0.0) {
                    return self.fail(format!("{k} deviations and a threshold of {t}"));
                }
                Ok(())
            }
        }
    }

    fn check_experts(&self, op: &Experts) -> Result<()> {
        let width = self.rows("input", op.input, DType::F32)?;
        self.rows_of("output", op.output, DType::F32, width)?;
        self.distinct("output", op.output, &[op.input, op.weights])?;
        let chosen = self.rows("chosen", op.chosen, DType::I32)?;
        self.rows_of("weights", op.weights, DType::F32, chosen)?;
        let (experts, rows) = (u64::from(op.experts), self.slot(op.up).tensor.rows);
        if experts == 0 || experts > MAX_EXPERTS || chosen > experts || !rows.is_multiple_of(experts) {
            return self
                .fail(format!("{chosen} of {experts} experts (at most {MAX_EXPERTS}) in {rows} rows of up"));
        }
        let neurons = rows / experts;
        if neurons > u64::from(u32::MAX) {
            return self.fail(format!("{neurons} neurons are more than an expert may have"));
        }
        self.weight("up", op.up, rows, width)?;
        if let Some(gate) = op.gate {
            self.weight("gate", gate, rows, width)?;
        } else if op.up_function != Activation::Identity {
            return self.fail("a function of up needs a gate");
        }
        match op.down_layout {
            DownLayout::OutputRows => {
                let rows = experts.saturating_mul(width);
                self.weight("down", op.down, rows, neurons)?;
            }
            DownLayout::NeuronRows => self.weight("down", op.down, rows, width)?,
        }
        if let Some(count) = op.active_count {
            self.rows_of("active_count", count, DType::I32, 1)?;
            self.distinct("active_count", count, &[op.chosen])?;
        }
        if let Selection::Mask(_) | Selection::Bitplane(_) = op.selection {
            return self.fail("experts take no mask and have no bit planes");
        }
        self.selection(op.selection, op.function, neurons)
    }
}
