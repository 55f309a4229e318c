//! Libraries of other versions, libraries that need others, and what a probe leaves behind.

use crate::support::{catalogue, compile, fixture, folder, liar_with, options, refusal};
use engine_core::ComputeBackend;
use engine_core::backend::DeviceDescription;
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

/// A module that is linked in, of the same name as `fixture_compute`.
struct Linked;

impl Module for Linked {
    fn info(&self) -> PluginInfo {
        engine_plugin::info!("fixture", "Linked in.")
    }
    fn schema(&self) -> Schema {
        Schema::default()
    }
}

impl ComputeModule for Linked {
    fn devices(&self, _: &OptionTable) -> engine_core::Result<Vec<DeviceDescription>> {
        Ok(Vec::new())
    }
    fn why_none(&self) -> String {
        "it is a test".into()
    }
    fn open(&self, _: u32, _: &OptionTable) -> engine_core::Result<Box<dyn ComputeBackend>> {
        Err(engine_core::Error::unsupported("it is a test"))
    }
}

/// A library that the config names comes before what is linked in, whatever else was found to be no library.
#[test]
fn devices_are_listed_where_they_are_wanted_and_with_their_options() {
    let named = crate::support::plugins(&[&fixture("fixture_compute")]);
    let found = |listed| {
        let environment = engine_loader::Environment { listed, ..crate::support::environment() };
        let catalogue = engine_loader::discover(&named, std::path::Path::new("/"), &environment);
        let entry = catalogue.find(PluginKind::Compute, "fixture").unwrap();
        assert!(entry.no_devices.is_none(), "{entry:?}");
        entry.devices.len()
    };
    let three = [("devices".to_owned(), 3.into())].into_iter().collect();
    assert_eq!(found(None), 2);
    assert_eq!(found(Some(vec![("other".into(), Default::default())])), 0);
    assert_eq!(found(Some(vec![("fixture".into(), three)])), 3);
}

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
