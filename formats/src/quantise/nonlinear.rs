//! Blocks whose codes index a fixed table of unevenly spaced values: IQ4_NL, IQ4_XS, MXFP4.

use super::read_half;

/// Values of IQ4_NL's and IQ4_XS's codes.
const UNEVEN: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of E2M1's codes (OCP Microscaling Formats 1.0, section 5.3.3), so that all are whole.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 16 bytes of codes: low nibbles first, then high nibbles.
fn look_up(table: &[i8; 16], scale: f32, codes: &[u8], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &pair) in low.iter_mut().zip(high).zip(codes) {
        *low = scale * f32::from(table[usize::from(pair & 15)]);
        *high = scale * f32::from(table[usize::from(pair >> 4)]);
    }
}

pub(super) fn decode_iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    look_up(&UNEVEN, read_half(block, 0), &block[2..], out);
}

/// Layout: f16 scale, 2 high bits of each of 8 scales, 4 low bits of each, 8 x 16 bytes of codes.
pub(super) fn decode_iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let scale = read_half(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    for (part, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = block[4 + part / 2] >> (4 * (part % 2)) & 15;
        let code = low | ((high >> (2 * part) & 3) as u8) << 4;
        look_up(&UNEVEN, scale * (f32::from(code) - 32.0), &block[8 + part * 16..][..16], out);
    }
}

/// Layout: one E8M0 byte (2^(byte - 127); 255 is not a number), 16 bytes of E2M1 codes.
pub(super) fn decode_mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let half_scale = match block[0] {
        255 => f32::NAN,
        exponent => (f64::from(exponent) - 128.0).exp2() as f32, // exact: subnormal from 2^-127 on
    };
    look_up(&E2M1_DOUBLED, half_scale, &block[1..], out);
}
