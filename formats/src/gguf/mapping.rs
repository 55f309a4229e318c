//! The bytes of a file, mapped into memory; the one place with `unsafe` in this crate.

use std::fs::{self, File};
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use crate::{FormatError, Result};

/// A file's bytes: mapped, or given by the caller (tests, fuzzing).
#[derive(Debug)]
pub(crate) enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Bytes {
    /// Maps a regular file for reading.
    pub(crate) fn map(path: &Path) -> Result<Bytes> {
        let io = |operation| move |source| FormatError::Io { path: path.to_path_buf(), operation, source };
        // Asked before opening: opening a FIFO would wait for a writer.
        let found = fs::metadata(path).map_err(io("open"))?;
        if !found.is_file() {
            let what =
                if found.is_dir() { "a folder" } else { "not a regular file (a device, pipe or socket)" };
            let found = format!("it is {what}; give the path of a .gguf file");
            return Err(FormatError::NotGguf { path: path.to_path_buf(), found });
        }
        if found.len() == 0 {
            return Ok(Bytes::Owned(Vec::new())); // an empty file cannot be mapped
        }
        let file = File::open(path).map_err(io("open"))?;
        #[allow(unsafe_code)] // the one mapping of this crate
        // SAFETY: the mapping is read-only and private to this value, and only ever seen as `&[u8]`. What cannot be
        // excluded is another process changing or cutting the file while it is mapped; that is documented at
        // `GgufFile::open` as the caller's duty, as with every program that maps files.
        let mapped = unsafe { Mmap::map(&file) };
        mapped.map(Bytes::Mapped).map_err(io("map"))
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}
