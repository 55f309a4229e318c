//! Keeps what the library prints out of the program's standard output.
//!
//! The library writes through C's streams. While it may print, file descriptor 1 names what descriptor 2 does, and the
//! streams are flushed before it is put back: what is printed goes to the error output, and nothing waits in a stream for
//! the program's end. Only loading, opening and closing are so enclosed; while a graph is compiled or runs, the
//! library has a callback for what it wants to say, and the program may be writing to its output then.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

unsafe extern "C" {
    fn dup(fd: c_int) -> c_int;
    fn dup2(from: c_int, to: c_int) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn fflush(stream: *mut c_void) -> c_int;
}

/// One at a time: two that overlap would put back each other's descriptor.
static TURN: Mutex<()> = Mutex::new(());

/// The time in which descriptor 1 is redirected; ends when dropped.
pub(crate) struct Quiet {
    output: c_int,
    _turn: MutexGuard<'static, ()>,
}

impl Quiet {
    /// Redirects descriptor 1. Where it is closed, or no descriptor is left, everything stays as it is.
    pub(crate) fn begin() -> Quiet {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: plain descriptors. What C's streams still hold is the program's own, and goes where it belongs.
        let output = unsafe {
            fflush(std::ptr::null_mut());
            let output = dup(1);
            if output >= 0 {
                dup2(2, 1);
            }
            output
        };
        Quiet { output, _turn: turn }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // SAFETY: `output` is a descriptor of our own, made by `begin`.
        unsafe {
            fflush(std::ptr::null_mut());
            if self.output >= 0 {
                dup2(self.output, 1);
                close(self.output);
            }
        }
    }
}
