//! The tier of x86-64 processors with AVX2, FMA and F16C (Intel since Haswell, AMD since Excavator).

use core::arch::x86_64::*;
use core::marker::PhantomData;

use super::simd::Simd;
use super::wide::{Pair, Wide};

/// How a tier multiplies bytes.
pub(super) trait BytesDot: Copy + Send + Sync + 'static {
    /// The tier's arithmetic on sixteen lanes.
    type Wide: Wide<V = __m256>;
    /// For the tiers' entry points, which run after detection only.
    const WIDE: Self::Wide;

    /// See [`Simd::dot_bytes`]; the results are still integers.
    ///
    /// # Safety
    /// The processor has the tier's instructions.
    unsafe fn dot(weight: __m256i, activation: __m256i) -> __m256i;

    /// See [`Simd::dot_nibbles`]; the results are still integers.
    ///
    /// # Safety
    /// The processor has the tier's instructions.
    unsafe fn dot_nibbles(codes: __m256i, activation: __m256i) -> __m256i;
}

/// Proof that AVX2, FMA and F16C, and what `D` needs beyond them, were detected, in the processor and in the state
/// that the system saves.
#[derive(Clone, Copy)]
pub(super) struct Vectors<D>(PhantomData<D>);

impl<D> Vectors<D> {
    /// For the tiers' entry points, which run after detection only.
    pub(super) const DETECTED: Vectors<D> = Vectors(PhantomData);
}

/// AVX2's products: pairs in 16 bits, then pairs of pairs.
#[derive(Clone, Copy)]
pub(super) struct Pairs;

type Avx2 = Vectors<Pairs>;

/// What this tier needs and this machine lacks; the macro asks XGETBV too, so a system that does not save the
/// registers lacks the feature.
pub(crate) fn missing() -> Vec<&'static str> {
    super::missing!(is_x86_feature_detected: "avx2", "fma", "f16c")
}

macro_rules! wide {
    ($($body:tt)*) => {
        // SAFETY: a `Vectors` value exists only where its features were detected; what the pointers of the memory
        // operations need is their callers' promise.
        unsafe { $($body)* }
    };
}

impl BytesDot for Pairs {
    type Wide = Pair<Avx2>;
    const WIDE: Pair<Avx2> = Pair(Vectors::DETECTED);

    #[inline(always)]
    unsafe fn dot(weight: __m256i, activation: __m256i) -> __m256i {
        wide!({
            // |weight| is at most 128 and |activation| 127, so a pair is at most 32512: no saturation.
            let magnitude = _mm256_sign_epi8(weight, weight);
            let signed = _mm256_sign_epi8(activation, weight);
            let pairs = _mm256_maddubs_epi16(magnitude, signed);
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        })
    }

    #[inline(always)]
    unsafe fn dot_nibbles(codes: __m256i, activation: __m256i) -> __m256i {
        wide!(_mm256_madd_epi16(_mm256_maddubs_epi16(codes, activation), _mm256_set1_epi16(1)))
    }
}

impl<D: BytesDot> Simd for Vectors<D> {
    type V = __m256;
    type B = __m256i;
    type Wide = D::Wide;

    #[inline(always)]
    fn wide(self) -> D::Wide {
        D::WIDE
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        wide!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    fn halves(self, low: f32, high: f32) -> __m256 {
        wide!(_mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low)))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        wide!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        wide!(_mm256_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        wide!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m256) {
        wide!(_mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }
    #[inline(always)]
    fn f16(self, bits: u16) -> f32 {
        wide!(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits)))))
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        wide!({
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        })
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        wide!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        wide!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        wide!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        wide!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        wide!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        wide!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        wide!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn abs(self, a: __m256) -> __m256 {
        wide!(_mm256_andnot_ps(_mm256_set1_ps(-0.0), a))
    }
    #[inline(always)]
    fn and(self, a: __m256, mask: __m256) -> __m256 {
        wide!(_mm256_and_ps(a, mask))
    }
    #[inline(always)]
    fn round(self, a: __m256) -> __m256 {
        wide!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn exp2_int(self, n: __m256) -> __m256 {
        wide!({
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }
    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        wide!({
            let four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
    #[inline(always)]
    fn sums(self, v: [__m256; 4]) -> [f32; 4] {
        wide!({
            let [a, b, c, d] =
                v.map(|v| _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v)));
            let [ab, cd] =
                [(a, b), (c, d)].map(|(a, b)| _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b)));
            let sums = _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
            let mut out = [0.0f32; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        })
    }
    #[inline(always)]
    fn max_lane(self, a: __m256) -> f32 {
        wide!({
            let four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const i8) -> __m256i {
        wide!(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut i8, b: __m256i) {
        wide!(_mm256_storeu_si256(p.cast(), b))
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8) -> __m256i {
        wide!({
            let codes = _mm_loadu_si128(p.cast());
            let both = _mm256_set_m128i(_mm_srli_epi16::<4>(codes), codes);
            _mm256_and_si256(both, _mm256_set1_epi8(15))
        })
    }
    #[inline(always)]
    unsafe fn load_halves(self, first: *const u8, second: *const u8) -> __m256i {
        wide!(_mm256_set_m128i(_mm_loadu_si128(second.cast()), _mm_loadu_si128(first.cast())))
    }
    #[inline(always)]
    fn splat_byte(self, x: i8) -> __m256i {
        wide!(_mm256_set1_epi8(x))
    }
    #[inline(always)]
    fn sub_bytes(self, a: __m256i, b: __m256i) -> __m256i {
        wide!(_mm256_sub_epi8(a, b))
    }
    #[inline(always)]
    fn bits(self, b: __m256i, shift: u32, mask: u8) -> __m256i {
        wide!({
            // The mask drops what a 16-bit shift brings in from the neighbour.
            let shifted = _mm256_srl_epi16(b, _mm_cvtsi32_si128(shift as i32));
            _mm256_and_si256(shifted, _mm256_set1_epi8(mask as i8))
        })
    }
    #[inline(always)]
    fn join_nibbles(self, low: __m256i, high: __m256i) -> __m256i {
        wide!(_mm256_or_si256(low, _mm256_slli_epi16::<4>(high)))
    }
    #[inline(always)]
    fn widen(self, b: __m256i) -> [__m256; 4] {
        wide!({
            let low = _mm256_castsi256_si128(b);
            let high = _mm256_extracti128_si256::<1>(b);
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(low))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(high))),
            ]
        })
    }
    #[inline(always)]
    unsafe fn load_widened(self, p: *const i8) -> [__m256; 4] {
        wide!({
            [0, 8, 16, 24]
                .map(|at| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(at).cast()))))
        })
    }
    #[inline(always)]
    fn narrow(self, v: [__m256; 4]) -> __m256i {
        wide!({
            let [a, b, c, d] = v.map(|v| _mm256_cvtps_epi32(v));
            // Both packs work within 128-bit halves; the last permutation puts the groups of four in order.
            let bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
            _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
        })
    }
    #[inline(always)]
    fn dot_bytes(self, weight: __m256i, activation: __m256i) -> __m256 {
        wide!(_mm256_cvtepi32_ps(D::dot(weight, activation)))
    }
    #[inline(always)]
    fn four_factors(self, bits: [u16; 4], multiple: f32, scale: f32) -> [__m256; 4] {
        let [a, b, c, d] = bits.map(i64::from);
        wide!({
            let four = _mm_cvtph_ps(_mm_cvtsi64_si128(a | b << 16 | c << 32 | d << 48));
            let four = _mm_mul_ps(_mm_mul_ps(four, _mm_set1_ps(multiple)), _mm_set1_ps(scale));
            let twice = _mm256_set_m128(four, four);
            [
                _mm256_permute_ps::<0b00_00_00_00>(twice),
                _mm256_permute_ps::<0b01_01_01_01>(twice),
                _mm256_permute_ps::<0b10_10_10_10>(twice),
                _mm256_permute_ps::<0b11_11_11_11>(twice),
            ]
        })
    }
    #[inline(always)]
    fn dot_nibbles(self, codes: __m256i, activation: __m256i) -> __m256 {
        wide!(_mm256_cvtepi32_ps(D::dot_nibbles(codes, activation)))
    }
}

super::kernel_table!(Avx2, Avx2::DETECTED, "avx2", "avx2,fma,f16c");
