//! Flags of `activity`.

use super::{EngineArgs, ModelArg, SizeArgs};
use clap::Args;
use std::path::PathBuf;

/// `activity`.
#[derive(Debug, Args)]
#[command(after_help = "\
A neuron is active where its value before `down` is not 0; with functions that leave hardly any at 0,
where it is above the layer's mean. Of layers with experts only the mean share is told.")]
pub(crate) struct ActivityArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    #[command(flatten)]
    pub(crate) input: ActivityInput,
    /// Prints one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}

/// What the model is run on; more than the context is run in parts.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct ActivityInput {
    /// File with token ids, separated by commas or white space, or a JSON list; `-` is standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) ids_file: Option<PathBuf>,
    /// File with text to be tokenized; `-` is standard input.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}
