//! The function table of each kind of plug-in. Every function of version 1.0 is required.

use crate::{
    Bindings, BufferUse, Bytes, HostSpan, Instance, Kind, Miss, OperationList, Reached, Read, Region, Sink,
    Status, Support, Unit, UnitSink,
};
use abi_stable::StableAbi;

/// Start of every table, checked before any function is called.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Head {
    /// `THERMOCLINE_MAGIC`.
    pub magic: u64,
    /// Bytes of the whole table as the plug-in was built. A table may be longer than the host knows (a newer minor
    /// version) or shorter (an older one: functions beyond it are absent), never shorter than that of version 1.0.
    pub struct_size: u32,
    /// Which table it is.
    pub kind: Kind,
    /// `THERMOCLINE_ABI_MAJOR` of the plug-in; must equal the host's.
    pub abi_major: u32,
    /// `THERMOCLINE_ABI_MINOR` of the plug-in; may differ from the host's.
    pub abi_minor: u32,
    /// Zero.
    pub reserved: [u64; 4],
}

/// Compute devices.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
#[sabi(kind(Prefix(prefix_ref = ComputeTableRef)))]
#[sabi(missing_field(option))]
pub struct ComputeTable {
    /// Checked first.
    pub head: Head,
    /// Who the plug-in is, as a JSON object: name, version, vendor, license, description, build.
    pub info: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// Its options, as JSON: `{"fields": [{"name", "kind": {"type", ..}, "default", "doc"}]}`, the kind's type being
    /// bool, integer (min, max), float (min, max), string, choice (values) or list (element).
    pub schema: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// The devices there are now, as a JSON array of objects as `describe` writes them. `options` is the plug-in's
    /// table of the config as TOML. An empty array is no error.
    pub devices: Option<unsafe extern "C" fn(options: Bytes, out: Sink, detail: Sink) -> Status>,
    /// Why there are no devices, as text.
    pub why_none: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// Opens device `index`.
    pub open: Option<
        unsafe extern "C" fn(index: u32, options: Bytes, out: *mut *mut Instance, detail: Sink) -> Status,
    >,
    /// Waits for work under way and frees everything of the instance, which is not used again.
    pub close: Option<unsafe extern "C" fn(instance: *mut Instance)>,
    /// What the device is, as a JSON object: name, description, tolerance (f64, f32 or f16), memory_bytes, alignment,
    /// imports_host_memory, needs_constant_weights, max_buffer_bytes, notes. Constant while it is open.
    pub describe: Option<unsafe extern "C" fn(instance: *mut Instance, out: Sink, detail: Sink) -> Status>,
    /// Whether operation `index` of the list can be run; the reason where it cannot goes to `reason`. A yes binds.
    pub supports: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            list: *const OperationList,
            index: u32,
            out: *mut Support,
            reason: Sink,
            detail: Sink,
        ) -> Status,
    >,
    /// Device memory, content undefined.
    pub allocate: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            bytes: u64,
            purpose: BufferUse,
            out: *mut u64,
            detail: Sink,
        ) -> Status,
    >,
    /// A view of host memory as a buffer, without a copy.
    pub import: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            span: *const HostSpan,
            out: *mut u64,
            detail: Sink,
        ) -> Status,
    >,
    /// Gives a buffer back.
    pub free: Option<unsafe extern "C" fn(instance: *mut Instance, buffer: u64, detail: Sink) -> Status>,
    /// Turns a list into something that can be submitted many times.
    pub prepare: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            list: *const OperationList,
            out: *mut u64,
            detail: Sink,
        ) -> Status,
    >,
    /// Gives an executable back; submissions under way finish first.
    pub release:
        Option<unsafe extern "C" fn(instance: *mut Instance, executable: u64, detail: Sink) -> Status>,
    /// Queues one run and writes its timeline value. `waits` are values of the same instance.
    pub submit: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            executable: u64,
            bindings: *const Bindings,
            waits: *const u64,
            waits_len: usize,
            out: *mut u64,
            detail: Sink,
        ) -> Status,
    >,
    /// Waits until the submission with this value is done, at most `timeout_ns` nanoseconds (0: only asks;
    /// `UINT64_MAX`: for ever). An error of the work is this function's error.
    pub wait: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            value: u64,
            timeout_ns: u64,
            out: *mut Reached,
            detail: Sink,
        ) -> Status,
    >,
    /// Named counts, as a JSON object of whole numbers: at least submissions, bytes_allocated, bytes_allocated_peak.
    #[sabi(last_prefix_field)]
    pub counters: Option<unsafe extern "C" fn(instance: *mut Instance, out: Sink, detail: Sink) -> Status>,
}

/// A storage tier.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
#[sabi(kind(Prefix(prefix_ref = StorageTableRef)))]
#[sabi(missing_field(option))]
pub struct StorageTable {
    /// Checked first.
    pub head: Head,
    /// Who the plug-in is, as in the compute table.
    pub info: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// Its options, as in the compute table.
    pub schema: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// Opens the tier.
    pub open: Option<unsafe extern "C" fn(options: Bytes, out: *mut *mut Instance, detail: Sink) -> Status>,
    /// Waits for reads under way and frees everything of the instance.
    pub close: Option<unsafe extern "C" fn(instance: *mut Instance)>,
    /// What the tier is, as a JSON object: name, description, alignment, granularity, resident, max_depth, curve (an
    /// array of objects with block_bytes, depth, bytes_per_second), notes.
    pub describe: Option<unsafe extern "C" fn(instance: *mut Instance, out: Sink, detail: Sink) -> Status>,
    /// Opens a file for reading; `path` is the system's bytes.
    pub open_file: Option<
        unsafe extern "C" fn(instance: *mut Instance, path: Bytes, out: *mut u64, detail: Sink) -> Status,
    >,
    /// Length of an open file in bytes.
    pub file_len: Option<
        unsafe extern "C" fn(instance: *mut Instance, file: u64, out: *mut u64, detail: Sink) -> Status,
    >,
    /// Closes a file.
    pub close_file: Option<unsafe extern "C" fn(instance: *mut Instance, file: u64, detail: Sink) -> Status>,
    /// Where bytes `start..end` lie in memory already: `present` 1 and the span, or `present` 0.
    pub resident: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            file: u64,
            start: u64,
            end: u64,
            present: *mut u32,
            out: *mut HostSpan,
            detail: Sink,
        ) -> Status,
    >,
    /// Starts reads and writes the timeline value at which all of them are done.
    pub read: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            requests: *const Read,
            requests_len: usize,
            out: *mut u64,
            detail: Sink,
        ) -> Status,
    >,
    /// Waits as in the compute table.
    pub wait: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            value: u64,
            timeout_ns: u64,
            out: *mut Reached,
            detail: Sink,
        ) -> Status,
    >,
    /// Asks that reads not started yet be dropped.
    pub cancel: Option<unsafe extern "C" fn(instance: *mut Instance, value: u64, detail: Sink) -> Status>,
    /// Named counts, as a JSON object of whole numbers: at least bytes_read, reads.
    #[sabi(last_prefix_field)]
    pub counters: Option<unsafe extern "C" fn(instance: *mut Instance, out: Sink, detail: Sink) -> Status>,
}

/// A cache policy.
#[allow(clippy::type_complexity, reason = "an alias would be one more type in the C header")]
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
#[sabi(kind(Prefix(prefix_ref = CacheTableRef)))]
#[sabi(missing_field(option))]
pub struct CacheTable {
    /// Checked first.
    pub head: Head,
    /// Who the plug-in is, as in the compute table.
    pub info: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// Its options, as in the compute table.
    pub schema: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// A fresh policy.
    pub open: Option<unsafe extern "C" fn(options: Bytes, out: *mut *mut Instance, detail: Sink) -> Status>,
    /// Frees the instance.
    pub close: Option<unsafe extern "C" fn(instance: *mut Instance)>,
    /// Sets the regions, forgetting everything.
    pub configure: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            regions: *const Region,
            regions_len: usize,
            detail: Sink,
        ) -> Status,
    >,
    /// One layer of one step: writes the misses that become resident, in order of loading, into `admit`, and the
    /// resident units that make room for them into `evict`.
    #[sabi(last_prefix_field)]
    pub step: Option<
        unsafe extern "C" fn(
            instance: *mut Instance,
            layer: u32,
            hits: *const Unit,
            hits_len: usize,
            misses: *const Miss,
            misses_len: usize,
            pinned: *const Unit,
            pinned_len: usize,
            admit: UnitSink,
            evict: UnitSink,
            detail: Sink,
        ) -> Status,
    >,
}

/// A planner.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
#[sabi(kind(Prefix(prefix_ref = PlannerTableRef)))]
#[sabi(missing_field(option))]
pub struct PlannerTable {
    /// Checked first.
    pub head: Head,
    /// Who the plug-in is, as in the compute table.
    pub info: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// Its options, as in the compute table.
    pub schema: Option<unsafe extern "C" fn(out: Sink, detail: Sink) -> Status>,
    /// A planner.
    pub open: Option<unsafe extern "C" fn(options: Bytes, out: *mut *mut Instance, detail: Sink) -> Status>,
    /// Frees the instance.
    pub close: Option<unsafe extern "C" fn(instance: *mut Instance)>,
    /// A placement. `request` is a JSON object with model, hardware and budget; the plan is written as JSON.
    #[sabi(last_prefix_field)]
    pub plan: Option<
        unsafe extern "C" fn(instance: *mut Instance, request: Bytes, out: Sink, detail: Sink) -> Status,
    >,
}
