//! Blocks of 32 elements with one scale, and perhaps a minimum: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

use engine_core::DType;

use super::{put_half, read_half};
use crate::Result;

/// Elements of a block.
pub(super) const BLOCK: usize = 32;

pub(super) fn decode_q8_0(block: &[u8; 34], out: &mut [f32; BLOCK]) {
    let scale = read_half(block, 0);
    for (value, &code) in out.iter_mut().zip(&block[2..]) {
        *value = scale * f32::from(code.cast_signed());
    }
}

/// Low nibbles are the block's first half, high nibbles the second.
fn nibbles(bytes: &[u8]) -> [u8; BLOCK] {
    let mut codes = [0; BLOCK];
    for (at, &pair) in bytes.iter().enumerate().take(BLOCK / 2) {
        codes[at] = pair & 15;
        codes[at + BLOCK / 2] = pair >> 4;
    }
    codes
}

/// [`nibbles`] with a fifth bit each from the 32 bits before them.
fn five_bits(bytes: &[u8]) -> [u8; BLOCK] {
    let (bits, low) = bytes.split_at(4);
    let mut codes = nibbles(low);
    for (at, code) in codes.iter_mut().enumerate() {
        *code |= (bits[at / 8] >> (at % 8) & 1) << 4;
    }
    codes
}

pub(super) fn decode_q4_0(block: &[u8; 18], out: &mut [f32; BLOCK]) {
    let scale = read_half(block, 0);
    for (value, code) in out.iter_mut().zip(nibbles(&block[2..])) {
        *value = scale * (f32::from(code) - 8.0);
    }
}

pub(super) fn decode_q4_1(block: &[u8; 20], out: &mut [f32; BLOCK]) {
    let (scale, minimum) = (read_half(block, 0), read_half(block, 2));
    for (value, code) in out.iter_mut().zip(nibbles(&block[4..])) {
        *value = scale * f32::from(code) + minimum;
    }
}

pub(super) fn decode_q5_0(block: &[u8; 22], out: &mut [f32; BLOCK]) {
    let scale = read_half(block, 0);
    for (value, code) in out.iter_mut().zip(five_bits(&block[2..])) {
        *value = scale * (f32::from(code) - 16.0);
    }
}

pub(super) fn decode_q5_1(block: &[u8; 24], out: &mut [f32; BLOCK]) {
    let (scale, minimum) = (read_half(block, 0), read_half(block, 2));
    for (value, code) in out.iter_mut().zip(five_bits(&block[4..])) {
        *value = scale * f32::from(code) + minimum;
    }
}

/// The inverse of the unrounded scale, as the formats' reference has it; 0 where there is none.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Nearest codes, ties away from zero.
pub(super) fn encode_q8_0(values: &[f32; BLOCK], block: &mut [u8; 34]) -> Result<()> {
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    put_half(DType::Q8_0, block, 0, scale)?;
    let inverse = inverse(scale);
    for (code, value) in block[2..].iter_mut().zip(values) {
        *code = ((value * inverse).round() as i8).cast_unsigned();
    }
    Ok(())
}

fn put_nibbles(bytes: &mut [u8], values: &[f32; BLOCK], code: impl Fn(f32) -> u8) {
    let (low, high) = values.split_at(BLOCK / 2);
    for (byte, (&low, &high)) in bytes.iter_mut().zip(low.iter().zip(high)) {
        *byte = code(low) | code(high) << 4;
    }
}

/// The scale is that of the element of largest magnitude, sign included, so that this element is met exactly.
pub(super) fn encode_q4_0(values: &[f32; BLOCK], block: &mut [u8; 18]) -> Result<()> {
    let extreme =
        values.iter().fold(0.0_f32, |best, &value| if value.abs() > best.abs() { value } else { best });
    let scale = extreme / -8.0;
    put_half(DType::Q4_0, block, 0, scale)?;
    let inverse = inverse(scale);
    put_nibbles(&mut block[2..], values, |value| (value * inverse + 8.5).clamp(0.0, 15.0) as u8);
    Ok(())
}

/// From the least to the greatest element in 15 steps.
pub(super) fn encode_q4_1(values: &[f32; BLOCK], block: &mut [u8; 20]) -> Result<()> {
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let greatest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (greatest - least) / 15.0;
    put_half(DType::Q4_1, block, 0, scale)?;
    put_half(DType::Q4_1, block, 2, least)?;
    let inverse = inverse(scale);
    put_nibbles(&mut block[4..], values, |value| ((value - least) * inverse + 0.5).clamp(0.0, 15.0) as u8);
    Ok(())
}
