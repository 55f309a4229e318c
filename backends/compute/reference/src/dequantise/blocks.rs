//! Formats with blocks of 32 elements and one scale: element `j` has its low code bits in the low half of byte `j`,
//! element `16 + j` in the high half.

use super::{NON_LINEAR, f16};

/// The sixteen bytes of four-bit codes at `at`, as 32 codes in element order.
pub(super) fn nibbles(bytes: &[u8], at: usize) -> [u8; 32] {
    std::array::from_fn(|j| if j < 16 { bytes[at + j] & 15 } else { bytes[at + j - 16] >> 4 })
}

/// Bit `j` of the little-endian word at `at`, moved to bit 4.
fn fifth_bit(bytes: &[u8], at: usize, j: usize) -> u8 {
    (bytes[at + j / 8] >> (j % 8) & 1) << 4
}

/// `d * (code - 8)`.
pub(super) fn q4_0(bytes: &[u8], out: &mut [f64]) {
    let (d, codes) = (f16(bytes, 0), nibbles(bytes, 2));
    for j in 0..32 {
        out[j] = d * (f64::from(codes[j]) - 8.0);
    }
}

/// `d * code + m`.
pub(super) fn q4_1(bytes: &[u8], out: &mut [f64]) {
    let (d, m, codes) = (f16(bytes, 0), f16(bytes, 2), nibbles(bytes, 4));
    for j in 0..32 {
        out[j] = d * f64::from(codes[j]) + m;
    }
}

/// `d * (code - 16)`, the codes' fifth bits in a word of their own.
pub(super) fn q5_0(bytes: &[u8], out: &mut [f64]) {
    let (d, codes) = (f16(bytes, 0), nibbles(bytes, 6));
    for j in 0..32 {
        out[j] = d * (f64::from(codes[j] | fifth_bit(bytes, 2, j)) - 16.0);
    }
}

/// `d * code + m`, the codes' fifth bits in a word of their own.
pub(super) fn q5_1(bytes: &[u8], out: &mut [f64]) {
    let (d, m, codes) = (f16(bytes, 0), f16(bytes, 2), nibbles(bytes, 8));
    for j in 0..32 {
        out[j] = d * f64::from(codes[j] | fifth_bit(bytes, 4, j)) + m;
    }
}

/// `d * code`, signed bytes.
pub(super) fn q8_0(bytes: &[u8], out: &mut [f64]) {
    let d = f16(bytes, 0);
    for j in 0..32 {
        out[j] = d * f64::from(bytes[2 + j] as i8);
    }
}

/// `d * level[code]`.
pub(super) fn iq4_nl(bytes: &[u8], out: &mut [f64]) {
    let (d, codes) = (f16(bytes, 0), nibbles(bytes, 2));
    for j in 0..32 {
        out[j] = d * NON_LINEAR[usize::from(codes[j])];
    }
}

/// `2^(e - 127) * e2m1(code)` (OCP microscaling formats, section 5.3); a scale byte of 255 is 2^128, as GGUF readers
/// have it.
pub(super) fn mxfp4(bytes: &[u8], out: &mut [f64]) {
    const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let (scale, codes) = (2f64.powi(i32::from(bytes[0]) - 127), nibbles(bytes, 1));
    for j in 0..32 {
        let magnitude = scale * E2M1[usize::from(codes[j] & 7)];
        out[j] = if codes[j] & 8 == 0 { magnitude } else { -magnitude };
    }
}
