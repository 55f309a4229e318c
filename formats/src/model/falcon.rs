//! Architecture `falcon`: attention and feed-forward side by side, queries, keys and values in one matrix, no gate.

use super::decoder::{LLAMA, Layout};
use super::rope::RopeStyle;
use super::{Activation, Architecture, Norm, nothing_more};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "falcon",
    layout: Layout {
        norm: Norm::Layer,
        rope: Some(RopeStyle::Split),
        activation: Activation::GeluErf,
        gated: false,
        parallel: true,
        ..LLAMA
    },
    finish: nothing_more,
};
