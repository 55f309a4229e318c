//! Pointers from the other side of the boundary, checked as far as pointers can be.

use engine_core::{Error, Result};

/// More elements than any array at the boundary has.
const MAX_ELEMENTS: usize = 1 << 26;

/// The `len` values at `data`. `what` names them in messages.
///
/// # Errors
/// [`Error::InvalidArgument`] for a null or misaligned pointer (unless `len` is 0) and for a length out of all bounds.
///
/// # Safety
/// A pointer that is not null leads to `len` initialised values that nobody writes during `'a`.
pub unsafe fn slice<'a, T>(data: *const T, len: usize, what: &str) -> Result<&'a [T]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(Error::invalid(format!("{what}: a null pointer with a length of {len}")));
    }
    if !data.is_aligned() {
        return Err(Error::invalid(format!("{what}: a misaligned pointer")));
    }
    if len > MAX_ELEMENTS {
        return Err(Error::invalid(format!("{what}: a length of {len}, at most {MAX_ELEMENTS} is allowed")));
    }
    // SAFETY: not null, aligned, not too long, and the caller promises the rest.
    Ok(unsafe { std::slice::from_raw_parts(data, len) })
}

/// The struct at `data`.
///
/// # Errors
/// [`Error::InvalidArgument`] for a null or misaligned pointer.
///
/// # Safety
/// As for [`slice`], with one value.
pub(super) unsafe fn one<'a, T>(data: *const T, what: &str) -> Result<&'a T> {
    if data.is_null() || !data.is_aligned() {
        return Err(Error::invalid(format!("{what}: a null or misaligned pointer")));
    }
    // SAFETY: not null, aligned, and the caller promises that it is initialised and unchanged.
    Ok(unsafe { &*data })
}

/// Whether a struct says that it is as long as this side thinks.
pub(super) fn check_size<T>(found: u32, what: &str) -> Result<()> {
    if found as usize == size_of::<T>() {
        return Ok(());
    }
    Err(Error::invalid(format!("{what}: struct_size is {found}, wanted {}", size_of::<T>())))
}

/// A flag that may be 0 or 1.
pub(super) fn flag(value: u64, what: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::invalid(format!("{what} is {other}, wanted 0 or 1"))),
    }
}

/// Reserved words are zero until a version gives them a meaning: one that is not is never passed over.
pub(super) fn unused(words: &[u64], what: &str) -> Result<()> {
    if words.iter().all(|word| *word == 0) {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "{what}: a reserved word holds what this version of the interface does not know"
    )))
}
