//! How the tests start the program and look at what it did.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program as built.
pub(crate) fn executable() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_thermocline"))
}

/// The folder of the program, where its plug-ins lie.
pub(crate) fn folder() -> &'static Path {
    executable().parent().unwrap()
}

/// The library of a plug-in that was built with the program.
pub(crate) fn plugin(kind_and_name: &str) -> PathBuf {
    let path = folder().join(format!("libthermocline_{kind_and_name}.so"));
    assert!(path.exists(), "{} is missing: run `cargo build --release` first", path.display());
    path
}

/// The model that is committed with the sources.
pub(crate) fn model() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-story-9m-q8_0.gguf");
    path.canonicalize().unwrap().to_str().unwrap().to_owned()
}

/// A model beside the sources, where it is there.
pub(crate) fn shared_model(file: &str) -> Option<String> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named = std::env::var_os("THERMOCLINE_MODELS").map(std::path::PathBuf::from);
    let folders = [Some(workspace.join("../shared/models")), Some(workspace.join("target/models")), named];
    let mut paths = folders.into_iter().flatten().filter_map(|folder| folder.join(file).canonicalize().ok());
    paths.next()?.to_str().map(str::to_owned)
}

/// `program`, with an environment that says nothing to it.
pub(crate) fn command_of(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("THERMOCLINE") || text.starts_with("XDG_") {
            command.env_remove(&name);
        }
    }
    // Devices keep compiled shaders in a cache, which is not the user's here.
    let cache = std::env::temp_dir().join("thermocline-tests");
    command
        .env("HOME", "/no/such/home")
        .env("XDG_CACHE_HOME", cache)
        .env("NO_COLOR", "1")
        .stdin(Stdio::null());
    command
}

/// The program with these arguments.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = command_of(executable());
    command.args(arguments);
    command
}

/// What a run left.
pub(crate) struct Outcome {
    /// Exit code; the test fails where a signal ended it.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    pub(crate) fn of(command: &mut Command) -> Outcome {
        loop {
            match command.output() {
                // A copy of the program that another thread's new process, not yet itself, still holds open for writing.
                Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                    std::thread::yield_now()
                }
                other => return Outcome::from(other.unwrap()),
            }
        }
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        assert_eq!(self.code, 0, "{}", self.stderr);
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }

    /// Exit code 1, nothing on standard output, exactly one error, which says all of these things.
    pub(crate) fn fails_with(&self, wanted: &[&str]) -> &Outcome {
        self.ends_with(1, wanted)
    }

    /// Exit code 2 and an explanation of the command line's own that says all of these things.
    pub(crate) fn ends_with_usage(&self, wanted: &[&str]) -> &Outcome {
        self.ends_with(2, wanted)
    }

    pub(crate) fn ends_with(&self, code: i32, wanted: &[&str]) -> &Outcome {
        assert_eq!(self.code, code, "{}", self.stderr);
        assert_eq!(self.stdout, "", "nothing is printed besides the error");
        let errors = self.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(errors, 1, "one error: {}", self.stderr);
        assert!(!self.stderr.contains("panicked at"), "{}", self.stderr);
        for text in wanted {
            assert!(self.stderr.contains(text), "{text:?} is not in: {}", self.stderr);
        }
        self
    }
}

impl From<std::process::Output> for Outcome {
    fn from(output: std::process::Output) -> Outcome {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let code =
            output.status.code().unwrap_or_else(|| panic!("ended by a signal: {} {stderr}", output.status));
        Outcome { code, stdout: String::from_utf8(output.stdout).unwrap(), stderr }
    }
}

/// Runs the program with these arguments.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    Outcome::of(&mut command(arguments))
}

/// Runs the program with this on its standard input.
pub(crate) fn run_with_input(arguments: &[&str], input: &str) -> Outcome {
    let mut child = command(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that ends early does not read it all; that is for the test to judge.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap().into()
}

/// The story model, changed and written to `folder`.
pub(crate) fn changed_model(
    folder: &Path,
    change: impl FnOnce(&mut formats::gguf::GgufWriter<'_>),
) -> String {
    let file = formats::GgufFile::open(model()).unwrap();
    let mut writer = formats::gguf::GgufWriter::copy_of(&file);
    change(&mut writer);
    let path = folder.join("changed.gguf");
    std::fs::write(&path, writer.to_bytes()).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A copy of the program in a folder of its own, with the plug-ins that `wanted` picks.
pub(crate) fn installed(folder: &Path, wanted: impl Fn(&str) -> bool) -> PathBuf {
    let copy = folder.join("thermocline");
    std::fs::copy(executable(), &copy).unwrap();
    plugin("compute_cpu");
    for entry in std::fs::read_dir(self::folder()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("libthermocline_") && name.ends_with(".so") && wanted(&name) {
            std::fs::copy(&path, folder.join(name)).unwrap();
        }
    }
    copy
}

/// A config file for two devices, each with a part of every layer.
pub(crate) fn hybrid(folder: &std::path::Path) -> String {
    let path = folder.join("hybrid.toml");
    std::fs::write(&path, "[compute]\ndevices = ['reference', 'cpu']\n[planner]\nhot = 0.3\n").unwrap();
    path.to_str().unwrap().to_owned()
}
