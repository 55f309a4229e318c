//! Cases of mixtures of experts.

use super::{Cases, arithmetic_name, unit};
use crate::properties::Property;
use crate::spec::{ExpertsSpec, RouteSpec, Select, Spec};
use crate::values::{ValueClass, weight_types};
use engine_core::operation::{Activation, DownLayout, Gating};

pub(super) fn routes(c: &mut Cases) {
    for (name, gating, normalise) in [
        ("softmax", Gating::Softmax, false),
        ("softmax-normalised", Gating::Softmax, true),
        ("sigmoid", Gating::Sigmoid, false),
        ("sigmoid-normalised", Gating::Sigmoid, true),
    ] {
        for values in ValueClass::ALL {
            let (experts, used, capacity, tokens) = (19, 4, 7, 5);
            let spec = RouteSpec { experts, used, gating, normalise, capacity, tokens, values };
            c.values(&format!("{name}/{}", values.name()), Spec::Route(spec.clone()));
            if values == ValueClass::Plain {
                for p in [Property::Repeats, Property::BatchNeighbours] {
                    c.property(name, p, Spec::Route(spec.clone()));
                }
                for (used, name) in [(1, "one"), (19, "all")] {
                    let spec = RouteSpec { used, ..spec.clone() };
                    c.values(&format!("softmax-{name}/{normalise}/{gating:?}"), Spec::Route(spec));
                }
            }
        }
    }
}

pub(super) fn experts(c: &mut Cases) {
    for dtype in weight_types() {
        for int8 in [false, true] {
            let arithmetic = arithmetic_name(int8);
            let base = ExpertsSpec {
                dtype,
                width: unit(dtype),
                neurons: unit(dtype) as u32,
                experts: 5,
                used: 2,
                capacity: 7,
                tokens: 5,
                gate: true,
                function: Activation::Relu,
                up_function: Activation::Identity,
                layout: DownLayout::OutputRows,
                select: Select::All,
                int8,
                accumulate: false,
                values: ValueClass::Plain,
            };
            for (name, spec) in [
                ("all", base.clone()),
                ("neuron-rows", ExpertsSpec { layout: DownLayout::NeuronRows, ..base.clone() }),
                ("gate-first", ExpertsSpec { select: Select::GateFirst, ..base.clone() }),
                (
                    "threshold",
                    ExpertsSpec { select: Select::Threshold, function: Activation::Silu, ..base.clone() },
                ),
                ("drelu", ExpertsSpec { up_function: Activation::Relu, tokens: 1, ..base.clone() }),
                ("no-gate", ExpertsSpec { gate: false, accumulate: true, ..base.clone() }),
                (
                    "one-of-many",
                    ExpertsSpec { experts: 9, used: 1, function: Activation::Silu, ..base.clone() },
                ),
            ] {
                for values in ValueClass::ALL {
                    let spec = ExpertsSpec { values, ..spec.clone() };
                    c.values(&format!("{arithmetic}/{name}/{}", values.name()), Spec::Experts(spec));
                }
                for p in
                    [Property::Repeats, Property::BatchNeighbours, Property::Concurrent, Property::Poisoned]
                {
                    c.property(&format!("{arithmetic}/{name}"), p, Spec::Experts(spec.clone()));
                }
            }
        }
    }
}
