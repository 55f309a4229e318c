//! Plain data of all kinds of plug-ins: borrowed bytes, sinks, memory, and what caches and tiers are asked.

use crate::Status;
use abi_stable::StableAbi;
use std::ffi::c_void;

/// Borrowed bytes: text in UTF-8, or a path.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Bytes {
    /// First byte; may be null where `len` is 0.
    pub data: *const u8,
    /// Number of bytes.
    pub len: usize,
}

/// Receives bytes of a length that the caller does not know beforehand. Writes are appended. Valid for one call.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct Sink {
    /// Passed to `write`.
    pub context: *mut c_void,
    /// Appends a copy of the bytes; null where nobody wants them.
    pub write: Option<unsafe extern "C" fn(context: *mut c_void, bytes: Bytes)>,
}

/// Receives units, as [`Sink`] receives bytes.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct UnitSink {
    /// Passed to `write`.
    pub context: *mut c_void,
    /// Appends copies of `len` units.
    pub write: Option<unsafe extern "C" fn(context: *mut c_void, units: *const Unit, len: usize)>,
}

/// A run of bytes in the host's address space.
///
/// The memory stays valid and is not touched in a conflicting way until the work that it was passed to is reached on
/// its timeline (for an import: until the buffer is freed).
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct HostSpan {
    /// First byte.
    pub address: *mut u8,
    /// Number of bytes.
    pub len: u64,
    /// 1 where the receiver may write, else 0.
    pub writable: u32,
    /// Zero.
    pub reserved: u32,
}

/// Consecutive neurons `start..end` of one FFN.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct ClusterRange {
    /// First neuron.
    pub start: u32,
    /// One past the last neuron.
    pub end: u32,
}

/// One request of [`StorageTable::read`](crate::StorageTable::read).
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Read {
    /// The file.
    pub file: u64,
    /// First byte of the file.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// Where they go; as long as the range.
    pub into: HostSpan,
    /// 0 to 255; 0 is the most urgent.
    pub priority: u32,
    /// Zero.
    pub reserved: u32,
}

/// A unit of caching.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Unit {
    /// Index of its region.
    pub region: u32,
    /// Layer.
    pub layer: u32,
    /// Cluster index within the layer.
    pub cluster: u32,
}

/// A part of the memory budget with units of one size.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Region {
    /// Bytes of one unit.
    pub unit_bytes: u64,
    /// Bytes that the region may hold.
    pub budget_bytes: u64,
}

/// A unit that is needed and not in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Miss {
    /// The unit.
    pub unit: Unit,
    /// Steps of the logical clock until it is needed.
    pub deadline: u32,
}

/// What the plug-in keeps for one open instance. Only the plug-in looks inside.
#[repr(C)]
#[derive(StableAbi)]
pub struct Instance {
    private: [u8; 0],
}

impl Status {
    /// Whether this is success.
    pub fn is_ok(self) -> bool {
        self == Status::OK
    }
}
