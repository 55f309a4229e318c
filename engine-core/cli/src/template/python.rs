//! What templates know from Python: `json.dumps`, `strftime`, and how its values are written.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, escape_formatter};

/// `strftime_now(format)`: the local time.
pub(super) fn strftime_now(format: String) -> Result<String, Error> {
    jiff::fmt::strtime::format(&format, &jiff::Zoned::now()).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}"))
    })
}

/// `tojson` as Python's `json.dumps(ensure_ascii=False)` writes it: no escapes for HTML, a space after `,` and `:`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    bounded(value)?;
    let value: serde_json::Value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}")))?;
    let indent: Option<usize> = options.get("indent")?;
    let sort: Option<bool> = options.get("sort_keys")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    options.assert_all_used()?;
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match separators.as_deref() {
        None => (item.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators are a pair")),
    };
    let style = Style { indent, sort: sort == Some(true), ascii: ascii == Some(true), item, key };
    let mut text = String::new();
    style.write(&value, 0, &mut text);
    Ok(Value::from_safe_string(text))
}

struct Style {
    indent: Option<usize>,
    sort: bool,
    ascii: bool,
    item: String,
    key: String,
}

impl Style {
    fn write(&self, value: &serde_json::Value, depth: usize, text: &mut String) {
        match value {
            serde_json::Value::Array(items) if !items.is_empty() => {
                text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.separate(index, depth + 1, text);
                    self.write(item, depth + 1, text);
                }
                self.end_of_line(depth, text);
                text.push(']');
            }
            serde_json::Value::Object(map) if !map.is_empty() => {
                text.push('{');
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort {
                    entries.sort_by_key(|(key, _)| *key);
                }
                for (index, (key, value)) in entries.into_iter().enumerate() {
                    self.separate(index, depth + 1, text);
                    self.leaf(&serde_json::Value::String(key.clone()), text);
                    text.push_str(&self.key);
                    self.write(value, depth + 1, text);
                }
                self.end_of_line(depth, text);
                text.push('}');
            }
            leaf => self.leaf(leaf, text),
        }
    }

    fn leaf(&self, value: &serde_json::Value, text: &mut String) {
        let written = match value.as_f64().filter(|_| value.is_f64()) {
            Some(number) => float(number),
            None => value.to_string(),
        };
        for c in written.chars() {
            if self.ascii && !c.is_ascii() {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    text.push_str(&format!("\\u{unit:04x}"));
                }
            } else {
                text.push(c);
            }
        }
    }

    fn separate(&self, index: usize, depth: usize, text: &mut String) {
        if index > 0 {
            text.push_str(&self.item);
        }
        self.end_of_line(depth, text);
    }

    fn end_of_line(&self, depth: usize, text: &mut String) {
        if let Some(indent) = self.indent {
            text.push('\n');
            text.push_str(&" ".repeat(indent.min(64) * depth));
        }
    }
}

/// A number as Python's `repr` writes it: the shortest digits that give it back, with an exponent of two digits below
/// 1e-4 and from 1e16.
fn float(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() {
            "NaN"
        } else if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .into();
    }
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if number != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{number:?}"),
    }
}

/// Python's methods of texts, lists and dictionaries; `format` with fields of bounded width, for what it pads to is
/// allocated before any fuel is counted.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let ("format", Some(text)) = (name, value.as_str())
        && let Some(field) = text.split('{').skip(1).find_map(|field| widest(field.split('}').next()?))
    {
        let detail = format!("a field of width {field} in `format`; at most {WIDEST} digits of it are taken");
        return Err(Error::new(ErrorKind::InvalidOperation, detail));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

/// Digits of a width that `format` takes.
const WIDEST: usize = 4;

/// A number with more digits than that.
fn widest(field: &str) -> Option<&str> {
    field.split(|c: char| !c.is_ascii_digit()).find(|digits| digits.len() > WIDEST)
}

/// Writes what a template prints: numbers with a point as Python does, all else as the template engine does.
pub(super) fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match f64::try_from(value.clone()) {
        Ok(number) if value.kind() == ValueKind::Number && !value.is_integer() => {
            out.write_str(&float(number)).map_err(Error::from)
        }
        _ => {
            bounded(value)?;
            escape_formatter(out, state, value)
        }
    }
}

/// `string`: what would be printed.
pub(super) fn string(value: &Value) -> Result<Value, Error> {
    bounded(value)?;
    Ok(Value::from(value.to_string()))
}

/// Values in one that is printed.
const MOST_VALUES: usize = 1 << 20;
/// Lists in lists in one that is printed.
const DEEPEST: usize = 200;

/// Refuses a value that takes too long to print: a list may hold another many times, which costs no fuel.
fn bounded(value: &Value) -> Result<(), Error> {
    fn walk(value: &Value, left: &mut usize, depth: usize) -> Result<(), Error> {
        let inner: Vec<Value> = match value.kind() {
            ValueKind::Seq => value.try_iter()?.collect(),
            ValueKind::Map => value.try_iter()?.map(|key| value.get_item(&key)).collect::<Result<_, _>>()?,
            _ => return Ok(()),
        };
        *left = left.saturating_sub(inner.len());
        if *left == 0 || depth == DEEPEST {
            let detail = "a value with too many parts is printed";
            return Err(Error::new(ErrorKind::InvalidOperation, detail));
        }
        inner.iter().try_for_each(|value| walk(value, left, depth + 1))
    }
    walk(value, &mut { MOST_VALUES }, 0)
}
