//! The tier of x86-64 processors with AVX-512 and its integer products (VNNI; Intel since Ice Lake, AMD since Zen 4).
//!
//! A vector stays one 256-bit register, so that the order of sums, and with it every bit, is AVX2's. What the tier has
//! over AVX2 is a single instruction for four products of bytes and their sum, and twice as many registers.

use core::arch::x86_64::{
    __m256i, _mm256_abs_epi8, _mm256_dpbusd_epi32, _mm256_setzero_si256, _mm256_sign_epi8,
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
            // The instruction takes unsigned times signed bytes: |weight| (128 for -128) times the activation with the
            // weight's sign. It adds in 32 bits, without saturation.
            let magnitude = _mm256_abs_epi8(weight);
            let signed = _mm256_sign_epi8(activation, weight);
            _mm256_dpbusd_epi32(_mm256_setzero_si256(), magnitude, signed)
        }
    }
}

super::kernel_table!(
    Avx512,
    Avx512::DETECTED,
    "avx512",
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"
);
