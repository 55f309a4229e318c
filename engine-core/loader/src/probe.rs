//! Trying a library in a child process: a crash, an exit or an endless loop in it costs nobody else anything.

use crate::library::{self, Door, Loaded, Table};
use crate::search::{Environment, Listed};
use crate::{adapter, manifest::one_line};
use engine_abi::convert;
use engine_core::backend::DeviceDescription;
use engine_core::config::Config;
use engine_core::module::{PluginInfo, PluginKind};
use engine_core::options::Schema;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The argument that makes a program a probe; the library's path follows, then the milliseconds that it may take, then the
/// plug-ins whose devices are listed, as JSON.
pub const PROBE_ARGUMENT: &str = "--thermocline-probe-plugin";

/// Starts the lines of the report, which a library's own output on stdout may surround.
const MARK: &str = "\u{1}thermocline-probe ";

/// More output of a library than this is dropped.
const MAX_OUTPUT: usize = 1 << 22;

static OWN_PROBE: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_own_probe() -> bool {
    OWN_PROBE.load(Ordering::Relaxed)
}

/// To be called first in `main`: where this process was started to probe a plug-in, does so and ends the process.
/// Otherwise notes that this program can be its own probe, and returns.
pub fn probe_main_if_requested() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().as_deref() != Some(OsStr::new(PROBE_ARGUMENT)) {
        OWN_PROBE.store(true, Ordering::Relaxed);
        return;
    }
    let Some(path) = arguments.next() else { std::process::exit(2) };
    // A crash is expected news here: no core file of it.
    let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a valid resource and a valid struct.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core) };
    // Whoever started the probe ends it in time; this is for when that one is gone itself.
    let limit = arguments.next().and_then(|limit| limit.to_str()?.parse::<u32>().ok()).unwrap_or(60_000);
    // SAFETY: sets a timer whose signal ends this process.
    unsafe { libc::alarm(limit.div_ceil(1000) + 1) };
    let listed = match arguments.next().map(|json| serde_json::from_slice::<Listed>(json.as_encoded_bytes()))
    {
        None => Listed::of(&Environment::default()),
        Some(Ok(listed)) => listed,
        // Never every driver because something cannot be read.
        Some(Err(_)) => std::process::exit(2),
    };
    say(&Line::Stage("while it was loaded".into()));
    let line = match library::open(Path::new(&path)).and_then(|loaded| report(&loaded, &listed)) {
        Ok(report) => Line::Report(Box::new(report)),
        Err(reason) => Line::Refused(reason),
    };
    say(&line);
    say(&Line::Stage("when its process ended".into()));
    // Runs the library's destructors, as the end of the real program will.
    std::process::exit(0);
}

/// One line of a probe's output.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    /// What happens next, for the message should it go wrong.
    Stage(String),
    Report(Box<RawReport>),
    Refused(String),
}

/// What the library said, in its own words: the other process checks them.
#[derive(Debug, Serialize, Deserialize)]
struct RawReport {
    kind: PluginKind,
    door: Door,
    abi: (u32, u32),
    info: String,
    schema: String,
    devices: Option<Result<String, String>>,
    why_none: Option<String>,
}

fn say(line: &Line) {
    let json = serde_json::to_string(line).unwrap_or_default();
    // In one piece, on a line of its own, whatever the library left unfinished.
    let text = format!("\n{MARK}{json}\n");
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

fn report(loaded: &Loaded, listed: &Listed) -> Result<RawReport, String> {
    let words = |what: &str, error: engine_core::Error| format!("fails to state its {what}: {error}");
    say(&Line::Stage("while it stated what it is".into()));
    let info = loaded.info_json().map_err(|error| words("name", error))?;
    let schema = loaded.schema_json().map_err(|error| words("options", error))?;
    let (mut devices, mut why_none) = (None, None);
    if let Table::Compute(table) = &loaded.table
        && let Ok(PluginInfo { name, .. }) = convert::info_from_json(&info)
        && let Some(options) = listed.options_of(&name)
    {
        say(&Line::Stage("while it listed its devices".into()));
        // What the schema refuses never gets to the plug-in, as when a device is opened. A schema that cannot be read is the
        // other process's to refuse.
        let place = Config::options_place(PluginKind::Compute, &name);
        let sound = Schema::from_json(&schema).map_or(Ok(()), |schema| schema.validate(&options, &place));
        let list = sound.and_then(|()| adapter::devices(table, "it", &options));
        if list.as_ref().is_ok_and(Vec::is_empty) {
            why_none = adapter::why_none(table, "it").ok();
        }
        devices = Some(list.map(|list| convert::devices_to_json(&list)).map_err(|error| error.to_string()));
    }
    Ok(RawReport {
        kind: loaded.kind(),
        door: loaded.door,
        abi: (loaded.head.abi_major, loaded.head.abi_minor),
        info,
        schema,
        devices,
        why_none,
    })
}

/// What is known of a library that passed its probe.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) kind: PluginKind,
    pub(crate) door: Door,
    pub(crate) abi: (u32, u32),
    pub(crate) info: PluginInfo,
    pub(crate) schema: Schema,
    pub(crate) devices: Vec<DeviceDescription>,
    pub(crate) no_devices: Option<String>,
}

impl Report {
    fn check(raw: RawReport) -> Result<Report, String> {
        let wrong = |error: engine_core::Error| format!("breaks the contract: {}", error.detail());
        let (devices, no_devices) = match raw.devices {
            None => (Vec::new(), None),
            Some(Err(error)) => (Vec::new(), Some(error)),
            Some(Ok(json)) => (convert::devices_from_json(&json).map_err(wrong)?, raw.why_none),
        };
        Ok(Report {
            kind: raw.kind,
            door: raw.door,
            abi: raw.abi,
            info: convert::info_from_json(&raw.info).map_err(wrong)?,
            schema: Schema::from_json(&raw.schema).map_err(wrong)?,
            devices,
            no_devices,
        })
    }
}

/// Probes a library; the error is a sentence that begins with a verb.
pub(crate) fn probe(
    program: &Path,
    library: &Path,
    listed: &Listed,
    timeout: Duration,
) -> Result<Report, String> {
    let listed = serde_json::to_string(listed)
        .map_err(|error| format!("cannot be probed: its options are no JSON: {error}"))?;
    let deadline = Instant::now() + timeout;
    let mut child = Command::new(program)
        .arg(PROBE_ARGUMENT)
        .arg(library)
        .arg(timeout.as_millis().to_string())
        .arg(listed)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| format!("cannot be probed: {} does not start: {error}", program.display()))?;
    let (stdout, stdout_end) = drain(child.stdout.take());
    let (stderr, stderr_end) = drain(child.stderr.take());
    // The end of stdout is the end of the process, unless the library closed it or gave it to a child of its own.
    let _ = stdout_end.recv_timeout(timeout);
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_micros(200)),
            _ => break None,
        }
    };
    if status.is_none() {
        kill_group(child.id());
        let _ = child.wait();
    }
    let _ = stderr_end.recv_timeout(Duration::from_millis(20));
    let output = stdout.lock().map(|bytes| bytes.clone()).unwrap_or_default();
    let errors = stderr.lock().map(|bytes| bytes.clone()).unwrap_or_default();
    conclude(&String::from_utf8_lossy(&output), &String::from_utf8_lossy(&errors), status, timeout)
}

fn kill_group(id: u32) {
    if let Ok(id) = libc::pid_t::try_from(id) {
        // SAFETY: the child leads its own process group, and has not been waited for, so the number is still its own.
        unsafe { libc::kill(-id, libc::SIGKILL) };
    }
}

/// Reads a pipe on a thread of its own; the receiver hears when it ended.
fn drain(pipe: Option<impl Read + Send + 'static>) -> (Arc<Mutex<Vec<u8>>>, Receiver<()>) {
    let (bytes, (sender, receiver)) = (Arc::new(Mutex::new(Vec::new())), channel());
    let kept = Arc::clone(&bytes);
    std::thread::spawn(move || {
        let Some(mut pipe) = pipe else { return };
        let mut piece = vec![0; 1 << 14];
        while let Ok(n) = pipe.read(&mut piece) {
            if n == 0 {
                break;
            }
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() < MAX_OUTPUT {
                kept.extend_from_slice(&piece[..n]);
            }
        }
        let _ = sender.send(());
    });
    (bytes, receiver)
}

fn conclude(
    output: &str,
    errors: &str,
    status: Option<ExitStatus>,
    timeout: Duration,
) -> Result<Report, String> {
    let mut stage = "before it was loaded".to_owned();
    let mut answer = None;
    for line in output.lines().filter_map(|line| line.strip_prefix(MARK)) {
        match serde_json::from_str(line) {
            Ok(Line::Stage(next)) => stage = next,
            Ok(other) => answer = Some(other),
            Err(error) => return Err(format!("wrote over the probe's report: {error}")),
        }
    }
    let said = last_line(errors).map_or_else(String::new, |line| format!("; it said: {line}"));
    let Some(status) = status else {
        return Err(format!("did not answer within {} ms, {stage}{said}", timeout.as_millis()));
    };
    if let Some(signal) = status.signal() {
        return Err(format!("crashed {stage}: signal {signal}{}{said}", signal_name(signal)));
    }
    match answer {
        Some(Line::Report(raw)) if status.success() => Report::check(*raw),
        Some(Line::Refused(reason)) => Err(reason),
        _ => Err(format!("ended the process {stage}, with exit code {}{said}", status.code().unwrap_or(-1))),
    }
}

fn last_line(text: &str) -> Option<String> {
    let line = one_line(text.lines().map(str::trim).rfind(|line| !line.is_empty())?);
    Some(match line.char_indices().nth(200) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    })
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGFPE => " (SIGFPE)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGKILL => " (SIGKILL)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGTRAP => " (SIGTRAP)",
        libc::SIGTERM => " (SIGTERM)",
        _ => "",
    }
}
