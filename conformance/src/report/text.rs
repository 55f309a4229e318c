//! The page for people: one line per operation and type, then every failure with what is needed to act on it.

use super::{CaseReport, Report, Status};
use crate::finding::Outcome;
use crate::limits;
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
    worst: f64,
    reason: Option<String>,
}

impl Report {
    /// As a page of text.
    pub fn to_text(&self) -> String {
        let mut page = String::new();
        let class = if self.subject.class.is_empty() {
            String::new()
        } else {
            format!(", class {}", self.subject.class)
        };
        let lane = if self.full { "all cases" } else { "sampled cases" };
        let _ = writeln!(page, "{} plug-in `{}` {}{class}", self.kind, self.plugin, self.version);
        if !self.subject.description.is_empty() {
            let _ = writeln!(page, "{}: {}", self.subject.name, self.subject.description);
        }
        for note in &self.subject.notes {
            let _ = writeln!(page, "  {note}");
        }
        if let Some(mutant) = &self.mutant {
            let _ = writeln!(page, "with the planted fault `{mutant}`");
        }
        let _ = writeln!(page, "{lane}, seed {}\n", self.seed);
        self.table(&mut page);
        self.failures(&mut page);
        let _ = writeln!(
            page,
            "\n{} cases: {} passed, {} failed, {} known failures, {} not supported",
            self.cases.len(),
            self.count(Status::Passed),
            self.count(Status::Failed),
            self.count(Status::KnownFailure),
            self.count(Status::NotSupported)
        );
        page
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
            match &case.outcome {
                Outcome::Passed { worst } => line.worst = line.worst.max(*worst),
                Outcome::NotSupported { reason } => {
                    line.reason.get_or_insert_with(|| reason.clone());
                }
                Outcome::Failed { .. } => {}
            }
        }
        let _ = writeln!(
            page,
            "{:<10} {:<8} {:>6} {:>7} {:>7} {:>7}  {:<12}",
            "operation", "type", "cases", "passed", "failed", "not s.", "worst/limit"
        );
        for ((operation, dtype), line) in lines {
            let worst = if line.worst > 0.0 { format!("{:.3}", line.worst) } else { "-".into() };
            let _ = write!(
                page,
                "{operation:<10} {dtype:<8} {:>6} {:>7} {:>7} {:>7}  {worst}",
                line.cases, line.passed, line.failed, line.refused
            );
            if line.known > 0 {
                let _ = write!(page, "  ({} known failures)", line.known);
            }
            if let Some(reason) = line.reason {
                let _ = write!(page, "  no: {reason}");
            }
            let _ = writeln!(page);
        }
    }

    fn failures(&self, page: &mut String) {
        let failed: Vec<&CaseReport> = self.cases.iter().filter(|c| c.status == Status::Failed).collect();
        for case in failed.iter().take(SHOWN) {
            let Outcome::Failed { finding } = &case.outcome else { continue };
            let _ = writeln!(page, "\nFAILED {}", case.name);
            let _ = writeln!(page, "  {}: {}", finding.check, finding.message);
            if let Some(e) = &finding.element {
                let _ = writeln!(page, "  element  {}[{}][{}] ({} wrong)", e.slot, e.row, e.column, e.wrong);
                let _ = writeln!(page, "  device   {}", e.got);
                let _ = writeln!(page, "  oracle   {}", e.want);
                let _ = writeln!(page, "  allowed  {} = {}", e.allowed, e.limit);
                let _ = writeln!(page, "  because  {}", e.reason);
            }
            if !case.shape.is_empty() {
                let _ = writeln!(page, "  shape    {}", case.shape);
            }
            let _ = writeln!(page, "  again    {}", self.reproduce.replace("{case}", &case.name));
        }
        if failed.len() > SHOWN {
            let _ = writeln!(page, "\nand {} more failures, all in the JSON report", failed.len() - SHOWN);
        }
        for case in self.cases.iter().filter(|c| c.status == Status::KnownFailure) {
            let _ =
                writeln!(page, "\nknown failure {}: {}", case.name, case.expected.as_deref().unwrap_or(""));
        }
    }
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
                shape: "input F32 [4 x 64], weight Q8_0 [5 x 64]; 3 tokens".into(),
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
                notes: vec!["8 lanes, because the processor has AVX2".into()],
            },
            seed: 7,
            full: false,
            mutant: None,
            reproduce: "thermocline plugins conformance shaky.so --filter '={case}' --seed 7".into(),
            cases: vec![
                case("linear/q8_0/int8/gemv/plain", Outcome::Passed { worst: 0.25 }),
                case("linear/q8_0/int8/gemm/plain", Outcome::Failed { finding }),
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
    }
}
