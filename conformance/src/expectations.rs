//! Known failures as typed data: each with its reason, and a failure itself once it passes.

use crate::finding::{Finding, Outcome};
use crate::report::{CaseReport, Status};
use serde::{Deserialize, Serialize};

/// A failure that is known and explained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expectation {
    /// Pattern of case names; `*` stands for any text.
    pub case: String,
    /// Name of the plug-in.
    pub plugin: String,
    /// Pattern of device names.
    pub device: String,
    /// Why it fails, and where that is tracked.
    pub reason: String,
}

/// Whether `text` matches a pattern in which `*` stands for any text.
pub fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else { return pattern == text };
    let Some(rest) = text.strip_prefix(head) else { return false };
    (0..=rest.len()).any(|at| rest.is_char_boundary(at) && matches(tail, &rest[at..]))
}

/// Applies expectations to a case: a known failure is set aside, and one that passes is a failure.
pub(crate) fn judge(expectations: &[Expectation], plugin: &str, device: &str, case: &mut CaseReport) {
    let known = expectations
        .iter()
        .find(|e| e.plugin == plugin && matches(&e.device, device) && matches(&e.case, &case.name));
    let Some(known) = known else { return };
    case.expected = Some(known.reason.clone());
    match case.status {
        Status::Failed => case.status = Status::KnownFailure,
        Status::Passed => {
            case.status = Status::Failed;
            case.outcome = Outcome::Failed {
                finding: Finding::new(
                    "expectations",
                    format!(
                        "it passes, but is listed as a known failure ({}): remove it from the list",
                        known.reason
                    ),
                ),
            };
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        assert!(matches("ffn/*/mask-*", "ffn/q8_0/int8/mask-half/whole/relu"));
        assert!(matches("*", ""));
        assert!(!matches("ffn/*", "linear/f32"));
        assert!(!matches("a", "ab"));
        assert!(matches("*é*", "caféx"));
    }

    fn case(status: Status) -> CaseReport {
        let outcome = match status {
            Status::Failed => Outcome::Failed { finding: Finding::new("stated arithmetic", "off") },
            _ => Outcome::OK,
        };
        CaseReport {
            name: "ffn/q8_0/x".into(),
            operation: "ffn".into(),
            dtype: "q8_0".into(),
            yardstick: crate::case::Yardstick::Reference,
            shape: String::new(),
            parameters: String::new(),
            status,
            outcome,
            expected: None,
        }
    }

    #[test]
    fn a_known_failure_that_passes_is_a_failure() {
        let list = [Expectation {
            case: "ffn/*".into(),
            plugin: "x".into(),
            device: "*".into(),
            reason: "driver bug 7".into(),
        }];
        let mut failed = case(Status::Failed);
        judge(&list, "x", "x:0", &mut failed);
        assert_eq!(failed.status, Status::KnownFailure);
        let mut passed = case(Status::Passed);
        judge(&list, "x", "x:0", &mut passed);
        assert_eq!(passed.status, Status::Failed);
        let mut other = case(Status::Passed);
        judge(&list, "y", "x:0", &mut other);
        assert_eq!(other.status, Status::Passed);
    }
}
