//! What every exported function does: contain panics, check pointers, turn results into a status and a sentence.

use engine_abi::convert::{report, text_from_abi};
use engine_abi::{Bytes, Head, Instance, Kind, Sink, Status};
use engine_core::options::OptionTable;
use engine_core::{Error, Result};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics on threads that are within a boundary function leave their place here instead of on stderr. Other
/// threads keep the hook that was there before.
fn install_hook() {
    static INSTALLED: Once = Once::new();
    if std::thread::panicking() {
        return;
    }
    INSTALLED.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let contained = DEPTH.try_with(Cell::get).unwrap_or(0) > 0;
            if !contained {
                return before(panic);
            }
            let place = panic.location().map(ToString::to_string);
            let _ = PLACE.try_with(|slot| slot.try_borrow_mut().map(|mut slot| *slot = place));
        }));
    });
}

/// Runs the author's code; a panic becomes an error.
fn contain<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    install_hook();
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    let result = catch_unwind(AssertUnwindSafe(body));
    DEPTH.with(|depth| depth.set(depth.get() - 1));
    result.unwrap_or_else(|payload| {
        let place = PLACE.with(RefCell::take).map_or_else(String::new, |place| format!(" (at {place})"));
        Err(Error::panicked(format!("{}{place}", message(payload))))
    })
}

fn message(payload: Box<dyn Any + Send>) -> String {
    let text = match payload.downcast_ref::<&str>() {
        Some(text) => (*text).to_owned(),
        None => payload.downcast_ref::<String>().cloned().unwrap_or_else(|| "panic without a message".into()),
    };
    // A payload's own drop may panic; nothing may leave through the boundary.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(payload)));
    text
}

/// The body of an exported function.
///
/// # Safety
/// `detail` is the sink that the function was given.
pub(crate) unsafe fn guarded(detail: Sink, body: impl FnOnce() -> Result<()>) -> Status {
    let result = contain(body);
    // SAFETY: the caller's promise.
    unsafe { report(result, detail) }
}

/// The body of a `close`, which has nowhere to report to: the panic hook has said what happened.
///
/// # Safety
/// `instance` was made by [`open`] with the same `T`, and is not used again.
pub(crate) unsafe fn close<T>(instance: *mut Instance) {
    let instance = instance.cast::<T>();
    if instance.is_null() || !instance.is_aligned() {
        return;
    }
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller's promise: it came out of `Box::into_raw` in `open`.
        drop(unsafe { Box::from_raw(instance) });
    }));
}

/// Hands an instance to the host.
///
/// # Safety
/// `out` is null, or may be written.
pub(crate) unsafe fn open<T>(out: *mut *mut Instance, make: impl FnOnce() -> Result<T>) -> Result<()> {
    check_out(out)?;
    let instance = Box::into_raw(Box::new(make()?));
    // SAFETY: checked above, and the caller's promise.
    unsafe { out.write(instance.cast()) };
    Ok(())
}

/// The instance behind a handle.
///
/// # Safety
/// A handle that is not null was made by [`open`] with the same `T`, and was not closed.
pub(crate) unsafe fn instance<'a, T>(instance: *mut Instance) -> Result<&'a T> {
    let instance = instance.cast::<T>();
    if instance.is_null() || !instance.is_aligned() {
        return Err(Error::invalid("the instance is null or misaligned"));
    }
    // SAFETY: checked as far as possible; the caller promises the rest.
    Ok(unsafe { &*instance })
}

fn check_out<T>(out: *mut T) -> Result<()> {
    if out.is_null() || !out.is_aligned() {
        return Err(Error::invalid("an out parameter is null or misaligned"));
    }
    Ok(())
}

/// Writes an out parameter, after `value` has succeeded.
///
/// # Safety
/// `out` is null, or may be written.
pub(crate) unsafe fn set<T>(out: *mut T, value: impl FnOnce() -> Result<T>) -> Result<()> {
    check_out(out)?;
    let value = value()?;
    // SAFETY: checked above, and the caller's promise.
    unsafe { out.write(value) };
    Ok(())
}

/// The options that crossed as TOML.
///
/// # Safety
/// As for [`text_from_abi`].
pub(crate) unsafe fn options(text: Bytes) -> Result<OptionTable> {
    // SAFETY: the caller's promise.
    let text = unsafe { text_from_abi(text, "options") }?;
    text.parse().map_err(|error| Error::config(format!("the options are no TOML table: {error}")))
}

/// The head of a table of type `T`.
pub(crate) const fn head<T>(kind: Kind) -> Head {
    Head {
        magic: engine_abi::MAGIC,
        struct_size: size_of::<T>() as u32,
        kind,
        abi_major: engine_abi::ABI_MAJOR,
        abi_minor: engine_abi::ABI_MINOR,
        reserved: [0; 4],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_errors_with_their_place() {
        let error = contain::<()>(|| panic!("no {}", "way")).unwrap_err();
        let detail = error.detail();
        assert!(matches!(error, Error::Panicked { .. }));
        assert!(detail.starts_with("no way (at ") && detail.contains("boundary.rs:"), "{detail}");
        assert_eq!(contain(|| Ok(7)), Ok(7));
        struct Nasty;
        impl Drop for Nasty {
            fn drop(&mut self) {
                if !std::thread::panicking() {
                    panic!("in drop");
                }
            }
        }
        let error = contain::<()>(|| std::panic::panic_any(Nasty)).unwrap_err();
        assert!(error.detail().starts_with("panic without a message"), "{error}");
    }
}
