//! Architecture `qwen2` (Qwen 1.5, 2 and 2.5): biases on queries, keys and values, which turn by halves.

use super::decoder::{LLAMA, Layout};
use super::rope::RopeStyle;
use super::{Architecture, nothing_more};

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "qwen2",
    layout: Layout { rope: Some(RopeStyle::Split), ..LLAMA },
    finish: nothing_more,
};
