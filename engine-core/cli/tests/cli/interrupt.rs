//! Ctrl-C while something takes long, once and twice, and what a person sees of a long prompt.

use crate::program::{Outcome, command, executable, model};
use crate::{SystemTest, Test};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("a_second_ctrl_c_ends_convert_at_once", convert),
        ("a_second_ctrl_c_ends_prepare_at_once", prepare),
        ("ctrl_c_stops_a_long_prompt_between_batches", long_prompt),
    ]
}

/// Tests that need a terminal, which `script` (util-linux) makes.
pub(crate) fn tests_with_terminal() -> Vec<SystemTest> {
    let found = Command::new("script").arg("--version").output();
    let lacking = (!found.is_ok_and(|output| output.status.success())).then(|| "needs `script`".to_owned());
    vec![("a_long_prompt_shows_progress", lacking, progress)]
}

fn start(arguments: &[&str]) -> Child {
    command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn interrupt(child: &Child) {
    let kill = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

fn names(folder: &Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Waits for `ready`; the test fails where it never is.
fn until(mut ready: impl FnMut() -> bool) {
    let started = Instant::now();
    while !ready() {
        assert!(started.elapsed() < Duration::from_secs(60), "it did not come to that");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Interrupted twice: ended by code 130, and nothing is left beside `kept`.
fn interrupted_twice(mut child: Child, folder: &Path, kept: &[&str]) -> Outcome {
    interrupt(&child);
    // Signals of one kind that wait are one signal.
    std::thread::sleep(Duration::from_millis(3));
    if child.try_wait().unwrap().is_none() {
        interrupt(&child);
    }
    let outcome = Outcome::from(child.wait_with_output().unwrap());
    assert_eq!(outcome.code, 130, "{}", outcome.stderr);
    assert_eq!(names(folder), kept);
    outcome
}

fn convert() {
    use formats::gguf::{Container, GgufWriter};
    let folder = tempfile::tempdir().unwrap();
    let mut writer = GgufWriter::new(Container::Gguf);
    writer.set("general.architecture", "unknown");
    let zeros = vec![0_u8; 16 << 20];
    for at in 0..16 {
        writer.tensor(&format!("t.{at}"), engine_core::DType::F32, &[1024, 4096], &zeros[..]).unwrap();
    }
    let input = folder.path().join("large.gguf");
    writer.write(&input).unwrap();
    let (input, output) = (input.to_str().unwrap(), folder.path().join("out.gguf"));
    let arguments = ["quantize", input, output.to_str().unwrap(), "Q4_K", "-t", "1"];
    // The first one lets a portion of some megabytes be done, so that now and then the second comes too late.
    for _ in 0..20 {
        let child = start(&arguments);
        until(|| names(folder.path()).len() > 1);
        let outcome = interrupted_twice(child, folder.path(), &["large.gguf"]);
        if !outcome.stderr.contains("nothing was written") {
            return;
        }
    }
    panic!("no run was ended by the second one");
}

fn prepare() {
    let folder = tempfile::tempdir().unwrap();
    let corpus = folder.path().join("corpus.txt");
    let story = "Once upon a time there was a girl who had a dog, and the dog ran. ";
    std::fs::write(&corpus, story.repeat(4000)).unwrap();
    let (model, output) = (model(), folder.path().join("out.gguf"));
    let (corpus, output) = (corpus.to_str().unwrap(), output.to_str().unwrap());
    let arguments = ["prepare", "-m", &model, "--corpus", corpus, "-o", output, "--tokens", "60000", "-v"];
    let mut child = start(&arguments);
    let seen = read_until(&mut child, "plug-ins: ");
    let outcome = interrupted_twice(child, folder.path(), &["corpus.txt"]);
    assert!(!format!("{seen}{}", outcome.stderr).contains("panicked"), "{}", outcome.stderr);
}

/// What the program writes to standard error, up to a line that holds `text`.
fn read_until(child: &mut Child, text: &str) -> String {
    use std::io::Read;
    let mut seen = Vec::new();
    let errors = child.stderr.as_mut().unwrap();
    while !String::from_utf8_lossy(&seen).contains(text) {
        let mut byte = [0];
        assert_eq!(errors.read(&mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    String::from_utf8(seen).unwrap()
}

/// A prompt that takes long, as arguments and with its file.
fn long(folder: &Path) -> String {
    let path = folder.join("long.txt");
    std::fs::write(&path, "Once upon a time there was a girl who had a dog. ".repeat(4000)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn long_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let (model, text) = (model(), long(folder.path()));
    let mut child =
        start(&["run", "-m", &model, "-f", &text, "-n", "1", "--context", "60000", "--batch", "64"]);
    read_until(&mut child, "plug-ins: ");
    std::thread::sleep(Duration::from_millis(300));
    interrupt(&child);
    let outcome = Outcome::from(child.wait_with_output().unwrap());
    assert_eq!((outcome.code, outcome.stdout.trim()), (130, ""), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("stopped by Ctrl-C"), "{}", outcome.stderr);
    // Whole batches were read, and not all of the prompt.
    let read = outcome.stderr.split_once("prompt: ").and_then(|(_, rest)| rest.split(' ').next());
    let read: u32 = read.unwrap().parse().unwrap();
    assert!(read.is_multiple_of(64) && read < 40_000, "{}", outcome.stderr);
}

fn progress() {
    let folder = tempfile::tempdir().unwrap();
    let (model, text) = (model(), long(folder.path()));
    let program = executable().to_str().unwrap();
    // What `script` started may outlive it.
    let line = format!("timeout -s KILL 60 {program} run -m {model} -f {text} -n 1 --context 60000");
    let mut terminal = crate::program::command_of(Path::new("script"));
    let mut child = terminal.args(["-qec", &line, "/dev/null"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut seen = Vec::new();
    let shown = |seen: &[u8]| {
        let text = String::from_utf8_lossy(seen).into_owned();
        text.contains("reading ") && text.contains(" tokens of the prompt ... ")
    };
    let output = child.stdout.as_mut().unwrap();
    while !shown(&seen) {
        let mut byte = [0];
        assert_eq!(std::io::Read::read(output, &mut byte).unwrap(), 1, "{}", String::from_utf8_lossy(&seen));
        seen.push(byte[0]);
    }
    child.kill().unwrap();
    child.wait().unwrap();
}
