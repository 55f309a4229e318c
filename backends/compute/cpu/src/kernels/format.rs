//! How each weight type's rows become vectors: one small implementation per type, used by every kernel.
//!
//! A further type is a variant of [`WeightType`], a [`Format`] (a quantised one: an
//! [`IntegerFormat`](super::quantised::IntegerFormat)) and a row in [`with_format`].

use engine_core::DType;

use super::simd::{BLOCK, LANES, Simd};
use super::wide::{Wide, WideOf};

/// The weight types that have kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightType {
    /// See [`DType::F32`].
    F32,
    /// See [`DType::F16`].
    F16,
    /// See [`DType::Q4_0`].
    Q4_0,
    /// See [`DType::Q4_1`].
    Q4_1,
    /// See [`DType::Q8_0`].
    Q8_0,
    /// See [`DType::Q4K`].
    Q4K,
    /// See [`DType::Q6K`].
    Q6K,
    /// See [`DType::BF16`].
    BF16,
    /// Q4_0 bytes that are the high halves of 8-bit codes: an estimate of the weights in planes.
    HighHalves,
    /// High halves with their low halves, which is Q8_0 in two pieces.
    Planes,
}

impl WeightType {
    /// Those with kernels, in order of the dtype's code.
    pub(crate) const ALL: [WeightType; 8] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q8_0,
        WeightType::Q4K,
        WeightType::Q6K,
        WeightType::BF16,
    ];

    /// The kernels' type for a dtype, if it has kernels.
    pub(crate) fn of(dtype: DType) -> Option<WeightType> {
        WeightType::ALL.into_iter().find(|w| w.dtype() == dtype)
    }

    /// The contract's name for it.
    pub(crate) fn dtype(self) -> DType {
        match self {
            WeightType::F32 => DType::F32,
            WeightType::F16 => DType::F16,
            WeightType::Q4_0 | WeightType::HighHalves | WeightType::Planes => DType::Q4_0,
            WeightType::Q4_1 => DType::Q4_1,
            WeightType::Q8_0 => DType::Q8_0,
            WeightType::Q4K => DType::Q4K,
            WeightType::Q6K => DType::Q6K,
            WeightType::BF16 => DType::BF16,
        }
    }

    /// Whether it meets int8 activations as integers. Unquantised weights meet them as f32 products of `scale x code`.
    pub(crate) fn has_integer_dot(self) -> bool {
        !matches!(self, WeightType::F32 | WeightType::F16 | WeightType::BF16)
    }
}

/// Where a row's elements lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// The row; of a matrix in planes its high halves.
    pub(crate) data: *const u8,
    /// The low halves of a matrix in planes, null otherwise.
    pub(crate) low: *const u8,
}

/// A weight type's row as vectors. `block` counts 32 elements.
pub(crate) trait Format: Copy {
    /// Elements `32 block..32 block + 32`, as f32, rounded once at most.
    ///
    /// # Safety
    /// The row has that block.
    unsafe fn vectors<S: Simd>(s: S, row: Row, block: usize) -> [S::V; 4];

    /// The same in vectors of sixteen lanes.
    ///
    /// # Safety
    /// The row has that block.
    #[inline(always)]
    unsafe fn wides<S: Simd>(s: S, row: Row, block: usize) -> [WideOf<S>; 2] {
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { Self::vectors(s, row, block) };
        [s.wide().join(a, b), s.wide().join(c, d)]
    }

    /// Bytes of a block, where it begins with an f16 that is the factor of all of its 32 codes.
    const SCALED: Option<usize> = None;

    /// [`Format::wides`] with this factor in the place of the block's.
    ///
    /// # Safety
    /// The row has that block.
    #[inline(always)]
    unsafe fn scaled<S: Simd>(s: S, row: Row, block: usize, _factor: WideOf<S>) -> [WideOf<S>; 2] {
        // SAFETY: the caller's promise.
        unsafe { Self::wides(s, row, block) }
    }

    /// Elements `start..start + n` with `n < 8`, the other lanes zero. Called only where a row may end within a
    /// block, which no quantised row does.
    ///
    /// # Safety
    /// The row has these elements.
    unsafe fn tail<S: Simd>(s: S, row: Row, start: usize, n: usize) -> S::V;
}

/// f32 rows.
#[derive(Clone, Copy)]
pub(crate) struct F32;
/// f16 rows.
#[derive(Clone, Copy)]
pub(crate) struct F16;
/// bf16 rows.
#[derive(Clone, Copy)]
pub(crate) struct BF16;

impl Format for F32 {
    #[inline(always)]
    unsafe fn vectors<S: Simd>(s: S, row: Row, block: usize) -> [S::V; 4] {
        // SAFETY: the caller's row has the block.
        unsafe {
            let p = row.data.cast::<f32>().add(block * BLOCK);
            [s.load(p), s.load(p.add(LANES)), s.load(p.add(2 * LANES)), s.load(p.add(3 * LANES))]
        }
    }

    #[inline(always)]
    unsafe fn wides<S: Simd>(s: S, row: Row, block: usize) -> [WideOf<S>; 2] {
        // SAFETY: the caller's row has the block.
        unsafe {
            let p = row.data.cast::<f32>().add(block * BLOCK);
            [s.wide().load(p), s.wide().load(p.add(2 * LANES))]
        }
    }

    #[inline(always)]
    unsafe fn tail<S: Simd>(s: S, row: Row, start: usize, n: usize) -> S::V {
        // SAFETY: the caller's row has the elements.
        unsafe { s.load_part(row.data.cast::<f32>().add(start), n) }
    }
}

impl Format for F16 {
    #[inline(always)]
    unsafe fn vectors<S: Simd>(s: S, row: Row, block: usize) -> [S::V; 4] {
        // SAFETY: the caller's row has the block.
        unsafe {
            let p = row.data.cast::<u16>().add(block * BLOCK);
            [
                s.load_f16(p),
                s.load_f16(p.add(LANES)),
                s.load_f16(p.add(2 * LANES)),
                s.load_f16(p.add(3 * LANES)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn wides<S: Simd>(s: S, row: Row, block: usize) -> [WideOf<S>; 2] {
        // SAFETY: the caller's row has the block.
        unsafe {
            let p = row.data.cast::<u16>().add(block * BLOCK);
            [s.wide().load_f16(p), s.wide().load_f16(p.add(2 * LANES))]
        }
    }

    #[inline(always)]
    unsafe fn tail<S: Simd>(s: S, row: Row, start: usize, n: usize) -> S::V {
        // SAFETY: the caller's row has the elements.
        unsafe { s.load_f16_part(row.data.cast::<u16>().add(start), n) }
    }
}

impl Format for BF16 {
    #[inline(always)]
    unsafe fn vectors<S: Simd>(s: S, row: Row, block: usize) -> [S::V; 4] {
        // SAFETY: the caller's row has the block.
        unsafe {
            let p = row.data.cast::<u16>().add(block * BLOCK);
            [
                s.load_bf16(p),
                s.load_bf16(p.add(LANES)),
                s.load_bf16(p.add(2 * LANES)),
                s.load_bf16(p.add(3 * LANES)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn tail<S: Simd>(s: S, row: Row, start: usize, n: usize) -> S::V {
        // SAFETY: the caller's row has the elements.
        unsafe { s.load_bf16_part(row.data.cast::<u16>().add(start), n) }
    }
}

/// Evaluates an expression with `$format` bound to the [`Format`] of a [`WeightType`].
macro_rules! with_format {
    ($weight_type:expr, $format:ident => $body:expr) => {
        match $weight_type {
            $crate::kernels::format::WeightType::F32 => {
                use $crate::kernels::format::F32 as $format;
                $body
            }
            $crate::kernels::format::WeightType::F16 => {
                use $crate::kernels::format::F16 as $format;
                $body
            }
            $crate::kernels::format::WeightType::BF16 => {
                use $crate::kernels::format::BF16 as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q4_0 => {
                use $crate::kernels::quantised::Q4 as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q4_1 => {
                use $crate::kernels::quantised::Q4Min as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q8_0 => {
                use $crate::kernels::quantised::Q8 as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q4K => {
                use $crate::kernels::quantised::Q4K as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q6K => {
                use $crate::kernels::quantised::Q6K as $format;
                $body
            }
            $crate::kernels::format::WeightType::HighHalves => {
                use $crate::kernels::planes::HighHalves as $format;
                $body
            }
            $crate::kernels::format::WeightType::Planes => {
                use $crate::kernels::planes::Planes as $format;
                $body
            }
        }
    };
}
/// The same for types whose rows meet int8 codes block by block; `$other` for the others.
macro_rules! with_integer_format {
    ($weight_type:expr, $format:ident => $body:expr, else $other:expr) => {
        match $weight_type {
            $crate::kernels::format::WeightType::Q4_0 => {
                use $crate::kernels::quantised::Q4 as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q4_1 => {
                use $crate::kernels::quantised::Q4Min as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q8_0 => {
                use $crate::kernels::quantised::Q8 as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q4K => {
                use $crate::kernels::quantised::Q4K as $format;
                $body
            }
            $crate::kernels::format::WeightType::Q6K => {
                use $crate::kernels::quantised::Q6K as $format;
                $body
            }
            $crate::kernels::format::WeightType::Planes => {
                use $crate::kernels::planes::Planes as $format;
                $body
            }
            $crate::kernels::format::WeightType::F32
            | $crate::kernels::format::WeightType::F16
            | $crate::kernels::format::WeightType::BF16
            | $crate::kernels::format::WeightType::HighHalves => $other,
        }
    };
}
pub(crate) use {with_format, with_integer_format};

/// A weight matrix in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    /// First byte of row 0.
    pub(crate) data: *const u8,
    /// Bytes between rows.
    pub(crate) stride: usize,
    /// The low halves of row 0, where the matrix is in planes; null otherwise.
    pub(crate) low: *const u8,
    /// Bytes between rows of low halves.
    pub(crate) low_stride: usize,
    /// Elements of a row.
    pub(crate) columns: usize,
    /// Their type.
    pub(crate) format: WeightType,
}

// SAFETY: a plain description of memory; who uses it answers for the memory.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// Bytes of a row, both halves of its codes where it is in planes.
    #[inline(always)]
    pub(crate) fn row_bytes(&self) -> usize {
        self.stride + self.low_stride
    }

    /// Where a row starts.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> Row {
        Row {
            data: self.data.wrapping_add(row * self.stride),
            low: self.low.wrapping_add(row * self.low_stride),
        }
    }
}

/// Writes a row as f32 times `scale`.
///
/// # Safety
/// `row` has `n` elements of `format` (whole blocks where quantised), `out` takes `n` f32.
#[inline(always)]
pub(crate) unsafe fn weight_row<S: Simd>(
    s: S,
    row: Row,
    format: WeightType,
    n: usize,
    scale: f32,
    out: *mut f32,
) {
    // SAFETY: the caller's promise.
    with_format!(format, F => unsafe { unpack::<S, F>(s, row, n, out) });
    if scale != 1.0 {
        for i in 0..n {
            // SAFETY: `out` takes `n` values, all written above.
            unsafe { *out.add(i) *= scale };
        }
    }
}

/// Writes a row as f32, zeros not included.
///
/// # Safety
/// `row` has `n` elements of the format, `out` takes `n` f32.
#[inline(always)]
pub(crate) unsafe fn unpack<S: Simd, F: Format>(s: S, row: Row, n: usize, out: *mut f32) {
    // SAFETY: blocks and tail lie within the row, and the same elements within `out`.
    unsafe {
        for block in 0..n / BLOCK {
            let vectors = F::vectors(s, row, block);
            for (i, v) in vectors.into_iter().enumerate() {
                s.store(out.add(block * BLOCK + i * LANES), v);
            }
        }
        let mut done = n / BLOCK * BLOCK;
        while done < n {
            let part = LANES.min(n - done);
            s.store_part(out.add(done), F::tail(s, row, done, part), part);
            done += part;
        }
    }
}
