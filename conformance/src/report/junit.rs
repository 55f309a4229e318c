//! JUnit XML, for CI systems: a suite per operation, no times.

use super::{Report, Status};
use crate::finding::Outcome;
use std::fmt::Write as _;

/// Text as XML allows it: the five special characters escaped, control characters replaced.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&apos;"),
            '\n' => out.push_str("&#10;"),
            '\t' => out.push_str("&#9;"),
            c if c.is_control() || matches!(c, '\u{FFFE}' | '\u{FFFF}') => out.push('\u{FFFD}'),
            c => out.push(c),
        }
    }
    out
}

impl Report {
    /// As JUnit XML.
    pub fn to_junit(&self) -> String {
        let mut xml = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        let (failures, skipped) =
            (self.count(Status::Failed), self.count(Status::NotSupported) + self.count(Status::KnownFailure));
        let _ = writeln!(
            xml,
            "<testsuites name=\"conformance {}\" tests=\"{}\" failures=\"{failures}\" skipped=\"{skipped}\">",
            escape(&self.plugin),
            self.cases.len()
        );
        let mut operations: Vec<&str> = Vec::new();
        for case in &self.cases {
            if !operations.contains(&case.operation.as_str()) {
                operations.push(&case.operation);
            }
        }
        for operation in operations {
            let cases: Vec<_> = self.cases.iter().filter(|c| c.operation == operation).collect();
            let count = |wanted: &[Status]| cases.iter().filter(|c| wanted.contains(&c.status)).count();
            let _ = writeln!(
                xml,
                "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" skipped=\"{}\">",
                escape(operation),
                cases.len(),
                count(&[Status::Failed]),
                count(&[Status::NotSupported, Status::KnownFailure])
            );
            self.properties(&mut xml);
            for case in &cases {
                let _ = write!(
                    xml,
                    "    <testcase classname=\"{}.{}\" name=\"{}\"",
                    escape(&self.plugin),
                    escape(operation),
                    escape(&case.name)
                );
                let body = match (&case.outcome, &case.expected) {
                    (Outcome::Failed { .. }, Some(reason)) if case.status == Status::KnownFailure => {
                        format!("<skipped message=\"known failure: {}\"/>", escape(reason))
                    }
                    (Outcome::Failed { finding }, _) => format!(
                        "<failure type=\"{}\" message=\"{}\">{}</failure>",
                        escape(&finding.check),
                        escape(&finding.message),
                        escape(&format!(
                            "{finding}\nshape: {}\nwith: {}\nagain: {}",
                            case.shape,
                            case.parameters,
                            self.again(case)
                        ))
                    ),
                    (Outcome::NotSupported { reason }, _) => {
                        format!("<skipped message=\"not supported: {}\"/>", escape(reason))
                    }
                    (Outcome::Passed { .. }, _) => String::new(),
                };
                let _ =
                    if body.is_empty() { writeln!(xml, "/>") } else { writeln!(xml, ">{body}</testcase>") };
            }
            xml.push_str("  </testsuite>\n");
        }
        xml.push_str("</testsuites>\n");
        xml
    }

    /// What was tested, and how; tools show the properties of a suite beside its cases.
    fn properties(&self, xml: &mut String) {
        let seed = self.seed.to_string();
        let properties = [
            ("version", self.version.as_str()),
            ("device", &self.subject.name),
            ("class of the limits", &self.subject.class),
            ("planted fault", self.mutant.as_deref().unwrap_or_default()),
            ("seed", &seed),
            ("cases", self.lane()),
        ];
        xml.push_str("    <properties>\n");
        for (name, value) in properties.iter().filter(|(_, value)| !value.is_empty()) {
            let _ = writeln!(xml, "      <property name=\"{name}\" value=\"{}\"/>", escape(value));
        }
        xml.push_str("    </properties>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes() {
        assert_eq!(escape("a<b & \"c\"\u{1}'\n"), "a&lt;b &amp; &quot;c&quot;\u{FFFD}&apos;&#10;");
    }
}
