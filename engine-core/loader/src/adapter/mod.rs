//! Tables as traits: the host's side of the boundary.

mod cache;
mod compute;
mod planner;
mod storage;

pub(crate) use cache::Policy;
pub(crate) use compute::{Device, devices, why_none};
pub(crate) use planner::Placer;
pub(crate) use storage::Tier;

use engine_abi::convert::{TextBuffer, check_status};
use engine_abi::{Instance, Sink, Status};
use engine_core::{Error, Result};

/// An open instance of a plug-in, closed when it is dropped.
struct Handle {
    instance: *mut Instance,
    close: unsafe extern "C" fn(*mut Instance),
    /// How messages name the plug-in.
    plugin: String,
}

// SAFETY: the interface says that all functions may be called from any thread; those of a cache policy only one at a
// time, which `&mut self` of its trait sees to.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the instance came from `open` of the same table and is not used again.
        unsafe { (self.close)(self.instance) }
    }
}

/// What a table lacks after it was checked: nothing, so this is only how the types say it.
fn absent(plugin: &str) -> Error {
    Error::internal(format!("{plugin}: a function of its table is absent"))
}

/// Makes an error of the plug-in name the plug-in where it is the plug-in's own fault.
fn named(plugin: &str, error: Error) -> Error {
    match error {
        Error::Internal { detail } => Error::internal(format!("{plugin}: {detail}")),
        Error::Panicked { detail } => Error::panicked(format!("{plugin}: {detail}")),
        other => other,
    }
}

/// Calls a function of a table.
fn call(plugin: &str, function: impl FnOnce(Sink) -> Status) -> Result<()> {
    let mut detail = TextBuffer::new();
    let status = function(detail.sink());
    check_status(status, detail).map_err(|error| named(plugin, error))
}

/// Calls a function of a table that writes a text.
fn call_text(plugin: &str, function: impl FnOnce(Sink, Sink) -> Status) -> Result<String> {
    let mut out = TextBuffer::new();
    let sink = out.sink();
    call(plugin, |detail| function(sink, detail))?;
    out.into_text().map_err(|error| named(plugin, error))
}

/// Opens an instance.
fn open(
    plugin: &str,
    close: unsafe extern "C" fn(*mut Instance),
    function: impl FnOnce(*mut *mut Instance, Sink) -> Status,
) -> Result<Handle> {
    let mut instance = std::ptr::null_mut();
    let out = &raw mut instance;
    call(plugin, |detail| function(out, detail))?;
    if instance.is_null() {
        return Err(Error::internal(format!("{plugin}: it opened, but gave a null instance")));
    }
    Ok(Handle { instance, close, plugin: plugin.to_owned() })
}

/// A function of a table; absent ones were refused when it was loaded.
macro_rules! function {
    ($table:expr, $name:ident, $plugin:expr) => {
        $table.$name.ok_or_else(|| $crate::adapter::absent($plugin))?
    };
}
use function;
