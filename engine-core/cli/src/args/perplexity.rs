//! Flags of `perplexity`.

use super::{EngineArgs, ModelArg, SizeArgs, choices};
use clap::Args;
use std::path::PathBuf;

/// `perplexity`.
#[derive(Debug, Args)]
#[command(after_help = "\
The text is cut into chunks of --context tokens (512, or what the model was trained with), each of which
starts anew; what counts is how the tokens of a chunk's second half are foretold, as llama.cpp's tool has it.")]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// File with the text; `-` is standard input.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Measures the first N chunks only.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) chunks: Option<u32>,
    /// Takes each text of the file by itself, and every token but its first: texts are divided by a line `<|endoftext|>`,
    /// in a file of JSON lines they are each line's `text`. Special tokens in them are read as such.
    #[arg(long)]
    pub(crate) separate: bool,
    /// Runs the model by this sparsity policy, too, and tells how the plan's own differs from it: divergence, perplexity,
    /// most likely tokens.
    #[arg(long, value_name = "POLICY", value_parser = choices("planner", "sparsity"))]
    pub(crate) against: Option<String>,
    /// Prints one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    /// Puts the ids of every chunk into it.
    #[arg(long, requires = "json")]
    pub(crate) ids: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}
