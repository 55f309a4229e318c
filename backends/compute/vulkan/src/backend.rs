//! A Vulkan device behind the contract: buffers, executables, and a thread that runs submissions in their order.

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

use crate::check::{Limits, check};
use crate::device::Device;
use crate::memory::{Budget, Buffers};
use crate::pipelines::Pipelines;
use crate::program::{Program, Shared, Submission};
use engine_plugin::timeline::Timeline;

struct Task {
    value: TimelineValue,
    submission: Submission,
    waits: Vec<TimelineValue>,
}

/// What the queue's thread did.
#[derive(Default)]
struct Counts {
    submissions: AtomicU64,
    dispatches: AtomicU64,
}

/// The device. Fields are dropped in their order: executables and buffers before the pipelines and the device.
pub(crate) struct VulkanBackend {
    description: DeviceDescription,
    executables: Mutex<HashMap<u64, Arc<Program>>>,
    buffers: Buffers,
    next_executable: AtomicU64,
    timeline: Arc<Timeline>,
    counts: Arc<Counts>,
    queue: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
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
        let (timeline, counts) = (Arc::new(Timeline::default()), Arc::new(Counts::default()));
        let (queue, tasks) = channel();
        let (their_timeline, their_counts, pipelines) =
            (timeline.clone(), counts.clone(), shared.pipelines.clone());
        let thread = std::thread::Builder::new()
            .name("vulkan-queue".into())
            .spawn(move || serve(&tasks, &their_timeline, &their_counts, &pipelines))
            .map_err(|e| Error::out_of_memory(format!("the vulkan backend's queue thread: {e}")))?;
        Ok(VulkanBackend {
            description,
            executables: Mutex::default(),
            buffers: Buffers::new(shared.device.clone(), shared.budget.clone()),
            next_executable: AtomicU64::new(1),
            timeline,
            counts,
            queue: Some(queue),
            thread: Some(thread),
            shared,
        })
    }
}

fn serve(tasks: &Receiver<Task>, timeline: &Timeline, counts: &Counts, pipelines: &Pipelines) {
    while let Ok(Task { value, submission, waits }) = tasks.recv() {
        let failed = waits.iter().find_map(|w| timeline.failure(*w).map(|error| (w, error)));
        let result = match failed {
            Some((wait, error)) => Err(Error::dependency_failed(format!("value {} failed: {error}", wait.0))),
            None => {
                // What the submission holds is given up when it returns: the host may free buffers once it is reached.
                let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| submission.run()));
                run.unwrap_or_else(|_| Err(Error::internal("the vulkan backend's queue thread panicked")))
                    .map(|dispatches| {
                        counts.submissions.fetch_add(1, Relaxed);
                        counts.dispatches.fetch_add(dispatches, Relaxed);
                    })
            }
        };
        timeline.reach(value, result);
    }
    pipelines.save();
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
        let gone = || Error::device_lost("the vulkan backend's queue thread has ended");
        let queue = self.queue.as_ref().ok_or_else(gone)?;
        self.timeline
            .submit(|value| queue.send(Task { value, submission, waits: waits.to_vec() }).map_err(|_| gone()))
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        self.timeline.wait(value, timeout)
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

impl Drop for VulkanBackend {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // The thread ends once it has run what was submitted; there is nothing to report.
            let _ = thread.join();
        }
    }
}
