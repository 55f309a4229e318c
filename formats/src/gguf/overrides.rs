//! Metadata that a person knows better than the file: one key's value laid over another, before anything reads it.

use super::{Container, GgufFile, Value};
use crate::{FormatError, Result};

/// A key that was overridden.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// The key.
    pub key: String,
    /// Its value from now on.
    pub value: Value,
    /// What the file says; `None` where it lacks the key.
    pub before: Option<Value>,
}

/// Keys that say how the file itself is read: it has been, and by what they said.
const OF_THE_CONTAINER: [&str; 2] = ["general.alignment", "split."];

impl GgufFile {
    /// Lays `text` over the value of `key`, as a value of the type that the file has there. Where it has none: `true` or
    /// `false`, a whole number, a number, otherwise text.
    ///
    /// # Errors
    /// [`FormatError::KeyValue`] where the text is no value of that type, the value is an array, or the key is one that
    /// the container was read by.
    pub fn override_key(&mut self, key: &str, text: &str) -> Result<Override> {
        let metadata = &self.header.metadata;
        let bad = |problem: String| -> FormatError {
            metadata.bad_value(key, format!("cannot be overridden with {text:?}: {problem}"))
        };
        if key.is_empty() || OF_THE_CONTAINER.iter().any(|own| key.starts_with(own)) {
            return Err(bad("the file has been read by it; only keys about the model can be".into()));
        }
        let of_tokenizer = key.starts_with("tokenizer.ggml.");
        let used = key.ends_with("_token_id") || key == "tokenizer.ggml.add_bos_token";
        if self.container() == Container::Safetensors && of_tokenizer && !used {
            return Err(bad("a folder's text is split and joined as its tokenizer.json says".into()));
        }
        let before = metadata.get(key).cloned();
        let value = match &before {
            None => guessed(text),
            Some(Value::Array(_)) => return Err(bad("it is an array".into())),
            Some(found) => like(found, text)
                .ok_or_else(|| bad(format!("a value of type {} is wanted", found.value_type())))?,
        };
        self.header.metadata.push(key.to_owned(), value.clone());
        Ok(Override { key: key.to_owned(), value, before })
    }
}

/// `text` as a value of the same type.
fn like(found: &Value, text: &str) -> Option<Value> {
    Some(match found {
        Value::U8(_) => Value::U8(text.parse().ok()?),
        Value::I8(_) => Value::I8(text.parse().ok()?),
        Value::U16(_) => Value::U16(text.parse().ok()?),
        Value::I16(_) => Value::I16(text.parse().ok()?),
        Value::U32(_) => Value::U32(text.parse().ok()?),
        Value::I32(_) => Value::I32(text.parse().ok()?),
        Value::U64(_) => Value::U64(text.parse().ok()?),
        Value::I64(_) => Value::I64(text.parse().ok()?),
        Value::F32(_) => Value::F32(text.parse().ok().filter(|value: &f32| value.is_finite())?),
        Value::F64(_) => Value::F64(text.parse().ok().filter(|value: &f64| value.is_finite())?),
        Value::Bool(_) => Value::Bool(text.parse().ok()?),
        Value::String(_) => Value::String(text.as_bytes().to_vec()),
        Value::Array(_) => return None,
    })
}

/// The value that `text` looks like.
fn guessed(text: &str) -> Value {
    let unsigned = text.parse().ok().map(Value::U64);
    let number = text.parse().ok().filter(|value: &f64| value.is_finite()).map(Value::F64);
    let value = text.parse().ok().map(Value::Bool).or(unsigned);
    let value = value.or_else(|| text.parse().ok().map(Value::I64)).or(number);
    value.unwrap_or_else(|| Value::String(text.as_bytes().to_vec()))
}
