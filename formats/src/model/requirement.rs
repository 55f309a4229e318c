//! What a model asks of a runtime beyond a plain llama: named, so that a runtime refuses what it cannot run.

use std::fmt;

use super::{Activation, ModelDescription, Norm, PredictorInput, RopeScaling};
use crate::gguf::Container;
use crate::{FormatError, Result};

/// Something that a model needs beyond RMS norms, rope, gated SiLU, ReLU or dReLU networks and full causal attention
/// out of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Requirement {
    /// Tensors start at any offset, not at multiples of an alignment: the files are safetensors.
    Unaligned,
    /// Tensors are in several files: [`ModelDescription::files`], [`TensorInfo::file`](crate::TensorInfo::file).
    SplitFiles,
    /// [`Norm::Layer`], with biases: [`ModelDescription::norm`].
    LayerNorm,
    /// [`ModelDescription::norm_offset`] is not 0.
    NormOffset,
    /// [`ModelDescription::positions`], and a rope of width 0.
    LearnedPositions,
    /// [`RopeScaling::Llama3`].
    Llama3Rope,
    /// [`ModelDescription::embedding_scale`] is not 1.
    EmbeddingScale,
    /// [`Layer::parallel`](super::Layer::parallel).
    ParallelLayers,
    /// [`Layer::attn_post_norm`](super::Layer::attn_post_norm) and `ffn_post_norm`.
    PostNorms,
    /// [`Layer::window`](super::Layer::window).
    SlidingWindow,
    /// [`Layer::rope`](super::Layer::rope).
    RopePerLayer,
    /// [`Attention::q_norm`](super::Attention::q_norm) and `k_norm`.
    QkNorm,
    /// [`Attention::scale`](super::Attention::scale).
    AttentionScale,
    /// Queries, keys and values are rows of one tensor: their ranges start anywhere in it.
    FusedQkv,
    /// Queries, keys and values are rows of one tensor in turns: [`Linear::rows`](super::Linear::rows).
    FusedByGroup,
    /// [`FeedForward::gated`](super::FeedForward::gated) is false.
    UngatedFeedForward,
    /// [`Activation::GeluTanh`] or [`Activation::GeluErf`].
    Gelu,
    /// [`PredictorInput::LayerInput`].
    PredictorFromLayerInput,
    /// [`FeedForward::experts`](super::FeedForward::experts).
    Experts,
    /// [`FeedForward::planes`](super::FeedForward::planes).
    Planes,
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Requirement::Unaligned => "safetensors, whose tensors are not aligned",
            Requirement::SplitFiles => "tensors in several files",
            Requirement::LayerNorm => "LayerNorm",
            Requirement::NormOffset => "norms whose weights are stored less 1",
            Requirement::LearnedPositions => "learned positions",
            Requirement::Llama3Rope => "Llama 3's rope scaling by formula",
            Requirement::EmbeddingScale => "scaled embeddings",
            Requirement::ParallelLayers => "attention beside the feed-forward network",
            Requirement::PostNorms => "norms behind attention and feed-forward network",
            Requirement::SlidingWindow => "sliding-window attention",
            Requirement::RopePerLayer => "a rope that differs between layers",
            Requirement::QkNorm => "norms of queries and keys",
            Requirement::AttentionScale => "a scale of the attention's scores",
            Requirement::FusedQkv => "queries, keys and values in one matrix",
            Requirement::FusedByGroup => "queries, keys and values in one matrix, group by group",
            Requirement::UngatedFeedForward => "a feed-forward network without a gate",
            Requirement::Gelu => "GELU",
            Requirement::PredictorFromLayerInput => "predictors that see the layer's input",
            Requirement::Experts => "a mixture of experts",
            Requirement::Planes => "weights in planes",
        })
    }
}

impl ModelDescription {
    /// What the model asks of a runtime, each once, in the order of [`Requirement`].
    pub fn requirements(&self) -> Vec<Requirement> {
        let layers = || self.layers.iter();
        let gelu = [Activation::GeluTanh, Activation::GeluErf];
        let found = [
            (self.container == Container::Safetensors, Requirement::Unaligned),
            (self.files.len() > 1, Requirement::SplitFiles),
            (self.norm == Norm::Layer, Requirement::LayerNorm),
            (self.norm_offset != 0.0, Requirement::NormOffset),
            (self.positions.is_some() || self.rope.dim == 0, Requirement::LearnedPositions),
            (matches!(self.rope.scaling, RopeScaling::Llama3 { .. }), Requirement::Llama3Rope),
            (self.embedding_scale != 1.0, Requirement::EmbeddingScale),
            (layers().any(|layer| layer.parallel), Requirement::ParallelLayers),
            (
                layers().any(|layer| layer.attn_post_norm.is_some() || layer.ffn_post_norm.is_some()),
                Requirement::PostNorms,
            ),
            (layers().any(|layer| layer.window.is_some()), Requirement::SlidingWindow),
            (layers().any(|layer| layer.rope.is_some()), Requirement::RopePerLayer),
            (
                layers().any(|layer| layer.attention.q_norm.is_some() || layer.attention.k_norm.is_some()),
                Requirement::QkNorm,
            ),
            (layers().any(|layer| layer.attention.scale.is_some()), Requirement::AttentionScale),
            (layers().any(|layer| layer.attention.is_fused()), Requirement::FusedQkv),
            (layers().any(|layer| layer.attention.is_fused_by_group()), Requirement::FusedByGroup),
            (layers().any(|layer| !layer.ffn.gated), Requirement::UngatedFeedForward),
            (layers().any(|layer| gelu.contains(&layer.ffn.activation)), Requirement::Gelu),
            (
                self.prediction.as_ref().is_some_and(|p| p.input == PredictorInput::LayerInput),
                Requirement::PredictorFromLayerInput,
            ),
            (layers().any(|layer| layer.ffn.experts.is_some()), Requirement::Experts),
            (layers().any(|layer| layer.ffn.planes.is_some()), Requirement::Planes),
        ];
        found.into_iter().filter(|(needed, _)| *needed).map(|(_, requirement)| requirement).collect()
    }

    /// Refuses the model where it asks for something that is not in `supported`, naming all of that.
    pub fn check_supported(&self, supported: &[Requirement]) -> Result<()> {
        let mut missing = self.requirements();
        missing.retain(|requirement| !supported.contains(requirement));
        if missing.is_empty() {
            return Ok(());
        }
        let list: Vec<String> = missing.iter().map(Requirement::to_string).collect();
        let files = match self.files.len() {
            1 => String::new(),
            count => format!(" of {count} files"),
        };
        Err(FormatError::Unsupported {
            path: self.path.clone(),
            what: format!("running architecture `{}`{files} ({})", self.architecture, list.join(", ")),
            advice: "choose a model without these, or a newer version of this program".into(),
        })
    }
}
