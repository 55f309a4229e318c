//! `y += h x row` over the neurons that take part: down stored with a row per neuron.
//!
//! Threads share the columns, never the neurons: each output element is summed in neuron order by one thread, so
//! neither the number of threads nor the neurons that are skipped (whose term is zero) change its bits.

use super::format::{Format, Matrix, with_format};
use super::matmul::{Tile, prefetch};
use super::simd::{BLOCK, LANES, Simd};
use super::wide::Wide;

/// One token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axpy<'a> {
    /// A row per neuron.
    pub(crate) weight: Matrix,
    /// The neurons that take part, ascending.
    pub(crate) neurons: &'a [u32],
    /// Indexed by neuron.
    pub(crate) hidden: *const f32,
    /// First and one past the last column; the first is a multiple of 32, and so is the last unless the row ends there.
    pub(crate) columns: (usize, usize),
    /// Indexed by column.
    pub(crate) out: *mut f32,
}

/// Several tokens for which the same neurons take part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AxpyTokens<'a> {
    /// The neurons, the columns and token 0.
    pub(crate) first: Axpy<'a>,
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// Elements between tokens' hidden values.
    pub(crate) hidden_stride: usize,
    /// Elements between tokens' outputs.
    pub(crate) out_stride: usize,
}

/// Adds the rows of all neurons to one token's output.
///
/// # Safety
/// The matrix has the neurons' rows and columns, `hidden` the neurons, `out` the columns.
#[inline(always)]
pub(crate) unsafe fn axpy<S: Simd>(s: S, job: &Axpy<'_>) {
    // SAFETY: the caller's promise, passed on.
    with_format!(job.weight.format, F => unsafe { one_token::<S, F>(s, job) });
}

/// How far ahead of their use rows are asked for, in bytes: those that take part lie anywhere, and a part of a row is too
/// short for the hardware to foretell.
const AHEAD: usize = 4096;
/// The most rows that is.
const MOST_AHEAD: usize = 16;

#[inline(always)]
unsafe fn one_token<S: Simd, F: Format>(s: S, job: &Axpy<'_>) {
    let step = job.weight.stride / job.weight.columns.div_ceil(BLOCK).max(1);
    let (start, end) = job.columns;
    let bytes = (end - start).div_ceil(BLOCK) * step;
    let ahead = ((AHEAD + 2 * bytes) / (4 * bytes).max(1)).clamp(1, MOST_AHEAD / 4) * 4;
    let place = |neuron: u32| job.weight.row(neuron as usize).data;
    for &neuron in &job.neurons[..ahead.min(job.neurons.len())] {
        for at in (0..bytes).step_by(64) {
            prefetch(place(neuron).wrapping_add(start / BLOCK * step + at));
        }
    }
    // SAFETY: neurons come from `job.neurons`; the caller answers for them.
    unsafe {
        let (fours, rest) = job.neurons.as_chunks::<4>();
        let last = job.neurons.len().saturating_sub(1);
        let next = |at: usize| place(job.neurons[(at + ahead).min(last)]);
        for (at, four) in fours.iter().enumerate() {
            add_rows::<S, F, 4>(s, job, *four, std::array::from_fn(|r| next(4 * at + r)));
        }
        for (at, &one) in rest.iter().enumerate() {
            add_rows::<S, F, 1>(s, job, [one], [next(4 * fours.len() + at)]);
        }
    }
}

/// Adds `R` rows, one after the other within each element, in one pass over the output. The rows in `next` are asked for
/// ahead of their use.
#[inline(always)]
unsafe fn add_rows<S: Simd, F: Format, const R: usize>(
    s: S,
    job: &Axpy<'_>,
    neurons: [u32; R],
    next: [*const u8; R],
) {
    let w = s.wide();
    let step = job.weight.stride / job.weight.columns.div_ceil(BLOCK).max(1);
    let rows = neurons.map(|n| job.weight.row(n as usize));
    // SAFETY: the caller's promise of `axpy`.
    unsafe {
        let hidden = neurons.map(|n| *job.hidden.add(n as usize));
        let mut h = [w.splat(0.0); R];
        for r in 0..R {
            h[r] = w.splat(hidden[r]);
        }
        let (start, end) = job.columns;
        for block in start / BLOCK..end / BLOCK {
            let out = job.out.add(block * BLOCK);
            let mut y = [w.load(out), w.load(out.add(2 * LANES))];
            // Four factors are converted together.
            let factors = match (F::SCALED, rows.first_chunk::<4>()) {
                (Some(bytes), Some(four)) => Some(
                    w.four_splats(four.map(|row| row.data.add(block * bytes).cast::<u16>().read_unaligned())),
                ),
                _ => None,
            };
            for r in 0..R {
                prefetch(next[r].wrapping_add(block * step));
                let v = match factors {
                    Some(factors) => F::scaled(s, rows[r], block, factors[r]),
                    None => F::wides(s, rows[r], block),
                };
                y = [w.fma(h[r], v[0], y[0]), w.fma(h[r], v[1], y[1])];
            }
            w.store(out, y[0]);
            w.store(out.add(2 * LANES), y[1]);
        }
        let mut done = end / BLOCK * BLOCK;
        while done < end {
            let part = LANES.min(end - done);
            let mut y = s.load_part(job.out.add(done), part);
            for r in 0..R {
                y = s.fma(s.splat(hidden[r]), F::tail(s, rows[r], done, part), y);
            }
            s.store_part(job.out.add(done), y, part);
            done += part;
        }
    }
}

/// Neurons whose rows are unpacked at a time: 32 columns of them are 64 KiB.
const TILE_NEURONS: usize = 512;

/// Adds the rows of all neurons to every token's output.
///
/// # Safety
/// As for [`axpy`], for every token.
#[inline(always)]
pub(crate) unsafe fn axpy_tokens<S: Simd>(s: S, job: &AxpyTokens<'_>, tile: &mut Tile) {
    // SAFETY: the caller's promise, passed on.
    with_format!(job.first.weight.format, F => unsafe { many_tokens::<S, F>(s, job, tile) });
}

#[inline(always)]
unsafe fn many_tokens<S: Simd, F: Format>(s: S, job: &AxpyTokens<'_>, tile: &mut Tile) {
    let (start, end) = job.first.columns;
    tile.reserve(TILE_NEURONS * BLOCK, 0);
    for block in start / BLOCK..end.div_ceil(BLOCK) {
        if (block + 1) * BLOCK > end {
            // The row's odd end: token by token.
            for t in 0..job.tokens {
                // SAFETY: the caller's promise for token `t`.
                unsafe {
                    let columns = (block * BLOCK, end);
                    let hidden = job.first.hidden.add(t * job.hidden_stride);
                    let out = job.first.out.add(t * job.out_stride);
                    one_token::<S, F>(s, &Axpy { columns, hidden, out, ..job.first });
                }
            }
            continue;
        }
        for neurons in job.first.neurons.chunks(TILE_NEURONS) {
            // SAFETY: the tile holds the chunk; rows, hidden values and outputs are the caller's promise.
            unsafe {
                let values = tile.values.as_mut_ptr();
                for (i, &n) in neurons.iter().enumerate() {
                    let w = F::vectors(s, job.first.weight.row(n as usize), block);
                    for (v, w) in w.into_iter().enumerate() {
                        s.store(values.add(i * BLOCK + v * LANES), w);
                    }
                }
                let mut t = 0;
                while t < job.tokens {
                    let tokens = 3.min(job.tokens - t);
                    match tokens {
                        3 => add_tile::<S, 3>(s, job, t, block, neurons, values),
                        2 => add_tile::<S, 2>(s, job, t, block, neurons, values),
                        _ => add_tile::<S, 1>(s, job, t, block, neurons, values),
                    }
                    t += tokens;
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn add_tile<S: Simd, const T: usize>(
    s: S,
    job: &AxpyTokens<'_>,
    token: usize,
    block: usize,
    neurons: &[u32],
    values: *const f32,
) {
    // SAFETY: the promise of `axpy_tokens`; `values` holds 32 columns per neuron.
    unsafe {
        let out = job.first.out.add(token * job.out_stride + block * BLOCK);
        let hidden = job.first.hidden.add(token * job.hidden_stride);
        let mut y = [[s.splat(0.0); 4]; T];
        for t in 0..T {
            for i in 0..4 {
                y[t][i] = s.load(out.add(t * job.out_stride + i * LANES));
            }
        }
        for (i, &n) in neurons.iter().enumerate() {
            let w = values.add(i * BLOCK);
            let w = [s.load(w), s.load(w.add(LANES)), s.load(w.add(2 * LANES)), s.load(w.add(3 * LANES))];
            for t in 0..T {
                let h = s.splat(*hidden.add(t * job.hidden_stride + n as usize));
                for v in 0..4 {
                    y[t][v] = s.fma(h, w[v], y[t][v]);
                }
            }
        }
        for t in 0..T {
            for i in 0..4 {
                s.store(out.add(t * job.out_stride + i * LANES), y[t][i]);
            }
        }
    }
}
