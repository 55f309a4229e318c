//! Libraries that are no plug-ins, or break before they can say what they are: one clear line each, host unharmed.

use crate::support::{catalogue, entry, environment, fixture, folder, liar, plugins, refusal};
use engine_core::config::Plugins;
use engine_loader::{Door, Standing, discover};
use std::path::Path;

/// The reasons carry no path but those of the test's own folder, so they can be compared as they are.
fn changed(name: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) -> String {
    let folder = folder();
    let path = folder.path().join("libthermocline_x.so");
    let bytes = std::fs::read(fixture(name)).expect("a fixture");
    std::fs::write(&path, change(bytes)).expect("a changed copy");
    refusal(&path)
}

#[test]
fn files_that_are_no_libraries() {
    let reasons = [
        changed("fixture_cache", |_| b"just some text\n".to_vec()),
        changed("fixture_cache", |_| Vec::new()),
        changed("fixture_cache", |bytes| bytes[..40].to_vec()),
        changed("fixture_cache", |mut bytes| {
            bytes[18..20].copy_from_slice(&183u16.to_ne_bytes());
            bytes
        }),
        changed("fixture_cache", |mut bytes| {
            bytes[4] = 1;
            bytes
        }),
    ];
    if cfg!(target_arch = "x86_64") {
        insta::assert_snapshot!(reasons.join("\n"), @r"
        is no shared library (it does not start as an ELF file)
        is empty
        is truncated: it has 40 bytes, its headers speak of more
        is built for another processor: aarch64, this is x86_64
        is built for another machine (32-bit, little endian)
        ");
    }
}

#[test]
fn a_truncated_library_is_refused_wherever_it_is_cut() {
    let whole = std::fs::read(fixture("fixture_cache")).expect("a fixture").len();
    for len in [64, 5000, whole / 3, whole / 2, whole - 100, whole - 1] {
        let reason = changed("fixture_cache", |mut bytes| {
            bytes.truncate(len);
            bytes
        });
        assert!(reason.contains("truncated"), "{len}: {reason}");
    }
}

#[test]
fn rust_plugins_of_other_interfaces() {
    let version = refusal(&fixture("fixture_version_2"));
    assert_eq!(version, "has another version: it is built for interface 2.0.0, this program has 1.0.0");
    let layout = refusal(&fixture("fixture_layout"));
    assert!(layout.starts_with("has another layout: it is built for interface 1.0.0"), "{layout}");
    assert!(layout.len() < 700 && layout.lines().count() == 1, "{layout}");
    let panics = refusal(&fixture("fixture_root_panics"));
    assert!(panics.starts_with("panicked while making its root module"), "{panics}");
}

#[test]
fn c_plugins_of_other_interfaces() {
    let folder = folder();
    let cases = [
        (&["MAJOR=2", "MINOR=3"][..], "is built for interface 2.3, this program has 1.0"),
        (&["MAJOR=0"], "is built for interface 0.0, this program has 1.0"),
        (&["WORD=77"], "has a table with magic 0x000000000000004d, wanted 0x31434f4d52454854"),
        (&["KIND=9"], "is of kind 9, which this program does not know"),
        (&["SIZE=56"], "has a table of 56 bytes, interface 1.0 has 184"),
        (&["RESERVED=1"], "says something in its table's reserved words that this program does not know"),
        (&["NO_SUBMIT"], "lacks the function `submit` of its table"),
        (&["NULL_TABLE"], "returned a null or misaligned table from `thermocline_plugin`"),
        (
            &["NO_SYMBOL"],
            "is no Thermocline plug-in: it exports neither `thermocline_plugin` nor an abi_stable root module",
        ),
        (
            &["INFO=\"nothing\""],
            "breaks the contract: its info is malformed: expected ident at line 1 column 2",
        ),
        (
            &["NAME=\"Bad Name\""],
            "breaks the contract: plug-in name \"Bad Name\" is not 1 to 64 lower case letters, digits and '-'",
        ),
    ];
    for (defines, wanted) in cases {
        let path = liar(&folder, defines);
        assert_eq!(refusal(&path), wanted, "{defines:?}");
    }
}

#[test]
fn a_newer_minor_version_is_accepted() {
    let folder = folder();
    let path = liar(&folder, &["MINOR=9"]);
    let catalogue = catalogue(&[&path]);
    let entry = entry(&catalogue, "liar");
    assert_eq!((entry.door, entry.abi), (Some(Door::CSymbol), Some((1, 9))));
    // Its table is longer than this program knows, and works.
    assert_eq!(catalogue.open_compute("liar", &Default::default()).unwrap().counters()[0].value, 1);
}

#[test]
fn libraries_that_misbehave_when_loaded() {
    let folder = folder();
    let reason = |constructor: &str, probe_timeout_ms: u32| {
        let path = liar(&folder, &[&format!("CONSTRUCTOR={constructor}")]);
        let plugins = Plugins { probe_timeout_ms, ..plugins(&[&path]) };
        let catalogue = discover(&plugins, Path::new("/"), &environment());
        match &catalogue.entries()[0].standing {
            Standing::Refused { reason } => reason.clone(),
            other => panic!("{constructor}: {other:?}"),
        }
    };
    for (constructor, wanted) in [
        ("*(volatile int *)0 = 1", "crashed while it was loaded: signal 11 (SIGSEGV)"),
        ("abort()", "crashed while it was loaded: signal 6 (SIGABRT)"),
        ("signal(SIGBUS,SIG_DFL);raise(SIGBUS)", "crashed while it was loaded: signal 7 (SIGBUS)"),
        ("exit(0)", "ended the process while it was loaded, with exit code 0"),
        ("_exit(3)", "ended the process while it was loaded, with exit code 3"),
    ] {
        let reason = reason(constructor, 60_000);
        assert_eq!(reason, format!("{wanted}; it said: about to misbehave"), "{constructor}");
    }
    for constructor in
        ["for(;;)pause()", "close(1);for(;;)pause()", "if(!fork())for(;;)pause();for(;;)pause()"]
    {
        let reason = reason(constructor, 400);
        assert!(reason.starts_with("did not answer within 400 ms"), "{constructor}: {reason}");
    }
    let cases = [
        ("*(volatile int *)0 = 1", "crashed while it listed its devices: signal 11 (SIGSEGV)"),
        ("exit(7)", "ended the process while it listed its devices, with exit code 7"),
    ];
    for (body, wanted) in cases {
        let path = liar(&folder, &[&format!("DEVICES={body}")]);
        assert_eq!(refusal(&path), wanted);
    }
}

#[test]
fn one_bad_plugin_never_stops_the_rest() {
    let folder = folder();
    let bad = liar(&folder, &["CONSTRUCTOR=abort()"]);
    let text = folder.path().join("libthermocline_text.so");
    std::fs::write(&text, "text").unwrap();
    let catalogue = catalogue(&[folder.path(), &fixture("fixture_compute"), &fixture("fixture_planner")]);
    assert_eq!(catalogue.entries().len(), 4);
    assert!(catalogue.entries().iter().filter(|e| !e.is_chosen()).count() == 2, "{}", bad.display());
    assert!(catalogue.open_compute("fixture", &Default::default()).is_ok());
    assert!(catalogue.open_planner("fixture", &Default::default()).is_ok());
}

#[test]
fn a_file_that_changes_after_its_probe_is_not_loaded() {
    let folder = folder();
    let path = folder.path().join("libthermocline_cache_fixture.so");
    std::fs::copy(fixture("fixture_cache"), &path).unwrap();
    let catalogue = catalogue(&[&path]);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "something else").unwrap();
    let error = catalogue.open_cache("fixture", &Default::default()).err().unwrap().to_string();
    assert!(error.contains("has changed since it was probed"), "{error}");
}
