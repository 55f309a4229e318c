//! Conversions between engine-core's types and those of the boundary, both directions.
//!
//! They are total: an unknown code, a null or misaligned pointer, a length without end, text that is not UTF-8 is an
//! error, never a panic. What no conversion can check is that a pointer which is neither null nor misaligned leads to
//! as many values as the length says: that is the `# Safety` of the functions that read.

mod bindings;
mod cache;
mod codes;
mod describe;
mod flatten;
mod list;
mod raw;
mod storage;
mod text;
mod unflatten;

pub use bindings::{BindingsDescriptor, BindingsOwned};
pub use cache::{UnitBuffer, miss_from_abi, miss_to_abi, region_from_abi, region_to_abi};
pub use cache::{unit_from_abi, unit_to_abi, write_units};
pub use codes::{buffer_use, buffer_use_code, reached, reached_code, support, support_code};
pub use describe::{
    counters_from_json, counters_to_json, device_from_json, device_to_json, devices_from_json,
    devices_to_json, info_from_json, info_to_json, request_from_json, request_to_json, tier_from_json,
    tier_to_json,
};
pub use list::{ListDescriptor, list_from_abi};
pub use raw::slice;
pub use storage::{read_from_abi, read_to_abi, span_from_abi, span_to_abi};
pub use text::{TextBuffer, bytes_of, check_status, path_from_abi, report, text_from_abi, write};

use std::time::Duration;

/// A timeout in nanoseconds; whatever does not fit 64 bits is for ever.
pub fn timeout_to_ns(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX)
}

/// The reverse of [`timeout_to_ns`].
pub fn timeout_from_ns(ns: u64) -> Duration {
    if ns == u64::MAX { engine_core::error::FOREVER } else { Duration::from_nanos(ns) }
}

#[cfg(test)]
mod limits;
#[cfg(test)]
mod tests;
