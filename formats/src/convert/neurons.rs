//! Prepared models: the neurons of each layer in a new order, down with a row per neuron, measured frequencies beside.
//!
//! Neurons of a network can be put into any order without changing what it computes; sorted by how often they are active,
//! placements become ranges. What is written stays a valid GGUF file.

use std::io::Read;
use std::sync::Arc;

use engine_core::DType;
use sha2::{Digest, Sha256};

use super::types::fitting;
use super::{Data, Order, Source, Tensor};
use crate::gguf::{Array, GgufFile, Value};
use crate::{FormatError, Result};

/// The version of the keys that are written.
const VERSION: u32 = 1;
/// Rows of neurons are read from disk one by one, and pages are of this size.
const ALIGNMENT: u32 = 4096;

/// What was measured of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Neurons {
    /// Of the neurons as stored, in the order in which they are to be: each number from 0 on once.
    pub order: Vec<u32>,
    /// How often each is active, as a share of the tokens; in the new order.
    pub frequency: Vec<f32>,
}

/// Changes tensors and keys of a whole model, one entry of `layers` for each of its layers.
pub(super) fn sort(
    file: &GgufFile,
    layers: &[Neurons],
    tensors: &mut Vec<Tensor<'_>>,
    metadata: &mut Vec<(String, Value)>,
) -> Result<()> {
    if file.metadata().get("thermocline.version").is_some() {
        return Err(refused(file, "a model that is prepared already".into()));
    }
    for (index, layer) in layers.iter().enumerate() {
        let order: Arc<[u32]> = layer.order.clone().into();
        let first = format!("blk.{index}.");
        let count = order.len() as u64;
        let mut seen = vec![false; order.len()];
        let each_once =
            order.iter().all(|&at| seen.get_mut(at as usize).is_some_and(|s| !std::mem::replace(s, true)));
        if !each_once || layer.frequency.len() != order.len() {
            return Err(refused(file, format!("an order of layer {index} that is no permutation")));
        }
        let mut downs = 0;
        for tensor in tensors.iter_mut().filter(|tensor| tensor.name.starts_with(&first)) {
            let part = tensor.name[first.len()..].to_owned();
            match part.as_str() {
                "ffn_gate.weight" | "ffn_up.weight" | "fc2.weight" => {
                    by_rows(file, tensor, count, Order::Listed(order.clone()))?;
                }
                "ffn_gate.bias" | "ffn_up.bias" => {
                    tensor.source.row = 1;
                    by_rows(file, tensor, count, Order::Listed(order.clone()))?;
                }
                "ffn_down.weight" | "ffn_down_t.weight" => {
                    turn_down(file, tensor, &order)?;
                    tensor.name = format!("{first}ffn_down_t.weight");
                    downs += 1;
                }
                "ffn_down.bias" => tensor.name = format!("{first}ffn_down_t.bias"),
                _ => {}
            }
        }
        if downs != 1 {
            return Err(refused(file, format!("layer {index}, which has not one matrix `ffn_down`")));
        }
        let end = tensors.iter().rposition(|tensor| tensor.name.starts_with(&first)).map_or(0, |at| at + 1);
        let bytes = layer.frequency.iter().flat_map(|f| f.to_le_bytes()).collect();
        let source = Source::as_stored(Data::Owned(bytes), DType::F32, count);
        let name = format!("{first}ffn_frequency");
        tensors.insert(end, Tensor { name, dtype: DType::F32, dims: vec![count], source });
    }
    let mut set = |key: String, value: Value| match metadata.iter_mut().find(|entry| entry.0 == key) {
        Some(entry) => entry.1 = value,
        None => metadata.push((key, value)),
    };
    set("general.alignment".into(), Value::U32(ALIGNMENT));
    set("thermocline.version".into(), Value::U32(VERSION));
    set("thermocline.layout".into(), Value::from("separate"));
    set("thermocline.source_sha256".into(), Value::from(hash_of(file)?.as_str()));
    for (index, layer) in layers.iter().enumerate() {
        set(format!("thermocline.permutation.{index}"), Value::Array(Array::U32(layer.order.clone())));
    }
    Ok(())
}

fn refused(file: &GgufFile, what: String) -> FormatError {
    let advice = "models with one feed-forward network per layer, as they were published, are".into();
    FormatError::Unsupported { path: file.path().to_path_buf(), what: format!("preparing {what}"), advice }
}

/// The tensor's rows in another order.
fn by_rows(file: &GgufFile, tensor: &mut Tensor<'_>, count: u64, order: Order) -> Result<()> {
    let rows: u64 = tensor.dims.iter().product::<u64>() / tensor.source.row.max(1);
    if rows != count || tensor.source.order != Order::AsStored || tensor.source.pieces.len() != 1 {
        return Err(refused(
            file,
            format!("`{}`, which has not a row for each of {count} neurons", tensor.name),
        ));
    }
    tensor.source.order = order;
    Ok(())
}

/// A row per neuron: columns of what is stored, or rows where it is PowerInfer's.
fn turn_down(file: &GgufFile, tensor: &mut Tensor<'_>, order: &Arc<[u32]>) -> Result<()> {
    let count = order.len() as u64;
    let shape = |tensor: &Tensor<'_>| match tensor.dims[..] {
        [columns, rows] => Ok((columns, rows)),
        _ => Err(refused(file, format!("`{}`, which is no matrix", tensor.name))),
    };
    let (columns, rows) = shape(tensor)?;
    if let Order::Transposed { rows: stored } = tensor.source.order {
        // Convert would turn it back for others.
        tensor.source.order = Order::AsStored;
        tensor.dims = vec![rows, stored];
        return by_rows(file, tensor, count, Order::Listed(order.clone()));
    }
    if tensor.name.contains(".ffn_down_t.") {
        return by_rows(file, tensor, count, Order::Listed(order.clone()));
    }
    if columns != count || tensor.source.order != Order::AsStored || tensor.source.pieces.len() != 1 {
        return Err(refused(
            file,
            format!("`{}`, which has not a column for each of {count} neurons", tensor.name),
        ));
    }
    tensor.source.order = Order::ListedColumns { rows, columns: order.clone() };
    tensor.dims = vec![rows, columns];
    tensor.dtype = fitting(tensor.dtype, rows);
    Ok(())
}

/// SHA-256 over the model's files, in order.
fn hash_of(file: &GgufFile) -> Result<String> {
    let mut hash = Sha256::new();
    for path in file.files() {
        let failed = |source| FormatError::Io { path: path.to_path_buf(), operation: "read", source };
        let mut from = std::fs::File::open(path).map_err(failed)?;
        let mut portion = vec![0; 1 << 20];
        loop {
            match from.read(&mut portion).map_err(failed)? {
                0 => break,
                count => hash.update(&portion[..count]),
            }
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
