//! Int8 products with four outputs per vector, for tiers with a matrix product of bytes.
//!
//! An output has one accumulator for the first and one for the second half of its blocks, which are added at the end.

use super::format::Row;
use super::matmul::{Ahead, Matmul};
use super::quantised::{IntegerFormat, Second};
use super::simd::{BLOCK, LANES, Simd};

/// What multiplies the first and the second half of the blocks of two rows.
#[inline(always)]
fn by_half<F: IntegerFormat>(factors: [[f32; 2]; 2]) -> ([f32; 2], [f32; 2]) {
    let first = factors.map(|f| f[0]);
    (first, if F::SECOND == Second::UpperHalf { factors.map(|f| f[1]) } else { first })
}

/// The four outputs of a vector.
#[inline(always)]
fn outputs<S: Simd>(s: S, sums: S::V) -> [f32; 4] {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: eight lanes.
    unsafe { s.store(lanes.as_mut_ptr(), sums) };
    core::array::from_fn(|i| lanes[i] + lanes[4 + i])
}

/// Four rows times one token; `next` are rows to fetch meanwhile.
///
/// # Safety
/// Rows and activations have `n` elements, whole blocks.
#[inline(always)]
pub(super) unsafe fn column<S: Simd, F: IntegerFormat>(
    s: S,
    rows: [Row; 4],
    next: impl Ahead<4>,
    codes: *const i8,
    scales: *const f32,
    n: usize,
) -> [f32; 4] {
    let mut sums = s.splat(0.0);
    // SAFETY: the caller's promise.
    unsafe {
        for block in 0..n / BLOCK {
            let x = s.load_bytes(codes.add(block * BLOCK));
            let scale = *scales.add(block);
            for r in 0..4 {
                next.fetch(&rows, r, block);
            }
            let w = rows.map(|row| F::codes(s, row, block));
            let factor = |i: usize, second: bool| w[i].1[usize::from(second)];
            let four = |second: bool| core::array::from_fn::<f32, 4, _>(|i| factor(i, second));
            let (low, term) = (four(false), four(true));
            let high = if F::SECOND == Second::UpperHalf { term } else { low };
            let products = s.dot_column(w.map(|w| w.0), x);
            sums = s.fma(products, scaled(s, low, high, scale), sums);
            if F::SECOND == Second::Term {
                let ones = s.dot_column([s.splat_byte(1); 4], x);
                sums = s.fma(ones, scaled(s, term, term, scale), sums);
            }
        }
    }
    outputs(s, sums)
}

#[inline(always)]
fn scaled<S: Simd>(s: S, low: [f32; 4], high: [f32; 4], scale: f32) -> S::V {
    let factors = [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]];
    // SAFETY: eight lanes.
    s.mul(unsafe { s.load(factors.as_ptr()) }, s.splat(scale))
}

/// Up to `2R` rows of a tile times up to `2T` tokens; where there are fewer, the last one is computed twice.
///
/// # Safety
/// `w` has `rows` rows of codes and factors, `x` has `tokens` rows of activations, whole blocks; both are at least one.
#[inline(always)]
pub(super) unsafe fn block<S: Simd, F: IntegerFormat, const R: usize, const T: usize>(
    s: S,
    job: &Matmul<'_>,
    at: (usize, usize),
    (rows, tokens): (usize, usize),
    w: (*const i8, *const f32),
    x: (*const i8, *const f32),
    stride: usize,
) {
    let n = job.weight.columns;
    let blocks = n / BLOCK;
    let row = |i: usize| i.min(rows - 1);
    let token = |i: usize| i.min(tokens - 1);
    let mut sums = [[s.splat(0.0); T]; R];
    // SAFETY: the caller's promise.
    unsafe {
        for block in 0..blocks {
            for t in 0..T {
                let pair = [token(2 * t), token(2 * t + 1)];
                let activations = pair.map(|t| s.load_bytes(x.0.add(t * stride + block * BLOCK)));
                let scales = pair.map(|t| *x.1.add(t * (stride / BLOCK) + block));
                for r in 0..R {
                    let pair = [row(2 * r), row(2 * r + 1)];
                    let codes = pair.map(|r| s.load_bytes(w.0.add(r * n + block * BLOCK)));
                    let factors = pair.map(|r| w.1.add((r * blocks + block) * 2).cast::<[f32; 2]>().read());
                    let (low, high) = by_half::<F>(factors);
                    let products = s.dot_square(codes, activations);
                    sums[r][t] = s.fma(products, s.outer(low, high, scales), sums[r][t]);
                    if F::SECOND == Second::Term {
                        let ones = s.dot_square([s.splat_byte(1); 2], activations);
                        let term = factors.map(|f| f[1]);
                        sums[r][t] = s.fma(ones, s.outer(term, term, scales), sums[r][t]);
                    }
                }
            }
        }
        for r in 0..R {
            for t in 0..T {
                for (i, value) in outputs(s, sums[r][t]).into_iter().enumerate() {
                    let (r, t) = (2 * r + i / 2, 2 * t + i % 2);
                    if r < rows && t < tokens {
                        job.put(job.rows.get(at.0 + r), at.1 + t, value);
                    }
                }
            }
        }
    }
}
