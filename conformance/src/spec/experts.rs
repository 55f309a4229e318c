//! Mixtures of experts: the router's choice, and the experts that it chose.

use super::arithmetic;
use super::ffn::{FfnSpec, RangeShape, Select};
use super::plain::{matrix, token_rows};
use crate::finding::{Fallible, Finding};
use crate::problem::{Content, Problem};
use crate::rng::Rng;
use crate::values::{FILL, ValueClass};
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Experts, Ffn, Gating, OperationKind, Selection, SlotRole,
};
use engine_core::{ComputeBackend, DType};

/// `Route`.
#[derive(Clone, Debug)]
pub struct RouteSpec {
    /// Scores per token.
    pub experts: u64,
    /// Experts chosen.
    pub used: u64,
    /// From scores to shares.
    pub gating: Gating,
    /// Whether shares are divided by their sum.
    pub normalise: bool,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens.
    pub tokens: u32,
    /// Values of the scores.
    pub values: ValueClass,
}

/// `Experts`.
#[derive(Clone, Debug)]
pub struct ExpertsSpec {
    /// Type of gate, up and down.
    pub dtype: DType,
    /// Columns of the input.
    pub width: u64,
    /// Neurons of one expert.
    pub neurons: u32,
    /// Experts.
    pub experts: u32,
    /// Experts per token.
    pub used: u64,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens.
    pub tokens: u32,
    /// Whether there is a gate.
    pub gate: bool,
    /// Function of the gate.
    pub function: Activation,
    /// Function of up.
    pub up_function: Activation,
    /// Layout of down.
    pub layout: DownLayout,
    /// Selection: no mask.
    pub select: Select,
    /// Whether input and hidden are quantised.
    pub int8: bool,
    /// Whether the output is accumulated into.
    pub accumulate: bool,
    /// Values.
    pub values: ValueClass,
}

impl RouteSpec {
    pub(crate) fn build(&self, rng: &mut Rng) -> Fallible<Problem> {
        let mut problem = Problem::new(self.capacity, self.tokens);
        let bytes = token_rows(rng, self.values, self.capacity, self.tokens, self.experts);
        let scores = problem.rows_in("scores", DType::F32, self.experts, bytes)?;
        let chosen = problem.rows_out("chosen", DType::I32, self.used)?;
        let weights = problem.rows_out("weights", DType::F32, self.used)?;
        let (gating, normalise) = (self.gating, self.normalise);
        let kind = OperationKind::Route { scores, chosen, weights, gating, normalise, scale: 1.25 };
        problem.push(kind, Arithmetic::F32);
        Ok(problem)
    }
}

impl ExpertsSpec {
    pub(crate) fn build(&self, rng: &mut Rng, oracle: &dyn ComputeBackend) -> Fallible<Problem> {
        let mut problem = Problem::new(self.capacity, self.tokens);
        let bytes = token_rows(rng, self.values, self.capacity, self.tokens, self.width);
        let input = problem.rows_in("input", DType::F32, self.width, bytes)?;
        let chosen = problem.rows_in("chosen", DType::I32, self.used, self.chosen(rng))?;
        let shares = token_rows(rng, ValueClass::Plain, self.capacity, self.tokens, self.used);
        let weights = problem.rows_in("weights", DType::F32, self.used, shares)?;
        let all = u64::from(self.experts) * u64::from(self.neurons);
        let rows = (self.dtype, all, self.width);
        let mut weight =
            |problem: &mut Problem, name, shape| matrix(problem, rng, name, shape, false, true, self.values);
        let gate = if self.gate { Some(weight(&mut problem, "gate", rows)?) } else { None };
        let up = weight(&mut problem, "up", rows)?;
        let shape = match self.layout {
            DownLayout::NeuronRows => rows,
            DownLayout::OutputRows => {
                (self.dtype, u64::from(self.experts) * self.width, u64::from(self.neurons))
            }
        };
        let down = weight(&mut problem, "down", shape)?;
        let output = if self.accumulate {
            let before = token_rows(rng, ValueClass::Plain, self.capacity, self.tokens, self.width);
            problem.rows("output", SlotRole::State, DType::F32, self.width, Content::Bytes(before))?
        } else {
            problem.rows_out("output", DType::F32, self.width)?
        };
        let mut op = Experts {
            input,
            chosen,
            weights,
            gate,
            up,
            down,
            output,
            active_count: None,
            experts: self.experts,
            down_layout: self.layout,
            function: self.function,
            up_function: self.up_function,
            selection: Selection::All,
            accumulate: self.accumulate,
        };
        op.selection = match self.select {
            Select::All => Selection::All,
            Select::GateFirst => Selection::GateFirst,
            Select::Threshold => Selection::Threshold(self.threshold(&problem, &op, oracle)?),
            Select::Mask(_) | Select::Bitplane | Select::BitplaneSure => {
                return Err(Finding::new("suite", "experts take no mask and have no planes"));
            }
        };
        problem.push(OperationKind::Experts(op), arithmetic(self.int8));
        Ok(problem)
    }

    /// Different experts for each token, ascending; the last expert is nobody's choice.
    fn chosen(&self, rng: &mut Rng) -> Vec<u8> {
        let mut bytes = Vec::new();
        for _ in 0..self.tokens {
            let mut ids: Vec<u32> = (0..self.experts.saturating_sub(1).max(1)).collect();
            while ids.len() as u64 > self.used {
                ids.remove(rng.below(ids.len() as u64) as usize);
            }
            bytes.extend(ids.into_iter().flat_map(u32::to_le_bytes));
        }
        bytes.resize(self.capacity as usize * self.used as usize * 4, FILL);
        bytes
    }

    /// A threshold that no gate of any expert is near.
    fn threshold(&self, problem: &Problem, op: &Experts, oracle: &dyn ComputeBackend) -> Fallible<f32> {
        let as_one = FfnSpec {
            dtype: self.dtype,
            width: self.width,
            neurons: self.experts * self.neurons,
            capacity: self.capacity,
            tokens: self.tokens,
            gate: self.gate,
            bias: false,
            function: self.function,
            up_function: self.up_function,
            layout: self.layout,
            planes: crate::spec::PlaneShape::None,
            select: Select::Threshold,
            ranges: RangeShape::Whole,
            int8: self.int8,
            hidden: false,
            accumulate: false,
            strided: false,
            constant: true,
            values: self.values,
        };
        as_one.threshold(problem, &layer_of(op), oracle)
    }
}

/// The layer that an expert is, on the operands of all.
pub(crate) fn layer_of(op: &Experts) -> Ffn {
    Ffn {
        input: op.input,
        gate: op.gate,
        up: op.up,
        down: op.down,
        gate_low: None,
        up_low: None,
        gate_bias: None,
        up_bias: None,
        output: op.output,
        hidden: None,
        active_count: None,
        down_layout: op.down_layout,
        function: op.function,
        up_function: op.up_function,
        selection: op.selection,
        accumulate: false,
    }
}
