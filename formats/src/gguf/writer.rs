//! Writes GGUF files: metadata and tensors into a temporary file beside the target, renamed when complete.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use engine_core::DType;

use super::value::{Array, Value};
use super::{Container, GgufFile};
use crate::{FormatError, Result};

/// A file to be written. Tensors may borrow their bytes, so copying a mapped file costs no memory.
#[derive(Clone, Debug)]
pub struct GgufWriter<'a> {
    container: Container,
    version: u32,
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor<'a>>,
}

#[derive(Clone, Debug)]
struct Tensor<'a> {
    name: String,
    dtype: DType,
    dims: Vec<u64>,
    bytes: Cow<'a, [u8]>,
}

impl<'a> GgufWriter<'a> {
    /// An empty file of version 3.
    pub fn new(container: Container) -> GgufWriter<'a> {
        GgufWriter { container, version: 3, metadata: Vec::new(), tensors: Vec::new() }
    }

    /// Everything that `file` holds, to be changed and written again. A split model becomes one file. What was read from
    /// safetensors keeps its own order of elements (`rope.pairs`, `norm_offset`), which other programs do not know:
    /// [`convert`](crate::convert) is for them.
    pub fn copy_of(file: &'a GgufFile) -> GgufWriter<'a> {
        let joined = file.files().len() > 1;
        let kept = file.metadata().iter().filter(|(key, _)| !(joined && key.starts_with("split.")));
        let metadata = kept.map(|(key, value)| (key.to_owned(), value.clone())).collect();
        let tensor = |info: &super::TensorInfo| Tensor {
            name: info.name.clone(),
            dtype: info.dtype,
            dims: info.dims.clone(),
            bytes: Cow::Borrowed(file.tensor_bytes(info)),
        };
        GgufWriter {
            container: match file.container() {
                Container::Safetensors => Container::Gguf,
                other => other,
            },
            version: file.version(),
            metadata,
            tensors: file.tensors().iter().map(tensor).collect(),
        }
    }

    /// Chooses the container.
    pub fn set_container(&mut self, container: Container) -> &mut Self {
        self.container = container;
        self
    }

    /// Sets a key, in its old place where it was set before. `general.alignment` (u32) decides the file's alignment.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        let value = value.into();
        match self.metadata.iter_mut().find(|entry| entry.0 == key) {
            Some(entry) => entry.1 = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
        self
    }

    /// Removes a key, where it is set.
    pub fn remove(&mut self, key: &str) -> &mut Self {
        self.metadata.retain(|entry| entry.0 != key);
        self
    }

    /// Adds a tensor, or replaces the one with this name. `dims` are innermost first; `bytes` must be exactly theirs.
    pub fn tensor(
        &mut self,
        name: &str,
        dtype: DType,
        dims: &[u64],
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Result<&mut Self> {
        let bytes = bytes.into();
        let row = dims.first().and_then(|&row| dtype.row_bytes(row));
        let wanted =
            row.and_then(|row| dims[1..].iter().try_fold(row, |product, &size| product.checked_mul(size)));
        if wanted != Some(bytes.len() as u64) {
            return Err(FormatError::Tensor {
                path: "file to be written".into(),
                tensor: name.to_owned(),
                problem: match wanted {
                    Some(wanted) => format!("{dtype} {dims:?} takes {wanted} bytes, {} given", bytes.len()),
                    None => format!("{dtype} {dims:?} is no shape of whole blocks"),
                },
            });
        }
        let tensor = Tensor { name: name.to_owned(), dtype, dims: dims.to_vec(), bytes };
        match self.tensors.iter_mut().find(|old| old.name == name) {
            Some(old) => *old = tensor,
            None => self.tensors.push(tensor),
        }
        Ok(self)
    }

    /// Removes a tensor, where it is present.
    pub fn remove_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// Gives a tensor another name, where it is present.
    pub fn rename_tensor(&mut self, old: &str, new: &str) -> &mut Self {
        for tensor in self.tensors.iter_mut().filter(|tensor| tensor.name == old) {
            tensor.name = new.to_owned();
        }
        self
    }

    /// The file's bytes, in memory.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        // Writing into a Vec cannot fail.
        let _ = self.write_to(&mut out);
        out
    }

    /// Writes the file: first `PATH.partial` in the same folder, then renamed; a failure leaves nothing behind.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".{}.partial", std::process::id()));
        let partial = Path::new(&partial);
        let io = |operation| move |source| FormatError::Io { path: path.to_path_buf(), operation, source };
        let written = (|| {
            let file = File::create(partial).map_err(io("create"))?;
            let mut out = BufWriter::with_capacity(1 << 20, file);
            self.write_to(&mut out).map_err(io("write"))?;
            let file = out.into_inner().map_err(|error| io("write")(error.into_error()))?;
            file.sync_all().map_err(io("write"))?;
            fs::rename(partial, path).map_err(io("rename"))
        })();
        if written.is_err() {
            let _ = fs::remove_file(partial); // it may never have been made
        }
        written
    }

    fn alignment(&self) -> u64 {
        alignment(&self.metadata)
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let alignment = self.alignment();
        let rows: Vec<Row<'_>> = self.tensors.iter().map(Tensor::row).collect();
        let header = header(self.container, self.version, &self.metadata, &rows, alignment);
        out.write_all(&header)?;
        pad(out, header.len() as u64, alignment)?;
        for tensor in &self.tensors {
            out.write_all(&tensor.bytes)?;
            pad(out, tensor.bytes.len() as u64, alignment)?;
        }
        Ok(())
    }
}

/// A tensor in the header.
pub(crate) struct Row<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: DType,
    pub(crate) dims: &'a [u64],
    pub(crate) bytes: u64,
}

impl Tensor<'_> {
    fn row(&self) -> Row<'_> {
        Row { name: &self.name, dtype: self.dtype, dims: &self.dims, bytes: self.bytes.len() as u64 }
    }
}

/// The alignment that a file with this metadata has.
pub(crate) fn alignment(metadata: &[(String, Value)]) -> u64 {
    let key = metadata.iter().find(|entry| entry.0 == "general.alignment");
    let value = key.and_then(|entry| entry.1.integer()).and_then(|value| u64::try_from(value).ok());
    value.filter(|value| value.is_power_of_two()).unwrap_or(32)
}

/// All that stands before the padding and the data.
pub(crate) fn header(
    container: Container,
    version: u32,
    metadata: &[(String, Value)],
    tensors: &[Row<'_>],
    alignment: u64,
) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend_from_slice(container.magic());
    header.extend_from_slice(&version.to_le_bytes());
    header.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    header.extend_from_slice(&(metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_string(&mut header, key.as_bytes());
        header.extend_from_slice(&value.value_type().code().to_le_bytes());
        put_value(&mut header, value);
    }
    let mut offset = 0_u64;
    for tensor in tensors {
        put_string(&mut header, tensor.name.as_bytes());
        header.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
        for size in tensor.dims {
            header.extend_from_slice(&size.to_le_bytes());
        }
        header.extend_from_slice(&tensor.dtype.code().to_le_bytes());
        header.extend_from_slice(&offset.to_le_bytes());
        offset += tensor.bytes.next_multiple_of(alignment);
    }
    header
}

pub(crate) fn pad(out: &mut dyn Write, written: u64, alignment: u64) -> io::Result<()> {
    let missing = written.next_multiple_of(alignment) - written;
    io::copy(&mut io::Read::take(io::repeat(0), missing), out).map(drop)
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend_from_slice(&(string.len() as u64).to_le_bytes());
    out.extend_from_slice(string);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::U16(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I16(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::U32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::F32(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => put_string(out, v),
        Value::Array(v) => put_array(out, v),
        Value::U64(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::I64(v) => out.extend_from_slice(&v.to_le_bytes()),
        Value::F64(v) => out.extend_from_slice(&v.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend_from_slice(&array.element_type().code().to_le_bytes());
    out.extend_from_slice(&(array.len() as u64).to_le_bytes());
    match array {
        Array::U8(v) => out.extend_from_slice(v),
        Array::I8(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::U16(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::I16(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::U32(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::I32(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::F32(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::Bool(v) => out.extend(v.iter().map(|&x| u8::from(x))),
        Array::Strings(v) => v.iter().for_each(|x| put_string(out, x)),
        Array::Nested(v) => v.iter().for_each(|x| put_array(out, x)),
        Array::U64(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::I64(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Array::F64(v) => v.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> GgufWriter<'static> {
        let mut writer = GgufWriter::new(Container::PowerInfer);
        writer.set("general.alignment", 64_u32).set("a", "text").set("b", -3_i8).set("c", 2.5_f64);
        writer.set("d", Array::Nested(vec![Array::U16(vec![1, 2]), Array::Bool(vec![true])]));
        writer.set("e", Array::Strings(["x", "", "yz"].iter().collect()));
        writer.tensor("t", DType::Q8_0, &[32, 2], vec![7; 68]).unwrap();
        writer.tensor("u", DType::F32, &[3], vec![1; 12]).unwrap();
        writer
    }

    #[test]
    fn what_is_written_is_read() {
        let file = GgufFile::parse("sample", sample().to_bytes()).unwrap();
        assert_eq!((file.container(), file.version(), file.alignment()), (Container::PowerInfer, 3, 64));
        assert_eq!(file.metadata().string("a").unwrap(), Some("text"));
        assert_eq!(file.metadata().integer("b").unwrap(), Some(-3));
        assert_eq!(file.metadata().float("c").unwrap(), Some(2.5));
        assert_eq!(file.metadata().strings("e").unwrap().unwrap().get(2), Some(&b"yz"[..]));
        assert_eq!(file.tensor_bytes(file.tensor("t").unwrap()), [7; 68]);
        assert_eq!(file.tensor("u").unwrap().file_range.start % 64, 0);
        assert_eq!(GgufWriter::copy_of(&file).to_bytes(), sample().to_bytes());
    }

    #[test]
    fn a_file_is_renamed_into_place_or_absent() {
        let folder = tempfile::tempdir().unwrap();
        sample().write(folder.path().join("model.gguf")).unwrap();
        assert!(sample().write(folder.path().join("absent/model.gguf")).is_err());
        let names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["model.gguf"]);
        GgufFile::open(folder.path().join("model.gguf")).unwrap();
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let error =
            GgufWriter::new(Container::Gguf).tensor("t", DType::Q8_0, &[32], vec![0; 33]).unwrap_err();
        assert!(error.to_string().contains("takes 34 bytes, 33 given"), "{error}");
    }
}
