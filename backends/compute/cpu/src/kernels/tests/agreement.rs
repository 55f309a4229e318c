//! Tiers against each other: which run here, which are refused and why, and that all give the same bits on every
//! architecture.

use engine_core::operation::Activation;

use super::{Random, Weights, products, tiers, weights};
use crate::kernels::attention::Head;
use crate::kernels::format::WeightType;
use crate::kernels::norm::Norm;
use crate::kernels::{Kernels, TIERS, select};

#[test]
fn tiers_are_chosen_by_name_and_refused_with_a_reason() {
    assert_eq!(select(Some("portable")).unwrap().0.name, "portable");
    let (best, reason) = select(None).unwrap();
    assert!(reason.contains(best.name));
    let error = select(Some("avx9")).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("portable") && error.contains("avx9"), "{error}");
}

#[test]
#[allow(clippy::print_stderr, reason = "says what the other tests of this module did not run")]
fn tiers_that_cannot_run_say_what_they_lack() {
    for tier in TIERS {
        let name = tier.kernels.name;
        match ((tier.missing)().as_slice(), select(Some(name))) {
            ([], chosen) => assert_eq!(chosen.unwrap().0.name, name),
            (missing, Ok(_)) => panic!("{name} was chosen without {missing:?}"),
            (missing, Err(error)) => {
                let error = error.to_string();
                assert!(missing.iter().all(|m| error.contains(m)), "{error}");
                eprintln!("skipped: tier {name}, for want of {}", missing.join(", "));
            }
        }
    }
}

/// FNV-1a over the bits of results.
fn digest(results: &[f32]) -> u64 {
    let bytes = results.iter().flat_map(|x| x.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Products of a type of weight, f32 or int8.
fn products_of(kernels: &Kernels, format: WeightType, int8: bool) -> Vec<f32> {
    let mut random = Random(format as u64);
    let n = weights::columns(format, 5, 3);
    let w = Weights::new(&mut random, format, 7, n);
    let x = random.vec(n * 5);
    products(kernels, &w, &x, 5, int8)
}

/// Results of everything else.
fn functions_of(kernels: &Kernels) -> Vec<f32> {
    let mut random = Random(99);
    let n = 83;
    let (x, w) = (random.vec(n), random.vec(n));
    let mut results = Vec::new();
    let mut out = vec![0.0f32; n];
    for centred in [false, true] {
        let job = Norm {
            centred,
            epsilon: 1e-5,
            n,
            x: x.as_ptr(),
            weight: w.as_ptr(),
            bias: x.as_ptr(),
            out: out.as_mut_ptr(),
        };
        // SAFETY: all sizes agree.
        unsafe { (kernels.norm)(&job) };
        results.extend_from_slice(&out);
    }
    for f in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
        // SAFETY: all sizes agree.
        unsafe { (kernels.activate)(f, x.as_ptr(), out.as_mut_ptr(), n) };
        results.extend_from_slice(&out);
    }
    let (positions, head_dim) = (19, 83);
    let cache: Vec<half::f16> = random.vec(positions * n).into_iter().map(half::f16::from_f32).collect();
    let mut scores = vec![0.0f32; positions];
    let job = Head {
        query: x.as_ptr(),
        head_dim,
        keys: cache.as_ptr().cast(),
        values: cache.as_ptr().cast(),
        stride: n,
        positions,
        scale: 0.3,
        soft_cap: 2.0,
        scores: scores.as_mut_ptr(),
        out: out.as_mut_ptr(),
    };
    // SAFETY: all sizes agree.
    unsafe { (kernels.attention)(&job) };
    results.extend_from_slice(&out);
    results
}

/// Digests that every tier has, but that i8mm sums int8 products in an order of its own.
const DIGESTS: &[(&str, u64)] = &[
    ("functions", 0xc40e_25f5_080d_50d5),
    ("F32", 0x08ad_87b0_2b65_ea02),
    ("F16", 0x7b5b_c941_27f5_4740),
    ("Q4_0", 0xcb5c_54f4_c7fb_e8ad),
    ("Q4_0 int8", 0x6599_ff95_14d8_a76b),
    ("Q4_1", 0x3fbe_0d67_8f5c_0c6a),
    ("Q4_1 int8", 0x2250_e6b0_467a_3df6),
    ("Q8_0", 0xe13c_43e5_e727_25a8),
    ("Q8_0 int8", 0xb6d1_a916_669d_56ed),
    ("Q4K", 0x3f8b_596d_dea1_640f),
    ("Q4K int8", 0x2a79_447f_54aa_8751),
    ("Q6K", 0x3a75_f40a_9dcb_5685),
    ("Q6K int8", 0x420a_26f3_e8bf_90a3),
    ("BF16", 0x3bb0_7866_4bdb_42f8),
    ("HighHalves", 0x0601_b86c_f5b9_8c1e),
    ("HighHalves int8", 0x8ec9_dc5a_ea43_d4e5),
    ("Planes", 0x555c_d50b_1e40_53d7),
    ("Planes int8", 0x5a86_8c63_6c24_1289),
];

#[test]
fn tiers_give_the_same_bits_on_every_architecture() {
    for kernels in tiers() {
        let mut got: Vec<(String, u64)> = vec![("functions".into(), digest(&functions_of(kernels)))];
        for format in super::weights::formats() {
            got.push((format!("{format:?}"), digest(&products_of(kernels, format, false))));
            if format.has_integer_dot() {
                got.push((format!("{format:?} int8"), digest(&products_of(kernels, format, true))));
            }
        }
        let want: Vec<(String, u64)> = DIGESTS.iter().map(|(name, hash)| ((*name).into(), *hash)).collect();
        for (got, want) in got.iter().zip(&want) {
            if !(kernels.name == "i8mm" && want.0.ends_with("int8")) {
                assert_eq!(got, want, "{}", kernels.name);
            }
        }
        assert_eq!(got.len(), want.len());
    }
}

#[test]
fn both_halves_of_planes_are_the_q8_0_row() {
    let mut random = Random(7);
    let (rows, n, tokens) = (9, 160, 5);
    let whole = Weights::new(&mut random, WeightType::Q8_0, rows, n);
    let row_bytes = n / 32 * 18;
    let mut planes = Weights {
        bytes: vec![0; rows * row_bytes],
        low: vec![0; rows * n / 2],
        stride: row_bytes,
        columns: n,
        format: WeightType::Planes,
        values: whole.values.clone(),
    };
    for (r, b) in (0..rows).flat_map(|r| (0..n / 32).map(move |b| (r, b))) {
        let block = &whole.bytes[r * whole.stride + b * 34..][..34];
        let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32() * 16.0;
        let high = &mut planes.bytes[r * row_bytes + b * 18..][..18];
        high[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
        let code = |e: usize| block[2 + e] ^ 0x80;
        for j in 0..16 {
            high[2 + j] = code(j) >> 4 | (code(j + 16) >> 4) << 4;
            planes.low[r * n / 2 + b * 16 + j] = code(j) & 15 | (code(j + 16) & 15) << 4;
        }
    }
    let x = random.vec(n * tokens);
    let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    for kernels in tiers() {
        for (tokens, int8) in [(1, false), (1, true), (tokens, false), (tokens, true)] {
            let want = products(kernels, &whole, &x, tokens, int8);
            let got = products(kernels, &planes, &x, tokens, int8);
            assert_eq!(bits(got), bits(want), "{}: {tokens} tokens, int8 {int8}", kernels.name);
        }
    }
}
