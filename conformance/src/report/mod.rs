//! What a run of the suite found, and its three forms: a page for people, JUnit XML, JSON.

mod junit;
mod text;

use crate::case::Yardstick;
use crate::finding::Outcome;
use crate::protocol::SubjectInfo;
use engine_core::module::PluginKind;
use serde::{Deserialize, Serialize};

pub use text::limits_page;

/// How a case counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Status {
    /// All promises were kept.
    Passed,
    /// One was broken.
    Failed,
    /// The device says No.
    NotSupported,
    /// One was broken, as is known.
    KnownFailure,
}

impl Status {
    /// Of an outcome by itself.
    pub fn of(outcome: &Outcome) -> Status {
        match outcome {
            Outcome::Passed { .. } => Status::Passed,
            Outcome::NotSupported { .. } => Status::NotSupported,
            Outcome::Failed { .. } => Status::Failed,
        }
    }
}

/// One case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CaseReport {
    /// Name.
    pub name: String,
    /// Operation.
    pub operation: String,
    /// Dtype.
    pub dtype: String,
    /// What its results are held against.
    pub yardstick: Yardstick,
    /// Operand types, for failures.
    pub shape: String,
    /// The operation's parameters, for failures.
    pub parameters: String,
    /// How it counts.
    pub status: Status,
    /// What became of it.
    pub outcome: Outcome,
    /// The reason, where a failure is known.
    pub expected: Option<String>,
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Name of the plug-in.
    pub plugin: String,
    /// Its kind.
    pub kind: PluginKind,
    /// Its version.
    pub version: String,
    /// The device or tier.
    pub subject: SubjectInfo,
    /// Seed.
    pub seed: u64,
    /// Whether all cases were asked for.
    pub full: bool,
    /// The planted fault, if any.
    pub mutant: Option<String>,
    /// The command that runs one case again; `{case}` stands for its name.
    pub reproduce: String,
    /// The cases, in the suite's order.
    pub cases: Vec<CaseReport>,
}

impl Report {
    /// Cases with a status.
    pub fn count(&self, status: Status) -> usize {
        self.cases.iter().filter(|c| c.status == status).count()
    }

    /// Which cases were asked for, in words.
    pub fn lane(&self) -> &'static str {
        if self.full { "all cases" } else { "sampled cases" }
    }

    /// The command that runs one case alone.
    pub fn again(&self, case: &CaseReport) -> String {
        self.reproduce.replace("{case}", &case.name)
    }

    /// Whether nothing failed that was not known to.
    pub fn is_ok(&self) -> bool {
        self.count(Status::Failed) == 0
    }

    /// 0 where all is well, 1 where something failed.
    pub fn exit_code(&self) -> i32 {
        i32::from(!self.is_ok())
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_else(|e| format!("{{\"error\":\"{e}\"}}"))
    }
}
