//! The eight-lane vector that every kernel is written against; each instruction tier implements it in one file.
//!
//! A value of a [`Simd`] type is the proof that the processor (and the operating system) can execute the tier's
//! instructions: it is made only after detection, so the arithmetic methods are safe. The number of lanes is eight on
//! every tier, and so is the meaning of each lane, which fixes the order of all sums: wider machines take several rows
//! per register, narrower ones several registers per vector.

use super::wide::Wide;

/// Lanes of [`Simd::V`].
pub(crate) const LANES: usize = 8;

/// Elements of a quantisation block, and of one step of the inner loops.
pub(crate) const BLOCK: usize = 32;

/// One instruction tier's vector arithmetic.
///
/// All methods are `inline(always)` in the implementations, so that they compile inside the tier's
/// `#[target_feature]` entry points (see the `kernel_table` macro of the parent module).
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Eight f32 lanes.
    type V: Copy;
    /// Thirty-two signed bytes.
    type B: Copy;
    /// Sixteen lanes at a time.
    type Wide: Wide<V = Self::V>;

    /// Sixteen lanes at a time.
    fn wide(self) -> Self::Wide;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Four lanes `low`, then four lanes `high`.
    fn halves(self, low: f32, high: f32) -> Self::V;
    /// Eight consecutive f32 at any alignment.
    ///
    /// # Safety
    /// `p` points to eight readable f32.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Writes eight consecutive f32 at any alignment.
    ///
    /// # Safety
    /// `p` points to eight writable f32.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Eight consecutive f16, converted.
    ///
    /// # Safety
    /// `p` points to eight readable f16.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// Writes eight f16, rounded to nearest even.
    ///
    /// # Safety
    /// `p` points to eight writable f16.
    unsafe fn store_f16(self, p: *mut u16, v: Self::V);
    /// Four f16, each times `multiple` and then times `scale`, in all lanes of a vector each.
    #[inline(always)]
    fn four_factors(self, bits: [u16; 4], multiple: f32, scale: f32) -> [Self::V; 4] {
        bits.map(|bits| self.splat(self.f16(bits) * multiple * scale))
    }
    /// One f16, converted.
    fn f16(self, bits: u16) -> f32;
    /// Eight consecutive bf16, converted.
    ///
    /// # Safety
    /// `p` points to eight readable bf16.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;

    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a x b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a x b + c`, rounded once on every tier, so that all give the same bits.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a` where `a > b`, else `b`: a NaN in `b` stays.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a` where `a < b`, else `b`: a NaN in `b` stays.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// The absolute value.
    fn abs(self, a: Self::V) -> Self::V;
    /// The bits of `a` that are set in `mask`.
    fn and(self, a: Self::V, mask: Self::V) -> Self::V;
    /// To the nearest integer, ties to even.
    fn round(self, a: Self::V) -> Self::V;
    /// Two to the power of each lane, which must be an integer in `-126..=127`.
    fn exp2_int(self, n: Self::V) -> Self::V;
    /// The sum of the lanes as `((0+4)+(2+6)) + ((1+5)+(3+7))`.
    fn sum(self, a: Self::V) -> f32;
    /// The sums of four vectors, each as [`Simd::sum`] has it.
    #[inline(always)]
    fn sums(self, v: [Self::V; 4]) -> [f32; 4] {
        v.map(|v| self.sum(v))
    }
    /// The largest lane.
    fn max_lane(self, a: Self::V) -> f32;

    /// Thirty-two consecutive signed bytes.
    ///
    /// # Safety
    /// `p` points to 32 readable bytes.
    unsafe fn load_bytes(self, p: *const i8) -> Self::B;
    /// Writes thirty-two signed bytes.
    ///
    /// # Safety
    /// `p` points to 32 writable bytes.
    unsafe fn store_bytes(self, p: *mut i8, b: Self::B);
    /// Sixteen bytes of 4-bit codes: the low halves are elements 0 to 15, the high ones 16 to 31.
    ///
    /// # Safety
    /// `p` points to 16 readable bytes.
    unsafe fn load_nibbles(self, p: *const u8) -> Self::B;
    /// Sixteen bytes, then sixteen others.
    ///
    /// # Safety
    /// Each points to 16 readable bytes.
    unsafe fn load_halves(self, first: *const u8, second: *const u8) -> Self::B;
    /// All bytes `x`.
    fn splat_byte(self, x: i8) -> Self::B;
    /// `a - b`, byte by byte, wrapping.
    fn sub_bytes(self, a: Self::B, b: Self::B) -> Self::B;
    /// Each byte shifted right by `shift < 8` and masked with `mask`, which must be below `256 >> shift`.
    fn bits(self, b: Self::B, shift: u32, mask: u8) -> Self::B;
    /// `low + 16 x high` for bytes below 16.
    fn join_nibbles(self, low: Self::B, high: Self::B) -> Self::B;
    /// The bytes as four vectors of f32, in order.
    fn widen(self, b: Self::B) -> [Self::V; 4];
    /// Thirty-two consecutive signed bytes as four vectors of f32: cheaper than a load and [`Simd::widen`].
    ///
    /// # Safety
    /// `p` points to 32 readable bytes.
    #[inline(always)]
    unsafe fn load_widened(self, p: *const i8) -> [Self::V; 4] {
        // SAFETY: the caller's promise.
        self.widen(unsafe { self.load_bytes(p) })
    }
    /// Four vectors of integral values in `-127..=127` as bytes, in order.
    fn narrow(self, v: [Self::V; 4]) -> Self::B;
    /// Lane `i` is the exact sum of the four products of elements `4i..4i+4`.
    ///
    /// `activation` must not hold -128; `weight` may.
    fn dot_bytes(self, weight: Self::B, activation: Self::B) -> Self::V;
    /// The same for codes of 0 to 15.
    #[inline(always)]
    fn dot_nibbles(self, codes: Self::B, activation: Self::B) -> Self::V {
        self.dot_bytes(codes, activation)
    }

    /// Whether the int8 kernels keep four outputs per vector, by [`Simd::dot_square`] and [`Simd::dot_column`]. Then
    /// [`Simd::dot_bytes`] must have the sums over elements 0 to 15 and 16 to 31 in lanes 0 and 4 and zeros elsewhere,
    /// so that all of them add the same numbers in the same order.
    const SQUARES: bool = false;
    /// Two rows times two tokens. Lanes 0 to 3 are the exact sums over elements 0 to 15 of the products of row 0 and
    /// token 0, row 0 and token 1, row 1 and token 0, row 1 and token 1; lanes 4 to 7 are those over 16 to 31.
    #[inline(always)]
    fn dot_square(self, weights: [Self::B; 2], activations: [Self::B; 2]) -> Self::V {
        let [a, b] = weights;
        let [x, y] = activations;
        self.sums_by_half([(a, x), (a, y), (b, x), (b, y)])
    }
    /// Four rows times one token, laid out likewise.
    #[inline(always)]
    fn dot_column(self, weights: [Self::B; 4], activation: Self::B) -> Self::V {
        self.sums_by_half(weights.map(|w| (w, activation)))
    }
    /// Four products: lanes 0 to 3 are their sums over elements 0 to 15, lanes 4 to 7 those over 16 to 31.
    #[inline(always)]
    fn sums_by_half(self, pairs: [(Self::B, Self::B); 4]) -> Self::V {
        let mut sums = [0.0f32; LANES];
        for (i, (weight, activation)) in pairs.into_iter().enumerate() {
            let mut lanes = [0.0f32; LANES];
            // SAFETY: eight lanes.
            unsafe { self.store(lanes.as_mut_ptr(), self.dot_bytes(weight, activation)) };
            // Integers below 2^24: exact in any order.
            sums[i] = lanes[..4].iter().sum();
            sums[4 + i] = lanes[4..].iter().sum();
        }
        // SAFETY: eight lanes.
        unsafe { self.load(sums.as_ptr()) }
    }
    /// Lane `2r + t` is `low[r] x tokens[t]`, lane `4 + 2r + t` is `high[r] x tokens[t]`.
    #[inline(always)]
    fn outer(self, low: [f32; 2], high: [f32; 2], tokens: [f32; 2]) -> Self::V {
        let [x, y] = tokens;
        let factors = [low[0], low[0], low[1], low[1], high[0], high[0], high[1], high[1]];
        let tokens = [x, y, x, y, x, y, x, y];
        // SAFETY: eight lanes each.
        unsafe { self.mul(self.load(factors.as_ptr()), self.load(tokens.as_ptr())) }
    }

    /// The first `n < 8` f32; the other lanes are zero.
    ///
    /// # Safety
    /// `p` points to `n` readable f32.
    #[inline(always)]
    unsafe fn load_part(self, p: *const f32, n: usize) -> Self::V {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the caller gives `n` readable values; `lanes` holds eight, and `n` is below that.
        unsafe {
            core::ptr::copy_nonoverlapping(p.cast::<u8>(), lanes.as_mut_ptr().cast::<u8>(), n.min(LANES) * 4);
            self.load(lanes.as_ptr())
        }
    }

    /// Writes the first `n < 8` lanes.
    ///
    /// # Safety
    /// `p` points to `n` writable f32.
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, v: Self::V, n: usize) {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: as for `load_part`.
        unsafe {
            self.store(lanes.as_mut_ptr(), v);
            core::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<u8>(), p.cast::<u8>(), n.min(LANES) * 4);
        }
    }

    /// The first `n < 8` bf16, converted; the other lanes are zero.
    ///
    /// # Safety
    /// `p` points to `n` readable bf16.
    #[inline(always)]
    unsafe fn load_bf16_part(self, p: *const u16, n: usize) -> Self::V {
        let mut lanes = [0u16; LANES];
        // SAFETY: as for `load_part`.
        unsafe {
            core::ptr::copy_nonoverlapping(p.cast::<u8>(), lanes.as_mut_ptr().cast::<u8>(), n.min(LANES) * 2);
            self.load_bf16(lanes.as_ptr())
        }
    }

    /// The first `n < 8` f16, converted; the other lanes are zero.
    ///
    /// # Safety
    /// `p` points to `n` readable f16.
    #[inline(always)]
    unsafe fn load_f16_part(self, p: *const u16, n: usize) -> Self::V {
        let mut lanes = [0u16; LANES];
        // SAFETY: as for `load_part`.
        unsafe {
            core::ptr::copy_nonoverlapping(p.cast::<u8>(), lanes.as_mut_ptr().cast::<u8>(), n.min(LANES) * 2);
            self.load_f16(lanes.as_ptr())
        }
    }

    /// Writes the first `n < 8` lanes as f16.
    ///
    /// # Safety
    /// `p` points to `n` writable f16.
    #[inline(always)]
    unsafe fn store_f16_part(self, p: *mut u16, v: Self::V, n: usize) {
        let mut lanes = [0u16; LANES];
        // SAFETY: as for `load_part`.
        unsafe {
            self.store_f16(lanes.as_mut_ptr(), v);
            core::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<u8>(), p.cast::<u8>(), n.min(LANES) * 2);
        }
    }

    /// `e` to the power of each lane, within about 2 ulp; below -87.3 it stays at 1.2e-38, above 88.3 at 2.3e38.
    ///
    /// Range reduction by multiples of ln 2 in two parts, then the minimax polynomial of the Cephes library's `expf`.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        let x = self.max(self.splat(-87.33), self.min(self.splat(88.3), x));
        let n = self.round(self.mul(x, self.splat(core::f32::consts::LOG2_E)));
        let r = self.fma(n, self.splat(-0.693_359_4), x);
        let r = self.fma(n, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(1.987_569_1e-4);
        for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = self.fma(p, r, self.splat(coefficient));
        }
        let p = self.fma(p, self.mul(r, r), r);
        self.mul(self.add(p, self.splat(1.0)), self.exp2_int(n))
    }
}
