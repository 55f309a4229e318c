//! The GGUF container, versions 2 and 3, and PowerInfer's variant of it.
//!
//! Layout: magic, version, counts, metadata, tensor table, padding to the alignment, data. PowerInfer's files are
//! version 3 with the magic `PWRI`; the magic alone says that the model is meant to run sparsely. Bytes after the last
//! tensor are allowed and ignored (writers pad there).

mod cursor;
mod header;
mod identify;
mod mapping;
mod metadata;
mod value;
pub mod writer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use engine_core::DType;

pub use metadata::Metadata;
pub use value::{Array, StringArray, Value, ValueType};
pub use writer::GgufWriter;

use crate::Result;
use header::Header;
use mapping::Bytes;

/// Which of the two containers a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Container {
    /// Magic `GGUF`.
    Gguf,
    /// Magic `PWRI`: PowerInfer's, whose models have ReLU gates and are meant to run sparsely.
    PowerInfer,
}

impl Container {
    /// The four bytes at the start of a file.
    pub fn magic(self) -> &'static [u8; 4] {
        match self {
            Container::Gguf => b"GGUF",
            Container::PowerInfer => b"PWRI",
        }
    }
}

/// A tensor of a file: what it is and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// How its elements are stored.
    pub dtype: DType,
    /// Sizes, innermost first (1 to 4, none of them 0).
    pub dims: Vec<u64>,
    /// Its bytes, from the start of the file; inside the file.
    pub file_range: Range<u64>,
}

impl TensorInfo {
    /// Elements of a row.
    pub fn row_elements(&self) -> u64 {
        self.dims.first().copied().unwrap_or(1)
    }

    /// Rows: the product of all sizes but the first.
    pub fn rows(&self) -> u64 {
        self.dims.iter().skip(1).product() // checked when the file was opened
    }

    /// All elements.
    pub fn elements(&self) -> u64 {
        self.dims.iter().product() // checked when the file was opened
    }

    /// All bytes.
    pub fn byte_len(&self) -> u64 {
        self.file_range.end - self.file_range.start
    }
}

/// A file whose header has been read and checked.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    bytes: Bytes,
    header: Header,
    index: HashMap<String, usize>,
}

impl GgufFile {
    /// Maps the file and checks its whole header; tensor data is not touched.
    ///
    /// The file must not be changed or cut by anyone while it is open: a read from a page that is gone ends the process.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufFile> {
        let path = path.as_ref();
        GgufFile::from_parts(path, Bytes::map(path)?)
    }

    /// Reads a file that is in memory already; `path` is only named in errors.
    pub fn parse(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<GgufFile> {
        GgufFile::from_parts(path.as_ref(), Bytes::Owned(bytes))
    }

    fn from_parts(path: &Path, bytes: Bytes) -> Result<GgufFile> {
        let header = header::parse(path, &bytes)?;
        let index = header.tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), at)).collect();
        Ok(GgufFile { path: path.to_path_buf(), bytes, header, index })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length of the file in bytes.
    pub fn file_len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Which container it is.
    pub fn container(&self) -> Container {
        self.header.container
    }

    /// Version of the container: 2 or 3.
    pub fn version(&self) -> u32 {
        self.header.version
    }

    /// Alignment of every tensor's start, relative to [`GgufFile::data_start`].
    pub fn alignment(&self) -> u64 {
        self.header.alignment
    }

    /// Where the tensors' data starts in the file.
    pub fn data_start(&self) -> u64 {
        self.header.data_start
    }

    /// Keys and values.
    pub fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// The tensor table, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.header.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&at| &self.header.tensors[at])
    }

    /// A tensor's bytes, for tools and tests (the runtime reads through a storage tier). `tensor` must be of this file;
    /// a range that is not inside the file gives no bytes.
    pub fn tensor_bytes(&self, tensor: &TensorInfo) -> &[u8] {
        let range =
            usize::try_from(tensor.file_range.start).ok().zip(usize::try_from(tensor.file_range.end).ok());
        range.and_then(|(start, end)| self.bytes.get(start..end)).unwrap_or_default()
    }
}
