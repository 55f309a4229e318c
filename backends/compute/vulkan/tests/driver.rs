//! Drivers that are absent, crash, hang, or lose the device: each is an error with a reason, and nothing waits for ever.
//!
//! `standin.c` is compiled to a library that misbehaves as the environment variable STANDIN says; every scenario runs in a
//! process of its own, which is this program again.

#[path = "../../standin.rs"]
mod standin;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use engine_core::backend::{Bindings, Bound, BufferUse, BufferView};
use engine_core::module::ComputeModule;
use engine_core::operation::{Arithmetic, OperationKind, OperationList, SlotRole};
use engine_core::options::OptionTable;
use engine_core::{DType, Error, Reached, TensorType};
use libtest_mimic::{Arguments, Failed};
use standin::{Scenario, crashes, ensure};
use thermocline_compute_vulkan::VulkanModule;

fn main() -> ExitCode {
    engine_loader::probe_main_if_requested();
    if let Some(code) = standin::child(run) {
        return code;
    }
    let folder = tempfile::tempdir().unwrap();
    let library = standin::compile(env!("CARGO_MANIFEST_DIR"), &folder.path().join("libvulkan.so.1"));
    let no_device = match VulkanModule.devices(&OptionTable::new()) {
        Ok(devices) if !devices.is_empty() => None,
        Ok(_) => Some(VulkanModule.why_none()),
        Err(error) => Some(error.to_string()),
    };
    let missing = Ok("/no/such/libvulkan.so".into());
    let mut trials = vec![Scenario { name: "missing", library: missing, environment: Vec::new() }.trial()];
    for (name, setting, needs_device) in [
        ("hang", "hang", false),
        ("crash", "crash", false),
        ("lost", "lost:3", true),
        ("stuck", "stuck:3", true),
    ] {
        let library = match no_device.clone().filter(|_| needs_device) {
            Some(reason) => library.clone().and(Err(reason)),
            None => library.clone(),
        };
        let mut environment: Vec<(&str, OsString)> = vec![("STANDIN", setting.into())];
        if name == "crash" {
            // The plug-in's own probe opens the library by its usual name.
            environment.push(("LD_LIBRARY_PATH", folder.path().into()));
        }
        trials.push(Scenario { name, library, environment }.trial());
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn options(library: &str) -> OptionTable {
    let mut options = OptionTable::new();
    options.insert("library".into(), library.into());
    options.insert("pipeline_cache".into(), "off".into());
    options
}

fn run(scenario: &str, library: &str) -> Result<(), String> {
    let result = match scenario {
        "missing" => missing(library),
        "hang" => hangs(library),
        "crash" => crashes("libthermocline_compute_vulkan.so"),
        "lost" => loses(library, "has been lost", 300),
        "stuck" => loses(library, "did not end a submission within 1 s", 1),
        other => Err(format!("no scenario `{other}`").into()),
    };
    result.map_err(|failed| failed.message().unwrap_or("failed").to_owned())
}

/// No library is no error of the plug-in: there are no devices, and it says what to install.
fn missing(library: &str) -> Result<(), Failed> {
    let devices = VulkanModule.devices(&options(library))?;
    let why = VulkanModule.why_none();
    ensure(devices.is_empty() && why.contains(library) && why.contains("apt-get install libvulkan1"), why)?;
    let error = VulkanModule.open(0, &options(library)).err();
    ensure(matches!(&error, Some(Error::Unsupported { .. })), error)
}

fn hangs(library: &str) -> Result<(), Failed> {
    let mut options = options(library);
    options.insert("driver_timeout_ms".into(), 300.into());
    let error = VulkanModule.devices(&options).err();
    let said = |error: &Option<Error>, what: &str| matches!(error, Some(Error::DeviceLost { detail }) if detail.contains(what));
    ensure(said(&error, "did not return within 300 ms"), &error)?;
    let again = VulkanModule.open(0, &options).err();
    ensure(said(&again, "it is not called again"), &again)
}

/// The third submission fails for good: its error says so, everything after it fails at once, and closing returns.
fn loses(library: &str, words: &str, timeout: i64) -> Result<(), Failed> {
    let mut options = options(library);
    options.insert("submit_timeout_s".into(), timeout.into());
    let device = VulkanModule.open(0, &options)?;
    let buffer = device.allocate(4096, BufferUse::Activations)?;
    let list = doubling()?;
    let executable = device.prepare(&list)?;
    let at = |offset| Bound::Buffer(BufferView { buffer, offset });
    let slots = [(engine_core::operation::SlotId(0), at(0)), (engine_core::operation::SlotId(1), at(1024))];
    let submit = || -> Result<Reached, Error> {
        let bindings = Bindings { tokens: 1, slots: &slots, sequences: &[], ranges: &[] };
        let value = device.submit(executable, &bindings, &[])?;
        device.wait(value, Duration::from_secs(60))
    };
    for _ in 0..2 {
        let reached = submit();
        ensure(reached == Ok(Reached::Done), reached)?;
    }
    let lost = submit();
    ensure(matches!(&lost, Err(Error::DeviceLost { detail }) if detail.contains(words)), &lost)?;
    let after = submit();
    ensure(matches!(&after, Err(Error::DeviceLost { .. })), &after)?;
    let allocated = device.allocate(64, BufferUse::Weights);
    ensure(matches!(&allocated, Err(Error::DeviceLost { .. })), &allocated)?;
    drop(device);
    Ok(())
}

fn doubling() -> Result<OperationList, Error> {
    let mut list = OperationList::new(1);
    let row = TensorType::f32_vector(16);
    let input = list.per_token("x", SlotRole::Input, DType::F32, row.columns)?;
    let output = list.per_token("y", SlotRole::Output, DType::F32, row.columns)?;
    let kind = OperationKind::Add { left: input, right: input, output };
    list.push("double", kind, Arithmetic::F32);
    Ok(list)
}
