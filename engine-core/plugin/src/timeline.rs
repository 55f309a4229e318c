//! The backend's timeline: numbers for submissions, waiting, and the failures that travel with them.

use std::collections::BTreeMap;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine_core::backend::TimelineValue;
use engine_core::{Error, HandleKind, Reached, Result};

#[derive(Debug, Default)]
struct State {
    submitted: u64,
    reached: u64,
    failures: BTreeMap<u64, Error>,
}

/// Values `1..=submitted`, reached in order.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    state: Mutex<State>,
    changed: Condvar,
    /// As in the state, for threads that spin.
    reached: AtomicU64,
    /// How long the last wait took, in nanoseconds.
    last_wait: AtomicU64,
    /// Whether a waiting thread may spin.
    spins: bool,
}

/// How long before the expected end a waiting thread wakes up, and how long it then spins at most.
const EARLY: Duration = Duration::from_micros(60);

impl Timeline {
    /// A timeline on which nothing was submitted; a thread that waits `spins` near the expected end, or sleeps only.
    pub(crate) fn new(spins: bool) -> Timeline {
        Timeline { spins, ..Timeline::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next value; `enqueue` is called with it under the lock, so that the queue has the timeline's order.
    pub(crate) fn submit(&self, enqueue: impl FnOnce(TimelineValue) -> Result<()>) -> Result<TimelineValue> {
        let mut state = self.state();
        let value = TimelineValue(state.submitted + 1);
        enqueue(value)?;
        state.submitted = value.0;
        Ok(value)
    }

    /// The value was given out.
    pub(crate) fn check(&self, value: TimelineValue) -> Result<()> {
        if value.0 == 0 || value.0 > self.state().submitted {
            return Err(Error::unknown(HandleKind::TimelineValue, value.0));
        }
        Ok(())
    }

    /// The error of a value that was reached and failed.
    pub(crate) fn failure(&self, value: TimelineValue) -> Option<Error> {
        self.state().failures.get(&value.0).cloned()
    }

    /// Marks a value as reached.
    pub(crate) fn reach(&self, value: TimelineValue, result: Result<()>) {
        let mut state = self.state();
        // The submitter may not have left `submit` yet; it holds the lock until the value counts as submitted.
        state.reached = value.0;
        self.reached.store(value.0, Release);
        if let Err(error) = result {
            state.failures.insert(value.0, error);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn is_reached(&self, value: TimelineValue) -> bool {
        self.reached.load(Acquire) >= value.0
    }

    /// See `ComputeBackend::wait`.
    pub(crate) fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        let start = Instant::now();
        let deadline = start.checked_add(timeout);
        let expected = Duration::from_nanos(self.last_wait.load(Relaxed));
        let mut spins = self.spins;
        let mut state = self.state();
        if value.0 == 0 || value.0 > state.submitted {
            return Err(Error::unknown(HandleKind::TimelineValue, value.0));
        }
        while state.reached < value.0 {
            // One token takes as long as the one before it, nearly. Waking a thread takes tens of microseconds: where
            // the end is near, this one is awake already.
            let waited = start.elapsed();
            if spins && waited < timeout && waited + EARLY >= expected {
                drop(state);
                let until = waited + 2 * EARLY;
                while start.elapsed() < until.min(timeout) && !self.is_reached(value) {
                    std::hint::spin_loop();
                }
                spins = false;
                state = self.state();
                continue;
            }
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(Reached::TimedOut);
            }
            // Without a representable deadline: look again now and then.
            let mut left = left.unwrap_or(Duration::from_secs(3600));
            if spins {
                left = left.min(expected.saturating_sub(EARLY).saturating_sub(waited));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.last_wait.store(nanoseconds, Relaxed);
        match state.failures.get(&value.0) {
            Some(error) => Err(error.clone()),
            None => Ok(Reached::Done),
        }
    }
}
