//! Messages on standard error: lines for people, or JSON objects.

use crate::args::{Global, LogFormat};
use crate::output;
use serde_json::{Map, Value, json};
use std::fmt::{self, Write as _};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Sends log events to standard error, as the flags say. `THERMOCLINE_LOG` takes a filter in `tracing`'s own syntax
/// instead, such as `engine_loader=debug`.
pub(crate) fn start(global: &Global) -> anyhow::Result<()> {
    let level = match (global.quiet, global.verbose) {
        (true, _) => "warn",
        (false, 0) => "info",
        (false, 1) => "debug",
        (false, _) => "trace",
    };
    let filter = match std::env::var("THERMOCLINE_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text)
            .map_err(|error| crate::failure::Usage(format!("THERMOCLINE_LOG is {text:?}: {error}")))?,
        _ => EnvFilter::new(level),
    };
    let colour = output::stderr_is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colour)
        // It would tell a failing standard error of the failure, and panic over that.
        .log_internal_errors(false);
    match global.log_format {
        LogFormat::Text => builder.event_format(Lines { targets: global.verbose > 0 }).init(),
        LogFormat::Json => builder.event_format(JsonLines).init(),
    }
    Ok(())
}

/// `warning: message key=value`.
struct Lines {
    targets: bool,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let level = *event.metadata().level();
        let (word, colour) = match level {
            Level::ERROR => ("error: ", "31"),
            Level::WARN => ("warning: ", "33"),
            Level::INFO => ("", "0"),
            Level::DEBUG => ("debug: ", "2"),
            Level::TRACE => ("trace: ", "2"),
        };
        let mut line = String::from(word);
        if self.targets {
            let _ = write!(line, "[{}] ", event.metadata().target());
        }
        line.push_str(&fields.message);
        for (key, value) in &fields.others {
            match value {
                Value::String(text) => write!(line, " {key}={text}")?,
                other => write!(line, " {key}={other}")?,
            }
        }
        if out.has_ansi_escapes() && level != Level::INFO {
            writeln!(out, "\x1b[{colour}m{line}\x1b[0m")
        } else {
            writeln!(out, "{line}")
        }
    }
}

/// `{"time":...,"level":...,"target":...,"message":...,key:value}`.
struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut object = Map::new();
        object.insert("time".into(), json!(jiff::Timestamp::now().to_string()));
        object.insert("level".into(), json!(event.metadata().level().as_str().to_lowercase()));
        object.insert("target".into(), json!(event.metadata().target()));
        object.insert("message".into(), json!(fields.message));
        object.extend(fields.others);
        writeln!(out, "{}", Value::Object(object))
    }
}

/// What an event carries.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(String, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            (name, value) => self.others.push((name.to_owned(), value)),
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, Value::String(format!("{value:?}")));
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, Value::String(value.to_owned()));
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, json!(value));
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, json!(value));
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, json!(value));
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, json!(value));
    }
}
