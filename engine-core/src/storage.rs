//! `StorageTier`: brings byte ranges of files into memory.

use crate::backend::{Counter, TimelineValue};
use crate::{HostSpan, Reached, Result};
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// A handle of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(pub u64);

/// One point of a tier's measured read curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurvePoint {
    /// Bytes per request.
    pub block_bytes: u64,
    /// Requests in flight.
    pub depth: u32,
    /// Bytes per second.
    pub bytes_per_second: f64,
}

/// What a tier is.
#[derive(Clone, Debug, PartialEq)]
pub struct TierDescription {
    /// The name that the config uses for it.
    pub name: String,
    /// For people.
    pub description: String,
    /// Alignment of offsets, lengths and addresses that `read` needs, in bytes; 1 where there is none.
    pub alignment: u64,
    /// Bytes that are read at least, whatever is asked for.
    pub granularity: u64,
    /// Whether [`StorageTier::resident`] can answer with memory.
    pub resident: bool,
    /// Most requests worth having in flight.
    pub max_depth: u32,
    /// Measured speed; empty where nothing was measured.
    pub curve: Vec<CurvePoint>,
    /// Choices that it made and why, a sentence each.
    pub notes: Vec<String>,
}

/// One request of a [`StorageTier::read`].
#[derive(Clone, Debug, PartialEq)]
pub struct Read {
    /// The file.
    pub file: FileId,
    /// Bytes of the file.
    pub range: Range<u64>,
    /// Where they go; as long as the range.
    pub into: HostSpan,
    /// 0 is the most urgent.
    pub priority: u8,
}

/// A way of getting at files. All methods may be called from any thread. Dropping the tier waits for reads under way.
pub trait StorageTier: Send + Sync {
    /// What the tier is. Constant for its lifetime.
    fn describe(&self) -> &TierDescription;

    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`Io`](crate::Error::Io) with the path and the system's message; [`OutOfMemory`](crate::Error::OutOfMemory)
    /// where the tier keeps files in memory and this one does not fit its budget.
    fn open(&self, path: &Path) -> Result<FileId>;

    /// Length of an open file in bytes.
    ///
    /// # Errors
    /// [`UnknownHandle`](crate::Error::UnknownHandle).
    fn len(&self, file: FileId) -> Result<u64>;

    /// Closes a file. The host calls it only when nothing uses its resident memory or reads from it any more.
    ///
    /// # Errors
    /// [`UnknownHandle`](crate::Error::UnknownHandle), also for a second close.
    fn close(&self, file: FileId) -> Result<()>;

    /// The bytes where they lie in memory already (a mapping, a copy), without reading; valid until the file is
    /// closed. `None` where the tier keeps nothing resident.
    ///
    /// # Errors
    /// [`UnknownHandle`](crate::Error::UnknownHandle); [`InvalidArgument`](crate::Error::InvalidArgument) for a range
    /// beyond the file.
    fn resident(&self, file: FileId, range: Range<u64>) -> Result<Option<HostSpan>>;

    /// Starts reads; the value is reached when all of them are done.
    ///
    /// # Errors
    /// Mistakes in handles, ranges, lengths and alignment, before anything is read.
    fn read(&self, requests: &[Read]) -> Result<TimelineValue>;

    /// Waits until the reads with this value are done, at most `timeout`.
    ///
    /// # Errors
    /// The reads' own error, [`Cancelled`](crate::Error::Cancelled), or
    /// [`UnknownHandle`](crate::Error::UnknownHandle) for a value that was never returned.
    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached>;

    /// Asks that reads not started yet be dropped; `wait` then answers Cancelled unless they were done before.
    ///
    /// # Errors
    /// [`UnknownHandle`](crate::Error::UnknownHandle).
    fn cancel(&self, value: TimelineValue) -> Result<()>;

    /// Counts that explain what the tier did. Every tier has `bytes_read` and `reads`.
    fn counters(&self) -> Vec<Counter>;
}
