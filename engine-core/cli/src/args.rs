//! The command line: what was typed and what the environment says. What it means is decided in `settings`.

use clap::builder::{BoolishValueParser, PossibleValuesParser};
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use engine_core::config::Config;
use engine_core::options::FieldKind;
use std::path::PathBuf;

mod activity;
mod convert;
mod perplexity;
mod prepare;
mod score;
pub(crate) use activity::ActivityArgs;
pub(crate) use convert::{ConvertArgs, QuantizeArgs, WritingArgs};
pub(crate) use perplexity::PerplexityArgs;
pub(crate) use prepare::{PlanesChoice, PredictorChoice, PrepareArgs};
pub(crate) use score::ScoreArgs;

const AFTER_HELP: &str = "\
Every flag that shapes a run is also a variable: --top-k is THERMOCLINE_TOP_K. A flag wins over
its variable, that over the config file, that over the default.
The config file is the one of --config, else $XDG_CONFIG_HOME/thermocline/config.toml (or
~/.config/thermocline/config.toml) where it exists; which one was read is logged.

Exit codes: 0 done; 1 error (one message on standard error); 2 wrong usage; 130 stopped by Ctrl-C.";

/// Runs language models on whatever devices there are, each a plug-in.
#[derive(Debug, Parser)]
#[command(name = "thermocline", version, max_term_width = 100, after_help = AFTER_HELP)]
#[command(propagate_version = false, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags that every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "General")]
pub(crate) struct Global {
    /// Config file to read.
    #[arg(long, global = true, env = "THERMOCLINE_CONFIG", hide_env = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Says more on standard error; twice says everything.
    #[arg(short, long, global = true, env = "THERMOCLINE_VERBOSE", hide_env = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Only warnings and errors on standard error.
    #[arg(short, long, global = true, env = "THERMOCLINE_QUIET", hide_env = true)]
    #[arg(action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) quiet: bool,
    /// How messages on standard error look.
    #[arg(long, global = true, env = "THERMOCLINE_LOG_FORMAT", hide_env = true)]
    #[arg(value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub(crate) log_format: LogFormat,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people, in colour on a terminal (NO_COLOR turns that off).
    Text,
    /// One JSON object per line.
    Json,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continues a prompt; only the generated text goes to standard output.
    Run(RunArgs),
    /// Talks with a model, turn by turn, through its chat template.
    Chat(ChatArgs),
    /// Prints the logits of given tokens, as JSON.
    Score(ScoreArgs),
    /// Measures how well a model foretells a text.
    Perplexity(PerplexityArgs),
    /// Measures prompt processing (pp) and text generation (tg) in tokens per second.
    Bench(BenchArgs),
    /// Shows what is in a model file, and what would run where.
    Inspect(InspectArgs),
    /// Makes a GGUF file of a safetensors folder or of PowerInfer's container.
    Convert(ConvertArgs),
    /// Writes a model with its weights in another type.
    #[command(visible_alias = "quantise")]
    Quantize(QuantizeArgs),
    /// Measures how often neurons are active, and how alike from token to token.
    Activity(ActivityArgs),
    /// Sorts a model's neurons by how often they are active, so that those that are off can be skipped cheaply.
    Prepare(PrepareArgs),
    /// Checks, describes or shows the configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Lists, inspects and diagnoses plug-ins.
    #[command(subcommand)]
    Plugins(PluginsCommand),
    /// Lists the devices there are, by the names that the config takes.
    Devices(DevicesArgs),
    /// Prints a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Flags that choose plug-ins and shape the session: they override the config.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineArgs {
    /// Plug-in library or folder of them, searched before every other place; may be given several times.
    #[arg(long = "plugin", env = "THERMOCLINE_PLUGIN", hide_env = true, value_name = "PATH")]
    pub(crate) plugins: Vec<PathBuf>,
    /// Devices in the order of preference, such as `cpu`; repeated or separated by commas.
    #[arg(long = "device", env = "THERMOCLINE_DEVICE", hide_env = true, value_name = "NAME")]
    #[arg(value_delimiter = ',')]
    pub(crate) devices: Vec<String>,
    /// Storage tier that reads the model, such as `mmap` or `ram`.
    #[arg(long, env = "THERMOCLINE_STORAGE", hide_env = true, value_name = "NAME")]
    pub(crate) storage: Option<String>,
    /// Planner that places layers on devices, such as `greedy`.
    #[arg(long, env = "THERMOCLINE_PLANNER", hide_env = true, value_name = "NAME")]
    pub(crate) planner: Option<String>,
    /// How neurons are skipped.
    #[arg(long, env = "THERMOCLINE_SPARSITY", hide_env = true, value_name = "POLICY")]
    #[arg(value_parser = choices("planner", "sparsity"))]
    pub(crate) sparsity: Option<String>,
    /// Share of neurons that `threshold` and `bitplane` skip; 0 takes what the model was prepared for.
    #[arg(
        long,
        env = "THERMOCLINE_SKIP",
        hide_env = true,
        value_name = "SHARE",
        allow_negative_numbers = true
    )]
    pub(crate) skip: Option<f64>,
    /// Most tokens of one prefill batch.
    #[arg(short, long, env = "THERMOCLINE_BATCH", hide_env = true, value_name = "N")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) batch: Option<i64>,
    /// Activations that meet quantised weights: `int8` is fast, `f32` closest to the model.
    #[arg(long, env = "THERMOCLINE_ACTIVATIONS", hide_env = true, value_name = "TYPE")]
    #[arg(value_parser = choices("runtime", "activations"))]
    pub(crate) activations: Option<String>,
    /// Counts which neurons are active while text is generated, for the statistics of `--json` (a little slower).
    #[arg(long, env = "THERMOCLINE_COUNT_ACTIVE", hide_env = true)]
    #[arg(action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) count_active: bool,
    /// Makes every fallback an error (`--strict=false` allows them against the config).
    #[arg(long, env = "THERMOCLINE_STRICT", hide_env = true, value_name = "BOOL")]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[arg(value_parser = BoolishValueParser::new())]
    pub(crate) strict: Option<bool>,
}

/// Flags of the size of a session; `bench` has its own.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct SizeArgs {
    /// Threads of each device that computes with threads; 0 lets it choose.
    #[arg(short, long, env = "THERMOCLINE_THREADS", hide_env = true, value_name = "N")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) threads: Option<u32>,
    /// Positions of the KV cache; 0 takes the context that the model was trained with.
    #[arg(short, long, env = "THERMOCLINE_CONTEXT", hide_env = true, value_name = "N")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) context: Option<i64>,
}

/// Flags of the choice of tokens: they override `[sampling]`.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Temperature; 0 takes the most likely token always.
    #[arg(long = "temp", env = "THERMOCLINE_TEMP", hide_env = true, value_name = "T")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) temperature: Option<f64>,
    /// Keeps the K most likely tokens; 0 keeps all.
    #[arg(long, env = "THERMOCLINE_TOP_K", hide_env = true, value_name = "K")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) top_k: Option<i64>,
    /// Keeps the most likely tokens that together have this probability; 1 keeps all.
    #[arg(long, env = "THERMOCLINE_TOP_P", hide_env = true, value_name = "P")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) top_p: Option<f64>,
    /// Keeps tokens with at least this share of the most likely one's probability; 0 keeps all.
    #[arg(long, env = "THERMOCLINE_MIN_P", hide_env = true, value_name = "P")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) min_p: Option<f64>,
    /// Penalty on recent tokens; 1 is none.
    #[arg(long, env = "THERMOCLINE_REPEAT_PENALTY", hide_env = true, value_name = "X")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) repeat_penalty: Option<f64>,
    /// How many recent tokens the penalty covers.
    #[arg(long, env = "THERMOCLINE_REPEAT_LAST", hide_env = true, value_name = "N")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) repeat_last: Option<i64>,
    /// Seed of the random choice; without it one is drawn and reported.
    #[arg(long, env = "THERMOCLINE_SEED", hide_env = true, value_name = "SEED")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
    /// Text that ends the generation and is not printed; may be given several times.
    #[arg(long, env = "THERMOCLINE_STOP", hide_env = true, value_name = "TEXT")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,
}

/// The model file.
#[derive(Debug, Args)]
pub(crate) struct ModelArg {
    /// Model file (GGUF, or PowerInfer's variant of it).
    #[arg(short, long, env = "THERMOCLINE_MODEL", hide_env = true, value_name = "FILE")]
    pub(crate) model: PathBuf,
    /// Pre-tokenizer to use instead of the one that the file names.
    #[arg(long, env = "THERMOCLINE_PRE_TOKENIZER", hide_env = true, value_name = "NAME")]
    pub(crate) pre_tokenizer: Option<String>,
    /// Metadata to use instead of the file's, such as `llama.rope.freq_base=1e6`; may be given several times.
    #[arg(long = "override", env = "THERMOCLINE_OVERRIDE", hide_env = true, value_name = "KEY=VALUE")]
    #[arg(value_parser = key_and_value)]
    pub(crate) overrides: Vec<(String, String)>,
}

/// `run`.
#[derive(Debug, Args)]
#[command(after_help = "\
The prompt is taken as it is, special tokens in it included. Where the model asks for a
beginning-of-text token (BOS) it is put in front, unless the prompt begins with one already:
then none is added and a warning says so. --no-bos adds none.

Every flag is also a variable: --top-k is THERMOCLINE_TOP_K; the flag wins.

Exit codes: 0 done; 1 error; 2 wrong usage; 130 stopped by Ctrl-C (twice kills).")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The prompt.
    #[arg(short, long, env = "THERMOCLINE_PROMPT", hide_env = true, value_name = "TEXT")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,
    /// File with the prompt; `-` is standard input.
    #[arg(short, long, env = "THERMOCLINE_FILE", hide_env = true, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Most tokens to generate; without it until the model ends or the context is full.
    #[arg(short = 'n', long, env = "THERMOCLINE_MAX_TOKENS", hide_env = true, value_name = "N")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<u32>,
    /// Puts no beginning-of-text token in front of the prompt.
    #[arg(long, env = "THERMOCLINE_NO_BOS", hide_env = true)]
    #[arg(action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) no_bos: bool,
    /// Goes on past end-of-generation tokens.
    #[arg(long, env = "THERMOCLINE_IGNORE_EOS", hide_env = true)]
    #[arg(action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) ignore_eos: bool,
    /// Prints one JSON object at the end instead of streaming text.
    #[arg(long, env = "THERMOCLINE_JSON", hide_env = true)]
    #[arg(action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}

/// `chat`.
#[derive(Debug, Args)]
#[command(after_help = "\
Every line of standard input is a turn; a line that ends with a backslash goes on in the next.
/reset forgets the conversation, /exit (or end of input) ends it. Ctrl-C stops an answer, at
the prompt it ends the program. Stops at every end-of-generation token of the model.")]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Says this, prints the answer and ends.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,
    /// System message at the start of the conversation.
    #[arg(short, long, env = "THERMOCLINE_SYSTEM", hide_env = true, value_name = "TEXT")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
    /// Most tokens of one answer.
    #[arg(short = 'n', long, env = "THERMOCLINE_MAX_TOKENS", hide_env = true, value_name = "N")]
    #[arg(allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<u32>,
    /// File with a chat template (Jinja) to use instead of the model's own.
    #[arg(long, env = "THERMOCLINE_CHAT_TEMPLATE", hide_env = true, value_name = "FILE")]
    pub(crate) template: Option<PathBuf>,
    /// File with messages that the conversation starts with: a JSON list of objects with `role` and `content`, as chat
    /// APIs have them. Where the last one is the user's it is answered, and the program ends.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) messages: Option<PathBuf>,
    /// Prints one JSON object per answer instead of streaming text.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}

/// `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Prompt tokens to process; 0 leaves that test out.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N",
        default_value = "512",
        allow_negative_numbers = true
    )]
    pub(crate) pp: Vec<u32>,
    /// Tokens to generate; 0 leaves that test out.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N",
        default_value = "128",
        allow_negative_numbers = true
    )]
    pub(crate) tg: Vec<u32>,
    /// Measures this sparsity policy, too, in turns with the plan's own, and tells how fast the bytes that are read would
    /// let it be: `dense` as a rule.
    #[arg(long, value_name = "POLICY", value_parser = choices("planner", "sparsity"))]
    pub(crate) against: Option<String>,
    /// Text whose tokens are processed, instead of fixed ones; which neurons are active depends on it.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Times that each test is measured, after one run that is not.
    #[arg(short, long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Thread counts to measure, separated by commas.
    #[arg(short, long, env = "THERMOCLINE_THREADS", hide_env = true, value_name = "LIST")]
    #[arg(value_delimiter = ',')]
    pub(crate) threads: Vec<u32>,
    /// Prints one JSON object, with every single run.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// `inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Model file.
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,
    /// Pre-tokenizer to use instead of the one that the file names.
    #[arg(long, env = "THERMOCLINE_PRE_TOKENIZER", hide_env = true, value_name = "NAME")]
    pub(crate) pre_tokenizer: Option<String>,
    /// Lists every tensor.
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Reads the weights and reports blocks that are not finite, by tensor.
    #[arg(long)]
    pub(crate) check: bool,
    /// Prints one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}

/// `config ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Checks a config file, the tables of plug-ins included.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Prints every key with type, default and meaning.
    Schema {
        /// As a page in Markdown (the default).
        #[arg(long, conflicts_with = "json")]
        markdown: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Prints the complete configuration that a run would use, as TOML.
    Show(Box<ShowArgs>),
}

/// `config show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}

/// Where `plugins` and `devices` look besides the config.
#[derive(Debug, Default, Args)]
pub(crate) struct SearchArgs {
    /// Plug-in library or folder of them, searched before every other place; may be given several times.
    #[arg(long = "plugin", env = "THERMOCLINE_PLUGIN", hide_env = true, value_name = "PATH")]
    pub(crate) plugins: Vec<PathBuf>,
    /// Prints JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `plugins ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum PluginsCommand {
    /// Lists every plug-in that was found: kind, name, version, state and path; refused ones with the reason.
    List(SearchArgs),
    /// Shows everything about one plug-in: devices, options, build.
    Inspect {
        /// Name, `KIND/NAME`, or path of a library.
        plugin: String,
        #[command(flatten)]
        search: SearchArgs,
    },
    /// Lists every place that was searched, what was found there, probe times and warnings.
    Doctor(SearchArgs),
    /// Holds a plug-in against the conformance suite; exit code 1 where it fails.
    Conformance(Box<ConformanceArgs>),
    /// Runs a model on a device beside the oracle and names the first operation that departs; exit code 1 where one does.
    Diverge(Box<DivergeArgs>),
}

/// `plugins conformance`.
#[derive(Debug, Args)]
pub(crate) struct ConformanceArgs {
    /// Path of a library, or KIND/NAME of a plug-in that is found as usual.
    pub(crate) plugin: String,
    /// Library of the reference plug-in that results are compared with; otherwise it is found as usual.
    #[arg(long, value_name = "FILE")]
    pub(crate) oracle: Option<PathBuf>,
    /// Only cases whose name contains this; `=NAME` is one case.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) filter: String,
    /// Every case rather than the sampled ones.
    #[arg(long)]
    pub(crate) full: bool,
    /// Seed of all operands.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Index of the device.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) device: u32,
    /// An option of the plug-in, in TOML; may be given several times.
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Seconds that one case may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub(crate) timeout: u64,
    /// Child processes at a time.
    #[arg(long, value_name = "N")]
    pub(crate) jobs: Option<usize>,
    /// Random problems per operation.
    #[arg(long, value_name = "N")]
    pub(crate) random: Option<u32>,
    /// Writes the report to this file, too, as JUnit XML.
    #[arg(long, value_name = "FILE")]
    pub(crate) junit: Option<PathBuf>,
    /// Prints the report as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `plugins diverge`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each operation of the prompt's prefill and of a few decode steps is run on both, from the
oracle's values: an operation is blamed for its own error and not for an earlier one's.")]
pub(crate) struct DivergeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The device, by the name that the config takes.
    #[arg(long, value_name = "NAME")]
    pub(crate) device: String,
    /// The device that is right.
    #[arg(long, value_name = "NAME", default_value = "reference")]
    pub(crate) oracle: String,
    /// The text that is run; keep it short where the model is large, for the oracle is slow.
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    #[arg(default_value = "Once upon a time, there was a little")]
    pub(crate) prompt: String,
    /// How many of the last tokens are decoded one by one; the others are prefilled.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) decode: u32,
    /// Most tokens of one prefill batch.
    #[arg(short, long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch: u32,
    /// Divides each feed-forward layer into this many ranges of neurons, an operation each.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) shares: u32,
    /// How neurons are skipped.
    #[arg(long, value_name = "POLICY", value_parser = choices("planner", "sparsity"))]
    pub(crate) sparsity: Option<String>,
    /// Activations that meet quantised weights.
    #[arg(long, value_name = "TYPE", value_parser = choices("runtime", "activations"))]
    pub(crate) activations: Option<String>,
    /// Threads of each device that computes with threads; 0 lets it choose.
    #[arg(short, long, value_name = "N")]
    pub(crate) threads: Option<u32>,
    /// Goes on after the first departure, for the worst errors of every kind of operation.
    #[arg(long)]
    pub(crate) whole: bool,
    /// Plants one of the suite's faults into the device, to see that it is found.
    #[arg(long, value_name = "FAULT", hide = true)]
    pub(crate) planted_fault: Option<String>,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
}

/// `devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    #[command(flatten)]
    pub(crate) search: SearchArgs,
}

/// The two sides of `KEY=VALUE`.
fn key_and_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok((key.trim().to_owned(), value.to_owned())),
        _ => Err("wanted KEY=VALUE, such as llama.rope.freq_base=1e6".to_owned()),
    }
}

/// A parser for a key of the config that is one of a few words: the words come from the schema.
fn choices(section: &str, key: &str) -> PossibleValuesParser {
    let schema = Config::schema().into_iter().find(|(name, _)| name == section);
    let field = schema.and_then(|(_, schema)| schema.fields.into_iter().find(|field| field.name == key));
    match field.map(|field| field.kind) {
        Some(FieldKind::Choice { values }) => PossibleValuesParser::new(values),
        _ => PossibleValuesParser::new(Vec::<String>::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_of_run_is_a_variable() {
        let mut command = Cli::command();
        command.build();
        let run = command.find_subcommand("run").unwrap();
        for argument in run.get_arguments().filter(|a| !["help", "version"].contains(&a.get_id().as_str())) {
            let name = argument.get_env().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let flag = argument.get_long().unwrap_or_default().to_uppercase().replace('-', "_");
            assert_eq!(name, format!("THERMOCLINE_{flag}"));
        }
    }

    #[test]
    fn choices_come_from_the_schema() {
        assert!(Cli::try_parse_from(["thermocline", "run", "-m", "x", "--sparsity", "gate-first"]).is_ok());
        let error = Cli::try_parse_from(["thermocline", "run", "-m", "x", "--sparsity", "gate"]).unwrap_err();
        assert!(error.to_string().contains("gate-first"), "{error}");
    }

    #[test]
    fn help_texts() {
        let mut command = Cli::command();
        command.build();
        insta::assert_snapshot!("help", command.render_long_help());
        for name in ["run", "chat", "score", "bench", "inspect"] {
            let help = command.find_subcommand_mut(name).unwrap().render_help();
            insta::assert_snapshot!(format!("help_{name}"), help);
        }
    }
}
