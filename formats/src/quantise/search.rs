//! Encodes Q4_K and Q6_K: per part the scale (and minimum) of least weighted squared error, then scales of scales.
//!
//! For fixed codes the best scale and minimum follow from linear least squares; for a fixed scale and minimum the best
//! codes are the nearest. So a number of starting scales near the obvious one is tried, each fitted once, and the best
//! kept. Large elements weigh more: they matter more in a dot product.

use engine_core::DType;

use super::superblock::SUPER;
use super::{put_half, read_half};
use crate::Result;

/// Scale and (not negative) amount to take off: value = scale x code - offset.
#[derive(Clone, Copy, Default)]
struct Line {
    scale: f32,
    offset: f32,
}

/// The nearest whole number in a range of at most 2^22 either way, ties to even: by an addition whose result has no
/// room for a fraction, which every machine does in one step.
fn nearest(value: f32, least: f32, greatest: f32) -> f32 {
    const NO_FRACTION: f32 = 12_582_912.0; // 1.5 x 2^23
    (value.clamp(least, greatest) + NO_FRACTION) - NO_FRACTION
}

/// The sum of `N` terms in eight lanes, so that it is a vector's work.
fn total<const N: usize>(term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0_f32; 8];
    for first in (0..N).step_by(8) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += term(first + lane);
        }
    }
    lanes.iter().sum()
}

/// The line for codes 0 to 15 that fits 32 values best by the weights.
fn fit_line(values: &[f32; 32], weights: &[f32; 32]) -> Line {
    const CODES: f32 = 15.0;
    let least = values.iter().copied().fold(0.0_f32, f32::min);
    let greatest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let span = greatest - least;
    if span <= 0.0 || !(1.0 / span).is_finite() {
        return Line { scale: 0.0, offset: -least };
    }
    let sum_w = total::<32>(|at| weights[at]);
    let sum_x = total::<32>(|at| weights[at] * values[at]);
    let error = |line: Line| -> f32 {
        let inverse = if line.scale > 0.0 { 1.0 / line.scale } else { 0.0 };
        total::<32>(|at| {
            let code = nearest((values[at] + line.offset) * inverse, 0.0, CODES);
            let miss = line.scale * code - line.offset - values[at];
            weights[at] * miss * miss
        })
    };
    let mut best = Line { scale: span / CODES, offset: -least };
    let mut best_error = error(best);
    for step in 0..=20_u8 {
        let inverse = (CODES - 1.0 + 0.1 * f32::from(step)) / span;
        let codes = values.map(|value| nearest((value - least) * inverse, 0.0, CODES));
        let sum_l = total::<32>(|at| weights[at] * codes[at]);
        let sum_l2 = total::<32>(|at| weights[at] * codes[at] * codes[at]);
        let sum_xl = total::<32>(|at| weights[at] * codes[at] * values[at]);
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant <= 0.0 {
            continue;
        }
        let mut scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        let mut offset = -(sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        if offset < 0.0 {
            (scale, offset) = (sum_xl / sum_l2, 0.0); // the best line through the origin
        }
        let line = Line { scale, offset };
        let found = error(line);
        if scale > 0.0 && found < best_error {
            (best, best_error) = (line, found);
        }
    }
    best
}

/// The inverse of [`unpack_scales`](super::superblock::unpack_scales).
fn pack_scales(scales: &[(u8, u8); 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for part in 0..4 {
        let ((scale, offset), (later_scale, later_offset)) = (scales[part], scales[part + 4]);
        packed[part] = scale | later_scale >> 4 << 6;
        packed[part + 4] = offset | later_offset >> 4 << 6;
        packed[part + 8] = later_scale & 15 | (later_offset & 15) << 4;
    }
    packed
}

pub(super) fn encode_q4_k(values: &[f32; SUPER], block: &mut [u8; 144]) -> Result<()> {
    const DTYPE: DType = DType::Q4K;
    let parts = values.as_chunks::<32>().0;
    let mut lines = [Line::default(); 8];
    for (line, part) in lines.iter_mut().zip(parts) {
        let typical = (part.iter().map(|value| value * value).sum::<f32>() / 32.0).sqrt();
        let weights = part.map(|value| typical + value.abs());
        *line = fit_line(part, &weights);
    }
    let largest = lines.iter().fold(Line::default(), |best, line| Line {
        scale: best.scale.max(line.scale),
        offset: best.offset.max(line.offset),
    });
    put_half(DTYPE, block, 0, largest.scale / 63.0)?;
    put_half(DTYPE, block, 2, largest.offset / 63.0)?;
    let six_bits = |value: f32, largest: f32| {
        if largest > 0.0 { nearest(63.0 / largest * value, 0.0, 63.0) as u8 } else { 0 }
    };
    let scales =
        lines.map(|line| (six_bits(line.scale, largest.scale), six_bits(line.offset, largest.offset)));
    block[4..16].copy_from_slice(&pack_scales(&scales));
    // Codes for the scales as they are stored.
    let (scale, offset) = (read_half(block, 0), read_half(block, 2));
    block[16..].fill(0);
    for (index, part) in parts.iter().enumerate() {
        let scale = scale * f32::from(scales[index].0);
        let offset = offset * f32::from(scales[index].1);
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for (byte, value) in block[16 + index / 2 * 32..].iter_mut().zip(part) {
            *byte |= (nearest((value + offset) * inverse, 0.0, 15.0) as u8) << (index % 2 * 4);
        }
    }
    Ok(())
}

/// The scale for codes -32 to 31 that fits 16 values best, weighted by their squares.
fn fit_scale(values: &[f32; 16]) -> f32 {
    let extreme =
        values.iter().fold(0.0_f32, |best, &value| if value.abs() > best.abs() { value } else { best });
    if !(1.0 / extreme).is_finite() {
        return 0.0;
    }
    // The plain scale stays where squares leave the range of f32.
    let (mut best, mut best_gain) = (extreme / -32.0, 0.0);
    for step in -9..=9_i8 {
        // The largest element gets about -32, where there is one code more.
        let inverse = -(32.0 + 0.1 * f32::from(step)) / extreme;
        let codes = values.map(|value| nearest(inverse * value, -32.0, 31.0));
        let sum_xl = total::<16>(|at| values[at] * values[at] * values[at] * codes[at]);
        let sum_l2 = total::<16>(|at| values[at] * values[at] * codes[at] * codes[at]);
        // With the best scale sum_xl / sum_l2 the error is that of zero less this.
        let gain = sum_xl * sum_xl / sum_l2;
        if sum_l2 > 0.0 && gain > best_gain {
            (best, best_gain) = (sum_xl / sum_l2, gain);
        }
    }
    best
}

pub(super) fn encode_q6_k(values: &[f32; SUPER], block: &mut [u8; 210]) -> Result<()> {
    let parts = values.as_chunks::<16>().0;
    let mut scales = [0.0_f32; 16];
    for (scale, part) in scales.iter_mut().zip(parts) {
        *scale = fit_scale(part);
    }
    let extreme =
        scales.iter().fold(0.0_f32, |best, &scale| if scale.abs() > best.abs() { scale } else { best });
    block.fill(0);
    put_half(DType::Q6K, block, 208, extreme / -128.0)?;
    let inverse = if extreme == 0.0 { 0.0 } else { -128.0 / extreme };
    let whole = read_half(block, 208);
    for (index, (part, scale)) in parts.iter().zip(scales).enumerate() {
        let small = nearest(inverse * scale, -128.0, 127.0) as i8;
        block[192 + index] = small.cast_unsigned();
        let scale = whole * f32::from(small);
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let (half, quarter, side) = (index / 8, index % 8 / 2, index % 2);
        let (low, high) = (half * 64 + quarter % 2 * 32 + side * 16, 128 + half * 32 + side * 16);
        for (at, value) in part.iter().enumerate() {
            let code = (nearest(value * inverse, -32.0, 31.0) + 32.0) as u8;
            block[low + at] |= (code & 15) << (quarter / 2 * 4);
            block[high + at] |= (code >> 4) << (quarter * 2);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::superblock::unpack_scales;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packed_scales_come_back(scales in prop::array::uniform8((0_u8..64, 0_u8..64))) {
            prop_assert_eq!(unpack_scales(&pack_scales(&scales)), scales);
        }
    }
}
