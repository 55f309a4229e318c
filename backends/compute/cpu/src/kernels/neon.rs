//! The tier of every AArch64 processor: a vector of eight lanes is two registers of four.
//!
//! f16 is converted by plain NEON, and sums are f32, so the arithmetic of the fp16 extension has no use here. What the
//! extensions change is the product of bytes: [`BytesDot`], with plain NEON's here and the others' in files of their own.

use core::arch::aarch64::*;
use core::marker::PhantomData;

use super::simd::Simd;
use super::wide::Pair;

/// How a tier multiplies bytes.
pub(super) trait BytesDot: Copy + Send + Sync + 'static {
    /// See [`Simd::dot_bytes`]; the results are still integers.
    ///
    /// # Safety
    /// The processor has the tier's instructions.
    unsafe fn dot(weight: [int8x16_t; 2], activation: [int8x16_t; 2]) -> [int32x4_t; 2];

    /// See [`Simd::SQUARES`].
    const SQUARES: bool = false;
    /// See [`Simd::dot_square`].
    ///
    /// # Safety
    /// As for `dot`.
    #[inline(always)]
    unsafe fn square(weights: [[int8x16_t; 2]; 2], activations: [[int8x16_t; 2]; 2]) -> [int32x4_t; 2] {
        let [a, b] = weights;
        let [x, y] = activations;
        // SAFETY: the caller's promise.
        unsafe { sums_of_four([Self::dot(a, x), Self::dot(a, y), Self::dot(b, x), Self::dot(b, y)]) }
    }
    /// See [`Simd::dot_column`].
    ///
    /// # Safety
    /// As for `dot`.
    #[inline(always)]
    unsafe fn column(weights: [[int8x16_t; 2]; 4], activation: [int8x16_t; 2]) -> [int32x4_t; 2] {
        // SAFETY: the caller's promise.
        unsafe { sums_of_four(weights.map(|w| Self::dot(w, activation))) }
    }
}

/// The sums of each register's lanes, in the order of the four vectors.
///
/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn sums_of_four([a, b, c, d]: [[int32x4_t; 2]; 4]) -> [int32x4_t; 2] {
    // SAFETY: the caller's promise.
    unsafe { [0, 1].map(|half| vpaddq_s32(vpaddq_s32(a[half], b[half]), vpaddq_s32(c[half], d[half]))) }
}

/// Proof that NEON, and what `D` needs beyond it, were detected.
#[derive(Clone, Copy)]
pub(super) struct Vectors<D>(PhantomData<D>);

impl<D> Vectors<D> {
    /// For the tiers' entry points, which run after detection only.
    pub(super) const DETECTED: Vectors<D> = Vectors(PhantomData);
}

/// Plain NEON's products: widening multiplications, then sums of neighbours.
#[derive(Clone, Copy)]
pub(super) struct Widening;

type Neon = Vectors<Widening>;

/// What this tier needs and this machine lacks.
pub(crate) fn missing() -> Vec<&'static str> {
    super::missing!(is_aarch64_feature_detected: "neon")
}

macro_rules! wide {
    ($($body:tt)*) => {
        // SAFETY: a `Vectors` value exists only where its features were detected; what the pointers of the memory
        // operations need is their callers' promise.
        unsafe { $($body)* }
    };
}

impl BytesDot for Widening {
    #[inline(always)]
    unsafe fn dot(weight: [int8x16_t; 2], activation: [int8x16_t; 2]) -> [int32x4_t; 2] {
        let sixteen = |w: int8x16_t, x: int8x16_t| {
            wide!({
                // A product is at most 128 x 127: it fits 16 bits, and two are added in 32.
                let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
                let high = vmull_high_s8(w, x);
                vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))
            })
        };
        [sixteen(weight[0], activation[0]), sixteen(weight[1], activation[1])]
    }
}

impl<D: BytesDot> Simd for Vectors<D> {
    type V = [float32x4_t; 2];
    type B = [int8x16_t; 2];
    type Wide = Pair<Self>;

    #[inline(always)]
    fn wide(self) -> Pair<Self> {
        Pair(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        wide!([vdupq_n_f32(x); 2])
    }
    #[inline(always)]
    fn halves(self, low: f32, high: f32) -> Self::V {
        wide!([vdupq_n_f32(low), vdupq_n_f32(high)])
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        wide!([vld1q_f32(p), vld1q_f32(p.add(4))])
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        wide!({
            vst1q_f32(p, v[0]);
            vst1q_f32(p.add(4), v[1]);
        })
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::V {
        wide!({
            let eight = vreinterpretq_f16_u16(vld1q_u16(p));
            [vcvt_f32_f16(vget_low_f16(eight)), vcvt_high_f32_f16(eight)]
        })
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::V) {
        wide!(vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v[0]), v[1]))))
    }
    #[inline(always)]
    fn f16(self, bits: u16) -> f32 {
        wide!(vgetq_lane_f32::<0>(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)))))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::V {
        wide!({
            let eight = vld1q_u16(p);
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(eight))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(eight)),
            ]
        })
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        wide!([vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        wide!([vsubq_f32(a[0], b[0]), vsubq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        wide!([vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        wide!([vdivq_f32(a[0], b[0]), vdivq_f32(a[1], b[1])])
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        wide!([vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])])
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        // Not FMAX, which gives a NaN where either is one.
        let max = |a, b| wide!(vbslq_f32(vcgtq_f32(a, b), a, b));
        [max(a[0], b[0]), max(a[1], b[1])]
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        let min = |a, b| wide!(vbslq_f32(vcltq_f32(a, b), a, b));
        [min(a[0], b[0]), min(a[1], b[1])]
    }
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        wide!([vabsq_f32(a[0]), vabsq_f32(a[1])])
    }
    #[inline(always)]
    fn and(self, a: Self::V, mask: Self::V) -> Self::V {
        let and = |a, mask| {
            wide!(vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(mask))))
        };
        [and(a[0], mask[0]), and(a[1], mask[1])]
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        wide!([vrndnq_f32(a[0]), vrndnq_f32(a[1])])
    }
    #[inline(always)]
    fn exp2_int(self, n: Self::V) -> Self::V {
        n.map(|n| {
            wide!(vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)))))
        })
    }
    #[inline(always)]
    fn sum(self, a: Self::V) -> f32 {
        wide!({
            let four = vaddq_f32(a[0], a[1]);
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        })
    }
    #[inline(always)]
    fn max_lane(self, a: Self::V) -> f32 {
        wide!(vmaxnmvq_f32(vmaxnmq_f32(a[0], a[1])))
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const i8) -> Self::B {
        wide!([vld1q_s8(p), vld1q_s8(p.add(16))])
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut i8, b: Self::B) {
        wide!({
            vst1q_s8(p, b[0]);
            vst1q_s8(p.add(16), b[1]);
        })
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8) -> Self::B {
        wide!({
            let codes = vld1q_u8(p);
            [
                vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(15))),
                vreinterpretq_s8_u8(vshrq_n_u8::<4>(codes)),
            ]
        })
    }
    #[inline(always)]
    unsafe fn load_halves(self, first: *const u8, second: *const u8) -> Self::B {
        wide!([vld1q_s8(first.cast()), vld1q_s8(second.cast())])
    }
    #[inline(always)]
    fn splat_byte(self, x: i8) -> Self::B {
        wide!([vdupq_n_s8(x); 2])
    }
    #[inline(always)]
    fn sub_bytes(self, a: Self::B, b: Self::B) -> Self::B {
        wide!([vsubq_s8(a[0], b[0]), vsubq_s8(a[1], b[1])])
    }
    #[inline(always)]
    fn bits(self, b: Self::B, shift: u32, mask: u8) -> Self::B {
        b.map(|b| {
            wide!({
                // There is no shift right by a variable: it is one to the left by less than nothing.
                let shifted = vshlq_u8(vreinterpretq_u8_s8(b), vdupq_n_s8(-(shift as i8)));
                vreinterpretq_s8_u8(vandq_u8(shifted, vdupq_n_u8(mask)))
            })
        })
    }
    #[inline(always)]
    fn join_nibbles(self, low: Self::B, high: Self::B) -> Self::B {
        wide!([vsliq_n_s8::<4>(low[0], high[0]), vsliq_n_s8::<4>(low[1], high[1])])
    }
    #[inline(always)]
    fn widen(self, b: Self::B) -> [Self::V; 4] {
        wide!({
            let eight =
                |v: int16x8_t| [vcvtq_f32_s32(vmovl_s16(vget_low_s16(v))), vcvtq_f32_s32(vmovl_high_s16(v))];
            [
                eight(vmovl_s8(vget_low_s8(b[0]))),
                eight(vmovl_high_s8(b[0])),
                eight(vmovl_s8(vget_low_s8(b[1]))),
                eight(vmovl_high_s8(b[1])),
            ]
        })
    }
    #[inline(always)]
    fn narrow(self, v: [Self::V; 4]) -> Self::B {
        let eight = |v: Self::V| {
            wide!(vmovn_s16(vmovn_high_s32(vmovn_s32(vcvtq_s32_f32(v[0])), vcvtq_s32_f32(v[1]))))
        };
        wide!([vcombine_s8(eight(v[0]), eight(v[1])), vcombine_s8(eight(v[2]), eight(v[3]))])
    }
    #[inline(always)]
    fn dot_bytes(self, weight: Self::B, activation: Self::B) -> Self::V {
        wide!({
            let [low, high] = D::dot(weight, activation);
            [vcvtq_f32_s32(low), vcvtq_f32_s32(high)]
        })
    }

    const SQUARES: bool = D::SQUARES;
    #[inline(always)]
    fn dot_square(self, weights: [Self::B; 2], activations: [Self::B; 2]) -> Self::V {
        wide!({
            let [low, high] = D::square(weights, activations);
            [vcvtq_f32_s32(low), vcvtq_f32_s32(high)]
        })
    }
    #[inline(always)]
    fn dot_column(self, weights: [Self::B; 4], activation: Self::B) -> Self::V {
        wide!({
            let [low, high] = D::column(weights, activation);
            [vcvtq_f32_s32(low), vcvtq_f32_s32(high)]
        })
    }
    #[inline(always)]
    fn outer(self, low: [f32; 2], high: [f32; 2], tokens: [f32; 2]) -> Self::V {
        wide!({
            let tokens = vld1_f32(tokens.as_ptr());
            let four = |f: [f32; 2]| vcombine_f32(vmul_n_f32(tokens, f[0]), vmul_n_f32(tokens, f[1]));
            [four(low), four(high)]
        })
    }
}

super::kernel_table!(Neon, Neon::DETECTED, "neon", "neon");
