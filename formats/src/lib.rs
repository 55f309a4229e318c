//! What is in a model's files: GGUF and PowerInfer containers, safetensors folders, model descriptions, tokenizers,
//! block formats.
//!
//! Everything read here comes from strangers. Every length, count and offset is checked before it is used, no
//! allocation is sized by a number the file merely claims, and each refusal is one [`FormatError`] that names the file,
//! the key or tensor, and what to do. Nothing here knows a device: tensors are described by their byte range in the
//! file, and a storage tier brings the bytes.
//!
//! | module | holds |
//! |---|---|
//! | [`gguf`] | the container: typed metadata, tensor table, splits, writer; `safetensors` gives folders the same table |
//! | [`model`] | the model: sizes, rope, activation and per-layer tensors, all checked against each other |
//! | [`tokenizer`] | text to ids and back |
//! | [`convert`] | GGUF files made of other models, and with other types |
//! | [`pickle`] | PyTorch's files of tensors, such as PowerInfer's predictors |
//! | [`quantise`] | scalar conversion between block formats and `f32`, both ways |

#![deny(unsafe_code)] // allowed again in `gguf::mapping`, the one place that maps a file

pub mod convert;
pub mod error;
pub mod gguf;
pub mod model;
pub mod pickle;
pub mod quantise;
mod safetensors;
pub mod tokenizer;

pub use error::FormatError;
pub use gguf::{Container, GgufFile, TensorInfo};
pub use model::ModelDescription;
pub use tokenizer::Tokenizer;

/// Result of reading or writing a file.
pub type Result<T, E = FormatError> = std::result::Result<T, E>;
