//! PowerInfer's statistics: how often each neuron was active, a file per layer.

use std::path::Path;

use engine_core::DType;

use super::{Checkpoint, StoredTensor};
use crate::quantise::dequantise;
use crate::{FormatError, Result};

/// Reads `activation_0.pt`, `activation_1.pt`, ... of `folder`: for layer i as many counts or frequencies as `neurons[i]`
/// says, by neuron. (PowerInfer's own tool sorts the files by name, so that it takes those of layer 10 for layer 2's.)
///
/// # Errors
/// Where a layer's file is missing or refused, holds anything else than one tensor of so many numbers, or a number that
/// is negative or not finite.
pub fn statistics(folder: impl AsRef<Path>, neurons: &[usize]) -> Result<Vec<Vec<f32>>> {
    let of_layer = |(layer, &neurons): (usize, &usize)| {
        let path = folder.as_ref().join(format!("activation_{layer}.pt"));
        let checkpoint = Checkpoint::open(&path)?;
        let bad = |problem: String| FormatError::Checkpoint { path: path.clone(), problem };
        let [tensor] = checkpoint.tensors() else {
            return Err(bad(format!("holds {} tensors; one is wanted", checkpoint.tensors().len())));
        };
        if tensor.dims != [neurons as u64] {
            return Err(bad(format!("has shape {:?}, but the layer has {neurons} neurons", tensor.dims)));
        }
        let values = numbers(tensor, checkpoint.bytes_of(tensor))?;
        match values.iter().position(|value| !value.is_finite() || *value < 0.0) {
            Some(at) => Err(bad(format!("neuron {at} has {}; a number from 0 is wanted", values[at]))),
            None => Ok(values),
        }
    };
    neurons.iter().enumerate().map(of_layer).collect()
}

/// The elements of a tensor of whole or other numbers.
fn numbers(tensor: &StoredTensor, bytes: &[u8]) -> Result<Vec<f32>> {
    fn whole<const N: usize>(bytes: &[u8], decode: fn([u8; N]) -> i64) -> Vec<f32> {
        bytes.as_chunks::<N>().0.iter().map(|bytes| decode(*bytes) as f32).collect()
    }
    Ok(match tensor.dtype {
        DType::I64 => whole(bytes, i64::from_le_bytes),
        DType::I32 => whole(bytes, |bytes| i32::from_le_bytes(bytes).into()),
        DType::I16 => whole(bytes, |bytes| i16::from_le_bytes(bytes).into()),
        DType::I8 => whole(bytes, |bytes| i8::from_le_bytes(bytes).into()),
        dtype => {
            let mut values = vec![0.0; bytes.len() / dtype.block_bytes() as usize];
            dequantise(dtype, bytes, &mut values)?;
            values
        }
    })
}
