//! Shapes, selections and arithmetic of the lists made from the story model.

use super::*;
use crate::fakes::story;
use crate::profile::uniform_plan;
use engine_core::operation::{DownLayout, Ffn, OperationKind, Place, Quantization, Selection, SlotRole};
use engine_core::planner::{FfnShare, SparsityPolicy};
use engine_core::{ClusterSet, DType};
use formats::GgufFile;

fn model() -> ModelDescription {
    ModelDescription::from_gguf(&GgufFile::open(story()).unwrap()).unwrap()
}

fn options<'a>(model: &'a ModelDescription, plan: &'a [LayerPlan]) -> GraphOptions<'a> {
    static DEVICES: std::sync::LazyLock<[OnDevice; 2]> =
        std::sync::LazyLock::new(|| [OnDevice::plain(64), OnDevice::plain(32)]);
    GraphOptions {
        model,
        plan,
        embedding: 0,
        activations: Activations::Int8,
        context: 64,
        count_active: false,
        devices: &*DEVICES,
    }
}

fn ffns(graph: &Graph) -> Vec<&Ffn> {
    let mut ffns = Vec::new();
    for operation in &graph.list.operations {
        if let OperationKind::Ffn(ffn) = &operation.kind {
            ffns.push(ffn);
        }
    }
    ffns
}

#[test]
fn a_layer_is_attention_then_feed_forward() {
    let model = model();
    let plan = uniform_plan(&model, SparsityPolicy::Dense);
    let graph = step(options(&model, &plan)).unwrap();
    let labels: Vec<&str> = graph.list.operations.iter().map(|operation| operation.label.as_str()).collect();
    assert_eq!(labels[..3], ["ids", "token_embd", "blk.0.attn_norm"]);
    let layer: Vec<&str> = labels.iter().filter_map(|label| label.strip_prefix("blk.7.")).collect();
    let wanted = [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "rope_q",
        "rope_k",
        "kv_append",
        "attention",
        "attn_output",
        "ffn_norm",
        "ffn",
    ];
    assert_eq!(layer, wanted);
    assert_eq!(labels[labels.len() - 3..], ["output_norm", "output", "logits"]);
    assert_eq!(labels.len(), 2 + 8 * wanted.len() + 3);
    assert_eq!(graph.caches.len(), 8);
    assert!(graph.ranges.is_empty() && graph.active.is_empty());
}

#[test]
fn tied_embeddings_are_one_weight() {
    let model = model();
    let plan = uniform_plan(&model, SparsityPolicy::Dense);
    let graph = step(options(&model, &plan)).unwrap();
    let tables = graph.weights.iter().filter(|tensor| tensor.name == "token_embd.weight").count();
    assert_eq!(tables, 1);
    // Nine weights per layer, the embedding and the last norm; no predictors.
    assert_eq!(graph.weights.len(), 8 * 9 + 2);
}

#[test]
fn three_lists_bind_what_passes_between_them() {
    let model = model();
    let plan = uniform_plan(&model, SparsityPolicy::Dense);
    let body = body(options(&model, &plan), 5).unwrap();
    let head = head(options(&model, &plan), 1).unwrap();
    let of = |graph: &Graph, slot: Option<SlotId>| graph.list.slot(slot.unwrap()).unwrap().clone();
    let (left, taken) = (of(&body, body.residual), of(&head, head.residual));
    assert_eq!((left.role, taken.role), (SlotRole::State, SlotRole::State));
    assert_eq!(left.tensor.row_stride, taken.tensor.row_stride);
    assert_eq!((left.tensor.rows, taken.tensor.rows), (5, 1));
    assert!(body.logits.is_none() && head.ids.is_none() && head.caches.is_empty());
    let logits = of(&head, head.logits);
    assert_eq!((logits.place, logits.tensor.columns), (Place::Host, model.vocab_size as u64));
    // Rows can be bound one by one: an odd alignment makes gaps.
    assert_eq!(residual_stride(&model, 4096), 4096);
    assert_eq!(residual_stride(&model, 1), model.n_embd as u64 * 4);
}

#[test]
fn policies_become_selections() {
    let model = model();
    let first = |policy, capacity| {
        let plan = uniform_plan(&model, policy);
        let graph = match capacity {
            1 => step(options(&model, &plan)).unwrap(),
            more => body(options(&model, &plan), more).unwrap(),
        };
        let predicts =
            graph.list.operations.iter().filter(|o| matches!(o.kind, OperationKind::Predict { .. })).count();
        (ffns(&graph)[0].selection, predicts)
    };
    assert_eq!(first(SparsityPolicy::Dense, 1), (Selection::All, 0));
    assert_eq!(first(SparsityPolicy::GateFirst, 1), (Selection::GateFirst, 0));
    assert_eq!(first(SparsityPolicy::GateFirst, 8), (Selection::All, 0), "exact, so prefill may be dense");
    assert_eq!(first(SparsityPolicy::Threshold { threshold: 0.5 }, 8), (Selection::Threshold(0.5), 0));
    for capacity in [1, 8] {
        let (selection, predicts) = first(SparsityPolicy::Predictor { threshold: 0.0 }, capacity);
        assert!(matches!(selection, Selection::Mask(_)) && predicts == 8);
    }
}

#[test]
fn the_predictor_sees_the_residual_before_the_norm() {
    let model = model();
    let plan = uniform_plan(&model, SparsityPolicy::Predictor { threshold: 0.25 });
    let graph = body(options(&model, &plan), 4).unwrap();
    let at = graph.list.operations.iter().position(|o| o.label == "blk.3.predict").unwrap();
    let OperationKind::Predict { input, threshold, .. } = graph.list.operations[at].kind else { panic!() };
    assert_eq!((Some(input), threshold), (graph.residual, 0.25));
    assert_eq!(graph.list.operations[at - 1].label, "blk.3.attn_output");
    assert_eq!(graph.list.operations[at + 1].label, "blk.3.ffn_norm");
}

#[test]
fn the_predictor_may_see_the_layers_input() {
    let mut model = model();
    model.prediction.as_mut().unwrap().input = formats::model::PredictorInput::LayerInput;
    let plan = uniform_plan(&model, SparsityPolicy::Predictor { threshold: 0.25 });
    let graph = body(options(&model, &plan), 4).unwrap();
    let operations = &graph.list.operations;
    let at = operations.iter().position(|o| o.label == "blk.3.predict").unwrap();
    let OperationKind::Predict { input, mask, .. } = operations[at].kind else { panic!() };
    assert_eq!(Some(input), graph.residual);
    assert_eq!(operations[at - 1].label, "blk.2.ffn");
    assert_eq!(operations[at + 1].label, "blk.3.attn_norm");
    assert_eq!(ffns(&graph)[3].selection, Selection::Mask(mask));
}

fn layer_labels(model: &ModelDescription) -> Vec<String> {
    let plan = uniform_plan(model, SparsityPolicy::Dense);
    let graph = step(options(model, &plan)).unwrap();
    let labels = graph.list.operations.iter().filter_map(|operation| operation.label.strip_prefix("blk.2."));
    labels.map(str::to_owned).collect()
}

#[test]
fn parallel_halves_see_the_same_residual() {
    let mut model = model();
    model.layers[2].parallel = true;
    let labels = layer_labels(&model);
    assert_eq!(labels[..3], ["attn_norm", "ffn_norm", "attn_q"], "before attention adds to the residual");
    assert_eq!(labels[labels.len() - 2..], ["attn_output", "ffn"]);
    model.layers[2].ffn_norm = model.layers[2].attn_norm.clone();
    assert_eq!(layer_labels(&model)[..2], ["attn_norm", "attn_q"], "one norm is computed once");
}

#[test]
fn norms_behind_a_branch_come_before_the_residual() {
    let mut model = model();
    let norm = model.output_norm.clone();
    (model.layers[2].attn_post_norm, model.layers[2].ffn_post_norm) = (Some(norm.clone()), Some(norm));
    let labels = layer_labels(&model);
    let wanted = [
        "attention",
        "attn_output",
        "post_attention_norm",
        "post_attention_norm.add",
        "ffn_norm",
        "ffn",
        "post_ffw_norm",
        "post_ffw_norm.add",
    ];
    assert_eq!(labels[labels.len() - wanted.len()..], wanted);
    // Two shares: the first writes the branch, the second adds to it.
    let mut plan = uniform_plan(&model, SparsityPolicy::Dense);
    let hot = ClusterSet::from_ranges(vec![ClusterRange::new(0, 256)]).unwrap();
    let share = |clusters| FfnShare { device: 0, clusters, sparsity: SparsityPolicy::Dense };
    plan[2].ffn = vec![share(hot.complement(1024)), share(hot)];
    let graph = step(options(&model, &plan)).unwrap();
    let accumulate: Vec<bool> = ffns(&graph)[2..4].iter().map(|ffn| ffn.accumulate).collect();
    assert_eq!(accumulate, [false, true]);
}

#[test]
fn learned_positions_are_bound_and_bounded() {
    let file = |name: &str| {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        ModelDescription::describe(&GgufFile::open(folder).unwrap()).unwrap()
    };
    let model = file("opt");
    let plan = uniform_plan(&model, SparsityPolicy::Dense);
    let graph = body(options(&model, &plan), 4).unwrap();
    let labels: Vec<&str> = graph.list.operations.iter().map(|operation| operation.label.as_str()).collect();
    let wanted = ["ids", "token_embd", "positions", "position_embd", "position_embd.add", "blk.0.attn_norm"];
    assert_eq!(labels[..6], wanted);
    assert!(graph.positions.is_some() && !labels.iter().any(|label| label.contains("rope")));
    let refused = |context| {
        let mut options = crate::EngineOptions { context, ..crate::EngineOptions::default() };
        crate::planning::check_options(&model, &mut options).map_err(|error| error.to_string())
    };
    assert_eq!((refused(0), refused(64)), (Ok(64), Ok(64)));
    assert!(refused(65).unwrap_err().contains("learned 64 positions"));
}

#[test]
fn shares_of_one_device_cover_their_ranges() {
    let model = model();
    let mut plan = uniform_plan(&model, SparsityPolicy::Dense);
    let hot = ClusterSet::from_ranges(vec![ClusterRange::new(0, 256)]).unwrap();
    plan[2].ffn = vec![
        FfnShare { device: 0, clusters: hot.complement(1024), sparsity: SparsityPolicy::GateFirst },
        FfnShare { device: 0, clusters: hot, sparsity: SparsityPolicy::Dense },
    ];
    let mut with_counts = options(&model, &plan);
    with_counts.count_active = true;
    let graph = step(with_counts).unwrap();
    assert_eq!(ffns(&graph).len(), 9);
    let ranges: Vec<_> = graph.ranges.iter().map(|(_, ranges)| ranges.clone()).collect();
    assert_eq!(ranges, [vec![ClusterRange::new(256, 1024)], vec![ClusterRange::new(0, 256)]]);
    for (operation, _) in &graph.ranges {
        assert_eq!(graph.list.operations[*operation as usize].label, "blk.2.ffn");
    }
    let layers: Vec<usize> = graph.active.iter().map(|(layer, _)| *layer).collect();
    assert_eq!(layers, [0, 1, 2, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn arithmetic_follows_options_and_dtypes() {
    let mut model = model();
    let plan = uniform_plan(&model, SparsityPolicy::Dense);
    let arithmetic = |model: &ModelDescription, activations, label: &str| {
        let options = GraphOptions { activations, ..options(model, &plan) };
        let graph = step(options).unwrap();
        let operation =
            graph.list.operations.iter().find(|operation| operation.label == label).unwrap().clone();
        (operation.arithmetic.input, operation.arithmetic.hidden)
    };
    use Quantization::{Int8Blocks, None};
    assert_eq!(arithmetic(&model, Activations::Int8, "blk.0.attn_q"), (Int8Blocks, None));
    assert_eq!(arithmetic(&model, Activations::F32, "blk.0.attn_q"), (None, None));
    assert_eq!(arithmetic(&model, Activations::Int8, "blk.0.ffn"), (Int8Blocks, Int8Blocks));
    assert_eq!(arithmetic(&model, Activations::F32, "output"), (None, None));
    model.layers[0].attention.q.weight.dtype = DType::F16;
    model.layers[0].ffn.up.weight.dtype = DType::F16;
    assert_eq!(arithmetic(&model, Activations::Int8, "blk.0.attn_q"), (None, None));
    assert_eq!(arithmetic(&model, Activations::Int8, "blk.0.ffn"), (None, Int8Blocks));
    // Down with a row per neuron, as PowerInfer stores it.
    let down = model.layers[1].ffn.down.linear().clone();
    let mut transposed = down.clone();
    transposed.weight.dims = vec![model.n_embd as u64, 1024];
    model.layers[1].ffn.down = formats::model::Down::Transposed(transposed);
    assert_eq!(arithmetic(&model, Activations::Int8, "blk.1.ffn"), (Int8Blocks, None));
    let graph = step(options(&model, &plan)).unwrap();
    assert_eq!(ffns(&graph)[1].down_layout, DownLayout::NeuronRows);
}

#[test]
fn what_cannot_be_expressed_is_refused() {
    let mut model = model();
    let plan = uniform_plan(&model, SparsityPolicy::Dense);
    let refusal =
        |model: &ModelDescription, plan: &[LayerPlan]| step(options(model, plan)).err().unwrap().to_string();
    assert!(refusal(&model, &plan[..3]).contains("layer 3"));
    let predicted = uniform_plan(&model, SparsityPolicy::Predictor { threshold: 0.0 });
    model.layers[5].ffn.predictor = None;
    let text = refusal(&model, &predicted);
    assert!(text.contains("blk.5.fc1"), "{text}");
    model.layers[4].attention.value_dim = 16;
    assert!(refusal(&model, &plan).contains("layer 4"));
    model.layers[4].attention.value_dim = model.layers[4].attention.head_dim;
    model.layers[6].attn_norm.dtype = DType::I32;
    let text = refusal(&model, &plan);
    assert!(text.contains("blk.6.attn_norm") && text.contains("I32"), "{text}");
}

#[test]
fn observed_layers_give_what_is_wanted_and_no_more() {
    let model = model();
    let plan = uniform_plan(&model, SparsityPolicy::Dense);
    let observed = |wanted| {
        let graph = observed(options(&model, &plan), 5, wanted).unwrap();
        let seen = graph.observed.iter().filter(|seen| seen.layer == 3);
        let columns = |seen: &Seen| graph.list.slot(seen.slot).unwrap().tensor.columns;
        seen.map(|seen| (seen.kind, columns(seen))).collect::<Vec<_>>()
    };
    let all = Wanted { input: true, residual: true, hidden: true, chosen: true };
    assert_eq!(observed(all), [(Kind::Residual, 256), (Kind::Input, 256), (Kind::Hidden, 1024)]);
    let hidden = Wanted { hidden: true, ..Wanted::default() };
    assert_eq!(observed(hidden), [(Kind::Hidden, 1024)]);
    // The residual is copied when attention is in it, the input when it is normed.
    let graph = super::observed(options(&model, &plan), 5, all).unwrap();
    let labels = graph.list.operations.iter().filter_map(|operation| operation.label.strip_prefix("blk.3."));
    let labels: Vec<&str> = labels.skip_while(|label| *label != "attn_output").collect();
    assert_eq!(labels, ["attn_output", "residual", "ffn_norm", "input", "ffn", "hidden"]);
}
