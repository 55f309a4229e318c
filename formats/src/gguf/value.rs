//! The typed values of a GGUF file's metadata.

use std::fmt;

/// The type of a metadata value; the numbers are GGUF's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names say it
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [(ValueType, &'static str, u64); 13] = [
        (ValueType::U8, "u8", 1),
        (ValueType::I8, "i8", 1),
        (ValueType::U16, "u16", 2),
        (ValueType::I16, "i16", 2),
        (ValueType::U32, "u32", 4),
        (ValueType::I32, "i32", 4),
        (ValueType::F32, "f32", 4),
        (ValueType::Bool, "bool", 1),
        (ValueType::String, "string", 8),
        (ValueType::Array, "array", 12),
        (ValueType::U64, "u64", 8),
        (ValueType::I64, "i64", 8),
        (ValueType::F64, "f64", 8),
    ];

    /// The type with this number.
    pub fn from_code(code: u32) -> Option<ValueType> {
        ValueType::ALL.get(usize::try_from(code).ok()?).map(|row| row.0)
    }

    /// The number in files.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The fewest bytes that one value takes in a file.
    pub(crate) fn least_bytes(self) -> u64 {
        ValueType::ALL[self as usize].2
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ValueType::ALL[*self as usize].1)
    }
}

/// A metadata value. Strings are bytes here: GGUF asks for UTF-8, files do not always keep to it.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names say it
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(Vec<u8>),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array in the metadata; all elements have one type.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names say it
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    Strings(StringArray),
    Nested(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Many strings in one allocation: a vocabulary has hundreds of thousands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringArray {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl StringArray {
    /// Adds a string.
    pub fn push(&mut self, string: &[u8]) {
        self.bytes.extend_from_slice(string);
        self.ends.push(self.bytes.len());
    }

    /// The string at `index`.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        self.bytes.get(start..end)
    }

    /// How many strings there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for StringArray {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> StringArray {
        let mut array = StringArray::default();
        for string in strings {
            array.push(string.as_ref());
        }
        array
    }
}

impl Array {
    /// How many elements there are.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Strings(v) => v.len(),
            Array::Nested(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The type of every element.
    pub fn element_type(&self) -> ValueType {
        match self {
            Array::U8(_) => ValueType::U8,
            Array::I8(_) => ValueType::I8,
            Array::U16(_) => ValueType::U16,
            Array::I16(_) => ValueType::I16,
            Array::U32(_) => ValueType::U32,
            Array::I32(_) => ValueType::I32,
            Array::F32(_) => ValueType::F32,
            Array::Bool(_) => ValueType::Bool,
            Array::Strings(_) => ValueType::String,
            Array::Nested(_) => ValueType::Array,
            Array::U64(_) => ValueType::U64,
            Array::I64(_) => ValueType::I64,
            Array::F64(_) => ValueType::F64,
        }
    }

    /// The elements as integers, where they are integers of any width.
    pub fn integers(&self) -> Option<Vec<i128>> {
        fn wide<T: Copy + Into<i128>>(values: &[T]) -> Option<Vec<i128>> {
            Some(values.iter().map(|&value| value.into()).collect())
        }
        match self {
            Array::U8(v) => wide(v),
            Array::I8(v) => wide(v),
            Array::U16(v) => wide(v),
            Array::I16(v) => wide(v),
            Array::U32(v) => wide(v),
            Array::I32(v) => wide(v),
            Array::U64(v) => wide(v),
            Array::I64(v) => wide(v),
            Array::F32(_) | Array::F64(_) | Array::Bool(_) | Array::Strings(_) | Array::Nested(_) => None,
        }
    }

    /// The elements as floats, where they are floats or integers.
    pub fn floats(&self) -> Option<Vec<f64>> {
        match self {
            Array::F32(v) => Some(v.iter().map(|&value| f64::from(value)).collect()),
            Array::F64(v) => Some(v.clone()),
            // A whole number stands for itself; widths that matter here are exact in f64.
            other => other.integers().map(|v| v.into_iter().map(|value| value as f64).collect()),
        }
    }
}

impl Value {
    /// The type of the value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The value as an integer, where it is one of any width.
    pub fn integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    /// The value as a float, where it is a float or an integer.
    pub fn float(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => self.integer().map(|value| value as f64),
        }
    }

    /// The value in few words, for messages: type, and the value itself where it is short.
    pub fn brief(&self) -> String {
        match self {
            Value::String(bytes) => {
                let text: String = String::from_utf8_lossy(bytes).chars().take(40).collect();
                format!("string {text:?}")
            }
            Value::Array(array) => format!("array of {} {}", array.len(), array.element_type()),
            Value::Bool(value) => format!("bool {value}"),
            Value::F32(value) => format!("f32 {value}"),
            Value::F64(value) => format!("f64 {value}"),
            other => format!("{} {}", other.value_type(), other.integer().unwrap_or_default()),
        }
    }
}

macro_rules! from {
    ($($type:ty => $variant:ident;)*) => {
        $(impl From<$type> for Value {
            fn from(value: $type) -> Value {
                Value::$variant(value)
            }
        })*
    };
}

from! {
    u8 => U8; i8 => I8; u16 => U16; i16 => I16; u32 => U32; i32 => I32;
    f32 => F32; bool => Bool; u64 => U64; i64 => I64; f64 => F64; Array => Array;
}

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        Value::String(value.as_bytes().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_codes_are_positions() {
        for (position, row) in ValueType::ALL.iter().enumerate() {
            assert_eq!(row.0 as usize, position);
            assert_eq!(ValueType::from_code(position as u32), Some(row.0));
        }
        assert_eq!(ValueType::from_code(13), None);
    }

    #[test]
    fn string_array_keeps_empty_strings() {
        let array: StringArray = ["a", "", "bc"].iter().collect();
        assert_eq!(array.iter().collect::<Vec<_>>(), [&b"a"[..], b"", b"bc"]);
        assert_eq!(array.get(3), None);
    }
}
