//! A line on a terminal while something takes long; nothing where it is quick, or nobody looks.

use crate::output;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long something takes before a person wants to be told.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Shows its line until it is dropped.
pub(crate) struct Progress {
    running: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Starts to count; the line appears only where it takes long.
    pub(crate) fn start(what: String) -> Progress {
        if !output::stderr_is_terminal() || !tracing::enabled!(tracing::Level::INFO) {
            return Progress { running: None };
        }
        let (done, ended) = mpsc::channel();
        let started = Instant::now();
        let show = move || {
            let mut shown = false;
            let mut patience = PATIENCE;
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(patience) {
                output::note(&format!("\r{what} ... {} s ", started.elapsed().as_secs()));
                shown = true;
                patience = Duration::from_secs(1);
            }
            if shown {
                output::note("\r\x1b[K");
            }
        };
        let thread = std::thread::Builder::new().name("progress".into()).spawn(show);
        Progress { running: thread.ok().map(|thread| (done, thread)) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((done, thread)) = self.running.take() {
            drop(done);
            let _ = thread.join();
        }
    }
}
