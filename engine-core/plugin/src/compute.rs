//! The compute table over a [`ComputeModule`].

use crate::boundary::{self, guarded, set};
use engine_abi::convert::{self, BindingsOwned, list_from_abi, slice, span_from_abi, write};
use engine_abi::{
    Bindings, BufferUse, Bytes, ComputeTable, HostSpan, Instance, Kind, OperationList, Reached, Sink, Status,
    Support,
};
use engine_core::backend::{BufferId, ComputeBackend, ExecutableId, TimelineValue};
use engine_core::error::HandleKind;
use engine_core::module::ComputeModule;
use engine_core::operation;
use engine_core::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

/// Where [`table`] finds the author's module.
pub trait Export {
    /// The module.
    fn module() -> &'static dyn ComputeModule;
}

/// One open device, with the lists that bindings are checked against.
struct Device {
    backend: Box<dyn ComputeBackend>,
    lists: RwLock<HashMap<u64, Arc<operation::OperationList>>>,
}

impl Device {
    fn list(&self, executable: u64) -> Result<Arc<operation::OperationList>> {
        let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
        lists.get(&executable).cloned().ok_or_else(|| Error::unknown(HandleKind::Executable, executable))
    }
}

/// The table of the module.
pub const fn table<E: Export>() -> ComputeTable {
    ComputeTable {
        head: boundary::head::<ComputeTable>(Kind::COMPUTE),
        info: Some(info::<E>),
        schema: Some(schema::<E>),
        devices: Some(devices::<E>),
        why_none: Some(why_none::<E>),
        open: Some(open::<E>),
        close: Some(close),
        describe: Some(describe),
        supports: Some(supports),
        allocate: Some(allocate),
        import: Some(import),
        free: Some(free),
        prepare: Some(prepare),
        release: Some(release),
        submit: Some(submit),
        wait: Some(wait),
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

unsafe extern "C" fn devices<E: Export>(options: Bytes, out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let devices = E::module().devices(&boundary::options(options)?)?;
            write(out, &convert::devices_to_json(&devices));
            Ok(())
        })
    }
}

unsafe extern "C" fn why_none<E: Export>(out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &E::module().why_none());
            Ok(())
        })
    }
}

unsafe extern "C" fn open<E: Export>(
    index: u32,
    options: Bytes,
    out: *mut *mut Instance,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let options = boundary::options(options)?;
            boundary::open(out, || {
                Ok(Device { backend: E::module().open(index, &options)?, lists: RwLock::default() })
            })
        })
    }
}

unsafe extern "C" fn close(instance: *mut Instance) {
    // SAFETY: see above.
    unsafe { boundary::close::<Device>(instance) }
}

unsafe fn device<'a>(instance: *mut Instance) -> Result<&'a Device> {
    // SAFETY: see above.
    unsafe { boundary::instance::<Device>(instance) }
}

unsafe extern "C" fn describe(instance: *mut Instance, out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &convert::device_to_json(device(instance)?.backend.describe()));
            Ok(())
        })
    }
}

unsafe extern "C" fn supports(
    instance: *mut Instance,
    list: *const OperationList,
    index: u32,
    out: *mut Support,
    reason: Sink,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let device = device(instance)?;
            let list = list_from_abi(list)?;
            list.validate()?;
            let index = index as usize;
            if index >= list.operations.len() {
                return Err(Error::invalid(format!(
                    "operation {index} of a list of {}",
                    list.operations.len()
                )));
            }
            set(out, || {
                let support = device.backend.supports(&list, index);
                if let engine_core::backend::Support::No { reason: why } = &support {
                    write(reason, why);
                }
                Ok(convert::support_code(&support))
            })
        })
    }
}

unsafe extern "C" fn allocate(
    instance: *mut Instance,
    bytes: u64,
    purpose: BufferUse,
    out: *mut u64,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let device = device(instance)?;
            let purpose = convert::buffer_use(purpose)?;
            set(out, || Ok(device.backend.allocate(bytes, purpose)?.0))
        })
    }
}

unsafe extern "C" fn import(
    instance: *mut Instance,
    span: *const HostSpan,
    out: *mut u64,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let device = device(instance)?;
            let spans = slice(span, 1, "host span")?;
            let span = span_from_abi(&spans[0])?;
            set(out, || Ok(device.backend.import(span)?.0))
        })
    }
}

unsafe extern "C" fn free(instance: *mut Instance, buffer: u64, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe { guarded(detail, || device(instance)?.backend.free(BufferId(buffer))) }
}

unsafe extern "C" fn prepare(
    instance: *mut Instance,
    list: *const OperationList,
    out: *mut u64,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let device = device(instance)?;
            let list = list_from_abi(list)?;
            list.validate()?;
            set(out, || {
                let executable = device.backend.prepare(&list)?.0;
                let mut lists = device.lists.write().unwrap_or_else(PoisonError::into_inner);
                lists.insert(executable, Arc::new(list));
                Ok(executable)
            })
        })
    }
}

unsafe extern "C" fn release(instance: *mut Instance, executable: u64, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let device = device(instance)?;
            device.backend.release(ExecutableId(executable))?;
            device.lists.write().unwrap_or_else(PoisonError::into_inner).remove(&executable);
            Ok(())
        })
    }
}

unsafe extern "C" fn submit(
    instance: *mut Instance,
    executable: u64,
    bindings: *const Bindings,
    waits: *const u64,
    waits_len: usize,
    out: *mut u64,
    detail: Sink,
) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            let device = device(instance)?;
            let list = device.list(executable)?;
            let bindings = BindingsOwned::from_abi(bindings)?;
            let waits: Vec<TimelineValue> =
                slice(waits, waits_len, "waits")?.iter().map(|value| TimelineValue(*value)).collect();
            set(out, || {
                bindings.with(|bindings| {
                    bindings.validate(&list)?;
                    Ok(device.backend.submit(ExecutableId(executable), bindings, &waits)?.0)
                })
            })
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
            let device = device(instance)?;
            set(out, || {
                let timeout = convert::timeout_from_ns(timeout_ns);
                Ok(convert::reached_code(device.backend.wait(TimelineValue(value), timeout)?))
            })
        })
    }
}

unsafe extern "C" fn counters(instance: *mut Instance, out: Sink, detail: Sink) -> Status {
    // SAFETY: see above.
    unsafe {
        guarded(detail, || {
            write(out, &convert::counters_to_json(&device(instance)?.backend.counters()));
            Ok(())
        })
    }
}
