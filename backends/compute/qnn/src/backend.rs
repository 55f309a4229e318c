//! The device behind the contract: buffers, executables, and a thread that runs submissions in their order.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use engine_core::backend::{
    Bindings, BufferId, BufferUse, Counter, DeviceDescription, ExecutableId, Support, TimelineValue,
};
use engine_core::operation::{OperationKind, OperationList};
use engine_core::{ComputeBackend, Error, HandleKind, HostSpan, Reached, Result};

use crate::check::{Form, check};
use crate::driver::Driver;
use crate::program::{Counts, Program, Shared, Submission};
use crate::store::Store;
use engine_plugin::buffers::{Budget, Buffers};
use engine_plugin::timeline::Timeline;

/// What a device is opened with.
pub(crate) struct Setup {
    pub(crate) description: DeviceDescription,
    pub(crate) form: Form,
    pub(crate) store: Option<Store>,
    pub(crate) compile_limit: Duration,
    pub(crate) run_limit: Duration,
}

struct Task {
    value: TimelineValue,
    submission: Submission,
    waits: Vec<TimelineValue>,
}

/// The device. Fields are dropped in their order: executables before the driver, which they share.
pub(crate) struct QnnBackend {
    description: DeviceDescription,
    executables: Mutex<HashMap<u64, Arc<Program>>>,
    buffers: Buffers,
    next_executable: AtomicU64,
    timeline: Arc<Timeline>,
    queue: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
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
        let timeline = Arc::new(Timeline::default());
        let (queue, tasks) = channel();
        let (their_timeline, their_counts) = (timeline.clone(), shared.counts.clone());
        let thread = std::thread::Builder::new()
            .name("qnn-queue".into())
            .spawn(move || serve(&tasks, &their_timeline, &their_counts))
            .map_err(|e| Error::out_of_memory(format!("the qnn backend's queue thread: {e}")))?;
        Ok(QnnBackend {
            description: setup.description,
            executables: Mutex::default(),
            buffers: Buffers::new(shared.budget.clone()),
            next_executable: AtomicU64::new(1),
            timeline,
            queue: Some(queue),
            thread: Some(thread),
            shared,
        })
    }
}

fn serve(tasks: &Receiver<Task>, timeline: &Timeline, counts: &Counts) {
    while let Ok(Task { value, submission, waits }) = tasks.recv() {
        let failed = waits.iter().find_map(|w| timeline.failure(*w).map(|error| (w, error)));
        let result = match failed {
            Some((wait, error)) => Err(Error::dependency_failed(format!("value {} failed: {error}", wait.0))),
            None => {
                let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| submission.run()));
                run.unwrap_or_else(|_| Err(Error::internal("the qnn backend's queue thread panicked")))
                    .inspect(|()| _ = counts.submissions.fetch_add(1, Relaxed))
            }
        };
        // Buffers that the host frees once the value is reached must be free of us by then.
        drop(submission);
        timeline.reach(value, result);
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
        let program = Program::new(&self.shared, list, &self.buffers)?;
        let id = self.next_executable.fetch_add(1, Relaxed);
        self.executables.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(program));
        Ok(ExecutableId(id))
    }

    fn release(&self, executable: ExecutableId) -> Result<()> {
        // Submissions under way hold the program and finish.
        let removed = self.executables.lock().unwrap_or_else(PoisonError::into_inner).remove(&executable.0);
        removed.map(|_| ()).ok_or(Error::unknown(HandleKind::Executable, executable.0))
    }

    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue> {
        let program = self
            .executables
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&executable.0)
            .cloned()
            .ok_or(Error::unknown(HandleKind::Executable, executable.0))?;
        for wait in waits {
            self.timeline.check(*wait)?;
        }
        let submission = program.bind(bindings, &self.buffers)?;
        let gone = || Error::device_lost("the qnn backend's queue thread has ended");
        let queue = self.queue.as_ref().ok_or_else(gone)?;
        self.timeline
            .submit(|value| queue.send(Task { value, submission, waits: waits.to_vec() }).map_err(|_| gone()))
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        self.timeline.wait(value, timeout)
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

impl Drop for QnnBackend {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // The thread ends once it has run what was submitted; there is nothing to report.
            let _ = thread.join();
        }
    }
}
