//! GPUs (and Mesa's lavapipe) through Vulkan as a compute plug-in: the contract of `engine-core` over one queue.
//!
//! ```text
//! module     who we are, options, which devices        library, instance   the driver, opened at run time, with a time limit
//! device     the logical device, its one queue         memory              buffers within a budget, imports
//! kernels    names of the shaders, their codes          pipelines           compiled shaders, cached on disk
//! check      which operations are known                 emit/               from an operation to dispatches and copies
//! program    an executable: scratch, staging, commands  record              command buffers with the barriers they need
//! backend    handles, queue thread (the timeline is engine-plugin's)
//! ```

mod backend;
mod check;
mod device;
mod emit;
mod instance;
mod kernels;
mod library;
mod memory;
mod module;
mod pipelines;
mod program;
mod record;
#[cfg(test)]
mod tests;

pub use module::{VulkanModule, VulkanOptions};

engine_plugin::export_plugin!(compute: VulkanModule);
