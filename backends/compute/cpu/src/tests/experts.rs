//! Mixtures of experts: the same bits alone and in a batch, for any number of threads, and the sum that they should be.

use super::*;

const EXPERTS: usize = 5;
const NEURONS: usize = 96;
const WIDTH: usize = 64;

struct Mixture {
    dtype: DType,
    layout: DownLayout,
    selection: Selection,
    int8: bool,
}

/// Input rows, and the experts and weights of each.
struct Tokens {
    input: Vec<f32>,
    chosen: Vec<i32>,
    weights: Vec<f32>,
}

impl Tokens {
    fn new(count: usize) -> Tokens {
        let mut random = Random(11);
        let pairs = [[0, 3], [1, 3], [3, 4], [0, 1], [3, 4], [2, 3], [0, 4]];
        Tokens {
            input: (0..count * WIDTH).map(|_| random.f32()).collect(),
            chosen: (0..count).flat_map(|t| pairs[t % pairs.len()]).collect(),
            weights: (0..count * 2).map(|_| random.f32().abs()).collect(),
        }
    }

    fn one(&self, t: usize) -> Tokens {
        Tokens {
            input: self.input[t * WIDTH..(t + 1) * WIDTH].to_vec(),
            chosen: self.chosen[2 * t..2 * t + 2].to_vec(),
            weights: self.weights[2 * t..2 * t + 2].to_vec(),
        }
    }

    fn count(&self) -> usize {
        self.chosen.len() / 2
    }
}

/// Gate, up and down of all experts.
fn rows(what: &Mixture) -> [Vec<u8>; 3] {
    let mut random = Random(7);
    let gate = random.rows(what.dtype, EXPERTS * NEURONS, WIDTH);
    let up = random.rows(what.dtype, EXPERTS * NEURONS, WIDTH);
    let down = match what.layout {
        DownLayout::NeuronRows => random.rows(what.dtype, EXPERTS * NEURONS, WIDTH),
        DownLayout::OutputRows => random.rows(what.dtype, EXPERTS * WIDTH, NEURONS),
    };
    [gate, up, down]
}

fn down_shape(layout: DownLayout) -> (usize, usize) {
    if layout == DownLayout::NeuronRows { (NEURONS, WIDTH) } else { (WIDTH, NEURONS) }
}

fn arithmetic(what: &Mixture) -> Arithmetic {
    if what.int8 { Arithmetic::INT8 } else { Arithmetic::F32 }
}

/// Outputs, then the counts of active neurons.
fn mixture(backend: &dyn ComputeBackend, what: &Mixture, tokens: &Tokens) -> Result<(Vec<f32>, Vec<u32>)> {
    let count = tokens.count();
    let mut rig = Rig::new(backend, count as u32 + 1);
    let [gate, up, down] = rows(what);
    let (down_rows, down_columns) = down_shape(what.layout);
    let gate = rig.constant("gate", what.dtype, EXPERTS * NEURONS, WIDTH, &gate);
    let up = rig.constant("up", what.dtype, EXPERTS * NEURONS, WIDTH, &up);
    let down = rig.constant("down", what.dtype, EXPERTS * down_rows, down_columns, &down);
    let input = rig.per_token("input", SlotRole::Input, DType::F32, WIDTH);
    let chosen = rig.per_token("chosen", SlotRole::Input, DType::I32, 2);
    let weights = rig.per_token("weights", SlotRole::Input, DType::F32, 2);
    let output = rig.per_token("output", SlotRole::Output, DType::F32, WIDTH);
    let active = rig.per_token("active", SlotRole::Output, DType::I32, 1);
    rig.set(input, &tokens.input);
    rig.set(chosen, &tokens.chosen);
    rig.set(weights, &tokens.weights);
    let op = Experts {
        input,
        chosen,
        weights,
        gate: Some(gate),
        up,
        down,
        output,
        active_count: Some(active),
        experts: EXPERTS as u32,
        down_layout: what.layout,
        function: Activation::Relu,
        up_function: Activation::Identity,
        selection: what.selection,
        accumulate: false,
    };
    rig.list.push("experts", OperationKind::Experts(op), arithmetic(what));
    rig.run(count as u32, 0, &[])?;
    let counts = rig.get(active, count).into_iter().map(f32::to_bits).collect();
    Ok((rig.get(output, count * WIDTH), counts))
}

/// One expert as a layer of its own.
fn expert(backend: &dyn ComputeBackend, what: &Mixture, index: usize, input: &[f32]) -> Vec<f32> {
    let mut rig = Rig::new(backend, 1);
    let part =
        |bytes: &[u8]| bytes[bytes.len() / EXPERTS * index..bytes.len() / EXPERTS * (index + 1)].to_vec();
    let [gate, up, down] = rows(what).map(|bytes| part(&bytes));
    let (down_rows, down_columns) = down_shape(what.layout);
    let ffn = Ffn {
        gate: Some(rig.constant("gate", what.dtype, NEURONS, WIDTH, &gate)),
        up: rig.constant("up", what.dtype, NEURONS, WIDTH, &up),
        down: rig.constant("down", what.dtype, down_rows, down_columns, &down),
        input: rig.per_token("input", SlotRole::Input, DType::F32, WIDTH),
        output: rig.per_token("output", SlotRole::Output, DType::F32, WIDTH),
        gate_low: None,
        up_low: None,
        gate_bias: None,
        up_bias: None,
        hidden: None,
        active_count: None,
        down_layout: what.layout,
        function: Activation::Relu,
        up_function: Activation::Identity,
        selection: what.selection,
        accumulate: false,
    };
    let (from, to) = (ffn.input, ffn.output);
    rig.set(from, input);
    rig.list.push("ffn", OperationKind::Ffn(ffn), arithmetic(what));
    rig.run(1, 0, &[]).unwrap();
    rig.get(to, WIDTH)
}

#[test]
fn experts_give_the_same_bits_alone_and_in_a_batch_and_the_weighted_sum() {
    let (one, three) = (open("threads = 1"), open("threads = 3"));
    for dtype in [DType::F32, DType::F16, DType::Q8_0] {
        for layout in [DownLayout::OutputRows, DownLayout::NeuronRows] {
            for selection in [Selection::All, Selection::GateFirst, Selection::Threshold(0.3)] {
                for int8 in [false, true] {
                    let what = Mixture { dtype, layout, selection, int8 };
                    let name = format!("{dtype} {layout:?} {selection:?} int8 {int8}");
                    let tokens = Tokens::new(7);
                    let (batch, counts) = mixture(&*one, &what, &tokens).unwrap();
                    let (threads, _) = mixture(&*three, &what, &tokens).unwrap();
                    assert!(batch.iter().zip(&threads).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
                    for t in 0..tokens.count() {
                        let alone = tokens.one(t);
                        let (output, count) = mixture(&*three, &what, &alone).unwrap();
                        let row = &batch[t * WIDTH..(t + 1) * WIDTH];
                        assert!(row.iter().zip(&output).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
                        assert_eq!(count[0], counts[t], "{name}");
                        let mut sum = vec![0.0f32; WIDTH];
                        for (index, weight) in alone.chosen.iter().zip(&alone.weights) {
                            let part = expert(&*one, &what, *index as usize, &alone.input);
                            sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += weight * x);
                        }
                        assert!(row.iter().zip(&sum).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_experts_fail_the_submission() {
    let backend = open("threads = 2");
    let what =
        Mixture { dtype: DType::F32, layout: DownLayout::NeuronRows, selection: Selection::All, int8: false };
    for wrong in [[3, 3], [1, 0], [0, 5], [-1, 2]] {
        let mut tokens = Tokens::new(2);
        tokens.chosen[2..].copy_from_slice(&wrong);
        let error = mixture(&*backend, &what, &tokens).unwrap_err();
        assert!(matches!(&error, Error::Data { detail } if detail.contains("token 1")), "{error}");
    }
    assert!(mixture(&*backend, &what, &Tokens::new(2)).is_ok());
}

#[test]
fn routes_are_what_the_formula_says() {
    let backend = open("threads = 2");
    let mut random = Random(3);
    for (gating, normalise) in [(Gating::Softmax, true), (Gating::Softmax, false), (Gating::Sigmoid, true)] {
        let (tokens, experts, k) = (9usize, 16usize, 4usize);
        let mut rig = Rig::new(&*backend, tokens as u32);
        let scores = rig.per_token("scores", SlotRole::Input, DType::F32, experts);
        let chosen = rig.per_token("chosen", SlotRole::Output, DType::I32, k);
        let weights = rig.per_token("weights", SlotRole::Output, DType::F32, k);
        let values: Vec<f32> = (0..tokens * experts).map(|_| (random.f32() * 8.0).round()).collect();
        rig.set(scores, &values);
        let kind = OperationKind::Route { scores, chosen, weights, gating, normalise, scale: 1.5 };
        rig.list.push("route", kind, Arithmetic::F32);
        rig.run(tokens as u32, 0, &[]).unwrap();
        let (ids, shares) = (rig.get(chosen, tokens * k), rig.get(weights, tokens * k));
        for t in 0..tokens {
            let row = &values[t * experts..(t + 1) * experts];
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
            order.truncate(k);
            order.sort_unstable();
            let found: Vec<usize> = ids[t * k..(t + 1) * k].iter().map(|id| id.to_bits() as usize).collect();
            assert_eq!(found, order);
            let all: f64 = row.iter().map(|s| f64::from(*s).exp()).sum();
            let share = |e: &usize| match gating {
                Gating::Softmax => f64::from(row[*e]).exp() / all,
                _ => 1.0 / (1.0 + (-f64::from(row[*e])).exp()),
            };
            let sum: f64 = if normalise { order.iter().map(share).sum() } else { 1.0 };
            for (e, found) in order.iter().zip(&shares[t * k..]) {
                let want = 1.5 * share(e) / sum;
                assert!((f64::from(*found) - want).abs() <= 1e-6 * want, "{found} {want}");
            }
        }
    }
}
