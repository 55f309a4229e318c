//! What a model is: its sizes, its arithmetic and its tensors, read from a container and checked against each other.
//!
//! [`ModelDescription`] is pure data. Each architecture is one file here that reads it (a row of `ARCHITECTURES`);
//! everything that follows, from the planner to the executor, sees only the description.

mod bamboo;
mod calibration;
mod decoder;
mod experts;
mod falcon;
mod gemma3;
mod layer;
mod llama;
mod mistral;
mod opt;
mod qwen2;
mod qwen3;
mod qwen3moe;
mod reader;
mod requirement;
mod rope;
mod smallthinker;

use std::ops::Range;
use std::path::PathBuf;

use crate::gguf::{Container, GgufFile, TensorInfo};
use crate::{FormatError, Result};
use decoder::Layout;
use reader::Reader;

pub use calibration::{Calibration, Levels};
pub use experts::{Experts, Gating, RouterInput};
pub use requirement::Requirement;
pub use rope::{Rope, RopeScaling, RopeStyle};

/// An architecture as data, and what data cannot say.
struct Architecture {
    /// In `general.architecture`, and before every key.
    name: &'static str,
    layout: Layout,
    /// Reads what only this architecture has.
    finish: fn(&Reader<'_>, &mut ModelDescription) -> Result<()>,
}

/// Every architecture that is built.
const ARCHITECTURES: &[Architecture] = &[
    llama::ARCHITECTURE,
    bamboo::ARCHITECTURE,
    mistral::ARCHITECTURE,
    qwen2::ARCHITECTURE,
    qwen3::ARCHITECTURE,
    qwen3moe::ARCHITECTURE,
    smallthinker::ARCHITECTURE,
    gemma3::ARCHITECTURE,
    opt::ARCHITECTURE,
    falcon::ARCHITECTURE,
];

/// For architectures that their layout tells all of.
fn nothing_more(_: &Reader<'_>, _: &mut ModelDescription) -> Result<()> {
    Ok(())
}

/// A model, described. All shapes have been checked against each other.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelDescription {
    /// The file that the tensors' ranges are of; the first one, where the model is split.
    pub path: PathBuf,
    /// All files in order: [`TensorInfo::file`] counts here.
    pub files: Vec<PathBuf>,
    /// The container; PowerInfer's means that the model is made to run sparsely.
    pub container: Container,
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`, or the file's name where that is absent.
    pub name: String,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Rows of the embedding: how many logits there are.
    pub vocab_size: usize,
    /// Ids from here on have no token in the vocabulary and must never be sampled; at most `vocab_size`.
    pub sampleable_vocab: usize,
    /// The context length that the model was trained for.
    pub context_length: usize,
    /// The kind of every norm but those of queries and keys, which are RMS norms.
    pub norm: Norm,
    /// Added to every norm's stored weight, those of queries and keys included; 0 nearly always.
    pub norm_offset: f32,
    /// Added to the mean square in every RMS norm, or to the variance in every LayerNorm.
    pub rms_epsilon: f32,
    /// How positions turn queries and keys.
    pub rope: Rope,
    /// One row per token: ne {n_embd, vocab_size}.
    pub token_embd: TensorInfo,
    /// A token's row is multiplied by this before the first layer (not where it serves as the head); 1 nearly always.
    pub embedding_scale: f32,
    /// Positions that were learned and are added to the embedding, instead of a rope.
    pub positions: Option<LearnedPositions>,
    /// The layers in order; never empty.
    pub layers: Vec<Layer>,
    /// Norm before the head: ne {n_embd}.
    pub output_norm: TensorInfo,
    /// Its bias.
    pub output_norm_bias: Option<TensorInfo>,
    /// The head.
    pub output: OutputHead,
    /// How the layers' predictors are to be used; `None` where no layer has one.
    pub prediction: Option<Prediction>,
    /// What preparing it found out.
    pub calibration: Calibration,
    /// Layers without a predictor in a model that has some, or should have them; these run without prediction.
    pub layers_without_predictor: Vec<usize>,
    /// What a person should be told, one sentence each, naming the key or tensor.
    pub notices: Vec<String>,
}

/// How a vector is brought to a common size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Norm {
    /// Divided by its root mean square, then times the weight.
    Rms,
    /// The mean taken off, divided by the standard deviation, times the weight, plus the bias.
    Layer,
}

/// An embedding of positions.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LearnedPositions {
    /// ne {n_embd, positions + offset}.
    pub tensor: TensorInfo,
    /// The row of position 0.
    pub offset: usize,
}

/// A layer: attention, then feed-forward, each behind a norm and added to the residual.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Layer {
    /// ne {n_embd}.
    pub attn_norm: TensorInfo,
    /// ne {n_embd}.
    pub attn_norm_bias: Option<TensorInfo>,
    /// The attention.
    pub attention: Attention,
    /// A norm of the attention's output, before it is added to the residual: ne {n_embd}.
    pub attn_post_norm: Option<TensorInfo>,
    /// ne {n_embd}. May be the same tensor as `attn_norm` where the layer is parallel.
    pub ffn_norm: TensorInfo,
    /// ne {n_embd}.
    pub ffn_norm_bias: Option<TensorInfo>,
    /// The feed-forward network.
    pub ffn: FeedForward,
    /// A norm of the network's output, before it is added to the residual: ne {n_embd}.
    pub ffn_post_norm: Option<TensorInfo>,
    /// Whether the feed-forward network sees the layer's input (behind `ffn_norm`) rather than what attention made of
    /// it; both outputs are added to the residual.
    pub parallel: bool,
    /// How many positions back attention sees, the own one included; `None` for all.
    pub window: Option<usize>,
    /// This layer's rope, where it is not the model's.
    pub rope: Option<Rope>,
}

/// Attention of one layer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Attention {
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads; divides `n_head`.
    pub n_head_kv: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head (nearly always `head_dim`).
    pub value_dim: usize,
    /// ne {n_embd, n_head x head_dim}.
    pub q: Linear,
    /// ne {n_embd, n_head_kv x head_dim}.
    pub k: Linear,
    /// ne {n_embd, n_head_kv x value_dim}.
    pub v: Linear,
    /// ne {n_head x value_dim, n_embd}.
    pub o: Linear,
    /// RMS norm of each query head, before it turns: ne {head_dim}.
    pub q_norm: Option<TensorInfo>,
    /// RMS norm of each key head, before it turns: ne {head_dim}.
    pub k_norm: Option<TensorInfo>,
    /// Factor on the scores, where it is not 1 / sqrt(head_dim).
    pub scale: Option<f32>,
}

impl Attention {
    /// Whether queries, keys and values are parts of one tensor, all queries before all keys before all values.
    pub fn is_fused(&self) -> bool {
        self.q.weight.file_range.end == self.k.weight.file_range.start && self.q.weight.name.ends_with(']')
    }

    /// Whether they are parts of one tensor in turns: the queries of a group of heads, their key, their value.
    pub fn is_fused_by_group(&self) -> bool {
        !self.q.rows.is_empty()
    }
}

/// A matrix and perhaps a bias with as many elements as the matrix has rows.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Linear {
    /// The matrix: ne {inputs, outputs}; or a tensor of which it is some rows.
    pub weight: TensorInfo,
    /// The bias: ne {outputs}; or a tensor of which it is some elements.
    pub bias: Option<TensorInfo>,
    /// Where the matrix is not all of `weight`: its rows there (and elements of `bias`), in this order. Empty otherwise.
    pub rows: Vec<Range<u64>>,
    /// Where the matrix lies in several tensors, such as one per expert: these, each of whole rows, in this order. Empty
    /// otherwise. `weight` then has name, type, sizes and number of bytes of them together, and no place in a file.
    pub parts: Vec<TensorInfo>,
}

impl Linear {
    /// Rows of the matrix.
    pub fn outputs(&self) -> u64 {
        match self.rows.is_empty() {
            true => self.weight.rows(),
            false => self.rows.iter().map(|rows| rows.end - rows.start).sum(),
        }
    }
}

/// Feed-forward network of one layer: down(activation(gate x) * up x), or down(activation(up x)) where there is no gate.
/// A neuron is row i of gate and of up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FeedForward {
    /// Neurons.
    pub n_ff: usize,
    /// What gate and up go through.
    pub activation: Activation,
    /// Whether there is a gate; if not, `gate` only repeats `up`, and the activation is of `up` alone.
    pub gated: bool,
    /// ne {n_embd, n_ff}.
    pub gate: Linear,
    /// ne {n_embd, n_ff}.
    pub up: Linear,
    /// Back to the residual's width.
    pub down: Down,
    /// Where gate (and up) are in planes: then they hold the high halves of 8-bit codes, in Q4_0.
    pub planes: Option<Planes>,
    /// What guesses the active neurons.
    pub predictor: Option<Predictor>,
    /// How often each neuron is active, as a share of tokens, where the model was prepared: ne {n_ff}, of a
    /// mixture as a share of the tokens that use the expert: ne {n_ff, experts}.
    pub frequency: Option<TensorInfo>,
    /// Where the layer has several networks.
    pub experts: Option<Experts>,
}

/// The rest of weights whose 8-bit codes are stored in halves, and what their high halves are worth.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Planes {
    /// I8, ne {n_embd / 2, n_ff}: two low halves a byte, as Q4_0 packs its codes.
    pub gate_low: TensorInfo,
    /// The same of up, where that is in planes, too.
    pub up_low: Option<TensorInfo>,
    /// F32, ne {n_ff}: standard deviation of what the gate's high halves leave out, per unit of the input's norm.
    pub gate_deviation: TensorInfo,
    /// The same of up.
    pub up_deviation: Option<TensorInfo>,
    /// F32, ne {n_ff}: the norm of each neuron's row of down.
    pub down_norm: Option<TensorInfo>,
}

/// The last matrix of a feed-forward network, stored in one of two ways.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Down {
    /// As usual, ne {n_ff, n_embd}: neuron i is column i.
    Plain(Linear),
    /// PowerInfer's, ne {n_embd, n_ff}: neuron i is row i. A bias still has n_embd elements.
    Transposed(Linear),
}

impl Down {
    /// Matrix and bias, whichever way the matrix is stored.
    pub fn linear(&self) -> &Linear {
        match self {
            Down::Plain(linear) | Down::Transposed(linear) => linear,
        }
    }
}

/// A low-rank predictor: neuron i counts as active iff row i of fc2 . relu(fc1 . x) reaches the threshold
/// (PowerInfer; SOSP'24, section 5).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Predictor {
    /// Width between the two matrices; may differ per layer.
    pub rank: usize,
    /// ne {n_embd, rank}.
    pub fc1: TensorInfo,
    /// ne {rank, n_ff}.
    pub fc2: TensorInfo,
}

/// How predictors are used, the same for all layers.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Prediction {
    /// What fc1 is given.
    pub input: PredictorInput,
    /// Neurons with at least this score are computed.
    pub threshold: f32,
}

/// What a predictor is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PredictorInput {
    /// The residual after attention, before `ffn_norm`.
    Residual,
    /// The residual as it enters the layer, before any norm.
    LayerInput,
}

/// What the gate and up values go through before they are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// silu(gate) * up.
    Silu,
    /// relu(gate) * up: exactly zero for many neurons.
    Relu,
    /// relu(gate) * relu(up).
    DRelu,
    /// gelu(gate) * up by the tanh approximation.
    GeluTanh,
    /// gelu(gate) * up by the error function.
    GeluErf,
}

impl Activation {
    /// Every activation with its name in `ARCH.feed_forward_activation`.
    pub const NAMES: &[(&str, Activation)] = &[
        ("silu", Activation::Silu),
        ("relu", Activation::Relu),
        ("drelu", Activation::DRelu),
        ("gelu-tanh", Activation::GeluTanh),
        ("gelu-erf", Activation::GeluErf),
    ];

    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::Relu => "relu",
            Activation::DRelu => "drelu",
            Activation::GeluTanh => "gelu-tanh",
            Activation::GeluErf => "gelu-erf",
        }
    }

    /// Whether neurons can be skipped without changing the result.
    pub fn is_sparse(self) -> bool {
        matches!(self, Activation::Relu | Activation::DRelu)
    }
}

/// The matrix that makes logits.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum OutputHead {
    /// The embedding itself ([`ModelDescription::token_embd`]); its bytes exist once.
    Tied,
    /// A matrix of its own: ne {n_embd, vocab_size}.
    Separate(TensorInfo),
}

impl ModelDescription {
    /// Reads the model in `file`, and refuses it where it asks for anything beyond a plain llama ([`Requirement`]): for
    /// runtimes that know of no requirements. Those that do call [`ModelDescription::describe`] and
    /// [`ModelDescription::check_supported`].
    pub fn from_gguf(file: &GgufFile) -> Result<ModelDescription> {
        let model = ModelDescription::describe(file)?;
        model.check_supported(&[])?;
        Ok(model)
    }

    /// Reads the model in `file`, by its `general.architecture`, whatever it asks of a runtime.
    pub fn describe(file: &GgufFile) -> Result<ModelDescription> {
        const KEY: &str = "general.architecture";
        let metadata = file.metadata();
        let Some(name) = metadata.string(KEY)? else {
            return Err(metadata.missing(KEY, "it says how to run the model; the file is no language model"));
        };
        let shards = metadata.uint("split.count")?.unwrap_or(1).max(1);
        if shards > file.files().len() as u64 {
            return Err(FormatError::Unsupported {
                path: file.path().to_path_buf(),
                what: format!("one part alone of a model split into {shards} files"),
                advice: "open it by its path, with all files in one folder".into(),
            });
        }
        let Some(architecture) = ARCHITECTURES.iter().find(|architecture| architecture.name == name) else {
            let accepted: Vec<&str> = ARCHITECTURES.iter().map(|architecture| architecture.name).collect();
            return Err(FormatError::Unsupported {
                path: file.path().to_path_buf(),
                what: format!("architecture `{name}` (`{KEY}`)"),
                advice: format!("accepted: {}", accepted.join(", ")),
            });
        };
        decoder::read(file, architecture)
    }

    /// Layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// The matrix that makes logits, tied or not: ne {n_embd, vocab_size}.
    pub fn head(&self) -> &TensorInfo {
        match &self.output {
            OutputHead::Tied => &self.token_embd,
            OutputHead::Separate(tensor) => tensor,
        }
    }
}
