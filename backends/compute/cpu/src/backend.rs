//! The CPU device: buffers, executables and a queue thread that runs submissions in order on the pool.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine_core::backend::{
    Bindings, BufferId, BufferUse, Counter, DeviceDescription, ExecutableId, Support, TimelineValue,
};
use engine_core::operation::{OperationKind, OperationList};
use engine_core::{ComputeBackend, Error, HandleKind, HostSpan, Reached, Result};

use crate::compile::compile;
use crate::kernels::Kernels;
use crate::own;
use crate::pool::{Pool, SPIN};
use crate::program::{Program, Submission};
use engine_plugin::buffers::{Budget, Buffers, Reservation};
use engine_plugin::timeline::Timeline;

/// What a device is opened with.
pub(crate) struct Setup {
    pub(crate) description: DeviceDescription,
    pub(crate) kernels: &'static Kernels,
    pub(crate) threads: usize,
    pub(crate) processors: Vec<usize>,
    pub(crate) pin: bool,
    pub(crate) memory_limit: u64,
}

struct Task {
    value: TimelineValue,
    submission: Submission,
    waits: Vec<TimelineValue>,
}

/// A prepared list, and what its threads may come to hold for it.
struct Executable {
    program: Arc<Program>,
    _own: Reservation,
}

/// The device.
pub(crate) struct CpuBackend {
    description: DeviceDescription,
    threads: usize,
    budget: Arc<Budget>,
    buffers: Buffers,
    executables: Mutex<HashMap<u64, Executable>>,
    next_executable: AtomicU64,
    timeline: Arc<Timeline>,
    executed: Arc<AtomicU64>,
    /// Bytes of weights that were multiplied.
    read: Arc<AtomicU64>,
    /// Dropped first, which ends the queue thread once it has run what was submitted.
    queue: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
}

impl CpuBackend {
    /// Starts the queue thread and the pool.
    pub(crate) fn open(setup: Setup) -> Result<CpuBackend> {
        let budget = Budget::new(setup.memory_limit);
        // A waiting thread may spin where the pool leaves it a processor.
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let timeline = Arc::new(Timeline::new(setup.threads < processors));
        let executed = Arc::new(AtomicU64::new(0));
        let read = Arc::new(AtomicU64::new(0));
        let (queue, tasks) = channel();
        let (ready, started) = channel();
        let (threads, processors, pin, kernels) = (setup.threads, setup.processors, setup.pin, setup.kernels);
        let (their_timeline, their_counts) = (timeline.clone(), (executed.clone(), read.clone()));
        let thread = std::thread::Builder::new()
            .name("cpu-0".into())
            .spawn(move || match Pool::new(threads, &processors, pin) {
                Ok(pool) => {
                    let _ = ready.send(Ok(()));
                    serve(&tasks, &pool, kernels, &their_timeline, (&their_counts.0, &their_counts.1));
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            })
            .map_err(|e| Error::out_of_memory(format!("the cpu backend's queue thread: {e}")))?;
        started
            .recv()
            .unwrap_or_else(|_| Err(Error::internal("the cpu backend's queue thread ended at once")))?;
        Ok(CpuBackend {
            description: setup.description,
            threads,
            buffers: Buffers::new(budget.clone()),
            budget,
            executables: Mutex::default(),
            next_executable: AtomicU64::new(1),
            timeline,
            executed,
            read,
            queue: Some(queue),
            thread: Some(thread),
        })
    }
}

fn serve(
    tasks: &Receiver<Task>,
    pool: &Pool,
    kernels: &'static Kernels,
    timeline: &Timeline,
    (executed, read): (&AtomicU64, &AtomicU64),
) {
    while let Some(Task { value, submission, waits }) = next(tasks) {
        let failed = waits.iter().find_map(|w| timeline.failure(*w).map(|error| (w, error)));
        let result = match failed {
            Some((wait, error)) => Err(Error::dependency_failed(format!("value {} failed: {error}", wait.0))),
            None => {
                executed.fetch_add(1, Relaxed);
                let result = submission.run(pool, kernels);
                read.fetch_add(submission.take_read(), Relaxed);
                result
            }
        };
        // Buffers that the host frees once the value is reached must be free of us by then.
        drop(submission);
        timeline.reach(value, result);
    }
}

/// The next task; `None` once nobody can send one. While text is generated the next token follows at once, and waking a
/// thread takes longer than that, so there is a short spin first.
fn next(tasks: &Receiver<Task>) -> Option<Task> {
    let start = Instant::now();
    loop {
        match tasks.try_recv() {
            Ok(task) => return Some(task),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) if start.elapsed() > SPIN => return tasks.recv().ok(),
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
        }
    }
}

impl ComputeBackend for CpuBackend {
    fn describe(&self) -> &DeviceDescription {
        &self.description
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        match compile(list, index, &mut Vec::new()) {
            Err(reason) => Support::No { reason },
            Ok(_) => {
                let sparse =
                    matches!(list.operations.get(index).map(|o| &o.kind), Some(OperationKind::Ffn(_)));
                if sparse { Support::Preferred } else { Support::Yes }
            }
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
        let program = Program::new(list, &self.buffers, &self.budget, self.threads)?; // which checks the list
        let own = own::bytes_per_thread(list).saturating_mul(self.threads as u64);
        let own = self.budget.reserve(own, "what the threads keep for an executable")?;
        let executable = Executable { program: Arc::new(program), _own: own };
        let id = self.next_executable.fetch_add(1, Relaxed);
        self.executables.lock().unwrap_or_else(PoisonError::into_inner).insert(id, executable);
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
            .map(|executable| executable.program.clone())
            .ok_or(Error::unknown(HandleKind::Executable, executable.0))?;
        for wait in waits {
            self.timeline.check(*wait)?;
        }
        let submission = program.bind(bindings, &self.buffers)?;
        let gone = || Error::device_lost("the cpu backend's queue thread has ended");
        let queue = self.queue.as_ref().ok_or_else(gone)?;
        self.timeline
            .submit(|value| queue.send(Task { value, submission, waits: waits.to_vec() }).map_err(|_| gone()))
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        self.timeline.wait(value, timeout)
    }

    fn counters(&self) -> Vec<Counter> {
        let (used, peak) = self.budget.used_and_peak();
        let counter = |name: &str, value| Counter { name: name.into(), value };
        vec![
            counter("submissions", self.executed.load(Relaxed)),
            counter("weight_bytes_read", self.read.load(Relaxed)),
            counter("bytes_allocated", used),
            counter("bytes_allocated_peak", peak),
            counter("threads", self.threads as u64),
        ]
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // The queue thread catches what its jobs panic with; there is nothing to report.
            let _ = thread.join();
        }
    }
}
