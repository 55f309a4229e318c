//! Text, sinks and errors.

use crate::{Bytes, Sink, Status};
use engine_core::{Error, Result};
use std::ffi::{OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// More than any text at the boundary needs (plans with frequencies are the longest).
const MAX_TEXT: usize = 1 << 28;

/// Borrows bytes for a call.
pub fn bytes_of(bytes: &[u8]) -> Bytes {
    Bytes { data: bytes.as_ptr(), len: bytes.len() }
}

unsafe fn raw_bytes<'a>(bytes: Bytes, what: &str) -> Result<&'a [u8]> {
    if bytes.len > MAX_TEXT {
        return Err(Error::invalid(format!("{what}: {} bytes of text", bytes.len)));
    }
    if bytes.len > 0 && bytes.data.is_null() {
        return Err(Error::invalid(format!("{what}: a null pointer with a length of {}", bytes.len)));
    }
    if bytes.len == 0 {
        return Ok(&[]);
    }
    // SAFETY: not null, not too long, and the caller promises the rest. Not by `slice`, whose limit on elements is lower
    // than that on text.
    Ok(unsafe { std::slice::from_raw_parts(bytes.data, bytes.len) })
}

/// The text that `bytes` borrows. `what` names it in messages.
///
/// # Errors
/// [`Error::InvalidArgument`] where the pointer is null or the bytes are not UTF-8.
///
/// # Safety
/// A pointer that is not null leads to `len` bytes that nobody writes during `'a`.
pub unsafe fn text_from_abi<'a>(bytes: Bytes, what: &str) -> Result<&'a str> {
    // SAFETY: the caller's promise is the same.
    let bytes = unsafe { raw_bytes(bytes, what) }?;
    std::str::from_utf8(bytes)
        .map_err(|error| Error::invalid(format!("{what}: text that is not UTF-8: {error}")))
}

/// The path that `bytes` borrows: the system's bytes, UTF-8 or not.
///
/// # Errors
/// [`Error::InvalidArgument`] where the pointer is null or the path is empty or holds a zero byte.
///
/// # Safety
/// As for [`text_from_abi`].
pub unsafe fn path_from_abi<'a>(bytes: Bytes) -> Result<&'a Path> {
    // SAFETY: the caller's promise is the same.
    let bytes = unsafe { raw_bytes(bytes, "path") }?;
    if bytes.is_empty() || bytes.contains(&0) {
        return Err(Error::invalid("path: it is empty or holds a zero byte"));
    }
    Ok(Path::new(OsStr::from_bytes(bytes)))
}

/// Collects what the other side writes into a sink, up to a limit.
#[derive(Debug, Default)]
pub struct TextBuffer {
    bytes: Vec<u8>,
    problem: Option<&'static str>,
}

impl TextBuffer {
    /// An empty buffer.
    pub fn new() -> TextBuffer {
        TextBuffer::default()
    }

    /// The sink of this buffer, for one call; the buffer must not be moved or touched until the call returns.
    pub fn sink(&mut self) -> Sink {
        Sink { context: std::ptr::from_mut(self).cast::<c_void>(), write: Some(append) }
    }

    /// What was written.
    ///
    /// # Errors
    /// [`Error::Internal`] where it is no text: the other side broke the contract.
    pub fn into_text(self) -> Result<String> {
        if let Some(problem) = self.problem {
            return Err(Error::internal(format!("it wrote a result that is no text: {problem}")));
        }
        String::from_utf8(self.bytes)
            .map_err(|error| Error::internal(format!("it wrote a result that is not UTF-8: {error}")))
    }

    /// What was written, made readable: for sentences that go to people.
    pub fn into_lossy(self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

unsafe extern "C" fn append(context: *mut c_void, bytes: Bytes) {
    // SAFETY: `context` is the buffer of `TextBuffer::sink`, which nobody else touches during the call.
    let Some(buffer) = (unsafe { context.cast::<TextBuffer>().as_mut() }) else { return };
    if buffer.bytes.len().saturating_add(bytes.len) > MAX_TEXT {
        buffer.problem = Some("it is too long");
        return;
    }
    // SAFETY: the writer promises `len` bytes at a pointer that is not null.
    match unsafe { raw_bytes(bytes, "sink") } {
        Ok(bytes) => buffer.bytes.extend_from_slice(bytes),
        Err(_) => buffer.problem = Some("its pointer is null"),
    }
}

/// Writes text into a sink.
///
/// # Safety
/// The sink is one that the caller of the present function of the table passed to it.
pub unsafe fn write(sink: Sink, text: &str) {
    let Some(write) = sink.write else { return };
    // In pieces, since a receiver may refuse arrays without end.
    for piece in text.as_bytes().chunks(1 << 20) {
        // SAFETY: the sink is live, and the bytes are borrowed for the call.
        unsafe { write(sink.context, bytes_of(piece)) }
    }
}

/// Turns a result into a status, the error's sentence going to `detail`.
///
/// # Safety
/// As for [`write()`].
pub unsafe fn report(result: Result<()>, detail: Sink) -> Status {
    match result {
        Ok(()) => Status::OK,
        Err(error) => {
            // SAFETY: the caller's promise is the same.
            unsafe { write(detail, &error.detail()) };
            Status(error.code())
        }
    }
}

/// The reverse of [`report`].
///
/// # Errors
/// The error that the status and the sentence stand for.
pub fn check_status(status: Status, detail: TextBuffer) -> Result<()> {
    if status.is_ok() { Ok(()) } else { Err(Error::from_code(status.0, detail.into_lossy())) }
}
