//! The tier of AArch64 processors with the dot product of bytes (`FEAT_DotProd`: Cortex-A55 and A76, Neoverse N1, Apple
//! A11, and later): NEON with four products and their sum in one instruction per lane.

use core::arch::aarch64::{int8x16_t, int32x4_t, vdupq_n_s32};
use core::arch::asm;

use super::neon::{BytesDot, Vectors};

/// The products of `sdot`.
#[derive(Clone, Copy)]
pub(super) struct Sdot;

type Dotprod = Vectors<Sdot>;

/// What this tier needs and this machine lacks.
pub(crate) fn missing() -> Vec<&'static str> {
    super::missing!(is_aarch64_feature_detected: "neon", "dotprod")
}

/// The instruction itself: its intrinsic is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the function is compiled for the instruction, which touches these registers only.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

impl BytesDot for Sdot {
    #[inline(always)]
    unsafe fn dot(weight: [int8x16_t; 2], activation: [int8x16_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let zero = vdupq_n_s32(0);
            [sdot(zero, weight[0], activation[0]), sdot(zero, weight[1], activation[1])]
        }
    }
}

super::kernel_table!(Dotprod, Dotprod::DETECTED, "dotprod", "neon,dotprod");
