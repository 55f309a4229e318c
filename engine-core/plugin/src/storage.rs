//! The storage table over a [`StorageModule`].

use crate::boundary::{self, guarded, set};
use engine_abi::convert::{self, path_from_abi, read_from_abi, slice, write};
use engine_abi::{Bytes, HostSpan, Instance, Kind, Reached, Read, Sink, Status, StorageTable};
use engine_core::backend::TimelineValue;
use engine_core::module::StorageModule;
use engine_core::storage::{FileId, StorageTier};
use engine_core::{Error, Result};

/// Where [`table`] finds the author's module.
pub trait Export {
    /// The module.
    fn module() -> &'static dyn StorageModule;
}

struct Tier(Box<dyn StorageTier>);

/// The table of the module.
pub const fn table<E: Export>() -> StorageTable {
    StorageTable {
        head: boundary::head::<StorageTable>(Kind::STORAGE),
        info: Some(info::<E>),
        schema: Some(schema::<E>),
        open: Some(open::<E>),
        close: Some(close),
        describe: Some(describe),
        open_file: Some(open_file),
        file_len: Some(file_len),
        close_file: Some(close_file),
        resident: Some(resident),
        read: Some(read),
        wait: Some(wait),
        cancel: Some(cancel),
        counters: Some(counters),
    }
}

// SAFETY of the functions below: the host keeps the rules of engine-abi's documentation: sinks and pointers are live
// for the call, instances come from `open` and are not used after `close`.

unsafe extern "C" fn info<E: Export>(out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &convert::info_to_json(&E::module().info()));
            Ok(())
        })
    }
}

unsafe extern "C" fn schema<E: Export>(out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &E::module().schema().to_json());
            Ok(())
        })
    }
}

unsafe extern "C" fn open<E: Export>(options: Bytes, out: *mut *mut Instance, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let options = boundary::options(options)?;
            boundary::open(out, || Ok(Tier(E::module().open(&options)?)))
        })
    }
}

unsafe extern "C" fn close(instance: *mut Instance) {
    // SAFETY: see above.
    unsafe { boundary::close::<Tier>(instance) }
}

unsafe fn tier<'a>(instance: *mut Instance) -> Result<&'a dyn StorageTier> {
    // SAFETY: see above.
    Ok(unsafe { boundary::instance::<Tier>(instance) }?.0.as_ref())
}

unsafe extern "C" fn describe(instance: *mut Instance, out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &convert::tier_to_json(tier(instance)?.describe()));
            Ok(())
        })
    }
}

unsafe extern "C" fn open_file(instance: *mut Instance, path: Bytes, out: *mut u64, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let tier = tier(instance)?;
            let path = path_from_abi(path)?;
            set(out, || Ok(tier.open(path)?.0))
        })
    }
}

unsafe extern "C" fn file_len(instance: *mut Instance, file: u64, out: *mut u64, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let tier = tier(instance)?;
            set(out, || tier.len(FileId(file)))
        })
    }
}

unsafe extern "C" fn close_file(instance: *mut Instance, file: u64, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe { guarded(detail, || tier(instance)?.close(FileId(file))) }
}

unsafe extern "C" fn resident(
    instance: *mut Instance,
    file: u64,
    start: u64,
    end: u64,
    present: *mut u32,
    out: *mut HostSpan,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let tier = tier(instance)?;
            if end < start {
                return Err(Error::invalid(format!("bytes {start}..{end} end before they start")));
            }
            let span = tier.resident(FileId(file), start..end)?;
            set(present, || Ok(u32::from(span.is_some())))?;
            match span {
                Some(span) => set(out, || Ok(convert::span_to_abi(span))),
                None => Ok(()),
            }
        })
    }
}

unsafe extern "C" fn read(
    instance: *mut Instance,
    requests: *const Read,
    requests_len: usize,
    out: *mut u64,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let tier = tier(instance)?;
            let requests: Vec<_> = slice(requests, requests_len, "read requests")?
                .iter()
                .map(|request| read_from_abi(request))
                .collect::<Result<_>>()?;
            set(out, || Ok(tier.read(&requests)?.0))
        })
    }
}

unsafe extern "C" fn wait(
    instance: *mut Instance,
    value: u64,
    timeout_ns: u64,
    out: *mut Reached,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let tier = tier(instance)?;
            set(out, || {
                let timeout = convert::timeout_from_ns(timeout_ns);
                Ok(convert::reached_code(tier.wait(TimelineValue(value), timeout)?))
            })
        })
    }
}

unsafe extern "C" fn cancel(instance: *mut Instance, value: u64, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe { guarded(detail, || tier(instance)?.cancel(TimelineValue(value))) }
}

unsafe extern "C" fn counters(instance: *mut Instance, out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &convert::counters_to_json(&tier(instance)?.counters()));
            Ok(())
        })
    }
}
