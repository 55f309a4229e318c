//! Softmax attention of one query head of one token over f16 keys and values.
//!
//! Scores, their sum and the weighted values each run in the order of positions, whatever the batch or the threads.

use super::matmul::row_sums;
use super::norm::{load, store, vectors};
use super::pointwise::soft_cap;
use super::simd::{LANES, Simd};

/// One head of one token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    /// Its query, `head_dim` elements.
    pub(crate) query: *const f32,
    /// Elements of a head.
    pub(crate) head_dim: usize,
    /// Key of the first position attended to.
    pub(crate) keys: *const u16,
    /// Value of the first position attended to.
    pub(crate) values: *const u16,
    /// f16 elements from one position to the next.
    pub(crate) stride: usize,
    /// Number of positions, at least one.
    pub(crate) positions: usize,
    /// Factor on the scores.
    pub(crate) scale: f32,
    /// Soft cap, or 0 for none.
    pub(crate) soft_cap: f32,
    /// Room for `positions` scores.
    pub(crate) scores: *mut f32,
    /// Result, `head_dim` elements.
    pub(crate) out: *mut f32,
}

/// Vectors of a head whose sums are kept in registers while the positions are walked.
const VALUE_VECTORS: usize = 8;

/// Attends.
///
/// # Safety
/// All pointers have what [`Head`] says.
#[inline(always)]
pub(crate) unsafe fn head<S: Simd>(s: S, job: &Head) {
    // SAFETY: the caller's promise; so for every access below.
    unsafe {
        let n = job.positions;
        let mut p = 0;
        while p + 4 <= n {
            score::<S, 4>(s, job, p);
            p += 4;
        }
        while p < n {
            score::<S, 1>(s, job, p);
            p += 1;
        }
        let scale = s.splat(job.scale);
        let mut largest = s.splat(f32::NEG_INFINITY);
        let mut most = f32::NEG_INFINITY;
        vectors(n, |at, len| {
            let mut v = s.mul(load(s, job.scores, at, len), scale);
            if job.soft_cap != 0.0 {
                v = soft_cap(s, v, job.soft_cap);
            }
            store(s, job.scores, at, len, v);
            if len == LANES {
                largest = s.max(v, largest);
            } else {
                for i in at..at + len {
                    let x = *job.scores.add(i);
                    most = if x > most { x } else { most };
                }
            }
        });
        let all = s.max_lane(largest);
        let most = s.splat(if all > most { all } else { most });
        let mut sum = s.splat(0.0);
        vectors(n, |at, len| {
            let v = s.exp(s.sub(load(s, job.scores, at, len), most));
            store(s, job.scores, at, len, v);
            // Read back, so that the idle lanes of a short vector count as zeros.
            sum = s.add(sum, if len == LANES { v } else { load(s, job.scores, at, len) });
        });
        let sum = s.splat(s.sum(sum));
        let mut d = 0;
        while d + VALUE_VECTORS * LANES <= job.head_dim {
            weigh::<S, VALUE_VECTORS>(s, job, d, sum);
            d += VALUE_VECTORS * LANES;
        }
        // One vector at a time would wait for each sum.
        while d + 4 * LANES <= job.head_dim {
            weigh::<S, 4>(s, job, d, sum);
            d += 4 * LANES;
        }
        while d + LANES <= job.head_dim {
            weigh::<S, 1>(s, job, d, sum);
            d += LANES;
        }
        if d < job.head_dim {
            let len = job.head_dim - d;
            let mut acc = s.splat(0.0);
            for p in 0..n {
                let v = s.load_f16_part(job.values.add(p * job.stride + d), len);
                acc = s.fma(s.splat(*job.scores.add(p)), v, acc);
            }
            s.store_part(job.out.add(d), s.div(acc, sum), len);
        }
    }
}

#[inline(always)]
unsafe fn score<S: Simd, const P: usize>(s: S, job: &Head, first: usize) {
    let mut sums = [s.splat(0.0); P];
    // SAFETY: the promise of `head`.
    unsafe {
        let key = |p: usize, d: usize| job.keys.add((first + p) * job.stride + d);
        let mut d = 0;
        while d + LANES <= job.head_dim {
            let q = s.load(job.query.add(d));
            for p in 0..P {
                sums[p] = s.fma(q, s.load_f16(key(p, d)), sums[p]);
            }
            d += LANES;
        }
        if d < job.head_dim {
            let len = job.head_dim - d;
            let q = s.load_part(job.query.add(d), len);
            for p in 0..P {
                sums[p] = s.fma(q, s.load_f16_part(key(p, d), len), sums[p]);
            }
        }
        for (p, sum) in row_sums(s, sums).into_iter().enumerate() {
            *job.scores.add(first + p) = sum;
        }
    }
}

#[inline(always)]
unsafe fn weigh<S: Simd, const N: usize>(s: S, job: &Head, d: usize, sum: S::V) {
    let mut acc = [s.splat(0.0); N];
    // SAFETY: the promise of `head`.
    unsafe {
        for p in 0..job.positions {
            let score = s.splat(*job.scores.add(p));
            let v = job.values.add(p * job.stride + d);
            for i in 0..N {
                acc[i] = s.fma(score, s.load_f16(v.add(i * LANES)), acc[i]);
            }
        }
        for (i, acc) in acc.into_iter().enumerate() {
            s.store(job.out.add(d + i * LANES), s.div(acc, sum));
        }
    }
}
