//! Libraries of other versions, libraries that need others, and what a probe leaves behind.

use crate::support::{catalogue, compile, fixture, folder, liar_with, options, refusal};
use engine_core::ComputeBackend;
use engine_core::backend::{DeviceDescription, ToleranceClass};
use engine_core::cache::{Miss, Unit};
use engine_core::module::{ComputeModule, Module, PluginInfo, PluginKind};
use engine_core::options::{OptionTable, Schema};
use engine_loader::{Door, PROBE_ARGUMENT};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

/// The other direction, an older library in a newer host, is a test of the loader's `library` module: this host is the
/// oldest there is.
#[test]
fn a_rust_plugin_of_a_newer_minor_version_works() {
    let catalogue = catalogue(&[&fixture("fixture_newer")]);
    let entry =
        catalogue.find(PluginKind::Cache, "newer").unwrap_or_else(|| panic!("{:?}", catalogue.entries()));
    assert_eq!((entry.door, entry.abi), (Some(Door::RootModule), Some((1, 1))));
    let mut policy = catalogue.open_cache("newer", &options("")).unwrap();
    policy.configure(&[]).unwrap();
    let unit = Unit { region: 0, layer: 1, cluster: 2 };
    let decision = policy.step(1, &[], &[Miss { unit, deadline: 0 }], &[]).unwrap();
    assert_eq!(decision.admit, [unit]);
}

/// Lazy binding would accept it, and end the program at the first call.
#[test]
fn a_library_that_lacks_a_function_is_refused_at_once() {
    let folder = folder();
    let path = liar_with(&folder, &["-DNEEDS=absent_from_everywhere", "-Wl,-z,lazy"]);
    let reason = refusal(&path);
    assert!(reason.starts_with("is refused by the dynamic linker: "), "{reason}");
    assert!(reason.contains("undefined symbol: absent_from_everywhere"), "{reason}");
}

/// facts/traps.md, row 23: a plug-in finds the library beside it wherever the program was started, and one that does
/// not is refused in the linker's words.
#[test]
fn a_plugin_brings_its_own_library() {
    let folder = folder();
    let source = folder.path().join("vendor.c");
    std::fs::write(&source, "int vendor(void) { return 1; }\n").unwrap();
    compile(&source, &folder.path().join("libvendor.so"), &[]);
    let beside = format!("-L{}", folder.path().display());
    let needs = ["-DNEEDS=vendor", &beside, "-lvendor"];
    let path = liar_with(&folder, &[&needs[..], &["-Wl,-rpath,$ORIGIN"]].concat());
    let found = catalogue(&[&path]);
    drop(found.open_compute("liar", &options("")).unwrap());

    let path = liar_with(&folder, &needs);
    let reason = refusal(&path);
    assert!(reason.contains("is refused by the dynamic linker: libvendor.so: cannot open"), "{reason}");
}

/// A host that is killed while a plug-in hangs leaves no process behind: the probe ends itself.
#[test]
fn a_probe_outlives_nobody() {
    let folder = folder();
    let path = liar_with(&folder, &["-DCONSTRUCTOR=for(;;)pause()"]);
    let status = Command::new(env!("CARGO_BIN_EXE_thermocline-probe"))
        .arg(PROBE_ARGUMENT)
        .arg(&path)
        .arg("1")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(14), "SIGALRM, not {status:?}");
}

engine_core::options! {
    /// Options of the module that is linked in.
    struct LinkedOptions {
        /// How many devices there are.
        devices: u32 = 0;
    }
}

/// A module that is linked in, of the same name as `fixture_compute`.
struct Linked;

impl Module for Linked {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!("fixture", "Linked in.")
    }
    fn schema(&self) -> Schema {
        LinkedOptions::schema()
    }
}

impl ComputeModule for Linked {
    fn devices(&self, options: &OptionTable) -> engine_core::Result<Vec<DeviceDescription>> {
        let options = LinkedOptions::from_table(options, "[compute.options.fixture]")?;
        let device = |at| DeviceDescription {
            name: format!("linked{at}"),
            description: "a test".into(),
            tolerance: ToleranceClass::F32,
            memory_bytes: 0,
            alignment: 1,
            imports_host_memory: false,
            needs_constant_weights: false,
            max_buffer_bytes: 0,
            notes: Vec::new(),
        };
        Ok((0..options.devices).map(device).collect())
    }
    fn why_none(&self) -> String {
        "no device was asked for".into()
    }
    fn open(&self, _: u32, _: &OptionTable) -> engine_core::Result<Box<dyn ComputeBackend>> {
        Err(engine_core::Error::unsupported("it is a test"))
    }
}

#[test]
fn devices_are_listed_where_they_are_wanted_and_with_their_options() {
    let named = crate::support::plugins(&[&fixture("fixture_compute")]);
    let found = |listed, options| {
        let environment = engine_loader::Environment { listed, options, ..crate::support::environment() };
        let catalogue = engine_loader::discover(&named, std::path::Path::new("/"), &environment);
        let entry = catalogue.find(PluginKind::Compute, "fixture").unwrap();
        (entry.devices.len(), entry.no_devices.clone().unwrap_or_default())
    };
    let none = || String::new();
    let of = |name: &str, text: &str| vec![(name.to_owned(), crate::support::options(text))];
    assert_eq!(found(None, Vec::new()), (2, none()));
    assert_eq!(found(Some(of("other", "")), Vec::new()), (0, none()));
    assert_eq!(found(Some(of("fixture", "devices = 3")), of("fixture", "devices = 1")), (3, none()));
    // Those of all, with the options of those that have some.
    assert_eq!(found(None, of("other", "devices = 1")), (2, none()));
    assert_eq!(found(None, of("fixture", "devices = 1")), (1, none()));
    let (count, why) = found(None, of("fixture", "device = 1"));
    assert!(count == 0 && why.contains("[compute.options.fixture]") && why.contains("`devices`"), "{why}");
}

#[test]
fn what_is_linked_in_is_listed_with_its_options() {
    let environment = |text: &str| engine_loader::Environment {
        options: vec![("fixture".into(), crate::support::options(text))],
        ..crate::support::environment()
    };
    let listed = |text: &str| {
        let mut catalogue =
            engine_loader::discover(&Default::default(), std::path::Path::new("/"), &environment(text));
        catalogue.register_builtin(Box::new(Linked));
        let entry = catalogue.find(PluginKind::Compute, "fixture").unwrap();
        (entry.devices.len(), entry.no_devices.clone().unwrap_or_default())
    };
    assert_eq!(listed(""), (0, "no device was asked for".into()));
    assert_eq!(listed("devices = 2"), (2, String::new()));
    assert!(listed("devise = 2").1.contains("did you mean `devices`?"), "{:?}", listed("devise = 2"));
}

/// A library that the config names comes before what is linked in, whatever else was found to be no library.
#[test]
fn a_named_library_comes_before_what_is_linked_in() {
    let folder = folder();
    std::fs::write(folder.path().join("broken.toml"), "name = 3").unwrap();
    let environment = engine_loader::Environment {
        manifest_folders: vec![folder.path().to_owned()],
        ..crate::support::environment()
    };
    let named = crate::support::plugins(&[&fixture("fixture_compute")]);
    let mut catalogue = engine_loader::discover(&named, std::path::Path::new("/"), &environment);
    assert_eq!(catalogue.entries().len(), 2, "{:?}", catalogue.entries());
    catalogue.register_builtin(Box::new(Linked));
    let chosen = catalogue.find(PluginKind::Compute, "fixture").unwrap();
    assert_eq!(chosen.door, Some(Door::RootModule), "{:?}", catalogue.entries());
    let mut alone = engine_loader::discover(&Default::default(), std::path::Path::new("/"), &environment);
    alone.register_builtin(Box::new(Linked));
    assert_eq!(alone.find(PluginKind::Compute, "fixture").unwrap().door, Some(Door::Linked));
}
