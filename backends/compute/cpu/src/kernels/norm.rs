//! Root-mean-square and layer normalisation of one group of elements.

use super::simd::{LANES, Simd};

/// One group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    /// Whether the mean is taken off (layer norm) or not (RMS).
    pub(crate) centred: bool,
    /// Added to the variance.
    pub(crate) epsilon: f32,
    /// Elements.
    pub(crate) n: usize,
    /// Input.
    pub(crate) x: *const f32,
    /// Factors.
    pub(crate) weight: *const f32,
    /// Terms, or null.
    pub(crate) bias: *const f32,
    /// Output; may be the input.
    pub(crate) out: *mut f32,
}

/// Calls `f` for every vector of a run with its start and length, which is below eight at the end only.
#[inline(always)]
pub(crate) fn vectors(n: usize, mut f: impl FnMut(usize, usize)) {
    let mut at = 0;
    while at < n {
        f(at, LANES.min(n - at));
        at += LANES;
    }
}

/// Eight elements, or those that are left.
///
/// # Safety
/// `p + at` has `len` elements.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd>(s: S, p: *const f32, at: usize, len: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if len == LANES { s.load(p.add(at)) } else { s.load_part(p.add(at), len) } }
}

/// The reverse of [`load`].
///
/// # Safety
/// `p + at` takes `len` elements.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(s: S, p: *mut f32, at: usize, len: usize, v: S::V) {
    // SAFETY: the caller's promise.
    unsafe { if len == LANES { s.store(p.add(at), v) } else { s.store_part(p.add(at), v, len) } }
}

/// Normalises one group.
///
/// # Safety
/// All pointers that are not null have `n` elements.
#[inline(always)]
pub(crate) unsafe fn norm<S: Simd>(s: S, job: &Norm) {
    let zero = s.splat(0.0);
    let count = job.n as f64;
    let mean = if job.centred {
        let mut sum = zero;
        // SAFETY: the caller's promise; so for every access below.
        vectors(job.n, |at, len| sum = s.add(sum, unsafe { load(s, job.x, at, len) }));
        (f64::from(s.sum(sum)) / count) as f32
    } else {
        0.0
    };
    let mut squares = zero;
    vectors(job.n, |at, len| {
        // SAFETY: as above.
        let x = unsafe { load(s, job.x, at, len) };
        let x = if job.centred {
            // The missing lanes of the last vector must stay zero.
            let mut lanes = [0.0f32; LANES];
            lanes[..len].fill(mean);
            // SAFETY: eight lanes.
            s.sub(x, unsafe { s.load(lanes.as_ptr()) })
        } else {
            x
        };
        squares = s.fma(x, x, squares);
    });
    let variance = f64::from(s.sum(squares)) / count;
    let factor = s.splat((1.0 / (variance + f64::from(job.epsilon)).sqrt()) as f32);
    let mean = s.splat(mean);
    vectors(job.n, |at, len| {
        // SAFETY: as above.
        unsafe {
            let x = load(s, job.x, at, len);
            let x = if job.centred { s.sub(x, mean) } else { x };
            let mut y = s.mul(s.mul(x, factor), load(s, job.weight, at, len));
            if !job.bias.is_null() {
                y = s.add(y, load(s, job.bias, at, len));
            }
            store(s, job.out, at, len, y);
        }
    });
}
