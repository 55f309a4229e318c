//! The runner: sends cases to child processes one by one, so that a crash or a hang costs one case and no more.

use crate::case::Yardstick;
use crate::describe::Description;
use crate::expectations::{Expectation, judge};
use crate::finding::{Fallible, Finding, Outcome};
use crate::kinds;
use crate::matrix;
use crate::mutants;
use crate::open::{Register, Setup, Target, find};
use crate::protocol::{CHILD_ARGUMENT, DESCRIBE, MARK, Reply, SubjectInfo};
use crate::report::{CaseReport, Report, Status};
use engine_core::module::PluginKind;
use engine_core::options::OptionTable;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// What is run.
#[derive(Clone, Debug)]
pub struct SuiteOptions {
    /// The plug-in.
    pub target: Target,
    /// Index of the device (compute plug-ins).
    pub device: u32,
    /// The plug-in's options.
    pub options: OptionTable,
    /// The reference plug-in's library; absent lets the loader find `reference`.
    pub oracle: Option<PathBuf>,
    /// Only cases whose name contains this; `=NAME` is one case, sampled or not.
    pub filter: String,
    /// Every case rather than the sampled subset.
    pub full: bool,
    /// Seed of all operands.
    pub seed: u64,
    /// Time that one case may take.
    pub timeout: Duration,
    /// Child processes at a time.
    pub jobs: usize,
    /// Random problems per operation; absent takes 24, or 200 for all cases.
    pub random: Option<u32>,
    /// A planted fault, for proving that the suite bites.
    pub mutant: Option<String>,
    /// Known failures.
    pub expectations: Vec<Expectation>,
    /// The program whose `main` calls [`crate::main_if_child`]; absent takes `THERMOCLINE_PROBE`, then this program.
    pub program: Option<PathBuf>,
    /// Plug-ins linked into the program.
    pub register: Register,
    /// The command line that runs the suite, as reports print it.
    pub command: String,
}

/// Time that one case may take, unless said otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Random problems per operation of the sampled cases, and of all.
const RANDOM: [u32; 2] = [24, 200];

impl SuiteOptions {
    /// The sampled cases for a plug-in, with default options.
    pub fn new(target: Target) -> SuiteOptions {
        SuiteOptions {
            target,
            device: 0,
            options: OptionTable::new(),
            oracle: None,
            filter: String::new(),
            full: false,
            seed: 1,
            timeout: TIMEOUT,
            jobs: std::thread::available_parallelism().map_or(1, usize::from).min(4),
            random: None,
            mutant: None,
            expectations: Vec::new(),
            program: None,
            register: crate::open::none_linked,
            command: "thermocline-conformance".into(),
        }
    }

    fn random(&self) -> u32 {
        self.random.unwrap_or(RANDOM[usize::from(self.full)])
    }

    fn setup(&self) -> Setup {
        Setup {
            target: self.target.clone(),
            device: self.device,
            options: self.options.clone(),
            oracle: self.oracle.clone(),
            seed: self.seed,
            random: self.random(),
            mutant: self.mutant.clone(),
        }
    }

    fn program(&self) -> Fallible<PathBuf> {
        if let Some(program) = &self.program {
            return Ok(program.clone());
        }
        if let Some(program) = std::env::var_os("THERMOCLINE_PROBE") {
            return Ok(program.into());
        }
        std::env::current_exe()
            .map_err(|e| Finding::new("suite", format!("this program's own file cannot be found: {e}")))
    }
}

/// A child process with its lines.
struct Worker {
    child: Child,
    input: ChildStdin,
    replies: Receiver<Reply>,
}

/// How waiting for a child's line can end otherwise.
enum Silence {
    Ended(String),
    Late,
}

impl Worker {
    fn start(options: &SuiteOptions) -> Fallible<(Worker, SubjectInfo)> {
        let program = options.program()?;
        let cannot = |what: String| Finding::new("suite", format!("{}: {what}", program.display()));
        let mut child = Command::new(&program)
            .arg(CHILD_ARGUMENT)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| cannot(format!("could not be started: {e}")))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(cannot("has no pipes".into()));
        };
        let (sender, replies) = channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(output);
            let mut line = Vec::new();
            // A plug-in may print what is no UTF-8.
            while lines.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                let text = String::from_utf8_lossy(&line);
                let reply =
                    text.trim_end().strip_prefix(MARK).and_then(|json| serde_json::from_str(json).ok());
                if reply.is_some_and(|reply: Reply| sender.send(reply).is_err()) {
                    return;
                }
                line.clear();
            }
        });
        let mut worker = Worker { child, input, replies };
        let setup = serde_json::to_string(&options.setup())
            .map_err(|e| cannot(format!("the setup cannot be sent: {e}")))?;
        let sent = writeln!(worker.input, "{setup}");
        match worker.reply(options.timeout) {
            Ok(Reply::Ready { subject }) => Ok((worker, subject)),
            Ok(Reply::Failed { finding }) => Err(finding),
            Ok(Reply::Done { .. } | Reply::Described { .. }) => Err(cannot("answered out of turn".into())),
            Err(Silence::Late) => Err(Finding::new(
                "loading",
                format!("opening the plug-in took more than {} s", options.timeout.as_secs()),
            )),
            Err(Silence::Ended(how)) => {
                let hint =
                    if sent.is_err() { " (does its `main` call conformance::main_if_child?)" } else { "" };
                Err(Finding::new("loading", format!("the process {how} while it opened the plug-in{hint}")))
            }
        }
    }

    fn reply(&mut self, timeout: Duration) -> Result<Reply, Silence> {
        match self.replies.recv_timeout(timeout) {
            Ok(reply) => Ok(reply),
            Err(RecvTimeoutError::Timeout) => Err(Silence::Late),
            Err(RecvTimeoutError::Disconnected) => Err(Silence::Ended(match self.child.wait() {
                Ok(status) => ended(status),
                Err(error) => format!("ended ({error})"),
            })),
        }
    }

    /// What a case computes; empty where the child cannot say.
    fn describe(&mut self, name: &str, timeout: Duration) -> Description {
        let _ = writeln!(self.input, "{DESCRIBE}{name}").and_then(|()| self.input.flush());
        match self.reply(timeout) {
            Ok(Reply::Described { described }) => described,
            _ => Description::default(),
        }
    }

    fn run(&mut self, name: &str, timeout: Duration) -> Result<(Outcome, Description), Finding> {
        let _ = writeln!(self.input, "{name}").and_then(|()| self.input.flush());
        match self.reply(timeout) {
            Ok(Reply::Done { outcome, described, .. }) => Ok((outcome, described)),
            Ok(Reply::Failed { finding }) => Err(finding),
            Ok(Reply::Ready { .. } | Reply::Described { .. }) => {
                Err(Finding::new("suite", "the child answered out of turn"))
            }
            Err(Silence::Late) => Err(Finding::new(
                "hang",
                format!("the case took more than {} s and was ended", timeout.as_secs()),
            )),
            Err(Silence::Ended(how)) => Err(Finding::new("crash", format!("the process {how}"))),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Only this very child, which may hang in a plug-in.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ended(status: std::process::ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => {
            let name = match signal {
                4 => " (SIGILL: an instruction that this processor does not have)",
                6 => " (SIGABRT: it aborted)",
                7 => " (SIGBUS)",
                8 => " (SIGFPE)",
                9 => " (SIGKILL: was it out of memory?)",
                11 => " (SIGSEGV: it touched memory that it does not have)",
                _ => "",
            };
            format!("was ended by signal {signal}{name}")
        }
        (None, code) => format!("exited with code {}", code.unwrap_or(-1)),
    }
}

/// One case before it is run.
struct Queued {
    index: usize,
    name: String,
    operation: String,
    dtype: String,
    yardstick: Yardstick,
}

fn queue(options: &SuiteOptions, kind: PluginKind) -> VecDeque<Queued> {
    let named: Vec<(String, String, String, Yardstick)> = match kind {
        PluginKind::Compute => matrix::select(&options.filter, options.full)
            .into_iter()
            .map(|c| (c.name.clone(), c.operation.clone(), c.dtype.clone(), c.yardstick()))
            .collect(),
        other => kinds::names(other)
            .into_iter()
            .filter(|n| match options.filter.strip_prefix('=') {
                Some(name) => n == name,
                None => n.contains(&options.filter),
            })
            .map(|n| (n, other.name().to_owned(), "-".to_owned(), Yardstick::Contract))
            .collect(),
    };
    named
        .into_iter()
        .enumerate()
        .map(|(index, (name, operation, dtype, yardstick))| Queued {
            index,
            name,
            operation,
            dtype,
            yardstick,
        })
        .collect()
}

/// Runs the suite.
///
/// # Errors
/// Where nothing can be run at all: no such plug-in, no oracle, no cases.
pub fn run(options: &SuiteOptions) -> Fallible<Report> {
    if let Some(name) = options.mutant.as_deref().filter(|name| mutants::find(name).is_none()) {
        return Err(mutants::unknown(name));
    }
    let found = find(&options.target, options.register)?;
    let plugin = found.plugin.clone();
    let entry = found.catalogue.find(plugin.kind, &plugin.name);
    let version = entry.and_then(|e| e.info.as_ref()).map(|i| i.version.clone()).unwrap_or_default();
    let cases = queue(options, plugin.kind);
    if cases.is_empty() {
        return Err(Finding::new("suite", format!("no case's name contains `{}`", options.filter)));
    }
    // The first child also shows that plug-in and oracle open at all.
    let (first, subject) = Worker::start(options)?;
    let idle = Mutex::new(vec![first]);
    let (queue, done) = (Mutex::new(cases), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.max(1) {
            scope.spawn(|| work(options, &queue, &done, lock(&idle).pop()));
        }
    });
    let mut results: Vec<(usize, CaseReport)> = std::mem::take(&mut *lock(&done));
    results.sort_by_key(|(index, _)| *index);
    let cases: Vec<CaseReport> = results
        .into_iter()
        .map(|(_, mut case)| {
            judge(&options.expectations, &plugin.name, &subject.name, &mut case);
            case
        })
        .collect();
    Ok(Report {
        plugin: plugin.name,
        kind: plugin.kind,
        version,
        subject,
        seed: options.seed,
        full: options.full,
        mutant: options.mutant.clone(),
        reproduce: reproduce(options),
        cases,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The command that runs one case again; `{case}` stands for its name.
fn reproduce(options: &SuiteOptions) -> String {
    let target = match &options.target {
        Target::Path(path) => path.display().to_string(),
        Target::Name(plugin) => format!("{}/{}", plugin.kind, plugin.name),
    };
    let mut text =
        format!("{} {} --filter '={{case}}' --seed {}", options.command, quoted(&target), options.seed);
    let mut add = |flag: &str, value: &str| text.push_str(&format!(" {flag} {}", quoted(value)));
    if let Some(oracle) = &options.oracle {
        add("--oracle", &oracle.display().to_string());
    }
    if options.device != 0 {
        add("--device", &options.device.to_string());
    }
    if options.random() != RANDOM[0] {
        add("--random", &options.random().to_string());
    }
    if options.timeout != TIMEOUT {
        add("--timeout", &options.timeout.as_secs().to_string());
    }
    for (key, value) in &options.options {
        add("--set", &format!("{key}={value}"));
    }
    if let Some(mutant) = &options.mutant {
        add("--mutant", mutant);
    }
    text
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:,+@%=".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

fn work(
    options: &SuiteOptions,
    queue: &Mutex<VecDeque<Queued>>,
    done: &Mutex<Vec<(usize, CaseReport)>>,
    mut worker: Option<Worker>,
) {
    loop {
        let Some(case) = lock(queue).pop_front() else { return };
        if worker.is_none() {
            match Worker::start(options) {
                Ok((fresh, _)) => worker = Some(fresh),
                Err(finding) => {
                    push(done, &case, Outcome::Failed { finding }, Description::default());
                    continue;
                }
            }
        }
        let Some(current) = worker.as_mut() else { return };
        match current.run(&case.name, options.timeout) {
            Ok((outcome, described)) => push(done, &case, outcome, described),
            Err(finding) => {
                // The child is gone or stuck; a new one says what the case was, and goes on with the next.
                drop(worker.take());
                worker = Worker::start(options).ok().map(|(fresh, _)| fresh);
                let described = worker.as_mut().map(|w| w.describe(&case.name, options.timeout));
                push(done, &case, Outcome::Failed { finding }, described.unwrap_or_default());
            }
        }
    }
}

fn push(done: &Mutex<Vec<(usize, CaseReport)>>, case: &Queued, outcome: Outcome, described: Description) {
    let report = CaseReport {
        name: case.name.clone(),
        operation: case.operation.clone(),
        dtype: case.dtype.clone(),
        yardstick: case.yardstick,
        shape: described.shape,
        parameters: described.parameters,
        status: Status::of(&outcome),
        outcome,
        expected: None,
    };
    lock(done).push((case.index, report));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_one_that_a_shell_takes() {
        let mut options = SuiteOptions::new(Target::Path("my libs/lib x.so".into()));
        options.oracle = Some("o.so".into());
        options.mutant = Some("scale-off".into());
        options.full = true;
        options.options.insert("mode".into(), "it's".into());
        assert_eq!(
            reproduce(&options),
            "thermocline-conformance 'my libs/lib x.so' --filter '={case}' --seed 1 --oracle o.so --random 200 --set \
             'mode=\"it'\\''s\"' --mutant scale-off"
        );
    }

    #[test]
    fn an_unknown_fault_is_refused_with_those_that_exist() {
        let mut options = SuiteOptions::new(Target::Path("x.so".into()));
        options.mutant = Some("scale".into());
        let error = run(&options).unwrap_err().to_string();
        assert!(error.contains("scale-off") && error.contains("hangs"), "{error}");
    }
}
