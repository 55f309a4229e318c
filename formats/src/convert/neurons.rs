//! Prepared models: the neurons of each layer in a new order, down with a row per neuron, measured frequencies beside.
//!
//! Neurons of a network can be put into any order without changing what it computes; sorted by how often they are active,
//! placements become ranges. Gate and up may be stored in bit planes ([`crate::quantise::planes`]): then
//! `blk.N.ffn_gate_high.weight` (Q4_0) and `blk.N.ffn_gate_low.weight` (I8) stand instead of `blk.N.ffn_gate.weight`, with
//! what a margin needs beside them. What is written stays a valid GGUF file.

use std::io::Read;
use std::sync::Arc;

use engine_core::DType;
use sha2::{Digest, Sha256};

use super::source::Plane;
use super::types::fitting;
use super::{Data, Order, Source, Tensor};
use crate::gguf::{Array, GgufFile, Value};
use crate::{FormatError, Result};

/// The version of the keys that are written.
const VERSION: u32 = 1;
/// Rows of neurons are read from disk one by one, and pages are of this size.
const ALIGNMENT: u32 = 4096;

/// What was measured of one layer, and what is to be stored of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Neurons {
    /// Experts of the layer; 0 where it has one network.
    pub experts: usize,
    /// Of the neurons as stored, in the order in which they are to be: each number from 0 on once. Of experts one after
    /// another, each from 0.
    pub order: Vec<u32>,
    /// How often each is active, as a share of the tokens, or of those that use its expert; in the new order.
    pub frequency: Vec<f32>,
    /// Stores gate, or gate and up, in bit planes.
    pub planes: Option<Planes>,
    /// A predictor to be stored, instead of one that the model has.
    pub predictor: Option<Predictor>,
}

/// What is stored beside bit planes; everything in the new order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Planes {
    /// Standard deviation of what gate's high plane leaves out, by the length of the input.
    pub gate_deviation: Vec<f32>,
    /// The same for up; `None` leaves up whole.
    pub up_deviation: Option<Vec<f32>>,
    /// Length of each neuron's row of down.
    pub down_norm: Vec<f32>,
}

/// In what a predictor that was trained is stored, by the elements of its rows: F16 where they are no whole blocks.
pub fn predictor_type(row: u64) -> DType {
    if DType::Q8_0.row_bytes(row).is_some() { DType::Q8_0 } else { DType::F16 }
}

/// A low-rank predictor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Predictor {
    /// Rows of fc1, a multiple of 32.
    pub rank: u64,
    /// `[rank x n_embd]` in [`predictor_type`].
    pub fc1: Vec<u8>,
    /// `[n_ff x rank]` in Q8_0, neurons as they are stored in the source.
    pub fc2: Vec<u8>,
}

/// Changes tensors and keys of a whole model, one entry of `layers` for each of its layers; what a person should be told.
pub(super) fn sort(
    file: &GgufFile,
    layers: &[Neurons],
    keep_down_type: bool,
    tensors: &mut Vec<Tensor<'_>>,
    metadata: &mut Vec<(String, Value)>,
) -> Result<Option<String>> {
    let mut finer = None;
    if file.metadata().get("thermocline.version").is_some() {
        return Err(refused(file, "a model that is prepared already".into()));
    }
    for (index, layer) in layers.iter().enumerate() {
        let first = format!("blk.{index}.");
        let count = layer.order.len() as u64;
        let Some(rows) = layer.rows().filter(|rows| rows.len() == layer.frequency.len()) else {
            return Err(refused(file, format!("an order of layer {index} that is no permutation")));
        };
        if layer.experts > 0 && (layer.planes.is_some() || layer.predictor.is_some()) {
            return Err(refused(file, format!("experts (layer {index}) in bit planes or with predictors")));
        }
        let (order, columns): (Arc<[u32]>, Arc<[u32]>) = (rows.into(), layer.order.clone().into());
        if layer.predictor.is_some() {
            let own = |name: &str| name.strip_prefix(&first).is_some_and(|part| part.starts_with("fc"));
            tensors.retain(|tensor| !own(&tensor.name));
        }
        let mut downs = 0;
        for tensor in tensors.iter_mut().filter(|tensor| tensor.name.starts_with(&first)) {
            let part = tensor.name[first.len()..].to_owned();
            let predicts = matches!(part.as_str(), "fc1.weight" | "fc2.weight");
            if predicts && !tensor.dtype.is_quantised() {
                // As those that are trained; a row of no whole blocks stays as it is.
                let stored = predictor_type(tensor.row_elements());
                tensor.dtype = if stored.is_quantised() { stored } else { tensor.dtype };
            }
            match part.as_str() {
                "ffn_gate.weight"
                | "ffn_up.weight"
                | "fc2.weight"
                | "ffn_gate_exps.weight"
                | "ffn_up_exps.weight" => {
                    by_rows(file, tensor, count, Order::Listed(order.clone()))?;
                }
                "ffn_gate.bias" | "ffn_up.bias" => {
                    tensor.source.row = 1;
                    by_rows(file, tensor, count, Order::Listed(order.clone()))?;
                }
                "ffn_down.weight"
                | "ffn_down_t.weight"
                | "ffn_down_exps.weight"
                | "ffn_down_t_exps.weight" => {
                    let before = tensor.dtype;
                    turn_down(file, tensor, (&order, &columns), keep_down_type)?;
                    if tensor.dtype == DType::Q8_0 && before != DType::Q8_0 {
                        finer = Some(before);
                    }
                    let experts = if layer.experts > 0 { "_exps" } else { "" };
                    tensor.name = format!("{first}ffn_down_t{experts}.weight");
                    downs += 1;
                }
                "ffn_down.bias" => tensor.name = format!("{first}ffn_down_t.bias"),
                _ => {}
            }
        }
        if downs != 1 {
            return Err(refused(file, format!("layer {index}, which has not one matrix `ffn_down`")));
        }
        let mut frequency = vector(format!("{first}ffn_frequency"), &layer.frequency);
        if layer.experts > 0 {
            frequency.dims = vec![count / layer.experts as u64, layer.experts as u64];
        }
        let mut added = vec![frequency];
        if let Some(planes) = &layer.planes {
            in_planes(file, tensors, &format!("{first}ffn_gate"), (count, &planes.gate_deviation))?;
            added.push(vector(format!("{first}ffn_gate_deviation"), &planes.gate_deviation));
            if let Some(deviation) = &planes.up_deviation {
                in_planes(file, tensors, &format!("{first}ffn_up"), (count, deviation))?;
                added.push(vector(format!("{first}ffn_up_deviation"), deviation));
            }
            if planes.down_norm.len() as u64 != count {
                return Err(refused(file, format!("lengths of rows of down that layer {index} has not")));
            }
            added.push(vector(format!("{first}ffn_down_norm"), &planes.down_norm));
        }
        if let Some(predictor) = &layer.predictor {
            added.extend(predictor_of(file, tensors, &first, predictor, &order)?);
        }
        let end = tensors.iter().rposition(|tensor| tensor.name.starts_with(&first)).map_or(0, |at| at + 1);
        tensors.splice(end..end, added);
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
    Ok(finer.map(|before| {
        format!("down is stored as Q8_0: {before} would be rounded a second time; start from the original where you can")
    }))
}

impl Neurons {
    /// The order as rows of gate and up; `None` where it is no permutation, of each expert's neurons.
    fn rows(&self) -> Option<Vec<u32>> {
        let experts = self.experts.max(1);
        let each = self.order.len() / experts;
        if each == 0 || each * experts != self.order.len() || u32::try_from(self.order.len()).is_err() {
            return None;
        }
        let mut seen = vec![false; self.order.len()];
        let mut rows = Vec::with_capacity(seen.len());
        for (at, &neuron) in self.order.iter().enumerate() {
            let row = at / each * each + neuron as usize;
            if neuron as usize >= each || std::mem::replace(&mut seen[row], true) {
                return None;
            }
            rows.push(row as u32); // below the length, which fits
        }
        Some(rows)
    }
}

fn vector<'a>(name: String, values: &[f32]) -> Tensor<'a> {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let count = values.len() as u64;
    let source = Source::as_stored(Data::Owned(bytes), DType::F32, count);
    Tensor { name, dtype: DType::F32, dims: vec![count], source }
}

/// Two planes instead of the matrix `name`, whose rows are in order already.
fn in_planes(
    file: &GgufFile,
    tensors: &mut Vec<Tensor<'_>>,
    name: &str,
    (count, deviation): (u64, &[f32]),
) -> Result<()> {
    let whole = format!("{name}.weight");
    let Some(at) = tensors.iter().position(|tensor| tensor.name == whole) else {
        return Err(refused(file, format!("`{whole}` in bit planes, which the model has not")));
    };
    let width = tensors[at].row_elements();
    if DType::Q8_0.row_bytes(width).is_none() {
        let what = format!("`{whole}` in bit planes: rows of {width} are no whole number of blocks of 32");
        return Err(refused(file, what));
    }
    if deviation.len() as u64 != count {
        return Err(refused(file, format!("`{whole}` in bit planes without a deviation for each neuron")));
    }
    let mut high = tensors.remove(at);
    let source = &high.source;
    let pieces = source.pieces.iter().map(Data::again).collect();
    let order = source.order.clone();
    let low = Source { pieces, order, plane: Some(Plane::Low), ..*source };
    let dims = vec![width / 2, count];
    let low = Tensor { name: format!("{name}_low.weight"), dtype: DType::I8, dims, source: low };
    high.name = format!("{name}_high.weight");
    high.dtype = DType::Q4_0;
    high.source.plane = Some(Plane::High);
    tensors.splice(at..at, [high, low]);
    Ok(())
}

/// The two tensors of a predictor that was trained.
fn predictor_of<'a>(
    file: &GgufFile,
    tensors: &[Tensor<'_>],
    first: &str,
    predictor: &Predictor,
    order: &Arc<[u32]>,
) -> Result<[Tensor<'a>; 2]> {
    let (rank, count) = (predictor.rank, order.len() as u64);
    let names = ["ffn_up.weight", "ffn_up_high.weight"].map(|part| format!("{first}{part}"));
    let up = tensors.iter().find(|tensor| names.contains(&tensor.name));
    let width = up.map_or(0, Tensor::row_elements);
    let wanted =
        |dtype: DType, row: u64, rows: u64| dtype.row_bytes(row).and_then(|bytes| bytes.checked_mul(rows));
    let first_type = predictor_type(width);
    if wanted(first_type, width, rank) != Some(predictor.fc1.len() as u64)
        || wanted(DType::Q8_0, rank, count) != Some(predictor.fc2.len() as u64)
    {
        return Err(refused(file, format!("a predictor of `{first}` whose sizes are not the layer's")));
    }
    let fc1 = Source::as_stored(Data::Owned(predictor.fc1.clone()), first_type, width);
    let mut fc2 = Source::as_stored(Data::Owned(predictor.fc2.clone()), DType::Q8_0, rank);
    fc2.order = Order::Listed(order.clone());
    let tensor = |part: &str, dims, source: Source<'a>| Tensor {
        name: format!("{first}{part}.weight"),
        dtype: source.dtype,
        dims,
        source,
    };
    Ok([tensor("fc1", vec![width, rank], fc1), tensor("fc2", vec![rank, count], fc2)])
}

fn refused(file: &GgufFile, what: String) -> FormatError {
    let advice = "models as they were published are".into();
    FormatError::Unsupported { path: file.path().to_path_buf(), what: format!("preparing {what}"), advice }
}

/// The tensor's rows in another order.
fn by_rows(file: &GgufFile, tensor: &mut Tensor<'_>, count: u64, order: Order) -> Result<()> {
    let rows: u64 = tensor.dims.iter().product::<u64>() / tensor.source.row.max(1);
    if rows != count || tensor.source.order != Order::AsStored || !has_whole_rows(tensor) {
        // Half of the rows of a fused matrix, say.
        if let (Order::Part { period, first, count: part }, Order::Listed(listed)) =
            (&tensor.source.order, &order)
            && rows == count
            && has_whole_rows(tensor)
        {
            let stored = listed.iter().map(|&row| {
                let row = u64::from(row);
                u32::try_from(row / part * period + first + row % part)
            });
            let Ok(stored) = stored.collect::<Result<Arc<[u32]>, _>>() else {
                return Err(refused(file, format!("`{}`, which has more than 2^32 rows", tensor.name)));
            };
            tensor.source.order = Order::Listed(stored);
            return Ok(());
        }
        return Err(refused(
            file,
            format!("`{}`, which has not a row for each of {count} neurons", tensor.name),
        ));
    }
    tensor.source.order = order;
    Ok(())
}

/// Whether each of the parts that follow one another holds whole rows.
fn has_whole_rows(tensor: &Tensor<'_>) -> bool {
    let size = tensor.source.dtype.row_bytes(tensor.source.row).unwrap_or(0);
    size > 0 && tensor.source.pieces.iter().all(|piece| (piece.len() as u64).is_multiple_of(size))
}

/// A row per neuron: columns of what is stored, or rows where it is PowerInfer's. `order` counts the neurons of all experts,
/// `each` those of every expert from 0.
fn turn_down(
    file: &GgufFile,
    tensor: &mut Tensor<'_>,
    (order, each): (&Arc<[u32]>, &Arc<[u32]>),
    keep_type: bool,
) -> Result<()> {
    let count = order.len() as u64;
    let (columns, rows, stacked) = match tensor.dims[..] {
        [columns, rows] => (columns, rows, 1),
        [columns, rows, stacked] => (columns, rows, stacked),
        _ => return Err(refused(file, format!("`{}`, which is no matrix", tensor.name))),
    };
    if let Order::Transposed { rows: stored } = tensor.source.order {
        // Convert would turn it back for others.
        tensor.source.order = Order::AsStored;
        tensor.dims = vec![rows, stored];
        return by_rows(file, tensor, count, Order::Listed(order.clone()));
    }
    if tensor.name.contains(".ffn_down_t") {
        return by_rows(file, tensor, count, Order::Listed(order.clone()));
    }
    let wanted = columns.checked_mul(stacked) == Some(count);
    if !wanted || tensor.source.order != Order::AsStored || !has_whole_rows(tensor) {
        return Err(refused(
            file,
            format!("`{}`, which has not a column for each of {count} neurons", tensor.name),
        ));
    }
    tensor.source.order = Order::ListedColumns { rows, columns: each.clone() };
    tensor.dims[..2].swap(0, 1);
    // Blocks run along the other side now: what was rounded to a few bits would be again, at a noticeable cost.
    let stored = tensor.source.dtype;
    if stored.is_quantised() && stored != DType::Q8_0 && tensor.dtype.is_quantised() && !keep_type {
        tensor.dtype = DType::Q8_0;
    }
    tensor.dtype = fitting(tensor.dtype, rows);
    Ok(())
}

/// SHA-256 over the model's files, in order, as hexadecimal digits.
///
/// # Errors
/// Where a file cannot be read.
pub fn hash_of(file: &GgufFile) -> Result<String> {
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
