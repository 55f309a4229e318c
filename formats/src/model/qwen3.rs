//! Architecture `qwen3`: as `qwen2` without biases, with a norm on each head of queries and keys.

use super::decoder::{LLAMA, Layout};
use super::rope::RopeStyle;
use super::{Architecture, nothing_more};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "qwen3",
    layout: Layout { rope: Some(RopeStyle::Split), qk_norm: true, ..LLAMA },
    finish: nothing_more,
};
