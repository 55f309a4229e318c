//! The CPU device: buffers, executables and a queue thread that runs submissions in order on the pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use engine_core::backend::{
    Bindings, BufferId, BufferUse, Counter, DeviceDescription, ExecutableId, Support, TimelineValue,
};
use engine_core::operation::{OperationKind, OperationList};
use engine_core::{ComputeBackend, HostSpan, Reached, Result};

use crate::compile::compile;
use crate::kernels::Kernels;
use crate::own;
use crate::pool::{Pool, SPIN};
use crate::program::{Program, Submission};
use engine_plugin::buffers::{Budget, Buffers, Reservation};
use engine_plugin::queue::{Executables, Queue, Style};

/// What a device is opened with.
pub(crate) struct Setup {
    pub(crate) description: DeviceDescription,
    pub(crate) kernels: &'static Kernels,
    pub(crate) threads: usize,
    pub(crate) processors: Vec<usize>,
    pub(crate) pin: bool,
    pub(crate) memory_limit: u64,
}

/// A prepared list, and what its threads may come to hold for it.
struct Executable {
    program: Arc<Program>,
    _own: Reservation,
}

/// The device.
pub(crate) struct CpuBackend {
    description: DeviceDescription,
    /// Before what its submissions use: dropping it runs them.
    queue: Queue<Submission>,
    threads: usize,
    budget: Arc<Budget>,
    buffers: Buffers,
    executables: Executables<Executable>,
    executed: Arc<AtomicU64>,
    /// Bytes of weights that were multiplied.
    read: Arc<AtomicU64>,
}

impl CpuBackend {
    /// Starts the queue thread and the pool.
    pub(crate) fn open(setup: Setup) -> Result<CpuBackend> {
        let budget = Budget::new(setup.memory_limit);
        // A waiting thread may spin where the pool leaves it a processor.
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let waiters_spin = setup.threads < processors;
        let executed = Arc::new(AtomicU64::new(0));
        let read = Arc::new(AtomicU64::new(0));
        let (threads, processors, pin, kernels) = (setup.threads, setup.processors, setup.pin, setup.kernels);
        let (their_executed, their_read) = (executed.clone(), read.clone());
        // The queue's thread is the pool's first.
        let begin = move || {
            let pool = Pool::new(threads, &processors, pin)?;
            Ok(move |submission: Submission| {
                their_executed.fetch_add(1, Relaxed);
                let result = submission.run(&pool, kernels);
                their_read.fetch_add(submission.take_read(), Relaxed);
                result
            })
        };
        let queue = Queue::start(Style { device: "cpu", thread: "cpu-0", spin: SPIN, waiters_spin }, begin)?;
        Ok(CpuBackend {
            description: setup.description,
            threads,
            buffers: Buffers::new(budget.clone()),
            budget,
            executables: Executables::default(),
            executed,
            read,
            queue,
        })
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
        Ok(self.executables.insert(Executable { program: Arc::new(program), _own: own }))
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
        let program = self.executables.get(executable)?.program.clone();
        self.queue.submit(waits, || program.bind(bindings, &self.buffers))
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        self.queue.wait(value, timeout)
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
