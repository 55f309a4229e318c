//! Takes the matrices of feed-forward networks from the model that another one was quantised from, so that what is stored
//! in a new layout is rounded once and not twice.

use super::{Options, Tensor, tensors};
use crate::gguf::GgufFile;
use crate::{FormatError, Result};
use engine_core::DType;

const PARTS: [&str; 4] = ["ffn_gate.weight", "ffn_up.weight", "ffn_down.weight", "ffn_down_t.weight"];
/// Rows of one matrix that are further apart than this share of their length are of two models: 4 bits lose about 0.1.
const FURTHEST: f64 = 0.5;

/// The matrix's name without its layout.
fn part_of(name: &str) -> Option<String> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    PARTS.contains(&part).then(|| format!("{layer}.{}", part.replace("ffn_down_t", "ffn_down")))
}

pub(super) fn take<'a>(
    file: &GgufFile,
    original: &'a GgufFile,
    tensors: &mut [Tensor<'a>],
    lines: &mut Vec<String>,
) -> Result<()> {
    let mut better = tensors::collect(original, &Options::default(), &mut Vec::new())?;
    let mut coarser = None;
    for tensor in tensors.iter_mut() {
        let Some(part) = part_of(&tensor.name) else { continue };
        let Some(at) = better.iter().position(|other| part_of(&other.name).as_ref() == Some(&part)) else {
            return Err(FormatError::MissingTensor {
                path: original.path().to_path_buf(),
                tensor: tensor.name.clone(),
                advice: format!("it is not the model that {} was made of", file.path().display()),
            });
        };
        let found = better.swap_remove(at);
        if bits(found.source.dtype) < bits(tensor.source.dtype) {
            coarser = Some((found.name.clone(), found.source.dtype, tensor.source.dtype));
        }
        let (mut a, mut b) = (tensor.dims.clone(), found.dims.clone());
        let same_layout = a == b;
        a.sort_unstable();
        b.sort_unstable();
        if a != b || (!same_layout && !part.ends_with("ffn_down.weight")) {
            return Err(FormatError::Shape {
                path: original.path().to_path_buf(),
                tensor: found.name,
                found: format!("{:?}", found.dims),
                wanted: format!("{:?}", tensor.dims),
                reason: format!("the shape in {}", file.path().display()),
            });
        }
        if same_layout {
            let apart = distance(tensor, &found)?;
            if apart > FURTHEST {
                return Err(FormatError::Tensor {
                    path: original.path().to_path_buf(),
                    tensor: found.name,
                    problem: format!(
                        "is of another model: its first row is {apart:.2} of its length away from that in {}",
                        file.path().display()
                    ),
                });
            }
        }
        // The type stays the model's.
        (tensor.name, tensor.dims, tensor.source) = (found.name, found.dims, found.source);
        tensor.dtype = super::types::fitting(tensor.dtype, tensor.row_elements());
    }
    if let Some((name, theirs, own)) = coarser {
        lines.push(format!(
            "{}: `{name}` is {theirs}, coarser than {own} in {}: what is written is worse for it; the two may have changed \
             places",
            original.path().display(),
            file.path().display()
        ));
    }
    Ok(())
}

/// Bits of an element.
fn bits(dtype: DType) -> f64 {
    8.0 * dtype.block_bytes() as f64 / dtype.block_elements() as f64
}

/// How far the first rows are apart, as a share of the second's length.
fn distance(a: &Tensor<'_>, b: &Tensor<'_>) -> Result<f64> {
    let row = a.row_elements();
    // One row, or where blocks of several rows would be cut, as many elements as make whole ones.
    let read = |tensor: &Tensor<'_>| -> Result<Vec<f32>> {
        let mut values = vec![0.0; row as usize];
        let bytes = tensor.source.read(0..row, row, DType::F32)?;
        crate::quantise::dequantise(DType::F32, &bytes, &mut values)?;
        Ok(values)
    };
    let (a, b) = (read(a)?, read(b)?);
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let length = square(&mut b.iter().map(|&x| f64::from(x)));
    let apart = square(&mut a.iter().zip(&b).map(|(&a, &b)| f64::from(a - b)));
    Ok(if length > 0.0 { apart / length } else { 0.0 })
}
