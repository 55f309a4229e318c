//! The device behind the contract: buffers, executables, and a thread that runs submissions in their order.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use engine_core::backend::{
    Bindings, BufferId, BufferUse, Counter, DeviceDescription, ExecutableId, Support, TimelineValue,
};
use engine_core::operation::{OperationKind, OperationList};
use engine_core::{ComputeBackend, HostSpan, Reached, Result};

use crate::check::{Form, check};
use crate::driver::Driver;
use crate::program::{Counts, Program, Shared, Submission};
use crate::store::Store;
use engine_plugin::buffers::{Budget, Buffers};
use engine_plugin::queue::{Executables, Queue, Style};

/// What a device is opened with.
pub(crate) struct Setup {
    pub(crate) description: DeviceDescription,
    pub(crate) form: Form,
    pub(crate) store: Option<Store>,
    pub(crate) compile_limit: Duration,
    pub(crate) run_limit: Duration,
}

/// The device. Fields are dropped in their order: the queue, which runs what was submitted, then executables, then the
/// driver, which all share.
pub(crate) struct QnnBackend {
    description: DeviceDescription,
    queue: Queue<Submission>,
    executables: Executables<Program>,
    buffers: Buffers,
    shared: Shared,
}

impl QnnBackend {
    /// Starts the queue's thread.
    pub(crate) fn open(driver: Driver, setup: Setup) -> Result<QnnBackend> {
        let shared = Shared {
            driver: Arc::new(driver),
            budget: Budget::new(setup.description.memory_bytes),
            store: setup.store,
            form: setup.form,
            counts: Arc::new(Counts::default()),
            compile_limit: setup.compile_limit,
            run_limit: setup.run_limit,
        };
        let counts = shared.counts.clone();
        let run = move |submission: Submission| {
            submission.run().inspect(|()| _ = counts.submissions.fetch_add(1, Relaxed))
        };
        let queue = Queue::start(Style::sleeping("qnn", "qnn-queue"), move || Ok(run))?;
        Ok(QnnBackend {
            description: setup.description,
            queue,
            executables: Executables::default(),
            buffers: Buffers::new(shared.budget.clone()),
            shared,
        })
    }
}

impl ComputeBackend for QnnBackend {
    fn describe(&self) -> &DeviceDescription {
        &self.description
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        match check(list, index, self.shared.form) {
            Err(reason) => Support::No { reason },
            Ok(_) => match list.operations.get(index).map(|o| &o.kind) {
                Some(OperationKind::Linear { .. } | OperationKind::Ffn(_)) => Support::Preferred,
                _ => Support::Yes,
            },
        }
    }

    fn allocate(&self, bytes: u64, _: BufferUse) -> Result<BufferId> {
        self.buffers.allocate(bytes)
    }

    fn import(&self, span: HostSpan) -> Result<BufferId> {
        self.buffers.import(span)
    }

    fn free(&self, buffer: BufferId) -> Result<()> {
        self.buffers.free(buffer)
    }

    fn prepare(&self, list: &OperationList) -> Result<ExecutableId> {
        Ok(self.executables.insert(Program::new(&self.shared, list, &self.buffers)?))
    }

    fn release(&self, executable: ExecutableId) -> Result<()> {
        self.executables.release(executable)
    }

    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue> {
        let program = self.executables.get(executable)?;
        self.queue.submit(waits, || program.bind(bindings, &self.buffers))
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        self.queue.wait(value, timeout)
    }

    fn counters(&self) -> Vec<Counter> {
        let (used, peak) = self.shared.budget.used_and_peak();
        let counts = &self.shared.counts;
        let counter = |name: &str, value| Counter { name: name.into(), value };
        vec![
            counter("submissions", counts.submissions.load(Relaxed)),
            counter("bytes_allocated", used),
            counter("bytes_allocated_peak", peak),
            counter("graphs_executed", counts.executed.load(Relaxed)),
            counter("graphs_compiled", counts.compiled.load(Relaxed)),
            counter("graphs_loaded", counts.loaded.load(Relaxed)),
        ]
    }
}
