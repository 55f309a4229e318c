//! Flags of `prepare`.

use super::{EngineArgs, ModelArg, SizeArgs, choices};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// What is stored in bit planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PlanesChoice {
    /// Nothing: types stay as they are.
    None,
    /// Gate, as Q8_0.
    Gate,
    /// Gate and up, as Q8_0.
    GateUp,
}

/// What becomes of predictors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PredictorChoice {
    /// The model's own stay.
    Keep,
    /// New ones are trained, in place of the model's own.
    Train,
    /// None.
    None,
}

/// A share between 0 and 1.
fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 to 1 is wanted".to_owned()),
    }
}

/// `prepare`.
#[derive(Debug, Args)]
#[command(after_help = "\
Runs the texts through the model, counts how often each neuron is active, and writes the model with each
layer's neurons from the most to the least active and `down` with a row per neuron. Bit planes and the
margins and thresholds that are calibrated let neurons be skipped at a stated error; nothing is skipped
but by the policies that use them. What was recorded is kept beside the output (OUT.profile) until it is
written: a run that was stopped goes on where it was. docs/prepare.md tells more.")]
pub(crate) struct PrepareArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Text to profile with, repeated: a text file (lines `<|endoftext|>` divide texts), or .jsonl with a `text` per line.
    #[arg(long = "corpus", value_name = "FILE", required = true)]
    pub(crate) corpora: Vec<PathBuf>,
    /// Tokens to profile with, out of all files evenly; more are left out. 20000, or 60000 where predictors are trained.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) tokens: Option<u64>,
    /// GGUF file to write.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Replaces the output where it exists.
    #[arg(long)]
    pub(crate) force: bool,
    /// Prints what was measured as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    /// The model that MODEL was quantised from: feed-forward networks are taken from there, in MODEL's types.
    #[arg(long, value_name = "ORIGINAL")]
    pub(crate) source: Option<PathBuf>,
    /// Keeps down's type where it is rounded a second time, having a row per neuron; it is stored as Q8_0 there otherwise.
    #[arg(long)]
    pub(crate) keep_down_type: bool,
    /// What is stored in bit planes, for `--sparsity bitplane`.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = PlanesChoice::None)]
    pub(crate) planes: PlanesChoice,
    /// Largest share of a layer's output mass that bit planes may miss, for relu: it decides the margin.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0005, value_parser = share)]
    pub(crate) bitplane_missed: f64,
    /// The same for other activations and for `threshold`: it decides how many neurons are skipped by default.
    #[arg(long, value_name = "SHARE", default_value_t = 0.12, value_parser = share)]
    pub(crate) level_missed: f64,
    /// The policy that OUT runs by where nobody names one in `[planner] sparsity`; without this an exact one.
    #[arg(long, value_name = "POLICY", value_parser = choices("planner", "sparsity"))]
    pub(crate) policy: Option<String>,
    /// What becomes of predictors.
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = PredictorChoice::Keep)]
    pub(crate) predictors: PredictorChoice,
    /// Largest share of a layer's output mass that a trained predictor may miss.
    #[arg(long, value_name = "SHARE", default_value_t = 0.01, value_parser = share)]
    pub(crate) predictor_missed: f64,
    /// Least share of active neurons that a trained predictor must find.
    #[arg(long, value_name = "SHARE", default_value_t = 0.96, value_parser = share)]
    pub(crate) predictor_recall: f64,
    /// How often a predictor is trained on each token.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) predictor_epochs: u32,
    /// Largest rank of a trained predictor.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(32..=8192))]
    pub(crate) predictor_rank: u32,
    /// Keeps what was recorded, so that other options can be tried without running the model again.
    #[arg(long)]
    pub(crate) keep_profile: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}
