//! Block formats against the Python package gguf and ggml's quantisers (fixtures/make_block_formats.py).

use engine_core::DType;
use formats::quantise::{READABLE, WRITABLE, dequantise, quantise, quantise_rows};

fn fixture() -> serde_json::Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/block_formats.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn bytes(value: &serde_json::Value) -> Vec<u8> {
    let hex = value.as_str().unwrap().as_bytes();
    hex.as_chunks::<2>()
        .0
        .iter()
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// The values that the fixture's script encodes: 3 x 64 rows of 256.
fn values() -> Vec<f32> {
    let mut state = 1_u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 40
    };
    let mut out = Vec::new();
    for at in 0..3 * 64 * 256 {
        let total: u64 = (0..4).map(|_| draw()).sum();
        let x = (total as f64 - 33_554_432.0) / 33_554_432.0;
        out.push(match at / (64 * 256) {
            0 => x as f32,
            1 => (x * x * x) as f32,
            _ => (x / 4.0 + 0.25) as f32,
        });
    }
    out
}

#[test]
fn blocks_decode_to_the_same_bits() {
    let fixture = fixture();
    for &dtype in READABLE.iter().filter(|dtype| !matches!(dtype, DType::F32 | DType::F16 | DType::F64)) {
        let row = &fixture["decode"][dtype.name()];
        let wanted: Vec<u32> =
            bytes(&row["values"]).as_chunks::<4>().0.iter().map(|v| u32::from_le_bytes(*v)).collect();
        let mut out = vec![0.0; wanted.len()];
        dequantise(dtype, &bytes(&row["bytes"]), &mut out).unwrap();
        let found: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
        let zero = |bits: &u32| bits & 0x7fff_ffff == 0; // 0 and -0 count as equal
        let same = found.iter().zip(&wanted).all(|(a, b)| a == b || (zero(a) && zero(b)));
        assert!(same, "{dtype}: {found:x?} instead of {wanted:x?}");
    }
}

#[test]
fn encoders_are_as_good_as_the_formats_own() {
    let fixture = fixture();
    let values = values();
    for (at, wanted) in fixture["first_values"].as_array().unwrap().iter().enumerate() {
        assert_eq!(f64::from(values[at]), wanted.as_f64().unwrap(), "the formula is the script's");
    }
    for &dtype in WRITABLE.iter().filter(|dtype| **dtype != DType::F32) {
        let row = &fixture["encode"][dtype.name()];
        let encoded = quantise_rows(dtype, &values, 256, 2).unwrap();
        if !matches!(dtype, DType::Q4K | DType::Q6K) {
            assert_eq!(quantise(dtype, &values[..256]).unwrap(), bytes(&row["first_row"]), "{dtype}");
        }
        let mut back = vec![0.0; values.len()];
        dequantise(dtype, &encoded, &mut back).unwrap();
        for (part, wanted) in row["rms_error"].as_array().unwrap().iter().enumerate() {
            let range = part * 64 * 256..(part + 1) * 64 * 256;
            let squares = back[range.clone()].iter().zip(&values[range.clone()]);
            let sum: f64 = squares.map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
            let error = (sum / range.len() as f64).sqrt();
            let ratio = error / wanted.as_f64().unwrap();
            assert!(ratio <= 1.01, "{dtype} part {part}: error {error} is {ratio:.4} of ggml's");
        }
    }
}
