//! One case of the suite for compute devices: its name, what it does, and what it holds results against.

use crate::bench::Bench;
use crate::describe::Description;
use crate::finding::{Fallible, Outcome};
use crate::properties::Property;
use crate::random::{self, Family};
use crate::spec::Spec;
use serde::{Deserialize, Serialize};

/// What a case does.
#[derive(Clone, Debug)]
pub enum Action {
    /// Compares values with both oracles.
    Values(Spec),
    /// Checks a promise on a problem.
    Property(Property, Spec),
    /// Checks an error path.
    Error(fn(&Bench<'_>) -> Fallible<Outcome>),
    /// Random problems with shrinking.
    Random(Family),
}

/// One case.
#[derive(Clone, Debug)]
pub struct Case {
    /// Its name, stable from one version to the next.
    pub name: String,
    /// The operation, or `device` for what concerns none.
    pub operation: String,
    /// The dtype, or `-`.
    pub dtype: String,
    /// Whether it is in the sampled subset.
    pub sampled: bool,
    /// What it does.
    pub action: Action,
}

/// What a case holds a device's results against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Yardstick {
    /// The reference.
    Reference,
    /// The device's own results under other circumstances: such a case says nothing of whether they are right.
    Itself,
    /// The contract's words: codes, counters, decisions.
    Contract,
}

impl Case {
    /// What it compares with.
    pub fn yardstick(&self) -> Yardstick {
        match &self.action {
            Action::Values(_) | Action::Random(_) => Yardstick::Reference,
            Action::Property(property, _) if property.uses_reference() => Yardstick::Reference,
            Action::Property(..) => Yardstick::Itself,
            Action::Error(_) => Yardstick::Contract,
        }
    }

    /// Shape and parameters of what it computes; empty for what is no single problem.
    pub fn describe(&self, bench: &Bench<'_>) -> Description {
        match &self.action {
            Action::Values(spec) | Action::Property(_, spec) => {
                Description::of_spec(spec, bench.seed_of(&self.name), bench.stated)
            }
            _ => Description::default(),
        }
    }

    /// Runs it.
    pub fn run(&self, bench: &Bench<'_>) -> Outcome {
        let seed = bench.seed_of(&self.name);
        match &self.action {
            Action::Values(spec) => bench.values(spec, seed),
            Action::Property(property, spec) => property.check(bench, spec, seed),
            Action::Error(check) => check(bench),
            Action::Random(family) => random::run(bench, *family, seed),
        }
        .into()
    }
}
