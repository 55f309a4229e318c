//! A line on a terminal while something takes long; nothing where it is quick, or nobody looks.

use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long something takes before a person wants to be told.
const PATIENCE: Duration = Duration::from_millis(1500);

/// A bar of bytes for work whose end is known.
pub(crate) struct Bar(Option<ProgressBar>);

impl Bar {
    /// A bar on standard error; none where that is no terminal, or `quiet`.
    pub(crate) fn start(bytes: u64, quiet: bool) -> Bar {
        const LOOK: &str = "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta} {wide_msg}";
        if quiet || !output::stderr_is_terminal() {
            return Bar(None);
        }
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
        Bar(Some(
            bar.with_style(
                ProgressStyle::with_template(LOOK).unwrap_or_else(|_| ProgressStyle::default_bar()),
            ),
        ))
    }

    /// The same for tokens.
    pub(crate) fn of_tokens(tokens: u64, quiet: bool) -> Bar {
        const LOOK: &str = "{bar:30} {pos}/{len} tokens {per_sec} {eta} left {wide_msg}";
        let bar = Bar::start(tokens, quiet);
        if let (Some(bar), Ok(look)) = (&bar.0, ProgressStyle::with_template(LOOK)) {
            bar.set_style(look);
        }
        bar
    }

    /// The same for parts that have no name: a share and the time left.
    pub(crate) fn of_parts(parts: u64, quiet: bool) -> Bar {
        const LOOK: &str = "{bar:30} {percent}% {eta} left {wide_msg}";
        let bar = Bar::start(parts, quiet);
        if let (Some(bar), Ok(look)) = (&bar.0, ProgressStyle::with_template(LOOK)) {
            bar.set_style(look);
        }
        bar
    }

    /// `done` bytes are done, `what` is under way.
    pub(crate) fn at(&self, what: &str, done: u64) {
        if let Some(bar) = &self.0 {
            bar.set_message(what.to_owned());
            bar.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

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
