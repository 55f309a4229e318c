//! The command line itself: help, usage errors, exit codes, config, completions, output that cannot be written.

use crate::Test;
use crate::program::{Outcome, command, model, run};
use std::process::Stdio;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("help_and_version", help_and_version),
        ("usage_errors_exit_2", usage_errors_exit_2),
        ("completions_need_no_model", completions_need_no_model),
        ("config_schema_and_show", config_schema_and_show),
        ("config_check", config_check),
        ("config_precedence", config_precedence),
        ("config_file_is_found_and_named", config_file_is_found_and_named),
        ("closed_output_is_no_error", closed_output_is_no_error),
        ("full_disk_is_reported", full_disk_is_reported),
        ("logs_as_json_lines", logs_as_json_lines),
        ("inspect", inspect),
    ]
}

fn help_and_version() {
    for arguments in [&["--help"][..], &["run", "--help"], &["plugins", "--help"], &["--version"]] {
        let outcome = run(arguments);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (0, ""), "{arguments:?}");
        assert!(outcome.stdout.contains("thermocline"));
    }
}

fn usage_errors_exit_2() {
    for (arguments, wanted) in [
        (&["run", "-m", "x", "--sparsity", "gate"][..], "gate-first"),
        (&["run", "-m", "x"], "no prompt is given"),
        (&["run", "-m", "x", "-p", "a", "-f", "b"], "give one"),
        (&["rum"], "run"),
        (&["run", "-p", "x"], "--model"),
        (&["run", "-m", "x", "-p", "a", "--batch", "0"], "`batch` is 0, wanted a whole number from 1"),
    ] {
        let outcome = run(arguments);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (2, ""), "{arguments:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(wanted), "{arguments:?}: {}", outcome.stderr);
    }
    assert_eq!(run(&[]).code, 2);
}

fn completions_need_no_model() {
    for shell in ["bash", "zsh", "fish"] {
        let outcome = run(&["completions", shell]);
        assert_eq!(outcome.code, 0);
        assert!(outcome.stdout.contains("top-k"));
    }
}

fn config_schema_and_show() {
    let page = run(&["config", "schema"]);
    assert_eq!(page.code, 0);
    insta::assert_snapshot!("config_schema", page.stdout);
    assert_eq!(run(&["config", "schema", "--json"]).json()["version"], 1);
    let shown = run(&["config", "show", "--temp", "0", "--device", "reference", "--strict"]);
    assert_eq!(shown.code, 0);
    assert!(
        shown.stdout.contains("temperature = 0.0") && shown.stdout.contains("strict = true"),
        "{}",
        shown.stdout
    );
    assert!(shown.stdout.contains("devices = [\"reference\"]"), "{}", shown.stdout);
}

fn config_check() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    let check = |text: &str| {
        std::fs::write(&path, text).unwrap();
        run(&["config", "check", path.to_str().unwrap()])
    };
    let fine = check("strict = true\n[compute.options.cpu]\nthreads = 1\n");
    assert_eq!(fine.code, 0, "{}", fine.stderr);
    check("[runtime]\nbatchs = 3\n").fails_with(&["c.toml", "unknown key `batchs`", "did you mean `batch`?"]);
    check("[compute.options.cpu]\nthread = 1\n")
        .fails_with(&["[compute.options.cpu]", "did you mean `threads`?"]);
    check("a = [").fails_with(&["c.toml"]);
    run(&["config", "check", "/nonexistent/c.toml"]).fails_with(&["/nonexistent/c.toml", "No such file"]);
    // What is not there cannot be checked, and that is said.
    let absent = check("[compute.options.gpu9000]\nx = 1\n");
    assert_eq!(absent.code, 0, "{}", absent.stderr);
    assert!(absent.stderr.contains("gpu9000"), "{}", absent.stderr);
}

fn config_precedence() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.toml");
    std::fs::write(&path, "[sampling]\ntop_k = 11\n").unwrap();
    let top_k = |variable: Option<&str>, flag: Option<&str>| {
        let mut arguments = vec!["config", "show", "--config", path.to_str().unwrap()];
        arguments.extend(flag.map(|_| "--top-k"));
        arguments.extend(flag);
        let mut command = command(&arguments);
        variable.map(|value| command.env("THERMOCLINE_TOP_K", value));
        let shown = Outcome::of(&mut command).stdout;
        shown.lines().find(|line| line.starts_with("top_k")).unwrap().to_owned()
    };
    assert_eq!(top_k(None, None), "top_k = 11");
    assert_eq!(top_k(Some("12"), None), "top_k = 12");
    assert_eq!(top_k(Some("12"), Some("13")), "top_k = 13");
}

fn config_file_is_found_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().join("thermocline");
    std::fs::create_dir(&home).unwrap();
    std::fs::write(home.join("config.toml"), "[sampling]\ntop_k = 11\n").unwrap();
    let outcome = Outcome::of(command(&["config", "show"]).env("XDG_CONFIG_HOME", folder.path()));
    assert!(outcome.stdout.contains("top_k = 11"));
    assert!(outcome.stderr.contains(home.join("config.toml").to_str().unwrap()), "{}", outcome.stderr);
}

fn closed_output_is_no_error() {
    let model = model();
    for arguments in [
        &["config", "schema"][..],
        &["run", "-m", &model, "-p", "Once", "-n", "200", "--temp", "0", "--ignore-eos"],
        &["score", "-m", &model, "-p", "Once upon a time there was a cat", "--all-logits"],
    ] {
        let mut child = command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let outcome = Outcome::from(child.wait_with_output().unwrap());
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert!(
            !outcome.stderr.contains("panicked") && !outcome.stderr.contains("error:"),
            "{}",
            outcome.stderr
        );
    }
}

fn full_disk_is_reported() {
    let model = model();
    for arguments in
        [&["config", "schema"][..], &["run", "-m", &model, "-p", "Once", "-n", "20", "--temp", "0"]]
    {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let outcome = Outcome::of(command(arguments).stdout(full).stderr(Stdio::piped()));
        outcome.fails_with(&["cannot write to standard output", "No space left"]);
    }
}

fn logs_as_json_lines() {
    let model = model();
    let outcome = run(&["run", "-m", &model, "-p", "Once", "-n", "2", "--log-format", "json", "-vv"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    for line in outcome.stderr.lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(value["level"].is_string() && value["message"].is_string() && value["time"].is_string());
    }
    let quiet = run(&["run", "-m", &model, "-p", "Once", "-n", "2", "--quiet"]);
    assert_eq!((quiet.code, quiet.stderr.as_str()), (0, ""));
}

fn inspect() {
    let model = model();
    let value = run(&["inspect", &model, "--json", "--tensors", "--check"]).json();
    assert_eq!(value["model"]["layers"], 8);
    assert_eq!(value["model"]["activation"], "relu");
    assert_eq!(value["tokenizer"]["tokens"], 4096);
    assert_eq!(value["check"]["faults"], serde_json::json!([]));
    assert_eq!(value["placement"]["runs"], true, "{}", value["placement"]);
    assert_eq!(value["tensors"].as_array().unwrap().len() as u64, value["tensor_count"].as_u64().unwrap());
    let text = run(&["inspect", &model, "--tensors"]);
    assert_eq!(text.code, 0);
    for wanted in ["blk.0.attn_q.weight", "Q8_0", "general.architecture", "would run:", "1024 neurons"] {
        assert!(text.stdout.contains(wanted), "{wanted}: {}", text.stdout);
    }
}
