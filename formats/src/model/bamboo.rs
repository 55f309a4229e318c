//! Architecture `bamboo`: PowerInfer's Mistral whose gate and up both go through a ReLU.

use super::decoder::{LLAMA, Layout};
use super::{Activation, Architecture, nothing_more};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "bamboo",
    layout: Layout { activation: Activation::DRelu, ..LLAMA },
    finish: nothing_more,
};
