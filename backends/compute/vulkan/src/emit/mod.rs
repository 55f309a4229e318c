//! From the operations of a list to dispatches and copies, for one submission's tokens and places.

mod attention;
mod experts;
mod ffn;
mod plain;

use engine_core::operation::{Access as Use, OperationKind, Quantization, Slot, SlotId};
use engine_core::{Error, Result, TensorType};

use crate::kernels::{LANES, is_coded};
use crate::memory::Place;
use crate::program::transfer::Stream;
use crate::program::{Env, Program};
use crate::record::{Access, Binding, Command};

/// One thing to do, in order.
pub(crate) enum Step {
    /// By the device.
    Command(Command),
    /// A copy between host and device, piece by piece.
    Stream(Stream),
}

/// Everything that a submission of this list does.
pub(crate) fn emit(program: &Program, env: &Env) -> Result<Vec<Step>> {
    let mut emitter = Emitter { program, env, steps: Vec::new(), quantised: None };
    for index in 0..program.list.operations.len() {
        emitter.operation(index)?;
    }
    Ok(emitter.steps)
}

/// Rows of f32 for a shader: where, and words from row to row.
#[derive(Clone)]
struct Rows {
    place: Place,
    stride: u32,
}

/// The rows that meet weights: numbers, or codes of int8 blocks with the first word of their scales.
#[derive(Clone)]
struct Operand {
    rows: Rows,
    scales: Option<u32>,
}

struct Emitter<'a> {
    program: &'a Program,
    env: &'a Env,
    steps: Vec<Step>,
    /// The rows whose quantised form is in the temporary memory, and whether as codes.
    quantised: Option<(Place, bool)>,
}

fn read(index: usize, place: &Place) -> Binding {
    Binding { index, place: place.clone(), access: Access::Read, in_bytes: false }
}

fn write(index: usize, place: &Place) -> Binding {
    Binding { index, place: place.clone(), access: Access::Write, in_bytes: false }
}

fn weights(index: usize, place: &Place) -> Binding {
    Binding { index, place: place.clone(), access: Access::Read, in_bytes: true }
}

/// Workgroups for `units` of work, a lane each.
fn groups(units: u64) -> u32 {
    units.div_ceil(LANES) as u32
}

fn overlap(a: &Place, b: &Place) -> bool {
    a.memory.buffer == b.memory.buffer && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
}

impl Emitter<'_> {
    fn slot(&self, id: SlotId) -> Result<&Slot> {
        self.program.list.slot(id).ok_or_else(|| Error::internal(format!("slot {} does not exist", id.0)))
    }

    fn tensor(&self, id: SlotId) -> Result<TensorType> {
        Ok(self.slot(id)?.tensor)
    }

    fn place(&self, id: SlotId) -> Result<Place> {
        let name = &self.slot(id)?.name;
        self.env.place(id).cloned().ok_or_else(|| Error::internal(format!("slot `{name}` lies nowhere")))
    }

    fn rows(&self, id: SlotId) -> Result<Rows> {
        Ok(Rows { place: self.place(id)?, stride: (self.tensor(id)?.row_stride / 4) as u32 })
    }

    fn temporary(place: &Option<Place>, bytes: u64) -> Result<Place> {
        let place = place.as_ref().filter(|place| place.bytes >= bytes);
        Ok(place.ok_or_else(|| Error::internal("temporary memory is missing"))?.part(0, bytes))
    }

    fn parameters(&self) -> Result<(&crate::program::parameters::Parameters, Place)> {
        let parameters =
            self.program.parameters.as_ref().ok_or_else(|| Error::internal("parameters are missing"))?;
        Ok((parameters, parameters.place.clone()))
    }

    fn dispatch(
        &mut self,
        shader: &str,
        bindings: Vec<Binding>,
        numbers: &[u32],
        groups: [u32; 3],
    ) -> Result<()> {
        if groups.contains(&0) {
            return Ok(());
        }
        let pipeline = self.program.shared.pipelines.get(shader)?;
        let numbers = numbers.to_vec();
        self.steps.push(Step::Command(Command::Dispatch { pipeline, bindings, numbers, groups }));
        Ok(())
    }

    /// Windows of a weight matrix that a shader can see: (first row, rows, place). They begin at multiples of `unit` rows,
    /// and have at most `most` rows.
    fn windows(&self, id: SlotId, unit: u64, most: u64) -> Result<Vec<(u64, u64, Place)>> {
        let (t, place) = (self.tensor(id)?, self.place(id)?);
        let fit = match t.row_stride {
            0 => t.rows,
            stride => self.program.shared.limits.window() / stride,
        };
        let rows = fit.min(most);
        let rows = (rows - rows % unit).max(unit);
        let mut windows = Vec::new();
        let mut first = 0;
        while first < t.rows {
            let count = rows.min(t.rows - first);
            let bytes = TensorType { rows: count, ..t }.bytes();
            windows.push((first, count, place.part(first * t.row_stride, bytes)));
            first += count;
        }
        Ok(windows)
    }

    /// The rows of an input as an operation's arithmetic wants them for this weight.
    fn input(&mut self, id: SlotId, quantization: Quantization, weight: SlotId) -> Result<Operand> {
        let rows = self.rows(id)?;
        if quantization == Quantization::None {
            return Ok(Operand { rows, scales: None });
        }
        let codes = self.program.shared.device.of.int8_dot && is_coded(self.tensor(weight)?.dtype);
        let (columns, tokens) = (self.tensor(id)?.columns, u64::from(self.env.tokens));
        let (stride, bytes) = match codes {
            true => (columns / 4, (columns + columns / 8) * tokens),
            false => (columns, columns * 4 * tokens),
        };
        let place = Self::temporary(&self.program.temporary.input, bytes)?;
        let to = Rows { place, stride: stride as u32 };
        let scales = codes.then_some((stride * tokens) as u32);
        let same = |(known, coded): &(Place, bool)| {
            known.memory.buffer == rows.place.memory.buffer
                && known.offset == rows.place.offset
                && known.bytes == rows.place.bytes
                && *coded == codes
        };
        if !self.quantised.as_ref().is_some_and(same) {
            match scales {
                None => self.quantise(&rows, &to, columns)?,
                Some(scales) => self.dispatch(
                    "quantise_codes",
                    vec![read(0, &rows.place), write(1, &to.place)],
                    &[columns as u32, rows.stride, to.stride, scales],
                    [groups(columns / 32), self.env.tokens, 1],
                )?,
            }
            self.quantised = Some((rows.place, codes));
        }
        Ok(Operand { rows: to, scales })
    }

    /// Rows to what blocks of int8 codes keep of them.
    fn quantise(&mut self, from: &Rows, to: &Rows, columns: u64) -> Result<()> {
        self.quantise_rows(from, to, columns, self.env.tokens)
    }

    fn quantise_rows(&mut self, from: &Rows, to: &Rows, columns: u64, rows: u32) -> Result<()> {
        self.dispatch(
            "quantise",
            vec![read(0, &from.place), write(1, &to.place)],
            &[columns as u32, from.stride, to.stride, 0],
            [groups(columns.div_ceil(32)), rows, 1],
        )
    }

    fn operation(&mut self, index: usize) -> Result<()> {
        let operation = &self.program.list.operations[index];
        let arithmetic = operation.arithmetic;
        match &operation.kind {
            OperationKind::Copy { from, to } => self.copy(*from, *to)?,
            OperationKind::Embed { ids, table, output, scale } => {
                self.embed(index, *ids, *table, *output, *scale)?;
            }
            OperationKind::Norm { norm, epsilon, input, weight, bias, output } => {
                self.norm(*norm, *epsilon, [*input, *weight, *output], *bias)?;
            }
            OperationKind::Linear { input, weight, bias, output, accumulate } => {
                self.linear(arithmetic.input, [*input, *weight, *output], *bias, *accumulate)?;
            }
            OperationKind::Rope(rope) => self.rope(index, rope)?,
            OperationKind::KvAppend { key, value, cache, kv_heads, head_dim } => {
                self.append([*key, *value, *cache], u64::from(*kv_heads) * u64::from(*head_dim))?;
            }
            OperationKind::Attention { .. } => self.attention(&operation.kind)?,
            OperationKind::Ffn(ffn) => self.ffn(index, arithmetic, ffn)?,
            OperationKind::Route { .. } => self.route(&operation.kind)?,
            OperationKind::Experts(op) => self.experts(index, arithmetic, op)?,
            OperationKind::Predict { input, fc1, fc2, mask, threshold } => {
                self.predict(arithmetic, [*input, *fc1, *fc2, *mask], *threshold)?;
            }
            OperationKind::Activate { function, input, output } => {
                self.activate(*function, *input, *output)?;
            }
            OperationKind::Add { left, right, output } => self.combine(1, *left, *right, *output)?,
            OperationKind::Multiply { left, right, output } => self.combine(2, *left, *right, *output)?,
            OperationKind::KvExport { cache, key, value, kv_heads, head_dim } => {
                self.move_cache(*cache, [*key, *value], u64::from(*kv_heads) * u64::from(*head_dim), true)?;
            }
            OperationKind::KvImport { cache, key, value, kv_heads, head_dim } => {
                self.move_cache(*cache, [*key, *value], u64::from(*kv_heads) * u64::from(*head_dim), false)?;
            }
            other => {
                return Err(Error::unsupported(format!("{}: {}", operation.label, other.name())));
            }
        }
        self.forget_overwritten(&operation.kind);
        Ok(())
    }

    /// Quantised rows are those of a value that may just have been replaced.
    fn forget_overwritten(&mut self, kind: &OperationKind) {
        let Some((known, _)) = &self.quantised else { return };
        let written = kind.operands().into_iter().filter(|operand| operand.access != Use::Read);
        if written.filter_map(|operand| self.env.place(operand.slot)).any(|place| overlap(place, known)) {
            self.quantised = None;
        }
    }
}
