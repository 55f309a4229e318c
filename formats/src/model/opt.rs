//! Architecture `opt`: LayerNorm and biases everywhere, learned positions, a ReLU and no gate.

use super::decoder::{LLAMA, Layout};
use super::reader::{Reader, Wanted};
use super::{Activation, Architecture, LearnedPositions, ModelDescription, Norm};
use crate::Result;

pub(super) const ARCHITECTURE: Architecture = Architecture {
    name: "opt",
    layout: Layout { norm: Norm::Layer, rope: None, activation: Activation::Relu, gated: false, ..LLAMA },
    finish,
};

/// Rows before the one of position 0, which OPT keeps for padding.
const PADDING_ROWS: u64 = 2;

fn finish(reader: &Reader<'_>, model: &mut ModelDescription) -> Result<()> {
    const NAME: &str = "position_embd.weight";
    let rows = reader.any_tensor(NAME)?.rows();
    let context = model.context_length as u64;
    // A converter may have dropped the padding rows.
    let offset = if rows == context { 0 } else { PADDING_ROWS };
    let wanted = Wanted {
        dims: &[model.n_embd as u64, context + offset],
        reason: "embedding width by context length, with or without 2 rows for padding",
    };
    let tensor = reader.tensor(NAME, wanted)?;
    model.positions = Some(LearnedPositions { tensor, offset: offset as usize });
    Ok(())
}
