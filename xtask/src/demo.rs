//! `cargo xtask demo`: the shortest way from a clone to generated text.

use crate::process;
use anyhow::Result;

/// What the demo asks of `thermocline`, with the model that is part of the repository.
pub(crate) const ARGUMENTS: &[&str] = &[
    "run",
    "-m",
    "models/tiny-story-9m-q8_0.gguf",
    "-p",
    "Once upon a time, there was a little",
    "-n",
    "64",
    "--temp",
    "0",
    "--repeat-penalty",
    "1.1",
];

/// Builds the workspace and generates text from the model in the repository.
pub(crate) fn run() -> Result<()> {
    process::build()?;
    generate()
}

/// Generates the text with what is built.
pub(crate) fn generate() -> Result<()> {
    process::run(process::program(process::thermocline()).args(ARGUMENTS))
}
