//! A storage plug-in for the loader's tests: files in memory.

use engine_core::backend::{Counter, TimelineValue};
use engine_core::error::HandleKind;
use engine_core::module::{Module, PluginInfo, StorageModule};
use engine_core::options::{OptionTable, Schema};
use engine_core::storage::{CurvePoint, FileId, Read, StorageTier, TierDescription};
use engine_core::{Error, HostMemory, HostSpan, Reached, Result};
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

struct Fixture;

impl Module for Fixture {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!("fixture", "Keeps files in memory.")
    }
    fn schema(&self) -> Schema {
        Schema::default()
    }
}

impl StorageModule for Fixture {
    fn open(&self, _: &OptionTable) -> Result<Box<dyn StorageTier>> {
        let description = TierDescription {
            name: "fixture".into(),
            description: "memory".into(),
            alignment: 1,
            granularity: 1,
            resident: true,
            max_depth: 3,
            curve: vec![CurvePoint { block_bytes: 4096, depth: 2, bytes_per_second: 1.5e9 }],
            notes: vec![],
        };
        Ok(Box::new(Tier { description, files: Mutex::default() }))
    }
}

struct Tier {
    description: TierDescription,
    files: Mutex<Vec<Option<HostMemory>>>,
}

impl Tier {
    fn with<R>(&self, file: FileId, f: impl FnOnce(&HostMemory) -> Result<R>) -> Result<R> {
        let files = self.files.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let memory = files.get(file.0 as usize).and_then(Option::as_ref);
        f(memory.ok_or_else(|| Error::unknown(HandleKind::File, file.0))?)
    }
}

impl StorageTier for Tier {
    fn describe(&self) -> &TierDescription {
        &self.description
    }
    fn open(&self, path: &Path) -> Result<FileId> {
        let bytes = std::fs::read(path).map_err(|error| Error::io(format!("{}: {error}", path.display())))?;
        let mut memory = HostMemory::allocate(bytes.len() as u64)?;
        memory.bytes_mut().copy_from_slice(&bytes);
        let mut files = self.files.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        files.push(Some(memory));
        Ok(FileId(files.len() as u64 - 1))
    }
    fn len(&self, file: FileId) -> Result<u64> {
        self.with(file, |memory| Ok(memory.len()))
    }
    fn close(&self, file: FileId) -> Result<()> {
        self.with(file, |_| Ok(()))?;
        let mut files = self.files.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        files[file.0 as usize] = None;
        Ok(())
    }
    fn resident(&self, file: FileId, range: Range<u64>) -> Result<Option<HostSpan>> {
        self.with(file, |memory| {
            // SAFETY: the memory stays until the file is closed, and is only read.
            let span = unsafe { memory.span() };
            span.slice(range.start, range.end - range.start).map(Some)
        })
    }
    fn read(&self, requests: &[Read]) -> Result<TimelineValue> {
        for request in requests {
            let len = request.range.end - request.range.start;
            self.with(request.file, |memory| {
                // SAFETY: only read below.
                let from = unsafe { memory.span() }.slice(request.range.start, len)?;
                let (from, to) = (from.address() as *const u8, request.into.address() as *mut u8);
                // SAFETY: the source was sliced to this length, and the adapter checked the target's.
                unsafe { std::ptr::copy_nonoverlapping(from, to, len as usize) };
                Ok(())
            })?;
        }
        Ok(TimelineValue(requests.iter().map(|r| u64::from(r.priority)).sum()))
    }
    fn wait(&self, _: TimelineValue, _: Duration) -> Result<Reached> {
        Ok(Reached::Done)
    }
    fn cancel(&self, value: TimelineValue) -> Result<()> {
        Err(Error::unknown(HandleKind::TimelineValue, value.0))
    }
    fn counters(&self) -> Vec<Counter> {
        vec![Counter { name: "reads".into(), value: 0 }, Counter { name: "bytes_read".into(), value: 0 }]
    }
}

engine_plugin::export_plugin!(storage: Fixture);
