//! A thread that runs a device's submissions in their order, and the prepared lists that they come from.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine_core::backend::{ExecutableId, TimelineValue};
use engine_core::{Error, HandleKind, Reached, Result};

use crate::timeline::Timeline;

/// How a queue's threads behave.
#[derive(Clone, Debug)]
pub struct Style {
    /// The plug-in's name, for messages.
    pub device: &'static str,
    /// The thread's name.
    pub thread: &'static str,
    /// How long the thread looks for the next submission before it sleeps.
    pub spin: Duration,
    /// Whether a thread that waits for a value may spin near its expected end.
    pub waiters_spin: bool,
}

impl Style {
    /// Threads that never spin.
    pub fn sleeping(device: &'static str, thread: &'static str) -> Style {
        Style { device, thread, spin: Duration::ZERO, waiters_spin: false }
    }
}

struct Task<S> {
    value: TimelineValue,
    submission: S,
    waits: Vec<TimelineValue>,
}

/// Submissions of a device, run one after the other on a thread of its own. Dropping it runs what was submitted first.
#[derive(Debug)]
pub struct Queue<S> {
    device: &'static str,
    timeline: Arc<Timeline>,
    /// Absent once the queue is to end.
    tasks: Option<Sender<Task<S>>>,
    thread: Option<JoinHandle<()>>,
}

impl<S: Send + 'static> Queue<S> {
    /// Starts the thread. `begin` is called on it, and answers what runs a submission; that is dropped on it in the end. What
    /// a submission holds must be given up when its run returns: the host may free buffers once the value is reached.
    ///
    /// # Errors
    /// That of `begin`, or `OutOfMemory` where there is no thread.
    pub fn start<R: FnMut(S) -> Result<()>>(
        style: Style,
        begin: impl FnOnce() -> Result<R> + Send + 'static,
    ) -> Result<Queue<S>> {
        let Style { device, thread: name, spin, waiters_spin } = style;
        let timeline = Arc::new(Timeline::new(waiters_spin));
        let their_timeline = timeline.clone();
        let (tasks, received) = channel();
        let (ready, started) = channel();
        let work = move || match begin() {
            Ok(mut run) => {
                let _ = ready.send(Ok(()));
                while let Some(task) = next(&received, spin) {
                    serve(device, task, &their_timeline, &mut run);
                }
            }
            Err(error) => {
                let _ = ready.send(Err(error));
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(work)
            .map_err(|e| Error::out_of_memory(format!("the {device} backend's queue thread: {e}")))?;
        started.recv().unwrap_or_else(|_| {
            Err(Error::internal(format!("the {device} backend's queue thread ended at once")))
        })?;
        Ok(Queue { device, timeline, tasks: Some(tasks), thread: Some(thread) })
    }

    /// See `ComputeBackend::submit`; `bind` makes the submission once `waits` are known to be values of this queue.
    ///
    /// # Errors
    /// `UnknownHandle` for a value that was never given out, that of `bind`, and `DeviceLost` where the thread has ended.
    pub fn submit(&self, waits: &[TimelineValue], bind: impl FnOnce() -> Result<S>) -> Result<TimelineValue> {
        for wait in waits {
            self.timeline.check(*wait)?;
        }
        let submission = bind()?;
        let gone = || Error::device_lost(format!("the {} backend's queue thread has ended", self.device));
        let tasks = self.tasks.as_ref().ok_or_else(gone)?;
        self.timeline
            .submit(|value| tasks.send(Task { value, submission, waits: waits.to_vec() }).map_err(|_| gone()))
    }

    /// See `ComputeBackend::wait`.
    ///
    /// # Errors
    /// That of the submission, and `UnknownHandle` for a value that was never given out.
    pub fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        self.timeline.wait(value, timeout)
    }
}

impl<S> Drop for Queue<S> {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            // It catches what its submissions panic with; there is nothing to report.
            let _ = thread.join();
        }
    }
}

/// The next task; `None` once nobody can send one. While text is generated the next token follows at once, and waking a
/// thread takes longer than that, so there may be a short spin first.
fn next<S>(tasks: &Receiver<Task<S>>, spin: Duration) -> Option<Task<S>> {
    if spin.is_zero() {
        return tasks.recv().ok();
    }
    let start = Instant::now();
    loop {
        match tasks.try_recv() {
            Ok(task) => return Some(task),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) if start.elapsed() > spin => return tasks.recv().ok(),
            Err(TryRecvError::Empty) => std::hint::spin_loop(),
        }
    }
}

fn serve<S>(device: &str, task: Task<S>, timeline: &Timeline, run: &mut impl FnMut(S) -> Result<()>) {
    let Task { value, submission, waits } = task;
    let failed = waits.iter().find_map(|wait| timeline.failure(*wait).map(|error| (wait, error)));
    let result = match failed {
        Some((wait, error)) => {
            drop(submission);
            Err(Error::dependency_failed(format!("value {} failed: {error}", wait.0)))
        }
        None => catch_unwind(AssertUnwindSafe(|| run(submission))).unwrap_or_else(|_| {
            Err(Error::internal(format!("the {device} backend's queue thread panicked")))
        }),
    };
    timeline.reach(value, result);
}

/// Prepared lists behind handles.
#[derive(Debug)]
pub struct Executables<P> {
    next: AtomicU64,
    table: Mutex<HashMap<u64, Arc<P>>>,
}

impl<P> Default for Executables<P> {
    fn default() -> Executables<P> {
        Executables { next: AtomicU64::new(1), table: Mutex::default() }
    }
}

impl<P> Executables<P> {
    /// Takes one, see `ComputeBackend::prepare`.
    pub fn insert(&self, executable: P) -> ExecutableId {
        let id = self.next.fetch_add(1, Relaxed);
        self.table.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(executable));
        ExecutableId(id)
    }

    /// The one that a handle names.
    ///
    /// # Errors
    /// `UnknownHandle`.
    pub fn get(&self, id: ExecutableId) -> Result<Arc<P>> {
        let found = self.table.lock().unwrap_or_else(PoisonError::into_inner).get(&id.0).cloned();
        found.ok_or(Error::unknown(HandleKind::Executable, id.0))
    }

    /// See `ComputeBackend::release`. Submissions under way hold what they use and finish.
    ///
    /// # Errors
    /// `UnknownHandle`.
    pub fn release(&self, id: ExecutableId) -> Result<()> {
        let removed = self.table.lock().unwrap_or_else(PoisonError::into_inner).remove(&id.0);
        removed.map(|_| ()).ok_or(Error::unknown(HandleKind::Executable, id.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STYLE: Style =
        Style { device: "test", thread: "test-queue", spin: Duration::from_micros(50), waiters_spin: true };

    /// A queue whose submissions are numbers: 13 fails, 66 panics, all others are kept in order.
    fn queue(style: Style) -> (Queue<u32>, Arc<Mutex<Vec<u32>>>) {
        let done: Arc<Mutex<Vec<u32>>> = Arc::default();
        let theirs = done.clone();
        let run = move |number| {
            assert_ne!(number, 66, "told to panic");
            if number == 13 {
                return Err(Error::internal("told to fail"));
            }
            theirs.lock().unwrap().push(number);
            Ok(())
        };
        (Queue::start(style, move || Ok(run)).unwrap(), done)
    }

    #[test]
    fn submissions_run_in_order_and_failures_travel() {
        for style in [STYLE, Style::sleeping("test", "test-queue")] {
            let (queue, done) = queue(style);
            let submit = |number, waits: &[TimelineValue]| queue.submit(waits, || Ok(number)).unwrap();
            let wait = |value| queue.wait(value, Duration::from_secs(60));
            let one = submit(1, &[]);
            let failed = submit(13, &[one]);
            let behind = submit(2, &[one, failed]);
            let panicked = submit(66, &[]);
            let last = submit(3, &[one]);
            assert_eq!(wait(last), Ok(Reached::Done));
            assert_eq!(wait(one), Ok(Reached::Done));
            assert_eq!(wait(failed), Err(Error::internal("told to fail")));
            assert!(matches!(wait(behind), Err(Error::DependencyFailed { .. })), "{:?}", wait(behind));
            assert!(wait(panicked).is_err_and(|error| error.to_string().contains("panicked")));
            assert_eq!(*done.lock().unwrap(), [1, 3]);
            let unknown = TimelineValue(last.0 + 1);
            let never = queue.submit(&[unknown], || panic!("bound before its waits were known"));
            assert!(matches!(never, Err(Error::UnknownHandle { .. })), "{never:?}");
            assert_eq!(queue.submit(&[], || Err(Error::invalid("no"))), Err(Error::invalid("no")));
            // Values have no gaps: what was refused took none.
            assert_eq!(submit(4, &[]).0, last.0 + 1);
            drop(queue);
            assert_eq!(*done.lock().unwrap(), [1, 3, 4], "what was submitted runs before the end");
        }
    }

    #[test]
    fn a_queue_that_cannot_begin_is_an_error() {
        let begin = || Err::<fn(u32) -> Result<()>, _>(Error::unsupported("no pool"));
        assert_eq!(Queue::start(STYLE, begin).unwrap_err(), Error::unsupported("no pool"));
        let begin = || -> Result<fn(u32) -> Result<()>> { panic!("told to panic") };
        assert!(Queue::start(STYLE, begin).unwrap_err().to_string().contains("ended at once"));
    }

    #[test]
    fn executables_are_known_until_they_are_released() {
        let executables = Executables::default();
        let (one, two) = (executables.insert("one"), executables.insert("two"));
        let held = executables.get(one).unwrap();
        executables.release(one).unwrap();
        assert_eq!((*held, *executables.get(two).unwrap()), ("one", "two"));
        assert!(matches!(executables.get(one), Err(Error::UnknownHandle { .. })));
        assert!(matches!(executables.release(one), Err(Error::UnknownHandle { .. })));
    }
}
