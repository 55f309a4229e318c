//! Each operation on numbers small enough to work out by hand.

use super::{Trial, f32_bytes};
use engine_core::backend::SequenceSpan;
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Experts, Gating, NormKind, OperationKind, Quantization, Rope,
    RopeScaling, RopeStyle, Selection, SlotId, SlotRole,
};
use engine_core::{DType, Error, TensorType};

fn close(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (a, b) in found.iter().zip(expected) {
        assert!((f64::from(*a) - b).abs() <= 1e-6 * (1.0 + b.abs()), "{found:?} is not {expected:?}");
    }
}

#[test]
fn embed_looks_rows_up() {
    let run = |ids: [i32; 2]| {
        let mut t = Trial::new(2);
        let tensor = TensorType::matrix(DType::I32, 2, 1).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let ids = t.slot(SlotRole::Input, tensor, true, &bytes);
        let table = t.weight(2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let output = t.output(DType::F32, 2);
        t.push(OperationKind::Embed { ids, table, output, scale: 0.5 });
        let result = t.run();
        (result, t.bytes(output), t.floats(output))
    };
    assert_eq!(run([2, 0]).2, [2.5, 3.0, 0.5, 1.0]);
    for wrong in [[0, 3], [0, -1]] {
        let (result, untouched, _) = run(wrong);
        let error = result.unwrap_err();
        assert!(matches!(&error, Error::Data { detail } if detail.contains("token 1")), "{error}");
        assert!(untouched.iter().all(|byte| *byte == 0xff));
    }
}

#[test]
fn norms_work_by_group() {
    for (norm, expected) in [
        (NormKind::Rms, [3.0 / 12.5f64.sqrt() * 2.0 + 1.0, 4.0 / 12.5f64.sqrt(), 1.0, 0.0]),
        (NormKind::Layer, [-0.5 / 0.25f64.sqrt() * 2.0 + 1.0, 0.5 / 0.25f64.sqrt(), 1.0, 0.0]),
    ] {
        let mut t = Trial::new(1);
        let input = t.input(&[3.0, 4.0, 0.0, 0.0]);
        let weight = t.weight(2, &[2.0, 1.0]);
        let bias = t.weight(2, &[1.0, 0.0]);
        let output = t.output(DType::F32, 4);
        let epsilon = 1e-12;
        t.push(OperationKind::Norm { norm, epsilon, input, weight, bias: Some(bias), output });
        t.run().unwrap();
        close(&t.floats(output), &expected);
    }
}

#[test]
fn linear_sums_rows() {
    let mut t = Trial::new(2);
    let input = t.input(&[1.0, 2.0, 3.0, -1.0, 0.0, 1.0]);
    let weight = t.weight(3, &[1.0, 1.0, 1.0, 2.0, 0.0, -1.0]);
    let bias = t.weight(2, &[0.5, -0.5]);
    let tensor = TensorType::matrix(DType::F32, 2, 2).unwrap();
    let output = t.slot(SlotRole::State, tensor, true, &f32_bytes(&[10.0, 20.0, 30.0, 40.0]));
    t.push(OperationKind::Linear { input, weight, bias: Some(bias), output, accumulate: true });
    t.run().unwrap();
    assert_eq!(t.floats(output), [16.5, 18.5, 30.5, 36.5]);
}

#[test]
fn stated_arithmetic_can_be_left_out() {
    let arithmetic = Arithmetic { input: Quantization::Int8Blocks, ..Arithmetic::F32 };
    for (option, expected) in [("stated", f64::from(1f32 / 127.0) * 127.0), ("true", 1.003)] {
        let mut t = Trial::with(1, crate::Options { arithmetic: option.into(), ..crate::Options::default() });
        let input = t.input(&[1.0, 0.003]);
        let weight = t.weight(2, &[1.0, 1.0]);
        let output = t.output(DType::F32, 1);
        let kind = OperationKind::Linear { input, weight, bias: None, output, accumulate: false };
        t.list.push("test", kind, arithmetic);
        t.run().unwrap();
        close(&t.floats(output), &[expected]);
    }
}

#[test]
fn quantised_and_strided_weights() {
    let mut t = Trial::new(1);
    let input = t.input(&[1.0; 32]);
    // Two rows of Q8_0, 40 bytes apart: scales 0.5 and 2, codes 1 and -3; garbage between them.
    let mut bytes = vec![0xffu8; 74];
    bytes[..2].copy_from_slice(&half::f16::from_f32(0.5).to_le_bytes());
    bytes[2..34].fill(1);
    bytes[40..42].copy_from_slice(&half::f16::from_f32(2.0).to_le_bytes());
    bytes[42..74].fill(-3i8 as u8);
    let tensor = TensorType::strided(DType::Q8_0, 2, 32, 40).unwrap();
    let weight = t.slot(SlotRole::Input, tensor, false, &bytes);
    let output = t.output(DType::F32, 2);
    t.push(OperationKind::Linear { input, weight, bias: None, output, accumulate: false });
    t.run().unwrap();
    assert_eq!(t.floats(output), [16.0, -192.0]);
}

#[test]
fn pointwise() {
    let mut t = Trial::new(2);
    let left = t.input(&[1.0, -2.0, 3.0, -4.0]);
    let row = t.weight(2, &[10.0, 100.0]);
    let [sum, product, square, relu] = [0; 4].map(|_| t.output(DType::F32, 2));
    t.push(OperationKind::Add { left, right: row, output: sum });
    t.push(OperationKind::Multiply { left, right: row, output: product });
    t.push(OperationKind::Multiply { left, right: left, output: square });
    t.push(OperationKind::Activate { function: Activation::Relu, input: left, output: relu });
    t.run().unwrap();
    assert_eq!(t.floats(sum), [11.0, 98.0, 13.0, 96.0]);
    assert_eq!(t.floats(product), [10.0, -200.0, 30.0, -400.0]);
    assert_eq!(t.floats(square), [1.0, 4.0, 9.0, 16.0]);
    assert_eq!(t.floats(relu), [1.0, 0.0, 3.0, 0.0]);
}

/// Runs rope on one token at position 3 whose head is 1, 2, 3, 4, 5 with four rotated elements.
fn rotated(style: RopeStyle, scaling: RopeScaling) -> Vec<f32> {
    let mut t = Trial::new(1);
    t.sequences[0].past = 3;
    let input = t.input(&[1.0, 2.0, 3.0, 4.0, 5.0]);
    let factors = t.weight(2, &[1.0, 2.0]);
    let output = t.output(DType::F32, 5);
    let rope = Rope {
        input,
        output,
        factors: Some(factors),
        style,
        head_dim: 5,
        rotary_dim: 4,
        base: 100.0,
        scaling,
    };
    t.push(OperationKind::Rope(rope));
    t.run().unwrap();
    t.floats(output)
}

#[test]
fn rope_rotates_pairs() {
    // Angles 3 * 1 and 3 * 100^(-1/2) / 2.
    let (a, b) = (3.0f64, 0.15f64);
    let turn = |x: f64, y: f64, by: f64| (x * by.cos() - y * by.sin(), x * by.sin() + y * by.cos());
    let ((p, q), (r, s)) = (turn(1.0, 2.0, a), turn(3.0, 4.0, b));
    close(&rotated(RopeStyle::Interleaved, RopeScaling::None), &[p, q, r, s, 5.0]);
    let ((p, q), (r, s)) = (turn(1.0, 3.0, a), turn(2.0, 4.0, b));
    close(&rotated(RopeStyle::Halves, RopeScaling::None), &[p, r, q, s, 5.0]);
    let ((p, q), (r, s)) = (turn(1.0, 2.0, a / 4.0), turn(3.0, 4.0, b / 4.0));
    close(&rotated(RopeStyle::Interleaved, RopeScaling::Linear { factor: 4.0 }), &[p, q, r, s, 5.0]);
}

#[test]
fn yarn_keeps_fast_pairs_and_stretches_slow_ones() {
    // dim(beta) = 4 ln(1000 / (2 pi beta)) / (2 ln 100): 0.69 for 32, 2.2 for 1; so low = 0, high = 3.
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 1000,
        attention_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    let magnitude = 1.0 + 0.1 * 4f64.ln();
    let slow = 3.0 * 0.05 * (1.0 / 3.0 / 4.0 + 2.0 / 3.0);
    let turn = |x: f64, y: f64, by: f64| {
        (magnitude * (x * by.cos() - y * by.sin()), magnitude * (x * by.sin() + y * by.cos()))
    };
    let ((p, q), (r, s)) = (turn(1.0, 2.0, 3.0), turn(3.0, 4.0, slow));
    close(&rotated(RopeStyle::Interleaved, scaling), &[p, q, r, s, 5.0]);
}

/// Two query heads over one KV head of two elements; keys `(position, 0)`, values `(1, position)`.
fn attend(window: Option<u32>, soft_cap: Option<f32>) -> Vec<f32> {
    let mut t = Trial::new(3);
    t.sequences = vec![
        SequenceSpan { first_token: 0, tokens: 2, past: 0, cache_base: 0 },
        SequenceSpan { first_token: 2, tokens: 1, past: 0, cache_base: 2 },
    ];
    let key = t.input(&[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    let value = t.input(&[1.0, 0.0, 1.0, 1.0, 7.0, 8.0]);
    let query = t.input(&[2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]);
    let cache = t.cache(3, 4);
    let output = t.output(DType::F32, 4);
    let (kv_heads, head_dim) = (1, 2);
    t.push(OperationKind::KvAppend { key, value, cache, kv_heads, head_dim });
    t.push(OperationKind::Attention {
        query,
        cache,
        output,
        heads: 2,
        kv_heads,
        head_dim,
        scale: 0.5,
        window,
        soft_cap,
    });
    t.run().unwrap();
    t.floats(output)
}

#[test]
fn attention_weighs_positions() {
    let e = 1f64.exp();
    let expected = [1.0, 0.0, 1.0, 0.0, 1.0, e / (1.0 + e), 1.0, 0.5, 7.0, 8.0, 7.0, 8.0];
    close(&attend(None, None), &expected);
    close(&attend(Some(2), None), &expected);
    close(&attend(Some(1), None)[4..8], &[1.0, 1.0, 1.0, 1.0]);
    let capped = (0.5 * 2f64.tanh()).exp();
    close(&attend(None, Some(0.5))[4..6], &[1.0, capped / (1.0 + capped)]);
}

#[test]
fn kv_round_trip() {
    let mut t = Trial::new(2);
    t.sequences[0].cache_base = 1;
    let key = t.input(&[1.0, 2.0, 3.0, 4.0]);
    // 1 + 2^-11 lies half way between two f16 values and goes to the even one, 1.
    let value = t.input(&[5.0, 1.000_488_3, 7.0, 1e9]);
    let [cache, other] = [0; 2].map(|_| t.cache(3, 4));
    let canonical = TensorType::matrix(DType::F16, 2, 2).unwrap();
    let [k, v] = [0; 2].map(|_| t.slot(SlotRole::State, canonical, false, &[0; 8]));
    let (kv_heads, head_dim) = (1, 2);
    t.push(OperationKind::KvAppend { key, value, cache, kv_heads, head_dim });
    t.push(OperationKind::KvExport { cache, key: k, value: v, kv_heads, head_dim });
    t.push(OperationKind::KvImport { key: k, value: v, cache: other, kv_heads, head_dim });
    t.run().unwrap();
    let halves = |t: &Trial, slot: SlotId| -> Vec<f32> {
        let bytes = t.bytes(slot);
        bytes.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    };
    assert_eq!(halves(&t, k), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(halves(&t, v), [5.0, 1.0, 7.0, f32::INFINITY]);
    assert_eq!(t.bytes(cache), t.bytes(other));
    assert_eq!(halves(&t, cache)[..4], [0.0; 4]);
}

#[test]
fn predictor_marks_neurons() {
    let mut t = Trial::new(1);
    let input = t.input(&[1.0, -1.0]);
    let fc1 = t.weight(2, &[1.0, 0.0, 0.0, 1.0]);
    let fc2 = t.weight(2, &[1.0, 5.0, 0.5, 5.0, -1.0, 0.0]);
    let mask = t.output(DType::U8, 3);
    t.push(OperationKind::Predict { input, fc1, fc2, mask, threshold: 0.75 });
    t.run().unwrap();
    assert_eq!(t.bytes(mask), [1, 0, 0]);
}

fn ids(t: &Trial, slot: SlotId) -> Vec<i32> {
    t.bytes(slot).chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn routes_take_the_best_in_ascending_order() {
    let e = std::f64::consts::E;
    for (gating, normalise, expected) in [
        (Gating::Softmax, false, [2.0 / (e + 2.0 / e + 2.0), 2.0 * e / (e + 2.0 / e + 2.0)]),
        (Gating::Softmax, true, [2.0 / (1.0 + e), 2.0 * e / (1.0 + e)]),
        (Gating::Sigmoid, false, [1.0, 2.0 / (1.0 + 1.0 / e)]),
    ] {
        let mut t = Trial::new(1);
        // Of the two zeros the first is taken.
        let scores = t.input(&[-1.0, 0.0, 0.0, 1.0, -1.0]);
        let (chosen, weights) = (t.output(DType::I32, 2), t.output(DType::F32, 2));
        t.push(OperationKind::Route { scores, chosen, weights, gating, normalise, scale: 2.0 });
        t.run().unwrap();
        assert_eq!(ids(&t, chosen), [1, 3]);
        close(&t.floats(weights), &expected);
    }
}

#[test]
fn experts_are_summed_by_weight() {
    let run = |chosen: [i32; 2], down_layout, rows: &[f32]| {
        let mut t = Trial::new(1);
        let input = t.input(&[1.0, 2.0]);
        let bytes: Vec<u8> = chosen.iter().flat_map(|id| id.to_le_bytes()).collect();
        let tensor = TensorType::matrix(DType::I32, 1, 2).unwrap();
        let chosen = t.slot(SlotRole::Input, tensor, true, &bytes);
        let weights = t.input(&[0.5, 0.25]);
        // Three experts of two neurons: gates 1 and -1, 2 and 1, then not finite.
        let gate = t.weight(2, &[1.0, 0.0, -1.0, 0.0, 0.0, 1.0, 1.0, 0.0, f32::NAN, 0.0, 0.0, f32::NAN]);
        let up = t.weight(2, &[1.0, 1.0, 5.0, 5.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        let down = t.weight(2, rows);
        let (output, count) = (t.output(DType::F32, 2), t.output(DType::I32, 1));
        t.push(OperationKind::Experts(Experts {
            input,
            chosen,
            weights,
            gate: Some(gate),
            up,
            down,
            output,
            active_count: Some(count),
            experts: 3,
            down_layout,
            function: Activation::Relu,
            up_function: Activation::Identity,
            selection: Selection::GateFirst,
            accumulate: false,
        }));
        let result = t.run();
        (result, ids(&t, count), t.floats(output))
    };
    // h is 3 and nothing for the first, 4 and 1 for the second; down is (1, 2), (3, 4), (5, 6), (7, 8) by neuron.
    let expected = [0.5 * 3.0 + 0.25 * (20.0 + 7.0), 0.5 * 6.0 + 0.25 * (24.0 + 8.0)];
    let by_neuron = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.0, 0.0, 0.0, 0.0];
    let by_output = [1.0, 3.0, 2.0, 4.0, 5.0, 7.0, 6.0, 8.0, 0.0, 0.0, 0.0, 0.0];
    for (layout, rows) in [(DownLayout::NeuronRows, by_neuron), (DownLayout::OutputRows, by_output)] {
        let (result, count, output) = run([0, 1], layout, &rows);
        result.unwrap();
        assert_eq!(count, [3]);
        close(&output, &expected);
    }
    for wrong in [[1, 0], [1, 1], [0, 3], [-1, 0]] {
        let error = run(wrong, DownLayout::NeuronRows, &by_neuron).0.unwrap_err();
        assert!(matches!(&error, Error::Data { detail } if detail.contains("token 0")), "{error}");
    }
}
