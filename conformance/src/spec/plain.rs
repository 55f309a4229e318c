//! Problems of one operation without state: copies, tables, norms, projections, rope and element-wise operations.

use super::arithmetic;
use crate::finding::Fallible;
use crate::problem::{Content, Problem, UNPLACED};
use crate::rng::Rng;
use crate::values::{FILL, ValueClass, f32_bytes, numbers, weights};
use engine_core::backend::SequenceSpan;
use engine_core::operation::{
    Activation, Arithmetic, NormKind, OperationKind, Rope, RopeScaling, RopeStyle, SlotId, SlotRole,
};
use engine_core::{DType, TensorType};

/// `Copy` within the device.
#[derive(Clone, Debug)]
pub struct CopySpec {
    /// Type of both sides.
    pub dtype: DType,
    /// Rows, or the token capacity.
    pub rows: u32,
    /// Columns.
    pub columns: u64,
    /// Whether both are per token.
    pub per_token: bool,
    /// Tokens.
    pub tokens: u32,
    /// Whether the rows of the target have gaps.
    pub strided: bool,
}

/// `Embed`.
#[derive(Clone, Debug)]
pub struct EmbedSpec {
    /// Type of the table.
    pub dtype: DType,
    /// Rows of the table.
    pub vocabulary: u32,
    /// Columns.
    pub columns: u64,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens.
    pub tokens: u32,
    /// Factor.
    pub scale: f32,
    /// Values of the table.
    pub values: ValueClass,
}

/// `Norm`.
#[derive(Clone, Debug)]
pub struct NormSpec {
    /// Which.
    pub norm: NormKind,
    /// Length of a group.
    pub group: u64,
    /// Groups per row.
    pub groups: u64,
    /// Whether there is a bias.
    pub bias: bool,
    /// Whether output is input.
    pub in_place: bool,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens.
    pub tokens: u32,
    /// Values of the rows.
    pub values: ValueClass,
}

/// `Linear`.
#[derive(Clone, Debug)]
pub struct LinearSpec {
    /// Type of the weight.
    pub dtype: DType,
    /// Outputs.
    pub rows: u64,
    /// Inputs.
    pub columns: u64,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens.
    pub tokens: u32,
    /// Whether there is a bias.
    pub bias: bool,
    /// Whether the output is accumulated into.
    pub accumulate: bool,
    /// Whether activations are quantised.
    pub int8: bool,
    /// Whether the weight's rows have gaps.
    pub strided: bool,
    /// Whether the weight is a constant (otherwise an input).
    pub constant: bool,
    /// Values of weight and activations.
    pub values: ValueClass,
}

/// Rope scaling with its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalingShape {
    /// None.
    None,
    /// Linear, by 4.
    Linear,
    /// YaRN, by 4 from 64 positions.
    Yarn,
}

/// `Rope`.
#[derive(Clone, Debug)]
pub struct RopeSpec {
    /// Pairs.
    pub style: RopeStyle,
    /// Heads in a row.
    pub heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Rotated elements.
    pub rotary_dim: u32,
    /// Whether there are factors.
    pub factors: bool,
    /// Scaling.
    pub scaling: ScalingShape,
    /// Whether output is input.
    pub in_place: bool,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens of each sequence with its past.
    pub sequences: Vec<(u32, u32)>,
    /// Values.
    pub values: ValueClass,
}

/// `Activate`, `Add` or `Multiply`.
#[derive(Clone, Debug)]
pub struct ElementwiseSpec {
    /// The function, for `Activate`.
    pub function: Option<Activation>,
    /// `Multiply` rather than `Add`, where there is no function.
    pub multiply: bool,
    /// Whether the right side is one row for all tokens.
    pub broadcast: bool,
    /// Whether output is the (left) input.
    pub in_place: bool,
    /// Columns.
    pub columns: u64,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens.
    pub tokens: u32,
    /// Values.
    pub values: ValueClass,
}

/// F32 rows for `tokens` of `capacity` tokens; the rows that are not used hold [`FILL`].
pub(super) fn token_rows(
    rng: &mut Rng,
    values: ValueClass,
    capacity: u32,
    tokens: u32,
    columns: u64,
) -> Vec<u8> {
    let mut bytes = f32_bytes(&numbers(rng, values, (u64::from(tokens) * columns) as usize));
    bytes.resize((u64::from(capacity) * columns * 4) as usize, FILL);
    bytes
}

/// An f32 vector with plain values.
pub(super) fn vector(problem: &mut Problem, rng: &mut Rng, name: &str, columns: u64) -> SlotId {
    let bytes = f32_bytes(&numbers(rng, ValueClass::Plain, columns as usize));
    problem.fixed(name, UNPLACED, TensorType::f32_vector(columns), Content::Bytes(bytes))
}

/// A weight matrix, with gaps between its rows where `strided`.
pub(super) fn matrix(
    problem: &mut Problem,
    rng: &mut Rng,
    name: &str,
    shape: (DType, u64, u64),
    strided: bool,
    constant: bool,
    values: ValueClass,
) -> Fallible<SlotId> {
    let (dtype, rows, columns) = shape;
    let mut tensor = TensorType::matrix(dtype, rows, columns)?;
    if strided {
        // A bundle of three rows of one type, as prepared files have them.
        tensor = TensorType::strided(dtype, rows, columns, 3 * tensor.row_stride)?;
    }
    let bytes = weights(rng, &tensor, values);
    let role = if constant { UNPLACED } else { SlotRole::Input };
    Ok(problem.fixed(name, role, tensor, Content::Bytes(bytes)))
}

impl CopySpec {
    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let capacity = if self.per_token { self.rows } else { self.tokens };
        let mut problem = Problem::new(capacity, self.tokens);
        let tensor = TensorType::matrix(self.dtype, self.rows.into(), self.columns)?;
        let bytes: Vec<u8> = (0..tensor.bytes()).map(|_| rng.bits() as u8).collect();
        let stride = tensor.row_stride * if self.strided { 2 } else { 1 };
        let target = TensorType::strided(self.dtype, self.rows.into(), self.columns, stride)?;
        let from = problem.fixed("from", SlotRole::Input, tensor, Content::Bytes(bytes));
        let to = problem.fixed("to", SlotRole::Output, target, Content::Unset);
        for slot in &mut problem.list.slots {
            slot.per_token = self.per_token;
        }
        problem.push(OperationKind::Copy { from, to }, Arithmetic::F32);
        Ok(problem)
    }
}

impl EmbedSpec {
    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let mut problem = Problem::new(self.capacity, self.tokens);
        let mut ids: Vec<u8> = (0..self.tokens)
            .flat_map(|t| {
                // First and last row always, then any.
                let id = match t {
                    0 => self.vocabulary - 1,
                    1 => 0,
                    _ => rng.below(self.vocabulary.into()) as u32,
                };
                id.to_le_bytes()
            })
            .collect();
        ids.resize(self.capacity as usize * 4, FILL);
        let ids = problem.rows_in("ids", DType::I32, 1, ids)?;
        let shape = (self.dtype, self.vocabulary.into(), self.columns);
        let table = matrix(&mut problem, rng, "table", shape, false, true, self.values)?;
        let output = problem.rows_out("output", DType::F32, self.columns)?;
        problem.push(OperationKind::Embed { ids, table, output, scale: self.scale }, Arithmetic::F32);
        Ok(problem)
    }
}

/// An input and an output slot, which are one where `in_place`.
fn in_and_out(
    problem: &mut Problem,
    in_place: bool,
    columns: u64,
    bytes: Vec<u8>,
) -> Fallible<(SlotId, SlotId)> {
    if in_place {
        let both = problem.rows("rows", SlotRole::State, DType::F32, columns, Content::Bytes(bytes))?;
        return Ok((both, both));
    }
    let input = problem.rows_in("input", DType::F32, columns, bytes)?;
    Ok((input, problem.rows_out("output", DType::F32, columns)?))
}

impl NormSpec {
    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let mut problem = Problem::new(self.capacity, self.tokens);
        let columns = self.group * self.groups;
        let bytes = token_rows(rng, self.values, self.capacity, self.tokens, columns);
        let (input, output) = in_and_out(&mut problem, self.in_place, columns, bytes)?;
        let weight = vector(&mut problem, rng, "weight", self.group);
        let bias = self.bias.then(|| vector(&mut problem, rng, "bias", self.group));
        let kind = OperationKind::Norm { norm: self.norm, epsilon: 1e-5, input, weight, bias, output };
        problem.push(kind, Arithmetic::F32);
        Ok(problem)
    }
}

impl LinearSpec {
    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let mut problem = Problem::new(self.capacity, self.tokens);
        let bytes = token_rows(rng, self.values, self.capacity, self.tokens, self.columns);
        let input = problem.rows_in("input", DType::F32, self.columns, bytes)?;
        let shape = (self.dtype, self.rows, self.columns);
        let weight = matrix(&mut problem, rng, "weight", shape, self.strided, self.constant, self.values)?;
        let bias = self.bias.then(|| vector(&mut problem, rng, "bias", self.rows));
        let output = if self.accumulate {
            let before = token_rows(rng, ValueClass::Plain, self.capacity, self.tokens, self.rows);
            problem.rows("output", SlotRole::State, DType::F32, self.rows, Content::Bytes(before))?
        } else {
            problem.rows_out("output", DType::F32, self.rows)?
        };
        let kind = OperationKind::Linear { input, weight, bias, output, accumulate: self.accumulate };
        problem.push(kind, arithmetic(self.int8));
        Ok(problem)
    }
}

impl RopeSpec {
    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let tokens = self.sequences.iter().map(|s| s.0).sum();
        let mut problem = Problem::new(self.capacity, tokens);
        let columns = u64::from(self.heads * self.head_dim);
        let bytes = token_rows(rng, self.values, self.capacity, tokens, columns);
        let (input, output) = in_and_out(&mut problem, self.in_place, columns, bytes)?;
        let factors = self.factors.then(|| {
            let half = u64::from(self.rotary_dim / 2);
            let bytes = f32_bytes(&(0..half).map(|_| 1.0 + 7.0 * rng.unit() as f32).collect::<Vec<_>>());
            problem.fixed("factors", UNPLACED, TensorType::f32_vector(half), Content::Bytes(bytes))
        });
        let scaling = match self.scaling {
            ScalingShape::None => RopeScaling::None,
            ScalingShape::Linear => RopeScaling::Linear { factor: 4.0 },
            ScalingShape::Yarn => RopeScaling::Yarn {
                factor: 4.0,
                original_context: 64,
                attention_factor: 1.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
            },
        };
        let mut next = 0;
        for &(tokens, past) in &self.sequences {
            problem.sequences.push(SequenceSpan { first_token: next, tokens, past, cache_base: 0 });
            next += tokens;
        }
        let kind = OperationKind::Rope(Rope {
            input,
            output,
            factors,
            style: self.style,
            head_dim: self.head_dim,
            rotary_dim: self.rotary_dim,
            base: 10000.0,
            scaling,
        });
        problem.push(kind, Arithmetic::F32);
        Ok(problem)
    }
}

impl ElementwiseSpec {
    /// The operation's name.
    pub(super) fn operation(&self) -> &'static str {
        match (self.function, self.multiply) {
            (Some(_), _) => "activate",
            (None, true) => "multiply",
            (None, false) => "add",
        }
    }

    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let mut problem = Problem::new(self.capacity, self.tokens);
        let mut bytes = token_rows(rng, self.values, self.capacity, self.tokens, self.columns);
        if self.function.is_some() && self.values == ValueClass::Plain {
            // Functions bend between -8 and 8.
            let values = crate::values::f32_values(&bytes);
            let used = (u64::from(self.tokens) * self.columns) as usize;
            let wide: Vec<f32> = values[..used].iter().map(|x| x * 8.0).collect();
            bytes[..used * 4].copy_from_slice(&f32_bytes(&wide));
        }
        let (left, output) = in_and_out(&mut problem, self.in_place, self.columns, bytes)?;
        let kind = if let Some(function) = self.function {
            OperationKind::Activate { function, input: left, output }
        } else {
            let right = if self.broadcast {
                vector(&mut problem, rng, "right", self.columns)
            } else {
                let bytes = token_rows(rng, self.values, self.capacity, self.tokens, self.columns);
                problem.rows_in("right", DType::F32, self.columns, bytes)?
            };
            if self.multiply {
                OperationKind::Multiply { left, right, output }
            } else {
                OperationKind::Add { left, right, output }
            }
        };
        problem.push(kind, Arithmetic::F32);
        Ok(problem)
    }
}
