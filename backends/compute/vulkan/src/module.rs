//! The module: who the plug-in is, its options, and the devices that the driver lists.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use engine_core::backend::DeviceDescription;
use engine_core::config::Config;
use engine_core::module::{ComputeModule, Module, PluginInfo, PluginKind};
use engine_core::options::{OptionTable, Schema};
use engine_core::{ComputeBackend, Error, Result};

use crate::backend::VulkanBackend;
use crate::device::Device;
use crate::instance::{Candidate, Instance};
use crate::{library, pipelines};

engine_core::options! {
    /// Options of Vulkan devices.
    pub struct VulkanOptions {
        /// Which device: an index in the order of `plugins inspect`, or a part of its name; empty lists all, GPUs first.
        device: String = String::new();
        /// File of the Vulkan loader; empty opens libvulkan.so.1 as the system finds it.
        library: String = String::new();
        /// Bytes that buffers and scratch memory may take; 0 means the device's own memory. Imported weights do not count.
        memory_limit: u64 = 0;
        /// Whether weights are read in host memory: auto does so where the device shares it with the CPU.
        import: String = "auto".into(), one_of ["auto", "on", "off"];
        /// Features of the device beyond Vulkan 1.2's own: auto uses those that help, plain none.
        features: String = "auto".into(), one_of ["auto", "plain"];
        /// Folder of the compiled shaders; auto is thermocline/vulkan in the user's cache folder, off keeps none.
        pipeline_cache: String = "auto".into();
        /// Seconds that one submission may take before the device counts as lost.
        submit_timeout_s: u32 = 300, in 1..=86400;
        /// Milliseconds that the driver may take to list its devices or to open one.
        driver_timeout_ms: u32 = 20000, in 1..=600000;
        /// Whether the validation layers watch (they must be installed); what they say fails the submission.
        validation: bool = false;
    }
}

/// The vulkan plug-in.
#[derive(Clone, Copy, Debug, Default)]
pub struct VulkanModule;

/// Why the last look found nothing.
static WHY_NONE: Mutex<String> = Mutex::new(String::new());

impl Module for VulkanModule {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!(
            "vulkan",
            "GPUs through Vulkan 1.2: dense and sparse layers, attention, KV on the device."
        )
    }

    fn schema(&self) -> Schema {
        VulkanOptions::schema()
    }
}

fn options(table: &OptionTable) -> Result<VulkanOptions> {
    VulkanOptions::from_table(table, &Config::options_place(PluginKind::Compute, "vulkan"))
}

/// Calls the driver with a time limit; a library that does not return is not called again.
fn guarded<T: Send + 'static>(
    options: &VulkanOptions,
    what: &str,
    work: impl FnOnce(&VulkanOptions) -> Result<T> + Send + 'static,
) -> Result<T> {
    let limit = Duration::from_millis(options.driver_timeout_ms.into());
    let theirs = options.clone();
    library::within(limit, what, move || work(&theirs)).inspect_err(|error| {
        if matches!(error, Error::DeviceLost { .. }) {
            library::mark_hanging(&options.library);
        }
    })
}

fn list(options: &VulkanOptions) -> Result<(Vec<Candidate>, Vec<String>)> {
    guarded(options, "listed its devices", |options| Instance::new(options)?.candidates(options))
}

impl ComputeModule for VulkanModule {
    fn devices(&self, table: &OptionTable) -> Result<Vec<DeviceDescription>> {
        let options = options(table)?;
        let none = |reason: String| {
            *WHY_NONE.lock().unwrap_or_else(PoisonError::into_inner) = reason;
            Ok(Vec::new())
        };
        match list(&options) {
            // No loader or no driver: the machine has no such devices, and the plug-in is fine.
            Err(Error::Unsupported { detail }) => none(detail),
            Err(error) => Err(error),
            Ok((found, refused)) if found.is_empty() && refused.is_empty() => {
                none(format!("the Vulkan drivers list no device; {}", library::INSTALL_HINT))
            }
            Ok((found, refused)) if found.is_empty() => none(refused.join("; ")),
            Ok((found, _)) => Ok(found.into_iter().map(|candidate| candidate.description).collect()),
        }
    }

    fn why_none(&self) -> String {
        let why = WHY_NONE.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if why.is_empty() { "its devices were not listed yet".into() } else { why }
    }

    fn open(&self, index: u32, table: &OptionTable) -> Result<Box<dyn ComputeBackend>> {
        Ok(Box::new(open(index, table, |_| ())?))
    }
}

/// Opens a device; `change` may take something away from what the driver offers (tests do).
pub(crate) fn open(
    index: u32,
    table: &OptionTable,
    change: impl FnOnce(&mut Candidate) + Send + 'static,
) -> Result<VulkanBackend> {
    let options = options(table)?;
    let device = guarded(&options, "opened a device", move |options| {
        let instance = Arc::new(Instance::new(options)?);
        let (found, _) = instance.candidates(options)?;
        let count = found.len();
        let mut candidate = found.into_iter().nth(index as usize).ok_or_else(|| {
            Error::invalid(format!("the vulkan plug-in lists {count} device(s); there is no device {index}"))
        })?;
        change(&mut candidate);
        Device::open(instance, candidate, Duration::from_secs(options.submit_timeout_s.into()))
    })?;
    VulkanBackend::open(device, pipelines::folder(&options.pipeline_cache))
}
