//! The tier of x86-64 processors with AVX-512 and its integer products (VNNI; Intel since Ice Lake, AMD since Zen 4).
//!
//! A vector stays one 256-bit register, so that the order of sums, and with it every bit, is AVX2's. What the tier has
//! over AVX2 is a single instruction for four products of bytes and their sum, and twice as many registers.

use core::arch::x86_64::{
    __m256i, _mm256_dpbusd_epi32, _mm256_set1_epi8, _mm256_setzero_si256, _mm256_sub_epi32, _mm256_xor_si256,
};

use super::avx2::{BytesDot, Vectors};

/// The products of VNNI.
#[derive(Clone, Copy)]
pub(super) struct Vnni;

type Avx512 = Vectors<Vnni>;

/// What this tier needs and this machine lacks.
pub(crate) fn missing() -> Vec<&'static str> {
    super::missing!(is_x86_feature_detected:
        "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni")
}

impl BytesDot for Vnni {
    #[inline(always)]
    unsafe fn dot(weight: __m256i, activation: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            // The instruction takes unsigned times signed bytes and adds in 32 bits, without saturation: with 128 added
            // to each weight, which is a change of its sign bit, the sum is 128 times the activations' too large. What
            // to take off depends on the activations alone, so it is made once for all rows.
            let flip = _mm256_set1_epi8(-128);
            let zero = _mm256_setzero_si256();
            let excess = _mm256_dpbusd_epi32(zero, flip, activation);
            _mm256_dpbusd_epi32(_mm256_sub_epi32(zero, excess), _mm256_xor_si256(weight, flip), activation)
        }
    }

    #[inline(always)]
    unsafe fn dot_nibbles(codes: __m256i, activation: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, activation) }
    }
}

super::kernel_table!(
    Avx512,
    Avx512::DETECTED,
    "avx512",
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"
);
