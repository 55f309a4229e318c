//! Where texts come from: flag, file, standard input.

use crate::failure::Usage;
use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use clap::parser::ValueSource;
use std::io::Read;
use std::path::Path;

/// The one text that `-p` and `-f` name. A flag wins over a variable; two flags are a mistake.
///
/// # Errors
/// [`Usage`] for none or two; a file that cannot be read.
pub(crate) fn text(prompt: Option<&str>, file: Option<&Path>, matches: &ArgMatches) -> Result<String> {
    let typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    match (prompt, file) {
        (Some(_), Some(_)) if typed("prompt") == typed("file") => {
            bail!(Usage("both a prompt (-p) and a file with one (-f) are given; give one".into()))
        }
        (Some(_), Some(path)) if typed("file") => read_text(path),
        (Some(text), _) => Ok(text.to_owned()),
        (None, Some(path)) => read_text(path),
        (None, None) => {
            bail!(Usage("no prompt is given; give -p TEXT, or -f FILE (`-` is standard input)".into()))
        }
    }
}

/// More than any context holds; what is longer is a device that never ends, or the wrong file.
const LIMIT: u64 = 256 << 20;

/// The text of a file; `-` is standard input.
///
/// # Errors
/// Where it cannot be read, is longer than 256 MiB, or is not UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    if path == Path::new("-") {
        let read = read_bounded(std::io::stdin().lock(), LIMIT).context("cannot read standard input")?;
        return utf8(read).context("standard input");
    }
    bounded_text(path, LIMIT).with_context(|| format!("cannot read {}", path.display()))
}

/// The text of a file of at most `limit` bytes.
///
/// # Errors
/// Where it cannot be read, is longer, or is not UTF-8.
pub(crate) fn bounded_text(path: &Path, limit: u64) -> Result<String> {
    utf8(read_bounded(std::fs::File::open(path)?, limit)?)
}

fn read_bounded(from: impl Read, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        bail!("it has more than {} MiB, and perhaps no end", limit >> 20);
    }
    Ok(bytes)
}

fn utf8(bytes: Vec<u8>) -> Result<String> {
    let wrong = |at: usize| anyhow::anyhow!("it is not UTF-8 text: byte {at} is wrong");
    String::from_utf8(bytes).map_err(|error| wrong(error.utf8_error().valid_up_to()))
}

/// Token ids as people write them: separated by commas or white space, or a JSON list.
///
/// # Errors
/// For anything else, naming the word or the place in the list.
pub(crate) fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let text = text.trim();
    if text.starts_with('[') {
        return serde_json::from_str(text).context("it is no JSON list of token ids (whole numbers from 0)");
    }
    text.split(|c: char| c == ',' || c.is_whitespace())
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().with_context(|| format!("{word:?} is no token id (a whole number from 0)")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids() {
        assert_eq!(parse_ids("[1, 2,\n3]").unwrap(), [1, 2, 3]);
        assert_eq!(parse_ids(" 1 2 3\n").unwrap(), [1, 2, 3]);
        assert!(parse_ids("").unwrap().is_empty());
        for wrong in ["1,x", "-1", "4294967296", "[[1]]", "[1, 2", "[1 2]", "[-1]"] {
            assert!(parse_ids(wrong).is_err(), "{wrong}");
        }
    }
}
