//! The tier: open files as copies in memory, and reads as copies out of them.

use crate::Options;
use crate::copy;
use crate::files;
use crate::pages;
use engine_core::backend::{Counter, TimelineValue};
use engine_core::error::HandleKind;
use engine_core::storage::{FileId, Read, TierDescription};
use engine_core::{Error, HostMemory, HostSpan, Reached, Result, StorageTier};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Files in memory.
pub struct Ram {
    description: TierDescription,
    options: Options,
    threads: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last_file: u64,
    files: HashMap<FileId, Arc<HostMemory>>,
    bytes_resident: u64,
    bytes_loaded: u64,
    last_value: u64,
    reads: u64,
    bytes_read: u64,
}

impl Ram {
    /// A tier with these options.
    pub fn new(options: Options) -> Ram {
        let available = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if options.threads == 0 { available.min(8) } else { options.threads as usize };
        let limit = options.memory_limit.map_or("no limit".into(), |limit| format!("at most {limit} bytes"));
        let description = TierDescription {
            name: crate::NAME.into(),
            description: "whole files in memory".into(),
            alignment: 1,
            granularity: 1,
            resident: true,
            max_depth: 1,
            curve: vec![],
            notes: vec![
                format!("files are read whole when opened, by {threads} threads; {limit}"),
                pages::note(options.huge_pages),
            ],
        };
        Ram { description, options, threads, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the state is made at once, so a panic elsewhere leaves it whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, file: FileId) -> Result<Arc<HostMemory>> {
        self.state().files.get(&file).cloned().ok_or_else(|| Error::unknown(HandleKind::File, file.0))
    }

    /// Counts `bytes` more against the budget.
    fn reserve(&self, path: &Path, bytes: u64) -> Result<()> {
        let mut state = self.state();
        let total = state.bytes_resident.saturating_add(bytes);
        if let Some(limit) = self.options.memory_limit.filter(|limit| total > *limit) {
            return Err(Error::out_of_memory(format!(
                "{} has {bytes} bytes, {} of the ram tier's memory_limit of {limit} are left; raise it or use mmap",
                path.display(),
                limit.saturating_sub(state.bytes_resident)
            )));
        }
        state.bytes_resident = total;
        Ok(())
    }
}

/// The bytes of a file that a range names.
fn within(bytes: &[u8], range: &Range<u64>) -> Result<Range<usize>> {
    if range.start > range.end || range.end > bytes.len() as u64 {
        return Err(Error::invalid(format!(
            "bytes {}..{} are not within a file of {}",
            range.start,
            range.end,
            bytes.len()
        )));
    }
    Ok(range.start as usize..range.end as usize)
}

impl StorageTier for Ram {
    fn describe(&self) -> &TierDescription {
        &self.description
    }

    fn open(&self, path: &Path) -> Result<FileId> {
        let (file, length) = files::open(path)?;
        self.reserve(path, length)?;
        let memory = HostMemory::allocate(length).and_then(|mut memory| {
            if self.options.huge_pages {
                // A system that refuses said so when the tier was opened (`pages::note`); small pages hold as much.
                let _ = pages::ask_for_huge(&mut memory);
            }
            files::load(path, &file, &mut memory, self.threads)?;
            Ok(memory)
        });
        let mut state = self.state();
        match memory {
            Ok(memory) => {
                state.last_file += 1;
                state.bytes_loaded += length;
                let id = FileId(state.last_file);
                state.files.insert(id, Arc::new(memory));
                Ok(id)
            }
            Err(error) => {
                state.bytes_resident -= length;
                Err(error)
            }
        }
    }

    fn len(&self, file: FileId) -> Result<u64> {
        Ok(self.file(file)?.len())
    }

    fn close(&self, file: FileId) -> Result<()> {
        let mut state = self.state();
        let memory = state.files.remove(&file).ok_or_else(|| Error::unknown(HandleKind::File, file.0))?;
        state.bytes_resident -= memory.len();
        Ok(())
    }

    fn resident(&self, file: FileId, range: Range<u64>) -> Result<Option<HostSpan>> {
        let memory = self.file(file)?;
        let range = within(memory.bytes(), &range)?;
        Ok(Some(copy::lend(&memory.bytes()[range])))
    }

    fn read(&self, requests: &[Read]) -> Result<TimelineValue> {
        let mut copies = Vec::with_capacity(requests.len());
        for request in requests {
            let memory = self.file(request.file)?;
            let range = within(memory.bytes(), &request.range)?;
            copy::check(range.len(), request.into)?;
            copies.push((memory, range, request.into));
        }
        let mut bytes = 0;
        for (memory, range, into) in copies {
            bytes += range.len() as u64;
            copy::copy(&memory.bytes()[range], into);
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
        [
            ("bytes_read", state.bytes_read),
            ("reads", state.reads),
            ("bytes_loaded", state.bytes_loaded),
            ("bytes_resident", state.bytes_resident),
        ]
        .map(|(name, value)| Counter { name: name.into(), value })
        .to_vec()
    }
}

#[cfg(test)]
mod tests;
