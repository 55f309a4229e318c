//! The tier of x86-64 processors with AVX-512 and its integer products (VNNI; Intel since Ice Lake, AMD since Zen 4).
//!
//! A vector stays one 256-bit register, so that the order of sums, and with it every bit, is AVX2's. What the tier has
//! over AVX2 is a single instruction for four products of bytes and their sum, twice as many registers, and registers of
//! sixteen lanes for what is made of two rows, or of elements that do not meet.
//!
//! No closures here: the compiler may leave one a function of its own, without the tier's features, and then every
//! instruction in it is a call.

use core::arch::x86_64::*;

use super::avx2::{BytesDot, Vectors};
use super::planes::MIDDLE;
use super::wide::{GROUP, Wide};

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
    type Wide = Zmm;
    const WIDE: Zmm = Zmm(());

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

/// Registers of 512 bits; made only as [`BytesDot::WIDE`], for entry points that run after detection.
#[derive(Clone, Copy)]
pub(super) struct Zmm(());

macro_rules! wide {
    ($($body:tt)*) => {
        // SAFETY: a `Zmm` exists only where its features were detected; what the pointers of the memory operations need
        // is their callers' promise.
        unsafe { $($body)* }
    };
}

/// Four f16 as f32.
///
/// # Safety
/// The processor has F16C.
#[inline(always)]
unsafe fn four_f16([a, b, c, d]: [u16; 4]) -> __m128 {
    let bits = i64::from(a) | i64::from(b) << 16 | i64::from(c) << 32 | i64::from(d) << 48;
    // SAFETY: the caller's promise.
    unsafe { _mm_cvtph_ps(_mm_cvtsi64_si128(bits)) }
}

/// Sixteen bytes twice, then sixteen others twice.
///
/// # Safety
/// The processor has AVX-512; each points to 16 readable bytes.
#[inline(always)]
unsafe fn twice_each(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let a = _mm512_broadcast_i32x4(_mm_loadu_si128(a.cast()));
        _mm512_mask_broadcast_i32x4(a, 0xff00, _mm_loadu_si128(b.cast()))
    }
}

impl Wide for Zmm {
    type V = __m256;
    type W = __m512;
    type Group = (__m512i, __m512i, __m512);
    type Block = (__m512i, __m512i);

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        wide!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn join(self, low: __m256, high: __m256) -> __m512 {
        wide!({
            let low = _mm512_castpd256_pd512(_mm256_castps_pd(low));
            _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, _mm256_castps_pd(high)))
        })
    }
    #[inline(always)]
    fn split(self, w: __m512) -> [__m256; 2] {
        wide!({
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(w));
            [_mm512_castps512_ps256(w), _mm256_castpd_ps(high)]
        })
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        wide!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, w: __m512) {
        wide!(_mm512_storeu_ps(p, w))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        wide!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_widened(self, p: *const i8) -> [__m512; 2] {
        wide!({
            let first = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()));
            let second = _mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(16).cast()));
            [_mm512_cvtepi32_ps(first), _mm512_cvtepi32_ps(second)]
        })
    }
    #[inline(always)]
    unsafe fn scaled_nibbles(self, p: *const u8, factor: __m512) -> [__m512; 2] {
        wide!({
            // A table of the sixteen values that there are; what looks up in it takes the lowest four bits.
            let values = _mm512_setr_ps(
                -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
            );
            let values = _mm512_mul_ps(values, factor);
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            let second = _mm512_srli_epi32::<4>(codes);
            [_mm512_permutexvar_ps(codes, values), _mm512_permutexvar_ps(second, values)]
        })
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        wide!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        wide!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn four_splats(self, bits: [u16; 4]) -> [__m512; 4] {
        wide!({
            let four = _mm512_castps128_ps512(four_f16(bits));
            [
                _mm512_permutexvar_ps(_mm512_setzero_si512(), four),
                _mm512_permutexvar_ps(_mm512_set1_epi32(1), four),
                _mm512_permutexvar_ps(_mm512_set1_epi32(2), four),
                _mm512_permutexvar_ps(_mm512_set1_epi32(3), four),
            ]
        })
    }

    #[inline(always)]
    unsafe fn group(self, codes: *const i8) -> Self::Group {
        wide!({
            let (a, b) = (_mm512_loadu_si512(codes.cast()), _mm512_loadu_si512(codes.add(64).cast()));
            let first = _mm512_shuffle_i64x2::<0b10_00_10_00>(a, b);
            let second = _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b);
            let ones = _mm512_set1_epi8(1);
            let sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, first);
            let sums = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(sums, ones, second));
            (first, second, _mm512_mul_ps(sums, _mm512_set1_ps(-MIDDLE)))
        })
    }
    #[inline(always)]
    unsafe fn group_products(self, codes: [*const u8; GROUP], x: Self::Group) -> __m512 {
        wide!({
            let q = _mm512_castsi128_si512(_mm_loadu_si128(codes[0].cast()));
            let q = _mm512_inserti32x4::<1>(q, _mm_loadu_si128(codes[1].cast()));
            let q = _mm512_inserti32x4::<2>(q, _mm_loadu_si128(codes[2].cast()));
            let q = _mm512_inserti32x4::<3>(q, _mm_loadu_si128(codes[3].cast()));
            let mask = _mm512_set1_epi8(15);
            let (first, second, sums) = x;
            let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_and_si512(q, mask), first);
            let dot = _mm512_dpbusd_epi32(dot, _mm512_and_si512(_mm512_srli_epi16::<4>(q), mask), second);
            _mm512_add_ps(_mm512_cvtepi32_ps(dot), sums)
        })
    }
    #[inline(always)]
    fn group_factors(self, bits: [u16; GROUP], scales: [f32; GROUP]) -> __m512 {
        wide!({
            let four = _mm_mul_ps(four_f16(bits), _mm_loadu_ps(scales.as_ptr()));
            let order = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            _mm512_permutexvar_ps(order, _mm512_castps128_ps512(four))
        })
    }

    #[inline(always)]
    unsafe fn block(self, codes: *const i8) -> Self::Block {
        wide!({
            let x = _mm512_broadcast_i64x4(_mm256_loadu_si256(codes.cast()));
            let zero = _mm512_setzero_si512();
            // As in `Vnni::dot`: the codes come 128 too large.
            (x, _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(-128), x)))
        })
    }
    #[inline(always)]
    unsafe fn planes_products(self, low: [*const u8; 2], high: [*const u8; 2], x: Self::Block) -> __m512 {
        wide!({
            // Elements 0 to 15 have the low halves of the bytes, and 16 to 31 the high ones.
            let four = 0x0004_0004_0004_0004;
            let right = _mm512_setr_epi64(0, 0, four, four, 0, 0, four, four);
            let left = _mm512_setr_epi64(four, four, 0, 0, four, four, 0, 0);
            let low = _mm512_srlv_epi16(twice_each(low[0], low[1]), right);
            let high = _mm512_sllv_epi16(twice_each(high[0], high[1]), left);
            // The mask's bits of `low`, the others of `high`.
            let codes = _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi8(15), low, high);
            _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(x.1, codes, x.0))
        })
    }
    #[inline(always)]
    fn four_halves(self, bits: [u16; 4], multiple: f32, scale: f32) -> [__m512; 2] {
        wide!({
            let four = _mm_mul_ps(_mm_mul_ps(four_f16(bits), _mm_set1_ps(multiple)), _mm_set1_ps(scale));
            let four = _mm512_castps128_ps512(four);
            let first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            let second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
            [_mm512_permutexvar_ps(first, four), _mm512_permutexvar_ps(second, four)]
        })
    }
}

super::kernel_table!(
    Avx512,
    Avx512::DETECTED,
    "avx512",
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni"
);
