//! The plug-in boundary: one table of plain C functions and types per kind of plug-in, and nothing else.
//!
//! A library offers its table through one door or both:
//! 1. abi_stable's root module ([`PluginModule`]), for plug-ins in Rust: the loader compares the layout of every type;
//! 2. the C function `thermocline_plugin` ([`SYMBOL`]), for any language: the loader checks [`Head`].
//!
//! `include/thermocline_plugin.h` is generated from this crate. Structs never change within a major version: what is
//! new goes into reserved words (zero until then), new codes, or new functions at the end of a table.
//!
//! # Rules for both sides
//! - Text is UTF-8 without a terminating zero; paths are the bytes that the system uses. A null pointer is fine where
//!   the length is 0.
//! - Whoever calls owns all memory that it passes, and it is borrowed for the call only. Results of unknown length are
//!   written into a [`Sink`] of the caller's. Nothing is freed across the boundary.
//! - Reserved words are zero. So are parameters, slots and flags that a code does not use (slots: [`NO_SLOT`]). They are
//!   refused otherwise, so that a newer meaning is never ignored.
//! - A function returns 0 ([`Status::OK`]) or an error code, and then writes one sentence into the `detail` sink. Out
//!   parameters mean something only after success.
//! - A function never unwinds and never exits the process. All functions may be called from any thread, except those
//!   of one cache policy instance, which are called one at a time.

#![allow(
    non_local_definitions,
    non_camel_case_types,
    reason = "abi_stable's derive generates such code in the crate that uses it"
)]
#![allow(clippy::type_complexity, reason = "a table's functions are written out, for the C header's sake")]

mod bindings;
mod codes;
pub mod convert;
mod data;
mod operation;
mod root;
mod tables;

pub use bindings::*;
pub use codes::*;
pub use data::*;
pub use operation::*;
pub use root::{PluginModule, PluginModuleRef, ROOT_MODULE_SYMBOL};
pub use tables::*;

/// First word of every table: the bytes `THERMOC1` on a little-endian machine.
pub const MAGIC: u64 = 0x3143_4f4d_5245_4854;

/// Major version of the interface; the loader refuses any other.
pub const ABI_MAJOR: u32 = 1;

/// Minor version of the interface: tables may have more functions than those of an older minor version.
pub const ABI_MINOR: u32 = 0;

/// In [`Operation::slots`]: the operation has no such operand.
pub const NO_SLOT: u32 = u32::MAX;

/// Name of the C function of the second door: `const ThermoclineHead *thermocline_plugin(void)`.
pub const SYMBOL: &str = "thermocline_plugin";
