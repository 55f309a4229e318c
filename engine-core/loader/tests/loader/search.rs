//! Where plug-ins are looked for, in which order, and what a failed search says.

use crate::support::{catalogue, environment, fixture, folder, plugins};
use engine_core::config::Plugins;
use engine_core::module::PluginKind;
use engine_loader::{Environment, Origin, Source, Standing, discover};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

fn copy(into: &Path, name: &str) -> PathBuf {
    std::fs::create_dir_all(into).unwrap();
    let path = into.join(name);
    std::fs::copy(fixture("fixture_cache"), &path).unwrap();
    path
}

#[test]
fn the_first_of_a_name_wins_in_the_documented_order() {
    let root = folder();
    let root = root.path().canonicalize().unwrap();
    let library = "libthermocline_cache_fixture.so";
    copy(&root.join("config"), library);
    copy(&root.join("env"), library);
    copy(&root.join("installed"), library);
    copy(&root.join("prefix/bin"), library);
    copy(&root.join("prefix/lib/thermocline"), library);
    std::fs::create_dir(root.join("manifests")).unwrap();
    std::fs::write(
        root.join("manifests/a.toml"),
        format!("name = 'fixture'\nkind = 'cache'\nlibrary = '../installed/{library}'\n"),
    )
    .unwrap();
    let environment = Environment {
        plugin_path: Some(format!("{}::{0}", root.join("env").display()).into()),
        manifest_folders: vec![root.join("manifests")],
        program_folder: Some(root.join("prefix/bin")),
        ..environment()
    };
    // Relative to the config file.
    let plugins = Plugins { paths: vec!["config".into()], ..Plugins::default() };
    let catalogue = discover(&plugins, &root, &environment);
    let found: Vec<(Source, PathBuf)> = catalogue
        .entries()
        .iter()
        .map(|entry| match &entry.origin {
            Origin::File(path) => (entry.source, path.strip_prefix(&root).unwrap().to_owned()),
            Origin::Linked => panic!("nothing is linked in"),
        })
        .collect();
    let at = |source, folder: &str| (source, Path::new(folder).join(library));
    assert_eq!(
        found,
        [
            at(Source::Config, "config"),
            at(Source::Environment, "env"),
            at(Source::Manifest, "installed"),
            at(Source::BesideProgram, "prefix/bin"),
            at(Source::BesideProgram, "prefix/lib/thermocline"),
        ]
    );
    let first = Origin::File(root.join("config").join(library));
    assert_eq!(catalogue.find(PluginKind::Cache, "fixture").unwrap().origin, first);
    for entry in &catalogue.entries()[1..] {
        assert_eq!(entry.standing, Standing::Shadowed { by: first.clone() });
    }
}

#[test]
fn a_failed_search_says_where_it_looked() {
    let root = folder();
    let root = root.path().canonicalize().unwrap();
    copy(&root.join("some"), "libthermocline_cache_fixture.so");
    std::fs::write(root.join("some/libthermocline_bad.so"), "text").unwrap();
    let environment = Environment {
        plugin_path: Some(root.join("absent").into()),
        manifest_folders: vec![root.join("no-manifests")],
        program_folder: Some(root.join("bin")),
        ..environment()
    };
    let catalogue = discover(&plugins(&[&root.join("some")]), Path::new("/"), &environment);
    let message = |error: Option<engine_loader::LoadError>| {
        error.expect("an error").to_string().replace(&root.display().to_string(), "ROOT")
    };
    insta::assert_snapshot!(message(catalogue.open_cache("fixtur", &Default::default()).err()), @r"
    there is no cache plug-in `fixtur`; did you mean `fixture`?
      refused:
        ROOT/absent: cannot be read: No such file or directory (os error 2)
        ROOT/some/libthermocline_bad.so: is no shared library (it does not start as an ELF file)
      looked at:
        `paths` of [plugins]: ROOT/some: 2 libraries
        THERMOCLINE_PLUGIN_PATH: ROOT/absent: No such file or directory (os error 2)
        manifests: ROOT/no-manifests: No such file or directory (os error 2)
        beside the program: ROOT/bin: No such file or directory (os error 2)
        beside the program: ROOT/lib/thermocline: No such file or directory (os error 2)
      hint: name the file or its folder under `paths` in [plugins] of the config, or in THERMOCLINE_PLUGIN_PATH; its usual name is libthermocline_cache_fixtur.so
    ");
    let message = message(catalogue.open_compute("cpu", &Default::default()).err());
    assert!(message.starts_with("there is no compute plug-in `cpu`; no compute plug-in was found at all"));
}

#[test]
fn the_same_file_twice_is_one_plugin() {
    let root = folder();
    let path = copy(root.path(), "libthermocline_cache_fixture.so");
    std::os::unix::fs::symlink(&path, root.path().join("libthermocline_cache_link.so")).unwrap();
    let catalogue = catalogue(&[root.path()]);
    assert_eq!(catalogue.entries().len(), 1);
    assert!(catalogue.tried().iter().any(|tried| tried.outcome.contains("the same file as")));
}

#[test]
fn what_every_user_may_write_is_refused() {
    let root = folder();
    let path = copy(root.path(), "libthermocline_cache_fixture.so");
    let reason = || match &catalogue(&[&path]).entries()[0].standing {
        Standing::Refused { reason } => reason.clone(),
        other => format!("{other:?}"),
    };
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o646)).unwrap();
    assert!(reason().contains("may be written by every user"));
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    assert_eq!(reason(), "Chosen");
    std::fs::set_permissions(root.path(), PermissionsExt::from_mode(0o777)).unwrap();
    assert!(reason().contains("which every user may write"));
    let plugins = Plugins { allow_world_writable: true, ..plugins(&[&path]) };
    assert!(discover(&plugins, Path::new("/"), &environment()).entries()[0].is_chosen());
}

#[test]
fn manifests_are_checked() {
    let root = folder();
    copy(root.path(), "library.so");
    let reason = |text: &str| {
        std::fs::write(root.path().join("m.toml"), text).unwrap();
        let environment = Environment { manifest_folders: vec![root.path().to_owned()], ..environment() };
        let catalogue = discover(&Plugins::default(), Path::new("/"), &environment);
        match &catalogue.entries()[0].standing {
            Standing::Refused { reason } => reason.clone(),
            other => format!("{other:?}"),
        }
    };
    let good = "name = 'fixture'\nkind = 'cache'\nlibrary = 'library.so'\n";
    assert_eq!(reason(good), "Chosen");
    assert!(reason("name = 3").contains("lacks the key `kind`"));
    assert!(reason(&format!("{good}libary = 'x'")).contains("did you mean `library`?"));
    assert!(reason(&good.replace("library.so", "absent.so")).contains("which is no file"));
    assert!(reason(&good.replace("cache", "cash")).contains("wanted compute, storage, cache or planner"));
    assert!(
        reason(&good.replace("fixture", "other")).contains("is the cache plug-in `fixture`, its manifest")
    );
    assert!(reason(&format!("{good}target = 'riscv64gc-unknown-linux-gnu'")).contains("is for riscv64gc"));
    assert!(reason(&format!("{good}sha256 = '00'")).contains("has SHA-256"));
    assert!(reason("a = [").contains("is no TOML"));
}

#[test]
fn without_a_probe_nothing_is_loaded() {
    let environment = Environment { probe: None, ..environment() };
    let catalogue = discover(&plugins(&[&fixture("fixture_cache")]), Path::new("/"), &environment);
    let Standing::Refused { reason } = &catalogue.entries()[0].standing else { panic!("no refusal") };
    assert!(reason.contains("there is no probe program"), "{reason}");
}
