//! Sixteen lanes at a time, for what is wide enough: one register where the machine has such, two vectors elsewhere.
//!
//! Lanes never meet but in the sums that [`super::planes`] states, so both forms give the same bits.

use super::planes::MIDDLE;
use super::simd::{BLOCK, LANES, Simd};

/// Blocks of a row that the estimate by high halves takes at a time.
pub(crate) const GROUP: usize = 4;

/// A tier's arithmetic on sixteen lanes. As with [`Simd`], a value is the proof that the processor has the instructions.
pub(crate) trait Wide: Copy + Send + Sync + 'static {
    /// The tier's vector of eight lanes.
    type V: Copy;
    /// Sixteen f32 lanes.
    type W: Copy;
    /// Activations of [`GROUP`] blocks, as [`Wide::group_products`] takes them.
    type Group: Copy;
    /// Activations of a block, as [`Wide::planes_products`] takes them.
    type Block: Copy;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::W;
    /// Eight lanes, then eight more.
    fn join(self, low: Self::V, high: Self::V) -> Self::W;
    /// The first eight lanes and the others.
    fn split(self, w: Self::W) -> [Self::V; 2];
    /// Sixteen consecutive f32 at any alignment.
    ///
    /// # Safety
    /// `p` points to sixteen readable f32.
    unsafe fn load(self, p: *const f32) -> Self::W;
    /// Writes sixteen consecutive f32 at any alignment.
    ///
    /// # Safety
    /// `p` points to sixteen writable f32.
    unsafe fn store(self, p: *mut f32, w: Self::W);
    /// Sixteen consecutive f16, converted.
    ///
    /// # Safety
    /// `p` points to sixteen readable f16.
    unsafe fn load_f16(self, p: *const u16) -> Self::W;
    /// Thirty-two signed bytes, converted.
    ///
    /// # Safety
    /// `p` points to 32 readable bytes.
    unsafe fn load_widened(self, p: *const i8) -> [Self::W; 2];
    /// Sixteen bytes of 4-bit codes as [`Simd::load_nibbles`] has them, less 8 each, times a factor.
    ///
    /// # Safety
    /// `p` points to 16 readable bytes.
    unsafe fn scaled_nibbles(self, p: *const u8, factor: Self::W) -> [Self::W; 2];
    /// `a x b`.
    fn mul(self, a: Self::W, b: Self::W) -> Self::W;
    /// `a x b + c`, rounded once.
    fn fma(self, a: Self::W, b: Self::W, c: Self::W) -> Self::W;
    /// Four f16, each in all lanes of a vector.
    fn four_splats(self, bits: [u16; 4]) -> [Self::W; 4];

    /// Activations of [`GROUP`] blocks that lie one after the other.
    ///
    /// # Safety
    /// `codes` points to 128 readable bytes, none of which is -128.
    unsafe fn group(self, codes: *const i8) -> Self::Group;
    /// Lane `4 j + i` is the exact sum of `(q - 7.53125) x` over the elements `4 i..4 i + 4` and `16 + 4 i..20 + 4 i` of
    /// block `j`, whose codes `q` of four bits `codes` points to; the i8mm tier has sums by block in lanes `4 j`.
    ///
    /// # Safety
    /// Each points to 16 readable bytes.
    unsafe fn group_products(self, codes: [*const u8; GROUP], x: Self::Group) -> Self::W;
    /// Lanes `4 j..4 j + 4` are the f16 `bits[j]` times `scales[j]`.
    fn group_factors(self, bits: [u16; GROUP], scales: [f32; GROUP]) -> Self::W;

    /// Activations of a block.
    ///
    /// # Safety
    /// `codes` points to 32 readable bytes, none of which is -128.
    unsafe fn block(self, codes: *const i8) -> Self::Block;
    /// Two rows, eight lanes each: lane `i` is the exact sum of `(16 (q - 8) + l) x` over the elements `4 i..4 i + 4` of a
    /// block; `high` points to its `q`, `low` to its `l`.
    ///
    /// # Safety
    /// Each points to 16 readable bytes.
    unsafe fn planes_products(self, low: [*const u8; 2], high: [*const u8; 2], x: Self::Block) -> Self::W;
    /// Four f16, each times `multiple` and then times `scale`, in eight lanes each.
    fn four_halves(self, bits: [u16; 4], multiple: f32, scale: f32) -> [Self::W; 2];
}

/// Sixteen lanes of a tier.
pub(crate) type WideOf<S> = <<S as Simd>::Wide as Wide>::W;

/// Two vectors of eight lanes.
#[derive(Clone, Copy)]
pub(crate) struct Pair<S>(pub(crate) S);

impl<S: Simd> Wide for Pair<S> {
    type V = S::V;
    type W = [S::V; 2];
    type Group = ([S::B; 2], [S::B; 2], [S::V; 2]);
    type Block = S::B;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::W {
        [self.0.splat(x); 2]
    }
    #[inline(always)]
    fn join(self, low: S::V, high: S::V) -> Self::W {
        [low, high]
    }
    #[inline(always)]
    fn split(self, w: Self::W) -> [S::V; 2] {
        w
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::W {
        // SAFETY: the caller's promise.
        unsafe { [self.0.load(p), self.0.load(p.add(LANES))] }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, w: Self::W) {
        // SAFETY: the caller's promise.
        unsafe {
            self.0.store(p, w[0]);
            self.0.store(p.add(LANES), w[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::W {
        // SAFETY: the caller's promise.
        unsafe { [self.0.load_f16(p), self.0.load_f16(p.add(LANES))] }
    }
    #[inline(always)]
    unsafe fn load_widened(self, p: *const i8) -> [Self::W; 2] {
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { self.0.load_widened(p) };
        [[a, b], [c, d]]
    }
    #[inline(always)]
    unsafe fn scaled_nibbles(self, p: *const u8, factor: Self::W) -> [Self::W; 2] {
        let s = self.0;
        // SAFETY: the caller's promise.
        let codes = unsafe { s.sub_bytes(s.load_nibbles(p), s.splat_byte(8)) };
        let [a, b, c, d] = s.widen(codes);
        [self.mul([a, b], factor), self.mul([c, d], factor)]
    }
    #[inline(always)]
    fn mul(self, a: Self::W, b: Self::W) -> Self::W {
        [self.0.mul(a[0], b[0]), self.0.mul(a[1], b[1])]
    }
    #[inline(always)]
    fn fma(self, a: Self::W, b: Self::W, c: Self::W) -> Self::W {
        [self.0.fma(a[0], b[0], c[0]), self.0.fma(a[1], b[1], c[1])]
    }
    #[inline(always)]
    fn four_splats(self, bits: [u16; 4]) -> [Self::W; 4] {
        let [a, b, c, d] = self.0.four_factors(bits, 1.0, 1.0);
        [[a, a], [b, b], [c, c], [d, d]]
    }

    #[inline(always)]
    unsafe fn group(self, codes: *const i8) -> Self::Group {
        let s = self.0;
        let p = codes.cast::<u8>();
        // SAFETY: the caller's promise.
        let (first, second) = unsafe {
            (
                [s.load_halves(p, p.add(BLOCK)), s.load_halves(p.add(2 * BLOCK), p.add(3 * BLOCK))],
                [s.load_halves(p.add(16), p.add(48)), s.load_halves(p.add(80), p.add(112))],
            )
        };
        let (ones, middle) = (s.splat_byte(1), s.splat(-MIDDLE));
        let mut sums = [middle; 2];
        for i in 0..2 {
            // At most 1016 times 241/32: exact.
            let sum = s.add(s.dot_nibbles(ones, first[i]), s.dot_nibbles(ones, second[i]));
            sums[i] = s.mul(sum, middle);
        }
        (first, second, sums)
    }
    #[inline(always)]
    unsafe fn group_products(self, codes: [*const u8; GROUP], x: Self::Group) -> Self::W {
        let s = self.0;
        let (first, second, mut sums) = x;
        for i in 0..2 {
            // SAFETY: the caller's promise.
            let both = unsafe { s.load_halves(codes[2 * i], codes[2 * i + 1]) };
            let low = s.dot_nibbles(s.bits(both, 0, 15), first[i]);
            let high = s.dot_nibbles(s.bits(both, 4, 15), second[i]);
            sums[i] = s.add(s.add(low, high), sums[i]);
        }
        sums
    }
    #[inline(always)]
    fn group_factors(self, bits: [u16; GROUP], scales: [f32; GROUP]) -> Self::W {
        let s = self.0;
        let mut factors = scales;
        for j in 0..GROUP {
            factors[j] *= s.f16(bits[j]);
        }
        [s.halves(factors[0], factors[1]), s.halves(factors[2], factors[3])]
    }

    #[inline(always)]
    unsafe fn block(self, codes: *const i8) -> Self::Block {
        // SAFETY: the caller's promise.
        unsafe { self.0.load_bytes(codes) }
    }
    #[inline(always)]
    unsafe fn planes_products(self, low: [*const u8; 2], high: [*const u8; 2], x: Self::Block) -> Self::W {
        let s = self.0;
        let mut sums = [s.splat(0.0); 2];
        for r in 0..2 {
            // SAFETY: the caller's promise.
            let codes = unsafe { s.join_nibbles(s.load_nibbles(low[r]), s.load_nibbles(high[r])) };
            // 128 less, which wraps to the signed code.
            sums[r] = s.dot_bytes(s.sub_bytes(codes, s.splat_byte(-128)), x);
        }
        sums
    }
    #[inline(always)]
    fn four_halves(self, bits: [u16; 4], multiple: f32, scale: f32) -> [Self::W; 2] {
        let [a, b, c, d] = self.0.four_factors(bits, multiple, scale);
        [[a, b], [c, d]]
    }
}
