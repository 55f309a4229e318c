//! Int8 activation blocks, as `Quantization::Int8Blocks` of the contract states them.
//!
//! Blocks of 32 elements: `scale = amax / 127`, `code = round_ties_even(x x (127 / amax))`, in f32. A block of zeros
//! has scale 0 and codes 0. Where `127 / amax` overflows (`amax` below 3.8e-37) codes saturate at +-127 and zeros stay
//! zero. A block with a NaN or an infinity has scale NaN. The last block of a row may be shorter; its missing elements
//! are zeros.

use super::simd::{BLOCK, LANES, Simd};

/// Quantises a row.
///
/// # Safety
/// `x` has `n` elements; `codes` takes `n` rounded up to 32, `scales` one per block.
#[inline(always)]
pub(crate) unsafe fn quantise<S: Simd>(s: S, x: *const f32, n: usize, codes: *mut i8, scales: *mut f32) {
    // SAFETY: every block lies within the row as described, or is copied to a whole one first.
    unsafe {
        for block in 0..n / BLOCK {
            quantise_block(s, x.add(block * BLOCK), codes.add(block * BLOCK), scales.add(block));
        }
        let rest = n % BLOCK;
        if rest != 0 {
            let block = n / BLOCK;
            let mut whole = [0.0f32; BLOCK];
            core::ptr::copy_nonoverlapping(x.add(block * BLOCK), whole.as_mut_ptr(), rest);
            quantise_block(s, whole.as_ptr(), codes.add(block * BLOCK), scales.add(block));
        }
    }
}

#[inline(always)]
unsafe fn quantise_block<S: Simd>(s: S, x: *const f32, codes: *mut i8, scale: *mut f32) {
    // SAFETY: the caller gives 32 elements, 32 codes and a scale.
    unsafe {
        let zero = s.splat(0.0);
        let v = [s.load(x), s.load(x.add(LANES)), s.load(x.add(2 * LANES)), s.load(x.add(3 * LANES))];
        let mut largest = zero;
        let mut probe = zero;
        for v in v {
            largest = s.max(s.abs(v), largest);
            // Zero for finite lanes, NaN for the others.
            probe = s.fma(v, zero, probe);
        }
        let amax = s.max_lane(largest);
        let inverse = 127.0 / amax;
        if s.sum(probe) != 0.0 {
            *scale = f32::NAN;
            s.store_bytes(codes, s.narrow([zero; 4]));
        } else if amax == 0.0 {
            *scale = 0.0;
            s.store_bytes(codes, s.narrow([zero; 4]));
        } else if !inverse.is_finite() {
            *scale = amax / 127.0;
            for i in 0..BLOCK {
                // Zero times infinity is NaN, which the cast makes zero.
                *codes.add(i) = ((*x.add(i) * inverse) as i32).clamp(-127, 127) as i8;
            }
        } else {
            *scale = amax / 127.0;
            let inverse = s.splat(inverse);
            s.store_bytes(codes, s.narrow(v.map(|v| s.round(s.mul(v, inverse)))));
        }
    }
}

/// The values that the blocks stand for: `scale x code` in f32.
///
/// # Safety
/// `codes` and `scales` are those of a row of `n` elements; `out` takes `n`.
#[inline(always)]
pub(crate) unsafe fn dequantise<S: Simd>(
    _: S,
    codes: *const i8,
    scales: *const f32,
    n: usize,
    out: *mut f32,
) {
    for i in 0..n {
        // SAFETY: `i < n`.
        unsafe { *out.add(i) = *scales.add(i / BLOCK) * f32::from(*codes.add(i)) };
    }
}
