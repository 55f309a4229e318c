//! The module: who the plug-in is, its options, and its one device.

use engine_core::backend::{DeviceDescription, ToleranceClass};
use engine_core::config::Config;
use engine_core::module::{ComputeModule, Module, PluginInfo, PluginKind};
use engine_core::options::{OptionTable, Schema};
use engine_core::{ComputeBackend, Error, Result};

use crate::backend::{CpuBackend, Setup};
use crate::kernels::{self, FEATURES_VARIABLE};
use crate::threads;
use engine_plugin::machine::{self, Roots};

engine_core::options! {
    /// Options of the cpu.
    pub struct CpuOptions {
        /// Threads that compute; 0 takes the physical cores of the affinity mask, limited by the CPU quota.
        threads: u32 = 0, in 0..=1024;
        /// Instruction tier of the kernels, such as portable or avx2; auto takes the best that runs here, unless the
        /// environment variable THERMOCLINE_CPU_FEATURES names one.
        features: String = "auto".into();
        /// Whether each thread is pinned to a processor of the affinity mask.
        pin: bool = true;
        /// Bytes that buffers and scratch memory may take; 0 means the memory of the machine, or that of the control
        /// group where it has less. Imported weights do not count.
        memory_limit: u64 = 0;
    }
}

/// The cpu plug-in.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuModule;

impl Module for CpuModule {
    fn info(&self) -> PluginInfo {
        let info = engine_plugin::info!(
            "cpu",
            "The processor: dense and sparse kernels on a pinned pool, chosen at run time.",
        );
        PluginInfo { build: format!("{}; kernel tiers: {}", info.build, kernels::names()), ..info }
    }

    fn schema(&self) -> Schema {
        CpuOptions::schema()
    }
}

impl ComputeModule for CpuModule {
    fn devices(&self, options: &OptionTable) -> Result<Vec<DeviceDescription>> {
        Ok(vec![setup(options)?.description])
    }

    fn open(&self, index: u32, options: &OptionTable) -> Result<Box<dyn ComputeBackend>> {
        if index != 0 {
            return Err(Error::invalid(format!("the cpu plug-in has one device, not a device {index}")));
        }
        Ok(Box::new(CpuBackend::open(setup(options)?)?))
    }
}

fn setup(options: &OptionTable) -> Result<Setup> {
    let options = CpuOptions::from_table(options, &Config::options_place(PluginKind::Compute, "cpu"))?;
    let variable = std::env::var(FEATURES_VARIABLE).ok();
    // The config wins over the environment, as everywhere; `auto` leaves the choice to the variable.
    let wanted = if options.features == "auto" { variable } else { Some(options.features) };
    let (kernels, kernels_reason) = kernels::select(wanted.as_deref())?;
    let choice = threads::choose(options.threads as usize, &threads::affinity(), &Roots::default());
    let memory_bytes = match options.memory_limit {
        0 => machine::memory(&Roots::default()).unwrap_or(0),
        limit => limit,
    };
    // More than there is is refused at once, not by the system's killer once the pages are touched.
    let memory_limit = if memory_bytes == 0 { u64::MAX } else { memory_bytes };
    let description = DeviceDescription {
        name: "cpu".into(),
        description: format!("{} ({}, {} threads)", processor_name(), kernels.name, choice.threads),
        tolerance: ToleranceClass::F32,
        memory_bytes,
        alignment: 1,
        imports_host_memory: true,
        needs_constant_weights: false,
        max_buffer_bytes: 0,
        notes: vec![kernels_reason, choice.reason],
    };
    Ok(Setup {
        description,
        kernels,
        threads: choice.threads,
        processors: choice.processors,
        pin: options.pin,
        memory_limit,
    })
}

/// The processor's own name, where the system tells it.
fn processor_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name =
        text.lines().find_map(|l| Some(l.strip_prefix("model name")?.split_once(':')?.1.trim().to_owned()));
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}
