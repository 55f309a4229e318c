//! From operations to one graph: nodes, constants, and what a run must write and read.

use std::collections::{BTreeSet, HashMap};

use engine_core::operation::{Activation, DownLayout, Ffn, OperationKind, OperationList, SlotId, SlotRole};
use engine_core::{DType, Error, Result};

use crate::check::{Form, shape};
use crate::ffi::{data_type, tensor_type};
use crate::graph::{Encoding, Spec};
use crate::weights::{Encoded, Matrix, eight_bits};

/// Part of a matrix or vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The rows of active neurons; all rows where the operation has none.
    Rows,
    /// The columns of active neurons.
    Columns,
}

/// What one input of a graph is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum In {
    /// The tokens' rows of a slot.
    Tokens(SlotId),
    /// A weight that is bound at submit.
    Weight(SlotId, Part),
    /// A vector that is bound at submit, of active neurons where `Columns`.
    Vector(SlotId, Option<Part>),
}

/// Where one output of a graph goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Out {
    /// The tokens' rows of a slot, added to what it holds where `accumulate`.
    Tokens {
        /// The slot.
        slot: SlotId,
        /// Whether it is added.
        accumulate: bool,
    },
    /// Hidden activations of the active neurons.
    Hidden {
        /// Where they go.
        hidden: Option<SlotId>,
        /// Where the count of those that are not 0 goes.
        count: Option<SlotId>,
    },
    /// Values of the active neurons on the way to `h`. Where one is not finite, so must be what depends on it: the output's
    /// row, and the neuron's `h`. The vector units take infinity for the number after the largest.
    Witness {
        /// The layer's output.
        output: SlotId,
        /// Where hidden activations go.
        hidden: Option<SlotId>,
    },
    /// A number per token that is finite where a witness is, which itself is not read.
    Check {
        /// The layer's output.
        output: SlotId,
    },
}

/// A graph with what its inputs and outputs are, in the order of its tensors.
#[derive(Debug, Default)]
pub(crate) struct Emitted {
    pub(crate) spec: Spec,
    pub(crate) ins: Vec<In>,
    pub(crate) outs: Vec<Out>,
    /// For each output, the inputs that it depends on.
    pub(crate) depends: Vec<Vec<usize>>,
}

/// Bytes of the constants by slot.
pub(crate) type Constants<'a> = dyn Fn(SlotId) -> Option<&'a [u8]> + 'a;

/// Runs of operations that form one graph each, or are one copy or one feed-forward layer each. Within a graph a value is
/// used as f16 and written once, at its end; so what is accumulated (in f32, by the host) ends a graph before it is read.
pub(crate) fn segments(list: &OperationList, fuse: bool) -> Vec<std::ops::Range<usize>> {
    let mut found: Vec<std::ops::Range<usize>> = Vec::new();
    let (mut written, mut accumulated): (Vec<SlotId>, Vec<SlotId>) = (Vec::new(), Vec::new());
    let mut open = false;
    for (at, operation) in list.operations.iter().enumerate() {
        let alone = matches!(operation.kind, OperationKind::Copy { .. } | OperationKind::Ffn(_));
        let (reads, writes, adds) = uses(&operation.kind);
        let cut = alone
            || !fuse
            || !open
            || reads.iter().any(|slot| accumulated.contains(slot))
            || writes.iter().any(|slot| accumulated.contains(slot))
            || adds.iter().any(|slot| written.contains(slot) || accumulated.contains(slot));
        if cut {
            found.push(at..at + 1);
            (written, accumulated) = (Vec::new(), Vec::new());
        } else if let Some(last) = found.last_mut() {
            last.end = at + 1;
        }
        written.extend(writes);
        accumulated.extend(adds);
        open = !alone;
    }
    found
}

/// For each tensor, the graph's inputs (by their order) that it depends on.
fn depends(spec: &Spec) -> Vec<BTreeSet<usize>> {
    let mut found = vec![BTreeSet::new(); spec.tensors.len()];
    let inputs = spec.tensors.iter().enumerate().filter(|(_, t)| t.kind == tensor_type::APP_WRITE);
    for (order, (tensor, _)) in inputs.enumerate() {
        found[tensor].insert(order);
    }
    for node in &spec.nodes {
        let all: BTreeSet<usize> = node.inputs.iter().flat_map(|at| found[*at].clone()).collect();
        for output in &node.outputs {
            found[*output].extend(&all);
        }
    }
    found
}

/// Slots that an operation reads, overwrites and adds to.
fn uses(kind: &OperationKind) -> (Vec<SlotId>, Vec<SlotId>, Vec<SlotId>) {
    use engine_core::operation::Access;
    let (mut reads, mut writes, mut adds) = (Vec::new(), Vec::new(), Vec::new());
    for operand in kind.operands() {
        match operand.access {
            Access::Read => reads.push(operand.slot),
            Access::Write => writes.push(operand.slot),
            Access::ReadWrite => adds.push(operand.slot),
        }
    }
    (reads, writes, adds)
}

struct Emitter<'a> {
    list: &'a OperationList,
    constants: &'a Constants<'a>,
    form: Form,
    active: &'a [u32],
    tokens: u32,
    /// The tensor that holds a slot's value.
    values: HashMap<SlotId, usize>,
    /// Slots written, in the order of their first writing, and whether they are added to.
    written: Vec<(SlotId, bool)>,
    /// Other tensors that a run reads.
    watched: Vec<(usize, Out)>,
    done: Emitted,
}

/// The graph of a run of operations. `active` are the neurons of a feed-forward layer.
pub(crate) fn emit<'a>(
    list: &'a OperationList,
    segment: std::ops::Range<usize>,
    active: &'a [u32],
    form: Form,
    constants: &'a Constants<'a>,
) -> Result<Emitted> {
    let mut emitter = Emitter {
        list,
        constants,
        form,
        active,
        tokens: shape(list.token_capacity),
        values: HashMap::new(),
        written: Vec::new(),
        watched: Vec::new(),
        done: Emitted::default(),
    };
    for at in segment.clone() {
        emitter.operation(&list.operations[at].kind)?;
    }
    // What nobody outside of the graph reads stays inside.
    let outside = |slot: SlotId| {
        let scratch = list.slot(slot).is_some_and(|s| s.role == SlotRole::Scratch);
        let reads = |kind: &OperationKind| {
            let (reads, _, adds) = uses(kind);
            reads.contains(&slot) || adds.contains(&slot)
        };
        let elsewhere =
            list.operations.iter().enumerate().any(|(at, o)| !segment.contains(&at) && reads(&o.kind));
        !scratch || elsewhere
    };
    let mut outs: Vec<(usize, Out)> = Vec::new();
    for (slot, accumulate) in std::mem::take(&mut emitter.written) {
        if let Some(&tensor) = emitter.values.get(&slot).filter(|_| outside(slot)) {
            emitter.done.spec.tensors[tensor].kind = tensor_type::APP_READ;
            outs.push((tensor, Out::Tokens { slot, accumulate }));
        }
    }
    for (tensor, out) in std::mem::take(&mut emitter.watched) {
        emitter.done.spec.tensors[tensor].kind = tensor_type::APP_READ;
        outs.push((tensor, out));
    }
    outs.sort_by_key(|(tensor, _)| *tensor);
    let depends = depends(&emitter.done.spec);
    emitter.done.depends =
        outs.iter().map(|(tensor, _)| depends[*tensor].iter().copied().collect()).collect();
    emitter.done.outs = outs.into_iter().map(|(_, out)| out).collect();
    Ok(emitter.done)
}

impl Emitter<'_> {
    fn tensor(&self, slot: SlotId) -> Result<engine_core::TensorType> {
        let slot = self.list.slot(slot);
        slot.map(|s| s.tensor).ok_or_else(|| Error::internal("an operation names a slot that does not exist"))
    }

    fn columns(&self, slot: SlotId) -> Result<u32> {
        Ok(self.tensor(slot)?.columns as u32)
    }

    fn between(&mut self, name: &str, columns: u32) -> usize {
        let name = format!("{name}{}", self.done.spec.tensors.len());
        self.done.spec.tensor(name, tensor_type::NATIVE, &[self.tokens, columns])
    }

    fn input(&mut self, what: In, dimensions: &[u32]) -> usize {
        self.done.ins.push(what);
        let name = format!("in{}", self.done.ins.len());
        self.done.spec.tensor(name, tensor_type::APP_WRITE, dimensions)
    }

    fn constant(&mut self, dimensions: &[u32], encoded: Encoded) -> usize {
        let name = format!("w{}", self.done.spec.tensors.len());
        self.done.spec.constant(name, dimensions, encoded)
    }

    /// The value of a slot, a row per token.
    fn read(&mut self, slot: SlotId) -> Result<usize> {
        if let Some(tensor) = self.values.get(&slot) {
            return Ok(*tensor);
        }
        let columns = self.columns(slot)?;
        let tensor = if self.list.slot(slot).is_some_and(|s| s.per_token) {
            self.input(In::Tokens(slot), &[self.tokens, columns])
        } else {
            self.vector(slot, None, &[1, columns])?
        };
        self.values.insert(slot, tensor);
        Ok(tensor)
    }

    fn write(&mut self, slot: SlotId, tensor: usize, accumulate: bool) {
        self.values.insert(slot, tensor);
        if !self.written.iter().any(|(known, _)| *known == slot) {
            self.written.push((slot, accumulate));
        }
    }

    /// An f32 vector, or its elements of active neurons.
    fn vector(&mut self, slot: SlotId, part: Option<Part>, dimensions: &[u32]) -> Result<usize> {
        let tensor = self.tensor(slot)?;
        let Some(bytes) = (self.constants)(slot) else {
            return Ok(self.input(In::Vector(slot, part), dimensions));
        };
        let matrix = Matrix { tensor, bytes };
        let halves = if part.is_some() { matrix.picked_columns(self.active) } else { matrix.rows(&[0]) };
        Ok(self.constant(dimensions, (data_type::FLOAT_16, Encoding::None, halves)))
    }

    fn all_rows(&self, slot: SlotId) -> Result<Vec<u32>> {
        Ok((0..self.tensor(slot)?.rows as u32).collect())
    }

    /// `input . part(weight)^T`: the library's FullyConnected, whose weights have a row per output.
    fn product(
        &mut self,
        input: usize,
        (slot, part, rows): (SlotId, Part, &[u32]),
        bias: Option<(SlotId, Option<Part>)>,
        name: &str,
    ) -> Result<usize> {
        let tensor = self.tensor(slot)?;
        let (outputs, inner) = match part {
            Part::Rows => (rows.len() as u32, tensor.columns as u32),
            Part::Columns => (tensor.rows as u32, self.active.len() as u32),
        };
        let weight = match (self.constants)(slot) {
            None => self.input(In::Weight(slot, part), &[outputs, inner]),
            Some(bytes) => {
                let matrix = Matrix { tensor, bytes };
                let whole = part == Part::Rows || u64::from(inner) == tensor.columns;
                let four = self.form == Form::Exact { four_bits: true } && tensor.dtype == DType::Q4_0;
                let encoded = match part {
                    Part::Columns if four && whole => matrix.blocks_of_four_bits(&self.all_rows(slot)?),
                    Part::Columns => self.halves(matrix.picked_columns(self.active), inner),
                    Part::Rows if four => matrix.blocks_of_four_bits(rows),
                    Part::Rows => self.halves(matrix.rows(rows), inner),
                };
                self.constant(&[outputs, inner], encoded)
            }
        };
        let mut inputs = vec![input, weight];
        let mut late = None;
        if let Some((bias, part)) = bias {
            if (self.constants)(bias).is_some() {
                inputs.push(self.vector(bias, part, &[outputs])?);
            } else {
                late = Some(self.vector(bias, part, &[1, outputs])?);
            }
        }
        let product = self.between(name, outputs);
        self.done.spec.node(c"FullyConnected", &inputs, product);
        let Some(bias) = late else { return Ok(product) };
        let sum = self.between(name, outputs);
        Ok(self.done.spec.node(c"ElementWiseAdd", &[product, bias], sum))
    }

    fn halves(&self, halves: Vec<u8>, columns: u32) -> Encoded {
        match self.form {
            Form::Exact { .. } => (data_type::FLOAT_16, Encoding::None, halves),
            Form::EightBits => eight_bits(&halves, columns as usize),
        }
    }

    fn function(&mut self, function: Activation, of: usize, columns: u32) -> Result<usize> {
        let node = |emitter: &mut Self, kind, inputs: &[usize]| {
            let to = emitter.between("f", columns);
            emitter.done.spec.node(kind, inputs, to)
        };
        Ok(match function {
            Activation::Identity => of,
            Activation::Relu => node(self, c"Relu", &[of]),
            Activation::ReluSquared => {
                let relu = node(self, c"Relu", &[of]);
                node(self, c"ElementWiseMultiply", &[relu, relu])
            }
            Activation::Silu => {
                let share = node(self, c"Sigmoid", &[of]);
                node(self, c"ElementWiseMultiply", &[of, share])
            }
            // The library has one; the two forms differ by less than half a step of f16.
            Activation::GeluTanh | Activation::GeluErf => node(self, c"Gelu", &[of]),
            _ => return Err(Error::unsupported("an unknown activation function")),
        })
    }

    fn operation(&mut self, kind: &OperationKind) -> Result<()> {
        match kind {
            OperationKind::Linear { input, weight, bias, output, accumulate } => {
                let from = self.read(*input)?;
                let rows = self.all_rows(*weight)?;
                let bias = bias.map(|bias| (bias, None));
                let product = self.product(from, (*weight, Part::Rows, &rows), bias, "p")?;
                self.write(*output, product, *accumulate);
            }
            OperationKind::Ffn(ffn) => self.ffn(ffn)?,
            other => return Err(Error::unsupported(format!("no graph for {}", other.name()))),
        }
        Ok(())
    }

    fn ffn(&mut self, ffn: &Ffn) -> Result<()> {
        let input = self.read(ffn.input)?;
        let (active, neurons) = (self.active, self.active.len() as u32);
        let bias = |slot: Option<SlotId>| slot.map(|slot| (slot, Some(Part::Columns)));
        let gate = ffn
            .gate
            .map(|gate| self.product(input, (gate, Part::Rows, active), bias(ffn.gate_bias), "gate"))
            .transpose()?;
        let up = self.product(input, (ffn.up, Part::Rows, active), bias(ffn.up_bias), "up")?;
        let mut witnesses: Vec<usize> = gate.into_iter().chain([up]).collect();
        let mut applied = |emitter: &mut Self, function, of| {
            let value = emitter.function(function, of, neurons)?;
            // The other functions are finite where what they are of is.
            if function == Activation::ReluSquared {
                witnesses.push(value);
            }
            Ok::<usize, Error>(value)
        };
        let hidden = match gate {
            Some(gate) => {
                let (gate, up) = (applied(self, ffn.function, gate)?, applied(self, ffn.up_function, up)?);
                let to = self.between("h", neurons);
                self.done.spec.node(c"ElementWiseMultiply", &[gate, up], to)
            }
            None => applied(self, ffn.function, up)?,
        };
        witnesses.retain(|witness| *witness != hidden);
        self.watch(ffn, hidden, &witnesses);
        let output = match (ffn.down_layout, (self.constants)(ffn.down)) {
            (DownLayout::OutputRows, _) => {
                self.product(hidden, (ffn.down, Part::Columns, active), None, "down")?
            }
            (DownLayout::NeuronRows, Some(bytes)) => {
                let tensor = self.tensor(ffn.down)?;
                let halves = Matrix { tensor, bytes }.transposed(active);
                let width = tensor.columns as u32;
                let encoded = self.halves(halves, neurons);
                let weight = self.constant(&[width, neurons], encoded);
                let to = self.between("down", width);
                self.done.spec.node(c"FullyConnected", &[hidden, weight], to)
            }
            (DownLayout::NeuronRows, None) => {
                let width = self.columns(ffn.down)?;
                let weight = self.input(In::Weight(ffn.down, Part::Rows), &[neurons, width]);
                let to = self.between("down", width);
                self.done.spec.node(c"MatMul", &[hidden, weight], to)
            }
        };
        self.write(ffn.output, output, ffn.accumulate);
        Ok(())
    }

    /// Has a run read what it needs of the neurons: everything where their `h` is asked for, else a sum of each witness with
    /// weights so small that only what is not finite makes it so.
    fn watch(&mut self, ffn: &Ffn, hidden: usize, witnesses: &[usize]) {
        let (output, neurons) = (ffn.output, self.active.len() as u32);
        if ffn.hidden.is_some() || ffn.active_count.is_some() {
            let out = Out::Hidden { hidden: ffn.hidden, count: ffn.active_count };
            self.watched.push((hidden, out));
            let out = Out::Witness { output, hidden: ffn.hidden };
            self.watched.extend(witnesses.iter().map(|tensor| (*tensor, out)));
            return;
        }
        let least = 14.max(neurons.next_power_of_two().trailing_zeros());
        let share = half::f16::from_f32(0.5f32.powi(least as i32)).to_le_bytes();
        for witness in witnesses {
            let weights = share.repeat(neurons as usize);
            let weight = self.constant(&[1, neurons], (data_type::FLOAT_16, Encoding::None, weights));
            let sum = self.between("check", 1);
            self.done.spec.node(c"FullyConnected", &[*witness, weight], sum);
            self.watched.push((sum, Out::Check { output }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine_core::TensorType;
    use engine_core::operation::Arithmetic;

    #[test]
    fn what_is_accumulated_ends_a_graph_before_it_is_read() {
        let mut list = OperationList::new(4);
        let x = list.per_token("x", SlotRole::Input, DType::F32, 8).unwrap();
        let r = list.per_token("r", SlotRole::State, DType::F32, 8).unwrap();
        let s = list.per_token("s", SlotRole::Scratch, DType::F32, 8).unwrap();
        let weight = list.fixed("w", SlotRole::Input, TensorType::matrix(DType::F32, 8, 8).unwrap());
        let linear = |input, output, accumulate| OperationKind::Linear {
            input,
            weight,
            bias: None,
            output,
            accumulate,
        };
        for kind in [
            linear(x, s, false),
            linear(s, s, false),
            linear(s, r, true),
            linear(x, s, false),
            linear(r, s, false),
            linear(s, r, true),
            linear(s, r, true),
        ] {
            list.push("op", kind, Arithmetic::F32);
        }
        assert_eq!(segments(&list, true), [0..4, 4..6, 6..7]);
        assert_eq!(segments(&list, false).len(), 7);
        let emitted = emit(&list, 0..4, &[], Form::Exact { four_bits: false }, &|_| None).unwrap();
        let w = In::Weight(weight, Part::Rows);
        assert_eq!(emitted.ins, [In::Tokens(x), w, w, w, w]);
        // The last value of `s` is read by nobody outside: operation 4 overwrites it first, which this does not look at.
        let outs: Vec<SlotId> = emitted
            .outs
            .iter()
            .map(|out| if let Out::Tokens { slot, .. } = out { *slot } else { x })
            .collect();
        assert_eq!(outs, [r, s]);
    }
}
