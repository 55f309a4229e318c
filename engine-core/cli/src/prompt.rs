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

/// The text of a file; `-` is standard input.
///
/// # Errors
/// Where it cannot be read, or is not UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let name = if path == Path::new("-") {
        std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
        "standard input".to_owned()
    } else {
        bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        path.display().to_string()
    };
    String::from_utf8(bytes).map_err(|error| {
        anyhow::anyhow!("{name} is not UTF-8 text: byte {} is wrong", error.utf8_error().valid_up_to())
    })
}

/// Token ids as people write them: separated by commas or white space, perhaps in brackets as JSON has them.
///
/// # Errors
/// For anything else, naming the word.
pub(crate) fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let text = text.trim();
    let inner = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    inner
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().with_context(|| format!("{word:?} is no token id")))
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
        for wrong in ["1,x", "-1", "4294967296", "[[1]]"] {
            assert!(parse_ids(wrong).is_err(), "{wrong}");
        }
    }
}
