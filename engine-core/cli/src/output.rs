//! Standard output: nothing but the answer, written so that a closed pipe or a full disk is seen.

use crate::failure::OutputClosed;
use anyhow::{Context, Result};
use std::io::{self, IsTerminal, Write};

/// Writes text to standard output and flushes it, so that a reader sees it now.
///
/// # Errors
/// [`OutputClosed`] where the reader is gone; the system's error otherwise (such as a full disk).
pub(crate) fn write(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        other => other.context("cannot write to standard output"),
    }
}

/// [`write()`] with a line end, unless the text has one.
pub(crate) fn line(text: &str) -> Result<()> {
    if text.ends_with('\n') { write(text) } else { write(&format!("{text}\n")) }
}

/// One JSON document, indented, and a line end.
pub(crate) fn json(value: &serde_json::Value) -> Result<()> {
    line(&serde_json::to_string_pretty(value).context("cannot write JSON")?)
}

/// One JSON document on one line.
pub(crate) fn json_line(value: &serde_json::Value) -> Result<()> {
    line(&serde_json::to_string(value).context("cannot write JSON")?)
}

/// Writes to standard error; a failure there has nowhere to be reported and is dropped.
pub(crate) fn note(text: &str) {
    let mut err = io::stderr().lock();
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}

/// Whether a person looks at standard error.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Rows with columns as wide as their widest cell; the last column is not padded.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let header: Vec<String> = header.iter().map(|cell| (*cell).to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&header).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width - cell.chars().count() + 2));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Bytes for people, in powers of 1024.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up() {
        let rows =
            vec![vec!["a".into(), "long cell".into(), "x".into()], vec!["äöü".into(), "".into(), "y".into()]];
        assert_eq!(
            table(&["one", "two", "three"], &rows),
            "one  two        three\na    long cell  x\näöü             y\n"
        );
    }

    #[test]
    fn sizes() {
        assert_eq!(bytes(17), "17 B");
        assert_eq!(bytes(10_852_832), "10.4 MiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
    }
}
