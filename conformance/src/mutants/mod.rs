//! Proof that the suite bites: backends with one planted fault each, and the cases that catch them.

mod page;
pub mod tiny_model;
mod wrapper;

use crate::bench::Bench;
use crate::diverge::diverge;
use crate::finding::{Fallible, Finding, Outcome};
use crate::matrix;
use engine_core::ComputeBackend;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The scale of one block of a projection's last row is off by one part in 4096.
    ScaleOff,
    /// The last output of a projection is not written.
    LastRow,
    /// Rope rotates the other pairs.
    RopeOrder,
    /// The order of a sum varies from run to run: every other run an element is off by its last bit.
    Racing,
    /// Appending to a cache that holds positions already has no effect.
    StaleCache,
    /// Attention sees one position more than its own.
    MaskOffByOne,
    /// A sparse layer decides by its own gate instead of by the mask.
    PeekingPredictor,
    /// A cluster range is read one neuron too far.
    PastCluster,
    /// Neurons that are not selected are computed and multiplied by zero.
    ReadsUnselected,
    /// With more than one token the first row is off by its last bit.
    BatchDependent,
    /// One element after the output is written.
    WritesPast,
    /// The process aborts in a projection.
    Aborts,
    /// A projection never ends.
    Hangs,
}

/// A fault with its description and where to look for it.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// Name.
    pub name: &'static str,
    /// The fault.
    pub fault: Fault,
    /// What is wrong, in words.
    pub what: &'static str,
    /// Prefix of the cases that are tried.
    pub cases: &'static str,
    /// The checks that are right to catch it.
    pub checks: &'static [&'static str],
    /// Why the divergence finder cannot see it, or nothing where it must.
    pub unseen: &'static str,
}

/// Every fault.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "scale-off",
        fault: Fault::ScaleOff,
        what: "the scale of one block is off by one part in 4096",
        cases: "linear/q8_0",
        checks: &["stated arithmetic"],
        unseen: "",
    },
    Mutant {
        name: "last-row",
        fault: Fault::LastRow,
        what: "the last row of a projection is dropped",
        cases: "linear/f32",
        checks: &["stated arithmetic"],
        unseen: "",
    },
    Mutant {
        name: "rope-order",
        fault: Fault::RopeOrder,
        what: "rope rotates pairs in the other order",
        cases: "rope",
        checks: &["stated arithmetic"],
        unseen: "",
    },
    Mutant {
        name: "racing-sums",
        fault: Fault::Racing,
        what: "the order of sums varies between runs",
        cases: "ffn/f32",
        checks: &["repeats", "concurrent submissions", "batch neighbours"],
        unseen: "",
    },
    Mutant {
        name: "stale-cache",
        fault: Fault::StaleCache,
        what: "a KV cache keeps what it held",
        cases: "kv-append",
        checks: &["stated arithmetic"],
        unseen: "",
    },
    Mutant {
        name: "stale-cache-steps",
        fault: Fault::StaleCache,
        what: "the same, seen over several submissions",
        cases: "attention",
        checks: &["kv cache"],
        unseen: "",
    },
    Mutant {
        name: "mask-off-by-one",
        fault: Fault::MaskOffByOne,
        what: "attention sees one position too many",
        cases: "attention",
        checks: &["stated arithmetic"],
        unseen: "",
    },
    Mutant {
        name: "peeking-predictor",
        fault: Fault::PeekingPredictor,
        what: "a sparse layer looks at its gate instead of the mask",
        cases: "ffn",
        checks: &["stated arithmetic", "unselected neurons are not read"],
        unseen: "",
    },
    Mutant {
        name: "past-cluster",
        fault: Fault::PastCluster,
        what: "a range is read one neuron too far",
        cases: "ffn/q8_0",
        checks: &["stated arithmetic", "unselected neurons are not read"],
        unseen: "",
    },
    Mutant {
        name: "reads-unselected",
        fault: Fault::ReadsUnselected,
        what: "unselected neurons are multiplied by zero, not skipped",
        cases: "ffn/f32",
        checks: &["unselected neurons are not read"],
        unseen: "zero times a model's weight is zero; only poisoned rows show it",
    },
    Mutant {
        name: "batch-dependent",
        fault: Fault::BatchDependent,
        what: "several tokens at once round otherwise than one",
        cases: "linear/f16",
        checks: &["batch neighbours"],
        unseen: "",
    },
    Mutant {
        name: "writes-past",
        fault: Fault::WritesPast,
        what: "one element after the output is written",
        cases: "linear/f32",
        checks: &["guard regions"],
        unseen: "",
    },
];

/// Faults that only a child process survives; the runner's isolation is tested with them.
pub const FATAL: &[Mutant] = &[
    Mutant {
        name: "aborts",
        fault: Fault::Aborts,
        what: "the process aborts",
        cases: "linear/q8_0",
        checks: &["crash"],
        unseen: "the process is gone; the suite runs in a child",
    },
    Mutant {
        name: "hangs",
        fault: Fault::Hangs,
        what: "it never ends",
        cases: "linear/q8_0",
        checks: &["hang"],
        unseen: "it never answers; the suite runs in a child with a time limit",
    },
];

/// A backend with the fault of this name; it claims the f32 class, so that it is held to a device's limits.
pub fn wrap(name: &str, inner: Arc<dyn ComputeBackend>) -> Option<Arc<dyn ComputeBackend>> {
    Some(Arc::new(wrapper::Wrapper::new(inner, find(name)?.fault)))
}

/// The fault of this name.
pub fn find(name: &str) -> Option<&'static Mutant> {
    MUTANTS.iter().chain(FATAL).find(|m| m.name == name)
}

/// Every fault's name, for a page of help.
pub fn names() -> Vec<&'static str> {
    MUTANTS.iter().chain(FATAL).map(|m| m.name).collect()
}

/// That there is no such fault, with those that there are.
pub fn unknown(name: &str) -> Finding {
    Finding::new("planted fault", format!("there is none called `{name}`; there are {}", names().join(", ")))
}

/// What became of one fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The fault's name.
    pub mutant: String,
    /// What is wrong.
    pub what: String,
    /// The first case that caught it for the right reason.
    pub case: Option<String>,
    /// The check that did.
    pub check: String,
    /// Cases that were tried.
    pub tried: usize,
    /// Submission and label of the operation of the tiny model that the divergence finder names.
    pub divergence: Option<(u32, String)>,
}

impl Verdict {
    /// Whether the suite caught it, and the finder saw what it can see.
    pub fn is_ok(&self) -> bool {
        let seen = find(&self.mutant).is_some_and(|m| m.unseen.is_empty());
        self.case.is_some() && self.divergence.is_some() == seen
    }
}

/// Plants every fault into the oracle, runs the sampled cases of its operation until one catches it, and runs the
/// divergence finder over the tiny model.
///
/// # Errors
/// Never for a fault that survives: that is in the verdict.
pub fn check_all(
    stated: &Arc<dyn ComputeBackend>,
    exact: &dyn ComputeBackend,
    seed: u64,
) -> Fallible<Vec<Verdict>> {
    let cases = matrix::all();
    let mut verdicts = Vec::new();
    for mutant in MUTANTS {
        let dut: Arc<dyn ComputeBackend> = Arc::new(wrapper::Wrapper::new(Arc::clone(stated), mutant.fault));
        let bench =
            Bench { dut: dut.as_ref(), stated: stated.as_ref(), exact, limited: None, seed, random: 8 };
        let trace = diverge(&mut tiny_model::TinyModel::new(), dut.as_ref(), stated.as_ref(), false)?;
        let mut verdict = Verdict {
            mutant: mutant.name.into(),
            what: mutant.what.into(),
            case: None,
            check: String::new(),
            tried: 0,
            divergence: trace.first.map(|d| (d.submission, d.label)),
        };
        for case in cases.iter().filter(|c| c.sampled && c.name.starts_with(mutant.cases)) {
            verdict.tried += 1;
            if let Outcome::Failed { finding } = case.run(&bench)
                && mutant.checks.iter().any(|c| finding.check.starts_with(c))
            {
                verdict.case = Some(case.name.clone());
                verdict.check = finding.check;
                break;
            }
        }
        verdicts.push(verdict);
    }
    Ok(verdicts)
}

pub use page::{markdown, table};
