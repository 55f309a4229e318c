//! Qualcomm's NPU (Hexagon, HTP) as a compute plug-in: the contract of `engine-core` over the QNN library's graphs.
//!
//! ```text
//! module     who we are, options, the one device        library, ffi   Qualcomm's library, opened at run time
//! session    the library's handles, its calls           driver         the thread that makes them, with time limits
//! quiet, log what the library prints and says           soc            chips, and what they can
//! check      which operations are known                 emit, graph    from operations to a graph as data
//! weights    rows in f16, 4 and 8 bits                  store          finished graphs on disk
//! program    an executable: copies and graphs           run            one submission of it
//! backend    handles, queue thread (buffers and timeline are engine-plugin's)
//! ```

mod backend;
mod check;
mod driver;
mod emit;
mod ffi;
mod graph;
mod library;
mod log;
mod module;
mod program;
mod quiet;
mod run;
mod session;
mod soc;
mod store;
mod weights;

pub use module::{QnnModule, QnnOptions};

engine_plugin::export_plugin!(compute: QnnModule);
