//! Flags of `score`.

use super::{EngineArgs, ModelArg, SizeArgs};
use clap::Args;
use std::path::PathBuf;

/// `score`.
#[derive(Debug, Args)]
pub(crate) struct ScoreArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) input: ScoreInput,
    /// Prints the N largest logits of each position.
    #[arg(long, value_name = "N", default_value_t = 10, allow_negative_numbers = true)]
    pub(crate) top: u32,
    /// Prints every logit of each position.
    #[arg(long, conflicts_with = "top")]
    pub(crate) all_logits: bool,
    /// Puts no beginning-of-text token in front of the text (ids are always taken as they are).
    #[arg(long)]
    pub(crate) no_bos: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}

/// What `score` scores.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct ScoreInput {
    /// Token ids, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "ID", allow_negative_numbers = true)]
    pub(crate) ids: Vec<u32>,
    /// File with token ids, separated by commas or white space, or a JSON list; `-` is standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) ids_file: Option<PathBuf>,
    /// Text to be tokenized.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,
    /// File with text to be tokenized; `-` is standard input.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}
