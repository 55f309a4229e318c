//! Parses a GGUF header: magic, version, metadata and tensor table, every number checked before it is used.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use engine_core::DType;

use super::cursor::Cursor;
use super::identify;
use super::metadata::Metadata;
use super::value::{Array, StringArray, Value, ValueType};
use super::{Container, TensorInfo};
use crate::{FormatError, Result};

/// Arrays of arrays deeper than this are refused; no known file nests at all.
const NESTING_LIMIT: u32 = 4;
/// ggml's own limit on dimensions.
const MAX_DIMENSIONS: u32 = 4;
/// The specification's limit on a key's length; tensor names get the same.
const MAX_NAME: usize = 65_535;
/// Alignment where the file names none.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest alignment accepted: a huge page.
const MAX_ALIGNMENT: u64 = 1 << 21;

/// All that a header says.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) container: Container,
    pub(crate) version: u32,
    pub(crate) alignment: u64,
    pub(crate) data_start: u64,
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// Parses the header of the file whose whole content is `bytes`.
pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Header> {
    let Some(container) = identify::container(bytes) else {
        return Err(FormatError::NotGguf { path: path.to_path_buf(), found: identify::describe(bytes) });
    };
    let cursor = &mut Cursor::new(path, bytes);
    cursor.take(4, format_args!("the magic"))?;
    let version = cursor.u32(format_args!("the version"))?;
    check_version(path, version)?;
    // A tensor takes 33 bytes in the table (name of 1, one dimension), a key 14 (name of 1, value of 1).
    let offset = cursor.position();
    let n_tensors = cursor.u64(format_args!("the tensor count"))?;
    let n_keys = cursor.count(14, format_args!("the metadata count"))?;
    if n_tensors > cursor.left() / 33 {
        let problem = format!("claims {n_tensors} tensors, more than the file has room for; it is damaged");
        return Err(cursor.bad("the tensor count", offset, problem));
    }

    let mut metadata = Metadata::new(path);
    for index in 0..n_keys {
        let offset = cursor.position();
        let key = name(cursor, format_args!("name of metadata key {index} of {n_keys}"))?;
        let value_type = cursor.u32(format_args!("type of key `{key}`"))?;
        let value = value(cursor, &key, value_type)?;
        if metadata.get(&key).is_some() {
            return Err(cursor.bad(format_args!("metadata key `{key}`"), offset, "occurs twice"));
        }
        metadata.push(key, value);
    }
    let alignment = alignment(&metadata)?;

    let mut rows = Vec::new(); // grows as rows are really read
    let mut names = HashSet::new();
    for index in 0..n_tensors {
        let offset = cursor.position();
        let row = tensor_row(cursor, index, n_tensors)?;
        if !names.insert(row.name.clone()) {
            return Err(cursor.bad(format_args!("tensor `{}`", row.name), offset, "occurs twice"));
        }
        rows.push(row);
    }
    let data_start = cursor.position().next_multiple_of(alignment); // both far below 2^63
    let mut tensors = Vec::with_capacity(rows.len());
    for row in rows {
        tensors.push(place(path, row, data_start, alignment)?);
    }
    check_ranges(path, &tensors, bytes.len() as u64)?;
    Ok(Header { container, version, alignment, data_start, metadata, tensors })
}

fn check_version(path: &Path, version: u32) -> Result<()> {
    let advice = match version {
        2 | 3 => return Ok(()),
        1 => "version 1 was replaced in 2023; fetch a newer file of the model",
        v if (1..=16).contains(&v.swap_bytes()) => "the file is big-endian; fetch the little-endian one",
        _ => "versions 2 and 3 are read here; the file is newer than this program, or damaged",
    };
    Err(FormatError::Version { path: path.to_path_buf(), found: version, advice })
}

/// A key or tensor name: UTF-8, not empty, not absurdly long.
fn name(cursor: &mut Cursor<'_>, what: std::fmt::Arguments<'_>) -> Result<String> {
    let offset = cursor.position();
    let bytes = cursor.string(what)?;
    if bytes.is_empty() {
        return Err(cursor.bad(what, offset, "is empty"));
    }
    if bytes.len() > MAX_NAME {
        return Err(cursor.bad(
            what,
            offset,
            format!("has {} bytes; at most {MAX_NAME} are allowed", bytes.len()),
        ));
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => Err(cursor.bad(what, offset, format!("is not UTF-8: {error}"))),
    }
}

fn value(cursor: &mut Cursor<'_>, key: &str, type_code: u32) -> Result<Value> {
    let what = format_args!("value of key `{key}`");
    let value_type = known_type(cursor, key, type_code)?;
    Ok(match value_type {
        ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array(what)?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array(what)?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array(what)?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array(what)?)),
        ValueType::U32 => Value::U32(cursor.u32(what)?),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array(what)?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array(what)?)),
        ValueType::Bool => {
            let offset = cursor.position();
            let [byte] = cursor.array(what)?;
            Value::Bool(truth(cursor, key, offset, byte)?)
        }
        ValueType::String => Value::String(cursor.string(what)?.to_vec()),
        ValueType::Array => Value::Array(array(cursor, key, 1)?),
        ValueType::U64 => Value::U64(cursor.u64(what)?),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array(what)?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array(what)?)),
    })
}

fn known_type(cursor: &Cursor<'_>, key: &str, code: u32) -> Result<ValueType> {
    ValueType::from_code(code).ok_or_else(|| {
        let problem = format!("has type {code}; GGUF knows types 0 to 12");
        cursor.bad(format_args!("value of key `{key}`"), cursor.position().saturating_sub(4), problem)
    })
}

fn truth(cursor: &Cursor<'_>, key: &str, offset: u64, byte: u8) -> Result<bool> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(cursor.bad(
            format_args!("value of key `{key}`"),
            offset,
            format!("bool of {other}, not 0 or 1"),
        )),
    }
}

fn array(cursor: &mut Cursor<'_>, key: &str, depth: u32) -> Result<Array> {
    let what = format_args!("array of key `{key}`");
    if depth > NESTING_LIMIT {
        let problem = format!("arrays are nested more than {NESTING_LIMIT} deep");
        return Err(cursor.bad(what, cursor.position(), problem));
    }
    let code = cursor.u32(what)?;
    let element = known_type(cursor, key, code)?;
    let count = cursor.count(element.least_bytes(), what)?;

    /// The elements' bytes all at once: `count` was checked against the bytes left, so the product cannot overflow.
    fn plain<const N: usize, T>(
        cursor: &mut Cursor<'_>,
        count: u64,
        what: std::fmt::Arguments<'_>,
        decode: fn([u8; N]) -> T,
    ) -> Result<Vec<T>> {
        let bytes = cursor.take(count * N as u64, what)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|chunk| decode(*chunk)).collect())
    }
    Ok(match element {
        ValueType::U8 => Array::U8(plain(cursor, count, what, u8::from_le_bytes)?),
        ValueType::I8 => Array::I8(plain(cursor, count, what, i8::from_le_bytes)?),
        ValueType::U16 => Array::U16(plain(cursor, count, what, u16::from_le_bytes)?),
        ValueType::I16 => Array::I16(plain(cursor, count, what, i16::from_le_bytes)?),
        ValueType::U32 => Array::U32(plain(cursor, count, what, u32::from_le_bytes)?),
        ValueType::I32 => Array::I32(plain(cursor, count, what, i32::from_le_bytes)?),
        ValueType::F32 => Array::F32(plain(cursor, count, what, f32::from_le_bytes)?),
        ValueType::U64 => Array::U64(plain(cursor, count, what, u64::from_le_bytes)?),
        ValueType::I64 => Array::I64(plain(cursor, count, what, i64::from_le_bytes)?),
        ValueType::F64 => Array::F64(plain(cursor, count, what, f64::from_le_bytes)?),
        ValueType::Bool => {
            let offset = cursor.position();
            let bytes = cursor.take(count, what)?;
            Array::Bool(bytes.iter().map(|&byte| truth(cursor, key, offset, byte)).collect::<Result<_>>()?)
        }
        ValueType::String => {
            let mut strings = StringArray::default();
            for index in 0..count {
                strings.push(cursor.string(format_args!("string {index} of {count} of key `{key}`"))?);
            }
            Array::Strings(strings)
        }
        ValueType::Array => {
            cursor.nest(count, what)?;
            let mut inner = Vec::new();
            for _ in 0..count {
                inner.push(array(cursor, key, depth + 1)?);
            }
            Array::Nested(inner)
        }
    })
}

fn alignment(metadata: &Metadata) -> Result<u64> {
    const KEY: &str = "general.alignment";
    match metadata.get(KEY) {
        None => Ok(DEFAULT_ALIGNMENT),
        // The specification fixes this one type; everything after the header hangs on the value.
        Some(&Value::U32(value)) => {
            let value = u64::from(value);
            if value.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(&value) {
                return Ok(value);
            }
            let problem = format!("is {value}; a power of two from 8 to {MAX_ALIGNMENT} is wanted");
            Err(metadata.bad_value(KEY, problem))
        }
        Some(other) => Err(metadata.wrong_type(KEY, other, "u32")),
    }
}

struct TensorRow {
    name: String,
    dtype: DType,
    dims: Vec<u64>,
    /// From the start of the data.
    offset: u64,
}

fn tensor_row(cursor: &mut Cursor<'_>, index: u64, count: u64) -> Result<TensorRow> {
    let name = name(cursor, format_args!("name of tensor {index} of {count}"))?;
    let offset = cursor.position();
    let what = format_args!("table entry of tensor `{name}`");
    let n_dims = cursor.u32(what)?;
    if n_dims == 0 || n_dims > MAX_DIMENSIONS {
        return Err(cursor.bad(
            what,
            offset,
            format!("has {n_dims} dimensions; 1 to {MAX_DIMENSIONS} are allowed"),
        ));
    }
    let mut dims = Vec::with_capacity(MAX_DIMENSIONS as usize);
    for dimension in 0..n_dims {
        let offset = cursor.position();
        let size = cursor.u64(what)?;
        if size == 0 {
            return Err(cursor.bad(what, offset, format!("dimension {dimension} is 0")));
        }
        dims.push(size);
    }
    let code_offset = cursor.position();
    let code = cursor.u32(what)?;
    let offset = cursor.u64(what)?;
    let dtype = DType::from_code(code)
        .filter(|dtype| *dtype != DType::U8) // has no code in files
        .ok_or_else(|| cursor.bad(what, code_offset, unknown_dtype(code)))?;
    Ok(TensorRow { name, dtype, dims, offset })
}

fn unknown_dtype(code: u32) -> String {
    let known = match code {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        40 => "NVFP4",
        _ => "",
    };
    let readable: Vec<&str> = DType::all().filter(|dtype| *dtype != DType::U8).map(DType::name).collect();
    let what =
        if known.is_empty() { format!("unknown type {code}") } else { format!("type {known} ({code})") };
    format!(
        "{what} is not read here; readable types: {}. Fetch the model in one of them",
        readable.join(", ")
    )
}

fn place(path: &Path, row: TensorRow, data_start: u64, alignment: u64) -> Result<TensorInfo> {
    let bad =
        |problem: String| FormatError::Tensor { path: path.to_path_buf(), tensor: row.name.clone(), problem };
    let TensorRow { dtype, ref dims, offset, .. } = row;
    let Some(row_bytes) = dtype.row_bytes(dims[0]) else {
        return Err(bad(if dims[0] % dtype.block_elements() == 0 {
            format!("rows of {} {dtype} elements overflow", dims[0])
        } else {
            format!(
                "{dtype} stores blocks of {} elements, but its rows have {}; the file was written wrongly",
                dtype.block_elements(),
                dims[0]
            )
        }));
    };
    let elements = dims.iter().try_fold(1_u64, |product, &size| product.checked_mul(size));
    let bytes = dims[1..].iter().try_fold(row_bytes, |product, &size| product.checked_mul(size));
    let (Some(_), Some(bytes)) = (elements, bytes) else {
        return Err(bad(format!("its dimensions {dims:?} multiply to more than 2^64; the file is damaged")));
    };
    if !offset.is_multiple_of(alignment) {
        return Err(bad(format!("its offset {offset} is no multiple of the file's alignment {alignment}")));
    }
    let range = data_start.checked_add(offset).and_then(|start| Some(start..start.checked_add(bytes)?));
    let Some(file_range) = range else {
        return Err(bad(format!("its offset {offset} plus {bytes} bytes overflows; the file is damaged")));
    };
    Ok(TensorInfo { name: row.name, dtype, dims: row.dims, file_range, file: 0 })
}

/// Every tensor inside the file, and no two on the same bytes.
fn check_ranges(path: &Path, tensors: &[TensorInfo], file_len: u64) -> Result<()> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| (tensor.file_range.start, tensor.file_range.end));
    for pair in order.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if second.file_range.start < first.file_range.end {
            return Err(FormatError::Tensor {
                path: path.to_path_buf(),
                tensor: second.name.clone(),
                problem: format!(
                    "its bytes {:?} overlap `{}` at {:?}; the file is damaged",
                    second.file_range, first.name, first.file_range
                ),
            });
        }
    }
    for tensor in order {
        let Range { start, end } = tensor.file_range;
        if end > file_len {
            return Err(FormatError::TruncatedTensor {
                path: path.to_path_buf(),
                tensor: tensor.name.clone(),
                offset: start,
                needed: end - start,
                present: file_len.saturating_sub(start),
                file_len,
            });
        }
    }
    Ok(())
}
