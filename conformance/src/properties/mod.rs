//! Promises beyond values: what a result must not depend on, and what must not be touched.

mod cache;
mod lists;
mod ranges;
mod repeat;

pub(crate) use repeat::cut;

use crate::bench::Bench;
use crate::finding::{Fallible, Outcome};
use crate::spec::Spec;

/// A promise that a case checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// Running again, and preparing again, gives the same bits.
    Repeats,
    /// Submissions from several threads give the same bits as one after the other.
    Concurrent,
    /// A token gives the same bits alone, in every prefix of a batch, and in the batch.
    BatchNeighbours,
    /// Neurons that are not selected, or outside of the active ranges, are never read.
    Poisoned,
    /// Ranges run one after the other on one device add up to the whole.
    RangesAddUp,
    /// Ranges on two devices, merged, are the whole.
    Placement,
    /// Gate-first equals all neurons, bit for bit.
    GateFirst,
    /// Bundled and packed rows, constant and bound weights give the same bits.
    WeightPlacement,
    /// Imported host memory gives the same bits as memory of the device.
    Import,
    /// Submissions take effect in the order of their values.
    Order,
    /// A list gives what its operations give one by one.
    List,
    /// A cache that is filled step by step holds and gives what the canonical layout says.
    CacheSteps,
    /// Sequences of one submission do not see each other.
    Sequences,
}

impl Property {
    /// Name, as in case names.
    pub fn name(self) -> &'static str {
        match self {
            Property::Repeats => "repeats",
            Property::Concurrent => "concurrent",
            Property::BatchNeighbours => "batch-neighbours",
            Property::Poisoned => "poisoned",
            Property::RangesAddUp => "ranges-add-up",
            Property::Placement => "placement",
            Property::GateFirst => "gate-first-is-dense",
            Property::WeightPlacement => "weight-placement",
            Property::Import => "import",
            Property::Order => "order",
            Property::List => "list",
            Property::CacheSteps => "cache-steps",
            Property::Sequences => "sequences",
        }
    }

    /// Whether the device's results are held against the reference's, and not only against its own.
    pub fn uses_reference(self) -> bool {
        matches!(self, Property::RangesAddUp | Property::Placement | Property::List | Property::CacheSteps)
    }

    /// Checks it on a problem.
    ///
    /// # Errors
    /// What was found.
    pub fn check(self, bench: &Bench<'_>, spec: &Spec, seed: u64) -> Fallible<Outcome> {
        match self {
            Property::CacheSteps => return cache::steps(bench, spec, seed),
            Property::List => return lists::list(bench, seed),
            _ => {}
        }
        let problem = match bench.ask(spec, seed)? {
            Ok(problem) => problem,
            Err(reason) => return Ok(Outcome::NotSupported { reason }),
        };
        match self {
            Property::Repeats => repeat::repeats(bench, &problem),
            Property::Concurrent => repeat::concurrent(bench, &problem),
            Property::BatchNeighbours => repeat::neighbours(bench, &problem),
            Property::Sequences => repeat::sequences(bench, &problem),
            Property::Poisoned if matches!(spec, Spec::Experts(_)) => {
                ranges::poisoned_experts(bench, &problem)
            }
            Property::Poisoned => ranges::poisoned(bench, &problem),
            Property::RangesAddUp => ranges::add_up(bench, &problem),
            Property::Placement => ranges::placement(bench, &problem),
            Property::GateFirst => ranges::gate_first(bench, &problem),
            Property::WeightPlacement => lists::weight_placement(bench, spec, seed, &problem),
            Property::Import => lists::import(bench, &problem),
            Property::Order => lists::order(bench, &problem),
            Property::CacheSteps | Property::List => Ok(Outcome::OK),
        }
    }
}
