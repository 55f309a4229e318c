//! Decodes super-blocks of 256 elements whose parts have small scales of their own: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

use super::read_half;

/// Elements of a super-block.
pub(super) const SUPER: usize = 256;

/// The 6-bit scale and minimum of each of 8 parts, packed in 12 bytes: of parts 0 to 3 the low 6 bits of bytes 0 to 3
/// and 4 to 7; of parts 4 to 7 the nibbles of bytes 8 to 11, with their upper 2 bits above those of parts 0 to 3.
pub(super) fn unpack_scales(packed: &[u8]) -> [(u8, u8); 8] {
    std::array::from_fn(|part| match part {
        0..4 => (packed[part] & 63, packed[part + 4] & 63),
        _ => {
            let nibbles = packed[part + 4];
            (nibbles & 15 | packed[part - 4] >> 6 << 4, nibbles >> 4 | packed[part] >> 6 << 4)
        }
    })
}

/// Layout: 16 bytes of scale (low nibble) and minimum (high), 64 of codes, f16 scale, f16 minimum.
pub(super) fn decode_q2_k(block: &[u8; 84], out: &mut [f32; SUPER]) {
    let (scale, minimum) = (read_half(block, 80), read_half(block, 82));
    for (part, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let packed = block[part];
        let (scale, minimum) = (scale * f32::from(packed & 15), minimum * f32::from(packed >> 4));
        // A half of 128 elements is 32 bytes; each bit pair of them is two parts.
        let codes = &block[16 + part / 8 * 32 + part % 2 * 16..];
        let shift = part % 8 / 2 * 2;
        for (value, &byte) in out.iter_mut().zip(codes) {
            *value = scale * f32::from(byte >> shift & 3) - minimum;
        }
    }
}

/// Layout: 32 bytes of third bits, 64 of low bit pairs, 12 of scales, f16 scale.
pub(super) fn decode_q3_k(block: &[u8; 110], out: &mut [f32; SUPER]) {
    let (masks, rest) = block.split_at(32);
    let (codes, rest) = rest.split_at(64);
    let scale = read_half(rest, 12);
    for (part, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = rest[part % 8] >> (part / 8 * 4) & 15;
        let high = rest[8 + part % 4] >> (part / 4 * 2) & 3;
        let scale = scale * (f32::from(low | high << 4) - 32.0);
        let codes = &codes[part / 8 * 32 + part % 2 * 16..];
        let masks = &masks[part % 2 * 16..];
        let shift = part % 8 / 2 * 2;
        for (value, (&byte, &mask)) in out.iter_mut().zip(codes.iter().zip(masks)) {
            // A set third bit means that nothing is taken off.
            let offset = if mask >> (part / 2) & 1 == 1 { 0.0 } else { 4.0 };
            *value = scale * (f32::from(byte >> shift & 3) - offset);
        }
    }
}

/// Layout: f16 scale, f16 minimum, 12 bytes of scales, 128 of codes.
pub(super) fn decode_q4_k(block: &[u8; 144], out: &mut [f32; SUPER]) {
    let (scale, minimum) = (read_half(block, 0), read_half(block, 2));
    let scales = unpack_scales(&block[4..16]);
    for (part, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = (scale * f32::from(scales[part].0), minimum * f32::from(scales[part].1));
        let codes = &block[16 + part / 2 * 32..];
        for (value, &byte) in out.iter_mut().zip(codes) {
            *value = scale * f32::from(byte >> (part % 2 * 4) & 15) - minimum;
        }
    }
}

/// Layout: f16 scale, f16 minimum, 12 bytes of scales, 32 of fifth bits, 128 of low nibbles.
pub(super) fn decode_q5_k(block: &[u8; 176], out: &mut [f32; SUPER]) {
    let (scale, minimum) = (read_half(block, 0), read_half(block, 2));
    let scales = unpack_scales(&block[4..16]);
    for (part, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, minimum) = (scale * f32::from(scales[part].0), minimum * f32::from(scales[part].1));
        let codes = &block[48 + part / 2 * 32..];
        for (value, (&byte, &bits)) in out.iter_mut().zip(codes.iter().zip(&block[16..48])) {
            let code = byte >> (part % 2 * 4) & 15 | (bits >> part & 1) << 4;
            *value = scale * f32::from(code) - minimum;
        }
    }
}

/// Layout: 128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales, f16 scale.
pub(super) fn decode_q6_k(block: &[u8; 210], out: &mut [f32; SUPER]) {
    let scale = read_half(block, 208);
    for (part, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = scale * f32::from(block[192 + part].cast_signed());
        // A half of 128 elements: 64 bytes of nibbles, of which the low ones come first, and 32 of bit pairs.
        let (half, quarter, side) = (part / 8, part % 8 / 2, part % 2);
        let low = &block[half * 64 + quarter % 2 * 32 + side * 16..];
        let high = &block[128 + half * 32 + side * 16..];
        for (value, (&low, &high)) in out.iter_mut().zip(low.iter().zip(high)) {
            let code = low >> (quarter / 2 * 4) & 15 | (high >> (quarter * 2) & 3) << 4;
            *value = scale * (f32::from(code) - 32.0);
        }
    }
}
