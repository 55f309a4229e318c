//! What a case works with: the device under test beside two oracles, and the steps that most cases share.

use crate::compare::{Against, Comparison, compare, has_exact};
use crate::finding::{Fallible, Finding, Outcome};
use crate::problem::Problem;
use crate::run::{Lab, Outputs, prepare, run_once};
use crate::scale::scales;
use crate::spec::Spec;
use engine_core::ComputeBackend;
use engine_core::backend::{Support, ToleranceClass};

/// A device under test and its oracles.
#[derive(Clone, Copy)]
pub struct Bench<'a> {
    /// The device under test.
    pub dut: &'a dyn ComputeBackend,
    /// The oracle doing the descriptor's own arithmetic.
    pub stated: &'a dyn ComputeBackend,
    /// The oracle in true f64.
    pub exact: &'a dyn ComputeBackend,
    /// The device opened again with a `memory_limit` of [`LIMIT_BYTES`], where it has that option.
    pub limited: Option<&'a dyn ComputeBackend>,
    /// Seed of the whole run.
    pub seed: u64,
    /// Random problems per operation.
    pub random: u32,
}

/// The memory limit of [`Bench::limited`].
pub const LIMIT_BYTES: u64 = 1 << 20;

/// Whether the device runs all operations of a problem; its reason where not.
pub fn refusal(backend: &dyn ComputeBackend, problem: &Problem) -> Option<String> {
    (0..problem.list.operations.len()).find_map(|i| match backend.supports(&problem.list, i) {
        Support::No { reason } => Some(reason),
        _ => None,
    })
}

impl Bench<'_> {
    /// The device's numeric class.
    pub fn class(&self) -> ToleranceClass {
        self.dut.describe().tolerance
    }

    /// The lab of the device under test.
    pub fn lab(&self) -> Lab<'_> {
        Lab::new(self.dut)
    }

    /// The seed of one named case.
    pub fn seed_of(&self, name: &str) -> u64 {
        self.seed ^ crate::rng::hash(name)
    }

    /// Makes a problem; `None` with the reason where the device says No.
    ///
    /// # Errors
    /// Where the oracle fails, or denies what the device supports.
    pub fn ask(&self, spec: &Spec, seed: u64) -> Fallible<Result<Problem, String>> {
        let problem = spec.build(seed, self.stated)?;
        if let Some(reason) = refusal(self.dut, &problem) {
            if reason.trim().is_empty() {
                return Err(Finding::new("supports", "it says No and gives no reason"));
            }
            return Ok(Err(reason));
        }
        Ok(Ok(problem))
    }

    /// Outputs of the device.
    ///
    /// # Errors
    /// The device's, as findings.
    pub fn run(&self, problem: &Problem) -> Fallible<Outputs> {
        let prepared = prepare(self.lab(), problem)?;
        let outputs = prepared.run(problem)?;
        prepared.close(problem)?;
        Ok(outputs)
    }

    /// Compares outputs of a problem with one operation with both oracles.
    ///
    /// # Errors
    /// The worst element beyond a limit.
    pub fn judge(&self, problem: &Problem, got: &Outputs, widen: f64) -> Fallible<f64> {
        let stated = run_once(self.stated, problem).map_err(|f| f.during("the oracle"))?;
        let scales = scales(problem, self.stated, &stated, self.class())?;
        let comparison =
            |against| Comparison { problem, scales: &scales, class: self.class(), against, widen };
        let mut worst = compare(&comparison(Against::Stated), got, &stated)?;
        if has_exact(problem) {
            let exact = run_once(self.exact, problem).map_err(|f| f.during("the f64 oracle"))?;
            worst = worst.max(compare(&comparison(Against::Exact), got, &exact)?);
        }
        Ok(worst)
    }

    /// Runs a problem on the device and compares it with both oracles.
    ///
    /// # Errors
    /// What was found.
    pub fn values(&self, spec: &Spec, seed: u64) -> Fallible<Outcome> {
        let problem = match self.ask(spec, seed)? {
            Ok(problem) => problem,
            Err(reason) => return Ok(Outcome::NotSupported { reason }),
        };
        let got = self.run(&problem)?;
        Ok(Outcome::Passed { worst: self.judge(&problem, &got, 1.0)? })
    }
}
