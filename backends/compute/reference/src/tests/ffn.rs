//! Feed-forward layers: formula, selections, and that unselected neurons are never read.

use super::Trial;
use engine_core::backend::ActiveRanges;
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Ffn, OperationKind, Quantization, Selection, SlotRole,
};
use engine_core::{ClusterRange, DType, TensorType};
use proptest::prelude::*;

const WIDTH: usize = 3;

/// A layer of random numbers and how it is run.
#[derive(Clone, Debug)]
struct Layer {
    inputs: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// A row per neuron.
    down: Vec<f32>,
    layout: DownLayout,
    has_gate: bool,
    up_function: Activation,
    hidden: Quantization,
}

struct Outcome {
    output: Vec<f32>,
    hidden: Vec<f32>,
    count: Vec<u8>,
}

impl Layer {
    fn neurons(&self) -> usize {
        self.up.len() / WIDTH
    }

    fn run(
        &self,
        function: Activation,
        selection: Selection,
        mask: Option<&[u8]>,
        ranges: &[ClusterRange],
    ) -> Outcome {
        let mut t = Trial::new((self.inputs.len() / WIDTH) as u32);
        let n = self.neurons();
        let input = t.input(&self.inputs);
        let gate = self.has_gate.then(|| t.weight(WIDTH, &self.gate));
        let up = t.weight(WIDTH, &self.up);
        let down = match self.layout {
            DownLayout::NeuronRows => t.weight(WIDTH, &self.down),
            DownLayout::OutputRows => {
                let transposed: Vec<f32> =
                    (0..WIDTH).flat_map(|c| (0..n).map(move |i| self.down[i * WIDTH + c])).collect();
                t.weight(n, &transposed)
            }
        };
        let selection = match mask {
            None => selection,
            Some(mask) => {
                let tensor = TensorType::matrix(DType::U8, t.list.token_capacity.into(), n as u64).unwrap();
                Selection::Mask(t.slot(SlotRole::Input, tensor, true, mask))
            }
        };
        let output = t.output(DType::F32, WIDTH as u64);
        let hidden = t.output(DType::F32, n as u64);
        let count = t.output(DType::I32, 1);
        let up_function = if self.has_gate { self.up_function } else { Activation::Identity };
        let ffn = Ffn {
            input,
            gate,
            up,
            down,
            gate_low: None,
            up_low: None,
            gate_bias: None,
            up_bias: None,
            output,
            hidden: Some(hidden),
            active_count: Some(count),
            down_layout: self.layout,
            function,
            up_function,
            selection,
            accumulate: false,
        };
        t.list.push("ffn", OperationKind::Ffn(ffn), Arithmetic { hidden: self.hidden, ..Arithmetic::F32 });
        let active = [ActiveRanges { operation: 0, ranges }];
        t.run_with(&active).unwrap();
        Outcome { output: t.floats(output), hidden: t.floats(hidden), count: t.bytes(count) }
    }

    fn all(&self) -> [ClusterRange; 1] {
        [ClusterRange::new(0, self.neurons() as u32)]
    }
}

fn layers() -> impl Strategy<Value = Layer> {
    let numbers = |n: usize| prop::collection::vec(-2f32..2.0, n);
    (1usize..4, 1usize..80).prop_flat_map(move |(tokens, neurons)| {
        (
            [tokens, neurons, neurons, neurons].map(|rows| numbers(rows * WIDTH)),
            prop::bool::ANY,
            prop::bool::ANY,
            prop::bool::ANY,
            prop::bool::ANY,
        )
            .prop_map(|([inputs, gate, up, down], by_neuron, has_gate, double, int8)| Layer {
                inputs,
                gate,
                up,
                down,
                layout: if by_neuron { DownLayout::NeuronRows } else { DownLayout::OutputRows },
                has_gate,
                up_function: if double { Activation::Relu } else { Activation::Identity },
                hidden: if int8 { Quantization::Int8Blocks } else { Quantization::None },
            })
    })
}

#[test]
fn formula() {
    let layer = Layer {
        inputs: vec![1.0, 2.0, 3.0],
        gate: vec![1.0, 0.0, 0.0, -1.0, 0.0, 0.0],
        up: vec![0.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        down: vec![1.0, 10.0, 100.0, 7.0, 7.0, 7.0],
        layout: DownLayout::NeuronRows,
        has_gate: true,
        up_function: Activation::Identity,
        hidden: Quantization::None,
    };
    let out = layer.run(Activation::Relu, Selection::All, None, &layer.all());
    assert_eq!((out.output, out.hidden), (vec![5.0, 50.0, 500.0], vec![5.0, 0.0]));
    assert_eq!(out.count, [1, 0, 0, 0]);
    let out = layer.run(Activation::Identity, Selection::Threshold(1.0), None, &layer.all());
    assert_eq!(out.output, [0.0, 0.0, 0.0]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Skipping what is zero changes nothing, bit for bit.
    #[test]
    fn gate_first_is_exact(layer in layers()) {
        let all = layer.run(Activation::Relu, Selection::All, None, &layer.all());
        let skipping = layer.run(Activation::Relu, Selection::GateFirst, None, &layer.all());
        prop_assert_eq!(&all.output, &skipping.output);
        prop_assert_eq!(all.hidden, skipping.hidden);
        prop_assert_eq!(all.count, skipping.count);
        let threshold = layer.run(Activation::Relu, Selection::Threshold(0.0), None, &layer.all());
        prop_assert_eq!(all.output, threshold.output);
    }

    /// Rows of neurons outside the ranges, or selected by no token, may hold NaN.
    #[test]
    fn unselected_neurons_are_not_read(layer in layers(), seed in prop::collection::vec(0u8..4, 240), split in 0u32..80) {
        let (tokens, neurons) = (layer.inputs.len() / WIDTH, layer.neurons());
        let mask: Vec<u8> = seed[..tokens * neurons].iter().map(|s| s / 2).collect();
        let split = split.min(neurons as u32 - 1);
        let ranges = [ClusterRange::new(split, neurons as u32)];
        let clean = layer.run(Activation::Silu, Selection::All, Some(&mask), &ranges);
        let mut poisoned = layer.clone();
        for i in 0..neurons {
            if i < split as usize || (0..tokens).all(|t| mask[t * neurons + i] == 0) {
                for rows in [&mut poisoned.gate, &mut poisoned.up, &mut poisoned.down] {
                    rows[i * WIDTH..(i + 1) * WIDTH].fill(f32::NAN);
                }
            }
        }
        let found = poisoned.run(Activation::Silu, Selection::All, Some(&mask), &ranges);
        prop_assert!(found.output.iter().all(|x| x.is_finite()));
        prop_assert_eq!(clean.output, found.output);
        prop_assert!((0..tokens).all(|t| (0..split as usize).all(|i| found.hidden[t * neurons + i] == 0.0)));
    }

    /// A token's result does not depend on its neighbours.
    #[test]
    fn neighbours_change_nothing(layer in layers()) {
        let all = layer.run(Activation::GeluErf, Selection::All, None, &layer.all());
        for token in 0..layer.inputs.len() / WIDTH {
            let alone = Layer { inputs: layer.inputs[token * WIDTH..][..WIDTH].to_vec(), ..layer.clone() };
            let one = alone.run(Activation::GeluErf, Selection::All, None, &layer.all());
            prop_assert_eq!(&all.output[token * WIDTH..][..WIDTH], &one.output[..]);
        }
    }
}

#[test]
fn no_neuron_gives_zero() {
    let layer = Layer {
        inputs: vec![1.0; WIDTH],
        gate: vec![f32::NAN; WIDTH],
        up: vec![f32::NAN; WIDTH],
        down: vec![f32::NAN; WIDTH],
        layout: DownLayout::OutputRows,
        has_gate: true,
        up_function: Activation::Relu,
        hidden: Quantization::Int8Blocks,
    };
    let out = layer.run(Activation::Relu, Selection::All, None, &[]);
    assert_eq!((out.output, out.hidden), (vec![0.0; WIDTH], vec![0.0]));
    let poisoned = layer.run(Activation::Relu, Selection::GateFirst, None, &layer.all());
    assert!(poisoned.output.iter().all(|x| x.is_nan()));
}
