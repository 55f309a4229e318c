//! The Vulkan loader, opened at run time, and calls into drivers that may never return.

use std::collections::HashMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use engine_core::{Error, Result};

/// The file that is opened where the option `library` is empty.
pub(crate) const DEFAULT_LIBRARY: &str = "libvulkan.so.1";

/// What to do where there is no loader.
pub(crate) const INSTALL_HINT: &str = "install the Vulkan loader and a driver (Debian: `apt-get install libvulkan1 \
     mesa-vulkan-drivers`; a GPU's own driver brings its part), or name the loader's file in the option `library`";

/// What became of each library that was asked for. One is never closed: drivers leave threads and exit handlers behind.
static OPENED: Mutex<Option<HashMap<String, Standing>>> = Mutex::new(None);

#[derive(Clone, Copy)]
enum Standing {
    Open(&'static ash::Entry),
    Hangs,
}

/// Runs `work` on a thread of its own and waits at most `limit`; a call that does not return is left behind.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (done, result) = channel();
    std::thread::Builder::new()
        .name("vulkan-driver".into())
        .spawn(move || {
            // Nobody listens any more where the time ran out.
            let _ = done.send(work());
        })
        .map_err(|e| Error::out_of_memory(format!("a thread for the Vulkan driver: {e}")))?;
    match result.recv_timeout(limit) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(Error::device_lost(format!(
            "the Vulkan driver did not return within {} ms while it {what} (option `driver_timeout_ms`)",
            limit.as_millis()
        ))),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::internal(format!("the thread that {what} ended without an answer")))
        }
    }
}

fn standings<T>(f: impl FnOnce(&mut HashMap<String, Standing>) -> T) -> T {
    f(OPENED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Notes that a call into this library did not return: it is not called again in this process.
pub(crate) fn mark_hanging(path: &str) {
    standings(|all| all.insert(path.to_owned(), Standing::Hangs));
}

/// The loader in this file (empty: [`DEFAULT_LIBRARY`]).
///
/// # Errors
/// `Unsupported` with the reason and what to install.
pub(crate) fn open(path: &str) -> Result<&'static ash::Entry> {
    let file = if path.is_empty() { DEFAULT_LIBRARY } else { path };
    match standings(|all| all.get(path).copied()) {
        Some(Standing::Open(entry)) => return Ok(entry),
        Some(Standing::Hangs) => {
            return Err(Error::device_lost(format!(
                "{file}: an earlier call into this Vulkan library did not return; it is not called again"
            )));
        }
        None => {}
    }
    // SAFETY: a Vulkan loader may be loaded by anyone; that the file is one is what the user says who names it.
    let entry = unsafe { ash::Entry::load_from(file) }.map_err(|e| {
        Error::unsupported(format!("the Vulkan loader {file} cannot be opened: {e}; {INSTALL_HINT}"))
    })?;
    let entry: &'static ash::Entry = Box::leak(Box::new(entry));
    standings(|all| all.insert(path.to_owned(), Standing::Open(entry)));
    Ok(entry)
}
