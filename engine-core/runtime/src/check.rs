//! Looks for weights that are not finite: what makes a model answer with one token for ever.

use crate::Result;
use engine_core::DType;
use formats::{GgufFile, TensorInfo};
use half::{bf16, f16};
use std::fmt;
use std::path::Path;

/// A value that is not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorFault {
    /// The tensor.
    pub tensor: String,
    /// Its type.
    pub dtype: DType,
    /// The block (of an unquantised tensor: the element), counted from the tensor's start.
    pub block: u64,
    /// The value: a scale or minimum of the block, or the element.
    pub value: f32,
    /// How many blocks of this tensor hold such a value.
    pub blocks: u64,
}

impl fmt::Display for TensorFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.dtype.is_quantised() { "block" } else { "element" };
        write!(f, "tensor `{}` ({}): {unit} {} has {}", self.tensor, self.dtype, self.block, self.value)?;
        if self.blocks > 1 { write!(f, " ({} in all)", self.blocks) } else { Ok(()) }
    }
}

/// What was looked at, and what was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckReport {
    /// Tensors that hold floats.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Per tensor with such values: the first of them.
    pub faults: Vec<TensorFault>,
}

/// Scans every element of unquantised tensors, and every scale and minimum of quantised ones, in the file at `path`.
///
/// # Errors
/// Where the file is refused; faults are no errors but the answer.
pub fn check_tensors(path: impl AsRef<Path>) -> Result<CheckReport> {
    Ok(check_file(&GgufFile::open(path)?))
}

/// [`check_tensors`] for an open file.
pub fn check_file(file: &GgufFile) -> CheckReport {
    let mut report = CheckReport::default();
    for tensor in file.tensors() {
        let Some(floats) = floats(tensor.dtype) else { continue };
        report.tensors += 1;
        report.bytes += tensor.byte_len();
        report.faults.extend(scan(tensor, file.tensor_bytes(tensor), floats));
    }
    report
}

/// A float within a block.
#[derive(Clone, Copy)]
enum Float {
    F64(usize),
    F32(usize),
    F16(usize),
    BF16(usize),
    /// An exponent byte, of which 255 means NaN.
    E8M0(usize),
}

/// The floats of one block, with their byte offsets; `None` for types without floats.
fn floats(dtype: DType) -> Option<&'static [Float]> {
    Some(match dtype {
        DType::F64 => &[Float::F64(0)],
        DType::F32 => &[Float::F32(0)],
        DType::F16 => &[Float::F16(0)],
        DType::BF16 => &[Float::BF16(0)],
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4NL | DType::IQ4XS => &[Float::F16(0)],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[Float::F16(0), Float::F16(2)],
        DType::Q2K => &[Float::F16(80), Float::F16(82)],
        DType::Q3K => &[Float::F16(108)],
        DType::Q6K => &[Float::F16(208)],
        DType::MXFP4 => &[Float::E8M0(0)],
        _ => return None,
    })
}

fn scan(tensor: &TensorInfo, bytes: &[u8], floats: &[Float]) -> Option<TensorFault> {
    let size = usize::try_from(tensor.dtype.block_bytes()).ok()?;
    let bad = |block: &[u8]| floats.iter().map(|float| read(block, *float)).find(|value| !value.is_finite());
    let mut faults =
        bytes.chunks_exact(size).zip(0u64..).filter_map(|(block, at)| bad(block).map(|value| (at, value)));
    let (block, value) = faults.next()?;
    let blocks = 1 + faults.count() as u64;
    Some(TensorFault { tensor: tensor.name.clone(), dtype: tensor.dtype, block, value, blocks })
}

/// A float of a block; 0 where the block is too short, which `floats` rules out.
fn read(block: &[u8], float: Float) -> f32 {
    fn array<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
        block.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
    }
    match float {
        Float::F64(at) => f64::from_le_bytes(array(block, at)) as f32,
        Float::F32(at) => f32::from_le_bytes(array(block, at)),
        Float::F16(at) => f16::from_le_bytes(array(block, at)).to_f32(),
        Float::BF16(at) => bf16::from_le_bytes(array(block, at)).to_f32(),
        Float::E8M0(at) => {
            if block.get(at) == Some(&u8::MAX) {
                f32::NAN
            } else {
                1.0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::story;

    fn with_bytes(change: impl FnOnce(&GgufFile, &mut [u8])) -> CheckReport {
        let file = GgufFile::open(story()).unwrap();
        let mut bytes = std::fs::read(story()).unwrap();
        change(&file, &mut bytes);
        check_file(&GgufFile::parse("changed.gguf", bytes).unwrap())
    }

    #[test]
    fn a_sound_file_has_no_faults() {
        let report = check_tensors(story()).unwrap();
        assert_eq!(report.faults, []);
        let file = GgufFile::open(story()).unwrap();
        assert_eq!(report.tensors, file.tensors().len());
        assert_eq!(report.bytes, file.tensors().iter().map(TensorInfo::byte_len).sum::<u64>());
    }

    #[test]
    fn tensor_and_block_are_named() {
        let report = with_bytes(|file, bytes| {
            let at = |name: &str| file.tensor(name).unwrap().file_range.start as usize;
            // f16 infinity as the scale of block 7, and NaN as that of block 9.
            let down = at("blk.0.ffn_down.weight");
            bytes[down + 7 * 34..][..2].copy_from_slice(&[0x00, 0x7c]);
            bytes[down + 9 * 34..][..2].copy_from_slice(&[0x01, 0x7e]);
            let norm = at("blk.3.attn_norm.weight");
            bytes[norm + 5 * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
            let fc1 = at("blk.2.fc1.weight");
            bytes[fc1 + 2..][..2].copy_from_slice(&[0xff, 0xff]);
        });
        let mut lines: Vec<String> = report.faults.iter().map(TensorFault::to_string).collect();
        lines.sort();
        let wanted = [
            "tensor `blk.0.ffn_down.weight` (Q8_0): block 7 has inf (2 in all)",
            "tensor `blk.2.fc1.weight` (F16): element 1 has NaN",
            "tensor `blk.3.attn_norm.weight` (F32): element 5 has NaN",
        ];
        assert_eq!(lines, wanted);
    }

    #[test]
    fn every_float_lies_within_its_block() {
        for dtype in DType::all() {
            for float in floats(dtype).unwrap_or_default() {
                let end = match *float {
                    Float::F64(at) => at + 8,
                    Float::F32(at) => at + 4,
                    Float::F16(at) | Float::BF16(at) => at + 2,
                    Float::E8M0(at) => at + 1,
                };
                assert!(end as u64 <= dtype.block_bytes(), "{dtype}");
            }
        }
    }
}
