//! Makes GGUF files: of safetensors folders and PowerInfer's container as other programs read them, and of any model
//! with its weights in other types.
//!
//! [`plan`] decides everything without reading a weight: keys, names, order of elements, types. [`Output::write`] then
//! streams tensor by tensor. What a safetensors folder needs besides copying: names (done where it is opened), queries
//! and keys of the Llama family in GGUF's order of rope pairs, Gemma's norms plus 1, Falcon's fused matrix taken out of
//! its groups, experts stacked, Llama 3's rope scaling as a tensor of factors, keys in the types that llama.cpp wants.

mod keys;
mod neurons;
mod original;
mod predictors;
mod source;
mod tensors;
mod types;
mod write;

use std::ops::Range;
use std::path::{Path, PathBuf};

use engine_core::DType;

use crate::gguf::writer::Row;
use crate::gguf::{Container, GgufFile, Value};
use crate::model::ModelDescription;
use crate::{FormatError, Result};
pub use neurons::{Neurons, Planes, Predictor, hash_of, predictor_type};
pub(crate) use source::{Data, Order, Source};
pub use types::Types;
pub use write::{check_target, partial_path};

/// What is to be made of a model.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// How weights are stored.
    pub types: Types,
    /// Name of the pre-tokenizer, instead of the one that was found.
    pub pre_tokenizer: Option<String>,
    /// Leaves the tokenizer out.
    pub without_tokenizer: bool,
    /// Folder of PowerInfer's predictors (`model_0.pt`, ...) to be added.
    pub predictors: Option<PathBuf>,
    /// For each layer, the order in which its neurons are to be: then down is stored with a row per neuron.
    pub neurons: Option<Vec<Neurons>>,
    /// Leaves predictors out, which other programs than this one and PowerInfer do not know.
    pub without_predictors: bool,
    /// Keeps down's type where a row per neuron means that it is rounded a second time; otherwise it becomes Q8_0 there.
    pub keep_down_type: bool,
    /// Keys to be set, whatever the model says.
    pub keys: Vec<(String, Value)>,
}

/// How a file is written.
#[derive(Clone, Copy, Debug)]
pub struct WriteOptions {
    /// Threads that convert.
    pub threads: usize,
    /// Replaces a file that is there.
    pub force: bool,
}

/// A file that is to be written.
#[derive(Debug)]
pub struct Output<'a> {
    container: Container,
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor<'a>>,
    /// Files that are read.
    inputs: Vec<PathBuf>,
    /// Whether the model was whole, so that what is written must be.
    complete: bool,
    /// What a person should be told, one sentence each.
    pub lines: Vec<String>,
}

/// A tensor's elements, encoded.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// How.
    pub dtype: DType,
    /// Innermost first.
    pub dims: Vec<u64>,
    /// Rows one behind the other.
    pub bytes: Vec<u8>,
}

/// A tensor that is to be written.
#[derive(Debug)]
pub(crate) struct Tensor<'a> {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    /// Innermost first.
    pub(crate) dims: Vec<u64>,
    pub(crate) source: Source<'a>,
}

impl Tensor<'_> {
    fn elements(&self) -> u64 {
        self.dims.iter().product() // those of stored tensors
    }

    fn row_elements(&self) -> u64 {
        self.dims.first().copied().unwrap_or(1)
    }

    fn byte_len(&self) -> u64 {
        let row = self.dtype.row_bytes(self.row_elements()).unwrap_or(0); // types are chosen to fit
        row * self.dims.iter().skip(1).product::<u64>()
    }

    fn row(&self) -> Row<'_> {
        Row { name: &self.name, dtype: self.dtype, dims: &self.dims, bytes: self.byte_len() }
    }

    fn portions(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        self.source.portions(self.elements(), self.row_elements())
    }

    fn read(&self, portion: Range<u64>, target: &Path) -> Result<Vec<u8>> {
        self.source.read(portion.clone(), self.row_elements(), self.dtype).map_err(|error| {
            FormatError::Tensor {
                path: target.to_path_buf(),
                tensor: self.name.clone(),
                problem: format!(
                    "cannot be stored as {} (elements from {}): {error}",
                    self.dtype, portion.start
                ),
            }
        })
    }
}

impl Output<'_> {
    /// A tensor as it would be written, or with its elements in another type; `None` where there is none of that name.
    ///
    /// # Errors
    /// Where its elements do not fit the type.
    pub fn encoded(&self, name: &str, dtype: Option<DType>) -> Result<Option<Encoded>> {
        let Some(tensor) = self.tensors.iter().find(|tensor| tensor.name == name) else { return Ok(None) };
        let dtype = dtype.unwrap_or(tensor.dtype);
        let failed = |error: FormatError| FormatError::Tensor {
            path: self.inputs.first().cloned().unwrap_or_default(),
            tensor: name.to_owned(),
            problem: format!("cannot be stored as {dtype}: {error}"),
        };
        let mut bytes = Vec::new();
        for portion in tensor.portions() {
            bytes.extend(tensor.source.read(portion, tensor.row_elements(), dtype).map_err(failed)?);
        }
        Ok(Some(Encoded { dtype, dims: tensor.dims.clone(), bytes }))
    }
}

/// What a prepared model says about how it runs, held against what is done to it.
fn keep_policy(
    file: &GgufFile,
    options: &Options,
    tensors: &[Tensor<'_>],
    metadata: &mut Vec<(String, Value)>,
    lines: &mut Vec<String>,
) -> Result<()> {
    let path = file.path().display();
    if options.without_predictors && file.metadata().string(POLICY)? == Some("predictor") {
        metadata.retain(|(key, _)| key != POLICY);
        lines.push(format!("{path}: was to run by its predictors, which are left out: it runs exactly now"));
    }
    let planes = tensors.iter().filter(|tensor| tensor.name.ends_with("_low.weight")).count();
    if planes > 0 && options.types.matrices.is_some() && options.neurons.is_none() {
        lines.push(format!(
            "{path}: {planes} matrices in bit planes (Q8_0 in two parts) stay as they are; prepare the model that it was \
             made of for another type"
        ));
    }
    Ok(())
}

/// The key of the policy by which a prepared model runs where nobody names one.
const POLICY: &str = "thermocline.policy";

/// Decides what is written of the model in `file`.
///
/// # Errors
/// Where the model has what GGUF has no place for, or a type that is not read here; names tensor or key.
pub fn plan<'a>(file: &'a GgufFile, options: &Options) -> Result<Output<'a>> {
    plan_from(file, None, options)
}

/// [`plan`], with the feed-forward networks' matrices taken from `original`, the model that `file` was quantised from;
/// types stay those of `file`.
///
/// # Errors
/// As [`plan`], and where `original` is another model.
pub fn plan_from<'a>(
    file: &'a GgufFile,
    original: Option<&'a GgufFile>,
    options: &Options,
) -> Result<Output<'a>> {
    let mut lines = Vec::new();
    let complete = file.container() == Container::Safetensors || ModelDescription::describe(file).is_ok();
    let mut tensors = tensors::collect(file, options, &mut lines)?;
    if let Some(original) = original {
        original::take(file, original, &mut tensors, &mut lines)?;
    }
    let mut metadata = keys::collect(file, options, &mut lines)?;
    if let Some(folder) = &options.predictors {
        predictors::add(folder, file, &mut tensors, &mut metadata, &mut lines)?;
    }
    keep_policy(file, options, &tensors, &mut metadata, &mut lines)?;
    if let Some(layers) = &options.neurons {
        let downs = neurons::sort(file, layers, options.keep_down_type, &mut tensors, &mut metadata)?;
        lines.extend(downs);
    }
    let file_type = types::choose(&options.types, file, &mut tensors, &mut lines)?;
    let mut set = |key: &str, value: Value| match metadata.iter_mut().find(|entry| entry.0 == key) {
        Some(entry) => entry.1 = value,
        None => metadata.push((key.to_owned(), value)),
    };
    for (key, value) in &options.keys {
        set(key, value.clone());
    }
    if let Some(file_type) = file_type {
        set("general.file_type", Value::U32(file_type));
    }
    if tensors.iter().any(|tensor| tensor.dtype.is_quantised()) {
        set("general.quantization_version", Value::U32(2));
    }
    Ok(Output {
        container: Container::Gguf,
        metadata,
        tensors,
        inputs: file
            .files()
            .chain(original.into_iter().flat_map(GgufFile::files))
            .map(Path::to_path_buf)
            .collect(),
        complete,
        lines,
    })
}
