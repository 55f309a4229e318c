//! Weights of eight bits in planes: the high halves of the codes lie in one matrix, which is a Q4_0 one to whoever sees it
//! alone, the low halves in another.
//!
//! A Q8_0 code is `c = 16 (q - 8) + l`, with `q` and `l` of four bits, and a Q4_0 block that has `q` and the scale `D = 16 d`
//! holds its high half. The high halves alone estimate `d c` by the middle of what it may be, `D (q - 7.53125)`: what decides
//! whether a neuron can be skipped. Both together are the Q8_0 row, code for code, and give its bits.
//!
//! # The estimate with int8 activations
//! is read for every neuron, so it must run at the speed of memory. It need not be the Q4_0 product's bits, and has sums of
//! its own: four blocks at a time, sixteen lanes, of which four belong to each block ([`Wide::group_products`]); lanes `i`
//! and `8 + i` are added in the end, and then the eight as everywhere. A last group that is not whole has its last block
//! again, with activations and scales of zero.

use super::format::{Format, Row};
use super::matmul::{AHEAD, LINE, Matmul, Rows, Tile, prefetch};
use super::quantised::{IntegerFormat, Second, format_of_codes, half, values};
use super::simd::{BLOCK, Simd};
use super::wide::{GROUP, Wide, WideOf};

/// Bytes of a block of high halves: an f16 scale and 32 codes of four bits.
const HIGH: usize = 18;
/// Bytes of a block of low halves.
const LOW: usize = 16;

/// From where the high half of an 8-bit code counts, if nothing is known of the low half: `8 - 7.5 / 16`.
pub(super) const MIDDLE: f32 = 7.53125;

/// The estimate by the high halves.
#[derive(Clone, Copy)]
pub(crate) struct HighHalves;

/// Both halves.
#[derive(Clone, Copy)]
pub(crate) struct Planes;

format_of_codes!(Planes);

impl Format for HighHalves {
    #[inline(always)]
    unsafe fn vectors<S: Simd>(s: S, row: Row, block: usize) -> [S::V; 4] {
        // SAFETY: the caller's row has the block: two bytes of scale, then the codes.
        unsafe {
            let p = row.data.add(block * HIGH);
            let factor = s.splat(half(s, p));
            s.widen(s.load_nibbles(p.add(2))).map(|q| s.mul(s.sub(q, s.splat(MIDDLE)), factor))
        }
    }

    #[inline(always)]
    unsafe fn tail<S: Simd>(s: S, _: Row, _: usize, _: usize) -> S::V {
        s.splat(0.0)
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

/// The estimates of a job's rows for one of its tokens, by its int8 activations.
///
/// Rows are read one after the other, whole, since each is short and memory likes one stream best; what the activations
/// need to be for that is made once, in `tile`.
///
/// # Safety
/// As for [`super::matmul::matmul`]; the format is [`HighHalves`], and `codes` and `scales` are the token's.
#[inline(always)]
pub(super) unsafe fn estimate<S: Simd>(
    s: S,
    job: &Matmul<'_>,
    token: usize,
    codes: *const i8,
    scales: *const f32,
    tile: &mut Tile,
) {
    let w = s.wide();
    let blocks = job.weight.columns / BLOCK;
    let (whole, rest) = (blocks / GROUP, blocks % GROUP);
    let row_bytes = blocks * HIGH;
    let ahead = job.begin::<1>();
    // SAFETY: the caller answers for rows and activations.
    unsafe {
        let groups = tile.room_for::<<S::Wide as Wide>::Group>(whole + 1);
        for g in 0..whole {
            *groups.add(g) = w.group(codes.add(g * GROUP * BLOCK));
        }
        // The last group, filled up with zeros.
        let (mut rest_codes, mut rest_scales) = ([0i8; GROUP * BLOCK], [0.0f32; GROUP]);
        let at = whole * GROUP;
        core::ptr::copy_nonoverlapping(codes.add(at * BLOCK), rest_codes.as_mut_ptr(), rest * BLOCK);
        core::ptr::copy_nonoverlapping(scales.add(at), rest_scales.as_mut_ptr(), rest);
        *groups.add(whole) = w.group(rest_codes.as_ptr());
        for i in 0..job.rows.len() {
            let row = job.weight.row(job.rows.get(i)).data;
            let soon = match job.rows {
                Rows::Range(..) => row.wrapping_add(AHEAD),
                Rows::List(_) => job.place(i + ahead).data,
            };
            let mut sum = w.splat(0.0);
            for g in 0..whole {
                prefetch(soon.wrapping_add(g * LINE));
                let p = row.add(g * GROUP * HIGH);
                let blocks = [p, p.add(HIGH), p.add(2 * HIGH), p.add(3 * HIGH)];
                let scales = scales.add(g * GROUP).cast::<[f32; GROUP]>().read_unaligned();
                sum = add_group(s, blocks, scales, *groups.add(g), sum);
            }
            for line in (whole * LINE..row_bytes).step_by(LINE) {
                prefetch(soon.wrapping_add(line));
            }
            if rest > 0 {
                let p = row.add(whole * GROUP * HIGH);
                let last = rest - 1;
                let block = [p, p.add(1.min(last) * HIGH), p.add(2.min(last) * HIGH), p.add(last * HIGH)];
                sum = add_group(s, block, rest_scales, *groups.add(whole), sum);
            }
            let [low, high] = w.split(sum);
            job.put(job.rows.get(i), token, s.sum(s.add(low, high)));
        }
    }
}

/// # Safety
/// Each of `blocks` points to a block of high halves.
#[inline(always)]
unsafe fn add_group<S: Simd>(
    s: S,
    blocks: [*const u8; GROUP],
    scales: [f32; GROUP],
    x: <S::Wide as Wide>::Group,
    sum: WideOf<S>,
) -> WideOf<S> {
    let w = s.wide();
    // SAFETY: a block begins with its scale, the codes follow.
    unsafe {
        let bits = blocks.map(|p| p.cast::<u16>().read_unaligned());
        w.fma(w.group_products(blocks.map(|p| p.add(2)), x), w.group_factors(bits, scales), sum)
    }
}

/// Four rows of both halves times one token's int8 activations, two rows to sixteen lanes; the bits are those of the
/// Q8_0 rows. `next` are rows to fetch meanwhile, their low halves or `both`: those of the neurons that an estimate has let
/// through have their high halves in the cache.
///
/// # Safety
/// Rows and activations have `n` elements, whole blocks.
#[inline(always)]
pub(super) unsafe fn dot_four<S: Simd>(
    s: S,
    rows: [Row; 4],
    (next, both): ([Row; 4], bool),
    codes: *const i8,
    scales: *const f32,
    n: usize,
) -> [f32; 4] {
    let w = s.wide();
    let mut sums = [w.splat(0.0); 2];
    // SAFETY: the caller's promise.
    unsafe {
        for block in 0..n / BLOCK {
            // A line has four blocks of low halves.
            let soon = next[block % 4];
            prefetch(soon.low.wrapping_add(block / 4 * LINE));
            if both {
                prefetch(soon.data.wrapping_add(block / 4 * 4 * HIGH));
            }
            let x = w.block(codes.add(block * BLOCK));
            let high = rows.map(|row| row.data.add(block * HIGH));
            let low = rows.map(|row| row.low.add(block * LOW));
            let bits = high.map(|p| p.cast::<u16>().read_unaligned());
            let factors = w.four_halves(bits, 0.0625, *scales.add(block));
            let high = high.map(|p| p.add(2));
            for (i, sum) in sums.iter_mut().enumerate() {
                let (low, high) = ([low[2 * i], low[2 * i + 1]], [high[2 * i], high[2 * i + 1]]);
                *sum = w.fma(w.planes_products(low, high, x), factors[i], *sum);
            }
        }
    }
    let ([a, b], [c, d]) = (w.split(sums[0]), w.split(sums[1]));
    s.sums([a, b, c, d])
}
