//! The compute table as [`ComputeBackend`].

use super::{Handle, call, call_text, function, named, open};
use engine_abi::convert::{self, BindingsDescriptor, ListDescriptor, TextBuffer, bytes_of};
use engine_abi::{ComputeTable, Reached as ReachedCode, Support as SupportCode};
use engine_core::backend::{
    Bindings, BufferId, BufferUse, ComputeBackend, Counter, DeviceDescription, ExecutableId, Support,
    TimelineValue,
};
use engine_core::error::HandleKind;
use engine_core::operation::OperationList;
use engine_core::options::OptionTable;
use engine_core::{Error, HostSpan, Reached, Result};
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// The devices of a plug-in, with these options.
pub(crate) fn devices(
    table: &ComputeTable,
    plugin: &str,
    options: &OptionTable,
) -> Result<Vec<DeviceDescription>> {
    let devices = function!(table, devices, plugin);
    let options = options.to_string();
    let json = call_text(plugin, |out, detail| {
        // SAFETY: the table was checked; text and sinks live until the call returns.
        unsafe { devices(bytes_of(options.as_bytes()), out, detail) }
    })?;
    convert::devices_from_json(&json).map_err(|error| named(plugin, error))
}

/// Why a plug-in has no devices.
pub(crate) fn why_none(table: &ComputeTable, plugin: &str) -> Result<String> {
    let why_none = function!(table, why_none, plugin);
    // SAFETY: the table was checked; the sinks live until the call returns.
    call_text(plugin, |out, detail| unsafe { why_none(out, detail) })
}

/// One open device of a plug-in.
pub(crate) struct Device {
    table: ComputeTable,
    handle: Handle,
    description: DeviceDescription,
    lists: RwLock<HashMap<u64, Arc<OperationList>>>,
}

impl Device {
    /// Opens device `index`.
    pub(crate) fn open(
        table: ComputeTable,
        plugin: &str,
        index: u32,
        options: &OptionTable,
    ) -> Result<Device> {
        let (open_device, close) = (function!(table, open, plugin), function!(table, close, plugin));
        let describe = function!(table, describe, plugin);
        let options = options.to_string();
        let handle = open(plugin, close, |out, detail| {
            // SAFETY: the table was checked; text, out parameter and sink live until the call returns.
            unsafe { open_device(index, bytes_of(options.as_bytes()), out, detail) }
        })?;
        let json = call_text(plugin, |out, detail| {
            // SAFETY: as above; the instance is open.
            unsafe { describe(handle.instance, out, detail) }
        })?;
        let description = convert::device_from_json(&json).map_err(|error| named(plugin, error))?;
        Ok(Device { table, handle, description, lists: RwLock::default() })
    }

    fn plugin(&self) -> &str {
        &self.handle.plugin
    }

    fn ask_support(&self, list: &OperationList, index: usize) -> Result<Support> {
        let supports = function!(self.table, supports, self.plugin());
        // Only the operation in question crosses: a question per operation stays cheap for long lists.
        let single = list.single(index).ok_or_else(|| {
            Error::invalid(format!("operation {index} of a list of {}", list.operations.len()))
        })?;
        single.validate()?;
        let descriptor = ListDescriptor::new(&single)?;
        let abi = descriptor.as_abi();
        let mut answer = SupportCode(0);
        let out = &raw mut answer;
        let mut reason = TextBuffer::new();
        let sink = reason.sink();
        call(self.plugin(), |detail| {
            // SAFETY: the table was checked, the instance is open; all else lives until the call returns.
            unsafe { supports(self.handle.instance, &raw const abi, 0, out, sink, detail) }
        })?;
        convert::support(answer, reason.into_lossy()).map_err(|error| named(self.plugin(), error))
    }
}

impl ComputeBackend for Device {
    fn describe(&self) -> &DeviceDescription {
        &self.description
    }

    fn supports(&self, list: &OperationList, index: usize) -> Support {
        match self.ask_support(list, index) {
            Ok(Support::No { reason }) if reason.trim().is_empty() => {
                Support::no(format!("{} gives no reason", self.plugin()))
            }
            Ok(support) => support,
            Err(error) => Support::no(error.to_string()),
        }
    }

    fn allocate(&self, bytes: u64, purpose: BufferUse) -> Result<BufferId> {
        let allocate = function!(self.table, allocate, self.plugin());
        let purpose = convert::buffer_use_code(purpose)?;
        let mut buffer = 0;
        let out = &raw mut buffer;
        call(self.plugin(), |detail| {
            // SAFETY: the table was checked, the instance is open; all else lives until the call returns.
            unsafe { allocate(self.handle.instance, bytes, purpose, out, detail) }
        })?;
        Ok(BufferId(buffer))
    }

    fn import(&self, span: HostSpan) -> Result<BufferId> {
        let import = function!(self.table, import, self.plugin());
        let span = convert::span_to_abi(span);
        let mut buffer = 0;
        let out = &raw mut buffer;
        call(self.plugin(), |detail| {
            // SAFETY: as in `allocate`; the span's maker promised its memory.
            unsafe { import(self.handle.instance, &raw const span, out, detail) }
        })?;
        Ok(BufferId(buffer))
    }

    fn free(&self, buffer: BufferId) -> Result<()> {
        let free = function!(self.table, free, self.plugin());
        // SAFETY: as in `allocate`.
        call(self.plugin(), |detail| unsafe { free(self.handle.instance, buffer.0, detail) })
    }

    fn prepare(&self, list: &OperationList) -> Result<ExecutableId> {
        let prepare = function!(self.table, prepare, self.plugin());
        list.validate()?;
        let descriptor = ListDescriptor::new(list)?;
        let abi = descriptor.as_abi();
        let mut executable = 0;
        let out = &raw mut executable;
        call(self.plugin(), |detail| {
            // SAFETY: as in `allocate`.
            unsafe { prepare(self.handle.instance, &raw const abi, out, detail) }
        })?;
        let mut lists = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        lists.insert(executable, Arc::new(list.clone()));
        Ok(ExecutableId(executable))
    }

    fn release(&self, executable: ExecutableId) -> Result<()> {
        let release = function!(self.table, release, self.plugin());
        // SAFETY: as in `allocate`.
        call(self.plugin(), |detail| unsafe { release(self.handle.instance, executable.0, detail) })?;
        self.lists.write().unwrap_or_else(PoisonError::into_inner).remove(&executable.0);
        Ok(())
    }

    fn submit(
        &self,
        executable: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue> {
        let submit = function!(self.table, submit, self.plugin());
        let list = self
            .lists
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&executable.0)
            .cloned()
            .ok_or_else(|| Error::unknown(HandleKind::Executable, executable.0))?;
        bindings.validate(&list)?;
        let descriptor = BindingsDescriptor::new(bindings);
        let abi = descriptor.as_abi();
        let waits: Vec<u64> = waits.iter().map(|value| value.0).collect();
        let mut value = 0;
        let out = &raw mut value;
        call(self.plugin(), |detail| {
            // SAFETY: as in `allocate`; the makers of host spans promised their memory.
            unsafe {
                submit(
                    self.handle.instance,
                    executable.0,
                    &raw const abi,
                    waits.as_ptr(),
                    waits.len(),
                    out,
                    detail,
                )
            }
        })?;
        Ok(TimelineValue(value))
    }

    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        let wait = function!(self.table, wait, self.plugin());
        let mut answer = ReachedCode(0);
        let out = &raw mut answer;
        let timeout = convert::timeout_to_ns(timeout);
        call(self.plugin(), |detail| {
            // SAFETY: as in `allocate`.
            unsafe { wait(self.handle.instance, value.0, timeout, out, detail) }
        })?;
        convert::reached(answer).map_err(|error| named(self.plugin(), error))
    }

    fn counters(&self) -> Vec<Counter> {
        let read = || {
            let counters = function!(self.table, counters, self.plugin());
            let json = call_text(self.plugin(), |out, detail| {
                // SAFETY: as in `allocate`.
                unsafe { counters(self.handle.instance, out, detail) }
            })?;
            convert::counters_from_json(&json).map_err(|error| named(self.plugin(), error))
        };
        read().unwrap_or_else(|error: Error| {
            tracing::warn!("no counters: {error}");
            Vec::new()
        })
    }
}
