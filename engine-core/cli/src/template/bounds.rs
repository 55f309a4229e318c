//! Renders a template within bounds: a template is a stranger's program, and may loop, or join texts without end.
//!
//! Instructions are counted by the engine (fuel), output by the writer. What values take is not counted by anyone: a few
//! dozen times `x ~ x` fill any memory. So rendering has a thread of its own, and who waits for it looks at the memory of
//! the process and at the clock, and gives it up. To say where, the template runs with little fuel first, then with twice
//! as much each time: the line at which the last but one ended is near the trouble.

use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Map;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Instructions that one rendering may take.
const FUEL: u64 = 2_000_000;
/// With which the first attempt runs.
const LITTLE: u64 = 16;
/// Bytes that a template may write: more than any context holds.
const OUTPUT: usize = 16 << 20;
/// Memory that its values may take.
const MEMORY: u64 = 512 << 20;
/// Time that it may take: a thousand times what one of the largest templates takes.
const TIME: Duration = Duration::from_secs(20);
/// How often memory and clock are looked at.
const LOOK: Duration = Duration::from_millis(5);
/// Stack that one rendering may take (it is memory only where it is used): as many lists in lists as the fuel pays for are
/// dropped one in another.
const STACK: usize = 512 << 20;

/// What the template of this name makes of `context`.
///
/// # Errors
/// Its own, and where it leaves its bounds; with a line where that is known.
pub(super) fn render(
    environment: &Environment<'static>,
    name: &'static str,
    context: Map<String, serde_json::Value>,
) -> Result<String, Error> {
    let invalid = |detail: String| Error::new(ErrorKind::InvalidOperation, detail);
    let mut environment = environment.clone();
    let near = Arc::new(AtomicUsize::new(0));
    let (done, ended) = mpsc::channel();
    let reached = Arc::clone(&near);
    let attempt = move || {
        let context = Value::from(Serde(&context));
        let mut fuel = LITTLE;
        let result = loop {
            environment.set_fuel(Some(fuel));
            let mut text = Limited(Vec::new());
            let result = environment
                .get_template(name)
                .and_then(|template| template.render_captured_to(context.clone(), &mut text).map(drop));
            match result {
                Err(error) if error.kind() == ErrorKind::OutOfFuel && fuel < FUEL => {
                    reached.store(error.line().unwrap_or(0), Ordering::Relaxed);
                    fuel = fuel.saturating_mul(2).min(FUEL);
                }
                other => break other.map(|()| text.0),
            }
        };
        let _ = done.send(result); // nobody waits where it was given up
    };
    let before = memory();
    let started = Instant::now();
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(attempt);
    let thread = thread.map_err(|error| invalid(format!("no thread to render in: {error}")))?;
    let given_up = loop {
        match ended.recv_timeout(LOOK) {
            Ok(Err(error)) if error.kind() == ErrorKind::WriteFailure => {
                break format!("it writes more than {} MiB", OUTPUT >> 20);
            }
            Ok(result) => {
                let bytes = result?;
                return String::from_utf8(bytes).map_err(|error| invalid(error.to_string()));
            }
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => return Err(invalid("it ended without a result".into())),
            },
            Err(RecvTimeoutError::Timeout) => {}
        }
        if before.zip(memory()).is_some_and(|(before, now)| now.saturating_sub(before) > MEMORY) {
            break format!("its values take more than {} MiB of memory", MEMORY >> 20);
        }
        if started.elapsed() > TIME {
            break format!("it takes more than {} seconds", TIME.as_secs());
        }
    };
    // The thread may go on until the program, which has nothing to do now, ends.
    let near = match near.load(Ordering::Relaxed) {
        0 => String::new(),
        line => format!(", near line {line}"),
    };
    Err(invalid(format!("{given_up}{near}")))
}

/// Memory of the process that is no file's, in bytes, where the system tells it (proc(5), `RssAnon`).
fn memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// A text that does not grow without end.
struct Limited(Vec<u8>);

impl Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
