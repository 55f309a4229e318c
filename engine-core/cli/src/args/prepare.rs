//! Flags of `prepare`.

use super::{EngineArgs, ModelArg, SizeArgs};
use clap::Args;
use std::path::PathBuf;

/// `prepare`.
#[derive(Debug, Args)]
#[command(after_help = "\
Runs the texts through the model, counts how often each neuron is active, and writes the model with each
layer's neurons from the most to the least active and `down` with a row per neuron. The result computes
what the model computes; neurons that are off can be skipped without reading their rows.")]
pub(crate) struct PrepareArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Text to profile with, repeated: a text file (lines `<|endoftext|>` divide texts), or .jsonl with a `text` per line.
    #[arg(long = "corpus", value_name = "FILE", required = true)]
    pub(crate) corpora: Vec<PathBuf>,
    /// Tokens to profile with, out of all files evenly; more are left out.
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) tokens: u64,
    /// GGUF file to write.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Replaces the output where it exists.
    #[arg(long)]
    pub(crate) force: bool,
    /// Prints what was measured as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}
