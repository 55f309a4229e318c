//! Keeps what the library prints out of the program's standard output.
//!
//! The library writes through C's streams. While it may print, file descriptor 1 names a file in memory, and the streams are
//! flushed before it is put back: what was printed is kept as what the library said (`log`), and nothing waits in a stream
//! for the program's end. Only loading, opening and closing are so enclosed; while a graph is compiled or runs, the
//! library has a callback for what it wants to say, and the program may be writing to its output then.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::log;

unsafe extern "C" {
    fn dup(fd: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn fflush(stream: *mut c_void) -> c_int;
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
}

/// `MFD_CLOEXEC`.
const CLOSED_ON_EXEC: c_uint = 1;
/// Bytes of what was printed that are looked at.
const MOST: u64 = 1 << 16;

/// Where the program's output is in the meantime, and where the library's goes.
struct Redirected {
    /// Which time this is.
    number: u64,
    /// A copy of descriptor 1.
    output: c_int,
    /// What is printed; absent where there is no such file: then it goes to the error output.
    printed: Option<File>,
}

#[derive(Default)]
struct State {
    times: u64,
    now: Option<Redirected>,
}

/// One at a time: two that overlap would put back each other's descriptor.
static STATE: Mutex<State> = Mutex::new(State { times: 0, now: None });
static ENDED: Condvar = Condvar::new();

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The time in which descriptor 1 is redirected; ends when dropped.
pub(crate) struct Quiet {
    number: u64,
}

impl Quiet {
    /// Redirects descriptor 1. Where it is closed, or no descriptor is left, everything stays as it is.
    pub(crate) fn begin() -> Quiet {
        let mut state =
            ENDED.wait_while(state(), |state| state.now.is_some()).unwrap_or_else(PoisonError::into_inner);
        state.times += 1;
        let number = state.times;
        // SAFETY: plain descriptors; a new one is owned by the file alone. What C's streams still hold is the program's own,
        // and goes where it belongs.
        state.now = unsafe {
            fflush(std::ptr::null_mut());
            let output = dup(1);
            (output >= 0).then(|| {
                let file = memfd_create(c"qnn-output".as_ptr(), CLOSED_ON_EXEC);
                let printed = (file >= 0).then(|| File::from_raw_fd(file));
                dup2(printed.as_ref().map_or(2, AsRawFd::as_raw_fd), 1);
                Redirected { number, output, printed }
            })
        };
        Quiet { number }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        end(Some(self.number));
    }
}

/// Gives the program its output back while the library hangs in a call that is waited for no longer.
pub(crate) fn abandon() {
    end(None);
}

/// Ends the redirection of this number, or whichever there is.
fn end(number: Option<u64>) {
    let mut state = state();
    if state.now.as_ref().is_none_or(|now| number.is_some_and(|number| number != now.number)) {
        return;
    }
    let Some(Redirected { output, printed, .. }) = state.now.take() else { return };
    // SAFETY: `output` is a descriptor of our own, made by `begin`. A stream that the library hangs in is locked by it.
    unsafe {
        if number.is_some() {
            fflush(std::ptr::null_mut());
        }
        dup2(output, 1);
        close(output);
    }
    drop(state);
    ENDED.notify_one();
    let Some(mut printed) = printed else { return };
    let mut bytes = Vec::new();
    if printed.rewind().and_then(|()| printed.take(MOST).read_to_end(&mut bytes)).is_ok() {
        log::printed(&String::from_utf8_lossy(&bytes));
    }
}
