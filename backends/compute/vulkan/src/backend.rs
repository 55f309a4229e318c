//! A Vulkan device behind the contract: buffers, executables, and a thread that runs submissions in their order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use engine_core::backend::{
    Bindings, BufferId, BufferUse, Counter, DeviceDescription, ExecutableId, Support, TimelineValue,
};
use engine_core::operation::{OperationKind, OperationList};
use engine_core::{ComputeBackend, HostSpan, Reached, Result};

use crate::check::{Limits, check};
use crate::device::Device;
use crate::memory::{Budget, Buffers};
use crate::pipelines::Pipelines;
use crate::program::{Program, Shared, Submission};
use engine_plugin::queue::{Executables, Queue, Style};

/// What the queue's thread did.
#[derive(Default)]
struct Counts {
    submissions: AtomicU64,
    dispatches: AtomicU64,
}

/// The device. Fields are dropped in their order: the queue, which runs what was submitted, then executables and buffers,
/// then the pipelines and the device.
pub(crate) struct VulkanBackend {
    description: DeviceDescription,
    queue: Queue<Submission>,
    executables: Executables<Program>,
    buffers: Buffers,
    counts: Arc<Counts>,
    shared: Shared,
}

impl VulkanBackend {
    /// Starts the queue's thread.
    pub(crate) fn open(device: Device, cache: Option<std::path::PathBuf>) -> Result<VulkanBackend> {
        let device = Arc::new(device);
        let description = device.of.description.clone();
        let limits = Limits {
            max_range: device.of.max_range,
            offset_alignment: device.of.offset_alignment,
            max_groups: device.of.max_groups.into(),
        };
        let shared = Shared {
            budget: Arc::new(Budget::new(description.memory_bytes)),
            pipelines: Arc::new(Pipelines::new(device.clone(), cache)?),
            limits,
            device,
        };
        let counts = Arc::new(Counts::default());
        let runner = Runner { counts: counts.clone(), pipelines: shared.pipelines.clone() };
        let queue = Queue::start(Style::sleeping("vulkan", "vulkan-queue"), move || {
            Ok(move |submission| runner.run(submission))
        })?;
        Ok(VulkanBackend {
            description,
            queue,
            executables: Executables::default(),
            buffers: Buffers::new(shared.device.clone(), shared.budget.clone()),
            counts,
            shared,
        })
    }
}

/// What the queue's thread runs submissions with.
struct Runner {
    counts: Arc<Counts>,
    pipelines: Arc<Pipelines>,
}

impl Runner {
    fn run(&self, submission: Submission) -> Result<()> {
        let dispatches = submission.run()?;
        self.counts.submissions.fetch_add(1, Relaxed);
        self.counts.dispatches.fetch_add(dispatches, Relaxed);
        Ok(())
    }
}

/// Once everything that was submitted has run, all pipelines that it needs are compiled.
impl Drop for Runner {
    fn drop(&mut self) {
        self.pipelines.save();
    }
}

impl ComputeBackend for VulkanBackend {
    fn describe(&self) -> &DeviceDescription {
        &self.description
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        match check(list, index, self.shared.limits) {
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
        let counter = |name: &str, value| Counter { name: name.into(), value };
        vec![
            counter("submissions", self.counts.submissions.load(Relaxed)),
            counter("bytes_allocated", used),
            counter("bytes_allocated_peak", peak),
            counter("command_buffers_executed", self.shared.device.executed.load(Relaxed)),
            counter("dispatches_executed", self.counts.dispatches.load(Relaxed)),
            counter("pipelines", self.shared.pipelines.count()),
        ]
    }
}
