//! The tier of AArch64 processors with the matrix product of bytes (`FEAT_I8MM`: Neoverse V1 and N2, Cortex-A510 and
//! A710, Apple M2, and later).
//!
//! One instruction multiplies two rows by two tokens over eight elements, which adds up what the other tiers keep in
//! two lanes: so this tier's int8 products are summed by half blocks (see `Simd::SQUARES`), and their bits may differ
//! from the other tiers' in the last place. All else is as in the dotprod tier.

use core::arch::aarch64::*;
use core::arch::asm;

use super::dotprod::Sdot;
use super::neon::{BytesDot, Vectors};

/// The products of `smmla`, and of `sdot` where there is but one token.
#[derive(Clone, Copy)]
pub(super) struct Smmla;

type I8mm = Vectors<Smmla>;

/// What this tier needs and this machine lacks.
pub(crate) fn missing() -> Vec<&'static str> {
    super::missing!(is_aarch64_feature_detected: "neon", "dotprod", "i8mm")
}

/// The instruction itself: its intrinsic is not stable yet.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn smmla(mut sums: int32x4_t, rows: int8x16_t, tokens: int8x16_t) -> int32x4_t {
    // SAFETY: the function is compiled for the instruction, which touches these registers only.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {rows:v}.16b, {tokens:v}.16b",
            sums = inout(vreg) sums, rows = in(vreg) rows, tokens = in(vreg) tokens,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Elements 0 to 7 of both, and 8 to 15 of both.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn interleave(a: int8x16_t, b: int8x16_t) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
        [vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))]
    }
}

impl BytesDot for Smmla {
    #[inline(always)]
    unsafe fn dot(weight: [int8x16_t; 2], activation: [int8x16_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller's promise.
        unsafe { Sdot::dot(weight, activation).map(|v| vsetq_lane_s32::<0>(vaddvq_s32(v), vdupq_n_s32(0))) }
    }

    const SQUARES: bool = true;
    #[inline(always)]
    unsafe fn square(weights: [[int8x16_t; 2]; 2], activations: [[int8x16_t; 2]; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            [0, 1].map(|half| {
                let rows = interleave(weights[0][half], weights[1][half]);
                let tokens = interleave(activations[0][half], activations[1][half]);
                smmla(smmla(vdupq_n_s32(0), rows[0], tokens[0]), rows[1], tokens[1])
            })
        }
    }
    #[inline(always)]
    unsafe fn column(weights: [[int8x16_t; 2]; 4], activation: [int8x16_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller's promise.
        unsafe { Sdot::column(weights, activation) }
    }
}

super::kernel_table!(I8mm, I8mm::DETECTED, "i8mm", "neon,dotprod,i8mm");
