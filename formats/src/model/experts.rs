//! Mixtures of experts: the keys and tensors of layers that have several feed-forward networks and use a few per token.

use super::decoder::Layout;
use super::reader::{Reader, Wanted};
use super::{Activation, Down, FeedForward, Linear};
use crate::gguf::TensorInfo;
use crate::{FormatError, Result};

/// What a layer has instead of one network: `gate`, `up` and `down` of its [`FeedForward`] then hold all experts', ne
/// {.., .., experts}, and `n_ff` counts the neurons of one.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Experts {
    /// How many there are.
    pub count: usize,
    /// How many a token uses.
    pub used: usize,
    /// Scores them: ne {n_embd, count}.
    pub router: Linear,
    /// What the router is given.
    pub router_input: RouterInput,
    /// From scores to shares.
    pub gating: Gating,
    /// Whether the shares of those used are divided by their sum.
    pub normalise: bool,
    /// Factor on the shares; 1 nearly always.
    pub scale: f32,
}

/// How scores become shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gating {
    /// Over all experts.
    Softmax,
    /// Each by itself.
    Sigmoid,
}

/// What a router is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RouterInput {
    /// What the experts are given: the residual behind `ffn_norm`.
    Normed,
    /// The residual as it enters the layer, before attention: experts are known early enough to be fetched meanwhile.
    LayerInput,
}

/// How an architecture's experts are used where the file does not say.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertLayout {
    pub(super) gating: Gating,
    pub(super) router_input: RouterInput,
}

/// The usual: Mixtral's and Qwen's.
pub(super) const SOFTMAX: ExpertLayout =
    ExpertLayout { gating: Gating::Softmax, router_input: RouterInput::Normed };

/// The numbers that hold for every layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixture {
    count: usize,
    used: usize,
    /// Of one expert, where that is not the layer's `feed_forward_length`.
    n_ff: Option<usize>,
    gating: Gating,
    normalise: bool,
    scale: f32,
    router_input: RouterInput,
}

/// llama.cpp's numbers of gating functions.
const GATINGS: &[(u64, Gating)] = &[(1, Gating::Softmax), (2, Gating::Sigmoid)];

/// Reads a file's numbers; `None` where it has no experts.
pub(super) fn mixture(reader: &Reader<'_>, layout: &Layout) -> Result<Option<Mixture>> {
    let metadata = reader.file.metadata();
    let key = |suffix: &str| reader.key(suffix);
    let Some(count) = metadata.uint(&key("expert_count"))?.filter(|&count| count > 0) else {
        return Ok(None);
    };
    let refused = |what: String, advice: &str| FormatError::Unsupported {
        path: reader.file.path().to_path_buf(),
        what,
        advice: advice.into(),
    };
    let Some(experts) = layout.experts else {
        let what = format!("a mixture of {count} experts (`{}`)", key("expert_count"));
        return Err(refused(what, "models of this architecture with one network per layer are"));
    };
    for suffix in ["expert_shared_count", "expert_group_count", "leading_dense_block_count"] {
        if metadata.uint(&key(suffix))?.is_some_and(|number| number > u64::from(suffix.contains("group"))) {
            return Err(refused(format!("`{}`", key(suffix)), "experts of one kind in every layer are"));
        }
    }
    let used = reader.size("expert_used_count")?;
    if used as u64 > count {
        let problem = format!("is {used}, but there are {count} experts");
        return Err(metadata.bad_value(&key("expert_used_count"), problem));
    }
    let gating = match metadata.uint(&key("expert_gating_func"))? {
        None | Some(0) => experts.gating,
        Some(number) => match GATINGS.iter().find(|(known, _)| *known == number) {
            Some((_, gating)) => *gating,
            None => {
                let problem = format!("is {number}; 1 (softmax) and 2 (sigmoid) are known");
                return Err(metadata.bad_value(&key("expert_gating_func"), problem));
            }
        },
    };
    let scale = reader.optional_float("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0);
    Ok(Some(Mixture {
        count: usize::try_from(count).unwrap_or(usize::MAX),
        used,
        n_ff: reader.optional_size("expert_feed_forward_length")?,
        gating,
        normalise: metadata.boolean(&key("expert_weights_norm"))?.unwrap_or(true),
        scale: scale as f32,
        router_input: experts.router_input,
    }))
}

/// A layer's experts.
pub(super) fn feed_forward(
    reader: &Reader<'_>,
    index: usize,
    (embd, n_ff): (u64, usize),
    activation: Activation,
    mixture: &Mixture,
) -> Result<FeedForward> {
    let name = |part: &str| format!("blk.{index}.{part}");
    let n_ff = mixture.n_ff.unwrap_or(n_ff);
    let (ff, count) = (n_ff as u64, mixture.count as u64);
    let stacked = |part: &str, inputs, outputs| -> Result<Linear> {
        refuse_bias(reader, &name(&format!("{part}_exps.bias")))?;
        reader.experts(&name(part), (inputs, outputs, count))
    };
    let down = if reader.file.tensor(&name("ffn_down_t_exps.weight")).is_some() {
        Down::Transposed(stacked("ffn_down_t", embd, ff)?)
    } else {
        Down::Plain(stacked("ffn_down", ff, embd)?)
    };
    let frequency = Wanted { dims: &[ff, count], reason: "one element per neuron of every expert" };
    let frequency = reader.optional_tensor(&name("ffn_frequency"), frequency)?;
    let router = Wanted { dims: &[embd, count], reason: "embedding width by experts" };
    Ok(FeedForward {
        n_ff,
        activation,
        gated: true,
        gate: stacked("ffn_gate", embd, ff)?,
        up: stacked("ffn_up", embd, ff)?,
        down,
        planes: None,
        predictor: None,
        frequency,
        experts: Some(Experts {
            count: mixture.count,
            used: mixture.used,
            router: reader.linear(&name("ffn_gate_inp"), router, count)?,
            router_input: mixture.router_input,
            gating: mixture.gating,
            normalise: mixture.normalise,
            scale: mixture.scale,
        }),
    })
}

fn refuse_bias(reader: &Reader<'_>, name: &str) -> Result<()> {
    let refused = |tensor: &TensorInfo| FormatError::Tensor {
        path: reader.file.path().to_path_buf(),
        tensor: tensor.name.clone(),
        problem: "is a bias of experts, which are run without".into(),
    };
    reader.file.tensor(name).map_or(Ok(()), |tensor| Err(refused(tensor)))
}
