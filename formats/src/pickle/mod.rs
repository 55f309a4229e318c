//! Tensors in PyTorch's `.pt` files (a zip archive with a pickle in it), read without executing anything.
//!
//! A pickle is a program that may call whatever it names. Here only the steps that `torch.save` of tensors writes are
//! known, and of the names only those of dictionaries, tensors and storages; everything else is refused by its name.
//! Nothing is imported, called or built but plain values, and memory is bounded by the length of the pickle. Written by
//! the formats' public descriptions: the zip format's APPNOTE (4.3), and Python's `pickletools` for the steps.

mod machine;
mod statistics;
mod zip;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine_core::DType;

use crate::gguf::mapping::Bytes;
use crate::{FormatError, Result};
pub use statistics::statistics;

/// A file of tensors.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    bytes: Arc<Bytes>,
    tensors: Vec<StoredTensor>,
}

/// A tensor in a file: dense, in the usual order of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Its key; empty where the file holds one tensor alone.
    pub name: String,
    /// How its elements are stored.
    pub dtype: DType,
    /// Sizes, innermost first; none of them 0.
    pub dims: Vec<u64>,
    range: Range<usize>,
}

impl Checkpoint {
    /// Maps the file and reads what tensors it holds.
    ///
    /// # Errors
    /// Where it is no such file, is damaged, or holds anything else than tensors.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        let path = path.as_ref();
        Checkpoint::read(path, Bytes::map(path)?)
    }

    /// [`Checkpoint::open`] for a file that is in memory; `path` is only named in errors.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn parse(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Checkpoint> {
        Checkpoint::read(path.as_ref(), Bytes::Owned(bytes))
    }

    fn read(path: &Path, bytes: Bytes) -> Result<Checkpoint> {
        let bad = |problem| FormatError::Checkpoint { path: path.to_path_buf(), problem };
        let archive = zip::Archive::read(&bytes).map_err(bad)?;
        let (pickle, folder) = archive.only_named("data.pkl").map_err(bad)?;
        let pickle = bytes.get(pickle).unwrap_or_default();
        if let Some(range) = archive.find(&format!("{folder}byteorder")) {
            let order = bytes.get(range).unwrap_or_default();
            if order != b"little" {
                let order = String::from_utf8_lossy(&order[..order.len().min(20)]).into_owned();
                return Err(bad(format!("its numbers are stored {order:?}; little is wanted")));
            }
        }
        let mut tensors: Vec<StoredTensor> = Vec::new();
        for found in machine::tensors(pickle).map_err(bad)? {
            let name = found.name.clone();
            let tensor = place(found, &archive, &folder).map_err(|problem| FormatError::Tensor {
                path: path.to_path_buf(),
                tensor: name,
                problem,
            })?;
            tensors.push(tensor);
        }
        Ok(Checkpoint { path: path.to_path_buf(), bytes: Arc::new(bytes), tensors })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors in the file's order.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The tensor with this key.
    pub fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// A tensor's bytes, of this file.
    pub fn bytes_of(&self, tensor: &StoredTensor) -> &[u8] {
        self.bytes.get(tensor.range.clone()).unwrap_or_default()
    }

    /// The file's bytes, and where the tensor is in them.
    pub(crate) fn shared(&self, tensor: &StoredTensor) -> (Arc<Bytes>, Range<usize>) {
        (Arc::clone(&self.bytes), tensor.range.clone())
    }
}

/// Finds a tensor's bytes; everything that the pickle claims is checked against the archive.
fn place(
    found: machine::FoundTensor,
    archive: &zip::Archive,
    folder: &str,
) -> std::result::Result<StoredTensor, String> {
    let machine::FoundTensor { name, storage, offset, sizes, strides } = found;
    if sizes.len() > 4 || sizes.contains(&0) {
        return Err(format!("has shape {sizes:?}; up to 4 dimensions, none of them 0, are allowed"));
    }
    if strides.len() != sizes.len() {
        return Err(format!("has {} strides for {} dimensions", strides.len(), sizes.len()));
    }
    let mut step = 1_u64;
    for (&size, &stride) in sizes.iter().zip(&strides).rev() {
        if size > 1 && stride != step {
            return Err(format!(
                "is a view (shape {sizes:?}, strides {strides:?}); save it with `.contiguous()` or `.clone()`"
            ));
        }
        step = step.checked_mul(size).ok_or_else(|| format!("has shape {sizes:?}, which is too large"))?;
    }
    let size = storage.dtype.block_bytes();
    let end = offset.checked_add(step).filter(|&end| end <= storage.elements);
    let Some(end) = end else {
        return Err(format!(
            "takes {step} elements from {offset} on, of {} that its storage has",
            storage.elements
        ));
    };
    let entry = format!("{folder}data/{}", storage.key);
    let Some(range) = archive.find(&entry) else {
        return Err(format!("its numbers are missing: the archive has no `{entry}`"));
    };
    let needed = storage.elements.checked_mul(size);
    if needed.is_none_or(|needed| needed > range.len() as u64) {
        return Err(format!(
            "its storage `{entry}` has {} bytes, too few for {} elements",
            range.len(),
            storage.elements
        ));
    }
    // Not past the entry's end, which is in the file.
    let range = range.start + (offset * size) as usize..range.start + (end * size) as usize;
    let mut dims: Vec<u64> = sizes.into_iter().rev().collect();
    if dims.is_empty() {
        dims.push(1);
    }
    Ok(StoredTensor { name, dtype: storage.dtype, dims, range })
}
