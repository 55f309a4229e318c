//! Owners of what backends and tiers hand out by number: each gives its handle back when dropped.

use engine_core::backend::{BufferId, BufferUse, BufferView, ExecutableId};
use engine_core::operation::OperationList;
use engine_core::storage::FileId;
use engine_core::{ComputeBackend, HostSpan, Result, StorageTier};
use std::path::Path;
use std::sync::Arc;

/// Memory on a device.
pub(crate) struct DeviceBuffer {
    backend: Arc<dyn ComputeBackend>,
    id: BufferId,
}

impl DeviceBuffer {
    pub(crate) fn allocate(
        backend: &Arc<dyn ComputeBackend>,
        bytes: u64,
        purpose: BufferUse,
    ) -> Result<DeviceBuffer> {
        let id = backend.allocate(bytes, purpose)?;
        Ok(DeviceBuffer { backend: Arc::clone(backend), id })
    }

    pub(crate) fn import(backend: &Arc<dyn ComputeBackend>, span: HostSpan) -> Result<DeviceBuffer> {
        let id = backend.import(span)?;
        Ok(DeviceBuffer { backend: Arc::clone(backend), id })
    }

    pub(crate) fn at(&self, offset: u64) -> BufferView {
        BufferView { buffer: self.id, offset }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Err(error) = self.backend.free(self.id) {
            tracing::error!("device `{}` refused to free a buffer: {error}", self.backend.describe().name);
        }
    }
}

/// A prepared list.
pub(crate) struct Executable {
    backend: Arc<dyn ComputeBackend>,
    id: ExecutableId,
}

impl Executable {
    pub(crate) fn prepare(backend: &Arc<dyn ComputeBackend>, list: &OperationList) -> Result<Executable> {
        let id = backend.prepare(list)?;
        Ok(Executable { backend: Arc::clone(backend), id })
    }

    pub(crate) fn id(&self) -> ExecutableId {
        self.id
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Err(error) = self.backend.release(self.id) {
            tracing::error!("device `{}` refused to release a list: {error}", self.backend.describe().name);
        }
    }
}

/// An open file of a storage tier.
pub(crate) struct OpenFile {
    storage: Arc<dyn StorageTier>,
    id: FileId,
}

impl OpenFile {
    pub(crate) fn open(storage: &Arc<dyn StorageTier>, path: &Path) -> Result<OpenFile> {
        let id = storage.open(path)?;
        Ok(OpenFile { storage: Arc::clone(storage), id })
    }

    pub(crate) fn id(&self) -> FileId {
        self.id
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Err(error) = self.storage.close(self.id) {
            tracing::error!(
                "storage tier `{}` refused to close a file: {error}",
                self.storage.describe().name
            );
        }
    }
}
