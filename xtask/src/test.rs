//! `cargo xtask test`: every test of the workspace by one command, the skipped ones named, one closing line.

use crate::process;
use anyhow::{Context, Result};
use std::io::{BufRead, BufReader};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long to read on after cargo has ended, for a test's own child that still holds the pipe.
const DRAIN: Duration = Duration::from_secs(3);

/// Builds the workspace, runs its tests and answers whether all passed. `arguments` go to `cargo test`.
pub(crate) fn run(arguments: &[String]) -> Result<bool> {
    // Tests load plug-ins as files, which `cargo test` alone does not build.
    process::build_with_tests()?;
    let tally = run_tests(arguments)?;
    tally.print();
    println!("{}", tally.closing_line());
    Ok(tally.failed == 0)
}

/// Runs the tests of a workspace that is built already, showing their output as it comes.
///
/// # Errors
/// Where cargo cannot be started; failed tests are counted, not errors.
pub(crate) fn run_tests(arguments: &[String]) -> Result<Tally> {
    let mut command = process::cargo(&["test", "--release", "--workspace", "--no-fail-fast"]);
    // One pipe for both streams keeps cargo's "Running" lines in order with the tests' own.
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    command.args(arguments).stdout(writer.try_clone()?).stderr(writer);
    println!("$ cargo test --release --workspace --no-fail-fast {}", arguments.join(" "));
    let mut child = command.spawn().context("cannot start cargo test")?;
    drop(command); // it holds the pipe's other end
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while matches!(reader.read_until(b'\n', &mut line), Ok(n) if n > 0) {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
            line.clear();
        }
    });
    let mut tally = Tally::default();
    let mut ended = None;
    loop {
        match lines.recv_timeout(Duration::from_millis(100)) {
            Ok(line) => {
                print!("{line}");
                tally.line(line.trim_end());
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if ended.is_none() && child.try_wait()?.is_some() {
                    ended = Some(Instant::now());
                }
                if ended.is_some_and(|at| at.elapsed() > DRAIN) {
                    break;
                }
            }
        }
    }
    tally.finish(child.wait()?.success());
    Ok(tally)
}

/// What a run of tests came to, read from its output.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Tally {
    /// Tests that passed.
    pub(crate) passed: u64,
    /// Tests that failed, and binaries that ended without a result.
    pub(crate) failed: u64,
    /// Tests that were not run.
    pub(crate) skipped: u64,
    skips: Vec<String>,
    failures: Vec<String>,
    running: Option<String>,
}

impl Tally {
    /// Takes in one line of output.
    fn line(&mut self, line: &str) {
        let text = line.trim_start();
        if let Some(binary) = text.strip_prefix("Running ").or_else(|| text.strip_prefix("Doc-tests ")) {
            // A test's own output may start with the same word; cargo's line names a file or a crate alone.
            if line.starts_with("     Running ") || line.starts_with("   Doc-tests ") {
                self.close();
                self.running = Some(short_binary(binary));
            }
        } else if let Some(counts) = text.strip_prefix("test result: ") {
            self.passed += count(counts, " passed");
            self.failed += count(counts, " failed");
            self.skipped += count(counts, " ignored");
            self.running = None;
        } else if let Some((name, outcome)) =
            text.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... "))
        {
            let place = self.running.as_deref().unwrap_or("?");
            let name = format!("{place}: {}", name.split_whitespace().collect::<Vec<_>>().join(" "));
            if let Some(reason) = outcome.strip_prefix("ignored") {
                let reason = reason.trim_start_matches(',').trim();
                let reason = reason.strip_prefix('(').and_then(|r| r.strip_suffix(')')).unwrap_or(reason);
                let reason = if reason.is_empty() { "no reason given" } else { reason };
                self.skips.push(format!("{name}: {reason}"));
            } else if outcome.starts_with("FAILED") {
                self.failures.push(name);
            }
        }
    }

    /// A binary that printed no result has crashed.
    fn close(&mut self) {
        if let Some(binary) = self.running.take() {
            self.failed += 1;
            self.failures.push(format!("{binary}: ended without a result"));
        }
    }

    fn finish(&mut self, success: bool) {
        self.close();
        if !success && self.failed == 0 {
            self.failed = 1;
            self.failures.push("cargo test failed before or beside the tests; see its output".to_owned());
        }
    }

    /// Adds what another run came to.
    pub(crate) fn add(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.skips.extend(other.skips);
        self.failures.extend(other.failures);
    }

    /// Counts a check that is no test.
    pub(crate) fn pass(&mut self) {
        self.passed += 1;
    }

    /// Counts a check that is no test and failed.
    pub(crate) fn fail(&mut self, name: &str) {
        self.failed += 1;
        self.failures.push(name.to_owned());
    }

    /// Counts a check that is no test and was not run.
    pub(crate) fn skip(&mut self, name: &str, reason: &str) {
        self.skipped += 1;
        self.skips.push(format!("{name}: {reason}"));
    }

    /// What was skipped, with the reasons.
    pub(crate) fn skips(&self) -> &[String] {
        &self.skips
    }

    /// Prints what failed and what was skipped, a block each.
    pub(crate) fn print(&self) {
        for (title, names) in [("Skipped", &self.skips), ("Failed", &self.failures)] {
            if !names.is_empty() {
                println!("\n{title}:");
                names.iter().for_each(|name| println!("  {name}"));
            }
        }
        let unnamed = self.skipped.saturating_sub(self.skips.len() as u64);
        if unnamed > 0 {
            println!("  and {unnamed} skipped whose lines could not be read");
        }
        println!();
    }

    /// The line that ends a run of tests.
    pub(crate) fn closing_line(&self) -> String {
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

fn count(counts: &str, what: &str) -> u64 {
    counts
        .split(what)
        .next()
        .and_then(|before| before.rsplit([' ', '.']).next())
        .and_then(|n| n.parse().ok())
        .unwrap_or(0)
}

/// `unittests src/lib.rs (target/release/deps/formats-0123)` becomes `formats src/lib.rs`.
fn short_binary(text: &str) -> String {
    let Some((source, path)) = text.split_once(" (") else { return format!("{text} (doc)") };
    let file = path.trim_end_matches(')').rsplit('/').next().unwrap_or(path);
    let name = file.rsplit_once('-').map_or(file, |(name, _)| name);
    format!("{name} {}", source.trim_start_matches("unittests "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "   Compiling x v0.1.0
     Running unittests src/lib.rs (target/release/deps/formats-0123abcd)

running 3 tests
test a::b ... ok
test a::c ... ignored, needs a disk
test a::d ... FAILED

test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/models.rs (target/release/deps/models-0123abcd)

running 2 tests
test [gguf] smol   ... ignored (the model is absent)
test tiny          ... ok

test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s

     Running tests/crash.rs (target/release/deps/crash-0123abcd)

running 1 test
   Doc-tests engine_core

running 1 test
test src/lib.rs - f (line 3) ... ok

test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
";

    #[test]
    fn reads_both_harnesses() {
        let mut tally = Tally::default();
        OUTPUT.lines().for_each(|line| tally.line(line));
        tally.finish(false);
        assert_eq!(tally.closing_line(), "14 passed, 2 failed, 2 skipped");
        assert_eq!(
            tally.skips,
            [
                "formats src/lib.rs: a::c: needs a disk",
                "models tests/models.rs: [gguf] smol: the model is absent"
            ]
        );
        assert_eq!(
            tally.failures,
            ["formats src/lib.rs: a::d", "crash tests/crash.rs: ended without a result"]
        );
    }

    #[test]
    fn a_build_that_fails_is_a_failure() {
        let mut tally = Tally::default();
        tally.line("error: could not compile `x`");
        tally.finish(false);
        assert_eq!(tally.closing_line(), "0 passed, 1 failed, 0 skipped");
    }
}
