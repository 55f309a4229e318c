//! The lines between the runner and its child process, and the child's half of the talk.

use crate::bench::{Bench, LIMIT_BYTES};
use crate::case::Case;
use crate::describe::Description;
use crate::finding::{Fallible, Finding, Outcome};
use crate::matrix;
use crate::open::{Register, Setup, Subject, find, open, open_oracle};
use crate::{kinds, mutants};
use engine_core::ComputeBackend;
use engine_core::module::PluginKind;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::sync::Arc;

/// The argument that makes a program a child of the suite.
pub const CHILD_ARGUMENT: &str = "--thermocline-conformance-child";

/// Starts the lines of the talk, which a plug-in's own output may surround.
pub const MARK: &str = "\u{1}thermocline-conformance ";

/// A line from the child.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// It has opened everything.
    Ready {
        /// What the plug-in says of itself.
        subject: SubjectInfo,
    },
    /// It could not.
    Failed {
        /// Why.
        finding: Finding,
    },
    /// A case is over.
    Done {
        /// Its name.
        name: String,
        /// What became of it.
        outcome: Outcome,
        /// What it computes, for failures.
        described: Description,
    },
    /// What a case computes, for one that took its process along.
    Described {
        /// Shape and parameters.
        described: Description,
    },
}

/// Starts a line that asks for a case's description instead of its run.
pub const DESCRIBE: char = '?';

/// What the opened plug-in says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubjectInfo {
    /// Name of the device or the tier.
    pub name: String,
    /// Description.
    pub description: String,
    /// Tolerance class whose limits a device is held to, or nothing.
    pub class: String,
    /// The device's own class, where a planted fault puts it into another.
    pub own_class: Option<String>,
    /// Notes.
    pub notes: Vec<String>,
}

/// To be called first in `main`: where this process was started by the suite, runs cases and ends the process.
/// `register` adds plug-ins that are linked into the program.
pub fn main_if_child(register: Register) {
    engine_loader::probe_main_if_requested();
    if std::env::args().nth(1).as_deref() != Some(CHILD_ARGUMENT) {
        return;
    }
    let code = match child(register) {
        Ok(()) => 0,
        Err(finding) => {
            say(&Reply::Failed { finding });
            1
        }
    };
    std::process::exit(code);
}

#[expect(clippy::print_stdout, reason = "stdout is the line to the parent process")]
fn say(reply: &Reply) {
    if let Ok(json) = serde_json::to_string(reply) {
        println!("\n{MARK}{json}");
        let _ = std::io::stdout().flush();
    }
}

/// An opened subject with its oracles.
pub struct Session {
    subject: Subject,
    limited: Option<Arc<dyn ComputeBackend>>,
    oracles: Option<(Arc<dyn ComputeBackend>, Arc<dyn ComputeBackend>)>,
    own_class: Option<String>,
    seed: u64,
    random: u32,
}

impl Session {
    /// Opens everything that a setup names.
    ///
    /// # Errors
    /// Where something does not open.
    pub fn open(setup: &Setup, register: Register) -> Fallible<Session> {
        let found = find(&setup.target, register)?;
        let limits_memory = found
            .catalogue
            .find(found.plugin.kind, &found.plugin.name)
            .and_then(|e| e.schema.as_ref())
            .is_some_and(|s| s.fields.iter().any(|f| f.name == "memory_limit"));
        let mut limited = None;
        if limits_memory && found.plugin.kind == PluginKind::Compute {
            let mut options = setup.options.clone();
            options.insert("memory_limit".into(), toml::Value::Integer(LIMIT_BYTES as i64));
            if let Subject::Compute(backend) = open(&found, setup.device, &options)? {
                limited = Some(backend);
            }
        }
        let mut subject = open(&found, setup.device, &setup.options)?;
        let (mut oracles, mut own_class) = (None, None);
        if let Subject::Compute(backend) = subject {
            let oracle = |arithmetic| open_oracle(setup.oracle.as_deref(), arithmetic);
            oracles = Some((oracle("stated")?, oracle("true")?));
            subject = Subject::Compute(match &setup.mutant {
                None => backend,
                Some(name) => {
                    own_class = Some(backend.describe().tolerance.name().to_owned());
                    mutants::wrap(name, backend).ok_or_else(|| mutants::unknown(name))?
                }
            });
        }
        Ok(Session { subject, limited, oracles, own_class, seed: setup.seed, random: setup.random })
    }

    /// What the plug-in says of itself.
    pub fn info(&self) -> SubjectInfo {
        match &self.subject {
            Subject::Compute(b) => {
                let d = b.describe();
                SubjectInfo {
                    name: d.name.clone(),
                    description: d.description.clone(),
                    class: d.tolerance.name().into(),
                    own_class: self.own_class.clone().filter(|own| own != d.tolerance.name()),
                    notes: d.notes.clone(),
                }
            }
            Subject::Storage(t) => {
                let d = t.describe();
                SubjectInfo {
                    name: d.name.clone(),
                    description: d.description.clone(),
                    class: String::new(),
                    own_class: None,
                    notes: d.notes.clone(),
                }
            }
            Subject::Cache(_) | Subject::Planner(_) => SubjectInfo::default(),
        }
    }

    /// The device with its oracles; none for other kinds of plug-in.
    fn bench(&self) -> Option<Bench<'_>> {
        let (Subject::Compute(dut), Some((stated, exact))) = (&self.subject, &self.oracles) else {
            return None;
        };
        Some(Bench {
            dut: dut.as_ref(),
            stated: stated.as_ref(),
            exact: exact.as_ref(),
            limited: self.limited.as_deref(),
            seed: self.seed,
            random: self.random,
        })
    }

    /// Runs a case by name.
    pub fn run(&self, cases: &[Case], name: &str) -> (Outcome, Description) {
        let unknown =
            || Outcome::Failed { finding: Finding::new("suite", format!("there is no case `{name}`")) };
        let Some(bench) = self.bench() else {
            let outcome = kinds::run(&self.subject, name, self.seed);
            return (outcome.unwrap_or_else(unknown), Description::default());
        };
        let Some(case) = cases.iter().find(|c| c.name == name) else {
            return (unknown(), Description::default());
        };
        let outcome = case.run(&bench);
        let failed = matches!(outcome, Outcome::Failed { .. });
        (outcome, if failed { case.describe(&bench) } else { Description::default() })
    }

    /// What a case computes, without computing it on the device.
    pub fn describe(&self, cases: &[Case], name: &str) -> Description {
        let case = cases.iter().find(|c| c.name == name);
        case.zip(self.bench()).map(|(case, bench)| case.describe(&bench)).unwrap_or_default()
    }
}

fn child(register: Register) -> Fallible<()> {
    let broken = |what: String| Finding::new("suite", what);
    let mut lines = std::io::stdin().lock().lines();
    let first = lines.next().and_then(Result::ok).unwrap_or_default();
    let setup: Setup =
        serde_json::from_str(&first).map_err(|e| broken(format!("the child got no setup: {e}")))?;
    let session = Session::open(&setup, register)?;
    let cases = matrix::all();
    say(&Reply::Ready { subject: session.info() });
    for name in lines.map_while(Result::ok) {
        if let Some(name) = name.strip_prefix(DESCRIBE) {
            say(&Reply::Described { described: session.describe(&cases, name) });
            continue;
        }
        let (outcome, described) = session.run(&cases, &name);
        say(&Reply::Done { name, outcome, described });
    }
    Ok(())
}
