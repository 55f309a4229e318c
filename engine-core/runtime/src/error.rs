//! The error of running a model: which file, tensor, device or plan, what is wrong, what to do.

use engine_core::planner::Fallback;
use std::path::PathBuf;

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The file was refused.
    #[error(transparent)]
    Format(#[from] formats::FormatError),
    /// An option has a value that cannot be used.
    #[error("option `{option}`: {problem}")]
    Option {
        /// Its name, as in the config.
        option: &'static str,
        /// The value, and what is accepted.
        problem: String,
    },
    /// The model is sound, but asks for something that is not built.
    #[error("{}: {what} is not supported; {advice}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// What was asked for.
        what: String,
        /// What to do.
        advice: String,
    },
    /// The storage tier failed.
    #[error("{}: storage tier `{tier}` cannot {doing}: {source}", path.display())]
    Storage {
        /// The tier's name.
        tier: String,
        /// The file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// The tier's own words.
        source: engine_core::Error,
    },
    /// The planner found no plan, or a wrong one.
    #[error("no plan for {}: {source}", path.display())]
    Plan {
        /// The model's file.
        path: PathBuf,
        /// The planner's own words.
        source: engine_core::Error,
    },
    /// Something would run otherwise than asked for, which `strict` forbids.
    #[error("strict is on and {} thing(s) would run otherwise than asked for: {}; allow it with strict = false, or \
             change what was asked for", fallbacks.len(), list(fallbacks))]
    Strict {
        /// What, and why.
        fallbacks: Vec<Fallback>,
    },
    /// A device denies an operation that the model needs.
    #[error(
        "device `{device}` cannot run {operation}: {reason}; choose another device in [compute] devices, or a \
             model stored in another type"
    )]
    Unsupported {
        /// The device's name in the config.
        device: String,
        /// The operation with its tensors and their types.
        operation: String,
        /// The device's own words.
        reason: String,
    },
    /// No device can run the whole model.
    #[error("no device of [compute] devices can run the whole model: {}; add a device that can, or choose a model \
             stored in another type", reasons.join("; "))]
    NoDevice {
        /// Per device: what it denies, with tensors, types and its own words.
        reasons: Vec<String>,
    },
    /// Something needs a model that is on one device.
    #[error("{what} needs a model on one device, and the plan by `{planner}` uses {}: list one in [compute] devices \
             (or --device)", devices.join(", "))]
    Hybrid {
        /// What.
        what: &'static str,
        /// The planner's name.
        planner: String,
        /// The devices it uses.
        devices: Vec<String>,
    },
    /// A device failed.
    #[error("device `{device}`, {doing}: {source}")]
    Device {
        /// The device's name in the config.
        device: String,
        /// What it was asked to do.
        doing: String,
        /// The device's own words.
        source: engine_core::Error,
    },
    /// The cache policy refused its regions.
    #[error("cache policy: {source}; choose another one in [cache] policy")]
    Cache {
        /// The policy's own words.
        source: engine_core::Error,
    },
    /// A token id that the model does not have.
    #[error(
        "token id {id} (number {index} of those given) is not in the model's vocabulary of {vocabulary}; were the \
             ids made by another model's tokenizer?"
    )]
    TokenId {
        /// The id.
        id: u32,
        /// Its place among the ids given.
        index: usize,
        /// Rows of the embedding.
        vocabulary: usize,
    },
    /// No ids where at least one is needed.
    #[error(
        "no token ids were given; a prompt has at least one (for an empty text, begin with the BOS token)"
    )]
    NoTokens,
    /// The ids do not fit into the context.
    #[error(
        "{tokens} token(s) after position {past} do not fit the context of {context}; nothing is shifted out: \
             shorten the prompt or raise [runtime] context"
    )]
    ContextFull {
        /// Positions in use.
        past: u32,
        /// Tokens that should follow.
        tokens: usize,
        /// Positions there are.
        context: u32,
    },
    /// A rewind to a position that was never reached.
    #[error("cannot rewind to position {position}: the session is at {past}")]
    Rewind {
        /// The position asked for.
        position: u32,
        /// Positions in use.
        past: u32,
    },
    /// The model answered with NaN or infinity.
    #[error(
        "non-finite logits: id {id} has {value} after position {position}; a weight is damaged or overflows: \
             look for it with the tensor check (`--check`), and fetch the file again; with int8 activations also try \
             activations = \"f32\""
    )]
    NonFinite {
        /// Position of the last token.
        position: u32,
        /// The first id with such a logit.
        id: usize,
        /// Its logit.
        value: f32,
    },
}

fn list(fallbacks: &[Fallback]) -> String {
    fallbacks.iter().map(Fallback::to_string).collect::<Vec<_>>().join("; ")
}

impl RuntimeError {
    /// Whether a device was lost.
    pub fn is_device_lost(&self) -> bool {
        matches!(self, RuntimeError::Device { source: engine_core::Error::DeviceLost { .. }, .. })
    }

    /// [`RuntimeError::Device`] for use in `map_err`.
    pub(crate) fn device<'a>(
        device: &'a str,
        doing: &'a str,
    ) -> impl Fn(engine_core::Error) -> RuntimeError + 'a {
        move |source| RuntimeError::Device { device: device.to_owned(), doing: doing.to_owned(), source }
    }
}
