//! Quantised weight types as integer codes with one or two factors per 32 elements.
//!
//! All are cut into blocks of 32, the blocks of int8 activations, whatever blocks the type itself has: so one kernel
//! serves all of them.

use super::format::{Format, Row};
use super::simd::{BLOCK, Simd};
use super::wide::{Wide, WideOf};

/// What a block's second factor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Second {
    /// There is none: `value = a x code`.
    None,
    /// Elements 16 to 31: `value = b x code` there, `a x code` for elements 0 to 15.
    UpperHalf,
    /// A term of all elements: `value = a x code + b`, with codes of 0 to 15.
    Term,
}

/// A type whose 32 elements are integer codes with factors `[a, b]`.
pub(crate) trait IntegerFormat: Format {
    /// The meaning of the second factor.
    const SECOND: Second;
    /// Where the first factor is one f16 per block and there is no second: where it stands in the row, and what it is to
    /// be multiplied by (a power of two).
    const FACTOR: Option<(usize, f32)> = None;

    /// The block's codes, none of which is below -128, and its factors.
    ///
    /// # Safety
    /// The row has that block.
    unsafe fn codes<S: Simd>(s: S, row: Row, block: usize) -> (S::B, [f32; 2]);
}

/// Adds a block's product with int8 activations to an accumulator. `sums` are the activations' own sums by lane,
/// from [`lane_sums`].
#[inline(always)]
pub(crate) fn add_product<S: Simd, F: IntegerFormat>(
    s: S,
    (weight, [a, b]): (S::B, [f32; 2]),
    (activation, scale, sums): (S::B, f32, S::V),
    sum: S::V,
) -> S::V {
    let products = match F::SECOND {
        Second::None | Second::UpperHalf => s.dot_bytes(weight, activation),
        Second::Term => s.dot_nibbles(weight, activation),
    };
    match F::SECOND {
        Second::None => s.fma(products, s.splat(a * scale), sum),
        Second::UpperHalf => s.fma(products, s.halves(a * scale, b * scale), sum),
        Second::Term => s.fma(sums, s.splat(b * scale), s.fma(products, s.splat(a * scale), sum)),
    }
}

/// Adds a block's products of four rows, as [`add_product`] does one by one, for types whose factor is `(bytes of a block,
/// multiple)`: the f16 of four rows are converted together.
///
/// # Safety
/// The rows have the block.
#[inline(always)]
pub(crate) unsafe fn add_four<S: Simd, F: IntegerFormat>(
    s: S,
    rows: [Row; 4],
    block: usize,
    (bytes, multiple): (usize, f32),
    (activation, scale): (S::B, f32),
    totals: &mut [S::V],
) {
    // SAFETY: a block begins with its factor.
    let bits = rows.map(|row| unsafe { row.data.add(block * bytes).cast::<u16>().read_unaligned() });
    let factors = s.four_factors(bits, multiple, scale);
    for (r, total) in totals.iter_mut().enumerate().take(4) {
        // SAFETY: the caller's rows have the block.
        let (codes, _) = unsafe { F::codes(s, rows[r], block) };
        *total = s.fma(s.dot_bytes(codes, activation), factors[r], *total);
    }
}

/// The exact sums of each lane's four activation codes, where the type has a term that they multiply.
#[inline(always)]
pub(crate) fn lane_sums<S: Simd, F: IntegerFormat>(s: S, activation: S::B) -> S::V {
    match F::SECOND {
        Second::Term => s.dot_nibbles(s.splat_byte(1), activation),
        Second::None | Second::UpperHalf => s.splat(0.0),
    }
}

/// A block as f32.
#[inline(always)]
pub(super) fn values<S: Simd, F: IntegerFormat>(s: S, v: [S::V; 4], [a, b]: [f32; 2]) -> [S::V; 4] {
    let first = s.splat(a);
    match F::SECOND {
        Second::None => v.map(|v| s.mul(v, first)),
        Second::UpperHalf => {
            let second = s.splat(b);
            [s.mul(v[0], first), s.mul(v[1], first), s.mul(v[2], second), s.mul(v[3], second)]
        }
        Second::Term => {
            let term = s.splat(b);
            v.map(|v| s.fma(v, first, term))
        }
    }
}

/// The f16 at `p`.
///
/// # Safety
/// Two readable bytes.
#[inline(always)]
pub(super) unsafe fn half<S: Simd>(s: S, p: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    s.f16(unsafe { p.cast::<u16>().read_unaligned() })
}

/// [`Format`] for types that are read as codes.
macro_rules! format_of_codes {
    ($($format:ty),*) => {
        $(impl Format for $format {
            #[inline(always)]
            unsafe fn vectors<S: Simd>(s: S, row: Row, block: usize) -> [S::V; 4] {
                // SAFETY: the caller's row has the block.
                let (codes, factors) = unsafe { Self::codes(s, row, block) };
                values::<S, Self>(s, s.widen(codes), factors)
            }

            #[inline(always)]
            unsafe fn tail<S: Simd>(s: S, _: Row, _: usize, _: usize) -> S::V {
                s.splat(0.0)
            }
        })*
    };
}
format_of_codes!(Q4Min, Q4K, Q6K);
pub(super) use format_of_codes;

/// Q8_0 rows.
#[derive(Clone, Copy)]
pub(crate) struct Q8;

impl Q8 {
    const BYTES: usize = 34;
}

impl Format for Q8 {
    #[inline(always)]
    unsafe fn vectors<S: Simd>(s: S, row: Row, block: usize) -> [S::V; 4] {
        // SAFETY: the caller's row has the block: two bytes of scale, then the codes.
        unsafe {
            let p = row.data.add(block * Self::BYTES);
            values::<S, Q8>(s, s.load_widened(p.add(2).cast()), [half(s, p), 0.0])
        }
    }

    const SCALED: Option<usize> = Some(Self::BYTES);

    #[inline(always)]
    unsafe fn scaled<S: Simd>(s: S, row: Row, block: usize, factor: WideOf<S>) -> [WideOf<S>; 2] {
        // SAFETY: as above.
        let codes = unsafe { s.wide().load_widened(row.data.add(block * Self::BYTES + 2).cast()) };
        [s.wide().mul(codes[0], factor), s.wide().mul(codes[1], factor)]
    }

    #[inline(always)]
    unsafe fn tail<S: Simd>(s: S, _: Row, _: usize, _: usize) -> S::V {
        s.splat(0.0)
    }
}

impl IntegerFormat for Q8 {
    const SECOND: Second = Second::None;
    const FACTOR: Option<(usize, f32)> = Some((Self::BYTES, 1.0));

    #[inline(always)]
    unsafe fn codes<S: Simd>(s: S, row: Row, block: usize) -> (S::B, [f32; 2]) {
        // SAFETY: the caller's row has the block: two bytes of scale, then the codes.
        unsafe {
            let p = row.data.add(block * Self::BYTES);
            (s.load_bytes(p.add(2).cast()), [half(s, p), 0.0])
        }
    }
}

/// Q4_0 rows.
#[derive(Clone, Copy)]
pub(crate) struct Q4;

impl Q4 {
    const BYTES: usize = 18;
}

impl Format for Q4 {
    #[inline(always)]
    unsafe fn vectors<S: Simd>(s: S, row: Row, block: usize) -> [S::V; 4] {
        // SAFETY: the caller's row has the block.
        let (codes, factors) = unsafe { Self::codes(s, row, block) };
        values::<S, Self>(s, s.widen(codes), factors)
    }

    const SCALED: Option<usize> = Some(Self::BYTES);

    #[inline(always)]
    unsafe fn scaled<S: Simd>(s: S, row: Row, block: usize, factor: WideOf<S>) -> [WideOf<S>; 2] {
        // SAFETY: the caller's row has the block.
        unsafe { s.wide().scaled_nibbles(row.data.add(block * Self::BYTES + 2), factor) }
    }

    #[inline(always)]
    unsafe fn tail<S: Simd>(s: S, _: Row, _: usize, _: usize) -> S::V {
        s.splat(0.0)
    }
}

impl IntegerFormat for Q4 {
    const SECOND: Second = Second::None;
    const FACTOR: Option<(usize, f32)> = Some((Self::BYTES, 1.0));

    #[inline(always)]
    unsafe fn codes<S: Simd>(s: S, row: Row, block: usize) -> (S::B, [f32; 2]) {
        // SAFETY: the caller's row has the block: two bytes of scale, then the codes.
        unsafe {
            let p = row.data.add(block * Self::BYTES);
            (s.sub_bytes(s.load_nibbles(p.add(2)), s.splat_byte(8)), [half(s, p), 0.0])
        }
    }
}

/// Q4_1 rows.
#[derive(Clone, Copy)]
pub(crate) struct Q4Min;

impl IntegerFormat for Q4Min {
    const SECOND: Second = Second::Term;

    #[inline(always)]
    unsafe fn codes<S: Simd>(s: S, row: Row, block: usize) -> (S::B, [f32; 2]) {
        // SAFETY: the caller's row has the block: scale, minimum, codes.
        unsafe {
            let p = row.data.add(block * 20);
            (s.load_nibbles(p.add(4)), [half(s, p), half(s, p.add(2))])
        }
    }
}

/// Blocks in a super-block of 256 elements.
const SUPER: usize = 256 / BLOCK;

/// Q4_K rows: two f16 factors, twelve bytes of six-bit scales and minima, 128 bytes of codes, which hold 64 elements
/// per 32 bytes.
#[derive(Clone, Copy)]
pub(crate) struct Q4K;

impl IntegerFormat for Q4K {
    const SECOND: Second = Second::Term;

    #[inline(always)]
    unsafe fn codes<S: Simd>(s: S, row: Row, block: usize) -> (S::B, [f32; 2]) {
        let group = block % SUPER;
        // SAFETY: the caller's row has the block, and so the whole super-block of 144 bytes.
        unsafe {
            let p = row.data.add(block / SUPER * 144);
            let packed = p.add(4).cast::<[u8; 12]>().read();
            let (scale, minimum) = if group < 4 {
                (packed[group] & 63, packed[group + 4] & 63)
            } else {
                let low = packed[group + 4];
                (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
            };
            let bytes = s.load_bytes(p.add(16 + group / 2 * 32).cast());
            // An 11-bit factor times six bits is exact.
            let factors = [half(s, p) * f32::from(scale), -(half(s, p.add(2)) * f32::from(minimum))];
            (s.bits(bytes, (group % 2 * 4) as u32, 15), factors)
        }
    }
}

/// Q6_K rows: 128 bytes of low bits, 64 of high bits, sixteen scales, an f16 factor.
#[derive(Clone, Copy)]
pub(crate) struct Q6K;

impl IntegerFormat for Q6K {
    const SECOND: Second = Second::UpperHalf;

    #[inline(always)]
    unsafe fn codes<S: Simd>(s: S, row: Row, block: usize) -> (S::B, [f32; 2]) {
        let (half_of_super, run) = (block % SUPER / 4, block % 4);
        // SAFETY: the caller's row has the block, and so the whole super-block of 210 bytes.
        unsafe {
            let p = row.data.add(block / SUPER * 210);
            let low = s.load_bytes(p.add(64 * half_of_super + 32 * (run % 2)).cast());
            let high = s.load_bytes(p.add(128 + 32 * half_of_super).cast());
            let low = s.bits(low, (run / 2 * 4) as u32, 15);
            let high = s.bits(high, (run * 2) as u32, 3);
            let codes = s.sub_bytes(s.join_nibbles(low, high), s.splat_byte(32));
            let scales = p.add(192 + block % SUPER * 2).cast::<[i8; 2]>().read();
            let factor = half(s, p.add(208));
            // An 11-bit factor times eight bits is exact.
            (codes, scales.map(|scale| factor * f32::from(scale)))
        }
    }
}
