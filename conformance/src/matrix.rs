//! Every case of the suite for compute devices, by name, from a matrix of operations, types, shapes, values and ranges.

mod experts;
mod planes;

use crate::case::{Action, Case};
use crate::errors;
use crate::properties::Property;
use crate::random::Family;
use crate::rng::hash;
use crate::spec::{
    AttentionSpec, CacheAction, CacheSpec, CopySpec, ElementwiseSpec, EmbedSpec, FUNCTIONS, FfnSpec,
    LinearSpec, MaskShape, NormSpec, PlaneShape, PredictSpec, RANGES, RangeShape, RopeSpec, SELECTS,
    ScalingShape, Select, SequenceShape, Spec,
};
use crate::values::{ValueClass, weight_types};
use engine_core::DType;
use engine_core::operation::{Activation, DownLayout, NormKind, RopeStyle};
use std::collections::BTreeSet;

struct Cases {
    cases: Vec<Case>,
}

impl Cases {
    fn add(&mut self, tail: &str, spec: &Spec, action: Action) {
        let (operation, dtype) = (spec.operation().to_owned(), spec.dtype().name().to_lowercase());
        let name = format!("{operation}/{dtype}/{tail}");
        self.cases.push(Case { name, operation, dtype, sampled: false, action });
    }

    fn values(&mut self, tail: &str, spec: Spec) {
        self.add(tail, &spec.clone(), Action::Values(spec));
    }

    fn property(&mut self, tail: &str, property: Property, spec: Spec) {
        self.add(&format!("{tail}/{}", property.name()), &spec.clone(), Action::Property(property, spec));
    }
}

/// Columns that hold whole blocks of a type and of 32.
fn unit(dtype: DType) -> u64 {
    dtype.block_elements().max(32)
}

fn arithmetic_name(int8: bool) -> &'static str {
    if int8 { "int8" } else { "f32" }
}

/// Every case, in the order of the report.
pub fn all() -> Vec<Case> {
    let mut c = Cases { cases: Vec::new() };
    copies(&mut c);
    embeds(&mut c);
    norms(&mut c);
    linears(&mut c);
    ropes(&mut c);
    elementwise(&mut c);
    caches(&mut c);
    attentions(&mut c);
    ffns(&mut c);
    planes::planes(&mut c);
    ffn_properties(&mut c);
    predicts(&mut c);
    experts::routes(&mut c);
    experts::experts(&mut c);
    for (name, check) in errors::CASES {
        c.cases.push(Case {
            name: format!("device/-/{name}"),
            operation: "device".into(),
            dtype: "-".into(),
            sampled: true,
            action: Action::Error(*check),
        });
    }
    c.property("block/f32", Property::List, Spec::Linear(linear(DType::F32, false, (96, 64), (6, 5))));
    for family in Family::ALL {
        c.cases.push(Case {
            name: format!("{}/any/random", family.name()),
            operation: family.name().into(),
            dtype: "any".into(),
            sampled: true,
            action: Action::Random(family),
        });
    }
    sample(&mut c.cases);
    c.cases
}

/// Marks every ninth case, every property of a plain type, every case of the operations that have few of them, and the
/// first cases of each operation, type and arithmetic.
fn sample(cases: &mut [Case]) {
    let mut seen: BTreeSet<String> = BTreeSet::new();
    for case in cases {
        let head: Vec<&str> = case.name.split('/').take(3).collect();
        let first = seen.insert(head.join("/"));
        let property = matches!(&case.action, Action::Property(_, spec)
            if matches!(spec.dtype(), DType::F32 | DType::F16 | DType::Q8_0 | DType::Q4K));
        let few = matches!(
            case.operation.as_str(),
            "rope" | "norm" | "activate" | "add" | "multiply" | "kv-append" | "kv-export" | "kv-import"
        );
        case.sampled |= first || property || few || hash(&case.name).is_multiple_of(9);
    }
}

fn copies(c: &mut Cases) {
    for dtype in DType::all() {
        for (per_token, strided) in [(false, false), (true, false), (true, true)] {
            let columns = 3 * dtype.block_elements();
            let spec = CopySpec { dtype, rows: 5, columns, per_token, tokens: 3, strided };
            let name = match (per_token, strided) {
                (false, _) => "fixed",
                (true, false) => "per-token",
                (true, true) => "strided",
            };
            c.values(name, Spec::Copy(spec));
        }
    }
}

fn embeds(c: &mut Cases) {
    for dtype in weight_types() {
        for values in ValueClass::ALL {
            let scale = if values == ValueClass::Mixed { 8.0 } else { 1.0 };
            let columns = 2 * unit(dtype);
            let spec = EmbedSpec { dtype, vocabulary: 11, columns, capacity: 7, tokens: 5, scale, values };
            c.values(&format!("f32/{}", values.name()), Spec::Embed(spec));
        }
    }
}

fn norms(c: &mut Cases) {
    for norm in [NormKind::Rms, NormKind::Layer] {
        let kind = if norm == NormKind::Rms { "rms" } else { "layer" };
        for (shape, group, groups) in [("row", 96, 1), ("odd", 77, 1), ("groups", 32, 5), ("wide", 1031, 1)] {
            for values in ValueClass::ALL {
                let bias = norm == NormKind::Layer;
                let in_place = shape == "groups";
                let spec = NormSpec { norm, group, groups, bias, in_place, capacity: 6, tokens: 4, values };
                c.values(&format!("{kind}/{shape}/{}", values.name()), Spec::Norm(spec.clone()));
                if values == ValueClass::Plain {
                    for p in [Property::Repeats, Property::BatchNeighbours] {
                        c.property(&format!("{kind}/{shape}"), p, Spec::Norm(spec.clone()));
                    }
                }
            }
        }
    }
}

fn linear(dtype: DType, int8: bool, shape: (u64, u64), tokens: (u32, u32)) -> LinearSpec {
    LinearSpec {
        dtype,
        rows: shape.0,
        columns: shape.1,
        capacity: tokens.0,
        tokens: tokens.1,
        bias: false,
        accumulate: false,
        int8,
        strided: false,
        constant: true,
        values: ValueClass::Plain,
    }
}

/// Name, (rows, columns), (token capacity, tokens).
type LinearShape = (&'static str, (u64, u64), (u32, u32));

/// Rows and columns that are no multiples of a kernel's tiles, from one row and block up.
fn linear_shapes(dtype: DType) -> Vec<LinearShape> {
    let u = unit(dtype);
    let mut shapes = vec![
        ("one", (1, u), (1, 1)),
        ("gemv", (37, 3 * u), (1, 1)),
        ("gemm", (21, 2 * u), (17, 13)),
        ("tall", (131, u), (4, 2)),
    ];
    if !dtype.is_quantised() {
        shapes.push(("odd", (9, 45), (5, 3)));
    }
    shapes
}

fn linears(c: &mut Cases) {
    for dtype in weight_types() {
        for int8 in [false, true] {
            let arithmetic = arithmetic_name(int8);
            for (name, shape, tokens) in linear_shapes(dtype) {
                for values in ValueClass::ALL {
                    let spec = LinearSpec {
                        values,
                        bias: name == "gemm" || name == "odd",
                        accumulate: name == "gemm" || name == "gemv",
                        strided: name == "tall",
                        constant: name != "tall",
                        ..linear(dtype, int8, shape, tokens)
                    };
                    c.values(&format!("{arithmetic}/{name}/{}", values.name()), Spec::Linear(spec));
                }
            }
            let spec = Spec::Linear(linear(dtype, int8, (19, 2 * unit(dtype)), (9, 9)));
            for p in [
                Property::Repeats,
                Property::Concurrent,
                Property::BatchNeighbours,
                Property::WeightPlacement,
                Property::Import,
            ] {
                c.property(arithmetic, p, spec.clone());
            }
            let accumulating =
                LinearSpec { accumulate: true, ..linear(dtype, int8, (19, 2 * unit(dtype)), (3, 3)) };
            c.property(arithmetic, Property::Order, Spec::Linear(accumulating));
        }
    }
}

fn ropes(c: &mut Cases) {
    for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
        let kind = if style == RopeStyle::Interleaved { "interleaved" } else { "halves" };
        for (shape, heads, head_dim, rotary_dim) in [("whole", 3, 16, 16), ("partial", 2, 24, 10)] {
            for scaling in [ScalingShape::None, ScalingShape::Linear, ScalingShape::Yarn] {
                for (past, sequences) in [
                    ("start", vec![(4, 0)]),
                    ("far", vec![(2, 4095)]),
                    ("several", vec![(2, 0), (1, 700), (3, 31)]),
                ] {
                    let spec = RopeSpec {
                        style,
                        heads,
                        head_dim,
                        rotary_dim,
                        factors: past == "several",
                        scaling,
                        in_place: past == "far",
                        capacity: 8,
                        sequences,
                        values: ValueClass::Plain,
                    };
                    let scaling = format!("{scaling:?}").to_lowercase();
                    c.values(&format!("{kind}/{shape}/{scaling}/{past}"), Spec::Rope(spec.clone()));
                    if past == "several" {
                        for p in [Property::Sequences, Property::BatchNeighbours] {
                            c.property(&format!("{kind}/{shape}/{scaling}"), p, Spec::Rope(spec.clone()));
                        }
                    }
                }
            }
        }
    }
}

fn elementwise(c: &mut Cases) {
    for values in ValueClass::ALL {
        let base = ElementwiseSpec {
            function: None,
            multiply: false,
            broadcast: false,
            in_place: false,
            columns: 101,
            capacity: 5,
            tokens: 3,
            values,
        };
        for function in FUNCTIONS {
            let spec = ElementwiseSpec {
                function: Some(function),
                in_place: values != ValueClass::Plain,
                ..base.clone()
            };
            c.values(&format!("{}/{}", function.name(), values.name()), Spec::Elementwise(spec));
        }
        for multiply in [false, true] {
            for (name, broadcast, in_place) in
                [("both", false, false), ("in-place", false, true), ("row", true, false)]
            {
                let spec = ElementwiseSpec { multiply, broadcast, in_place, ..base.clone() };
                c.values(&format!("{name}/{}", values.name()), Spec::Elementwise(spec));
            }
        }
    }
}

fn sequence_shapes() -> Vec<(&'static str, Vec<SequenceShape>)> {
    let s = |tokens, past| SequenceShape { tokens, past };
    vec![
        ("prefill", vec![s(7, 0)]),
        ("decode", vec![s(1, 37)]),
        ("chunk", vec![s(5, 11)]),
        ("sequences", vec![s(3, 0), s(1, 19), s(2, 4)]),
    ]
}

fn caches(c: &mut Cases) {
    for (action, name) in
        [(CacheAction::Append, "append"), (CacheAction::Export, "export"), (CacheAction::Import, "import")]
    {
        for (shape, sequences) in sequence_shapes() {
            if action != CacheAction::Append && sequences.len() > 1 {
                continue;
            }
            for values in
                [ValueClass::Plain, ValueClass::Denormals, ValueClass::Outliers, ValueClass::NonFinite]
            {
                let spec =
                    CacheSpec { action, kv_heads: 3, head_dim: 20, sequences: sequences.clone(), values };
                c.values(&format!("{name}/{shape}/{}", values.name()), Spec::Cache(spec));
            }
        }
    }
}

fn attentions(c: &mut Cases) {
    for (heads_name, heads, kv_heads, head_dim) in
        [("heads", 4, 4, 16), ("grouped", 6, 2, 24), ("one", 1, 1, 64)]
    {
        for (shape, sequences) in sequence_shapes() {
            for (kind, window, soft_cap) in
                [("full", None, None), ("window", Some(4), None), ("soft-cap", None, Some(1.5))]
            {
                for values in ValueClass::ALL {
                    let spec = AttentionSpec {
                        heads,
                        kv_heads,
                        head_dim,
                        sequences: sequences.clone(),
                        window,
                        soft_cap,
                        values,
                    };
                    let tail = format!("{kind}/{heads_name}/{shape}");
                    c.values(&format!("{tail}/{}", values.name()), Spec::Attention(spec.clone()));
                    if values != ValueClass::Plain || heads_name == "one" {
                        continue;
                    }
                    let spec = Spec::Attention(spec);
                    match shape {
                        "sequences" => {
                            c.property(&tail, Property::Sequences, spec.clone());
                            c.property(&tail, Property::Concurrent, spec);
                        }
                        "chunk" => {
                            c.property(&tail, Property::BatchNeighbours, spec.clone());
                            c.property(&tail, Property::Repeats, spec);
                        }
                        "prefill" => c.property(&tail, Property::CacheSteps, spec),
                        _ => {}
                    }
                }
            }
        }
    }
}

fn ffn(dtype: DType, int8: bool) -> FfnSpec {
    FfnSpec {
        dtype,
        width: 2 * unit(dtype),
        neurons: if unit(dtype) == 256 { 256 } else { 128 },
        capacity: 5,
        tokens: 3,
        gate: true,
        bias: false,
        function: Activation::Relu,
        up_function: Activation::Identity,
        layout: DownLayout::NeuronRows,
        planes: PlaneShape::None,
        select: Select::All,
        ranges: RangeShape::Whole,
        int8,
        hidden: true,
        accumulate: false,
        strided: false,
        constant: true,
        values: ValueClass::Plain,
    }
}

fn ffns(c: &mut Cases) {
    for dtype in weight_types() {
        for int8 in [false, true] {
            let arithmetic = arithmetic_name(int8);
            for select in SELECTS {
                for ranges in RANGES {
                    // The choices that multiply least are made by the name: all pairs occur over the types.
                    let tail = format!("{}/{}", select.name(), ranges.name());
                    let choice = hash(&format!("{dtype}/{arithmetic}/{tail}"));
                    let gate = !choice.is_multiple_of(5);
                    let function = match select {
                        Select::GateFirst => FUNCTIONS[1 + (choice / 5 % 2) as usize],
                        _ => FUNCTIONS[1 + (choice / 5 % 5) as usize],
                    };
                    let spec = FfnSpec {
                        gate,
                        function,
                        up_function: if gate && (choice / 25).is_multiple_of(3) {
                            Activation::Relu
                        } else {
                            Activation::Identity
                        },
                        layout: if (choice / 75).is_multiple_of(3) {
                            DownLayout::OutputRows
                        } else {
                            DownLayout::NeuronRows
                        },
                        select,
                        ranges,
                        bias: (choice / 225).is_multiple_of(3),
                        hidden: !(choice / 675).is_multiple_of(3),
                        accumulate: (choice / 2025).is_multiple_of(3),
                        strided: (choice / 6075).is_multiple_of(2),
                        tokens: 1 + (choice / 12150 % 4) as u32,
                        ..ffn(dtype, int8)
                    };
                    c.values(&format!("{arithmetic}/{tail}/{}", function.name()), Spec::Ffn(spec));
                }
            }
            for values in ValueClass::ALL {
                for (name, layout, gate) in [
                    ("neuron-rows", DownLayout::NeuronRows, true),
                    ("output-rows", DownLayout::OutputRows, true),
                    ("no-gate", DownLayout::NeuronRows, false),
                ] {
                    let spec = FfnSpec { values, layout, gate, ..ffn(dtype, int8) };
                    c.values(&format!("{arithmetic}/dense/{name}/{}", values.name()), Spec::Ffn(spec));
                }
            }
        }
    }
}

fn ffn_properties(c: &mut Cases) {
    for dtype in weight_types() {
        for int8 in [false, true] {
            let arithmetic = arithmetic_name(int8);
            let base = ffn(dtype, int8);
            let masked = FfnSpec { select: Select::Mask(MaskShape::Half), ..base.clone() };
            for (name, spec) in [("all", &base), ("mask-half", &masked)] {
                for p in [Property::Repeats, Property::Concurrent, Property::BatchNeighbours] {
                    c.property(&format!("{arithmetic}/{name}"), p, Spec::Ffn(spec.clone()));
                }
            }
            c.property(arithmetic, Property::WeightPlacement, Spec::Ffn(base.clone()));
            c.property(arithmetic, Property::Import, Spec::Ffn(base.clone()));
            for layout in [DownLayout::NeuronRows, DownLayout::OutputRows] {
                let name = if layout == DownLayout::NeuronRows { "neuron-rows" } else { "output-rows" };
                let spec = FfnSpec { layout, function: Activation::Silu, hidden: false, ..base.clone() };
                c.property(&format!("{arithmetic}/{name}"), Property::RangesAddUp, Spec::Ffn(spec.clone()));
                c.property(&format!("{arithmetic}/{name}"), Property::Placement, Spec::Ffn(spec));
            }
            poisons(c, arithmetic, &base);
            if !int8 {
                for function in [Activation::Relu, Activation::ReluSquared] {
                    let spec = FfnSpec { select: Select::GateFirst, function, tokens: 3, ..base.clone() };
                    let tail = format!("{arithmetic}/{}", function.name());
                    c.property(&tail, Property::GateFirst, Spec::Ffn(spec));
                }
            }
        }
    }
}

fn poisons(c: &mut Cases, arithmetic: &str, base: &FfnSpec) {
    let silu = FfnSpec { function: Activation::Silu, bias: true, ..base.clone() };
    let one = FfnSpec { tokens: 1, ..base.clone() };
    let specs = [
        ("mask-sparse", FfnSpec { select: Select::Mask(MaskShape::Sparse), ..silu.clone() }),
        // Half of what the mask names has a gate of zero.
        ("mask-gate", FfnSpec { select: Select::Mask(MaskShape::Half), ..one.clone() }),
        ("mask-empty", FfnSpec { select: Select::Mask(MaskShape::Empty), ..base.clone() }),
        ("mask-no-gate", FfnSpec { select: Select::Mask(MaskShape::One), gate: false, ..base.clone() }),
        ("range", FfnSpec { ranges: RangeShape::Unaligned, ..silu.clone() }),
        ("ranges", FfnSpec { ranges: RangeShape::Several, layout: DownLayout::OutputRows, ..silu }),
        ("gate-first", FfnSpec { select: Select::GateFirst, ..one.clone() }),
        ("threshold", FfnSpec { select: Select::Threshold, function: Activation::Silu, ..one }),
    ];
    for (name, spec) in specs {
        c.property(&format!("{arithmetic}/{name}"), Property::Poisoned, Spec::Ffn(spec));
    }
}

fn predicts(c: &mut Cases) {
    for dtype in weight_types() {
        for int8 in [false, true] {
            for values in ValueClass::ALL.into_iter().filter(|v| *v != ValueClass::NonFinite) {
                let u = unit(dtype);
                let spec = PredictSpec {
                    dtype,
                    width: 2 * u,
                    rank: u,
                    neurons: 96,
                    capacity: 5,
                    tokens: 3,
                    int8,
                    values,
                };
                let arithmetic = arithmetic_name(int8);
                c.values(&format!("{arithmetic}/{}", values.name()), Spec::Predict(spec.clone()));
                if values == ValueClass::Plain {
                    for p in [Property::Repeats, Property::BatchNeighbours] {
                        c.property(arithmetic, p, Spec::Predict(spec.clone()));
                    }
                }
            }
        }
    }
}

/// The cases whose name contains `filter`; the sampled subset unless `full`. A filter with `=` before it is a whole
/// name.
pub fn select(filter: &str, full: bool) -> Vec<Case> {
    all()
        .into_iter()
        .filter(|case| match filter.strip_prefix('=') {
            Some(name) => case.name == name,
            None => case.name.contains(filter) && (full || case.sampled),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_operation_and_type_is_sampled() {
        let cases = all();
        let names: BTreeSet<&str> = cases.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names.len(), cases.len());
        let of = |sampled: bool| -> BTreeSet<(String, String)> {
            cases
                .iter()
                .filter(|c| !sampled || c.sampled)
                .map(|c| (c.operation.clone(), c.dtype.clone()))
                .collect()
        };
        assert_eq!(of(false), of(true));
        let sampled = cases.iter().filter(|c| c.sampled).count();
        assert!(sampled * 2 < cases.len(), "{sampled} of {} are sampled", cases.len());
        assert_eq!(select("=ffn/q8_0/int8/all/whole/relu", false).len().max(1), 1);
    }
}
