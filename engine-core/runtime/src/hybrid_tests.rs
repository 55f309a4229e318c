//! Models on two devices that compute nothing: what overlaps, what is waited for, and what is given back.

use crate::fakes::{Clock, FakeDevice, FakePlanner, load_on};
use crate::{Engine, EngineOptions, RuntimeError};
use engine_core::backend::BufferUse;
use engine_core::planner::{
    Budget, FEATURE_PREFILL, FfnShare, Plan, PrefillPlan, PrefillShare, SparsityPolicy,
};
use engine_core::{ClusterRange, ClusterSet};
use std::sync::{Arc, Mutex};

fn options() -> EngineOptions {
    EngineOptions { context: 32, batch: 8, ..EngineOptions::default() }
}

/// The first 256 of 1024 neurons of each layer on the second device, dense.
fn divide(plan: &mut Plan, _: &Budget) {
    for layer in &mut plan.layers {
        let hot = ClusterSet::from_ranges(vec![ClusterRange::new(0, 256)]).unwrap();
        layer.ffn[0].clusters = hot.complement(1024);
        layer.ffn.push(FfnShare { device: 1, clusters: hot, sparsity: SparsityPolicy::Dense });
    }
}

/// Batches on the second device, which then has a KV cache of its own.
fn batches_elsewhere(plan: &mut Plan, budget: &Budget) {
    divide(plan, budget);
    plan.requires.push(FEATURE_PREFILL.into());
    for layer in &mut plan.layers {
        layer.prefill = Some(PrefillPlan {
            attention: 1,
            projections: 1,
            ffn: vec![PrefillShare { device: 1, clusters: ClusterSet::all(1024) }],
        });
    }
}

fn pair() -> [Arc<FakeDevice>; 2] {
    [Arc::new(FakeDevice::new()), Arc::new(FakeDevice::new())]
}

fn load([first, second]: &[Arc<FakeDevice>; 2], change: fn(&mut Plan, &Budget)) -> crate::Result<Engine> {
    load_on([first, second], FakePlanner(change), options())
}

/// Time of one decoded token where shares take so long on each device.
fn step_takes(costs: [u64; 2]) -> u64 {
    let host = Arc::new(Mutex::new(0));
    let devices = costs.map(|cost| Arc::new(FakeDevice::timed(Clock::new(&host, cost))));
    let mut session = load(&devices, divide).unwrap().session().unwrap();
    session.decode(1).unwrap();
    *host.lock().unwrap()
}

#[test]
fn a_step_takes_what_the_slower_device_takes() {
    assert_eq!(step_takes([5, 5]), 8 * 5);
    // Either side at twice its time: the larger of the two, not their sum.
    assert_eq!(step_takes([10, 5]), 8 * 10);
    assert_eq!(step_takes([5, 10]), 8 * 10);
    assert_eq!(step_takes([0, 5]), 8 * 5);
}

#[test]
fn each_device_is_given_its_part_and_gives_it_back() {
    let copies = || Arc::new(FakeDevice::describing(|device| device.imports_host_memory = false));
    let devices = [Arc::new(FakeDevice::new()), copies()];
    let engine = load(&devices, divide).unwrap();
    assert_eq!(engine.device_names(), ["first", "second"]);
    let held = |device: &FakeDevice| -> u64 {
        let log = device.log.lock().unwrap();
        log.allocated.iter().filter(|a| a.0 == BufferUse::Weights).map(|a| a.1).sum()
    };
    // Gate, up and down of a quarter of the neurons, in blocks of 32 with 34 bytes.
    let quarter = 8 * 3 * 256 * 256 / 32 * 34;
    assert_eq!((held(&devices[0]), held(&devices[1])), (0, quarter));
    assert_eq!(engine.weight_bytes_copied(), quarter);
    // What both view is there once.
    let whole = load(&pair(), |_, _| ()).unwrap().weight_bytes();
    assert_eq!(load(&pair(), divide).unwrap().weight_bytes(), whole);
    assert_eq!(engine.weight_bytes(), whole + quarter);
    let mut session = engine.session().unwrap();
    session.prefill(&[1, 2, 3]).unwrap();
    session.decode(4).unwrap();
    // Three stages a layer and the last, for the batch and for the token; the head for the batch.
    assert_eq!(session.statistics().submissions, 2 * (3 * 8 + 1) + 1);
    let names: Vec<String> = session.statistics().devices.into_iter().map(|device| device.name).collect();
    assert_eq!(names, ["first", "second", "fake-tier"]);
    drop((engine, session));
    for device in &devices {
        assert!(device.log.lock().unwrap().live.is_empty());
    }
}

#[test]
fn keys_and_values_are_moved_once_and_only_where_they_are_needed() {
    let devices = pair();
    let engine = load(&devices, batches_elsewhere).unwrap();
    let caches = |device: &FakeDevice| -> usize {
        device.log.lock().unwrap().allocated.iter().filter(|a| a.0 == BufferUse::KvCache).count()
    };
    let mut session = engine.session().unwrap();
    assert_eq!((caches(&devices[0]), caches(&devices[1])), (8, 8));
    let attention = &engine.model().layers[0].attention;
    let position = 8 * 2 * 2 * (attention.n_head_kv * attention.head_dim) as u64;
    let moved = |session: &crate::Session| session.statistics().kv_bytes_moved / position;
    session.prefill(&[1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
    assert_eq!(moved(&session), 0);
    session.decode(1).unwrap();
    session.decode(2).unwrap();
    assert_eq!(moved(&session), 9);
    // A single id is a batch here, so that how ids are divided changes nothing.
    session.prefill(&[3]).unwrap();
    assert_eq!(moved(&session), 9 + 2, "the nine are there still");
    session.rewind(4).unwrap();
    session.decode(5).unwrap();
    assert_eq!(moved(&session), 9 + 2, "both caches have the first four positions");
    session.prefill(&[6, 7]).unwrap();
    assert_eq!(moved(&session), 9 + 2 + 1);
    let kinds: Vec<String> = session.statistics().stages.into_iter().map(|stage| stage.what).collect();
    assert_eq!(kinds.iter().filter(|what| *what == "kv_export").count(), 2, "there and back: {kinds:?}");
}

#[test]
fn a_long_sequence_is_moved_a_piece_at_a_time() {
    let devices = pair();
    let options = EngineOptions { context: 1300, batch: 256, ..options() };
    let engine = load_on([&devices[0], &devices[1]], FakePlanner(batches_elsewhere), options).unwrap();
    let mut session = engine.session().unwrap();
    let ids = vec![1; 1200];
    session.prefill(&ids).unwrap();
    let live = |device: &FakeDevice| device.log.lock().unwrap().live.len();
    let before = [live(&devices[0]), live(&devices[1])];
    session.decode(1).unwrap();
    let attention = &engine.model().layers[0].attention;
    let position = 4 * (attention.n_head_kv * attention.head_dim) as u64;
    let (pieces, at_once) = (1200u64.div_ceil((1 << 19) / position), (1 << 19) / position);
    assert!(pieces > 1 && 1200 % at_once != 0, "{at_once} positions at once show nothing");
    let stages = session.statistics().stages;
    let export = stages.iter().find(|stage| stage.what == "kv_export").unwrap();
    assert_eq!((export.submissions, session.statistics().kv_bytes_moved), (8 * pieces, 8 * 1200 * position));
    // No list is made for it, nor is any later.
    session.rewind(40).unwrap();
    session.prefill(&ids[..7]).unwrap();
    session.decode(1).unwrap();
    assert_eq!([live(&devices[0]), live(&devices[1])], before);
}

#[test]
fn a_lost_device_is_named_with_what_it_was_doing() {
    for at in 0..2 {
        let devices = pair();
        let mut session = load(&devices, batches_elsewhere).unwrap().session().unwrap();
        session.prefill(&[1, 2]).unwrap();
        session.decode(3).unwrap();
        {
            let mut log = devices[at].log.lock().unwrap();
            log.fail_after = Some(log.submissions.len() + 3);
        }
        let error = session.decode(4).unwrap_err();
        let name = ["first", "second"][at];
        assert!(matches!(&error, RuntimeError::Device { device, .. } if device == name), "{error}");
        assert!(error.to_string().contains("decoding (from blk."), "{error}");
        assert_eq!(session.tokens(), [1, 2, 3]);
        devices[at].log.lock().unwrap().fail_after = None;
        session.decode(4).unwrap();
        assert_eq!(session.tokens(), [1, 2, 3, 4]);
    }
}

#[test]
fn what_needs_one_device_names_those_of_the_plan() {
    let engine = load(&pair(), divide).unwrap();
    let error = crate::Observer::new(&engine, crate::Wanted::default()).err().unwrap().to_string();
    assert!(
        error.contains("observing neurons needs a model on one device") && error.contains("first, second")
    );
}
