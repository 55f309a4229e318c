//! Architecture `qwen3moe`: as `qwen3`, with experts instead of one feed-forward network.

use super::decoder::{LLAMA, Layout};
use super::experts::SOFTMAX;
use super::rope::RopeStyle;
use super::{Architecture, nothing_more};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "qwen3moe",
    layout: Layout { rope: Some(RopeStyle::Split), qk_norm: true, experts: Some(SOFTMAX), ..LLAMA },
    finish: nothing_more,
};
