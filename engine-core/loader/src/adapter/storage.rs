//! The storage table as [`StorageTier`].

use super::{Handle, call, call_text, function, named, open};
use engine_abi::convert::{self, bytes_of};
use engine_abi::{Reached as ReachedCode, StorageTable};
use engine_core::backend::{Counter, TimelineValue};
use engine_core::options::OptionTable;
use engine_core::storage::{FileId, Read, StorageTier, TierDescription};
use engine_core::{Error, HostSpan, Reached, Result};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// An open storage tier of a plug-in.
pub(crate) struct Tier {
    table: StorageTable,
    handle: Handle,
    description: TierDescription,
}

impl Tier {
    /// Opens the tier.
    pub(crate) fn open(table: StorageTable, plugin: &str, options: &OptionTable) -> Result<Tier> {
        let (open_tier, close) = (function!(table, open, plugin), function!(table, close, plugin));
        let describe = function!(table, describe, plugin);
        let options = options.to_string();
        let handle = open(plugin, close, |out, detail| {
            // SAFETY: the table was checked; text, out parameter and sink live until the call returns.
            unsafe { open_tier(bytes_of(options.as_bytes()), out, detail) }
        })?;
        let json = call_text(plugin, |out, detail| {
            // SAFETY: as above; the instance is open.
            unsafe { describe(handle.instance, out, detail) }
        })?;
        let description = convert::tier_from_json(&json).map_err(|error| named(plugin, error))?;
        Ok(Tier { table, handle, description })
    }

    fn plugin(&self) -> &str {
        &self.handle.plugin
    }
}

impl StorageTier for Tier {
    fn describe(&self) -> &TierDescription {
        &self.description
    }

    fn open(&self, path: &Path) -> Result<FileId> {
        let open_file = function!(self.table, open_file, self.plugin());
        let path = bytes_of(path.as_os_str().as_bytes());
        let mut file = 0;
        let out = &raw mut file;
        call(self.plugin(), |detail| {
            // SAFETY: the table was checked, the instance is open; all else lives until the call returns.
            unsafe { open_file(self.handle.instance, path, out, detail) }
        })?;
        Ok(FileId(file))
    }

    fn len(&self, file: FileId) -> Result<u64> {
        let file_len = function!(self.table, file_len, self.plugin());
        let mut len = 0;
        let out = &raw mut len;
        // SAFETY: as in `open`.
        call(self.plugin(), |detail| unsafe { file_len(self.handle.instance, file.0, out, detail) })?;
        Ok(len)
    }

    fn close(&self, file: FileId) -> Result<()> {
        let close_file = function!(self.table, close_file, self.plugin());
        // SAFETY: as in `open`.
        call(self.plugin(), |detail| unsafe { close_file(self.handle.instance, file.0, detail) })
    }

    fn resident(&self, file: FileId, range: Range<u64>) -> Result<Option<HostSpan>> {
        let resident = function!(self.table, resident, self.plugin());
        let mut present = 0;
        let mut span =
            engine_abi::HostSpan { address: std::ptr::null_mut(), len: 0, writable: 0, reserved: 0 };
        let (present_out, span_out) = (&raw mut present, &raw mut span);
        call(self.plugin(), |detail| {
            // SAFETY: as in `open`.
            unsafe {
                resident(self.handle.instance, file.0, range.start, range.end, present_out, span_out, detail)
            }
        })?;
        if present == 0 {
            return Ok(None);
        }
        let wanted = range.end.saturating_sub(range.start);
        if present != 1 || span.len != wanted {
            return Err(Error::internal(format!(
                "{}: asked for {wanted} resident bytes, it answered with presence {present} and {} bytes",
                self.plugin(),
                span.len
            )));
        }
        // SAFETY: the tier promises that resident bytes stay until the file is closed.
        let span = unsafe { convert::span_from_abi(&span) }
            .map_err(|error| Error::internal(format!("{}: {}", self.plugin(), error.detail())))?;
        Ok(Some(span))
    }

    fn read(&self, requests: &[Read]) -> Result<TimelineValue> {
        let read = function!(self.table, read, self.plugin());
        for request in requests {
            let wanted = request.range.end.checked_sub(request.range.start);
            if wanted != Some(request.into.len()) || !request.into.is_writable() {
                return Err(Error::invalid(format!(
                    "a read of bytes {}..{} into {} bytes of {} memory",
                    request.range.start,
                    request.range.end,
                    request.into.len(),
                    if request.into.is_writable() { "writable" } else { "read-only" }
                )));
            }
        }
        let requests: Vec<engine_abi::Read> = requests.iter().map(convert::read_to_abi).collect();
        let mut value = 0;
        let out = &raw mut value;
        call(self.plugin(), |detail| {
            // SAFETY: as in `open`; the makers of host spans promised their memory.
            unsafe { read(self.handle.instance, requests.as_ptr(), requests.len(), out, detail) }
        })?;
        Ok(TimelineValue(value))
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        let wait = function!(self.table, wait, self.plugin());
        let mut answer = ReachedCode(0);
        let out = &raw mut answer;
        let timeout = convert::timeout_to_ns(timeout);
        call(self.plugin(), |detail| {
            // SAFETY: as in `open`.
            unsafe { wait(self.handle.instance, value.0, timeout, out, detail) }
        })?;
        convert::reached(answer).map_err(|error| named(self.plugin(), error))
    }

    fn cancel(&self, value: TimelineValue) -> Result<()> {
        let cancel = function!(self.table, cancel, self.plugin());
        // SAFETY: as in `open`.
        call(self.plugin(), |detail| unsafe { cancel(self.handle.instance, value.0, detail) })
    }

    fn counters(&self) -> Vec<Counter> {
        let read = || {
            let counters = function!(self.table, counters, self.plugin());
            let json = call_text(self.plugin(), |out, detail| {
                // SAFETY: as in `open`.
                unsafe { counters(self.handle.instance, out, detail) }
            })?;
            convert::counters_from_json(&json).map_err(|error| named(self.plugin(), error))
        };
        read().unwrap_or_else(|error: Error| {
            tracing::warn!("no counters: {error}");
            Vec::new()
        })
    }
}
