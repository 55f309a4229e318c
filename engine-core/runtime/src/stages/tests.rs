//! Where lists are cut, and what passes between the parts.

use super::*;
use crate::fakes::story;
use crate::graph::{GraphOptions, OnDevice, body, head, step};
use crate::options::Activations;
use crate::profile::uniform_plan;
use engine_core::operation::{OperationKind, SlotRole};
use engine_core::planner::{FfnShare, LayerPlan, PrefillPlan, PrefillShare, SparsityPolicy};
use engine_core::{ClusterRange, ClusterSet};
use formats::{GgufFile, ModelDescription};

fn model() -> ModelDescription {
    ModelDescription::from_gguf(&GgufFile::open(story()).unwrap()).unwrap()
}

fn set(ranges: &[(u32, u32)]) -> ClusterSet {
    ClusterSet::from_ranges(ranges.iter().map(|(a, b)| ClusterRange::new(*a, *b)).collect()).unwrap()
}

fn with<T>(
    model: &ModelDescription,
    plan: &[LayerPlan],
    devices: &[OnDevice],
    made: impl FnOnce(GraphOptions<'_>) -> T,
) -> T {
    made(GraphOptions {
        model,
        plan,
        embedding: 0,
        activations: Activations::F32,
        context: 64,
        count_active: false,
        devices,
    })
}

type Make = fn(GraphOptions<'_>) -> crate::Result<Graph>;

fn plain() -> Vec<OnDevice> {
    vec![OnDevice::plain(64), OnDevice::plain(32)]
}

/// Attention on device 0, the first 256 neurons of every layer on device 1.
fn divided(model: &ModelDescription) -> Vec<LayerPlan> {
    let mut plan = uniform_plan(model, SparsityPolicy::GateFirst);
    for layer in &mut plan {
        let hot = FfnShare { device: 1, clusters: set(&[(0, 256)]), sparsity: SparsityPolicy::Dense };
        layer.ffn[0].clusters = hot.clusters.complement(1024);
        layer.ffn.insert(0, hot);
    }
    plan
}

fn labels(stage: &Stage) -> Vec<&str> {
    stage.list.operations.iter().map(|operation| operation.label.as_str()).collect()
}

#[test]
fn one_device_is_one_stage_and_the_list_as_it_is() {
    let model = model();
    let plan = uniform_plan(&model, SparsityPolicy::GateFirst);
    let makes: [Make; 3] = [step, |options| body(options, 5), |options| head(options, 3)];
    for made in makes {
        let graph = with(&model, &plan, &plain(), made).unwrap();
        let wanted: Vec<String> =
            graph.list.operations.iter().map(|operation| format!("{:?}", operation.arithmetic)).collect();
        let (count, labels_wanted) = (
            graph.list.slots.len(),
            graph.list.operations.iter().map(|operation| operation.label.clone()).collect::<Vec<_>>(),
        );
        let program = Program::of(graph, &[]).unwrap();
        let [stage] = &program.stages[..] else { panic!("{} stages", program.stages.len()) };
        assert_eq!(labels(stage), labels_wanted);
        let found: Vec<String> =
            stage.list.operations.iter().map(|operation| format!("{:?}", operation.arithmetic)).collect();
        assert_eq!((found, stage.list.slots.len()), (wanted, count));
        assert!(stage.waits.is_empty() && program.exchanges.is_empty() && program.kept.is_empty());
    }
}

#[test]
fn shares_of_one_layer_wait_for_the_same_stage_and_not_for_each_other() {
    let model = model();
    let program =
        with(&model, &divided(&model), &plain(), |options| Program::of(step(options).unwrap(), &[]).unwrap());
    // What comes before the network, its two shares; from the merge on the next layer.
    assert_eq!(program.stages.len(), 3 * 8 + 1);
    let devices: Vec<u32> = program.stages[..7].iter().map(|stage| stage.device).collect();
    assert_eq!(devices, [0, 1, 0, 0, 1, 0, 0]);
    let waits: Vec<&[usize]> = program.stages[..7].iter().map(|stage| &stage.waits[..]).collect();
    assert_eq!(waits, [&[][..], &[0], &[], &[1], &[3], &[], &[4]]);
    assert_eq!(
        labels(&program.stages[1]),
        ["normed from the host", "blk.0.ffn", "partial sum of device 1 to the host"]
    );
    assert_eq!(labels(&program.stages[2]), ["blk.0.ffn"]);
    let next = labels(&program.stages[3]);
    assert_eq!(next[..3], ["partial sum of device 1 from the host", "blk.0.ffn.merge", "blk.1.attn_norm"]);
    assert_eq!(next[next.len() - 2..], ["blk.1.ffn_norm", "normed to the host"]);
    // One row of the residual's width each way, and what stays: the residual and the normed input.
    assert_eq!(program.exchanges, [1024, 1024]);
    assert_eq!(program.kept, [(0, 1024), (0, 1024)]);
    // A kind has every layer's stages.
    let kinds: Vec<(u32, &str)> = program.kinds.iter().map(|kind| (kind.device, &kind.what[..])).collect();
    let wanted =
        [(0, "ids..ffn_norm"), (1, "ffn"), (0, "ffn"), (0, "ffn.merge..ffn_norm"), (0, "ffn.merge..logits")];
    assert_eq!(kinds, wanted);
}

#[test]
fn each_device_has_the_weights_that_it_reads() {
    let model = model();
    let mut devices = plain();
    devices[1].held = vec![Some(set(&[(0, 256)])); 8];
    let program =
        with(&model, &divided(&model), &devices, |options| Program::of(step(options).unwrap(), &[]).unwrap());
    let names: Vec<&str> = program.weights[&1].iter().map(|weight| weight.name.as_str()).collect();
    let wanted =
        ["blk.0.ffn_gate.weight[0..256]", "blk.0.ffn_up.weight[0..256]", "blk.0.ffn_down.weight[0..256]"];
    assert_eq!(names[..3], wanted);
    assert_eq!(names.len(), 3 * 8);
    let rows: Vec<(u64, u64)> =
        program.weights[&1][..3].iter().map(|weight| (weight.shape.rows, weight.shape.columns)).collect();
    assert_eq!(rows, [(256, 256), (256, 256), (256, 256)], "a down by output has a column per neuron");
    let quarter = (256 + 256 + 256) / 32 * 34 * 256 * 8;
    assert_eq!(program.weights[&1].iter().map(Weight::byte_len).sum::<u64>(), quarter);
    // All of what the device was given: no ranges are bound. The other device views its weights whole.
    assert!(program.stages.iter().all(|stage| stage.device == 0 || stage.ranges.is_empty()));
    assert_eq!(program.stages[2].ranges, [(0, vec![ClusterRange::new(256, 1024)])]);
    assert!(program.weights[&0].iter().any(|weight| weight.name == "blk.0.ffn_up.weight"));
}

#[test]
fn projections_elsewhere_take_what_attention_needs_and_bring_it() {
    let model = model();
    let mut plan = uniform_plan(&model, SparsityPolicy::Dense);
    for layer in &mut plan {
        layer.prefill = Some(PrefillPlan {
            attention: 0,
            projections: 1,
            ffn: vec![PrefillShare { device: 1, clusters: ClusterSet::all(1024) }],
        });
    }
    let program =
        with(&model, &plan, &plain(), |options| Program::of(body(options, 4).unwrap(), &[]).unwrap());
    let without_copies = |stage: &Stage| -> Vec<String> {
        let operations = stage.list.operations.iter().filter(|operation| operation.kind.name() != "copy");
        operations.map(|operation| operation.label.clone()).collect()
    };
    assert_eq!(without_copies(&program.stages[1]), ["blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"]);
    assert_eq!(without_copies(&program.stages[3]), ["blk.0.attn_output"]);
    assert_eq!(without_copies(&program.stages[5]), ["blk.0.ffn"]);
    assert_eq!(
        without_copies(&program.stages[2]),
        ["blk.0.rope_q", "blk.0.rope_k", "blk.0.kv_append", "blk.0.attention"]
    );
    assert!(program.caches.iter().all(|(device, _)| *device == 0));
    let mut only: Vec<&str> = program
        .stages
        .iter()
        .filter(|s| s.device == 1)
        .flat_map(|s| &s.list.operations)
        .map(|o| o.kind.name())
        .collect();
    only.sort_unstable();
    only.dedup();
    assert_eq!(only, ["copy", "ffn", "linear"]);
}

/// Every value is where it is read: no stage is submitted before what it reads, and none overwrites what another device
/// has still to read.
#[test]
fn stages_come_behind_what_they_read() {
    let model = model();
    let mut plan = divided(&model);
    for (index, layer) in plan.iter_mut().enumerate() {
        // Attention moves from layer to layer, and shares with it.
        layer.attention = (index % 2) as u32;
        layer.prefill = Some(PrefillPlan {
            attention: 1 - layer.attention,
            projections: layer.attention,
            ffn: vec![
                PrefillShare { device: 0, clusters: set(&[(0, 100), (200, 300)]) },
                PrefillShare { device: 1, clusters: set(&[(100, 200), (300, 1024)]) },
            ],
        });
    }
    let makes: [Make; 2] = [step, |options| body(options, 4)];
    for made in makes {
        let program =
            with(&model, &plan, &plain(), |options| Program::of(made(options).unwrap(), &[]).unwrap());
        let mut last_write: std::collections::HashMap<Bind, usize> = Default::default();
        let mut reads: std::collections::HashMap<Bind, Vec<usize>> = Default::default();
        let after = |stage: usize, before: usize| {
            let mut known = vec![stage];
            let mut at = 0;
            while let Some(&next) = known.get(at) {
                let device = program.stages[next].device;
                let same = (0..next).rev().find(|other| program.stages[*other].device == device);
                for earlier in program.stages[next].waits.iter().copied().chain(same) {
                    if !known.contains(&earlier) {
                        known.push(earlier);
                    }
                }
                at += 1;
            }
            known.contains(&before)
        };
        for (at, stage) in program.stages.iter().enumerate() {
            assert!(stage.waits.iter().all(|wait| *wait < at));
            let role = |slot: &SlotId| stage.list.slot(*slot).unwrap().role;
            for (slot, bind) in stage.binds.iter().filter(|(_, bind)| matches!(bind, Bind::Exchange(_))) {
                if role(slot) == SlotRole::Input {
                    assert!(after(at, last_write[bind]), "stage {at} reads {bind:?}");
                    reads.entry(*bind).or_default().push(at);
                } else {
                    let readers = reads.remove(bind).unwrap_or_default();
                    assert!(
                        readers.iter().all(|reader| after(at, *reader)),
                        "stage {at} overwrites {bind:?}"
                    );
                    last_write.insert(*bind, at);
                }
            }
        }
    }
}

#[test]
fn a_move_of_the_cache_is_an_export_and_an_import() {
    let moved = kv::Move { from: 1, to: 0, kv_heads: 2, head_dim: 8, context: 64 };
    let program = moved.program().unwrap();
    let kinds: Vec<Vec<&str>> = program
        .stages
        .iter()
        .map(|stage| stage.list.operations.iter().map(|operation| operation.kind.name()).collect())
        .collect();
    assert_eq!(kinds, [["kv-export", "copy", "copy"], ["copy", "copy", "kv-import"]]);
    assert_eq!(program.exchanges, [64 * 16 * 2; 2], "no more than the cache has");
    assert_eq!(program.stages[1].waits, [0]);
    assert!(matches!(program.stages[0].list.operations[0].kind, OperationKind::KvExport { .. }));
    assert_eq!(moved.back().back(), moved);
    // Whatever the context, as much at once; a position that is more than that goes alone.
    let long = kv::Move { context: 1 << 24, ..moved };
    assert_eq!(long.positions(), (1 << 19) / (2 * 8 * 4));
    assert_eq!(kv::Move { head_dim: 1 << 20, ..long }.positions(), 1);
}
