//! Rows of a weight matrix times several tokens: rows are unpacked to a tile once, then walked by a register block of
//! rows x tokens. The order of each output's sum is that of one token.

use super::format::{Row, with_format, with_integer_format};
use super::matmul::{Matmul, Tile};
use super::quantised::{IntegerFormat, Q4K, Q6K, Q8, Second, add_product, lane_sums};
use super::simd::{BLOCK, LANES, Simd};
use super::squares;

/// Bytes of a tile: a good part of the level-2 cache of the processors that the kernels are for.
const TILE_BYTES: usize = 192 * 1024;
/// Rows of the register block for f32; with [`TOKENS`] twelve accumulators of sixteen registers.
const ROWS_F32: usize = 3;
/// Rows of the register block for int8, whose inner loop needs more registers.
const ROWS_INT8: usize = 2;
/// Tokens of the register block.
const TOKENS: usize = 4;

/// Rows of a tile whose rows take `row_bytes`: as many register blocks as fit, at most 48 rows.
pub(crate) fn tile_rows(row_bytes: usize) -> usize {
    (TILE_BYTES / row_bytes.max(1)).clamp(6, 48) / 6 * 6
}

/// Calls `$edge::<R, T>` for the rows and tokens that are left of a register block.
macro_rules! register_block {
    ($rows:expr, $tokens:expr, $edge:ident :: <$($s:ident),+> $arguments:tt, [$($r:literal),*]) => {
        register_block!(@ $rows, $tokens, $edge, ($($s),+), $arguments, [$($r),*])
    };
    (@ $rows:expr, $tokens:expr, $edge:ident, $types:tt, $arguments:tt, [$($r:literal),*]) => {
        match ($rows, $tokens) {
            $( ($r, 4) => register_block!(= $edge, $types, $r, 4, $arguments),
               ($r, 3) => register_block!(= $edge, $types, $r, 3, $arguments),
               ($r, 2) => register_block!(= $edge, $types, $r, 2, $arguments),
               ($r, 1) => register_block!(= $edge, $types, $r, 1, $arguments), )*
            _ => {}
        }
    };
    (= $edge:ident, ($($s:ident),+), $r:literal, $t:literal, $arguments:tt) => {
        $edge::<$($s),+, $r, $t>$arguments
    };
}

/// The product with f32 activations.
///
/// # Safety
/// As for [`super::matmul::matmul`].
#[inline(always)]
pub(super) unsafe fn many_tokens_f32<S: Simd>(
    s: S,
    job: &Matmul<'_>,
    data: *const f32,
    stride: usize,
    tile: &mut Tile,
) {
    let n = job.weight.columns;
    // Rows of the tile are padded with zeros to whole vectors, so that only activations have a tail to load.
    let padded = n.next_multiple_of(LANES);
    let most = tile_rows(padded * 4);
    tile.reserve(most * padded, 0);
    let mut first = 0;
    while first < job.rows.len() {
        let rows = most.min(job.rows.len() - first);
        for r in 0..rows {
            let out = tile.values[r * padded..(r + 1) * padded].as_mut_ptr();
            // SAFETY: the row exists, and its place in the tile holds `padded >= n` values.
            unsafe {
                for i in n..padded {
                    *out.add(i) = 0.0;
                }
                let row = job.weight.row(job.rows.get(first + r));
                with_format!(job.weight.format, F => super::format::unpack::<S, F>(s, row, n, out));
            }
        }
        let mut token = 0;
        while token < job.tokens {
            let tokens = TOKENS.min(job.tokens - token);
            let mut r = 0;
            while r < rows {
                let block = ROWS_F32.min(rows - r);
                let w = tile.values[r * padded..].as_ptr();
                // SAFETY: `block` rows of the tile and `tokens` rows of the input exist.
                unsafe {
                    let x = data.add(token * stride);
                    let at = (first + r, token);
                    register_block!(block, tokens, block_f32::<S>(s, job, at, w, x, stride), [3, 2, 1]);
                }
                r += block;
            }
            token += tokens;
        }
        first += rows;
    }
}

#[inline(always)]
unsafe fn block_f32<S: Simd, const R: usize, const T: usize>(
    s: S,
    job: &Matmul<'_>,
    at: (usize, usize),
    w: *const f32,
    x: *const f32,
    stride: usize,
) {
    let n = job.weight.columns;
    let padded = n.next_multiple_of(LANES);
    let mut sums = [[s.splat(0.0); T]; R];
    // SAFETY: the caller gives `R` rows of `padded` values and `T` rows of `n` activations.
    unsafe {
        for i in 0..n / LANES {
            let mut rows = [s.splat(0.0); R];
            for r in 0..R {
                rows[r] = s.load(w.add(r * padded + i * LANES));
            }
            for t in 0..T {
                let x = s.load(x.add(t * stride + i * LANES));
                for r in 0..R {
                    sums[r][t] = s.fma(rows[r], x, sums[r][t]);
                }
            }
        }
        let done = n / LANES * LANES;
        if done < n {
            for t in 0..T {
                let x = s.load_part(x.add(t * stride + done), n - done);
                for r in 0..R {
                    sums[r][t] = s.fma(s.load(w.add(r * padded + done)), x, sums[r][t]);
                }
            }
        }
        for r in 0..R {
            let row = job.rows.get(at.0 + r);
            for t in 0..T {
                job.put(row, at.1 + t, s.sum(sums[r][t]));
            }
        }
    }
}

/// The product with int8 activations.
///
/// # Safety
/// As for [`super::matmul::matmul`].
#[inline(always)]
pub(super) unsafe fn many_tokens_int8<S: Simd>(
    s: S,
    job: &Matmul<'_>,
    codes: *const i8,
    scales: *const f32,
    stride: usize,
    tile: &mut Tile,
) {
    let n = job.weight.columns;
    let blocks = n / BLOCK;
    let most = tile_rows(n + blocks * 8);
    tile.reserve(most * blocks * 2, most * n);
    let mut first = 0;
    while first < job.rows.len() {
        let rows = most.min(job.rows.len() - first);
        let second = with_integer_format!(job.weight.format, F => {
            for r in 0..rows {
                let row = job.weight.row(job.rows.get(first + r));
                let codes = tile.codes[r * n..(r + 1) * n].as_mut_ptr();
                let factors = &mut tile.values[r * blocks * 2..(r + 1) * blocks * 2];
                // SAFETY: the row exists; its place in the tile holds its codes.
                unsafe { unpack_codes::<S, F>(s, row, codes, factors) };
            }
            F::SECOND
        }, else unreachable!("int8 codes meet an unquantised weight"));
        // In the tile all types look alike but for the meaning of the second factor: one of each kind stands for all.
        // SAFETY: the tile was filled with these rows; the input is the caller's promise.
        unsafe {
            match second {
                Second::None => tile_int8::<S, Q8>(s, job, (first, rows), codes, scales, stride, tile),
                Second::UpperHalf => tile_int8::<S, Q6K>(s, job, (first, rows), codes, scales, stride, tile),
                Second::Term => tile_int8::<S, Q4K>(s, job, (first, rows), codes, scales, stride, tile),
            }
        }
        first += rows;
    }
}

/// Writes a row's codes, and a pair of factors per block.
#[inline(always)]
unsafe fn unpack_codes<S: Simd, F: IntegerFormat>(s: S, row: Row, codes: *mut i8, factors: &mut [f32]) {
    for (block, out) in factors.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        // SAFETY: the caller's row has a block per pair, and `codes` takes them.
        unsafe {
            let (c, pair) = F::codes(s, row, block);
            s.store_bytes(codes.add(block * BLOCK), c);
            *out = pair;
        }
    }
}

/// The rows of a tile, which are the job's from `first` on, times all tokens.
#[inline(always)]
unsafe fn tile_int8<S: Simd, F: IntegerFormat>(
    s: S,
    job: &Matmul<'_>,
    (first, rows): (usize, usize),
    codes: *const i8,
    scales: *const f32,
    stride: usize,
    tile: &Tile,
) {
    let n = job.weight.columns;
    let blocks = n / BLOCK;
    let mut token = 0;
    while token < job.tokens {
        let tokens = TOKENS.min(job.tokens - token);
        let mut r = 0;
        while r < rows {
            let block = if S::SQUARES { 4 } else { ROWS_INT8 }.min(rows - r);
            let w = (tile.codes[r * n..].as_ptr(), tile.values[r * blocks * 2..].as_ptr());
            // SAFETY: `block` rows of the tile and `tokens` rows of the input exist.
            unsafe {
                let x = (codes.add(token * stride), scales.add(token * (stride / BLOCK)));
                let at = (first + r, token);
                if S::SQUARES {
                    let size = (block, tokens);
                    match (block > 2, tokens > 2) {
                        (true, true) => squares::block::<S, F, 2, 2>(s, job, at, size, w, x, stride),
                        (true, false) => squares::block::<S, F, 2, 1>(s, job, at, size, w, x, stride),
                        (false, true) => squares::block::<S, F, 1, 2>(s, job, at, size, w, x, stride),
                        (false, false) => squares::block::<S, F, 1, 1>(s, job, at, size, w, x, stride),
                    }
                } else {
                    register_block!(block, tokens, block_int8::<S, F>(s, job, at, w, x, stride), [2, 1]);
                }
            }
            r += block;
        }
        token += tokens;
    }
}

#[inline(always)]
unsafe fn block_int8<S: Simd, F: IntegerFormat, const R: usize, const T: usize>(
    s: S,
    job: &Matmul<'_>,
    at: (usize, usize),
    w: (*const i8, *const f32),
    x: (*const i8, *const f32),
    stride: usize,
) {
    let n = job.weight.columns;
    let blocks = n / BLOCK;
    let mut sums = [[s.splat(0.0); T]; R];
    // SAFETY: the caller gives `R` rows of codes and scales and `T` rows of activations, whole blocks.
    unsafe {
        for block in 0..blocks {
            let mut terms = [s.splat(0.0); T];
            if F::SECOND == Second::Term {
                for t in 0..T {
                    terms[t] = lane_sums::<S, F>(s, s.load_bytes(x.0.add(t * stride + block * BLOCK)));
                }
            }
            for r in 0..R {
                let codes = s.load_bytes(w.0.add(r * n + block * BLOCK));
                let factors = w.1.add((r * blocks + block) * 2).cast::<[f32; 2]>().read();
                for t in 0..T {
                    let activation = s.load_bytes(x.0.add(t * stride + block * BLOCK));
                    let scale = *x.1.add(t * (stride / BLOCK) + block);
                    let activation = (activation, scale, terms[t]);
                    sums[r][t] = add_product::<S, F>(s, (codes, factors), activation, sums[r][t]);
                }
            }
        }
        for r in 0..R {
            let row = job.rows.get(at.0 + r);
            for t in 0..T {
                job.put(row, at.1 + t, s.sum(sums[r][t]));
            }
        }
    }
}
