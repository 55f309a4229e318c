//! Rotary position embedding: which elements turn, how fast, and how the context was stretched.

use super::reader::{Reader, Wanted};
use crate::Result;
use crate::gguf::TensorInfo;

/// How queries and keys are turned by their position.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rope {
    /// Leading elements of a head that turn; even, at most the head's width. 0 where positions are learned.
    pub dim: usize,
    /// Pair i turns by position x base^(-2i / dim).
    pub base: f32,
    /// Which elements make a pair.
    pub style: RopeStyle,
    /// How the context was stretched.
    pub scaling: RopeScaling,
    /// Llama 3's factors, ne {dim / 2}: pair i's frequency is divided by element i (before any scaling).
    pub factors: Option<TensorInfo>,
}

impl Rope {
    /// No turning at all.
    pub(super) fn none() -> Rope {
        Rope { dim: 0, base: 10_000.0, style: RopeStyle::Split, scaling: RopeScaling::None, factors: None }
    }
}

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RopeStyle {
    /// Elements 2i and 2i + 1.
    Interleaved,
    /// Elements i and i + dim / 2.
    Split,
}

/// How a model was stretched to a longer context than it was first trained for.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Positions are divided by the factor.
    Linear {
        /// More than 0.
        factor: f32,
    },
    /// Llama 3.1's: turns longer than `original_context / low_freq_factor` positions are divided by the factor, those
    /// shorter than `original_context / high_freq_factor` left alone, a ramp between them. GGUF files of these models
    /// hold [`Rope::factors`] instead.
    Llama3 {
        /// More than 0.
        factor: f32,
        /// The context length before stretching.
        original_context: usize,
        /// More than 0.
        low_freq_factor: f32,
        /// More than `low_freq_factor`.
        high_freq_factor: f32,
    },
    /// YaRN (arXiv 2309.00071): fast pairs as they are, slow pairs divided by the factor, a ramp between them.
    Yarn {
        /// More than 0.
        factor: f32,
        /// The context length before stretching.
        original_context: usize,
        /// Weight of the ramp; 0 makes it linear scaling.
        ext_factor: f32,
        /// Multiplies cosine and sine, besides YaRN's own 1 + 0.1 ln(factor).
        attn_factor: f32,
        /// Pairs with more turns than this over the original context are left alone.
        beta_fast: f32,
        /// Pairs with fewer turns than this are divided by the factor.
        beta_slow: f32,
    },
}

#[derive(Clone, Copy)]
enum Kind {
    None,
    Linear,
    Yarn,
    Llama3,
}

/// Reads an architecture's rope keys; `head_dim` is the default of the turned width.
pub(super) fn read(
    reader: &Reader<'_>,
    head_dim: usize,
    context_length: usize,
    (style, default_base): (RopeStyle, f64),
) -> Result<Rope> {
    let metadata = reader.file.metadata();
    let dim = reader.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
    if dim > head_dim || dim % 2 != 0 {
        let problem = format!("is {dim}; an even number up to the head's width {head_dim} is wanted");
        return Err(metadata.bad_value(&reader.key("rope.dimension_count"), problem));
    }
    let positive = |suffix: &str, default: f64| -> Result<f32> {
        let value = reader.optional_float(suffix)?.unwrap_or(default);
        if value > 0.0 && (value as f32).is_finite() && value as f32 > 0.0 {
            return Ok(value as f32);
        }
        Err(metadata.bad_value(&reader.key(suffix), format!("is {value}; a number above 0 is wanted")))
    };
    let base = positive("rope.freq_base", default_base)?;
    let names =
        &[("none", Kind::None), ("linear", Kind::Linear), ("yarn", Kind::Yarn), ("llama3", Kind::Llama3)];
    let kind = reader.choice("rope.scaling.type", names)?;
    // Old files name only a factor, which then is linear; 0 stands for "not stretched" in some of them.
    let suffix = match reader.optional_float("rope.scaling.factor")? {
        Some(_) => "rope.scaling.factor",
        None => "rope.scale_linear",
    };
    let factor = match reader.optional_float(suffix)? {
        Some(0.0) | None => 1.0,
        Some(_) => positive(suffix, 1.0)?,
    };
    let scaling = match kind.unwrap_or(Kind::Linear) {
        Kind::None => RopeScaling::None,
        Kind::Linear if factor == 1.0 => RopeScaling::None,
        Kind::Linear => RopeScaling::Linear { factor },
        Kind::Llama3 => {
            let low_freq_factor = positive("rope.scaling.low_freq_factor", 1.0)?;
            let high_freq_factor = positive("rope.scaling.high_freq_factor", 4.0)?;
            if high_freq_factor <= low_freq_factor {
                let key = reader.key("rope.scaling.high_freq_factor");
                let problem =
                    format!("is {high_freq_factor}; more than low_freq_factor {low_freq_factor} is wanted");
                return Err(metadata.bad_value(&key, problem));
            }
            RopeScaling::Llama3 {
                factor,
                original_context: reader
                    .optional_size("rope.scaling.original_context_length")?
                    .unwrap_or(context_length),
                low_freq_factor,
                high_freq_factor,
            }
        }
        Kind::Yarn => RopeScaling::Yarn {
            factor,
            original_context: reader
                .optional_size("rope.scaling.original_context_length")?
                .unwrap_or(context_length),
            ext_factor: reader.optional_float("rope.scaling.yarn_ext_factor")?.unwrap_or(1.0) as f32,
            attn_factor: match reader.optional_float("rope.scaling.attn_factor")? {
                Some(_) => positive("rope.scaling.attn_factor", 1.0)?,
                None => positive("rope.scaling.yarn_attn_factor", 1.0)?,
            },
            beta_fast: positive("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: positive("rope.scaling.yarn_beta_slow", 1.0)?,
        },
    };
    let wanted = Wanted { dims: &[dim as u64 / 2], reason: "one factor per turned pair" };
    let factors = reader.optional_tensor("rope_freqs.weight", wanted)?;
    Ok(Rope { dim, base, style, scaling, factors })
}
