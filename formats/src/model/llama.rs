//! Architecture `llama`: Llama 1 to 3, SmolLM, and Mistral and Mixtral as most files name them.

use super::decoder::{LLAMA, Layout};
use super::experts::SOFTMAX;
use super::reader::Reader;
use super::{Architecture, ModelDescription};
use crate::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { name: "llama", layout: Layout { experts: Some(SOFTMAX), ..LLAMA }, finish };

/// Mistral's first version sees a window of positions, in every layer.
pub(super) fn finish(reader: &Reader<'_>, model: &mut ModelDescription) -> Result<()> {
    if let Some(window) = reader.optional_size("attention.sliding_window")? {
        model.layers.iter_mut().for_each(|layer| layer.window = Some(window));
    }
    Ok(())
}
