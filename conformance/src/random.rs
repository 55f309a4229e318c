//! Random problems with shrinking: what a matrix of cases does not think of.

use crate::bench::Bench;
use crate::describe::Description;
use crate::finding::{Fallible, Finding, Outcome};
use crate::spec::{AttentionSpec, FfnSpec, LinearSpec, MaskShape, RangeShape, Select, SequenceShape, Spec};
use crate::values::{ValueClass, weight_types};
use engine_core::DType;
use engine_core::operation::{Activation, DownLayout};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use std::cell::{Cell, RefCell};

/// Operations that are tried with random shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `Linear`.
    Linear,
    /// `Ffn`.
    Ffn,
    /// `Attention`.
    Attention,
}

impl Family {
    /// Every family.
    pub const ALL: [Family; 3] = [Family::Linear, Family::Ffn, Family::Attention];

    /// The operation's name.
    pub fn name(self) -> &'static str {
        match self {
            Family::Linear => "linear",
            Family::Ffn => "ffn",
            Family::Attention => "attention",
        }
    }

    fn strategy(self) -> BoxedStrategy<Spec> {
        match self {
            Family::Linear => linear().prop_map(Spec::Linear).boxed(),
            Family::Ffn => ffn().prop_map(Spec::Ffn).boxed(),
            Family::Attention => attention().prop_map(Spec::Attention).boxed(),
        }
    }
}

/// Types and value classes shrink towards the plainest.
fn dtype() -> impl Strategy<Value = DType> {
    let mut types: Vec<DType> = weight_types().collect();
    types.sort_by_key(|d| (d.is_quantised(), d.code()));
    (0..types.len()).prop_map(move |i| types[i])
}

fn values() -> impl Strategy<Value = ValueClass> {
    (0..ValueClass::ALL.len()).prop_map(|i| ValueClass::ALL[i])
}

/// Columns of whole blocks, or any where there are none.
fn columns(dtype: DType, drawn: u64) -> u64 {
    let block = dtype.block_elements();
    if block == 1 { drawn } else { block * (1 + drawn * 2 / block.max(64)) }
}

fn linear() -> impl Strategy<Value = LinearSpec> {
    let sizes = (1u64..70, 1u64..200, 1u32..12, 0u32..3);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (dtype(), values(), sizes, flags).prop_map(|(dtype, values, (rows, drawn, tokens, spare), flags)| {
        LinearSpec {
            dtype,
            rows,
            columns: columns(dtype, drawn),
            capacity: tokens + spare,
            tokens,
            bias: flags.0,
            accumulate: flags.1,
            int8: flags.2,
            strided: flags.3,
            constant: true,
            values,
        }
    })
}

fn ffn() -> impl Strategy<Value = FfnSpec> {
    let selects = [
        Select::All,
        Select::GateFirst,
        Select::Mask(MaskShape::Half),
        Select::Mask(MaskShape::One),
        Select::Mask(MaskShape::Sparse),
        Select::Threshold,
    ];
    let ranges =
        [RangeShape::Whole, RangeShape::Unaligned, RangeShape::Several, RangeShape::Aligned, RangeShape::One];
    let functions = [Activation::Relu, Activation::ReluSquared, Activation::Silu, Activation::GeluErf];
    let sizes = (1u64..130, 1u64..130, 1u32..6, 0u32..3);
    let choices = (0..selects.len(), 0..ranges.len(), 0..functions.len());
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (dtype(), values(), sizes, choices, flags).prop_map(
        move |(dtype, values, (width, neurons, tokens, spare), (select, range, function), flags)| {
            let select = selects[select];
            let function =
                if select == Select::GateFirst { functions[function % 2] } else { functions[function] };
            let layout = if flags.1 { DownLayout::OutputRows } else { DownLayout::NeuronRows };
            FfnSpec {
                dtype,
                width: columns(dtype, width),
                neurons: columns(dtype, neurons) as u32,
                capacity: tokens + spare,
                tokens,
                gate: !flags.0,
                bias: flags.2,
                function,
                up_function: Activation::Identity,
                layout,
                planes: crate::spec::PlaneShape::None,
                select,
                ranges: ranges[range],
                int8: flags.3,
                hidden: flags.4,
                accumulate: flags.5,
                strided: flags.2,
                constant: true,
                values,
            }
        },
    )
}

fn attention() -> impl Strategy<Value = AttentionSpec> {
    let sequences = proptest::collection::vec((1u32..6, 0u32..40), 1..4);
    (values(), 1u32..4, 1u32..4, 1u32..40, sequences, proptest::option::of(1u32..9), any::<bool>()).prop_map(
        |(values, kv_heads, group, head_dim, sequences, window, capped)| AttentionSpec {
            heads: kv_heads * group,
            kv_heads,
            head_dim,
            sequences: sequences.into_iter().map(|(tokens, past)| SequenceShape { tokens, past }).collect(),
            window,
            soft_cap: capped.then_some(2.0),
            values,
        },
    )
}

/// Runs `bench.random` problems of a family; a failure is shrunk before it is reported.
///
/// # Errors
/// The smallest failing specification, with what was found on it.
pub fn run(bench: &Bench<'_>, family: Family, seed: u64) -> Fallible<Outcome> {
    let mut bytes = [0u8; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config =
        Config { cases: bench.random, failure_persistence: None, max_shrink_iters: 400, ..Config::default() };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let (worst, supported) = (Cell::new(0.0f64), Cell::new(false));
    let last = RefCell::new(None);
    let refused = RefCell::new(String::new());
    let result = runner.run(&family.strategy(), |spec| {
        match bench.values(&spec, seed) {
            Ok(Outcome::Passed { worst: w }) => {
                worst.set(worst.get().max(w));
                supported.set(true);
            }
            Ok(Outcome::NotSupported { reason }) => *refused.borrow_mut() = reason,
            Ok(Outcome::Failed { finding }) | Err(finding) => {
                *last.borrow_mut() = Some(finding);
                return Err(TestCaseError::fail("found"));
            }
        }
        Ok(())
    });
    match result {
        Ok(()) if supported.get() || bench.random == 0 => Ok(Outcome::Passed { worst: worst.get() }),
        Ok(()) => Ok(Outcome::NotSupported { reason: refused.take() }),
        Err(TestError::Fail(_, spec)) => {
            // The last finding may be of a larger problem: shrinking ends with one that passes.
            let finding = match bench.values(&spec, seed) {
                Err(finding) | Ok(Outcome::Failed { finding }) => finding,
                _ => last.take().unwrap_or_else(|| Finding::new("random", "it failed once and then passed")),
            };
            let smallest = Description::of_spec(&spec, seed, bench.stated);
            Err(finding
                .during(&format!("the smallest that fails: {}; {}", smallest.shape, smallest.parameters)))
        }
        Err(TestError::Abort(reason)) => Err(Finding::new("random", format!("given up: {reason}"))),
    }
}
