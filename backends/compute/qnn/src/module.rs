//! The module: who the plug-in is, its options, and the one device that the library drives.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use engine_core::backend::{DeviceDescription, ToleranceClass};
use engine_core::config::Config;
use engine_core::module::{ComputeModule, Module, PluginInfo, PluginKind};
use engine_core::options::{OptionTable, Schema};
use engine_core::{ComputeBackend, Error, Result};

use crate::backend::{QnnBackend, Setup};
use crate::check::Form;
use crate::driver::Driver;
use crate::ffi;
use crate::library::{self, Library};
use crate::log;
use crate::soc::{self, Soc};
use crate::store::{Store, Target};
use engine_plugin::machine::{self, Roots};

engine_core::options! {
    /// Options of Qualcomm's NPU.
    pub struct QnnOptions {
        /// File of Qualcomm's libQnnHtp.so, which is not part of this program; empty takes the environment variable
        /// THERMOCLINE_QNN_LIB, else the system's search path.
        library: String = String::new();
        /// Number of the system-on-chip (30 SM8350, 36 SM8450, 43 SM8550, 57 SM8650, 60 SC8380XP, 69 SM8750, 87 SM8850); 0
        /// is the one that the library finds.
        soc: u32 = 0;
        /// How weights are held in graphs: exact is f16, and Q4_0 in its own 4 bits where the system-on-chip has that; w8
        /// rounds them to 8 bits with a scale per row, which changes results.
        weights: String = "exact".into(), one_of ["exact", "w8"];
        /// Bytes that buffers, graphs, their compiling and staging memory may take; 0 means the memory of the machine, or
        /// that of the control group where it has less.
        memory_limit: u64 = 0;
        /// Folder of the finished graphs; auto is thermocline/qnn in the user's cache folder and keeps those with a MiB of
        /// weights or more, a folder of one's own keeps all, off none.
        context_cache: String = "auto".into();
        /// Milliseconds that the library may take to open its device or to free something.
        driver_timeout_ms: u32 = 20000, in 1..=600000;
        /// Seconds that one graph may take to be compiled or loaded.
        compile_timeout_s: u32 = 900, in 1..=86400;
        /// Seconds that one run of a graph may take before the device counts as lost.
        submit_timeout_s: u32 = 300, in 1..=86400;
    }
}

/// The qnn plug-in.
#[derive(Clone, Copy, Debug, Default)]
pub struct QnnModule;

/// Why the last look found nothing.
static WHY_NONE: Mutex<String> = Mutex::new(String::new());

impl Module for QnnModule {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!(
            "qnn",
            "Qualcomm's NPU through the QNN library: projections and dense layers in f16."
        )
    }

    fn schema(&self) -> Schema {
        QnnOptions::schema()
    }
}

fn options(table: &OptionTable) -> Result<QnnOptions> {
    let place = Config::options_place(PluginKind::Compute, "qnn");
    let options = QnnOptions::from_table(table, &place)?;
    // The library is not asked: some numbers that it does not know keep it busy for ever.
    if options.soc != 0 && soc::find(options.soc).is_none() {
        return Err(Error::invalid(format!(
            "{place}: soc = {}: no system-on-chip of this number is known; 0 takes the one that the library finds; known: {}",
            options.soc,
            soc::names()
        )));
    }
    Ok(options)
}

/// Opens library and device.
fn driver(options: &QnnOptions) -> Result<Driver> {
    let limit = Duration::from_millis(options.driver_timeout_ms.into());
    Driver::open(&library::resolve(&options.library), options.soc, limit)
}

/// Whether the library imitates the NPU on this processor.
const EMULATED: bool = cfg!(any(target_arch = "x86_64", target_arch = "x86"));

/// The number that the emulator takes where none is asked for.
const EMULATED_SOC: u32 = 30;

fn soc_of(options: &QnnOptions) -> Option<Soc> {
    soc::find(if options.soc == 0 && EMULATED { EMULATED_SOC } else { options.soc })
}

fn form(options: &QnnOptions) -> Form {
    match options.weights.as_str() {
        "w8" => Form::EightBits,
        _ => Form::Exact { four_bits: Soc::has_four_bits(soc_of(options)) },
    }
}

/// Whether the chip is known, so that finished graphs can be kept for it.
fn keeps_files(options: &QnnOptions) -> bool {
    soc_of(options).is_some() || options.soc != 0
}

fn describe(library: &Library, options: &QnnOptions) -> DeviceDescription {
    // More than there is is refused at once, not by the system's killer once the pages are touched.
    let memory = match options.memory_limit {
        0 => machine::memory(&Roots::default()).unwrap_or(u64::MAX),
        limit => limit,
    };
    let soc = soc_of(options);
    let chip = match soc {
        Some(Soc { number, name, hexagon }) => format!("SoC {number}, {name}, Hexagon V{hexagon}"),
        None if options.soc == 0 => "the SoC that the library finds".into(),
        None => format!("SoC {}, which this version does not know", options.soc),
    };
    let mut notes = vec![format!(
        "{}: build {}, core API {}.{}, backend API {}.{}",
        library.path,
        library.build,
        library.core.major,
        library.core.minor,
        library.backend.major,
        library.backend.minor
    )];
    if !ffi::CORE_MINORS_TESTED.contains(&library.core.minor) {
        notes.push(format!(
            "core API {}.{} was not tested with this version of the plug-in; run its conformance suite first",
            library.core.major, library.core.minor
        ));
    }
    notes.push(match form(options) {
        Form::Exact { four_bits: true } => "weights: f16, and Q4_0 in 4 bits with a scale per 32 elements".into(),
        Form::Exact { four_bits: false } => {
            "weights: f16 (4 bits with a scale per 32 elements need a SoC with Hexagon V69 or later, named by `soc`)".into()
        }
        Form::EightBits => "weights: rounded to 8 bits with a scale per row (option `weights`), not the file's values".into(),
    });
    if !keeps_files(options) && options.context_cache != "off" {
        notes.push(
            "finished graphs are not kept on disk, for the chip is not known: name it by the option `soc`"
                .into(),
        );
    }
    notes.extend(log::printed_note());
    if EMULATED {
        notes.push("emulated on this processor: results are the NPU's, times say nothing about one".into());
    }
    let emulated = if EMULATED { ", emulated" } else { "" };
    DeviceDescription {
        name: "qnn".into(),
        description: format!("{} ({chip}{emulated})", library.provider),
        tolerance: ToleranceClass::F16,
        memory_bytes: memory,
        alignment: 1,
        imports_host_memory: true,
        needs_constant_weights: true,
        max_buffer_bytes: 0,
        notes,
    }
}

impl ComputeModule for QnnModule {
    fn devices(&self, table: &OptionTable) -> Result<Vec<DeviceDescription>> {
        let options = options(table)?;
        match driver(&options) {
            Ok(driver) => Ok(vec![describe(driver.library(), &options)]),
            // No library: the machine has no such device, and the plug-in is fine.
            Err(Error::Unsupported { detail }) => {
                *WHY_NONE.lock().unwrap_or_else(PoisonError::into_inner) = detail;
                Ok(Vec::new())
            }
            Err(error) => Err(error),
        }
    }

    fn why_none(&self) -> String {
        let why = WHY_NONE.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if why.is_empty() { "its devices were not listed yet".into() } else { why }
    }

    fn open(&self, index: u32, table: &OptionTable) -> Result<Box<dyn ComputeBackend>> {
        if index != 0 {
            return Err(Error::invalid(format!("the qnn plug-in has one device, not a device {index}")));
        }
        let options = options(table)?;
        let driver = driver(&options)?;
        let target = Target {
            soc: soc_of(&options).map_or(options.soc, |soc| soc.number),
            build: driver.library().build.clone(),
        };
        let setup = Setup {
            description: describe(driver.library(), &options),
            form: form(&options),
            // A file says for which chip it is: what the library chooses by itself is not known to us on a device.
            store: keeps_files(&options).then(|| Store::of(&options.context_cache, target)).flatten(),
            compile_limit: Duration::from_secs(options.compile_timeout_s.into()),
            run_limit: Duration::from_secs(options.submit_timeout_s.into()),
        };
        Ok(Box::new(QnnBackend::open(driver, setup)?))
    }
}
