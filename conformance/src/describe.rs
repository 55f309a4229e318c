//! A problem in words: types of its operands, and the numbers and choices that an operation takes beside them.

use crate::problem::Problem;
use crate::spec::Spec;
use engine_core::ComputeBackend;
use engine_core::backend::SequenceSpan;
use engine_core::operation::{
    Accumulation, Activation, Arithmetic, DownLayout, Ffn, Gating, NormKind, OperationKind, Quantization,
    Rope, RopeScaling, RopeStyle, Selection, SlotRole,
};
use serde::{Deserialize, Serialize};

/// What a case computes, for a person who wants to do it again elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Operands with their types, tokens and ranges.
    pub shape: String,
    /// The operation's own parameters, positions, arithmetic, and how rows lie.
    pub parameters: String,
}

impl Description {
    /// Of a problem.
    pub fn of(problem: &Problem) -> Description {
        Description { shape: shape_of(problem), parameters: parameters_of(problem) }
    }

    /// Of what a specification makes; empty where it cannot be made.
    pub fn of_spec(spec: &Spec, seed: u64, oracle: &dyn ComputeBackend) -> Description {
        spec.build(seed, oracle).map(|problem| Description::of(&problem)).unwrap_or_default()
    }
}

/// The operands of a problem with one operation, in words.
pub fn shape_of(problem: &Problem) -> String {
    let Some(operation) = problem.list.operations.first() else { return String::new() };
    let operands = operation.kind.operands();
    let parts = operands.iter().map(|o| format!("{} {}", o.field, problem.tensor(o.slot)));
    let mut text = parts.collect::<Vec<_>>().join(", ");
    text.push_str(&match (problem.tokens, problem.list.token_capacity) {
        (1, 1) => "; 1 token".to_owned(),
        (tokens, capacity) if tokens == capacity => format!("; {tokens} tokens"),
        (tokens, capacity) => format!("; {tokens} of up to {capacity} tokens"),
    });
    for (_, ranges) in &problem.ranges {
        let ranges: Vec<String> = ranges.iter().map(ToString::to_string).collect();
        text.push_str(&format!("; neurons [{}]", ranges.join(", ")));
    }
    text
}

/// What the first operation takes beside its operands, in words.
pub fn parameters_of(problem: &Problem) -> String {
    let Some(operation) = problem.list.operations.first() else { return String::new() };
    let mut parts = vec![of_kind(&operation.kind).join(", ")];
    let positions = matches!(
        operation.kind,
        OperationKind::Rope(_)
            | OperationKind::Attention { .. }
            | OperationKind::KvAppend { .. }
            | OperationKind::KvExport { .. }
            | OperationKind::KvImport { .. }
    );
    if positions {
        parts.extend(problem.sequences.iter().map(of_sequence));
    }
    if multiplies(&operation.kind) {
        parts.push(of_arithmetic(operation.arithmetic));
    }
    parts.extend(of_rows(problem));
    parts.retain(|part| !part.is_empty());
    parts.join("; ")
}

fn of_kind(kind: &OperationKind) -> Vec<String> {
    let flag = |on: bool, text: &str| on.then(|| text.to_owned());
    match kind {
        OperationKind::Embed { scale, .. } => vec![format!("scale {scale}")],
        OperationKind::Norm { norm, epsilon, input, output, .. } => {
            let name = match norm {
                NormKind::Rms => "root mean square",
                NormKind::Layer => "mean and variance",
                _ => "an unknown norm",
            };
            let mut parts = vec![name.to_owned(), format!("epsilon {epsilon:e}")];
            parts.extend(flag(input == output, "in place"));
            parts
        }
        OperationKind::Linear { accumulate, .. } => {
            flag(*accumulate, "added to what the output holds").into_iter().collect()
        }
        OperationKind::Rope(rope) => of_rope(rope),
        OperationKind::KvAppend { kv_heads, head_dim, .. }
        | OperationKind::KvExport { kv_heads, head_dim, .. }
        | OperationKind::KvImport { kv_heads, head_dim, .. } => {
            vec![format!("{kv_heads} key/value heads"), format!("head size {head_dim}")]
        }
        OperationKind::Attention { heads, kv_heads, head_dim, scale, window, soft_cap, .. } => {
            let mut parts = vec![
                format!("{heads} heads"),
                format!("{kv_heads} key/value heads"),
                format!("head size {head_dim}"),
                format!("score scale {scale}"),
            ];
            parts.push(window.map_or("no window".into(), |w| format!("window of {w} positions")));
            parts.push(soft_cap.map_or("no soft cap".into(), |c| format!("soft cap {c}")));
            parts
        }
        OperationKind::Ffn(ffn) => of_ffn(ffn),
        OperationKind::Experts(op) => {
            let mut parts = vec![format!("{} experts", op.experts)];
            parts.extend(of_ffn(&crate::spec::layer_of(op)));
            parts
        }
        OperationKind::Route { gating, normalise, scale, .. } => {
            let gating = match gating {
                Gating::Softmax => "softmax over all experts",
                Gating::Sigmoid => "sigmoid of each expert",
                _ => "an unknown gating",
            };
            let mut parts = vec![gating.to_owned(), format!("scale {scale}")];
            parts.extend(flag(*normalise, "shares of the chosen sum to 1"));
            parts
        }
        OperationKind::Predict { threshold, .. } => vec![format!("threshold {threshold}")],
        OperationKind::Activate { function, input, output } => {
            let mut parts = vec![format!("function {}", function.name())];
            parts.extend(flag(input == output, "in place"));
            parts
        }
        OperationKind::Add { left, right, output } | OperationKind::Multiply { left, right, output } => {
            flag(left == output || right == output, "in place").into_iter().collect()
        }
        _ => Vec::new(),
    }
}

fn of_rope(rope: &Rope) -> Vec<String> {
    let style = match rope.style {
        RopeStyle::Interleaved => "pairs (2j, 2j+1)".to_owned(),
        RopeStyle::Halves => format!("pairs (j, j+{})", rope.rotary_dim / 2),
        _ => "pairs of an unknown style".to_owned(),
    };
    let scaling = match rope.scaling {
        RopeScaling::None => "no scaling".to_owned(),
        RopeScaling::Linear { factor } => format!("linear scaling {factor}"),
        RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => format!(
            "YaRN scaling {factor} (original context {original_context}, attention factor {attention_factor}, beta \
             {beta_fast} and {beta_slow})"
        ),
        _ => "an unknown scaling".to_owned(),
    };
    let mut parts = vec![
        style,
        format!("base {}", rope.base),
        format!("head size {}", rope.head_dim),
        format!("{} of it rotated", rope.rotary_dim),
        scaling,
    ];
    if rope.factors.is_some() {
        parts.push("with frequency factors".into());
    }
    if rope.input == rope.output {
        parts.push("in place".into());
    }
    parts
}

fn of_ffn(ffn: &Ffn) -> Vec<String> {
    let mut parts = vec![
        of_functions(ffn.gate.is_some(), ffn.function, ffn.up_function),
        of_selection(ffn.selection, ffn.function),
        of_layout(ffn.down_layout).to_owned(),
    ];
    if ffn.accumulate {
        parts.push("added to what the output holds".into());
    }
    parts
}

fn of_functions(gate: bool, function: Activation, up: Activation) -> String {
    match (gate, up) {
        (false, _) => format!("h = {}(up)", function.name()),
        (true, Activation::Identity) => format!("h = {}(gate) * up", function.name()),
        (true, up) => format!("h = {}(gate) * {}(up)", function.name(), up.name()),
    }
}

fn of_selection(selection: Selection, function: Activation) -> String {
    match selection {
        Selection::All => "all neurons of the ranges".into(),
        Selection::Mask(_) => "neurons chosen by the mask".into(),
        Selection::GateFirst => "gate first".into(),
        Selection::Threshold(t) => format!("neurons with |{}(gate)| > {t}", function.name()),
        Selection::Bitplane(rule) => format!(
            "neurons that the high halves keep, with {} deviations, above {}",
            rule.deviations, rule.threshold
        ),
        _ => "an unknown selection".into(),
    }
}

fn of_layout(layout: DownLayout) -> &'static str {
    match layout {
        DownLayout::NeuronRows => "down stored with a row per neuron",
        DownLayout::OutputRows => "down stored with a row per output",
    }
}

fn of_sequence(span: &SequenceSpan) -> String {
    let (first, last) = (span.past, span.past + span.tokens.max(1) - 1);
    let positions =
        if first == last { format!("position {first}") } else { format!("positions {first}..={last}") };
    let base = if span.cache_base == 0 { String::new() } else { format!(", cache from {}", span.cache_base) };
    format!("tokens {}..{} at {positions}{base}", span.first_token, span.first_token + span.tokens)
}

fn multiplies(kind: &OperationKind) -> bool {
    matches!(
        kind,
        OperationKind::Linear { .. }
            | OperationKind::Ffn(_)
            | OperationKind::Experts(_)
            | OperationKind::Predict { .. }
    )
}

fn of_arithmetic(arithmetic: Arithmetic) -> String {
    let name = |quantization| match quantization {
        Quantization::None => "f32",
        Quantization::Int8Blocks => "int8 (blocks of 32)",
        _ => "an unknown type",
    };
    let sums = match arithmetic.accumulation {
        Accumulation::F32 => "f32",
        Accumulation::F16 => "f16",
        _ => "unknown",
    };
    if arithmetic.input == arithmetic.hidden {
        format!("{} activations, {sums} sums", name(arithmetic.input))
    } else {
        format!(
            "{} input, {} hidden activations, {sums} sums",
            name(arithmetic.input),
            name(arithmetic.hidden)
        )
    }
}

/// How weights lie, where that is not the plainest.
fn of_rows(problem: &Problem) -> Vec<String> {
    let mut parts = Vec::new();
    for slot in &problem.list.slots {
        let (row, stride) = (slot.tensor.row_bytes(), slot.tensor.row_stride);
        if stride != row {
            parts.push(format!("`{}` with a row of {row} bytes every {stride}", slot.name));
        }
    }
    let weights = ["weight", "up", "table", "fc1"];
    let bound = |slot: &&engine_core::operation::Slot| {
        weights.contains(&slot.name.as_str()) && !matches!(slot.role, SlotRole::Constant(_))
    };
    if problem.list.slots.iter().any(|slot| bound(&slot)) {
        parts.push("weights bound at submit".into());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Action;
    use crate::matrix::all;

    /// Specifications that need no oracle, one of a kind.
    #[test]
    fn says_what_an_operation_takes() {
        let cases = all();
        let of = |name: &str| {
            let case = cases.iter().find(|c| c.name == name).unwrap_or_else(|| panic!("no case {name}"));
            let Action::Values(spec) = &case.action else { panic!("{name} compares no values") };
            let made = match spec {
                Spec::Rope(s) => s.build(&mut crate::rng::Rng::new(1)),
                Spec::Attention(s) => s.build(&mut crate::rng::Rng::new(1)),
                Spec::Linear(s) => s.build(&mut crate::rng::Rng::new(1)),
                Spec::Norm(s) => s.build(&mut crate::rng::Rng::new(1)),
                other => panic!("{other:?}"),
            };
            let described = Description::of(&made.unwrap());
            format!("{name}\n  {}\n  {}\n", described.shape, described.parameters)
        };
        let page: String = [
            "rope/f32/halves/partial/yarn/several",
            "rope/f32/interleaved/whole/none/far",
            "attention/f16/window/grouped/sequences/plain",
            "linear/q8_0/int8/gemm/plain",
            "linear/q8_0/int8/tall/plain",
            "norm/f32/rms/groups/plain",
        ]
        .map(of)
        .concat();
        insta::assert_snapshot!("parameters", page);
    }
}
