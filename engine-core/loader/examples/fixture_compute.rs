//! A compute plug-in for the loader's tests: one device that answers everything, and panics when it is told to.

use engine_core::backend::{
    Bindings, BufferId, BufferUse, ComputeBackend, Counter, DeviceDescription, ExecutableId, Support,
    TimelineValue, ToleranceClass,
};
use engine_core::error::HandleKind;
use engine_core::module::{ComputeModule, Module, PluginInfo};
use engine_core::operation::{OperationKind, OperationList};
use engine_core::options::{OptionTable, Schema};
use engine_core::{Error, HostSpan, Reached, Result};
use std::sync::Mutex;
use std::time::Duration;

engine_core::options! {
    /// Options of the fixture.
    struct Options {
        /// Devices that it has.
        devices: u32 = 2, in 0..=4;
        /// Method that panics.
        panic_in: String = "nothing".into(), one_of ["nothing", "open", "allocate"];
    }
}

struct Fixture;

impl Module for Fixture {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!("fixture", "Answers everything and computes nothing.")
    }
    fn schema(&self) -> Schema {
        Options::schema()
    }
}

fn description(index: u32) -> DeviceDescription {
    DeviceDescription {
        name: format!("fixture:{index}"),
        description: "no device \"at all\"".into(),
        tolerance: ToleranceClass::F32,
        memory_bytes: u64::MAX,
        alignment: 64,
        imports_host_memory: true,
        needs_constant_weights: false,
        max_buffer_bytes: 1 << 40,
        notes: vec!["ünïcode".into()],
    }
}

impl ComputeModule for Fixture {
    fn devices(&self, options: &OptionTable) -> Result<Vec<DeviceDescription>> {
        let options = Options::from_table(options, "options")?;
        Ok((0..options.devices).map(description).collect())
    }
    fn why_none(&self) -> String {
        "it was told to have none".into()
    }
    fn open(&self, index: u32, options: &OptionTable) -> Result<Box<dyn ComputeBackend>> {
        let options = Options::from_table(options, "options")?;
        assert!(options.panic_in != "open", "told to panic in open");
        Ok(Box::new(Device { description: description(index), options, log: Mutex::default() }))
    }
}

/// Keeps what it was given, and gives it back through counters: what crossed is what the tests look at.
struct Device {
    description: DeviceDescription,
    options: Options,
    log: Mutex<Log>,
}

#[derive(Default)]
struct Log {
    submissions: u64,
    allocated: u64,
    prepared: Option<OperationList>,
    tokens: u64,
    active: u64,
    past: u64,
    waits: u64,
}

impl Device {
    fn log(&self) -> std::sync::MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl ComputeBackend for Device {
    fn describe(&self) -> &DeviceDescription {
        &self.description
    }
    fn supports(&self, list: &OperationList, index: usize) -> Support {
        match &list.operations[index].kind {
            OperationKind::Rope(_) => Support::no("no rope today"),
            OperationKind::Ffn(_) => Support::Preferred,
            _ => Support::Yes,
        }
    }
    fn allocate(&self, bytes: u64, _: BufferUse) -> Result<BufferId> {
        assert!(self.options.panic_in != "allocate", "told to panic in allocate");
        if bytes > 1 << 20 {
            return Err(Error::out_of_memory(format!("{bytes} bytes asked for, 1048576 there are")));
        }
        self.log().allocated += bytes;
        Ok(BufferId(bytes))
    }
    fn import(&self, span: HostSpan) -> Result<BufferId> {
        Ok(BufferId(span.address() as u64 ^ span.len() ^ u64::from(span.is_writable())))
    }
    fn free(&self, buffer: BufferId) -> Result<()> {
        Err(Error::unknown(HandleKind::Buffer, buffer.0))
    }
    fn prepare(&self, list: &OperationList) -> Result<ExecutableId> {
        self.log().prepared = Some(list.clone());
        Ok(ExecutableId(7))
    }
    fn release(&self, _: ExecutableId) -> Result<()> {
        Ok(())
    }
    fn submit(
        &self,
        _: ExecutableId,
        bindings: &Bindings<'_>,
        waits: &[TimelineValue],
    ) -> Result<TimelineValue> {
        let mut log = self.log();
        log.submissions += 1;
        log.tokens = bindings.tokens.into();
        log.active = bindings.ranges.iter().flat_map(|r| r.ranges).map(|r| u64::from(r.len())).sum();
        log.past = bindings.sequences.iter().map(|s| u64::from(s.past)).sum();
        log.waits = waits.iter().map(|w| w.0).sum();
        Ok(TimelineValue(log.submissions))
    }
    fn wait(&self, value: TimelineValue, timeout: Duration) -> Result<Reached> {
        if value.0 > self.log().submissions {
            return Err(Error::unknown(HandleKind::TimelineValue, value.0));
        }
        Ok(if timeout.is_zero() { Reached::TimedOut } else { Reached::Done })
    }
    fn counters(&self) -> Vec<Counter> {
        let log = self.log();
        let count = |name: &str, value| Counter { name: name.into(), value };
        let slots = log.prepared.as_ref().map_or(0, |list| list.slots.len() as u64);
        vec![
            count("submissions", log.submissions),
            count("bytes_allocated", log.allocated),
            count("bytes_allocated_peak", log.allocated),
            count("slots", slots),
            count("tokens", log.tokens),
            count("active", log.active),
            count("past", log.past),
            count("waits", log.waits),
        ]
    }
}

engine_plugin::export_plugin!(compute: Fixture);
