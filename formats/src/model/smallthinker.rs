//! Architecture `smallthinker`: ReLU experts chosen before attention; of four layers one sees all and has no rope, three
//! have a window.

use super::decoder::{LLAMA, Layout};
use super::experts::{ExpertLayout, Gating, RouterInput};
use super::reader::Reader;
use super::rope::{Rope, RopeStyle};
use super::{Activation, Architecture, ModelDescription};
use crate::Result;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "smallthinker",
    layout: Layout {
        rope: Some(RopeStyle::Split),
        activation: Activation::Relu,
        experts: Some(ExpertLayout { gating: Gating::Sigmoid, router_input: RouterInput::LayerInput }),
        ..LLAMA
    },
    finish,
};

/// Layers of which the first sees all, where any has a window.
const PERIOD: usize = 4;

fn finish(reader: &Reader<'_>, model: &mut ModelDescription) -> Result<()> {
    let Some(window) = reader.optional_size("attention.sliding_window")? else { return Ok(()) };
    for (index, layer) in model.layers.iter_mut().enumerate() {
        if index % PERIOD == 0 {
            layer.rope = Some(Rope::none());
        } else {
            layer.window = Some(window);
        }
    }
    Ok(())
}
