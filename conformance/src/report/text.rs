//! The page for people: one line per operation and type, then every failure with what is needed to act on it.

use super::{CaseReport, Report, Status};
use crate::case::Yardstick;
use crate::finding::Outcome;
use crate::limits;
use crate::mutants;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Failures that are shown in full; the others are counted.
const SHOWN: usize = 20;

#[derive(Default)]
struct Line {
    cases: usize,
    passed: usize,
    failed: usize,
    known: usize,
    refused: usize,
    worst: Worst,
    reason: Option<String>,
}

/// The largest error of several cases in units of what is allowed.
#[derive(Clone, Copy, Default)]
struct Worst {
    units: f64,
    of_failed: bool,
}

impl Worst {
    fn take(&mut self, outcome: &Outcome) {
        let (units, of_failed) = match outcome {
            Outcome::Passed { worst } => (*worst, false),
            Outcome::Failed { finding } => match &finding.element {
                Some(element) => (element.times.unwrap_or(f64::INFINITY), true),
                None => return,
            },
            Outcome::NotSupported { .. } => return,
        };
        if units > self.units {
            *self = Worst { units, of_failed };
        }
    }

    fn text(self) -> String {
        let mark = if self.of_failed { "!" } else { "" };
        match self.units {
            0.0 => "-".into(),
            units if units < 1000.0 => format!("{units:.3}{mark}"),
            units if units.is_finite() => format!("{units:.1e}{mark}"),
            _ => format!("any{mark}"),
        }
    }
}

impl Report {
    /// As a page of text.
    pub fn to_text(&self) -> String {
        let mut page = String::new();
        self.head(&mut page);
        self.table(&mut page);
        self.failures(&mut page);
        self.legend(&mut page);
        let _ = writeln!(
            page,
            "\n{} cases: {} passed, {} failed, {} known failures, {} refused",
            self.cases.len(),
            self.count(Status::Passed),
            self.count(Status::Failed),
            self.count(Status::KnownFailure),
            self.count(Status::NotSupported)
        );
        page
    }

    fn head(&self, page: &mut String) {
        let _ = writeln!(page, "{} plug-in `{}` {}", self.kind, self.plugin, self.version);
        if !self.subject.description.is_empty() {
            let _ = writeln!(page, "{}: {}", self.subject.name, self.subject.description);
        }
        for note in &self.subject.notes {
            let _ = writeln!(page, "  {note}");
        }
        if let Some(name) = &self.mutant {
            let what = mutants::find(name).map_or("", |m| m.what);
            let _ = writeln!(page, "with the planted fault `{name}`: {what}");
        }
        let class = &self.subject.class;
        match &self.subject.own_class {
            _ if class.is_empty() => {}
            Some(own) => {
                let _ = writeln!(
                    page,
                    "held to the limits of class {class}, as every planted fault is (the device by itself is of class {own})"
                );
            }
            None => {
                let _ = writeln!(page, "held to the limits of class {class}, which the device says it is of");
            }
        }
        let _ = writeln!(page, "{}, seed {}\n", self.lane(), self.seed);
    }

    /// One line per operation and type; where the device says No, its reason.
    fn table(&self, page: &mut String) {
        let mut lines: Vec<((&str, &str), Line)> = Vec::new();
        let mut index: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for case in &self.cases {
            let key = (case.operation.as_str(), case.dtype.as_str());
            let at = *index.entry(key).or_insert_with(|| {
                lines.push((key, Line::default()));
                lines.len() - 1
            });
            let line = &mut lines[at].1;
            line.cases += 1;
            match case.status {
                Status::Passed => line.passed += 1,
                Status::Failed => line.failed += 1,
                Status::KnownFailure => line.known += 1,
                Status::NotSupported => line.refused += 1,
            }
            line.worst.take(&case.outcome);
            if let Outcome::NotSupported { reason } = &case.outcome {
                line.reason.get_or_insert_with(|| reason.clone());
            }
        }
        let _ = writeln!(
            page,
            "{:<10} {:<8} {:>6} {:>7} {:>7} {:>8}  worst/limit",
            "operation", "type", "cases", "passed", "failed", "refused"
        );
        for ((operation, dtype), line) in lines {
            let _ = write!(
                page,
                "{operation:<10} {dtype:<8} {:>6} {:>7} {:>7} {:>8}  {}",
                line.cases,
                line.passed,
                line.failed,
                line.refused,
                line.worst.text()
            );
            if line.known > 0 {
                let _ = write!(page, "  ({} known failures)", line.known);
            }
            if let Some(reason) = line.reason {
                let _ = write!(page, "  no: {reason}");
            }
            let _ = writeln!(page);
        }
        self.yardsticks(page);
    }

    /// How many cases say that results are right, and how many only that they are the same.
    fn yardsticks(&self, page: &mut String) {
        let of = |yardstick| self.cases.iter().filter(|c| c.yardstick == yardstick && ran(c)).count();
        let (reference, itself, contract) =
            (of(Yardstick::Reference), of(Yardstick::Itself), of(Yardstick::Contract));
        let parts = [
            (reference, "with the reference plug-in's results"),
            (
                itself,
                "with the device's own results only (again, from several threads, beside other tokens, elsewhere in memory)",
            ),
            (contract, "with what the contract says (error codes, counters, decisions)"),
        ];
        let _ = writeln!(page, "\nOf the cases that ran:");
        for (count, what) in parts.iter().filter(|part| part.0 > 0) {
            let _ = writeln!(page, "{count:>6} compare {what}");
        }
    }

    fn failures(&self, page: &mut String) {
        let failed: Vec<&CaseReport> = self.cases.iter().filter(|c| c.status == Status::Failed).collect();
        let mut checks: BTreeMap<&str, usize> = BTreeMap::new();
        for case in &failed {
            if let Outcome::Failed { finding } = &case.outcome {
                *checks.entry(finding.check.split(" (").next().unwrap_or_default()).or_default() += 1;
            }
        }
        if !checks.is_empty() {
            let checks: Vec<String> = checks.iter().map(|(check, n)| format!("{check} {n}")).collect();
            let _ = writeln!(page, "\nFailures by check: {}", checks.join(", "));
        }
        for case in failed.iter().take(SHOWN) {
            self.failure(page, case);
        }
        if failed.len() > SHOWN {
            let _ = writeln!(page, "\nand {} more failures, all in the JSON report", failed.len() - SHOWN);
        }
        for case in self.cases.iter().filter(|c| c.status == Status::KnownFailure) {
            let _ =
                writeln!(page, "\nknown failure {}: {}", case.name, case.expected.as_deref().unwrap_or(""));
        }
    }

    fn failure(&self, page: &mut String, case: &CaseReport) {
        let Outcome::Failed { finding } = &case.outcome else { return };
        let _ = writeln!(page, "\nFAILED {}", case.name);
        let _ = writeln!(page, "  {}: {}", finding.check, finding.message);
        if let Some(e) = &finding.element {
            let other = if case.yardstick == Yardstick::Itself { "itself " } else { "wanted " };
            let _ = writeln!(page, "  element  {}[{}][{}] ({} wrong)", e.slot, e.row, e.column, e.wrong);
            let _ = writeln!(page, "  device   {}", e.got);
            let _ = writeln!(page, "  {other}  {}", e.want);
            let _ = writeln!(page, "  allowed  {} = {}", e.allowed, e.limit);
            let _ = writeln!(page, "  because  {}", e.reason);
        }
        for (name, text) in [("shape", &case.shape), ("with", &case.parameters)] {
            if !text.is_empty() {
                let _ = writeln!(page, "  {name:<7}  {text}");
            }
        }
        let _ = writeln!(page, "  again    {}", self.again(case));
    }

    /// What the words of the page mean, as far as they occur in it.
    fn legend(&self, page: &mut String) {
        let refused = self.count(Status::NotSupported) > 0;
        let failed = self.cases.iter().any(|c| matches!(c.outcome, Outcome::Failed { .. }));
        let compute = !self.subject.class.is_empty();
        let words = [
            (
                refused,
                "refused",
                "the device's `supports` said No, for the reason at the end of the line; no failure",
            ),
            (
                compute,
                "worst/limit",
                "the largest error in units of what is allowed; above 1 fails. `!`: of a failed case; `any!`: no limit \
                 would do (bits that differ, NaN); `-`: nothing was measured",
            ),
            (
                compute && failed,
                "stated arithmetic",
                "against the reference that computes in f64 what the operation states (int8 or f32 activations)",
            ),
            (
                compute && failed,
                "true f64",
                "against the reference without any quantisation of activations, under looser limits",
            ),
            (
                compute && failed,
                "allowed",
                "the limit of the operation and class, times the sum of absolute products that the element is made of",
            ),
            (compute && failed, "wanted, itself", "the reference's value; the device's own in its first run"),
            (
                compute && failed,
                "a case's name",
                "operation / type of weights / activations / shape or selection / values of the operands, or the promise",
            ),
            (failed, "again", "runs this case alone, with the same operands"),
        ];
        let mut begun = false;
        for (_, word, meaning) in words.iter().filter(|word| word.0) {
            if !std::mem::replace(&mut begun, true) {
                let _ = writeln!(page);
            }
            let _ = writeln!(page, "{word:<17}  {meaning}");
        }
        if compute {
            let _ = writeln!(page, "All limits with their reasons: thermocline-conformance --limits");
        }
    }
}

fn ran(case: &CaseReport) -> bool {
    !matches!(case.outcome, Outcome::NotSupported { .. })
}

/// Both tables of limits with their reasons.
pub fn limits_page() -> String {
    let mut page = format!(
        "{:<11} {:<12} {:<6} {:<9} {:<9} reason\n",
        "operation", "weights", "class", "stated", "exact"
    );
    for (operation, weights, class, stated, exact) in limits::table() {
        let _ = writeln!(
            page,
            "{operation:<11} {weights:<12} {:<6} {:<9.1e} {:<9.1e} {}",
            class.name(),
            stated.figure,
            exact.figure,
            stated.reason
        );
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Element, Finding};
    use crate::protocol::SubjectInfo;
    use engine_core::module::PluginKind;

    pub(in crate::report) fn sample() -> Report {
        let case = |name: &str, outcome: Outcome| {
            let mut parts = name.split('/');
            let mut part = || parts.next().unwrap_or("-").to_owned();
            CaseReport {
                operation: part(),
                dtype: part(),
                name: name.into(),
                yardstick: match name {
                    "linear/q8_0/f32/repeats" => Yardstick::Itself,
                    "device/-/double-free" => Yardstick::Contract,
                    _ => Yardstick::Reference,
                },
                shape: "input F32 [4 x 64], weight Q8_0 [5 x 64]; 3 of up to 4 tokens".into(),
                parameters: "int8 blocks of 32 activations, f32 sums".into(),
                status: Status::of(&outcome),
                outcome,
                expected: None,
            }
        };
        let finding = Finding {
            check: "stated arithmetic".into(),
            message: "`output` is off by 3.500 times what is allowed".into(),
            element: Some(Box::new(Element {
                slot: "output".into(),
                row: 2,
                column: 4,
                got: "0.50001".into(),
                want: "0.5".into(),
                allowed: "2.8e-6".into(),
                limit: "1.4e-6 of the sum of absolute products 2".into(),
                reason: "f32 sums over blocks".into(),
                wrong: "3 of 15".into(),
                times: Some(3.5),
            })),
        };
        let moved = Finding {
            check: "repeats (prepared again)".into(),
            message: "`output` differs".into(),
            element: Some(Box::new(Element {
                slot: "output".into(),
                row: 0,
                column: 1,
                got: "0.25000003".into(),
                want: "0.25".into(),
                allowed: "0".into(),
                limit: "bit-identical".into(),
                reason: "sums run in a fixed order".into(),
                wrong: "at least 1".into(),
                times: None,
            })),
        };
        Report {
            plugin: "shaky".into(),
            kind: PluginKind::Compute,
            version: "0.1.0".into(),
            subject: SubjectInfo {
                name: "shaky:0".into(),
                description: "a device that is <nearly> right & more".into(),
                class: "f32".into(),
                own_class: None,
                notes: vec!["8 lanes, because the processor has AVX2".into()],
            },
            seed: 7,
            full: false,
            mutant: None,
            reproduce: "thermocline plugins conformance shaky.so --filter '={case}' --seed 7".into(),
            cases: vec![
                case("linear/q8_0/int8/gemv/plain", Outcome::Passed { worst: 0.25 }),
                case("linear/q8_0/int8/gemm/plain", Outcome::Failed { finding }),
                case("linear/q8_0/f32/repeats", Outcome::Failed { finding: moved }),
                case(
                    "linear/q4_k/int8/gemv/plain",
                    Outcome::NotSupported { reason: "Q4_K weights have no kernel".into() },
                ),
                case(
                    "device/-/double-free",
                    Outcome::Failed { finding: Finding::new("crash", "the process was ended by signal 11") },
                ),
            ],
        }
    }

    #[test]
    fn pages() {
        insta::assert_snapshot!("report", sample().to_text());
        insta::assert_snapshot!("report_junit", sample().to_junit());
        insta::assert_snapshot!("limits", limits_page());
        assert_eq!(sample().exit_code(), 1);
        let back: Report = serde_json::from_str(&sample().to_json()).unwrap();
        assert_eq!(back, sample());
        let planted = Report {
            mutant: Some("scale-off".into()),
            subject: SubjectInfo { own_class: Some("f64".into()), ..sample().subject },
            ..sample()
        };
        let head: Vec<String> = planted.to_text().lines().take(6).map(str::to_owned).collect();
        insta::assert_snapshot!("head_with_fault", head.join("\n"));
    }
}
