//! The backend's timeline: numbers for submissions, waiting without spinning, and the failures that travel with them.

use std::collections::BTreeMap;
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
}

impl Timeline {
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
        state.reached = value.0;
        if let Err(error) = result {
            state.failures.insert(value.0, error);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// See `ComputeBackend::wait`.
    pub(crate) fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.state();
        if value.0 == 0 || value.0 > state.submitted {
            return Err(Error::unknown(HandleKind::TimelineValue, value.0));
        }
        while state.reached < value.0 {
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(Reached::TimedOut);
            }
            // Without a representable deadline: look again now and then.
            let left = left.unwrap_or(Duration::from_secs(3600));
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.failures.get(&value.0) {
            Some(error) => Err(error.clone()),
            None => Ok(Reached::Done),
        }
    }
}
