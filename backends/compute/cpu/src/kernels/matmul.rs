//! Rows of a weight matrix times tokens: the matrix-vector product of decode and the blocked product of prefill.
//!
//! One token is computed straight from the stored rows, four rows at a time. Several tokens share a tile of rows that
//! is unpacked once (to f32, or to codes and scales), then walked by a register block of rows x tokens. Both keep the
//! one accumulator per output that the parent module describes, so a token's result does not depend on its batch.

use super::format::{Format, Matrix, Row, WeightType, with_format, with_integer_format};
use super::planes;
use super::prefill;
use super::quantised::{IntegerFormat, add_four, add_product, lane_sums};
use super::simd::{BLOCK, LANES, Simd};
use super::squares;

/// Which rows to compute.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rows<'a> {
    /// `start..end`.
    Range(usize, usize),
    /// These.
    List(&'a [u32]),
}

impl Rows<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Rows::Range(start, end) => end - start,
            Rows::List(rows) => rows.len(),
        }
    }

    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> usize {
        match self {
            Rows::Range(start, _) => start + i,
            Rows::List(rows) => rows[i] as usize,
        }
    }
}

/// The tokens' activations.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Input {
    /// A row of f32 per token.
    F32 {
        /// Token 0.
        data: *const f32,
        /// Elements between tokens.
        stride: usize,
    },
    /// Int8 blocks per token; only for formats with an integer dot.
    Int8 {
        /// Codes of token 0.
        codes: *const i8,
        /// Scales of token 0.
        scales: *const f32,
        /// Elements between tokens' codes, a multiple of 32; scales are 1/32 of that apart.
        stride: usize,
    },
}

/// One product: `out[t * out_stride + r] = row(r) . input(t) (+ bias[r]) (+ out)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matmul<'a> {
    /// The weights.
    pub(crate) weight: Matrix,
    /// Which of their rows.
    pub(crate) rows: Rows<'a>,
    /// The activations.
    pub(crate) input: Input,
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// Results, indexed by the row's number.
    pub(crate) out: *mut f32,
    /// Elements between tokens.
    pub(crate) out_stride: usize,
    /// One per row, or null.
    pub(crate) bias: *const f32,
    /// Whether the result is added to what `out` holds.
    pub(crate) accumulate: bool,
}

impl Matmul<'_> {
    /// How many rows ahead of their use rows are asked for, in whole steps of `R`. Those of a list that come before that
    /// are asked for now: they lie anywhere, so nothing else foretells them.
    #[inline(always)]
    pub(super) fn begin<const R: usize>(&self) -> usize {
        let bytes = self.steps().0;
        let distance = if matches!(self.rows, Rows::List(_)) { AHEAD_LISTED } else { AHEAD };
        let ahead = ((distance + R * bytes / 2) / (R * bytes).max(1)).clamp(1, 16) * R;
        if let Rows::List(list) = self.rows {
            for &row in &list[..ahead.min(list.len())] {
                let row = self.weight.row(row as usize);
                let start = if row.low.is_null() { row.data } else { row.low };
                for at in (0..bytes).step_by(LINE) {
                    prefetch(start.wrapping_add(at));
                }
            }
        }
        ahead
    }

    /// The place of row `i` of this job, as far as it is known: a range goes on, a list ends with its last row.
    #[inline(always)]
    pub(super) fn place(&self, i: usize) -> Row {
        self.weight.row(match self.rows {
            Rows::Range(start, _) => start + i,
            Rows::List(rows) => rows[i.min(rows.len() - 1)] as usize,
        })
    }

    /// Stores an output element.
    ///
    /// # Safety
    /// `out` and `bias` have the element.
    #[inline(always)]
    pub(super) unsafe fn put(&self, row: usize, token: usize, mut value: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            if !self.bias.is_null() {
                value += *self.bias.add(row);
            }
            let out = self.out.add(token * self.out_stride + row);
            *out = if self.accumulate { *out + value } else { value };
        }
    }

    /// Stores four output elements of the first token.
    ///
    /// # Safety
    /// As for [`Matmul::put`].
    #[inline(always)]
    unsafe fn put_each(&self, rows: [usize; 4], values: [f32; 4]) {
        // SAFETY: the caller's promise.
        rows.into_iter().zip(values).for_each(|(row, value)| unsafe { self.put(row, 0, value) });
    }

    /// The same for rows that follow each other.
    ///
    /// # Safety
    /// `out` and `bias` have the elements.
    #[inline(always)]
    unsafe fn put_four(&self, rows: [usize; 4], mut values: [f32; 4]) {
        let add = |values: &mut [f32; 4], from: *const f32| {
            // SAFETY: rows of a range follow each other, and whatever is read here has all of them.
            let from = unsafe { from.add(rows[0]).cast::<[f32; 4]>().read_unaligned() };
            values.iter_mut().zip(from).for_each(|(value, x)| *value += x);
        };
        if !self.bias.is_null() {
            add(&mut values, self.bias);
        }
        if self.accumulate {
            add(&mut values, self.out);
        }
        // SAFETY: as above.
        unsafe { self.out.add(rows[0]).cast::<[f32; 4]>().write_unaligned(values) };
    }
}

/// The sums of some rows' lanes.
#[inline(always)]
pub(super) fn row_sums<S: Simd, const R: usize>(s: S, sums: [S::V; R]) -> [f32; R] {
    match sums.first_chunk::<4>() {
        Some(&four) if R == 4 => {
            let four = s.sums(four);
            std::array::from_fn(|r| four[r])
        }
        _ => sums.map(|v| s.sum(v)),
    }
}

/// One thread's unpacked rows, kept between calls.
#[derive(Default)]
pub(crate) struct Tile {
    /// Values, or scales beside `codes`.
    pub(crate) values: Vec<f32>,
    /// Codes.
    pub(crate) codes: Vec<i8>,
    /// Activations in another order.
    groups: Vec<u8>,
    /// Bytes of weights that were multiplied since this was last looked at: each row once per operation, whatever the
    /// number of tokens.
    pub(crate) read: u64,
}

impl Tile {
    /// Room for so many values of a type, of which nothing is known.
    pub(super) fn room_for<T>(&mut self, count: usize) -> *mut T {
        let (bytes, align) = (count * size_of::<T>(), align_of::<T>());
        if self.groups.len() < bytes + align {
            self.groups.resize(bytes + align, 0);
        }
        let start = self.groups.as_mut_ptr();
        start.wrapping_add(start.align_offset(align)).cast()
    }

    /// The buffer grown to `values` values and `codes` codes.
    pub(crate) fn reserve(&mut self, values: usize, codes: usize) {
        if self.values.len() < values {
            self.values.resize(values, 0.0);
        }
        if self.codes.len() < codes {
            self.codes.resize(codes, 0);
        }
    }
}

/// Runs a product.
///
/// # Safety
/// The matrix has the rows, the input the tokens (with `columns` elements, blocks rounded up), `out` every `(row,
/// token)`, and `bias` every row. `Input::Int8` comes only with formats that have an integer dot.
#[inline(always)]
pub(crate) unsafe fn matmul<S: Simd>(s: S, job: &Matmul<'_>, tile: &mut Tile) {
    tile.read += (job.rows.len() * job.weight.row_bytes()) as u64;
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match job.input {
            Input::F32 { data, .. } if job.tokens == 1 => {
                with_format!(job.weight.format, F => one_token_f32::<S, F>(s, job, data));
            }
            Input::F32 { data, stride } => {
                prefill::many_tokens_f32(s, job, data, stride, tile);
            }
            Input::Int8 { codes, scales, stride } if job.weight.format == WeightType::HighHalves => {
                for t in 0..job.tokens {
                    let (codes, scales) = (codes.add(t * stride), scales.add(t * (stride / BLOCK)));
                    planes::estimate(s, job, t, codes, scales, tile);
                }
            }
            Input::Int8 { codes, scales, .. } if job.tokens == 1 && is_in_planes::<S>(job) => {
                one_token_planes(s, job, codes, scales);
            }
            Input::Int8 { codes, scales, .. } if job.tokens == 1 => {
                with_integer_format!(job.weight.format, F => one_token_int8::<S, F>(s, job, codes, scales),
                    else unreachable!("int8 codes meet an unquantised weight"));
            }
            Input::Int8 { codes, scales, stride } => {
                prefill::many_tokens_int8(s, job, codes, scales, stride, tile);
            }
        }
    }
}

/// Asks for the line at `p` ahead of its use. Rows of narrow models are shorter than what hardware prefetchers need to
/// find their stride, so decode would wait for memory at the start of every row.
#[inline(always)]
pub(super) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint; it reads nothing and faults for no address. SSE is x86-64's baseline.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
    }
}

/// How far ahead of its use memory is asked for, in bytes. A row's worth is too little where rows are narrow: memory takes
/// longer than four rows of 324 bytes do. Much more, and lines are gone again before they are used.
pub(super) const AHEAD: usize = 4096;
/// The same for the rows of a list: lists are short, their first rows are asked for all at once, and what a core can wait
/// for at a time is soon used up.
const AHEAD_LISTED: usize = 2048;
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Where the rows lie that will be needed soon.
pub(super) trait Ahead<const R: usize>: Copy {
    /// Asks for what corresponds to block `block` of row `r`, one of `rows`.
    fn fetch(self, rows: &[Row; R], r: usize, block: usize);
}

/// A range goes on, so those rows lie one distance behind the ones at hand. That takes no pointers of its own, so that the
/// inner loops keep theirs in registers.
#[derive(Clone, Copy)]
pub(super) struct Along {
    bytes: usize,
    step: usize,
}

impl<const R: usize> Ahead<R> for Along {
    #[inline(always)]
    fn fetch(self, rows: &[Row; R], r: usize, block: usize) {
        let row = if rows[r].low.is_null() { rows[r].data } else { rows[r].low };
        prefetch(row.wrapping_add(self.bytes + block * self.step));
    }
}

/// Rows of a list, and the bytes of 32 elements in them.
#[derive(Clone, Copy)]
pub(super) struct Listed<const R: usize> {
    rows: [*const u8; R],
    step: usize,
}

impl<const R: usize> Ahead<R> for Listed<R> {
    #[inline(always)]
    fn fetch(self, _: &[Row; R], r: usize, block: usize) {
        prefetch(self.rows[r].wrapping_add(block * self.step));
    }
}

impl Matmul<'_> {
    /// Bytes between rows, and of 32 elements in them, of the plane that is read alone.
    #[inline(always)]
    fn steps(&self) -> (usize, usize) {
        let blocks = self.weight.columns.div_ceil(BLOCK).max(1);
        let row = if self.weight.low.is_null() { self.weight.stride } else { self.weight.low_stride };
        (row, row / blocks)
    }

    /// Rows `ahead` behind those of a range.
    #[inline(always)]
    fn along(&self, ahead: usize) -> Along {
        let (row, step) = self.steps();
        Along { bytes: ahead * row, step }
    }

    /// Rows `i..i + R` of a list; see [`Matmul::begin`].
    #[inline(always)]
    fn listed<const R: usize>(&self, i: usize) -> Listed<R> {
        let rows = std::array::from_fn(|r| {
            let row = self.place(i + r);
            if row.low.is_null() { row.data } else { row.low }
        });
        Listed { rows, step: self.steps().1 }
    }
}

#[inline(always)]
unsafe fn dot_f32<S: Simd, F: Format, const R: usize>(
    s: S,
    rows: [Row; R],
    next: impl Ahead<R>,
    x: *const f32,
    n: usize,
) -> [f32; R] {
    let mut sums = [s.splat(0.0); R];
    // SAFETY: the caller's rows and activations have `n` elements.
    unsafe {
        for block in 0..n / BLOCK {
            let p = x.add(block * BLOCK);
            let x = [s.load(p), s.load(p.add(LANES)), s.load(p.add(2 * LANES)), s.load(p.add(3 * LANES))];
            for r in 0..R {
                next.fetch(&rows, r, block);
                let w = F::vectors(s, rows[r], block);
                for i in 0..4 {
                    sums[r] = s.fma(w[i], x[i], sums[r]);
                }
            }
        }
        let mut done = n / BLOCK * BLOCK;
        while done < n {
            let part = LANES.min(n - done);
            let x = s.load_part(x.add(done), part);
            for r in 0..R {
                sums[r] = s.fma(F::tail(s, rows[r], done, part), x, sums[r]);
            }
            done += part;
        }
    }
    row_sums(s, sums)
}

#[inline(always)]
unsafe fn one_token_f32<S: Simd, F: Format>(s: S, job: &Matmul<'_>, x: *const f32) {
    let n = job.weight.columns;
    // SAFETY: row numbers come from `job.rows`; the caller answers for them.
    unsafe {
        match job.rows {
            Rows::Range(start, end) => {
                let next = job.along(job.begin::<4>());
                let mut row = start;
                while row + 4 <= end {
                    let rows = [row, row + 1, row + 2, row + 3];
                    job.put_four(rows, dot_f32::<S, F, 4>(s, rows.map(|r| job.weight.row(r)), next, x, n));
                    row += 4;
                }
                for row in row..end {
                    let [sum] = dot_f32::<S, F, 1>(s, [job.weight.row(row)], next, x, n);
                    job.put(row, 0, sum);
                }
            }
            Rows::List(list) => {
                let ahead = job.begin::<4>();
                let (fours, rest) = list.as_chunks::<4>();
                for (i, rows) in fours.iter().enumerate() {
                    let rows = rows.map(|row| row as usize);
                    let next = job.listed::<4>(4 * i + ahead);
                    job.put_each(rows, dot_f32::<S, F, 4>(s, rows.map(|r| job.weight.row(r)), next, x, n));
                }
                for &row in rest {
                    let next = job.listed::<1>(list.len());
                    let [sum] = dot_f32::<S, F, 1>(s, [job.weight.row(row as usize)], next, x, n);
                    job.put(row as usize, 0, sum);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn dot_int8<S: Simd, F: IntegerFormat, const R: usize>(
    s: S,
    rows: [Row; R],
    next: impl Ahead<R>,
    codes: *const i8,
    scales: *const f32,
    n: usize,
) -> [f32; R] {
    let mut sums = [s.splat(0.0); R];
    // SAFETY: the caller's rows and activations have `n` elements, whole blocks.
    unsafe {
        for block in 0..n / BLOCK {
            let x = s.load_bytes(codes.add(block * BLOCK));
            let scale = *scales.add(block);
            let activation = (x, scale, lane_sums::<S, F>(s, x));
            if let (Some(factor), Some(&four)) = (F::FACTOR, rows.first_chunk::<4>()) {
                for r in 0..R {
                    next.fetch(&rows, r, block);
                }
                add_four::<S, F>(s, four, block, factor, (x, scale), &mut sums);
                continue;
            }
            for r in 0..R {
                next.fetch(&rows, r, block);
                sums[r] = add_product::<S, F>(s, F::codes(s, rows[r], block), activation, sums[r]);
            }
        }
    }
    row_sums(s, sums)
}

#[inline(always)]
unsafe fn four_int8<S: Simd, F: IntegerFormat>(
    s: S,
    rows: [Row; 4],
    next: impl Ahead<4>,
    codes: *const i8,
    scales: *const f32,
    n: usize,
) -> [f32; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        if S::SQUARES {
            squares::column::<S, F>(s, rows, next, codes, scales, n)
        } else {
            dot_int8::<S, F, 4>(s, rows, next, codes, scales, n)
        }
    }
}

#[inline(always)]
unsafe fn one_token_int8<S: Simd, F: IntegerFormat>(
    s: S,
    job: &Matmul<'_>,
    codes: *const i8,
    scales: *const f32,
) {
    let n = job.weight.columns;
    // SAFETY: as in `one_token_f32`.
    unsafe {
        match job.rows {
            Rows::Range(start, end) => {
                let next = job.along(job.begin::<4>());
                let mut row = start;
                while row + 4 <= end {
                    let rows = [row, row + 1, row + 2, row + 3];
                    let sums = four_int8::<S, F>(s, rows.map(|r| job.weight.row(r)), next, codes, scales, n);
                    job.put_four(rows, sums);
                    row += 4;
                }
                for row in row..end {
                    let [sum] = dot_int8::<S, F, 1>(s, [job.weight.row(row)], next, codes, scales, n);
                    job.put(row, 0, sum);
                }
            }
            Rows::List(list) => {
                let ahead = job.begin::<4>();
                let (fours, rest) = list.as_chunks::<4>();
                for (i, rows) in fours.iter().enumerate() {
                    let rows = rows.map(|row| row as usize);
                    let next = job.listed::<4>(4 * i + ahead);
                    let sums = four_int8::<S, F>(s, rows.map(|r| job.weight.row(r)), next, codes, scales, n);
                    job.put_each(rows, sums);
                }
                for &row in rest {
                    let next = job.listed::<1>(list.len());
                    let [sum] =
                        dot_int8::<S, F, 1>(s, [job.weight.row(row as usize)], next, codes, scales, n);
                    job.put(row as usize, 0, sum);
                }
            }
        }
    }
}

/// Whether one token has a product of its own for this: where four outputs are kept per vector, planes are as any type.
#[inline(always)]
fn is_in_planes<S: Simd>(job: &Matmul<'_>) -> bool {
    job.weight.format == WeightType::Planes && !S::SQUARES
}

#[inline(always)]
unsafe fn one_token_planes<S: Simd>(s: S, job: &Matmul<'_>, codes: *const i8, scales: *const f32) {
    let (n, count) = (job.weight.columns, job.rows.len());
    let ahead = job.begin::<4>();
    let mut i = 0;
    // SAFETY: as in `one_token_f32`.
    unsafe {
        while i + 4 <= count {
            let rows = [job.rows.get(i), job.rows.get(i + 1), job.rows.get(i + 2), job.rows.get(i + 3)];
            let next = std::array::from_fn(|r| job.place(i + ahead + r));
            let next = (next, matches!(job.rows, Rows::Range(..)));
            let sums = planes::dot_four(s, rows.map(|r| job.weight.row(r)), next, codes, scales, n);
            match job.rows {
                Rows::Range(..) => job.put_four(rows, sums),
                Rows::List(_) => job.put_each(rows, sums),
            }
            i += 4;
        }
        while i < count {
            let row = job.rows.get(i);
            let (start, next) = (job.weight.row(row), job.listed::<1>(count));
            let [sum] = dot_int8::<S, planes::Planes, 1>(s, [start], next, codes, scales, n);
            job.put(row, 0, sum);
            i += 1;
        }
    }
}
