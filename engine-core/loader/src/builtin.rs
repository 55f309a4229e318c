//! A compute backend that is linked into the program, held to the rules that the adapters hold loaded ones to.

use engine_core::backend::{
    Bindings, BufferId, BufferUse, ComputeBackend, Counter, DeviceDescription, ExecutableId, Support,
    TimelineValue,
};
use engine_core::error::HandleKind;
use engine_core::operation::OperationList;
use engine_core::{Error, HostSpan, Reached, Result};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// A backend whose lists and bindings are checked before it sees them.
pub(crate) struct Checked {
    backend: Box<dyn ComputeBackend>,
    lists: RwLock<HashMap<ExecutableId, Arc<OperationList>>>,
}

impl Checked {
    pub(crate) fn new(backend: Box<dyn ComputeBackend>) -> Checked {
        Checked { backend, lists: RwLock::default() }
    }
}

impl ComputeBackend for Checked {
    fn describe(&self) -> &DeviceDescription {
        self.backend.describe()
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        // As through the table: the question is about one operation.
        let Some(single) = list.single(index) else {
            return Support::no(format!("operation {index} of a list of {}", list.operations.len()));
        };
        match single.validate() {
            Ok(()) => self.backend.supports(&single, 0),
            Err(error) => Support::no(error.to_string()),
        }
    }

    fn allocate(&self, bytes: u64, purpose: BufferUse) -> Result<BufferId> {
        self.backend.allocate(bytes, purpose)
    }

    fn import(&self, span: HostSpan) -> Result<BufferId> {
        self.backend.import(span)
    }

    fn free(&self, buffer: BufferId) -> Result<()> {
        self.backend.free(buffer)
    }

    fn prepare(&self, list: &OperationList) -> Result<ExecutableId> {
        list.validate()?;
        let executable = self.backend.prepare(list)?;
        let mut lists = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        lists.insert(executable, Arc::new(list.clone()));
        Ok(executable)
    }

    fn release(&self, executable: ExecutableId) -> Result<()> {
        self.backend.release(executable)?;
        self.lists.write().unwrap_or_else(PoisonError::into_inner).remove(&executable);
        Ok(())
    }

    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue> {
        let list = self
            .lists
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&executable)
            .cloned()
            .ok_or_else(|| Error::unknown(HandleKind::Executable, executable.0))?;
        bindings.validate(&list)?;
        self.backend.submit(executable, bindings, waits)
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        self.backend.wait(value, timeout)
    }

    fn counters(&self) -> Vec<Counter> {
        self.backend.counters()
    }
}
