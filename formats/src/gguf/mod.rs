//! The GGUF container, versions 2 and 3, and PowerInfer's variant of it.
//!
//! Layout: magic, version, counts, metadata, tensor table, padding to the alignment, data. PowerInfer's files are
//! version 3 with the magic `PWRI`; the magic alone says that the model is meant to run sparsely. Bytes after the last
//! tensor are allowed and ignored (writers pad there).

mod cursor;
pub(crate) mod header;
mod identify;
pub(crate) mod mapping;
mod metadata;
mod overrides;
pub(crate) mod split;
mod value;
pub mod writer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use engine_core::DType;

pub use metadata::Metadata;
pub use overrides::Override;
pub use value::{Array, StringArray, Value, ValueType};
pub use writer::GgufWriter;

use crate::{Result, safetensors};
use header::Header;
use mapping::Bytes;
use split::Shard;

/// Which of the two containers a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Container {
    /// Magic `GGUF`.
    Gguf,
    /// Magic `PWRI`: PowerInfer's, whose models have ReLU gates and are meant to run sparsely.
    PowerInfer,
    /// No GGUF at all, but a folder of safetensors, read as if it were one.
    Safetensors,
}

impl Container {
    /// The four bytes at the start of a file; what is read from safetensors is written as GGUF.
    pub fn magic(self) -> &'static [u8; 4] {
        match self {
            Container::Gguf | Container::Safetensors => b"GGUF",
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
    /// Which of the model's files that is ([`GgufFile::files`]); 0 unless the model is split.
    pub file: usize,
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

/// A file, or the set of files that a model was split into, whose headers have been read and checked.
#[derive(Debug)]
pub struct GgufFile {
    /// In order; never empty. Only a split model has more than one.
    shards: Vec<Shard>,
    header: Header,
    index: HashMap<String, usize>,
}

impl GgufFile {
    /// Maps the file and checks its whole header; tensor data is not touched.
    ///
    /// Any shard of a split model stands for the whole set, and a folder for the one model in it; a folder of
    /// safetensors with its `config.json` is read as if it were GGUF ([`Container::Safetensors`]). The files must not be
    /// changed or cut by anyone while they are open: a read from a page that is gone ends the process.
    pub fn open(path: impl AsRef<Path>) -> Result<GgufFile> {
        if let Some(folder) = safetensors::folder(path.as_ref()) {
            return safetensors::open(&folder);
        }
        let path = split::entry(path.as_ref())?;
        let bytes = Bytes::map(&path)?;
        let header = header::parse(&path, &bytes)?;
        if split::count(&header)? == 1 {
            return Ok(GgufFile::from_parts(vec![Shard { path, bytes }], header));
        }
        let (shards, header) = split::gather(&path, header, bytes)?;
        Ok(GgufFile::from_parts(shards, header))
    }

    /// Reads a file that is in memory already; `path` is only named in errors. Other shards are not looked for.
    pub fn parse(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<GgufFile> {
        let path = path.as_ref().to_path_buf();
        let bytes = Bytes::Owned(bytes);
        let header = header::parse(&path, &bytes)?;
        Ok(GgufFile::from_parts(vec![Shard { path, bytes }], header))
    }

    pub(crate) fn from_parts(shards: Vec<Shard>, header: Header) -> GgufFile {
        let index = split::index(&header.tensors);
        GgufFile { shards, header, index }
    }

    /// The path of the file; of the first one, where the model is split.
    pub fn path(&self) -> &Path {
        &self.shards[0].path
    }

    /// The model's files in order: [`TensorInfo::file`] counts here.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Length of all files together in bytes.
    pub fn file_len(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes.len() as u64).sum()
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

    /// Where the tensors' data starts in the (first) file.
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
        range.and_then(|(start, end)| self.shards.get(tensor.file)?.bytes.get(start..end)).unwrap_or_default()
    }
}
