//! The tier that every processor has: eight f32 in an array. It gives the bits that the tiers with a fused multiply-add
//! give.

use super::simd::{LANES, Simd};
use super::wide::Pair;

/// Plain Rust; what the compiler may use is the target's baseline.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    core::array::from_fn(|i| f(a[i], b[i]))
}

/// `a x b + c` rounded once: the f64 sum is rounded to odd (Boldo and Melquiond 2008, Emulation of FMA), after which
/// rounding it to f32 equals rounding the exact sum.
#[cold]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let rest = sum - product;
    let lost = (product - (sum - rest)) + (c - rest);
    if !sum.is_finite() || lost == 0.0 || sum.to_bits() & 1 == 1 {
        return sum as f32;
    }
    let away = (lost > 0.0) == (sum > 0.0);
    f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 }) as f32
}

impl Simd for Portable {
    type V = [f32; LANES];
    type B = [i8; 32];
    type Wide = Pair<Self>;

    #[inline(always)]
    fn wide(self) -> Pair<Self> {
        Pair(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn halves(self, low: f32, high: f32) -> Self::V {
        [low, low, low, low, high, high, high, high]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: the caller gives eight readable values.
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller gives eight writable values.
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::V {
        // SAFETY: the caller gives eight readable values.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| self.f16(b))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::V) {
        let bits = v.map(|x| half::f16::from_f32_const(x).to_bits());
        // SAFETY: the caller gives eight writable values.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(bits) }
    }
    #[inline(always)]
    fn f16(self, bits: u16) -> f32 {
        half::f16::from_bits(bits).to_f32_const()
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> Self::V {
        // SAFETY: the caller gives eight readable values.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| f32::from_bits(u32::from(b) << 16))
    }

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // The product is exact in f64. Rounding the sum to f64 and then to f32 differs from one rounding only where the
        // f64 lies half way between two f32, or where the f32 is subnormal or zero.
        let sums: [f64; LANES] =
            core::array::from_fn(|i| f64::from(a[i]) * f64::from(b[i]) + f64::from(c[i]));
        let doubtful = |s: f64| {
            s.to_bits() & 0x1fff_ffff == 0x1000_0000 || s.abs() < f64::from(f32::MIN_POSITIVE) && s != 0.0
        };
        if sums.iter().fold(false, |any, s| any | doubtful(*s)) {
            return core::array::from_fn(|i| fused(a[i], b[i], c[i]));
        }
        sums.map(|s| s as f32)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: Self::V) -> Self::V {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn and(self, a: Self::V, mask: Self::V) -> Self::V {
        map2(a, mask, |a, mask| f32::from_bits(a.to_bits() & mask.to_bits()))
    }
    #[inline(always)]
    fn round(self, a: Self::V) -> Self::V {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn exp2_int(self, n: Self::V) -> Self::V {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn sum(self, a: Self::V) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    #[inline(always)]
    fn max_lane(self, a: Self::V) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |m, x| if m > x { m } else { x })
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const i8) -> Self::B {
        // SAFETY: the caller gives 32 readable bytes.
        unsafe { p.cast::<Self::B>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, p: *mut i8, b: Self::B) {
        // SAFETY: the caller gives 32 writable bytes.
        unsafe { p.cast::<Self::B>().write_unaligned(b) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8) -> Self::B {
        // SAFETY: the caller gives 16 readable bytes.
        let codes = unsafe { p.cast::<[u8; 16]>().read_unaligned() };
        core::array::from_fn(|i| if i < 16 { (codes[i] & 15) as i8 } else { (codes[i - 16] >> 4) as i8 })
    }
    #[inline(always)]
    unsafe fn load_halves(self, first: *const u8, second: *const u8) -> Self::B {
        // SAFETY: the caller gives 16 readable bytes each.
        let [first, second] = unsafe { [first, second].map(|p| p.cast::<[i8; 16]>().read_unaligned()) };
        core::array::from_fn(|i| if i < 16 { first[i] } else { second[i - 16] })
    }
    #[inline(always)]
    fn splat_byte(self, x: i8) -> Self::B {
        [x; 32]
    }
    #[inline(always)]
    fn sub_bytes(self, a: Self::B, b: Self::B) -> Self::B {
        core::array::from_fn(|i| a[i].wrapping_sub(b[i]))
    }
    #[inline(always)]
    fn bits(self, b: Self::B, shift: u32, mask: u8) -> Self::B {
        b.map(|b| ((b as u8 >> shift) & mask) as i8)
    }
    #[inline(always)]
    fn join_nibbles(self, low: Self::B, high: Self::B) -> Self::B {
        core::array::from_fn(|i| low[i] | high[i] << 4)
    }
    #[inline(always)]
    fn widen(self, b: Self::B) -> [Self::V; 4] {
        core::array::from_fn(|v| core::array::from_fn(|i| f32::from(b[v * LANES + i])))
    }
    #[inline(always)]
    fn narrow(self, v: [Self::V; 4]) -> Self::B {
        core::array::from_fn(|i| v[i / LANES][i % LANES] as i8)
    }
    #[inline(always)]
    fn dot_bytes(self, weight: Self::B, activation: Self::B) -> Self::V {
        core::array::from_fn(|lane| {
            let mut sum = 0i32;
            for i in 4 * lane..4 * lane + 4 {
                sum += i32::from(weight[i]) * i32::from(activation[i]);
            }
            sum as f32
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{LANES, Portable, Simd};
    use proptest::prelude::*;

    proptest! {
        /// Any bits at all, and sums near half way between two f32, where rounding twice goes wrong.
        #[test]
        fn multiply_add_rounds_once(
            a in any::<u32>(), b in any::<u32>(), c in any::<u32>(), small in -4096i32..4096, shift in 0i32..60,
        ) {
            let near = f32::from_bits(a & 0x007f_ffff | 0x3f80_0000);
            let tiny = small as f32 * 2f32.powi(-shift - 24);
            let cases = [
                (f32::from_bits(a), f32::from_bits(b), f32::from_bits(c)),
                (near, f32::from_bits(b & 0x007f_ffff | 0x3f80_0000), tiny),
                (near, tiny, f32::from_bits(c & 0x007f_ffff | 0x3f80_0000)),
                (near, 2f32.powi(-24), f32::from_bits(c & 0x007f_ffff | 0x3f80_0000)),
                (f32::from_bits(a & 0x0fff_ffff), f32::from_bits(b & 0x2fff_ffff), f32::from_bits(c & 0x007f_ffff)),
            ];
            for (a, b, c) in cases {
                let got = Portable.fma([a; LANES], [b; LANES], [c; LANES])[0];
                let want = a.mul_add(b, c);
                prop_assert!(
                    got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                    "{a:e} x {b:e} + {c:e}: {got:e}, not {want:e}"
                );
            }
        }
    }
}

super::kernel_table!(Portable, Portable, "portable");
