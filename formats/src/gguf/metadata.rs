//! The metadata of a file: ordered keys, and getters that accept what files really hold.
//!
//! Writers differ in integer widths and in whether a per-layer number is one value or an array, so a getter takes any
//! integer in range; anything else is an error with key, type found and type wanted.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::value::{Array, StringArray, Value};
use crate::{FormatError, Result};

/// Ordered key-value pairs of a file's header.
#[derive(Clone, Debug)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    /// No entries yet; `path` is named in errors.
    pub fn new(path: &Path) -> Metadata {
        Metadata { path: path.to_path_buf(), entries: Vec::new(), index: HashMap::new() }
    }

    /// Adds an entry, or replaces the one with this key.
    pub fn push(&mut self, key: String, value: Value) {
        match self.index.get(&key) {
            Some(&at) => self.entries[at].1 = value,
            None => {
                self.index.insert(key.clone(), self.entries.len());
                self.entries.push((key, value));
            }
        }
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&at| &self.entries[at].1)
    }

    /// A whole number of any width that fits `u64`.
    pub fn uint(&self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let Some(number) = value.integer() else {
            return Err(self.wrong_type(key, value, "a whole number"));
        };
        self.in_range(key, number).map(Some)
    }

    /// [`Metadata::uint`] as `u32`.
    pub fn u32(&self, key: &str) -> Result<Option<u32>> {
        let Some(number) = self.uint(key)? else { return Ok(None) };
        match u32::try_from(number) {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(self.bad_value(key, format!("is {number}; at most {} is allowed", u32::MAX))),
        }
    }

    /// A whole number of any width and sign.
    pub fn integer(&self, key: &str) -> Result<Option<i128>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.integer().map(Some).ok_or_else(|| self.wrong_type(key, value, "a whole number"))
    }

    /// A float of either width; a whole number stands for itself. Not finite is an error.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.float() {
            Some(number) if number.is_finite() => Ok(Some(number)),
            Some(number) => Err(self.bad_value(key, format!("is {number}; a finite number is wanted"))),
            None => Err(self.wrong_type(key, value, "a number")),
        }
    }

    /// A truth value; the whole numbers 0 and 1 are taken too.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match (value, value.integer()) {
            (Value::Bool(truth), _) => Ok(Some(*truth)),
            (_, Some(0)) => Ok(Some(false)),
            (_, Some(1)) => Ok(Some(true)),
            _ => Err(self.wrong_type(key, value, "bool")),
        }
    }

    /// A string, which must be UTF-8.
    pub fn string(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(bytes)) => match std::str::from_utf8(bytes) {
                Ok(text) => Ok(Some(text)),
                Err(error) => Err(self.bad_value(key, format!("is not UTF-8: {error}"))),
            },
            Some(other) => Err(self.wrong_type(key, other, "string")),
        }
    }

    /// An array of strings (bytes: they need not be UTF-8).
    pub fn strings(&self, key: &str) -> Result<Option<&StringArray>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Strings(strings))) => Ok(Some(strings)),
            Some(other) => Err(self.wrong_type(key, other, "an array of strings")),
        }
    }

    /// An array of whole numbers of any width and sign.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i128>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers = match value {
            Value::Array(array) => array.integers(),
            _ => None,
        };
        numbers.map(Some).ok_or_else(|| self.wrong_type(key, value, "an array of whole numbers"))
    }

    /// An array of floats (or whole numbers, which stand for themselves).
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let numbers = match value {
            Value::Array(array) => array.floats(),
            _ => None,
        };
        numbers.map(Some).ok_or_else(|| self.wrong_type(key, value, "an array of numbers"))
    }

    /// A whole number per layer: one value that stands for all `n_layer`, or an array of exactly so many.
    pub fn per_layer_uint(&self, key: &str, n_layer: usize) -> Result<Option<Vec<u64>>> {
        match self.get(key) {
            Some(Value::Array(_)) => {
                let numbers = self.integers(key)?.unwrap_or_default();
                if numbers.len() != n_layer {
                    let problem = format!("holds {} values for {n_layer} layers", numbers.len());
                    return Err(self.bad_value(key, problem));
                }
                numbers.into_iter().map(|number| self.in_range(key, number)).collect::<Result<_>>().map(Some)
            }
            _ => Ok(self.uint(key)?.map(|number| vec![number; n_layer])),
        }
    }

    fn in_range(&self, key: &str, number: i128) -> Result<u64> {
        u64::try_from(number)
            .map_err(|_| self.bad_value(key, format!("is {number}; a number that is not negative is wanted")))
    }

    /// [`FormatError::KeyType`] for this key.
    pub fn wrong_type(&self, key: &str, found: &Value, wanted: &str) -> FormatError {
        FormatError::KeyType {
            path: self.path.clone(),
            key: key.into(),
            found: found.brief(),
            wanted: wanted.into(),
        }
    }

    /// [`FormatError::KeyValue`] for this key.
    pub fn bad_value(&self, key: &str, problem: impl Into<String>) -> FormatError {
        FormatError::KeyValue { path: self.path.clone(), key: key.into(), problem: problem.into() }
    }

    /// [`FormatError::MissingKey`] for this key.
    pub fn missing(&self, key: &str, advice: impl Into<String>) -> FormatError {
        FormatError::MissingKey { path: self.path.clone(), key: key.into(), advice: advice.into() }
    }
}
