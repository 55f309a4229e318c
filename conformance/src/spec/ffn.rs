//! Feed-forward problems: every way of selecting neurons, and ranges that respect no block boundary.

use super::arithmetic;
use super::plain::{matrix, token_rows, vector};
use super::planes::{PlaneShape, low_halves};
use crate::finding::Fallible;
use crate::problem::{Content, Problem};
use crate::rng::Rng;
use crate::run::run_once;
use crate::scale::{decode, function_value};
use crate::values::{FILL, ValueClass, f32_values};
use engine_core::operation::{Activation, DownLayout, Ffn, OperationKind, Selection, SlotId, SlotRole};
use engine_core::{ClusterRange, ComputeBackend, DType};

/// How many neurons a mask selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskShape {
    /// None.
    Empty,
    /// One per token.
    One,
    /// One in eight.
    Sparse,
    /// Half.
    Half,
    /// All.
    Full,
}

impl MaskShape {
    /// Name, as in case names.
    pub fn name(self) -> &'static str {
        match self {
            MaskShape::Empty => "mask-empty",
            MaskShape::One => "mask-one",
            MaskShape::Sparse => "mask-sparse",
            MaskShape::Half => "mask-half",
            MaskShape::Full => "mask-full",
        }
    }
}

/// Which neurons take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// All.
    All,
    /// By a mask.
    Mask(MaskShape),
    /// Gate first.
    GateFirst,
    /// By a threshold, placed where no neuron is near it.
    Threshold,
    /// By the high halves of weights in planes, with a threshold that no neuron is near.
    Bitplane,
    /// The same with no end of deviations: what gate-first keeps.
    BitplaneSure,
}

impl Select {
    /// Name, as in case names.
    pub fn name(self) -> &'static str {
        match self {
            Select::All => "all",
            Select::Mask(shape) => shape.name(),
            Select::GateFirst => "gate-first",
            Select::Threshold => "threshold",
            Select::Bitplane => "bitplane",
            Select::BitplaneSure => "bitplane-sure",
        }
    }
}

/// Which ranges are active.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeShape {
    /// Not named: all neurons.
    Whole,
    /// Named, with no range.
    Empty,
    /// One neuron.
    One,
    /// Two ranges at multiples of 32.
    Aligned,
    /// One range that starts and ends within blocks.
    Unaligned,
    /// Several, of odd lengths, some touching.
    Several,
}

impl RangeShape {
    /// Name, as in case names.
    pub fn name(self) -> &'static str {
        match self {
            RangeShape::Whole => "whole",
            RangeShape::Empty => "no-range",
            RangeShape::One => "one-neuron",
            RangeShape::Aligned => "aligned-ranges",
            RangeShape::Unaligned => "unaligned-range",
            RangeShape::Several => "several-ranges",
        }
    }
}

/// Every scalar function.
pub const FUNCTIONS: [Activation; 6] = [
    Activation::Identity,
    Activation::Relu,
    Activation::ReluSquared,
    Activation::Silu,
    Activation::GeluTanh,
    Activation::GeluErf,
];

/// Every way of selecting neurons that asks nothing of the weights.
pub const SELECTS: [Select; 8] = [
    Select::All,
    Select::Mask(MaskShape::Empty),
    Select::Mask(MaskShape::One),
    Select::Mask(MaskShape::Sparse),
    Select::Mask(MaskShape::Half),
    Select::Mask(MaskShape::Full),
    Select::GateFirst,
    Select::Threshold,
];

/// Every shape of active ranges.
pub const RANGES: [RangeShape; 6] = [
    RangeShape::Whole,
    RangeShape::Empty,
    RangeShape::One,
    RangeShape::Aligned,
    RangeShape::Unaligned,
    RangeShape::Several,
];

/// The ranges of this shape in a layer; `None` where the operation is not to be named.
pub fn make_ranges(shape: RangeShape, neurons: u32) -> Option<Vec<ClusterRange>> {
    let n = neurons;
    let clip = |pairs: &[(u32, u32)]| {
        let cut = pairs.iter().map(|&(a, b)| ClusterRange::new(a.min(n), b.min(n)));
        cut.filter(|r| !r.is_empty()).collect::<Vec<_>>()
    };
    match shape {
        RangeShape::Whole => None,
        RangeShape::Empty => Some(vec![]),
        RangeShape::One => Some(clip(&[(n / 2, n / 2 + 1)])),
        RangeShape::Aligned => Some(clip(&[(0, 32), (64, 96)])),
        RangeShape::Unaligned => Some(clip(&[(n / 5 + 1, n - n / 7)])),
        RangeShape::Several => {
            Some(clip(&[(1, 4), (4, 5), (9, 31), (33, 47), (n.saturating_sub(9).max(48), n)]))
        }
    }
}

/// `Ffn`.
#[derive(Clone, Debug)]
pub struct FfnSpec {
    /// Type of gate, up and down.
    pub dtype: DType,
    /// Columns of the input.
    pub width: u64,
    /// Neurons.
    pub neurons: u32,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens.
    pub tokens: u32,
    /// Whether there is a gate.
    pub gate: bool,
    /// Whether there are biases.
    pub bias: bool,
    /// Function of the gate.
    pub function: Activation,
    /// Function of up.
    pub up_function: Activation,
    /// Layout of down.
    pub layout: DownLayout,
    /// Which weights are in planes; then the type is Q4_0.
    pub planes: PlaneShape,
    /// Selection.
    pub select: Select,
    /// Active ranges.
    pub ranges: RangeShape,
    /// Whether input and hidden are quantised.
    pub int8: bool,
    /// Whether the hidden activations are asked for, and their count.
    pub hidden: bool,
    /// Whether the output is accumulated into.
    pub accumulate: bool,
    /// Whether rows lie apart, as in a bundle.
    pub strided: bool,
    /// Whether weights are constants.
    pub constant: bool,
    /// Values.
    pub values: ValueClass,
}

/// `Predict`.
#[derive(Clone, Debug)]
pub struct PredictSpec {
    /// Type of both matrices.
    pub dtype: DType,
    /// Columns of the input.
    pub width: u64,
    /// Rank.
    pub rank: u64,
    /// Neurons.
    pub neurons: u32,
    /// Token capacity.
    pub capacity: u32,
    /// Tokens.
    pub tokens: u32,
    /// Whether activations are quantised.
    pub int8: bool,
    /// Values.
    pub values: ValueClass,
}

/// The middle of the widest gap among the middle half of these values: a threshold that nothing is near.
pub(super) fn quiet_threshold(mut values: Vec<f64>) -> f32 {
    values.retain(|v| v.is_finite());
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len() / 4, values.len() * 3 / 4);
    let middle = &values[low..high.max(low)];
    let widest = middle.windows(2).max_by(|a, b| (a[1] - a[0]).total_cmp(&(b[1] - b[0])));
    match widest {
        Some(pair) if pair[1] - pair[0] > 1e-30 => ((pair[0] + pair[1]) / 2.0) as f32,
        // All values are equal (zeros), or so small that devices may flush them: anything above them is quiet.
        _ => (values.last().copied().unwrap_or(0.0).abs() * 2.0 + 0.5) as f32,
    }
}

impl FfnSpec {
    pub(super) fn build(&self, rng: &mut Rng, oracle: &dyn ComputeBackend) -> Fallible<Problem> {
        let mut problem = Problem::new(self.capacity, self.tokens);
        let neurons = u64::from(self.neurons);
        let bytes = token_rows(rng, self.values, self.capacity, self.tokens, self.width);
        let input = problem.rows_in("input", DType::F32, self.width, bytes)?;
        let (strided, constant, values) = (self.strided, self.constant, self.values);
        let rows = (self.dtype, neurons, self.width);
        let gate = if self.gate {
            Some(matrix(&mut problem, rng, "gate", rows, strided, constant, values)?)
        } else {
            None
        };
        let up = matrix(&mut problem, rng, "up", rows, strided, constant, values)?;
        let shape = match self.layout {
            DownLayout::NeuronRows => rows,
            DownLayout::OutputRows => (self.dtype, self.width, neurons),
        };
        let down = matrix(&mut problem, rng, "down", shape, strided, constant, values)?;
        let low = |problem: &mut Problem,
                   rng: &mut Rng,
                   high: Option<SlotId>,
                   name: &str,
                   shapes: &[PlaneShape]| {
            let high = high.filter(|_| shapes.contains(&self.planes))?;
            Some(low_halves(problem, rng, name, high, constant))
        };
        let gate_low = low(&mut problem, rng, gate, "gate_low", &[PlaneShape::Gate, PlaneShape::GateUp]);
        let up_low = low(&mut problem, rng, Some(up), "up_low", &[PlaneShape::GateUp, PlaneShape::Up]);
        let (gate_low, up_low) = (gate_low.transpose()?, up_low.transpose()?);
        let gate_bias = (self.bias && self.gate).then(|| vector(&mut problem, rng, "gate_bias", neurons));
        let up_bias = self.bias.then(|| vector(&mut problem, rng, "up_bias", neurons));
        let selection = match self.select {
            Select::All => Selection::All,
            Select::Mask(shape) => Selection::Mask(self.mask(&mut problem, rng, shape)?),
            Select::GateFirst => Selection::GateFirst,
            // What needs the layer comes below.
            Select::Threshold | Select::Bitplane | Select::BitplaneSure => Selection::All,
        };
        let output = if self.accumulate {
            let before = token_rows(rng, ValueClass::Plain, self.capacity, self.tokens, self.width);
            problem.rows("output", SlotRole::State, DType::F32, self.width, Content::Bytes(before))?
        } else {
            problem.rows_out("output", DType::F32, self.width)?
        };
        let hidden = if self.hidden { Some(problem.rows_out("hidden", DType::F32, neurons)?) } else { None };
        let active_count =
            if self.hidden { Some(problem.rows_out("active_count", DType::I32, 1)?) } else { None };
        let mut ffn = Ffn {
            input,
            gate,
            up,
            down,
            gate_low,
            up_low,
            gate_bias,
            up_bias,
            output,
            hidden,
            active_count,
            down_layout: self.layout,
            function: self.function,
            up_function: self.up_function,
            selection,
            accumulate: self.accumulate,
        };
        match self.select {
            Select::Threshold => {
                ffn.selection = Selection::Threshold(self.threshold(&problem, &ffn, oracle)?);
            }
            Select::Bitplane => ffn.selection = self.bitplane(&mut problem, rng, &ffn, oracle, 1.0)?,
            Select::BitplaneSure => {
                ffn.selection = self.bitplane(&mut problem, rng, &ffn, oracle, f32::INFINITY)?;
            }
            _ => {}
        }
        problem.push(OperationKind::Ffn(ffn), arithmetic(self.int8));
        if let Some(ranges) = make_ranges(self.ranges, self.neurons) {
            problem.ranges.push((0, ranges));
        }
        Ok(problem)
    }

    fn mask(&self, problem: &mut Problem, rng: &mut Rng, shape: MaskShape) -> Fallible<SlotId> {
        let neurons = self.neurons as usize;
        let mut bytes = Vec::new();
        for _ in 0..self.tokens {
            let one = rng.below(neurons as u64) as usize;
            bytes.extend((0..neurons).map(|i| {
                u8::from(match shape {
                    MaskShape::Empty => false,
                    MaskShape::One => i == one,
                    MaskShape::Sparse => rng.once_in(8),
                    MaskShape::Half => rng.once_in(2),
                    MaskShape::Full => true,
                })
            }));
        }
        bytes.resize(self.capacity as usize * neurons, FILL);
        Ok(problem.rows_in("mask", DType::U8, neurons as u64, bytes)?)
    }

    /// A threshold between the activated gates, as the oracle computes them in the stated arithmetic.
    pub(super) fn threshold(
        &self,
        problem: &Problem,
        ffn: &Ffn,
        oracle: &dyn ComputeBackend,
    ) -> Fallible<f32> {
        let source = ffn.gate.unwrap_or(ffn.up);
        let bias = if ffn.gate.is_some() { ffn.gate_bias } else { ffn.up_bias };
        let mut gates = Problem::new(problem.list.token_capacity, problem.tokens);
        let input = gates.rows_in("input", DType::F32, self.width, problem.bytes(ffn.input).to_vec())?;
        let constant = |gates: &mut Problem, slot: SlotId| {
            let bytes = Content::Bytes(problem.bytes(slot).to_vec());
            gates.fixed("copied", crate::problem::UNPLACED, problem.tensor(slot), bytes)
        };
        let weight = constant(&mut gates, source);
        let bias = bias.map(|slot| constant(&mut gates, slot));
        let output = gates.rows_out("output", DType::F32, self.neurons.into())?;
        let kind = OperationKind::Linear { input, weight, bias, output, accumulate: false };
        gates.push(kind, arithmetic(self.int8));
        let outputs = run_once(oracle, &gates)?;
        let values = f32_values(outputs.get(&output.0).map_or(&[][..], |b| b));
        Ok(quiet_threshold(values.iter().map(|&g| function_value(self.function, g.into()).abs()).collect()))
    }
}

impl PredictSpec {
    pub(super) fn build(&self, rng: &mut Rng, oracle: &dyn ComputeBackend) -> Fallible<Problem> {
        let mut problem = Problem::new(self.capacity, self.tokens);
        let bytes = token_rows(rng, self.values, self.capacity, self.tokens, self.width);
        let input = problem.rows_in("input", DType::F32, self.width, bytes)?;
        let first = (self.dtype, self.rank, self.width);
        let second = (self.dtype, u64::from(self.neurons), self.rank);
        let fc1 = matrix(&mut problem, rng, "fc1", first, false, true, self.values)?;
        let fc2 = matrix(&mut problem, rng, "fc2", second, false, true, self.values)?;
        let mask = problem.rows_out("mask", DType::U8, self.neurons.into())?;
        let a = decode(oracle, &problem.tensor(fc1), problem.bytes(fc1))?;
        let b = decode(oracle, &problem.tensor(fc2), problem.bytes(fc2))?;
        let x = f32_values(problem.bytes(input));
        let scores = x[..(self.width as usize * self.tokens as usize)]
            .chunks_exact(self.width as usize)
            .flat_map(|x| {
                let hidden: Vec<f64> = a.rows().map(|row| a.dot(row, x).max(0.0)).collect();
                b.rows().map(|row| row.iter().zip(&hidden).map(|(w, h)| w * h).sum()).collect::<Vec<f64>>()
            })
            .collect();
        let threshold = quiet_threshold(scores);
        problem.push(OperationKind::Predict { input, fc1, fc2, mask, threshold }, arithmetic(self.int8));
        Ok(problem)
    }
}
