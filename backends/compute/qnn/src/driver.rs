//! The one thread that calls into a library, with a time limit on every call.
//!
//! A call that does not return leaves the thread behind: the library is not called again in this process, every later call
//! fails at once, and what it holds is given up. There is one thread per library and not one per device, since memory that
//! the library allocates on a thread stays with that thread's share of the allocator.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use engine_core::{Error, Result};

use crate::library;
use crate::quiet;
use crate::session::{Compiled, Session};

type Job = Box<dyn FnOnce() + Send>;

enum State {
    Working(Sender<Job>),
    Lost(String),
}

/// The thread of a library.
struct Worker {
    state: Mutex<State>,
    file: String,
}

/// The threads by the libraries' keys.
static WORKERS: Mutex<Option<HashMap<String, Arc<Worker>>>> = Mutex::new(None);

impl Worker {
    /// The thread of the library in this file.
    fn of(file: &str) -> Result<Arc<Worker>> {
        let key = library::key(file);
        let mut workers = WORKERS.lock().unwrap_or_else(PoisonError::into_inner);
        let workers = workers.get_or_insert_default();
        if let Some(worker) = workers.get(&key) {
            return Ok(worker.clone());
        }
        let (jobs, queue) = channel::<Job>();
        std::thread::Builder::new()
            .name("qnn-library".into())
            .spawn(move || queue.into_iter().for_each(|job| job()))
            .map_err(|e| Error::out_of_memory(format!("a thread for the QNN library: {e}")))?;
        let worker = Arc::new(Worker { state: Mutex::new(State::Working(jobs)), file: file.to_owned() });
        workers.insert(key, worker.clone());
        Ok(worker)
    }

    /// Runs `work` on the library's thread and waits at most `limit`. `limited_by` names the option that says how long.
    fn call<T: Send + 'static>(
        &self,
        limit: Duration,
        (what, limited_by): (&str, &str),
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = match &*state {
            State::Working(jobs) => jobs,
            State::Lost(why) => {
                return Err(Error::device_lost(format!("{why}; {} is not called again", self.file)));
            }
        };
        let (done, result) = channel();
        let job: Job = Box::new(move || {
            // Nobody listens any more where the time ran out.
            let _ = done.send(work());
        });
        let ended = match jobs.send(job) {
            Ok(()) => result.recv_timeout(limit),
            Err(_) => Err(RecvTimeoutError::Disconnected),
        };
        let why = match ended {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => {
                quiet::abandon();
                format!(
                    "the QNN library did not end {what} within {} ms (option `{limited_by}`)",
                    limit.as_millis()
                )
            }
            Err(RecvTimeoutError::Disconnected) => {
                format!("the thread of the QNN library ended during {what}")
            }
        };
        *state = State::Lost(why.clone());
        Err(Error::device_lost(why))
    }
}

/// An open device.
pub(crate) struct Driver {
    worker: Arc<Worker>,
    session: ManuallyDrop<Arc<Session>>,
    /// Time that opening or freeing something may take.
    patience: Duration,
}

/// The option that says how long opening and freeing may take.
const PATIENCE_OPTION: &str = "driver_timeout_ms";

/// The chip that is driven, and its session, by the libraries' keys.
type Sessions = HashMap<String, (u32, Arc<Session>)>;

/// The session of each library, which stays open when its last device is closed: every new one that compiles a graph costs
/// the library some memory that it never gives back, while the graphs of one session leave nothing.
static SESSIONS: Mutex<Option<Sessions>> = Mutex::new(None);

/// The session for a system-on-chip; runs on the library's thread. One for another chip is closed where nobody uses it.
fn session_of(file: &str, soc: u32) -> Result<Arc<Session>> {
    let library = library::open(file)?;
    let key = library::key(file);
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let sessions = sessions.get_or_insert_default();
    if let Some((_, session)) = sessions.get(&key).filter(|(of, _)| *of == soc) {
        return Ok(session.clone());
    }
    // Closed by this where nobody uses it; where somebody does, the other chip is refused and it stays.
    let before = sessions.remove(&key).map(|(of, session)| (of, Arc::downgrade(&session)));
    let session = match Session::open(library, soc) {
        Ok(session) => Arc::new(session),
        Err(error) => {
            let kept = before.and_then(|(of, session)| Some((of, session.upgrade()?)));
            sessions.extend(kept.map(|kept| (key, kept)));
            return Err(error);
        }
    };
    sessions.insert(key, (soc, session.clone()));
    Ok(session)
}

impl Driver {
    /// Opens library and device.
    ///
    /// # Errors
    /// `Unsupported` where there is no library of use, `DeviceLost` where a call into it did not return.
    pub(crate) fn open(file: &str, soc: u32, patience: Duration) -> Result<Driver> {
        let worker = Worker::of(file)?;
        let theirs = file.to_owned();
        let session = worker
            .call(patience, ("opening its device", PATIENCE_OPTION), move || session_of(&theirs, soc))?;
        Ok(Driver { worker, session: ManuallyDrop::new(session), patience })
    }

    /// The library behind it.
    pub(crate) fn library(&self) -> &'static library::Library {
        self.session.library
    }

    /// Runs `work` on the library's thread and waits at most `limit`. `limited_by` names the option that says how long.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        limit: Duration,
        (what, limited_by): (&str, &str),
        work: impl FnOnce(&Arc<Session>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let session = (*self.session).clone();
        self.worker.call(limit, (what, limited_by), move || work(&session))
    }

    /// Frees something on the library's thread; what a lost library holds is left alone.
    fn free<T: Send + 'static>(&self, what: &str, held: T) {
        let held = ManuallyDrop::new(held);
        let job = move || {
            drop(ManuallyDrop::into_inner(held));
            Ok(())
        };
        // A lost library has said so to whoever asked it for something; freeing asks for nothing.
        let _ = self.worker.call(self.patience, (what, PATIENCE_OPTION), job);
    }

    /// Frees a graph.
    pub(crate) fn discard(&self, compiled: Arc<Compiled>) {
        self.free("freeing a graph", compiled);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SAFETY: taken once, since the driver ends here.
        let session = unsafe { ManuallyDrop::take(&mut self.session) };
        self.free("closing the device", session);
    }
}
