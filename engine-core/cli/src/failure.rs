//! How a command fails: exit codes, hints, and the one message that is printed.

use std::fmt;
use std::process::ExitCode;

/// Exit code of wrong usage; clap's own.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit code after Ctrl-C, as shells have it (128 + SIGINT).
pub(crate) const EXIT_CANCELLED: u8 = 130;

/// The command line, or a variable that stands for a part of it, is wrong.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Standard output was closed by its reader: no failure, there is just nobody left to write for.
#[derive(Debug)]
pub(crate) struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for OutputClosed {}

/// An error together with what a person can do about it.
#[derive(Debug)]
struct Hinted {
    hint: String,
    error: anyhow::Error,
}

impl fmt::Display for Hinted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl std::error::Error for Hinted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// Adds a hint to an error.
pub(crate) trait WithHint<T> {
    /// The same result; a failure prints `hint:` and this text after its message.
    fn hint(self, hint: impl Into<String>) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> WithHint<T> for Result<T, E> {
    fn hint(self, hint: impl Into<String>) -> anyhow::Result<T> {
        self.map_err(|error| anyhow::Error::new(Hinted { hint: hint.into(), error: error.into() }))
    }
}

/// The message for a failure (none where nothing is to be said) and the exit code.
pub(crate) fn describe(error: &anyhow::Error) -> (Option<String>, ExitCode) {
    if is_output_closed(error) {
        return (None, ExitCode::SUCCESS);
    }
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let text = cause.to_string();
        // Some errors repeat their source in their own text; saying it once is enough.
        if !parts.last().is_some_and(|last| last.contains(&text)) {
            parts.push(text);
        }
    }
    let mut message = format!("error: {}", parts.join(": "));
    for hinted in error.chain().filter_map(|cause| cause.downcast_ref::<Hinted>()) {
        message.push_str(&format!("\nhint: {}", hinted.hint));
    }
    let code = if is::<Usage>(error) { ExitCode::from(EXIT_USAGE) } else { ExitCode::FAILURE };
    (Some(message), code)
}

/// Whether the failure is only that nobody reads standard output any more.
pub(crate) fn is_output_closed(error: &anyhow::Error) -> bool {
    is::<OutputClosed>(error)
}

fn is<E: std::error::Error + Send + Sync + 'static>(error: &anyhow::Error) -> bool {
    let inner = |cause: &(dyn std::error::Error + 'static)| {
        cause.is::<E>() || cause.downcast_ref::<Hinted>().is_some_and(|hinted| hinted.error.is::<E>())
    };
    error.chain().any(inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn one_message_with_hints() {
        let error = Err::<(), _>(anyhow::anyhow!("no such file"))
            .context("cannot read x")
            .hint("look for it")
            .context("while loading")
            .unwrap_err();
        let (message, code) = describe(&error);
        assert_eq!(message.unwrap(), "error: while loading: cannot read x: no such file\nhint: look for it");
        assert_eq!(code, ExitCode::FAILURE);
    }

    #[test]
    fn codes() {
        let usage = Err::<(), _>(Usage("no".into())).hint("say yes").context("outer").unwrap_err();
        assert_eq!(describe(&usage).1, ExitCode::from(EXIT_USAGE));
        let closed = anyhow::Error::new(OutputClosed).context("writing");
        assert!(describe(&closed).0.is_none());
        assert_eq!(describe(&closed).1, ExitCode::SUCCESS);
    }

    #[test]
    fn says_nothing_twice() {
        let error = anyhow::anyhow!("inner").context("outer: inner");
        assert_eq!(describe(&error).0.unwrap(), "error: outer: inner");
    }
}
