//! Ctrl-C: the first one stops the work under way, so that what was done can be reported; the second one kills.

use crate::failure::EXIT_CANCELLED;
use anyhow::{Context, Result};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The handler's switches.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt {
    cancel: Arc<AtomicBool>,
    working: Arc<AtomicBool>,
    /// A file that is only half-written.
    unfinished: Arc<Mutex<Option<PathBuf>>>,
}

impl Interrupt {
    /// Installs the handler; once per process.
    pub(crate) fn install() -> Result<Interrupt> {
        let interrupt = Interrupt {
            cancel: Arc::new(AtomicBool::new(false)),
            working: Arc::new(AtomicBool::new(false)),
            unfinished: Arc::new(Mutex::new(None)),
        };
        let Interrupt { cancel, working, unfinished } = interrupt.clone();
        ctrlc::set_handler(move || {
            let already = cancel.swap(true, Ordering::SeqCst);
            if already || !working.load(Ordering::SeqCst) {
                if let Some(path) = unfinished.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    let _ = std::fs::remove_file(path); // perhaps not made yet, or renamed
                }
                std::process::exit(EXIT_CANCELLED.into());
            }
            if std::io::stderr().is_terminal() {
                crate::output::note("\nstopping after the batch under way; Ctrl-C again ends at once\n");
            }
        })
        .context("cannot install the handler of Ctrl-C")?;
        Ok(interrupt)
    }

    /// [`Interrupt::during`] for work that fills `file` before it gets its name: an end at once removes it.
    pub(crate) fn during_with<T>(&self, file: PathBuf, work: impl FnOnce(&AtomicBool) -> T) -> T {
        let set = |file| *self.unfinished.lock().unwrap_or_else(PoisonError::into_inner) = file;
        set(Some(file));
        let result = self.during(work);
        set(None);
        result
    }

    /// Does work that looks at the flag it is given: while it runs, the first Ctrl-C sets the flag instead of ending the
    /// program.
    pub(crate) fn during<T>(&self, work: impl FnOnce(&AtomicBool) -> T) -> T {
        self.cancel.store(false, Ordering::SeqCst);
        self.working.store(true, Ordering::SeqCst);
        let result = work(&self.cancel);
        self.working.store(false, Ordering::SeqCst);
        result
    }
}
