//! Weights of eight bits in planes: the high halves of the codes lie in one matrix, which is a Q4_0 one to whoever sees it
//! alone, the low halves in another.
//!
//! A Q8_0 code is `c = 16 (q - 8) + l`, with `q` and `l` of four bits, and a Q4_0 block that has `q` and the scale `D = 16 d`
//! holds its high half. The high halves alone estimate `d c` by the middle of what it may be, `D (q - 7.53125)`: what decides
//! whether a neuron can be skipped. Both together are the Q8_0 row, code for code, and give its bits.

use super::format::{Format, Row};
use super::quantised::{IntegerFormat, Second, format_of_codes, half, values};
use super::simd::Simd;

/// Bytes of a block of high halves: an f16 scale and 32 codes of four bits.
const HIGH: usize = 18;
/// Bytes of a block of low halves.
const LOW: usize = 16;

/// The estimate by the high halves.
#[derive(Clone, Copy)]
pub(crate) struct HighHalves;

/// Both halves.
#[derive(Clone, Copy)]
pub(crate) struct Planes;

format_of_codes!(HighHalves, Planes);

impl IntegerFormat for HighHalves {
    const SECOND: Second = Second::Middle;
    const FACTOR: Option<(usize, f32)> = Some((HIGH, 1.0));

    #[inline(always)]
    unsafe fn codes<S: Simd>(s: S, row: Row, block: usize) -> (S::B, [f32; 2]) {
        // SAFETY: the caller's row has the block: two bytes of scale, then the codes.
        unsafe {
            let p = row.data.add(block * HIGH);
            (s.load_nibbles(p.add(2)), [half(s, p), 0.0])
        }
    }
}

impl IntegerFormat for Planes {
    const SECOND: Second = Second::None;
    const FACTOR: Option<(usize, f32)> = Some((HIGH, 0.0625));

    #[inline(always)]
    unsafe fn codes<S: Simd>(s: S, row: Row, block: usize) -> (S::B, [f32; 2]) {
        // SAFETY: the caller's rows of high and of low halves have the block.
        unsafe {
            let p = row.data.add(block * HIGH);
            let codes = s.join_nibbles(s.load_nibbles(row.low.add(block * LOW)), s.load_nibbles(p.add(2)));
            // 128 less, which wraps to the signed code.
            (s.sub_bytes(codes, s.splat_byte(-128)), [half(s, p) * 0.0625, 0.0])
        }
    }
}
