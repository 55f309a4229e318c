//! Options with types, ranges, defaults and documentation from one definition: for the config's sections and for the
//! tables that plug-ins ask for.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The type of an option's value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "type")]
#[non_exhaustive]
pub enum FieldKind {
    /// `true` or `false`.
    Bool,
    /// A whole number.
    Integer {
        /// Least value.
        min: i64,
        /// Greatest value.
        max: i64,
    },
    /// A number.
    Float {
        /// Least value.
        min: f64,
        /// Greatest value.
        max: f64,
    },
    /// Text.
    String,
    /// One of these words.
    Choice {
        /// The words.
        values: Vec<String>,
    },
    /// A list.
    List {
        /// The type of its elements.
        element: Box<FieldKind>,
    },
}

impl fmt::Display for FieldKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FieldKind::Bool => f.write_str("true or false"),
            FieldKind::Integer { min, max } if *max == i64::MAX => {
                write!(f, "a whole number, at least {min}")
            }
            FieldKind::Integer { min, max } => write!(f, "a whole number from {min} to {max}"),
            FieldKind::Float { min, max } if *min <= f64::MIN && *max >= f64::MAX => f.write_str("a number"),
            FieldKind::Float { min, max } if *max >= f64::MAX => write!(f, "a number, at least {min}"),
            FieldKind::Float { min, max } => write!(f, "a number from {min} to {max}"),
            FieldKind::String => f.write_str("text"),
            FieldKind::Choice { values } => write!(f, "one of {}", values.join(", ")),
            FieldKind::List { element } => write!(f, "a list, each {element}"),
        }
    }
}

impl FieldKind {
    /// Whether `value` is of this type.
    pub fn accepts(&self, value: &toml::Value) -> bool {
        match (self, value) {
            (FieldKind::Bool, toml::Value::Boolean(_)) | (FieldKind::String, toml::Value::String(_)) => true,
            (FieldKind::Integer { min, max }, toml::Value::Integer(i)) => (min..=max).contains(&i),
            (FieldKind::Float { min, max }, toml::Value::Float(x)) => (min..=max).contains(&x),
            (FieldKind::Float { min, max }, toml::Value::Integer(i)) => (*min..=*max).contains(&(*i as f64)),
            (FieldKind::Choice { values }, toml::Value::String(s)) => values.contains(s),
            (FieldKind::List { element }, toml::Value::Array(items)) => {
                items.iter().all(|i| element.accepts(i))
            }
            _ => false,
        }
    }
}

/// One option.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Field {
    /// Key.
    pub name: String,
    /// Type of the value.
    pub kind: FieldKind,
    /// Value where the key is absent; `None` where absence itself has a meaning.
    pub default: Option<toml::Value>,
    /// For people.
    pub doc: String,
}

/// The options of one table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Schema {
    /// The options, in the order in which they are documented.
    pub fields: Vec<Field>,
}

/// A table of options as it stands in the config: checked by a [`Schema`], read into a struct by its owner.
pub type OptionTable = toml::Table;

impl Schema {
    /// Checks that every key of `table` is known and every value of its type. `place` is how messages name the table,
    /// such as `[compute.options.cpu]`.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key, and for an unknown key the nearest one there is.
    pub fn validate(&self, table: &OptionTable, place: &str) -> Result<()> {
        for (key, value) in table {
            let Some(field) = self.fields.iter().find(|f| f.name == *key) else {
                let known = self.fields.iter().map(|f| f.name.as_str());
                return Err(Error::config(format!("{place}: unknown key `{key}`{}", nearest(key, known))));
            };
            if !field.kind.accepts(value) {
                return Err(Error::config(format!("{place}: `{key}` is {value}, wanted {}", field.kind)));
            }
        }
        Ok(())
    }

    /// As JSON, which is how a schema crosses the plug-in boundary.
    pub fn to_json(&self) -> String {
        // Fields hold only strings, numbers and TOML values, all of which JSON can express (no dates in defaults).
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    /// From JSON.
    ///
    /// # Errors
    /// [`Error::Internal`] where the text is no schema.
    pub fn from_json(text: &str) -> Result<Schema> {
        serde_json::from_str(text)
            .map_err(|error| Error::internal(format!("the option schema is malformed: {error}")))
    }
}

/// The end of a message about an unknown word: the nearest known one, or all of them.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.collect();
    // A word cut short: `temp` for `temperature`.
    let continued = |known: &&&str| word.len() >= 3 && known.starts_with(word);
    if let Some(best) = known.iter().find(continued) {
        return format!("; did you mean `{best}`?");
    }
    let best = known.iter().min_by_key(|candidate| strsim::damerau_levenshtein(word, candidate));
    match best {
        None => "; there are none".into(),
        Some(best) if strsim::damerau_levenshtein(word, best) <= 1 + word.chars().count() / 3 => {
            format!("; did you mean `{best}`?")
        }
        Some(_) => format!("; there are: {}", known.join(", ")),
    }
}

/// A Rust type that an option can have.
pub trait OptionType: Sized {
    /// Its type without further limits.
    fn kind() -> FieldKind;
    /// As a TOML value; `None` for an absent optional value.
    fn to_value(&self) -> Option<toml::Value>;
    /// From a value that the field's kind accepts.
    fn from_value(value: &toml::Value) -> Option<Self>;
}

macro_rules! integer_option {
    ($($t:ty),*) => { $(
        impl OptionType for $t {
            fn kind() -> FieldKind {
                FieldKind::Integer {
                    min: i64::try_from(<$t>::MIN).unwrap_or(i64::MIN),
                    max: i64::try_from(<$t>::MAX).unwrap_or(i64::MAX),
                }
            }
            fn to_value(&self) -> Option<toml::Value> {
                // TOML has 63 bits; what does not fit is absent rather than another number.
                i64::try_from(*self).ok().map(toml::Value::Integer)
            }
            fn from_value(value: &toml::Value) -> Option<Self> {
                value.as_integer().and_then(|i| <$t>::try_from(i).ok())
            }
        }
    )* };
}
integer_option!(u8, u16, u32, u64, i32, i64);

impl OptionType for bool {
    fn kind() -> FieldKind {
        FieldKind::Bool
    }
    fn to_value(&self) -> Option<toml::Value> {
        Some(toml::Value::Boolean(*self))
    }
    fn from_value(value: &toml::Value) -> Option<Self> {
        value.as_bool()
    }
}

macro_rules! float_option {
    ($($t:ty),*) => { $(
        impl OptionType for $t {
            fn kind() -> FieldKind {
                FieldKind::Float { min: f64::MIN, max: f64::MAX }
            }
            fn to_value(&self) -> Option<toml::Value> {
                // By way of its shortest decimal form, so that 0.05f32 is shown as 0.05.
                Some(toml::Value::Float(self.to_string().parse().unwrap_or(f64::from(*self))))
            }
            fn from_value(value: &toml::Value) -> Option<Self> {
                value.as_float().or_else(|| value.as_integer().map(|i| i as f64)).map(|x| x as $t)
            }
        }
    )* };
}
float_option!(f32, f64);

impl OptionType for String {
    fn kind() -> FieldKind {
        FieldKind::String
    }
    fn to_value(&self) -> Option<toml::Value> {
        Some(toml::Value::String(self.clone()))
    }
    fn from_value(value: &toml::Value) -> Option<Self> {
        value.as_str().map(str::to_owned)
    }
}

impl<T: OptionType> OptionType for Vec<T> {
    fn kind() -> FieldKind {
        FieldKind::List { element: Box::new(T::kind()) }
    }
    fn to_value(&self) -> Option<toml::Value> {
        Some(toml::Value::Array(self.iter().filter_map(T::to_value).collect()))
    }
    fn from_value(value: &toml::Value) -> Option<Self> {
        value.as_array()?.iter().map(T::from_value).collect()
    }
}

impl<T: OptionType> OptionType for Option<T> {
    fn kind() -> FieldKind {
        T::kind()
    }
    fn to_value(&self) -> Option<toml::Value> {
        self.as_ref().and_then(T::to_value)
    }
    fn from_value(value: &toml::Value) -> Option<Self> {
        T::from_value(value).map(Some)
    }
}

/// Defines a struct of options: fields, defaults, limits, documentation, schema and reading from a table, in one place.
///
/// ```
/// engine_core::options! {
///     /// Options of a device.
///     pub struct DeviceOptions {
///         /// Threads to use; 0 chooses.
///         threads: u32 = 0, in 0..=1024;
///         /// Kernel tier.
///         tier: String = "auto".into(), one_of ["auto", "portable"];
///         /// Bytes that may be allocated; absent means no limit.
///         memory_limit: Option<u64> = None;
///     }
/// }
/// let table = "threads = 4".parse().unwrap();
/// let options = DeviceOptions::from_table(&table, "[compute.options.x]").unwrap();
/// assert_eq!((options.threads, options.tier.as_str()), (4, "auto"));
/// let wrong = "thread = 4".parse().unwrap();
/// let error = DeviceOptions::from_table(&wrong, "[compute.options.x]").unwrap_err();
/// assert!(error.to_string().contains("did you mean `threads`?"));
/// ```
#[macro_export]
macro_rules! options {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $(
                $(#[doc = $doc:literal])*
                $field:ident : $type:ty = $default:expr
                $(, in $range:expr)?
                $(, one_of [$($choice:literal),* $(,)?])?
                ;
            )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $name {
            $( $(#[doc = $doc])* $vis $field: $type, )*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $( $field: $default, )* }
            }
        }

        impl $name {
            /// The options with types, limits, defaults and documentation.
            $vis fn schema() -> $crate::options::Schema {
                let default = $name::default();
                let _ = &default;
                $crate::options::Schema { fields: vec![ $(
                    {
                        #[allow(unused_mut, reason = "not every option has limits")]
                        let mut kind = <$type as $crate::options::OptionType>::kind();
                        $( kind = $crate::options::limited(kind, $range); )?
                        $( kind = $crate::options::one_of(kind, &[$($choice),*]); )?
                        $crate::options::Field {
                            name: stringify!($field).into(),
                            kind,
                            default: $crate::options::OptionType::to_value(&default.$field),
                            doc: $crate::options::paragraph(&[$($doc),*]),
                        }
                    },
                )* ] }
            }

            /// Reads a table, after checking it; `place` is how messages name it.
            ///
            /// # Errors
            /// `Error::Config`, naming the key.
            $vis fn from_table(
                table: &$crate::options::OptionTable,
                place: &str,
            ) -> $crate::Result<Self> {
                $name::schema().validate(table, place)?;
                #[allow(unused_mut, reason = "a struct without options has nothing to set")]
                let mut options = $name::default();
                $(
                    if let Some(value) = table.get(stringify!($field)) {
                        options.$field = <$type as $crate::options::OptionType>::from_value(value)
                            .ok_or_else(|| $crate::Error::config(format!(
                                "{place}: `{}` is {value}, which does not fit", stringify!($field)
                            )))?;
                    }
                )*
                Ok(options)
            }

            /// The options as a table, absent optional values left out.
            $vis fn to_table(&self) -> $crate::options::OptionTable {
                #[allow(unused_mut, reason = "a struct without options has nothing to set")]
                let mut table = $crate::options::OptionTable::new();
                $(
                    if let Some(value) = $crate::options::OptionType::to_value(&self.$field) {
                        table.insert(stringify!($field).into(), value);
                    }
                )*
                table
            }
        }
    };
}

/// A range that limits an option; implemented for inclusive ranges of integers and floats.
pub trait Limit {
    /// The kind with these limits.
    fn apply(self, kind: FieldKind) -> FieldKind;
}

impl Limit for std::ops::RangeInclusive<i64> {
    fn apply(self, kind: FieldKind) -> FieldKind {
        match kind {
            FieldKind::List { element } => FieldKind::List { element: Box::new(self.apply(*element)) },
            _ => FieldKind::Integer { min: *self.start(), max: *self.end() },
        }
    }
}

impl Limit for std::ops::RangeInclusive<f64> {
    fn apply(self, _: FieldKind) -> FieldKind {
        FieldKind::Float { min: *self.start(), max: *self.end() }
    }
}

/// Used by [`options!`].
#[doc(hidden)]
pub fn limited(kind: FieldKind, limit: impl Limit) -> FieldKind {
    limit.apply(kind)
}

/// Used by [`options!`].
#[doc(hidden)]
pub fn one_of(kind: FieldKind, values: &[&str]) -> FieldKind {
    match kind {
        FieldKind::List { element } => FieldKind::List { element: Box::new(one_of(*element, values)) },
        _ => FieldKind::Choice { values: values.iter().map(|v| (*v).to_owned()).collect() },
    }
}

/// Used by [`options!`].
#[doc(hidden)]
pub fn paragraph(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    options! {
        /// For the tests.
        struct Sample {
            /// A count.
            count: u32 = 3, in 1..=10;
            /// A ratio
            /// of things.
            ratio: f32 = 0.05, in 0.0..=1.0;
            /// Words.
            words: Vec<String> = vec!["a".into()], one_of ["a", "b"];
            /// Perhaps.
            maybe: Option<u64> = None;
            /// Yes or no.
            flag: bool = true;
        }
    }

    fn read(text: &str) -> Result<Sample> {
        Sample::from_table(&text.parse().unwrap(), "[x]")
    }

    #[test]
    fn reads_what_the_schema_allows() {
        let sample = read("count = 10\nratio = 1\nwords = ['b', 'a']\nmaybe = 7\nflag = false").unwrap();
        assert_eq!(sample.count, 10);
        assert_eq!((sample.ratio, sample.maybe, sample.flag), (1.0, Some(7), false));
        assert_eq!(read("").unwrap(), Sample::default());
        assert_eq!(Sample::from_table(&sample.to_table(), "[x]").unwrap(), sample);
    }

    #[test]
    fn names_what_is_wrong() {
        for (text, wanted) in [
            ("cuont = 1", "[x]: unknown key `cuont`; did you mean `count`?"),
            ("cou = 1", "did you mean `count`?"),
            ("entirely_else = 1", "there are: count, ratio, words, maybe, flag"),
            ("count = 11", "`count` is 11, wanted a whole number from 1 to 10"),
            ("count = 'x'", "`count` is \"x\""),
            ("ratio = 1.5", "wanted a number from 0 to 1"),
            ("ratio = nan", "wanted a number from 0 to 1"),
            ("words = ['c']", "wanted a list, each one of a, b"),
            ("maybe = -1", "wanted a whole number, at least 0"),
        ] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.contains(wanted), "{text}: {message}");
        }
    }

    #[test]
    fn schema_survives_the_boundary() {
        let schema = Sample::schema();
        assert_eq!(Schema::from_json(&schema.to_json()).unwrap(), schema);
        assert_eq!(schema.fields[1].doc, "A ratio of things.");
        assert_eq!(schema.fields[1].default, Some(toml::Value::Float(0.05)));
        assert!(Schema::from_json("{").is_err());
    }
}
