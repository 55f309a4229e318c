//! Bytes lent and copied by address.
#![expect(unsafe_code, reason = "host spans are raw addresses")]

use engine_core::{Error, HostSpan, Result};

/// Checks the target of a read of `bytes`.
pub(crate) fn check(bytes: usize, into: HostSpan) -> Result<()> {
    if into.len() != bytes as u64 {
        return Err(Error::invalid(format!("a read of {bytes} bytes into memory of {}", into.len())));
    }
    if !into.is_writable() {
        return Err(Error::invalid(format!("a read of {bytes} bytes into read-only memory")));
    }
    Ok(())
}

/// Copies into a span that `check` has seen.
pub(crate) fn copy(from: &[u8], into: HostSpan) {
    // SAFETY: `check` saw that the span is writable and as long as `from`; whoever made it promises that the memory is
    // there and nobody else uses it until the read is reached, so it is none of this tier's own, either.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.address() as *mut u8, from.len()) }
}

/// A read-only span of bytes that stay until their file is closed.
pub(crate) fn lend(bytes: &[u8]) -> HostSpan {
    // SAFETY: an open file's bytes are neither written nor moved until `close`, which the host calls only when nothing
    // uses its resident memory any more.
    unsafe { HostSpan::new(bytes.as_ptr(), bytes.len() as u64, false) }
}
