//! Plug-ins that are whole libraries and misbehave: built for another interface, crashing, hanging, panicking. The program
//! says what is wrong in one error, ends with exit code 1, and no signal reaches it.

use crate::program::{Outcome, folder, model, run};
use crate::{SystemTest, Test};
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("must_show_5_misbehaving_libraries", misbehaving),
        ("must_show_5_one_that_hangs_stops_no_other", one_that_hangs),
    ]
}

pub(crate) fn tests_with_fixtures() -> Vec<SystemTest> {
    let fixture = panicking();
    let lacking = (!fixture.is_file())
        .then(|| format!("needs {}: cargo test --release -p engine-loader --no-run", fixture.display()));
    vec![("must_show_5_panicking_library", lacking, panics)]
}

/// The loader's fixture that panics where it is told to.
fn panicking() -> PathBuf {
    folder().join("examples/libfixture_compute.so")
}

/// The loader's liar in C, with these definitions.
fn liar(folder: &Path, defines: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let library = folder.join("libthermocline_compute_liar.so");
    let output = Command::new("cc")
        .args(["-std=gnu11", "-shared", "-fPIC", "-I"])
        .arg(root.join("abi/include"))
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg("-o")
        .arg(&library)
        .arg(root.join("loader/tests/loader/c/liar.c"))
        .output()
        .expect("the C compiler `cc` is installed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

fn run_with(library: &Path, more: &[&str]) -> Outcome {
    let (model, library) = (model(), library.to_str().unwrap());
    run(&[&["run", "-m", &model, "-p", "Once", "-n", "1", "--plugin", library][..], more].concat())
}

fn misbehaving() {
    let folder = tempfile::tempdir().unwrap();
    for (define, wanted) in [
        ("MAJOR=2", "is built for interface 2.0, this program has 1.0"),
        ("CONSTRUCTOR=abort()", "crashed while it was loaded: signal 6 (SIGABRT)"),
        ("CONSTRUCTOR=*(volatile int*)0=1", "crashed while it was loaded: signal 11 (SIGSEGV)"),
        ("CONSTRUCTOR=_exit(3)", "ended the process while it was loaded, with exit code 3"),
        // By the time that the program itself allows.
        ("CONSTRUCTOR=for(;;)pause()", "did not answer within 1500 ms, while it was loaded"),
        ("DEVICES=for(;;)pause()", "did not answer within 1500 ms, while it listed its devices"),
    ] {
        let library = liar(folder.path(), &[define]);
        run_with(&library, &["--device", "liar"]).fails_with(&[
            "liar",
            wanted,
            "libthermocline_compute_liar.so",
        ]);
        run(&["plugins", "inspect", library.to_str().unwrap()]).fails_with(&[wanted]);
    }
    // One that loads, and has no device behind its name: it denies every operation.
    let library = liar(folder.path(), &["MINOR=0"]);
    run_with(&library, &["--device", "liar"]).fails_with(&["`liar`", "it lies"]);
}

fn one_that_hangs() {
    let folder = tempfile::tempdir().unwrap();
    let library = liar(folder.path(), &["CONSTRUCTOR=for(;;)pause()"]);
    let outcome = run_with(&library, &["--json"]);
    assert!(outcome.stderr.contains("did not answer within 1500 ms"), "{}", outcome.stderr);
    assert_eq!(outcome.json()["plan"]["devices"], serde_json::json!(["cpu"]));
}

fn panics() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("c.toml");
    for (method, wanted) in [("open", "told to panic in open"), ("allocate", "told to panic in allocate")] {
        let text = format!("[compute.options.fixture]\npanic_in = '{method}'\n");
        std::fs::write(&config, text).unwrap();
        let flags = ["--device", "fixture", "--config", config.to_str().unwrap()];
        let outcome = run_with(&panicking(), &flags);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""), "{}", outcome.stderr);
        let errors: Vec<&str> = outcome.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        let [error] = errors[..] else { panic!("one error: {}", outcome.stderr) };
        // The fixture denies rope, so that no run reaches `allocate`; its `open` panics as it is told.
        if method == "open" {
            assert!(error.contains("fixture") && error.contains(wanted), "{error}");
        }
    }
}
