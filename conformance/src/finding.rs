//! What a case finds: an outcome, and for a failure everything that a person needs to act on it.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One wrong element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Element {
    /// The slot's name.
    pub slot: String,
    /// Row (token, neuron or position).
    pub row: u64,
    /// Column.
    pub column: u64,
    /// What the device gave.
    pub got: String,
    /// What the oracle gives.
    pub want: String,
    /// Greatest difference allowed.
    pub allowed: String,
    /// The figure of the limits' table.
    pub limit: String,
    /// Why the figure is what it is.
    pub reason: String,
    /// How many elements of the slot are wrong, and of how many.
    pub wrong: String,
    /// Its error in units of what is allowed; none where no number would do.
    pub times: Option<f64>,
}

/// A failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The promise that was broken, such as `guard regions` or `stated arithmetic`.
    pub check: String,
    /// A sentence for people.
    pub message: String,
    /// The worst element, where values differ.
    pub element: Option<Box<Element>>,
}

/// A result whose failure is a finding.
pub type Fallible<T> = Result<T, Finding>;

impl Finding {
    /// A finding without an element.
    pub fn new(check: &str, message: impl Into<String>) -> Finding {
        Finding { check: check.into(), message: message.into(), element: None }
    }

    /// The same, with what was under way put before the message.
    pub fn during(mut self, what: &str) -> Finding {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.check, self.message)?;
        if let Some(e) = &self.element {
            write!(
                f,
                "\n    {}[{}][{}] is {}, wanted {} within {} ({} elements are wrong)\n    limit {}: {}",
                e.slot, e.row, e.column, e.got, e.want, e.allowed, e.wrong, e.limit, e.reason
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for Finding {}

impl From<engine_core::Error> for Finding {
    fn from(error: engine_core::Error) -> Finding {
        Finding::new("unexpected error", error.to_string())
    }
}

/// What became of a case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Outcome {
    /// All promises were kept.
    Passed {
        /// The worst error in units of its limit; 0 where nothing was measured.
        worst: f64,
    },
    /// The device says No.
    NotSupported {
        /// Its reason.
        reason: String,
    },
    /// A promise was broken.
    Failed {
        /// Which and how.
        finding: Finding,
    },
}

impl Outcome {
    /// Passed, nothing measured.
    pub const OK: Outcome = Outcome::Passed { worst: 0.0 };
}

impl From<Fallible<Outcome>> for Outcome {
    fn from(result: Fallible<Outcome>) -> Outcome {
        result.unwrap_or_else(|finding| Outcome::Failed { finding })
    }
}
