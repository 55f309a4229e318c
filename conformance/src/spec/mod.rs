//! Specifications of problems: the numbers and choices that shape one, from which a seed makes operands.

mod cache;
mod experts;
mod ffn;
mod plain;
mod planes;

pub use cache::{AttentionSpec, CacheAction, CacheSpec, SequenceShape};
pub(crate) use experts::layer_of;
pub use experts::{ExpertsSpec, RouteSpec};
pub use ffn::{FUNCTIONS, FfnSpec, MaskShape, PredictSpec, RANGES, RangeShape, SELECTS, Select, make_ranges};
pub use plain::{CopySpec, ElementwiseSpec, EmbedSpec, LinearSpec, NormSpec, RopeSpec, ScalingShape};
pub use planes::PlaneShape;

use crate::finding::Fallible;
use crate::problem::Problem;
use crate::rng::Rng;
use engine_core::operation::Arithmetic;
use engine_core::{ComputeBackend, DType};

/// What a problem is made from.
#[derive(Clone, Debug)]
pub enum Spec {
    /// `Copy` between two buffers, or to or from host memory.
    Copy(CopySpec),
    /// `Embed`.
    Embed(EmbedSpec),
    /// `Norm`.
    Norm(NormSpec),
    /// `Linear`.
    Linear(LinearSpec),
    /// `Rope`.
    Rope(RopeSpec),
    /// `Activate`, `Add` or `Multiply`.
    Elementwise(ElementwiseSpec),
    /// `Ffn`.
    Ffn(FfnSpec),
    /// `Predict`.
    Predict(PredictSpec),
    /// `Route`.
    Route(RouteSpec),
    /// `Experts`.
    Experts(ExpertsSpec),
    /// `KvAppend`, `KvExport` or `KvImport`.
    Cache(CacheSpec),
    /// `Attention`.
    Attention(AttentionSpec),
}

impl Spec {
    /// Makes the operands. The oracle decides where thresholds lie, so that no neuron is within rounding of one.
    ///
    /// # Errors
    /// Where the oracle fails.
    pub fn build(&self, seed: u64, oracle: &dyn ComputeBackend) -> Fallible<Problem> {
        let mut rng = Rng::new(seed);
        match self {
            Spec::Copy(s) => s.build(&mut rng),
            Spec::Embed(s) => s.build(&mut rng),
            Spec::Norm(s) => s.build(&mut rng),
            Spec::Linear(s) => s.build(&mut rng),
            Spec::Rope(s) => s.build(&mut rng),
            Spec::Elementwise(s) => s.build(&mut rng),
            Spec::Ffn(s) => s.build(&mut rng, oracle),
            Spec::Predict(s) => s.build(&mut rng, oracle),
            Spec::Route(s) => s.build(&mut rng),
            Spec::Experts(s) => s.build(&mut rng, oracle),
            Spec::Cache(s) => s.build(&mut rng),
            Spec::Attention(s) => s.build(&mut rng),
        }
    }

    /// The dtype that the case's line in the report is about.
    pub fn dtype(&self) -> DType {
        match self {
            Spec::Copy(s) => s.dtype,
            Spec::Embed(s) => s.dtype,
            Spec::Linear(s) => s.dtype,
            Spec::Ffn(s) => s.dtype,
            Spec::Predict(s) => s.dtype,
            Spec::Experts(s) => s.dtype,
            Spec::Cache(_) | Spec::Attention(_) => DType::F16,
            Spec::Norm(_) | Spec::Rope(_) | Spec::Elementwise(_) | Spec::Route(_) => DType::F32,
        }
    }

    /// The operation's name.
    pub fn operation(&self) -> &'static str {
        match self {
            Spec::Copy(_) => "copy",
            Spec::Embed(_) => "embed",
            Spec::Norm(_) => "norm",
            Spec::Linear(_) => "linear",
            Spec::Rope(_) => "rope",
            Spec::Elementwise(s) => s.operation(),
            Spec::Ffn(_) => "ffn",
            Spec::Predict(_) => "predict",
            Spec::Route(_) => "route",
            Spec::Experts(_) => "experts",
            Spec::Cache(s) => s.operation(),
            Spec::Attention(_) => "attention",
        }
    }
}

/// The arithmetic of weights that meet int8 or f32 activations.
pub fn arithmetic(int8: bool) -> Arithmetic {
    if int8 { Arithmetic::INT8 } else { Arithmetic::F32 }
}
