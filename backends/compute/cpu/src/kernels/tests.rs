//! Every tier against naive f64 arithmetic, and the promise that batch, position and chunk change no bits.
//!
//! `PROPTEST_CASES` sets the number of cases, for slow emulators.

mod agreement;
mod weights;

use engine_core::operation::Activation;
use proptest::prelude::*;

use super::attention::Head;
use super::axpy::{Axpy, AxpyTokens};
use super::masked::Masked;
use super::matmul::{Input, Matmul, Rows, Tile};
use super::norm::Norm;
use super::{Kernels, TIERS};
use weights::Weights;

/// A small generator, so that every failure can be repeated from its seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    /// In -1..1.
    fn f32(&mut self) -> f32 {
        (self.next() as f64 / f64::from(1u32 << 30) - 1.0) as f32
    }
    fn vec(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.f32()).collect()
    }
}

fn tiers() -> impl Iterator<Item = &'static Kernels> {
    TIERS.iter().filter(|t| (t.missing)().is_empty()).map(|t| t.kernels)
}

fn cases() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|v| v.parse().ok()).unwrap_or(48);
    ProptestConfig { cases, ..ProptestConfig::default() }
}

struct Blocks {
    codes: Vec<i8>,
    scales: Vec<f32>,
}

fn quantise(kernels: &Kernels, x: &[f32]) -> Blocks {
    let padded = x.len().next_multiple_of(32);
    let mut blocks = Blocks { codes: vec![1; padded], scales: vec![1.0; padded / 32] };
    // SAFETY: sized as the kernel says.
    unsafe { (kernels.quantise)(x.as_ptr(), x.len(), blocks.codes.as_mut_ptr(), blocks.scales.as_mut_ptr()) };
    blocks
}

fn close(got: f32, want: f64, scale: f64, what: &str) {
    assert!(
        (f64::from(got) - want).abs() <= 2e-6 * scale.max(1e-3),
        "{what}: {got} is not {want} (scale {scale})"
    );
}

/// Products of all rows with `tokens` tokens; also with one token at a time, which must agree bit for bit.
fn products(kernels: &Kernels, w: &Weights, x: &[f32], tokens: usize, int8: bool) -> Vec<f32> {
    let (n, rows) = (w.columns, w.values.len());
    let quantised: Vec<Blocks> = x.chunks(n).map(|x| quantise(kernels, x)).collect();
    let codes: Vec<i8> = quantised.iter().flat_map(|b| b.codes.clone()).collect();
    let scales: Vec<f32> = quantised.iter().flat_map(|b| b.scales.clone()).collect();
    let mut tile = Tile::default();
    let mut run = |first: usize, count: usize, rows_of: Rows<'_>, out: &mut [f32]| {
        let input = if int8 {
            let codes = codes[first * n..].as_ptr();
            Input::Int8 { codes, scales: scales[first * n / 32..].as_ptr(), stride: n }
        } else {
            Input::F32 { data: x[first * n..].as_ptr(), stride: n }
        };
        let job = Matmul {
            weight: w.matrix(),
            rows: rows_of,
            input,
            tokens: count,
            out: out.as_mut_ptr(),
            out_stride: rows,
            bias: std::ptr::null(),
            accumulate: false,
        };
        // SAFETY: all sizes agree.
        unsafe { (kernels.matmul)(&job, &mut tile) };
    };
    let mut batch = vec![f32::NAN; rows * tokens];
    run(0, tokens, Rows::Range(0, rows), &mut batch);
    let mut single = vec![f32::NAN; rows * tokens];
    for t in 0..tokens {
        run(t, 1, Rows::Range(0, rows), &mut single[t * rows..(t + 1) * rows]);
    }
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(
        bits(&batch),
        bits(&single),
        "{} {:?}: a batch of {tokens} changed bits",
        kernels.name,
        w.format
    );
    // Any split of the rows, and any order of a list, is the same again.
    let list: Vec<u32> = (0..rows as u32).rev().collect();
    let mut split = vec![f32::NAN; rows * tokens];
    run(0, tokens, Rows::Range(0, rows / 3), &mut split);
    run(0, tokens, Rows::List(&list[..rows - rows / 3]), &mut split);
    assert_eq!(bits(&batch), bits(&split), "{} {:?}: a split changed bits", kernels.name, w.format);
    batch
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn products_agree_with_f64_and_with_themselves(
        seed in any::<u64>(), rows in 1usize..60, blocks in 1usize..7, odd in 0usize..32, tokens in 1usize..11,
    ) {
        let mut random = Random(seed);
        for kernels in tiers() {
            for format in weights::formats() {
                let n = weights::columns(format, blocks, odd);
                let w = Weights::new(&mut random, format, rows, n);
                let x = random.vec(n * tokens);
                let got = products(kernels, &w, &x, tokens, false);
                for t in 0..tokens {
                    for (r, row) in w.values.iter().enumerate() {
                        let (want, scale) = weights::dot(row, |i| f64::from(x[t * n + i]));
                        close(got[t * rows + r], want, scale, "f32 product");
                    }
                }
                if format.has_integer_dot() {
                    let got = products(kernels, &w, &x, tokens, true);
                    for t in 0..tokens {
                        let b = quantise(kernels, &x[t * n..(t + 1) * n]);
                        for (r, row) in w.values.iter().enumerate() {
                            let (want, scale) =
                                weights::dot(row, |i| f64::from(b.scales[i / 32]) * f64::from(b.codes[i]));
                            close(got[t * rows + r], want, scale, "int8 product");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn blocks_follow_the_stated_rule(seed in any::<u64>(), n in 1usize..100, exponent in -44i32..38) {
        let mut random = Random(seed);
        let x: Vec<f32> = random.vec(n).iter().map(|x| x * 10f32.powi(exponent)).collect();
        for kernels in tiers() {
            let got = quantise(kernels, &x);
            for (b, block) in x.chunks(32).enumerate() {
                let amax = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let inverse = 127.0 / amax;
                prop_assert_eq!(got.scales[b], amax / 127.0);
                for i in 0..32 {
                    let x = block.get(i).copied().unwrap_or(0.0);
                    let want = if amax > 0.0 { ((x * inverse).round_ties_even() as i32).clamp(-127, 127) } else { 0 };
                    prop_assert_eq!(i32::from(got.codes[b * 32 + i]), want);
                }
            }
        }
    }

    #[test]
    fn axpy_and_masked_products_agree_with_dense(
        seed in any::<u64>(), neurons in 1usize..80, blocks in 1usize..5, odd in 0usize..32, tokens in 1usize..6,
    ) {
        let mut random = Random(seed);
        for kernels in tiers() {
            for format in weights::formats() {
                let columns = weights::columns(format, blocks, odd);
                let w = Weights::new(&mut random, format, neurons, columns);
                let mut h = random.vec(neurons * tokens);
                let active: Vec<u32> = (0..neurons as u32).filter(|_| random.next().is_multiple_of(3)).collect();
                for (i, h) in h.iter_mut().enumerate() {
                    if !active.contains(&((i % neurons) as u32)) {
                        *h = 0.0;
                    }
                }
                let all: Vec<u32> = (0..neurons as u32).collect();
                let start = random.vec(columns * tokens);
                let (mut sparse, mut dense) = (start.clone(), start.clone());
                for t in 0..tokens {
                    let job = Axpy {
                        weight: w.matrix(), neurons: &active, hidden: h[t * neurons..].as_ptr(),
                        columns: (0, columns), out: sparse[t * columns..].as_mut_ptr(),
                    };
                    // SAFETY: all sizes agree.
                    unsafe { (kernels.axpy)(&job) };
                }
                let half = (columns / 2) / 32 * 32;
                for part in [(0, half), (half, columns)] {
                    let first = Axpy {
                        weight: w.matrix(), neurons: &all, hidden: h.as_ptr(), columns: part, out: dense.as_mut_ptr(),
                    };
                    let job = AxpyTokens { first, tokens, hidden_stride: neurons, out_stride: columns };
                    // SAFETY: all sizes agree.
                    unsafe { (kernels.axpy_tokens)(&job, &mut Tile::default()) };
                }
                // -0 equals +0 here.
                prop_assert_eq!(&sparse, &dense);
                for t in 0..tokens {
                    for c in 0..columns {
                        let terms = (0..neurons).map(|n| w.values[n][c].0 * f64::from(h[t * neurons + n]));
                        let (want, scale) = terms.fold((f64::from(start[t * columns + c]), 1.0), |(a, b), x| (a + x, b + x.abs()));
                        close(sparse[t * columns + c], want, scale, "axpy");
                    }
                }
            }
        }
    }

    #[test]
    fn masked_products_skip_what_takes_no_part(seed in any::<u64>(), rows in 1usize..20, blocks in 1usize..6, odd in 0usize..32) {
        let mut random = Random(seed);
        for kernels in tiers() {
            for format in weights::formats() {
                let n = weights::columns(format, blocks, odd);
                let mut w = Weights::new(&mut random, format, rows, n);
                let keep: Vec<u32> = (0..n).map(|_| if random.next().is_multiple_of(5) { u32::MAX } else { 0 }).collect();
                let mut x = random.vec(n);
                for (x, keep) in x.iter_mut().zip(&keep) {
                    if *keep == 0 {
                        *x = 0.0;
                    }
                }
                let dense = products(kernels, &w, &x, 1, false);
                let used: Vec<u32> = (0..n.div_ceil(32) as u32)
                    .filter(|b| keep[*b as usize * 32..].iter().take(32).any(|k| *k != 0))
                    .collect();
                // What takes no part is poisoned.
                for r in 0..rows {
                    for (i, keep) in keep.iter().enumerate() {
                        let at = r * w.stride;
                        let elements = format.dtype().block_elements() as usize;
                        let size = format.dtype().block_bytes() as usize;
                        let unused = |b: usize| !used.contains(&(b as u32));
                        let whole = i / elements * elements / 32..(i / elements + 1) * elements / 32;
                        if if elements == 1 { *keep == 0 } else { whole.clone().all(unused) } {
                            w.bytes[at + i / elements * size..][..size].fill(0xff);
                        }
                    }
                }
                let mut out = vec![0.0f32; rows];
                let input = Input::F32 { data: x.as_ptr(), stride: n };
                let job = Masked {
                    weight: w.matrix(), rows: (0, rows), input, blocks: &used, keep: keep.as_ptr(),
                    out: out.as_mut_ptr(), accumulate: false,
                };
                // SAFETY: all sizes agree.
                unsafe { (kernels.masked)(&job) };
                prop_assert_eq!(&out, &dense);
            }
        }
    }

    #[test]
    fn norms_agree_with_f64(seed in any::<u64>(), n in 1usize..200, centred in any::<bool>(), bias in any::<bool>()) {
        let mut random = Random(seed);
        let (x, w, b) = (random.vec(n), random.vec(n), random.vec(n));
        for kernels in tiers() {
            let mut out = vec![0.0f32; n];
            let job = Norm {
                centred, epsilon: 1e-5, n, x: x.as_ptr(), weight: w.as_ptr(),
                bias: if bias { b.as_ptr() } else { std::ptr::null() }, out: out.as_mut_ptr(),
            };
            // SAFETY: all sizes agree.
            unsafe { (kernels.norm)(&job) };
            let mean = if centred { x.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64 } else { 0.0 };
            let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n as f64;
            for i in 0..n {
                let want = (f64::from(x[i]) - mean) / (variance + 1e-5).sqrt() * f64::from(w[i])
                    + if bias { f64::from(b[i]) } else { 0.0 };
                // Centring cancels, and a small variance enlarges what that leaves.
                close(out[i], want, 2.0 / (variance + 1e-5).sqrt() + want.abs(), "norm");
            }
        }
    }

    #[test]
    fn attention_agrees_with_f64(
        seed in any::<u64>(), positions in 1usize..40, head_dim in 1usize..100, capped in any::<bool>(),
    ) {
        let mut random = Random(seed);
        let stride = head_dim + 3;
        let f16 = |random: &mut Random| (0..positions * stride)
            .map(|_| half::f16::from_f32(random.f32())).collect::<Vec<_>>();
        let (k, v) = (f16(&mut random), f16(&mut random));
        let q = random.vec(head_dim);
        for kernels in tiers() {
            let mut scores = vec![0.0f32; positions];
            let mut out = vec![0.0f32; head_dim];
            let job = Head {
                query: q.as_ptr(), head_dim, keys: k.as_ptr().cast(), values: v.as_ptr().cast(), stride, positions,
                scale: 0.7, soft_cap: if capped { 1.5 } else { 0.0 }, scores: scores.as_mut_ptr(), out: out.as_mut_ptr(),
            };
            // SAFETY: all sizes agree.
            unsafe { (kernels.attention)(&job) };
            let score = |p: usize| {
                let s = 0.7 * (0..head_dim).map(|d| f64::from(q[d]) * k[p * stride + d].to_f64()).sum::<f64>();
                if capped { 1.5 * (s / 1.5).tanh() } else { s }
            };
            let most = (0..positions).map(score).fold(f64::MIN, f64::max);
            let weights: Vec<f64> = (0..positions).map(|p| (score(p) - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let want = (0..positions).map(|p| weights[p] / sum * v[p * stride + d].to_f64()).sum::<f64>();
                close(out[d], want, 4.0, "attention");
            }
        }
    }

    #[test]
    fn functions_agree_with_f64(seed in any::<u64>(), n in 1usize..40, range in 0.1f32..30.0) {
        let mut random = Random(seed);
        let x: Vec<f32> = random.vec(n).iter().map(|x| x * range).collect();
        for kernels in tiers() {
            for f in [
                Activation::Identity, Activation::Relu, Activation::ReluSquared, Activation::Silu,
                Activation::GeluTanh, Activation::GeluErf,
            ] {
                let mut out = vec![0.0f32; n];
                // SAFETY: all sizes agree.
                unsafe { (kernels.activate)(f, x.as_ptr(), out.as_mut_ptr(), n) };
                for i in 0..n {
                    let v = f64::from(x[i]);
                    let want = match f {
                        Activation::Relu => v.max(0.0),
                        Activation::ReluSquared => v.max(0.0).powi(2),
                        Activation::Silu => v / (1.0 + (-v).exp()),
                        Activation::GeluTanh => {
                            v / 2.0 * (1.0 + ((2.0 / core::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3))).tanh())
                        }
                        Activation::GeluErf => v * normal_share(v),
                        _ => v,
                    };
                    close(out[i], want, want.abs().max(0.2), f.name());
                    // The same element in another place has the same bits.
                    let mut alone = [0.0f32];
                    // SAFETY: one element.
                    unsafe { (kernels.activate)(f, &x[i], alone.as_mut_ptr(), 1) };
                    prop_assert_eq!(alone[0].to_bits(), out[i].to_bits());
                }
            }
        }
    }
}

/// The normal distribution's share below `x`, by Simpson's rule.
fn normal_share(x: f64) -> f64 {
    let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * core::f64::consts::PI).sqrt();
    let (steps, low) = (4000, -12.0f64);
    if x <= low {
        return 0.0;
    }
    let h = (x.min(12.0) - low) / f64::from(steps);
    let inner: f64 =
        (1..steps).map(|i| density(low + h * f64::from(i)) * if i % 2 == 1 { 4.0 } else { 2.0 }).sum();
    h / 3.0 * (density(low) + inner + density(x.min(12.0)))
}

#[test]
fn blocks_with_what_is_not_finite() {
    for kernels in tiers() {
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0f32; 64];
            x[37] = poison;
            let got = quantise(kernels, &x);
            assert_eq!(got.scales[0], 1.0 / 127.0);
            assert!(got.scales[1].is_nan());
        }
        let got = quantise(kernels, &[0.0; 32]);
        assert!(got.scales[0] == 0.0 && got.codes.iter().all(|c| *c == 0));
    }
}

#[test]
fn nan_reaches_the_result_of_functions() {
    for kernels in tiers() {
        for f in [Activation::Relu, Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
            let x = [1.0, f32::NAN, -1.0];
            let mut out = [0.0f32; 3];
            // SAFETY: three elements.
            unsafe { (kernels.activate)(f, x.as_ptr(), out.as_mut_ptr(), 3) };
            assert!(out[1].is_nan() && out[0].is_finite() && out[2].is_finite(), "{}: {out:?}", f.name());
        }
    }
}

#[test]
fn half_precision_rounds_to_even() {
    for kernels in tiers() {
        let x: Vec<f32> =
            (0..70).map(|i| (i as f32 - 30.0) * 1.000_3e-3).chain([65519.0, 65520.0, 1e-8, -0.0]).collect();
        let mut out = vec![0u16; x.len()];
        // SAFETY: equal lengths.
        unsafe { (kernels.to_f16)(x.as_ptr(), out.as_mut_ptr(), x.len()) };
        for (x, got) in x.iter().zip(out) {
            assert_eq!(got, half::f16::from_f32_const(*x).to_bits(), "{x}");
        }
    }
}
