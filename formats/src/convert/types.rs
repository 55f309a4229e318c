//! Which type each tensor gets.
//!
//! Vectors (norms, biases), routers of experts and learned positions are F32, as llama.cpp wants them: they are small and
//! matter. Matrices get the type that was asked for; the head, which matters more, a better one unless a type was named;
//! predictors at least Q8_0, since a wrong sign there loses a neuron. Rows that are no whole number of a type's blocks
//! get the next type that fits: Q4_K and Q6_K fall back to Q8_0, types with blocks of 32 to F16. Each is told.

use std::collections::BTreeMap;

use engine_core::DType;

use super::Tensor;
use crate::gguf::{Container, GgufFile};
use crate::quantise::{READABLE, WRITABLE};
use crate::{FormatError, Result};

/// Types of a model's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Types {
    /// Of matrices; `None` keeps each as it is.
    pub matrices: Option<DType>,
    /// Of the matrix that makes logits (`output.weight`, or the embedding where it serves as that); `None` chooses Q6_K
    /// beside types of four bits, and the matrices' own otherwise.
    pub head: Option<DType>,
    /// Of the embedding, where it is not the head; `None` for the matrices' own.
    pub embedding: Option<DType>,
}

/// What a tensor is for.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Small,
    Predictor,
    Embedding,
    Head,
    Matrix,
}

/// Chooses and sets all types; the number of the file's type in `general.file_type`, where one is known.
pub(super) fn choose(
    types: &Types,
    file: &GgufFile,
    tensors: &mut [Tensor<'_>],
    lines: &mut Vec<String>,
) -> Result<Option<u32>> {
    let named = [types.matrices, types.head, types.embedding];
    if let Some(dtype) = named.into_iter().flatten().find(|dtype| !WRITABLE.contains(dtype)) {
        let list: Vec<&str> = WRITABLE.iter().map(|dtype| dtype.name()).collect();
        let problem = format!("this type is not written; {} are", list.join(", "));
        return Err(FormatError::Conversion { dtype: dtype.name(), problem });
    }
    let tied = !tensors.iter().any(|tensor| tensor.name == "output.weight");
    let safetensors = file.container() == Container::Safetensors;
    let mut substitutes: BTreeMap<(String, u64, DType, DType), usize> = BTreeMap::new();
    let mut again: BTreeMap<DType, usize> = BTreeMap::new();
    for tensor in tensors.iter_mut() {
        let stored = tensor.source.dtype;
        if tensor.source.plane.is_some() || in_planes(&tensor.name) {
            continue; // its type is its layout
        }
        let part = part(tensor, tied);
        let Some(wanted) = wanted(types, part, stored, safetensors) else {
            continue;
        };
        if !READABLE.contains(&stored) {
            if safetensors {
                return Err(FormatError::Tensor {
                    path: file.path().to_path_buf(),
                    tensor: tensor.name.clone(),
                    problem: format!("is stored as {stored}; weights must be floats"),
                });
            }
            continue;
        }
        let row = tensor.row_elements();
        let dtype = fitting(wanted, row);
        if dtype != wanted {
            *substitutes.entry((kind_of_name(&tensor.name), row, wanted, dtype)).or_default() += 1;
        }
        if stored.is_quantised() && dtype != stored && dtype.is_quantised() {
            *again.entry(stored).or_default() += 1;
        }
        tensor.dtype = dtype;
    }
    for ((name, row, wanted, dtype), count) in substitutes {
        let more = if count > 1 { format!(" ({count} tensors)") } else { String::new() };
        lines.push(format!(
            "{name}{more}: {dtype} instead of {wanted}, since rows of {row} are no whole number of blocks of {}",
            wanted.block_elements()
        ));
    }
    for (dtype, count) in again {
        lines.push(format!(
            "{count} tensors are quantised already ({dtype}): what they lost is lost; start from F32, F16 or BF16 where \
             you can"
        ));
    }
    Ok(file_type(match types.matrices {
        Some(dtype) => Some(dtype),
        None if safetensors => most(tensors),
        None => None,
    }))
}

/// Whether a tensor is a bit plane of a prepared model.
fn in_planes(name: &str) -> bool {
    ["ffn_gate_high.weight", "ffn_gate_low.weight", "ffn_up_high.weight", "ffn_up_low.weight"]
        .iter()
        .any(|part| name.ends_with(part))
}

fn part(tensor: &Tensor<'_>, tied: bool) -> Part {
    let name = tensor.name.as_str();
    let vector = tensor.dims.iter().skip(1).product::<u64>() == 1;
    if vector || name == "position_embd.weight" || name.ends_with(".ffn_gate_inp.weight") {
        return Part::Small;
    }
    match name {
        "output.weight" => Part::Head,
        "token_embd.weight" if tied => Part::Head,
        "token_embd.weight" => Part::Embedding,
        _ if name.ends_with(".fc1.weight") || name.ends_with(".fc2.weight") => Part::Predictor,
        _ => Part::Matrix,
    }
}

/// The type that the rules ask for, whatever the rows; `None` leaves the tensor alone.
fn wanted(types: &Types, part: Part, stored: DType, safetensors: bool) -> Option<DType> {
    let kept = || match (safetensors, stored) {
        (true, DType::F64) => Some(DType::F32), // no program has kernels for it
        (true, _) => Some(stored),
        (false, _) => None,
    };
    let matrices = types.matrices;
    match part {
        Part::Small if matrices.is_none() && !safetensors => None,
        Part::Small => Some(DType::F32),
        Part::Predictor => match matrices {
            Some(dtype) if dtype.is_quantised() => Some(DType::Q8_0),
            Some(dtype) => Some(dtype),
            None => kept(),
        },
        Part::Embedding => types.embedding.or(matrices).or_else(kept),
        Part::Matrix => matrices.or_else(kept),
        Part::Head => types.head.or(match matrices {
            Some(DType::Q4_0 | DType::Q4_1 | DType::Q4K) => Some(DType::Q6K),
            Some(dtype) => Some(dtype),
            None => kept(),
        }),
    }
}

/// `dtype`, or the next one that rows of this length can have.
pub(super) fn fitting(dtype: DType, row: u64) -> DType {
    let mut dtype = dtype;
    while dtype.row_bytes(row).is_none() {
        dtype = match dtype {
            DType::Q4K | DType::Q6K => DType::Q8_0,
            _ => DType::F16,
        };
    }
    dtype
}

/// `blk.*.ffn_down.weight` of `blk.7.ffn_down.weight`.
fn kind_of_name(name: &str) -> String {
    match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        Some((_, part)) => format!("blk.*.{part}"),
        None => name.to_owned(),
    }
}

/// The type that most elements of matrices have.
fn most(tensors: &[Tensor<'_>]) -> Option<DType> {
    let mut counts: BTreeMap<DType, u64> = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.dims.len() > 1) {
        *counts.entry(tensor.dtype).or_default() += tensor.elements();
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(dtype, _)| dtype)
}

/// llama.cpp's numbers.
fn file_type(dtype: Option<DType>) -> Option<u32> {
    Some(match dtype? {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::Q4K => 14, // "small": every matrix has this type
        DType::Q6K => 18,
        DType::BF16 => 32,
        _ => return None,
    })
}
