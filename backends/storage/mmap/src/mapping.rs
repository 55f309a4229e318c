//! A mapped file, and bytes lent and copied by address: the only unsafe place of this crate.
//!
//! A file that is made shorter while it is mapped ends the process with SIGBUS at the next access beyond its new end;
//! no check can prevent that. The length is taken when the file is opened and looked at again before every `read`.
#![expect(
    unsafe_code,
    reason = "a mapping's content is up to whoever may write the file; host spans are raw addresses"
)]

use crate::Options;
use engine_core::{Error, HostSpan, Result};
use memmap2::{Advice, Mmap, MmapOptions};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// An open, mapped file.
pub(crate) struct Mapping {
    path: PathBuf,
    file: File,
    map: Mmap,
}

impl Mapping {
    /// Maps a regular file that is not empty.
    pub(crate) fn open(path: &Path, options: &Options) -> Result<Mapping> {
        let failed = |operation: &str, error: io::Error| {
            Error::io(format!("{}: {operation}: {error}", path.display()))
        };
        let unusable = |what| Err(Error::io(format!("{}: {what}; wanted a model file", path.display())));
        // Before opening: opening a pipe would wait for a writer.
        let before = std::fs::metadata(path).map_err(|error| failed("open", error))?;
        if before.is_dir() {
            return unusable("it is a directory");
        }
        if !before.is_file() {
            return unusable("it is no regular file");
        }
        let file = File::open(path).map_err(|error| failed("open", error))?;
        let length = file.metadata().map_err(|error| failed("open", error))?.len();
        if length == 0 {
            return unusable("it is empty");
        }
        let Ok(mapped) = usize::try_from(length) else {
            return unusable("it is larger than the address space");
        };
        let mut map = MmapOptions::new();
        map.len(mapped);
        if options.populate {
            map.populate();
        }
        // SAFETY: the mapping is read only. Its bytes change if someone writes the file, and vanish if someone
        // shortens it; the module's documentation says so, and the host treats file content as untrusted anyway.
        let map = unsafe { map.map(&file) }.map_err(|error| failed("map", error))?;
        if options.willneed {
            map.advise(Advice::WillNeed).map_err(|error| failed("madvise", error))?;
        }
        Ok(Mapping { path: path.to_owned(), file, map })
    }

    /// Length in bytes when it was opened.
    pub(crate) fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Checks that a range lies within the file.
    pub(crate) fn within(&self, range: &Range<u64>) -> Result<()> {
        if range.start > range.end || range.end > self.len() {
            return Err(Error::invalid(format!(
                "{}: bytes {}..{} are not within its {}",
                self.path.display(),
                range.start,
                range.end,
                self.len()
            )));
        }
        Ok(())
    }

    /// Checks a read: the range, the target, and that the file is still as long as it was.
    pub(crate) fn check_read(&self, range: &Range<u64>, into: HostSpan) -> Result<()> {
        self.within(range)?;
        let bytes = range.end - range.start;
        let fail = |what| {
            Err(Error::invalid(format!("{}: a read of {bytes} bytes into {what}", self.path.display())))
        };
        if into.len() != bytes {
            return fail(format!("memory of {}", into.len()));
        }
        if !into.is_writable() {
            return fail("read-only memory".into());
        }
        match self.file.metadata() {
            Ok(now) if now.len() >= range.end => Ok(()),
            Ok(now) => Err(Error::io(format!(
                "{}: it had {} bytes when it was opened and has {} now; leave model files alone while they are used",
                self.path.display(),
                self.len(),
                now.len()
            ))),
            Err(error) => Err(Error::io(format!("{}: read: {error}", self.path.display()))),
        }
    }

    /// Copies bytes that `check_read` has seen.
    pub(crate) fn copy(&self, range: &Range<u64>, into: HostSpan) {
        let from = &self.map[range.start as usize..range.end as usize];
        // SAFETY: `check_read` saw that the span is writable and as long as the range; whoever made it promises that
        // the memory is there and nobody else uses it until the read is reached, so it is no part of a mapping.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.address() as *mut u8, from.len()) }
    }

    /// The bytes where they are mapped.
    pub(crate) fn lend(&self, range: &Range<u64>) -> Result<HostSpan> {
        self.within(range)?;
        let bytes = &self.map[range.start as usize..range.end as usize];
        // SAFETY: the mapping stays where it is until `close`, which the host calls only when nothing uses its resident
        // memory any more; it is read only.
        Ok(unsafe { HostSpan::new(bytes.as_ptr(), bytes.len() as u64, false) })
    }
}
