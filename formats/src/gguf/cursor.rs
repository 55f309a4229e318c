//! A reading position in a header, where every step is checked against the bytes that are there.

use std::fmt;
use std::path::Path;

use crate::{FormatError, Result};

/// Headers longer than this are refused: the largest real ones have some tens of MiB, and a sparse file must not be
/// able to ask for memory by the terabyte.
const HEADER_LIMIT: u64 = 1 << 27;

/// Arrays within arrays that a header may have in all. No known file has any, and each takes more memory than its twelve
/// bytes, which may be a hole of a sparse file.
const NESTED_LIMIT: u64 = 1 << 16;

/// Reads little-endian fields in order.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
    nested: u64,
    path: &'a Path,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(path: &'a Path, bytes: &'a [u8]) -> Cursor<'a> {
        let limit = usize::try_from(HEADER_LIMIT).unwrap_or(usize::MAX);
        Cursor { bytes: &bytes[..bytes.len().min(limit)], position: 0, nested: 0, path }
    }

    pub(crate) fn position(&self) -> u64 {
        self.position as u64
    }

    pub(crate) fn left(&self) -> u64 {
        (self.bytes.len() - self.position) as u64
    }

    /// The next `count` bytes of `what`.
    pub(crate) fn take(&mut self, count: u64, what: fmt::Arguments<'_>) -> Result<&'a [u8]> {
        if count > self.left() {
            return Err(FormatError::Truncated {
                path: self.path.to_path_buf(),
                what: what.to_string(),
                offset: self.position(),
                needed: count,
                present: self.left(),
            });
        }
        let start = self.position;
        self.position += count as usize; // not more than `left`, which is a usize
        Ok(&self.bytes[start..self.position])
    }

    pub(crate) fn array<const N: usize>(&mut self, what: fmt::Arguments<'_>) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(crate) fn u32(&mut self, what: fmt::Arguments<'_>) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: fmt::Arguments<'_>) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A string: its length as u64, then its bytes.
    pub(crate) fn string(&mut self, what: fmt::Arguments<'_>) -> Result<&'a [u8]> {
        let length = self.u64(what)?;
        self.take(length, what)
    }

    /// A count of things that take at least `least` bytes each; refused where the file cannot hold so many.
    pub(crate) fn count(&mut self, least: u64, what: fmt::Arguments<'_>) -> Result<u64> {
        let offset = self.position();
        let count = self.u64(what)?;
        let most = self.left() / least.max(1);
        if count > most {
            let problem = format!(
                "claims {count} entries of at least {least} bytes, but only {} bytes are left in the file \
                 (room for {most}); it was cut short (fetch it again) or is damaged",
                self.left()
            );
            return Err(self.bad(what, offset, problem));
        }
        Ok(count)
    }

    /// Counts `count` arrays within another.
    pub(crate) fn nest(&mut self, count: u64, what: fmt::Arguments<'_>) -> Result<()> {
        self.nested = self.nested.saturating_add(count);
        if self.nested <= NESTED_LIMIT {
            return Ok(());
        }
        let problem = format!("holds {count} arrays; {NESTED_LIMIT} arrays within arrays are allowed in all");
        Err(self.bad(what, self.position(), problem))
    }

    /// A damaged header: `what` at `offset`.
    pub(crate) fn bad(
        &self,
        what: impl fmt::Display,
        offset: u64,
        problem: impl Into<String>,
    ) -> FormatError {
        FormatError::Header {
            path: self.path.to_path_buf(),
            field: what.to_string(),
            offset,
            problem: problem.into(),
        }
    }
}
