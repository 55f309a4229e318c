//! The error of every reader and writer here: which file, which key or tensor, what is wrong, what to do.

use std::io;
use std::path::PathBuf;

/// Why a file was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system refused an operation on the file.
    #[error("{}: cannot {operation}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried, such as `open` or `rename`.
        operation: &'static str,
        /// The system's own words.
        source: io::Error,
    },
    /// The file is something else: empty, a web page, a git-LFS pointer, another format.
    #[error("{}: not a GGUF file: {found}", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What it seems to be, and what to do.
        found: String,
    },
    /// A file of a safetensors model that is damaged or something else.
    #[error("{}: the file {problem}", path.display())]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong, as a predicate, and what to do.
        problem: String,
    },
    /// A file of PyTorch's that is damaged, or holds more than tensors.
    #[error("{}: {problem}", path.display())]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A container version that is not read here.
    #[error("{}: GGUF version {found} is not supported: {advice}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version in the header.
        found: u32,
        /// What to do.
        advice: &'static str,
    },
    /// The file ends inside its header.
    #[error(
        "{}: the file ends inside {what}: {needed} bytes needed at offset {offset}, {present} present; \
         it was cut short (fetch it again) or is damaged",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The part of the header being read.
        what: String,
        /// Where it starts.
        offset: u64,
        /// Bytes it needs.
        needed: u64,
        /// Bytes left in the file from there.
        present: u64,
    },
    /// The file ends before or inside a tensor.
    #[error(
        "{}: tensor `{tensor}` needs {needed} bytes at offset {offset}, but only {present} of them are in the file \
         ({file_len} bytes long); it was cut short (fetch it again) or is damaged",
        path.display()
    )]
    TruncatedTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Where it starts in the file.
        offset: u64,
        /// Bytes of the tensor.
        needed: u64,
        /// Bytes of it that are in the file.
        present: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// A field of the header holds what it must not.
    #[error("{}: damaged header: {field} (at offset {offset}): {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// Where it is.
        offset: u64,
        /// What it holds, and what is allowed.
        problem: String,
    },
    /// A file of a model that was split is absent.
    #[error("{}: missing: it is shard {number} of {count}; put all {count} files into one folder", path.display())]
    MissingShard {
        /// The absent file.
        path: PathBuf,
        /// Its number, from 1.
        number: u64,
        /// How many there are.
        count: u64,
    },
    /// A metadata key that is needed is absent.
    #[error("{}: metadata key `{key}` is missing: {advice}", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What it is for, and what to do.
        advice: String,
    },
    /// A metadata key has a value of the wrong type.
    #[error("{}: metadata key `{key}` holds {found}, but {wanted} is wanted", path.display())]
    KeyType {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The type (and value, where short) found.
        found: String,
        /// The type wanted.
        wanted: String,
    },
    /// A metadata key has a value that makes no sense.
    #[error("{}: metadata key `{key}`: {problem}", path.display())]
    KeyValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value, and what is allowed.
        problem: String,
    },
    /// A tensor that the model needs is absent.
    #[error("{}: tensor `{tensor}` is missing: {advice}", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Why it is needed, and what to do.
        advice: String,
    },
    /// A tensor has the wrong shape.
    #[error("{}: tensor `{tensor}` has shape {found}, but {wanted} is wanted ({reason})", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape, innermost dimension first.
        found: String,
        /// The shape that the rest of the file asks for.
        wanted: String,
        /// Where the wanted shape comes from.
        reason: String,
    },
    /// Something else is wrong with a tensor.
    #[error("{}: tensor `{tensor}`: {problem}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// The file is sound, but asks for something that is not built.
    #[error("{}: {what} is not supported; {advice}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        what: String,
        /// What is accepted, and what to do.
        advice: String,
    },
    /// A file that must not be written, or could not be.
    #[error("{}: {problem}", path.display())]
    Target {
        /// The file.
        path: PathBuf,
        /// Why, as a predicate, and what to do.
        problem: String,
    },
    /// Writing was stopped.
    #[error("{}: stopped before it was complete; nothing was written", path.display())]
    Cancelled {
        /// The file that would have been written.
        path: PathBuf,
    },
    /// Bytes or values that cannot be converted between block formats.
    #[error("conversion of {dtype}: {problem}")]
    Conversion {
        /// The block format's name.
        dtype: &'static str,
        /// What is wrong.
        problem: String,
    },
}
