//! Host memory and read requests.

use super::raw::{flag, unused};
use crate::{HostSpan, Read};
use engine_core::storage::{self, FileId};
use engine_core::{Error, Result};

/// A span as the boundary has it.
pub fn span_to_abi(span: engine_core::HostSpan) -> HostSpan {
    HostSpan {
        // The address comes back as a pointer only on the other side, which got it with the whole allocation.
        address: std::ptr::with_exposed_provenance_mut(span.address()),
        len: span.len(),
        writable: span.is_writable().into(),
        reserved: 0,
    }
}

/// The span that a descriptor describes.
///
/// # Errors
/// [`Error::InvalidArgument`] for null with a length, a flag that is neither 0 nor 1, or a span beyond the address
/// space; [`Error::Unsupported`] for a reserved word in use.
///
/// # Safety
/// The memory obeys [`engine_core::HostSpan::new`].
pub unsafe fn span_from_abi(span: &HostSpan) -> Result<engine_core::HostSpan> {
    unused(&[span.reserved.into()], "host span")?;
    if span.address.is_null() && span.len > 0 {
        return Err(Error::invalid(format!("a host span of {} bytes at a null pointer", span.len)));
    }
    let end = usize::try_from(span.len).ok().and_then(|len| span.address.addr().checked_add(len));
    if end.is_none() || span.len > isize::MAX as u64 {
        return Err(Error::invalid(format!("a host span of {} bytes exceeds the address space", span.len)));
    }
    let writable = flag(span.writable.into(), "host span: writable")?;
    span.address.expose_provenance();
    // SAFETY: the caller's promise.
    Ok(unsafe { engine_core::HostSpan::new(span.address, span.len, writable) })
}

/// A read request as the boundary has it.
pub fn read_to_abi(read: &storage::Read) -> Read {
    Read {
        file: read.file.0,
        start: read.range.start,
        end: read.range.end,
        into: span_to_abi(read.into),
        priority: read.priority.into(),
        reserved: 0,
    }
}

/// The request that a descriptor describes.
///
/// # Errors
/// [`Error::InvalidArgument`] for a range that ends before it starts, a target of another length or one that may not
/// be written, or a priority beyond 255; [`Error::Unsupported`] for a reserved word in use.
///
/// # Safety
/// The memory obeys [`engine_core::HostSpan::new`].
pub unsafe fn read_from_abi(read: &Read) -> Result<storage::Read> {
    unused(&[read.reserved.into()], "read")?;
    // SAFETY: the caller's promise.
    let into = unsafe { span_from_abi(&read.into) }?;
    let fits = read.end.checked_sub(read.start) == Some(into.len());
    if !fits || !into.is_writable() {
        return Err(Error::invalid(format!(
            "a read of bytes {}..{} into {} bytes of {} memory",
            read.start,
            read.end,
            into.len(),
            if into.is_writable() { "writable" } else { "read-only" }
        )));
    }
    let priority = u8::try_from(read.priority)
        .map_err(|_| Error::invalid(format!("a read's priority is {}, at most 255", read.priority)))?;
    Ok(storage::Read { file: FileId(read.file), range: read.start..read.end, into, priority })
}
