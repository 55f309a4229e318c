//! For authors of plug-ins: implement a plain trait of engine-core, and export it with one line.
//!
//! ```no_run
//! use engine_core::module::{CacheModule, Module, PluginInfo};
//! use engine_core::options::{OptionTable, Schema};
//! use engine_core::{CachePolicy, Result};
//! # struct KeepNothing;
//! # impl CachePolicy for KeepNothing {
//! #     fn configure(&mut self, _: &[engine_core::cache::Region]) -> Result<()> { Ok(()) }
//! #     fn step(&mut self, _: u32, _: &[engine_core::cache::Unit], _: &[engine_core::cache::Miss],
//! #         _: &[engine_core::cache::Unit]) -> Result<engine_core::cache::Decision> { Ok(Default::default()) }
//! # }
//!
//! struct MyModule;
//!
//! impl Module for MyModule {
//!     fn info(&self) -> PluginInfo {
//!         engine_plugin::info!("keep-nothing", "Admits no unit.")
//!     }
//!     fn schema(&self) -> Schema {
//!         Schema::default()
//!     }
//! }
//!
//! impl CacheModule for MyModule {
//!     fn open(&self, _: &OptionTable) -> Result<Box<dyn CachePolicy>> {
//!         Ok(Box::new(KeepNothing))
//!     }
//! }
//!
//! engine_plugin::export_plugin!(cache: MyModule);
//! # fn main() {}
//! ```
//!
//! The crate is a `cdylib` named `thermocline_KIND_NAME`, so that its file is `libthermocline_KIND_NAME.so` (a planner's
//! `libthermocline_placement_NAME.so`). Build it
//! with `panic = "unwind"`: a panic in any method then becomes [`engine_core::Error::Panicked`] with message and place.
//! Lists and bindings are checked by engine-core's rules before a method sees them.
//!
//! What devices that keep buffers in host memory, or run submissions on a thread of their own, need alike is here, too:
//! [`buffers`] and [`queue`]; and [`machine`] says how much memory there is.

mod boundary;
pub mod buffers;
#[doc(hidden)]
pub mod cache;
#[doc(hidden)]
pub mod compute;
mod export;
pub mod machine;
#[doc(hidden)]
pub mod planner;
pub mod queue;
#[doc(hidden)]
pub mod storage;
mod timeline;

/// What [`export_plugin!`] expands to; no part of the interface.
#[doc(hidden)]
pub mod private {
    pub use abi_stable;
    pub use engine_abi;
    pub use engine_core;
}

/// The page for authors; its example is compiled as a test.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/plugin-authors.md")]
struct Page;
