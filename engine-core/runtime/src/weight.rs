//! A weight as lists read it, and how it comes from the model's files: bytes as they are, rows put together, another
//! type, or numbers that follow from the description.

use crate::{Result, RuntimeError};
use engine_core::{ClusterSet, DType, TensorType};
use formats::model::Linear;
use formats::quantise::{dequantise_rows, quantise_rows};
use formats::{ModelDescription, TensorInfo};
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

/// A constant of a model's lists.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Weight {
    /// The tensor's name, and what is done to it: no two weights of a model that differ share one.
    pub(crate) name: String,
    /// As the device holds it.
    pub(crate) shape: TensorType,
    source: Source,
}

#[derive(Clone, Debug, PartialEq)]
enum Source {
    /// As stored.
    Stored(Stored),
    /// Every element in another type, plus `add`; or parts of rows, put together.
    Made { stored: Stored, add: f32 },
    /// In no file.
    Values(Vec<f32>),
}

/// Rows in the model's files.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub(crate) dtype: DType,
    /// One behind the other; each holds whole rows.
    pub(crate) runs: Vec<Run>,
    /// Whether they are tensors of their own.
    pub(crate) gathered: bool,
    /// The parts of each row that are wanted, where these are not all.
    columns: Option<Columns>,
}

/// Parts of rows.
#[derive(Clone, Debug, PartialEq)]
struct Columns {
    /// Of a whole row, in bytes.
    row: u64,
    /// Bytes within the row, ascending, whole blocks.
    parts: Vec<Range<u64>>,
}

impl Columns {
    /// Bytes of a row's parts together.
    fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.end - part.start).sum()
    }

    /// The parts of whole rows, one behind the other.
    fn of(&self, rows: &[u8]) -> Vec<u8> {
        let size = usize::try_from(self.row.max(1)).unwrap_or(usize::MAX);
        let mut found = Vec::new();
        for row in rows.chunks_exact(size) {
            for part in &self.parts {
                // Within the row: the ranges were made from its length.
                found.extend_from_slice(row.get(part.start as usize..part.end as usize).unwrap_or_default());
            }
        }
        found
    }
}

/// Bytes of one of the model's files.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Run {
    /// Of the model's files.
    pub(crate) file: usize,
    pub(crate) range: Range<u64>,
}

impl Stored {
    /// All of a tensor.
    fn whole(tensor: &TensorInfo) -> Stored {
        Stored { dtype: tensor.dtype, runs: vec![Run::of(tensor)], gathered: false, columns: None }
    }

    /// Bytes in the files.
    pub(crate) fn byte_len(&self) -> u64 {
        let whole: u64 = self.runs.iter().map(|run| run.range.end - run.range.start).sum();
        match &self.columns {
            None => whole,
            Some(columns) => whole / columns.row.max(1) * columns.bytes(),
        }
    }
}

impl Run {
    fn of(tensor: &TensorInfo) -> Run {
        Run { file: tensor.file, range: tensor.file_range.clone() }
    }
}

/// Elements that are converted at once: enough for every processor, few beside a model.
const PORTION: u64 = 1 << 22;

impl Weight {
    /// A tensor as a matrix, a row per output, held as `dtype`.
    ///
    /// # Errors
    /// Where rows of that length have no place in that type, or the stored type is none of numbers.
    pub(crate) fn matrix(model: &ModelDescription, tensor: &TensorInfo, dtype: DType) -> Result<Weight> {
        let stored = Stored::whole(tensor);
        Weight::of(model, &tensor.name, stored, (tensor.rows(), tensor.row_elements(), dtype), 0.0)
    }

    /// The matrix of a linear map, held as `dtype`.
    ///
    /// # Errors
    /// As [`Weight::matrix`].
    pub(crate) fn linear(model: &ModelDescription, linear: &Linear, dtype: DType) -> Result<Weight> {
        if !linear.parts.is_empty() {
            let whole = &linear.weight;
            let runs = linear.parts.iter().map(Run::of).collect();
            let stored = Stored { dtype: whole.dtype, runs, gathered: true, columns: None };
            return Weight::of(model, &whole.name, stored, (whole.rows(), whole.row_elements(), dtype), 0.0);
        }
        if linear.rows.is_empty() {
            return Weight::matrix(model, &linear.weight, dtype);
        }
        let (name, stored) = some_rows(&linear.weight, linear.weight.rows(), &linear.rows);
        Weight::of(model, &name, stored, (linear.outputs(), linear.weight.row_elements(), dtype), 0.0)
    }

    /// A vector: always F32, with `add` added to each element.
    ///
    /// # Errors
    /// As [`Weight::matrix`].
    pub(crate) fn vector(model: &ModelDescription, tensor: &TensorInfo, add: f32) -> Result<Weight> {
        let stored = Stored::whole(tensor);
        Weight::of(model, &tensor.name, stored, (1, tensor.elements(), DType::F32), add)
    }

    /// The bias of a linear map, where it has one.
    ///
    /// # Errors
    /// As [`Weight::matrix`].
    pub(crate) fn bias(model: &ModelDescription, linear: &Linear) -> Result<Option<Weight>> {
        let Some(bias) = &linear.bias else { return Ok(None) };
        if linear.rows.is_empty() {
            return Weight::vector(model, bias, 0.0).map(Some);
        }
        let (name, stored) = some_rows(bias, bias.elements(), &linear.rows);
        Weight::of(model, &name, stored, (1, linear.outputs(), DType::F32), 0.0).map(Some)
    }

    /// Rows of a matrix with a row per neuron: those of some neurons.
    ///
    /// # Errors
    /// As [`Weight::matrix`].
    pub(crate) fn neuron_rows(
        model: &ModelDescription,
        tensor: &TensorInfo,
        dtype: DType,
        neurons: &ClusterSet,
    ) -> Result<Weight> {
        let (_, stored) = some_rows(tensor, tensor.rows(), &ranges(neurons));
        let shape = (neurons.len().into(), tensor.row_elements(), dtype);
        Weight::of(model, &part_name(tensor, neurons), stored, shape, 0.0)
    }

    /// Elements of a vector with one per neuron: those of some neurons. Always F32.
    ///
    /// # Errors
    /// As [`Weight::matrix`].
    pub(crate) fn neuron_vector(
        model: &ModelDescription,
        tensor: &TensorInfo,
        neurons: &ClusterSet,
    ) -> Result<Weight> {
        let (_, stored) = some_rows(tensor, tensor.elements(), &ranges(neurons));
        Weight::of(model, &part_name(tensor, neurons), stored, (1, neurons.len().into(), DType::F32), 0.0)
    }

    /// Columns of a matrix with a column per neuron: those of some neurons, in whole blocks.
    ///
    /// # Errors
    /// As [`Weight::matrix`].
    pub(crate) fn neuron_columns(
        model: &ModelDescription,
        tensor: &TensorInfo,
        dtype: DType,
        neurons: &ClusterSet,
    ) -> Result<Weight> {
        let bytes = |elements: u64| tensor.dtype.row_bytes(elements);
        let part = |range: &Range<u64>| Some(bytes(range.start)?..bytes(range.end)?);
        let parts: Option<Vec<_>> = ranges(neurons).iter().map(part).collect();
        let (Some(parts), Some(row)) = (parts, bytes(tensor.row_elements())) else {
            return Err(RuntimeError::Model {
                path: path_of(model, tensor.file).to_path_buf(),
                what: format!("dividing `{}` of type {} between devices", tensor.name, tensor.dtype),
                advice: "plan ranges of neurons that begin and end with its blocks".into(),
            });
        };
        let stored = Stored { columns: Some(Columns { row, parts }), ..Stored::whole(tensor) };
        let shape = (tensor.rows(), neurons.len().into(), dtype);
        Weight::of(model, &part_name(tensor, neurons), stored, shape, 0.0)
    }

    /// A vector that is in no file; `name` says what it follows from.
    pub(crate) fn values(name: String, values: Vec<f32>) -> Weight {
        Weight { name, shape: TensorType::f32_vector(values.len() as u64), source: Source::Values(values) }
    }

    fn of(
        model: &ModelDescription,
        name: &str,
        stored: Stored,
        (rows, columns, dtype): (u64, u64, DType),
        add: f32,
    ) -> Result<Weight> {
        let refused = |reason: String| RuntimeError::Model {
            path: path_of(model, stored.runs.first().map_or(0, |run| run.file)).to_path_buf(),
            what: format!("`{name}` of type {} where {dtype} is needed ({reason})", stored.dtype),
            advice: "store it as F32, F16 or BF16".into(),
        };
        let shape = TensorType::matrix(dtype, rows, columns).map_err(|error| refused(error.detail()))?;
        if stored.dtype == dtype && add == 0.0 && stored.columns.is_none() {
            return Ok(Weight { name: name.to_owned(), shape, source: Source::Stored(stored) });
        }
        // A portion of the result is made of as many whole rows.
        let converts = stored.dtype != dtype || add != 0.0;
        if converts
            && (!formats::quantise::READABLE.contains(&stored.dtype)
                || stored.dtype.row_bytes(columns).is_none())
        {
            return Err(refused("it cannot be converted".into()));
        }
        let mut name = name.to_owned();
        if stored.dtype != dtype {
            name = format!("{name} as {dtype}");
        }
        if add != 0.0 {
            name = format!("{name} + {add}");
        }
        Ok(Weight { name, shape, source: Source::Made { stored, add } })
    }

    /// Bytes on a device.
    pub(crate) fn byte_len(&self) -> u64 {
        self.shape.bytes()
    }

    /// The stored rows, where the device gets exactly these.
    pub(crate) fn stored(&self) -> Option<&Stored> {
        match &self.source {
            Source::Stored(stored) => Some(stored),
            _ => None,
        }
    }

    /// Whether a device that wants this alignment can view it where the file is in memory, at an address that suits.
    pub(crate) fn is_viewable(&self, alignment: u64) -> bool {
        let Some(Stored { runs, dtype, .. }) = self.stored() else { return false };
        let alignment = alignment.max(address_unit(*dtype)).max(1);
        matches!(&runs[..], [run] if run.range.start.is_multiple_of(alignment))
    }

    /// What it is made from, where it is not there as the device gets it: in another type, or parts of rows.
    pub(crate) fn made_from(&self) -> Option<&Stored> {
        match &self.source {
            Source::Made { stored, .. } => Some(stored),
            _ => None,
        }
    }

    /// Gives its bytes to `emit`, in order and in portions; `read` gives those of a file of the model. `threads` convert.
    ///
    /// # Errors
    /// Those of `read` and `emit`, and where a stored value cannot be converted.
    pub(crate) fn make<'a>(
        &self,
        threads: usize,
        read: &mut dyn FnMut(usize, Range<u64>) -> Result<Cow<'a, [u8]>>,
        emit: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        match &self.source {
            Source::Values(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                emit(&bytes)
            }
            Source::Stored(stored) => {
                stored.runs.iter().try_for_each(|run| emit(&read(run.file, run.range.clone())?))
            }
            Source::Made { stored, add } => {
                for run in &stored.runs {
                    for portion in self.portions(stored, run.range.clone()) {
                        let mut bytes = read(run.file, portion)?;
                        if let Some(columns) = &stored.columns {
                            bytes = columns.of(&bytes).into();
                        }
                        if stored.dtype == self.shape.dtype && *add == 0.0 {
                            emit(&bytes)?;
                        } else {
                            emit(&self.convert(stored, &bytes, *add, threads)?)?;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    /// Elements that are converted together at least: a row, or a block of a vector.
    fn unit(&self, stored: &Stored) -> u64 {
        if self.shape.rows == 1 { stored.dtype.block_elements() } else { self.shape.columns }
    }

    /// A run of whole units in parts of at most some millions of elements.
    fn portions(&self, stored: &Stored, run: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let unit = self.unit(stored);
        let bytes = match &stored.columns {
            Some(columns) => columns.row.max(1),
            None => stored.dtype.row_bytes(unit).unwrap_or(1).max(1), // checked when it was made
        };
        let step = (PORTION / unit).max(1).saturating_mul(bytes);
        std::iter::successors(Some(run.start), move |start| start.checked_add(step))
            .take_while(move |start| *start < run.end)
            .map(move |start| start..run.end.min(start.saturating_add(step)))
    }

    /// Whole units in the device's type.
    fn convert(&self, stored: &Stored, bytes: &[u8], add: f32, threads: usize) -> Result<Vec<u8>> {
        let unit = self.unit(stored);
        let unit_bytes = stored.dtype.row_bytes(unit).unwrap_or(1).max(1);
        let mut values = vec![0.0; (bytes.len() as u64 / unit_bytes * unit) as usize];
        dequantise_rows(stored.dtype, bytes, unit as usize, threads, &mut values)?;
        if add != 0.0 {
            values.iter_mut().for_each(|value| *value += add);
        }
        Ok(quantise_rows(self.shape.dtype, &values, unit as usize, threads)?)
    }
}

/// Bytes that an address of this type must be a multiple of, whatever the device says.
pub(crate) fn address_unit(dtype: DType) -> u64 {
    if dtype.is_quantised() { 1 } else { dtype.block_bytes() }
}

/// Rows `rows` of the `of` that a tensor has, as runs of bytes, with a name that tells them from others.
fn some_rows(tensor: &TensorInfo, of: u64, rows: &[Range<u64>]) -> (String, Stored) {
    // Whole rows are whole blocks, and the tensor lies inside the file.
    let unit = tensor.byte_len() / of.max(1);
    let start = tensor.file_range.start;
    let range = |rows: &Range<u64>| start + rows.start * unit..start + rows.end * unit;
    let runs = rows.iter().map(|rows| Run { file: tensor.file, range: range(rows) }).collect();
    let first = rows.first().map_or(0..0, Range::clone);
    let more = rows.len().saturating_sub(1);
    let name = format!("{}[{}..{} and {more} more]", tensor.name, first.start, first.end);
    (name, Stored { dtype: tensor.dtype, runs, gathered: false, columns: None })
}

/// Neurons as ranges of rows, or of columns.
fn ranges(neurons: &ClusterSet) -> Vec<Range<u64>> {
    neurons.ranges().iter().map(|range| u64::from(range.start)..u64::from(range.end)).collect()
}

/// The name of some neurons' part of a tensor: all ranges, so that no two parts share one.
fn part_name(tensor: &TensorInfo, neurons: &ClusterSet) -> String {
    let ranges: Vec<String> = neurons.ranges().iter().map(ToString::to_string).collect();
    format!("{}[{}]", tensor.name, ranges.join(", "))
}

/// The path of one of a model's files, for messages.
pub(crate) fn path_of(model: &ModelDescription, file: usize) -> &Path {
    model.files.get(file).unwrap_or(&model.path)
}
