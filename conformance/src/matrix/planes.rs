//! Cases of weights in planes: each way of having them, under each selection.

use super::{Cases, arithmetic_name, ffn};
use crate::properties::Property;
use crate::spec::{FfnSpec, MaskShape, PlaneShape, RangeShape, Select, Spec};
use engine_core::DType;
use engine_core::operation::{Activation, DownLayout};

pub(super) fn planes(c: &mut Cases) {
    for int8 in [false, true] {
        let base = FfnSpec { planes: PlaneShape::GateUp, ..ffn(DType::Q4_0, int8) };
        for planes in [PlaneShape::Gate, PlaneShape::GateUp, PlaneShape::Up] {
            let selects = [
                Select::All,
                Select::Mask(MaskShape::Half),
                Select::GateFirst,
                Select::Threshold,
                Select::Bitplane,
                Select::BitplaneSure,
            ];
            let decided = |select| matches!(select, Select::Bitplane | Select::BitplaneSure);
            for select in selects.into_iter().filter(|&s| planes != PlaneShape::Up || !decided(s)) {
                several(c, &FfnSpec { planes, select, ..base.clone() });
            }
        }
        let arithmetic = arithmetic_name(int8);
        let silu = FfnSpec { select: Select::Bitplane, function: Activation::Silu, ..base.clone() };
        for property in
            [Property::Repeats, Property::Concurrent, Property::BatchNeighbours, Property::WeightPlacement]
        {
            c.property(&format!("{arithmetic}/bitplane"), property, Spec::Ffn(silu.clone()));
        }
        c.property(&format!("{arithmetic}/bitplane"), Property::Import, Spec::Ffn(silu.clone()));
        let one = FfnSpec { tokens: 1, ..silu.clone() };
        c.property(&format!("{arithmetic}/bitplane-silu"), Property::Poisoned, Spec::Ffn(one));
        let relu =
            FfnSpec { function: Activation::Relu, planes: PlaneShape::Gate, tokens: 1, ..silu.clone() };
        c.property(&format!("{arithmetic}/bitplane-relu"), Property::Poisoned, Spec::Ffn(relu));
        let ranges = FfnSpec { hidden: false, ..silu };
        c.property(&format!("{arithmetic}/bitplane"), Property::RangesAddUp, Spec::Ffn(ranges.clone()));
        c.property(&format!("{arithmetic}/bitplane"), Property::Placement, Spec::Ffn(ranges));
        if !int8 {
            let sure = FfnSpec { select: Select::BitplaneSure, ..base };
            c.property(&format!("{arithmetic}/bitplane-sure"), Property::GateFirst, Spec::Ffn(sure));
        }
    }
}

/// The functions, layouts and ranges that a selection is tried with.
fn several(c: &mut Cases, base: &FfnSpec) {
    let drelu = (Activation::Relu, Activation::Relu);
    for (name, (function, up_function), ranges, layout) in [
        ("relu", (Activation::Relu, Activation::Identity), RangeShape::Whole, DownLayout::NeuronRows),
        ("drelu", drelu, RangeShape::Unaligned, DownLayout::NeuronRows),
        ("silu", (Activation::Silu, Activation::Identity), RangeShape::Several, DownLayout::OutputRows),
        ("gelu", (Activation::GeluTanh, Activation::Identity), RangeShape::Whole, DownLayout::OutputRows),
    ] {
        if base.select == Select::GateFirst && !function.is_zero_below() {
            continue;
        }
        let (bias, strided) = (name != "relu", name == "gelu");
        let spec = FfnSpec { function, up_function, ranges, layout, bias, strided, ..base.clone() };
        let arithmetic = arithmetic_name(spec.int8);
        let tail = format!("{arithmetic}/{}/{}/{name}", spec.planes.name(), spec.select.name());
        c.values(&tail, Spec::Ffn(spec));
    }
}
