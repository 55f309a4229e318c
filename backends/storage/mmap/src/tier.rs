//! The tier: open files as mappings, and reads as copies out of them.

use crate::Options;
use crate::mapping::Mapping;
use engine_core::backend::{Counter, TimelineValue};
use engine_core::error::HandleKind;
use engine_core::storage::{FileId, Read, TierDescription};
use engine_core::{Error, HostSpan, Reached, Result, StorageTier};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Mapped files.
pub struct MemoryMap {
    description: TierDescription,
    options: Options,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last_file: u64,
    files: HashMap<FileId, Arc<Mapping>>,
    bytes_mapped: u64,
    last_value: u64,
    reads: u64,
    bytes_read: u64,
}

impl MemoryMap {
    /// A tier with these options.
    pub fn new(options: Options) -> MemoryMap {
        let mut notes =
            vec!["a file that is made shorter while it is in use ends the process (SIGBUS)".into()];
        if options.populate {
            notes.push("pages are read in when a file is opened (populate)".into());
        } else if options.willneed {
            notes.push("the system is asked to read files ahead (willneed)".into());
        }
        let description = TierDescription {
            name: crate::NAME.into(),
            description: "memory-mapped files, paged in by the system".into(),
            alignment: 1,
            granularity: 4096,
            resident: true,
            max_depth: 1,
            curve: vec![],
            notes,
        };
        MemoryMap { description, options, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is made at once, so a panic elsewhere leaves it whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, file: FileId) -> Result<Arc<Mapping>> {
        self.state().files.get(&file).cloned().ok_or_else(|| Error::unknown(HandleKind::File, file.0))
    }
}

impl StorageTier for MemoryMap {
    fn describe(&self) -> &TierDescription {
        &self.description
    }

    fn open(&self, path: &Path) -> Result<FileId> {
        let mapping = Mapping::open(path, &self.options)?;
        let mut state = self.state();
        state.last_file += 1;
        state.bytes_mapped += mapping.len();
        let id = FileId(state.last_file);
        state.files.insert(id, Arc::new(mapping));
        Ok(id)
    }

    fn len(&self, file: FileId) -> Result<u64> {
        Ok(self.file(file)?.len())
    }

    fn close(&self, file: FileId) -> Result<()> {
        let mut state = self.state();
        let mapping = state.files.remove(&file).ok_or_else(|| Error::unknown(HandleKind::File, file.0))?;
        state.bytes_mapped -= mapping.len();
        Ok(())
    }

    fn resident(&self, file: FileId, range: Range<u64>) -> Result<Option<HostSpan>> {
        self.file(file)?.lend(&range).map(Some)
    }

    fn read(&self, requests: &[Read]) -> Result<TimelineValue> {
        let mut mappings = Vec::with_capacity(requests.len());
        for request in requests {
            let mapping = self.file(request.file)?;
            mapping.check_read(&request.range, request.into)?;
            mappings.push(mapping);
        }
        let mut bytes = 0;
        for (request, mapping) in requests.iter().zip(mappings) {
            mapping.copy(&request.range, request.into);
            bytes += request.into.len();
        }
        let mut state = self.state();
        state.reads += requests.len() as u64;
        state.bytes_read += bytes;
        state.last_value += 1;
        Ok(TimelineValue(state.last_value))
    }

    fn wait(&self, value: TimelineValue, _timeout: Duration) -> Result<Reached> {
        // `read` returns when the bytes are there: a value that exists has been reached.
        self.cancel(value).map(|()| Reached::Done)
    }

    fn cancel(&self, value: TimelineValue) -> Result<()> {
        if value.0 == 0 || value.0 > self.state().last_value {
            return Err(Error::unknown(HandleKind::TimelineValue, value.0));
        }
        Ok(())
    }

    fn counters(&self) -> Vec<Counter> {
        let state = self.state();
        [("bytes_read", state.bytes_read), ("reads", state.reads), ("bytes_mapped", state.bytes_mapped)]
            .map(|(name, value)| Counter { name: name.into(), value })
            .to_vec()
    }
}

#[cfg(test)]
mod tests;
