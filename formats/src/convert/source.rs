//! Where the elements of a tensor to be written come from, and in which order.

use std::ops::{Deref, Range};
use std::sync::Arc;

use engine_core::DType;

use crate::Result;
use crate::gguf::mapping::Bytes;
use crate::quantise::planes::split_q8_0;
use crate::quantise::{dequantise, quantise};

/// A tensor's bytes: of the model's files, of another file that is kept open, or made here.
#[derive(Debug)]
pub(crate) enum Data<'a> {
    Borrowed(&'a [u8]),
    Shared(Arc<Bytes>, Range<usize>),
    Owned(Vec<u8>),
}

impl Data<'_> {
    /// The same bytes once more.
    pub(crate) fn again(&self) -> Self {
        match self {
            Data::Borrowed(bytes) => Data::Borrowed(bytes),
            Data::Shared(bytes, range) => Data::Shared(bytes.clone(), range.clone()),
            Data::Owned(bytes) => Data::Owned(bytes.clone()),
        }
    }
}

impl Deref for Data<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Data::Borrowed(bytes) => bytes,
            Data::Shared(bytes, range) => bytes.get(range.clone()).unwrap_or_default(),
            Data::Owned(bytes) => bytes,
        }
    }
}

/// How rows to be written follow from rows as stored; rows are counted over all dimensions but the first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Order {
    /// The same.
    AsStored,
    /// Heads of `width` rows, whose pairs (i, i + width / 2) become (2i, 2i + 1): Hugging Face's rope to GGUF's.
    Interleaved { width: u64 },
    /// Groups of `queries` query heads, a key head and a value head, `width` rows each, become all queries, all keys,
    /// all values: Falcon's fused matrix.
    Ungrouped { groups: u64, queries: u64, width: u64 },
    /// Of every `period` rows those from `first`, `count` of them.
    Part { period: u64, first: u64, count: u64 },
    /// Columns become rows; the stored matrix has `rows` rows of single elements (no blocks).
    Transposed { rows: u64 },
    /// Those of these numbers, in this order.
    Listed(Arc<[u32]>),
    /// These columns of the stored matrix become rows; it has `rows` rows, of blocks perhaps. Of stacked matrices all columns
    /// of the first come first, each counted from 0.
    ListedColumns { rows: u64, columns: Arc<[u32]> },
}

/// Elements of one tensor, out of one or several stored ones of one type that follow each other.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    pub(crate) pieces: Vec<Data<'a>>,
    /// How they are stored.
    pub(crate) dtype: DType,
    /// Elements of a stored row; 1 where single elements are put into another order.
    pub(crate) row: u64,
    pub(crate) order: Order,
    /// Added to every element.
    pub(crate) add: f32,
    /// Multiplies it then.
    pub(crate) times: f32,
    /// Only one bit plane of the elements as Q8_0.
    pub(crate) plane: Option<Plane>,
}

/// A bit plane of a matrix as Q8_0 ([`crate::quantise::planes`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plane {
    /// Q4_0, as many elements as the matrix has.
    High,
    /// I8, two elements of the matrix in each.
    Low,
}

/// Ranges of elements begin and end at multiples of this, or at the end: the largest block of any type.
const LARGEST_BLOCK: u64 = 256;
/// Elements that are converted at a time.
const AT_A_TIME: u64 = 1 << 20;

impl<'a> Source<'a> {
    pub(crate) fn as_stored(bytes: Data<'a>, dtype: DType, row: u64) -> Source<'a> {
        Source { pieces: vec![bytes], dtype, row, order: Order::AsStored, add: 0.0, times: 1.0, plane: None }
    }

    /// Ranges of `elements` elements in rows of `row`, each small enough to be converted at once.
    pub(crate) fn portions(&self, elements: u64, row: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        let unit = match &self.order {
            Order::AsStored => LARGEST_BLOCK,
            _ => row.max(1),
        };
        let step = (AT_A_TIME / unit).max(1) * unit;
        (0..elements.div_ceil(step)).map(move |at| at * step..elements.min((at + 1) * step))
    }

    /// The elements of one of [`Source::portions`], stored as `dtype`; `row` is the written row's length.
    pub(crate) fn read(&self, portion: Range<u64>, row: u64, dtype: DType) -> Result<Vec<u8>> {
        match self.plane {
            None => self.read_whole(portion, row, dtype),
            Some(Plane::High) => Ok(split_q8_0(&self.read_whole(portion, row, DType::Q8_0)?)?.0),
            Some(Plane::Low) => {
                let portion = portion.start * 2..portion.end * 2;
                Ok(split_q8_0(&self.read_whole(portion, row * 2, DType::Q8_0)?)?.1)
            }
        }
    }

    /// Elements of the matrix itself, whatever plane is to be written.
    fn read_whole(&self, portion: Range<u64>, row: u64, dtype: DType) -> Result<Vec<u8>> {
        let unchanged = dtype == self.dtype && self.add == 0.0 && self.times == 1.0;
        if unchanged && self.order == Order::AsStored {
            let mut out = Vec::new();
            self.each_run(portion, |bytes| {
                out.extend_from_slice(bytes);
                Ok(())
            })?;
            return Ok(out);
        }
        if unchanged && let Some(bytes) = self.whole_rows(&portion) {
            return Ok(bytes);
        }
        let mut values = vec![0.0_f32; (portion.end - portion.start) as usize];
        self.values(portion, row, &mut values)?;
        if self.add != 0.0 || self.times != 1.0 {
            values.iter_mut().for_each(|value| *value = (*value + self.add) * self.times);
        }
        quantise(dtype, &values)
    }

    /// The stored row that row `row` is made of.
    fn stored_row(&self, row: u64) -> u64 {
        match &self.order {
            Order::AsStored | Order::Transposed { .. } | Order::ListedColumns { .. } => row,
            Order::Listed(rows) => rows.get(row as usize).map_or(0, |&row| row.into()), // one per row
            &Order::Interleaved { width } => {
                let at = row % width;
                row - at + at % 2 * (width / 2) + at / 2
            }
            &Order::Ungrouped { groups, queries, width } => {
                let (head, at) = (row / width, row % width);
                let stored = if head < groups * queries {
                    head / queries * (queries + 2) + head % queries
                } else {
                    let rest = head - groups * queries; // keys, then values
                    rest % groups * (queries + 2) + queries + rest / groups
                };
                stored * width + at
            }
            &Order::Part { period, first, count } => row / count * period + first + row % count,
        }
    }

    fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.row).unwrap_or(0) as usize // part of a tensor that is in memory
    }

    fn stored(&self, row: u64) -> &[u8] {
        let size = self.row_bytes();
        let mut start = row as usize * size;
        for piece in &self.pieces {
            if start < piece.len() {
                return piece.get(start..start + size).unwrap_or_default();
            }
            start -= piece.len();
        }
        &[]
    }

    /// The bytes of whole rows in the order wanted; nothing where single elements change places.
    fn whole_rows(&self, portion: &Range<u64>) -> Option<Vec<u8>> {
        if matches!(self.order, Order::Transposed { .. } | Order::ListedColumns { .. }) {
            return None;
        }
        let rows = portion.start / self.row..portion.end / self.row;
        let mut out = Vec::with_capacity((rows.end - rows.start) as usize * self.row_bytes());
        rows.for_each(|row| out.extend_from_slice(self.stored(self.stored_row(row))));
        Some(out)
    }

    fn values(&self, portion: Range<u64>, row: u64, out: &mut [f32]) -> Result<()> {
        match &self.order {
            Order::AsStored => {
                let mut rest = out;
                let per_block = (self.dtype.block_elements(), self.dtype.block_bytes());
                self.each_run(portion, |bytes| {
                    let count = bytes.len() as u64 / per_block.1 * per_block.0;
                    let (now, later) = std::mem::take(&mut rest).split_at_mut(count as usize);
                    rest = later;
                    dequantise(self.dtype, bytes, now)
                })
            }
            Order::ListedColumns { rows, columns } => {
                let mut stored = vec![0.0; self.row as usize];
                let (first, end) = (portion.start / row, portion.end / row);
                let mut from = first;
                while from < end {
                    let stack = from / self.row;
                    let until = end.min((stack + 1) * self.row);
                    let wanted = &columns[from as usize..until as usize];
                    for at in 0..*rows {
                        dequantise(self.dtype, self.stored(stack * rows + at), &mut stored)?;
                        for (i, &column) in ((from - first) as usize..).zip(wanted) {
                            out[i * row as usize + at as usize] = stored[column as usize];
                        }
                    }
                    from = until;
                }
                Ok(())
            }
            &Order::Transposed { rows } => {
                // A part of every stored row is a column of what is written.
                let columns = portion.start / row..portion.end / row;
                let size = self.dtype.block_bytes() as usize;
                let mut some = vec![0.0; (columns.end - columns.start) as usize];
                for stored in 0..rows {
                    let bytes = self.stored(stored);
                    let part = &bytes[columns.start as usize * size..columns.end as usize * size];
                    dequantise(self.dtype, part, &mut some)?;
                    for (at, &value) in some.iter().enumerate() {
                        out[at * row as usize + stored as usize] = value;
                    }
                }
                Ok(())
            }
            _ => {
                let rows = portion.start / self.row..portion.end / self.row;
                for (row, out) in rows.zip(out.chunks_exact_mut(self.row as usize)) {
                    dequantise(self.dtype, self.stored(self.stored_row(row)), out)?;
                }
                Ok(())
            }
        }
    }

    /// The stored bytes of a range of elements, piece by piece.
    fn each_run(&self, portion: Range<u64>, mut run: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (elements, size) = (self.dtype.block_elements(), self.dtype.block_bytes());
        let mut wanted = portion.start / elements * size..portion.end / elements * size;
        for piece in &self.pieces {
            let length = piece.len() as u64;
            if wanted.start < length && wanted.start < wanted.end {
                let end = wanted.end.min(length);
                run(&piece[wanted.start as usize..end as usize])?;
                wanted.start = end;
            }
            (wanted.start, wanted.end) =
                (wanted.start.saturating_sub(length), wanted.end.saturating_sub(length));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(count: u64) -> Data<'static> {
        Data::Owned((0..count).flat_map(|at| (at as f32).to_le_bytes()).collect())
    }

    fn read(source: &Source<'_>, elements: u64, row: u64) -> Vec<f32> {
        let bytes: Vec<u8> = source
            .portions(elements, row)
            .flat_map(|portion| source.read(portion, row, DType::F32).unwrap())
            .collect();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn of(order: Order, row: u64, add: f32) -> Source<'static> {
        Source { pieces: vec![floats(24)], dtype: DType::F32, row, order, add, times: 1.0, plane: None }
    }

    #[test]
    fn orders() {
        // Two heads of 4 rows of 3: pairs (0, 2) and (1, 3) of a head follow each other.
        let rows =
            |order, add| read(&of(order, 3, add), 24, 3).chunks(3).map(|row| row[0]).collect::<Vec<_>>();
        let interleaved = Order::Interleaved { width: 4 };
        assert_eq!(rows(interleaved.clone(), 0.0), [0.0, 6.0, 3.0, 9.0, 12.0, 18.0, 15.0, 21.0]);
        assert_eq!(rows(interleaved, 1.0), [1.0, 7.0, 4.0, 10.0, 13.0, 19.0, 16.0, 22.0]);
        // Two groups of two query heads, a key and a value head, one row each.
        let ungrouped = Order::Ungrouped { groups: 2, queries: 2, width: 1 };
        assert_eq!(rows(ungrouped, 0.0), [0.0, 3.0, 12.0, 15.0, 6.0, 18.0, 9.0, 21.0]);
        // The second half of every four rows.
        let part = of(Order::Part { period: 4, first: 2, count: 2 }, 3, 0.0);
        assert_eq!(read(&part, 12, 3), [6., 7., 8., 9., 10., 11., 18., 19., 20., 21., 22., 23.]);
        // 4 stored rows of 6.
        let transposed = read(&of(Order::Transposed { rows: 4 }, 6, 0.0), 24, 4);
        assert_eq!(transposed[..8], [0.0, 6.0, 12.0, 18.0, 1.0, 7.0, 13.0, 19.0]);
        assert_eq!(rows(Order::Listed([3, 0, 7].into()), 0.0)[..3], [9.0, 0.0, 21.0]);
        let columns = Order::ListedColumns { rows: 4, columns: [5, 0].into() };
        assert_eq!(read(&of(columns, 6, 0.0), 8, 4), [5.0, 11.0, 17.0, 23.0, 0.0, 6.0, 12.0, 18.0]);
        // Two stacked matrices of 2 rows of 6, in a piece each.
        let mut stacked =
            of(Order::ListedColumns { rows: 2, columns: (0..6).rev().chain(0..6).collect() }, 6, 0.0);
        let Data::Owned(bytes) = stacked.pieces.remove(0) else { unreachable!("it was made here") };
        let (first, second) = bytes.split_at(48);
        stacked.pieces = vec![Data::Owned(first.to_vec()), Data::Owned(second.to_vec())];
        let found = read(&stacked, 24, 2);
        assert_eq!(found[..4], [5.0, 11.0, 4.0, 10.0]);
        assert_eq!(found[12..16], [12.0, 18.0, 13.0, 19.0]);
    }

    #[test]
    fn several_pieces_are_one_tensor() {
        let count = 2 * AT_A_TIME / 3 + 256; // a portion ends inside a piece
        let count = count / 256 * 256;
        let source = Source {
            plane: None,
            pieces: vec![floats(count), floats(count), floats(count)],
            dtype: DType::F32,
            row: 256,
            order: Order::AsStored,
            add: 0.0,
            times: 1.0,
        };
        let wanted: Vec<f32> = (0..3 * count).map(|at| (at % count) as f32).collect();
        assert_eq!(read(&source, 3 * count, 256), wanted);
        let halves: Vec<u8> = source
            .portions(3 * count, 256)
            .flat_map(|portion| source.read(portion, 256, DType::BF16).unwrap())
            .collect();
        assert_eq!(halves.len() as u64, 6 * count);
    }
}
