//! Flags of `convert` and `quantize`.

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use engine_core::DType;
use formats::quantise::WRITABLE;
use std::path::PathBuf;

/// `convert`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --type weights keep their types (F64 becomes F32). Vectors and the routers of experts are
F32 always. The output gets its name when it is complete: until then it is a hidden file beside it.")]
pub(crate) struct ConvertArgs {
    /// Folder of safetensors with its config.json, or a file of PowerInfer's container, or GGUF.
    #[arg(value_name = "INPUT")]
    pub(crate) input: PathBuf,
    /// GGUF file to write.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Type of the weights.
    #[arg(long = "type", value_name = "TYPE", default_value = "keep", value_parser = types(&["f32", "f16", "bf16", "q8_0", "keep"]))]
    pub(crate) dtype: Type,
    /// Folder of PowerInfer's predictors (model_0.pt, model_1.pt, ...), to be added.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) predictors: Option<PathBuf>,
    /// Leaves the input's predictors out, with which other programs do not load a model.
    #[arg(long)]
    pub(crate) no_predictors: bool,
    /// Pre-tokenizer to name in the file, instead of the one that was found.
    #[arg(long, value_name = "NAME", conflicts_with = "no_tokenizer")]
    pub(crate) pre_tokenizer: Option<String>,
    /// Leaves the tokenizer out.
    #[arg(long)]
    pub(crate) no_tokenizer: bool,
    #[command(flatten)]
    pub(crate) writing: WritingArgs,
}

/// `quantize`.
#[derive(Debug, Args)]
#[command(after_help = "\
Vectors, learned positions and the routers of experts are F32 always; beside types of four bits
the head is Q6_K, and predictors are Q8_0. Rows that are no whole number of a type's blocks fall
back to Q8_0 (from Q4_K and Q6_K) or F16, and each such line is printed.")]
pub(crate) struct QuantizeArgs {
    /// Model to read.
    #[arg(value_name = "INPUT")]
    pub(crate) input: PathBuf,
    /// GGUF file to write.
    #[arg(value_name = "OUTPUT")]
    pub(crate) output: PathBuf,
    /// Type of the weights.
    #[arg(value_name = "TYPE", value_parser = types(&names()))]
    pub(crate) dtype: Type,
    #[command(flatten)]
    pub(crate) writing: WritingArgs,
}

/// What both have.
#[derive(Debug, Args)]
pub(crate) struct WritingArgs {
    /// Type of the matrix that makes logits: output.weight, or the embedding where it serves as that.
    #[arg(long, value_name = "TYPE", value_parser = types(&names()))]
    pub(crate) output_type: Option<Type>,
    /// Type of the embedding, where it is not the head, too.
    #[arg(long, value_name = "TYPE", value_parser = types(&names()))]
    pub(crate) embedding_type: Option<Type>,
    /// Threads that convert; 0 takes as many as there are processors.
    #[arg(short, long, env = "THERMOCLINE_THREADS", hide_env = true, value_name = "N", default_value_t = 0)]
    pub(crate) threads: u32,
    /// Replaces the output where it exists.
    #[arg(long)]
    pub(crate) force: bool,
}

/// A type of weights; `None` keeps what is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Type(pub(crate) Option<DType>);

fn names() -> Vec<&'static str> {
    WRITABLE.iter().map(|dtype| dtype.name()).collect()
}

/// These names, in upper or lower case.
fn types(names: &[&'static str]) -> impl TypedValueParser<Value = Type> + use<> {
    let names: Vec<String> = names.iter().map(|name| name.to_lowercase()).collect();
    Lowercase(PossibleValuesParser::new(names)).map(|name| Type(DType::from_name(&name)))
}

/// Takes upper case, too.
#[derive(Clone)]
struct Lowercase(PossibleValuesParser);

impl TypedValueParser for Lowercase {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<String, clap::Error> {
        self.0.parse_ref(command, argument, &value.to_ascii_lowercase())
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = clap::builder::PossibleValue> + '_>> {
        self.0.possible_values()
    }
}
