//! Formats with super-blocks of 256 elements: groups of 16 or 32 with small integer scales (and minima), themselves
//! scaled by one or two f16.

use super::blocks::nibbles;
use super::{NON_LINEAR, f16};

/// 16 groups of 16: `d * scale * code - dmin * minimum`, two-bit codes, four-bit scales and minima.
///
/// Layout: scales 16, codes 64, d, dmin. Each half of 128 elements has 32 code bytes; its 32-element run `k` is at bits
/// `2k` of them.
pub(super) fn q2_k(bytes: &[u8], out: &mut [f64]) {
    let (d, dmin) = (f16(bytes, 80), f16(bytes, 82));
    for (e, out) in out.iter_mut().enumerate() {
        let (half, run, l) = (e / 128, e % 128 / 32, e % 32);
        let code = bytes[16 + 32 * half + l] >> (2 * run) & 3;
        let group = bytes[e / 16];
        *out = d * f64::from(group & 15) * f64::from(code) - dmin * f64::from(group >> 4);
    }
}

/// 16 groups of 16: `d * (scale - 32) * (code - 4)`, three-bit codes, six-bit scales.
///
/// Layout: third bits 32 (byte `l`, bit `e / 32`), low bits 64 as in Q2_K, scales 12 (low four bits of scale `g` in
/// nibbles of bytes 0..8, high two bits in bytes 8..12), d.
pub(super) fn q3_k(bytes: &[u8], out: &mut [f64]) {
    let d = f16(bytes, 108);
    let packed = &bytes[96..108];
    let scale = |g: usize| {
        let low = if g < 8 { packed[g] & 15 } else { packed[g - 8] >> 4 };
        let high = packed[8 + g % 4] >> (2 * (g / 4)) & 3;
        f64::from(low | high << 4) - 32.0
    };
    for (e, out) in out.iter_mut().enumerate() {
        let (half, run, l) = (e / 128, e % 128 / 32, e % 32);
        let low = bytes[32 + 32 * half + l] >> (2 * run) & 3;
        let high = bytes[l] >> (e / 32) & 1;
        *out = d * scale(e / 16) * (f64::from(low | high << 2) - 4.0);
    }
}

/// Scale and minimum of group `g` of 8, six bits each, from the twelve bytes that Q4_K and Q5_K pack them in.
fn scale_and_minimum(packed: &[u8], g: usize) -> (f64, f64) {
    let (scale, minimum) = if g < 4 {
        (packed[g] & 63, packed[g + 4] & 63)
    } else {
        (packed[g + 4] & 15 | packed[g - 4] >> 6 << 4, packed[g + 4] >> 4 | packed[g] >> 6 << 4)
    };
    (scale.into(), minimum.into())
}

/// The four-bit code of element `e`: 32 bytes for each 64 elements, the first 32 in the low halves.
fn code_of_64(codes: &[u8], e: usize) -> u8 {
    codes[e / 64 * 32 + e % 32] >> (4 * (e % 64 / 32)) & 15
}

/// 8 groups of 32: `d * scale * code - dmin * minimum`, four-bit codes. Layout: d, dmin, scales 12, codes 128.
pub(super) fn q4_k(bytes: &[u8], out: &mut [f64]) {
    let (d, dmin) = (f16(bytes, 0), f16(bytes, 2));
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(&bytes[4..16], g);
        for (l, out) in out.iter_mut().enumerate() {
            *out = d * scale * f64::from(code_of_64(&bytes[16..], 32 * g + l)) - dmin * minimum;
        }
    }
}

/// As Q4_K with a fifth code bit: byte `l`, bit `g`. Layout: d, dmin, scales 12, fifth bits 32, codes 128.
pub(super) fn q5_k(bytes: &[u8], out: &mut [f64]) {
    let (d, dmin) = (f16(bytes, 0), f16(bytes, 2));
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(&bytes[4..16], g);
        for (l, out) in out.iter_mut().enumerate() {
            let code = code_of_64(&bytes[48..], 32 * g + l) | (bytes[16 + l] >> g & 1) << 4;
            *out = d * scale * f64::from(code) - dmin * minimum;
        }
    }
}

/// 16 groups of 16: `d * scale * (code - 32)`, six-bit codes, signed eight-bit scales.
///
/// Layout: low bits 128, high bits 64, scales 16, d. In each half of 128 elements, run `k` of 32 has its low bits in
/// bytes `32 * (k % 2) + l` (low halves for `k < 2`) and its high bits at bits `2k` of byte `l`.
pub(super) fn q6_k(bytes: &[u8], out: &mut [f64]) {
    let d = f16(bytes, 208);
    for (e, out) in out.iter_mut().enumerate() {
        let (half, run, l) = (e / 128, e % 128 / 32, e % 32);
        let low = bytes[64 * half + 32 * (run % 2) + l] >> (4 * (run / 2)) & 15;
        let high = bytes[128 + 32 * half + l] >> (2 * run) & 3;
        let scale = f64::from(bytes[192 + e / 16] as i8);
        *out = d * scale * (f64::from(low | high << 4) - 32.0);
    }
}

/// 8 groups of 32: `d * (scale - 32) * level[code]`. Layout: d, high scale bits 2, low scale bits 4, codes 128.
pub(super) fn iq4_xs(bytes: &[u8], out: &mut [f64]) {
    let d = f16(bytes, 0);
    for (g, out) in out.chunks_exact_mut(32).enumerate() {
        let low = bytes[4 + g / 2] >> (4 * (g % 2)) & 15;
        let high = bytes[2 + g / 4] >> (2 * (g % 4)) & 3;
        let scale = f64::from(low | high << 4) - 32.0;
        let codes = nibbles(bytes, 8 + 16 * g);
        for (l, out) in out.iter_mut().enumerate() {
            *out = d * scale * NON_LINEAR[usize::from(codes[l])];
        }
    }
}
