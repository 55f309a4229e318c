//! Codes of single words: dtypes, roles, purposes, answers.

use crate::{Accumulation, BufferUse, Place, Quantization, Reached, Support};
use engine_core::backend;
use engine_core::operation::{self, Activation, DownLayout, Gating, NormKind, RopeStyle};
use engine_core::{Error, Result};

fn unknown<T>(what: &str, code: impl std::fmt::Display) -> Result<T> {
    Err(Error::unsupported(format!("{what} code {code} is not known to this version of the interface")))
}

fn unnamed<T>(what: &str, value: impl std::fmt::Debug) -> Result<T> {
    Err(Error::unsupported(format!("{what} {value:?} has no code in this version of the interface")))
}

pub(super) fn dtype(code: crate::DType) -> Result<engine_core::DType> {
    engine_core::DType::from_code(code.0).map_or_else(|| unknown("dtype", code.0), Ok)
}

/// Both directions of one code.
macro_rules! pairs {
    ($to:ident, $from:ident, $what:literal, $core:ty, $abi:ty, { $($c:path = $a:expr),* $(,)? }) => {
        pub(super) fn $to(value: $core) -> Result<$abi> {
            match value {
                $($c => Ok($a),)*
                #[allow(unreachable_patterns, reason = "the enum may grow, or be closed")]
                other => unnamed($what, other),
            }
        }
        pub(super) fn $from(code: $abi) -> Result<$core> {
            $(if code == $a { return Ok($c); })*
            unknown($what, format_args!("{code:?}"))
        }
    };
}

pairs!(place_code, place, "place", operation::Place, Place, {
    operation::Place::Device = Place::DEVICE,
    operation::Place::Host = Place::HOST,
});
pairs!(quantization_code, quantization, "quantisation", operation::Quantization, Quantization, {
    operation::Quantization::None = Quantization::NONE,
    operation::Quantization::Int8Blocks = Quantization::INT8_BLOCKS,
});
pairs!(accumulation_code, accumulation, "accumulation", operation::Accumulation, Accumulation, {
    operation::Accumulation::F32 = Accumulation::F32,
    operation::Accumulation::F16 = Accumulation::F16,
});
pairs!(gating_code, gating, "gating", Gating, u64, { Gating::Softmax = 1, Gating::Sigmoid = 2 });
pairs!(norm_code, norm, "norm kind", NormKind, u64, { NormKind::Rms = 1, NormKind::Layer = 2 });
pairs!(style_code, style, "rope style", RopeStyle, u64, {
    RopeStyle::Interleaved = 1,
    RopeStyle::Halves = 2,
});
pairs!(layout_code, layout, "layout of down", DownLayout, u64, {
    DownLayout::OutputRows = 1,
    DownLayout::NeuronRows = 2,
});
pairs!(activation_code, activation, "activation function", Activation, u64, {
    Activation::Identity = 0,
    Activation::Relu = 1,
    Activation::ReluSquared = 2,
    Activation::Silu = 3,
    Activation::GeluTanh = 4,
    Activation::GeluErf = 5,
});
pairs!(use_code, use_, "buffer use", backend::BufferUse, BufferUse, {
    backend::BufferUse::Weights = BufferUse::WEIGHTS,
    backend::BufferUse::KvCache = BufferUse::KV_CACHE,
    backend::BufferUse::Activations = BufferUse::ACTIVATIONS,
});

/// The code of a buffer's purpose.
///
/// # Errors
/// [`Error::Unsupported`] for one that this version of the interface has no code for.
pub fn buffer_use_code(purpose: backend::BufferUse) -> Result<BufferUse> {
    use_code(purpose)
}

/// The purpose with this code.
///
/// # Errors
/// [`Error::Unsupported`] for a code that is not known.
pub fn buffer_use(code: BufferUse) -> Result<backend::BufferUse> {
    use_(code)
}

/// The code of an answer; the reason crosses beside it.
pub fn support_code(support: &backend::Support) -> Support {
    match support {
        backend::Support::No { .. } => Support::NO,
        backend::Support::Yes => Support::YES,
        backend::Support::Preferred => Support::PREFERRED,
    }
}

/// The answer with this code.
///
/// # Errors
/// [`Error::Internal`] for a code that is not known.
pub fn support(code: Support, reason: String) -> Result<backend::Support> {
    match code {
        Support::NO => Ok(backend::Support::No { reason }),
        Support::YES => Ok(backend::Support::Yes),
        Support::PREFERRED => Ok(backend::Support::Preferred),
        other => Err(Error::internal(format!("it answered `supports` with the unknown code {}", other.0))),
    }
}

/// The code of a wait's answer.
pub fn reached_code(value: engine_core::Reached) -> Reached {
    match value {
        engine_core::Reached::Done => Reached::DONE,
        engine_core::Reached::TimedOut => Reached::TIMED_OUT,
    }
}

/// The wait's answer with this code.
///
/// # Errors
/// [`Error::Internal`] for a code that is not known.
pub fn reached(code: Reached) -> Result<engine_core::Reached> {
    match code {
        Reached::DONE => Ok(engine_core::Reached::Done),
        Reached::TIMED_OUT => Ok(engine_core::Reached::TimedOut),
        other => Err(Error::internal(format!("it answered `wait` with the unknown code {}", other.0))),
    }
}
