//! The CPU backend linked in, as the feature `builtin-cpu` does it, against its own library.

use crate::Test;
use crate::program::{executable, folder, model, plugin};
use engine_core::config::Plugins;
use engine_core::options::OptionTable;
use engine_loader::{Catalogue, Environment, Origin};
use engine_runtime::{Engine, EngineOptions, Stack};
use std::path::Path;

pub(crate) fn tests() -> Vec<Test> {
    vec![("must_show_3_linked_in_and_loaded_cpu", linked_in_and_loaded)]
}

/// The plug-ins beside the program; with `linked` the CPU of this test program before them.
fn catalogue(linked: bool) -> Catalogue {
    let environment = Environment {
        plugin_path: None,
        manifest_folders: Vec::new(),
        program_folder: Some(folder().to_owned()),
        probe: Some(executable().to_owned()),
        ..Environment::default()
    };
    let mut catalogue = engine_loader::discover(&Plugins::default(), Path::new("."), &environment);
    if linked {
        catalogue.register_builtin(Box::new(thermocline_compute_cpu::CpuModule));
    }
    let cpu = catalogue.find(engine_core::module::PluginKind::Compute, "cpu").unwrap();
    match &cpu.origin {
        Origin::Linked => assert!(linked),
        Origin::File(path) => {
            assert!(!linked && *path == plugin("compute_cpu").canonicalize().unwrap(), "{}", path.display());
        }
    }
    catalogue
}

/// Greedy ids, and every logit that they were chosen from, bit for bit.
fn generated(catalogue: &Catalogue, threads: i64) -> (Vec<u32>, Vec<u32>) {
    let mut options = OptionTable::new();
    options.insert("threads".into(), threads.into());
    let none = OptionTable::new();
    let stack = Stack {
        compute: vec![("cpu".into(), catalogue.open_compute("cpu", &options).unwrap())],
        storage: catalogue.open_storage("mmap", &none).unwrap(),
        cache: catalogue.open_cache("lru", &none).unwrap(),
        planner: catalogue.open_planner("greedy", &none).unwrap(),
    };
    let engine = Engine::load(model(), stack, EngineOptions::default()).unwrap();
    let mut session = engine.session().unwrap();
    let (mut ids, mut bits) = (Vec::new(), Vec::new());
    session.prefill(&[0, 731, 894, 259, 586, 12, 478, 287, 259, 342]).unwrap();
    for _ in 0..60 {
        let logits = session.sampleable_logits();
        bits.extend(logits.iter().map(|logit| logit.to_bits()));
        let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]).then(b.cmp(a)));
        let id = u32::try_from(best.unwrap()).unwrap();
        ids.push(id);
        session.decode(id).unwrap();
    }
    (ids, bits)
}

fn linked_in_and_loaded() {
    let loaded = generated(&catalogue(false), 2);
    assert_eq!(loaded.0[..6], [601, 461, 886, 428, 626, 346]);
    let linked = catalogue(true);
    assert!(generated(&linked, 2) == loaded, "linked in and loaded differ");
    assert!(generated(&linked, 1) == loaded, "one and two threads differ");
}
