//! The one thread that calls the library for a device, with a time limit on every call.
//!
//! A call that does not return leaves the thread behind: the device is lost then, every later call fails at once, and what
//! the library holds for it is given up, since nothing can be asked of it any more.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine_core::{Error, Result};

use crate::library::mark_hanging;
use crate::session::{Compiled, Session};

type Job = Box<dyn FnOnce(&Arc<Session>) + Send>;

enum State {
    Working(Sender<Job>),
    Lost(String),
}

/// A device with its thread.
pub(crate) struct Driver {
    state: Mutex<State>,
    /// The name under which the library was opened.
    file: String,
    /// Time that freeing something may take.
    patience: Duration,
    /// Answers when the thread has closed the session.
    closed: Mutex<Receiver<()>>,
}

impl Driver {
    /// Takes an open session to a thread of its own.
    pub(crate) fn new(session: Session, file: String, patience: Duration) -> Result<Driver> {
        let (jobs, queue) = channel::<Job>();
        let (end, closed) = channel();
        std::thread::Builder::new()
            .name("qnn-driver".into())
            .spawn(move || {
                let session = Arc::new(session);
                while let Ok(job) = queue.recv() {
                    job(&session);
                }
                drop(session);
                // Nobody listens any more where the time ran out.
                let _ = end.send(());
            })
            .map_err(|e| Error::out_of_memory(format!("a thread for the QNN library: {e}")))?;
        Ok(Driver { state: Mutex::new(State::Working(jobs)), file, patience, closed: Mutex::new(closed) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` on the library's thread and waits at most `limit`. `limited_by` names the option that says how long.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        limit: Duration,
        (what, limited_by): (&str, &str),
        work: impl FnOnce(&Arc<Session>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut state = self.state();
        let jobs = match &*state {
            State::Working(jobs) => jobs,
            State::Lost(why) => return Err(Error::device_lost(why.clone())),
        };
        let (done, result) = channel();
        let job: Job = Box::new(move |session| {
            // Nobody listens any more where the time ran out.
            let _ = done.send(work(session));
        });
        let why = match jobs.send(job).map_err(|_| RecvTimeoutError::Disconnected) {
            Ok(()) => match result.recv_timeout(limit) {
                Ok(result) => return result,
                Err(error) => error,
            },
            Err(error) => error,
        };
        let why = match why {
            RecvTimeoutError::Timeout => format!(
                "the QNN library did not end {what} within {} ms (option `{limited_by}`)",
                limit.as_millis()
            ),
            RecvTimeoutError::Disconnected => format!("the thread of the QNN library ended during {what}"),
        };
        mark_hanging(&self.file);
        *state = State::Lost(why.clone());
        Err(Error::device_lost(why))
    }

    /// Frees a graph on the library's thread; one of a lost device is left alone.
    pub(crate) fn discard(&self, compiled: Arc<Compiled>) {
        let held = std::mem::ManuallyDrop::new(compiled);
        let job = move |_: &Arc<Session>| {
            drop(std::mem::ManuallyDrop::into_inner(held));
            Ok(())
        };
        // A lost device has said so to whoever asked it for something; freeing asks for nothing.
        let _ = self.call(self.patience, ("freeing a graph", "driver_timeout_ms"), job);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let lost = State::Lost("the device is closed".into());
        if let State::Working(jobs) = std::mem::replace(&mut *self.state(), lost) {
            drop(jobs);
            // A library that does not end closing is left behind with its thread.
            let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
            if closed.recv_timeout(self.patience).is_err() {
                mark_hanging(&self.file);
            }
        }
    }
}
