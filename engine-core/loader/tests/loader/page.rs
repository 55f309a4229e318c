//! The examples of docs/plugin-authors.md: the C one is compiled and loaded here (the Rust one is a doctest of
//! engine-plugin).

use crate::support::{catalogue, compile, folder, options};
use engine_core::cache::{Miss, Region, Unit};
use engine_loader::Door;
use std::path::Path;

#[test]
fn the_c_example_is_a_plugin() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/plugin-authors.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let start = page.find("```c\n").expect("a C example") + 5;
    let len = page[start..].find("```").expect("its end");
    let folder = folder();
    let source = folder.path().join("all.c");
    std::fs::write(&source, &page[start..start + len]).unwrap();
    let library = compile(&source, &folder.path().join("libthermocline_cache_all.so"), &[]);

    let catalogue = catalogue(&[&library]);
    let mut policy = catalogue.open_cache("all", &options("")).unwrap();
    assert_eq!(catalogue.entries()[0].door, Some(Door::CSymbol));
    let region = |budget_bytes| Region { unit_bytes: 4, budget_bytes };
    assert!(
        policy.configure(&[region(9), region(3)]).unwrap_err().to_string().contains("cannot hold a unit")
    );
    // As the host does for a model whose layers differ in type.
    policy.configure(&[region(9), region(4)]).unwrap();
    let miss = |region, cluster| Miss { unit: Unit { region, layer: 0, cluster }, deadline: 0 };
    let misses = [miss(0, 3), miss(1, 7), miss(0, 1), miss(0, 2), miss(1, 8)];
    let decision = policy.step(0, &[], &misses, &[]).unwrap();
    assert_eq!(decision.admit, [miss(0, 3).unit, miss(1, 7).unit, miss(0, 1).unit]);
    assert!(decision.evict.is_empty());
    let error = policy.step(0, &[], &[miss(2, 0)], &[]).unwrap_err().to_string();
    assert!(error.contains("not configured"), "{error}");
}
