//! One safetensors file: its header checked, its tensors with their byte ranges.

use std::path::Path;

use engine_core::DType;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, SafeTensorError};

use crate::gguf::TensorInfo;
use crate::gguf::mapping::Bytes;
use crate::{FormatError, Result};

/// Bytes before the header: its length.
const LENGTH: usize = 8;
/// Dimensions that a tensor may have, as in GGUF.
const MAX_DIMENSIONS: usize = 4;

/// Maps a shard and gives its tensors by their names in it.
pub(super) fn read(path: &Path) -> Result<(Bytes, Vec<(String, TensorInfo)>)> {
    let bytes = Bytes::map(path)?;
    let bad = |problem: String| FormatError::NotSafetensors { path: path.to_path_buf(), problem };
    if bytes.is_empty() {
        return Err(bad("is empty (0 bytes); fetch it again".into()));
    }
    if bytes.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Err(bad(
            "is a git-LFS pointer, not the file itself; run `git lfs pull` or download the file".into(),
        ));
    }
    let (header, metadata) =
        SafeTensors::read_metadata(&bytes).map_err(|error| bad(explain(&error, &bytes)))?;
    let mut tensors = Vec::new();
    for (name, info) in metadata.tensors() {
        let unreadable =
            |problem: String| FormatError::Tensor { path: path.to_path_buf(), tensor: name.clone(), problem };
        let Some(dtype) = dtype(info.dtype) else {
            return Err(unreadable(format!(
                "type {:?} is not read here; F32, F16, BF16, F64 and integers are",
                info.dtype
            )));
        };
        // The outermost dimension comes first there.
        let mut dims: Vec<u64> = info.shape.iter().rev().map(|&size| size as u64).collect();
        if dims.len() > MAX_DIMENSIONS || dims.contains(&0) {
            let problem = format!(
                "has shape {:?}; 1 to {MAX_DIMENSIONS} dimensions, none of them 0, are allowed",
                info.shape
            );
            return Err(unreadable(problem));
        }
        if dims.is_empty() {
            dims.push(1);
        }
        let start = LENGTH as u64 + header as u64; // the file is longer: checked with the header
        let file_range = start + info.data_offsets.0 as u64..start + info.data_offsets.1 as u64;
        tensors.push((name.clone(), TensorInfo { name, dtype, dims, file_range, file: 0 }));
    }
    tensors.sort_by_key(|(_, tensor)| tensor.file_range.start);
    Ok((bytes, tensors))
}

fn dtype(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F64 => DType::F64,
        Dtype::I8 => DType::I8,
        Dtype::I16 => DType::I16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        _ => return None,
    })
}

/// The end of the last tensor by the header's word, where the header can be read that far.
fn claimed_length(bytes: &[u8]) -> Option<u64> {
    let header = u64::from_le_bytes(*bytes.first_chunk::<LENGTH>()?);
    let end = usize::try_from(header).ok()?.checked_add(LENGTH)?;
    let json: serde_json::Value = serde_json::from_slice(bytes.get(LENGTH..end)?).ok()?;
    let ends = json.as_object()?.values().filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64());
    ends.max()?.checked_add(end as u64)
}

fn explain(error: &SafeTensorError, bytes: &[u8]) -> String {
    let length = bytes.len();
    match error {
        SafeTensorError::MetadataIncompleteBuffer => match claimed_length(bytes) {
            Some(wanted) if wanted > length as u64 => {
                format!(
                    "is cut short: its header asks for {wanted} bytes, {length} are there; fetch it again"
                )
            }
            Some(wanted) => format!(
                "has {} bytes behind the {wanted} that its header asks for; it is damaged, fetch it again",
                length as u64 - wanted
            ),
            None => format!("has {length} bytes, which is not what its header asks for; fetch it again"),
        },
        SafeTensorError::HeaderTooSmall => format!("has only {length} bytes; fetch it again"),
        SafeTensorError::HeaderTooLarge | SafeTensorError::InvalidHeaderLength => {
            let claimed = bytes.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
            format!(
                "claims a header of {claimed} bytes in a file of {length}; it is cut short or no safetensors file"
            )
        }
        other => format!("has a damaged header: {other}"),
    }
}
