//! Architecture `mistral`: `llama` under a name of its own.

use super::decoder::LLAMA;
use super::{Architecture, llama};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { name: "mistral", layout: LLAMA, finish: llama::finish };
