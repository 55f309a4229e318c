//! Rows that were observed, as they are kept in a file: F16 with a scale per row, so that no residual is too large.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Rows of one layer, a token each, in bytes: per row a scale in f32 and `width` elements in F16.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    bytes: &'a [u8],
    width: usize,
    /// Bytes from row to row, and where in them a row begins: several kinds of rows may take turns.
    stride: usize,
    offset: usize,
}

/// Bytes of an encoded row.
pub fn row_bytes(width: usize) -> usize {
    4 + 2 * width
}

/// Appends one row to `out`.
pub fn encode(row: &[f32], out: &mut Vec<u8>) {
    let largest = row.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
    let scale = if largest > 0.0 && largest.is_finite() { largest } else { 1.0 };
    out.extend_from_slice(&scale.to_le_bytes());
    for &x in row {
        out.extend_from_slice(&f16::from_f32(x / scale).to_le_bytes());
    }
}

impl<'a> Rows<'a> {
    /// The rows in `bytes` that begin at `offset` of every `stride` bytes.
    pub fn new(bytes: &'a [u8], width: usize, stride: usize, offset: usize) -> Rows<'a> {
        Rows { bytes, width, stride: stride.max(1), offset }
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.stride
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of row `at`; none where there is no such row.
    pub fn encoded(&self, at: usize) -> &'a [u8] {
        let start = at * self.stride + self.offset;
        self.bytes.get(start..start + row_bytes(self.width)).unwrap_or_default()
    }

    /// Decodes row `at` into `out`, `width` long; zeros where there is no such row.
    pub fn read(&self, at: usize, out: &mut [f32]) {
        let row = self.encoded(at);
        if row.is_empty() {
            out.fill(0.0);
            return;
        }
        let scale = f32::from_le_bytes([row[0], row[1], row[2], row[3]]);
        let mut halves = [f16::ZERO; 64];
        for (bytes, out) in row[4..].chunks(128).zip(out.chunks_mut(64)) {
            for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *half = f16::from_le_bytes(*bytes);
            }
            halves[..out.len()].convert_to_f32_slice(out);
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// Decodes rows `at` one behind the other.
    pub fn gather(&self, at: impl IntoIterator<Item = usize>, out: &mut Vec<f32>) {
        let mut count = 0;
        for at in at {
            out.resize((count + 1) * self.width, 0.0);
            self.read(at, &mut out[count * self.width..]);
            count += 1;
        }
        out.truncate(count * self.width);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_size_come_back() {
        let first: Vec<f32> = (0..100).map(|i| (i as f32 - 50.0) * 3e6).collect();
        let second: Vec<f32> = (0..100).map(|i| (i as f32 - 50.0) * 1e-6).collect();
        let mut bytes = Vec::new();
        encode(&first, &mut bytes);
        encode(&second, &mut bytes);
        encode(&[0.0; 100], &mut bytes);
        let rows = Rows::new(&bytes, 100, row_bytes(100), 0);
        assert_eq!((rows.len(), rows.width(), rows.is_empty()), (3, 100, false));
        let mut out = Vec::new();
        rows.gather([1, 0, 2, 9], &mut out);
        for (found, wanted) in out.iter().zip(second.iter().chain(&first).chain(&[0.0; 200])) {
            assert!((found - wanted).abs() <= wanted.abs() * 1e-3 + 1e-9, "{found} {wanted}");
        }
        // Taking turns: the second of two kinds.
        let turns = Rows::new(&bytes[..2 * row_bytes(100)], 100, 2 * row_bytes(100), row_bytes(100));
        let mut row = vec![0.0; 100];
        turns.read(0, &mut row);
        assert_eq!(row, out[..100]);
        assert_eq!(turns.len(), 1);
    }
}
