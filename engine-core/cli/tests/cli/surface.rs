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
        ("inspect_says_how_types_run", inspect_says_how_types_run),
        ("the_two_limits_are_told_apart", the_two_limits_are_told_apart),
        ("inputs_without_end_are_refused", inputs_without_end_are_refused),
        ("threads_beyond_the_machine_are_warned_of", threads_beyond_the_machine_are_warned_of),
        ("no_plugin_at_all_gets_a_hint", no_plugin_at_all_gets_a_hint),
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
        (
            &["run", "-m", "x", "-p", "a", "--batch", "0"],
            "--batch (or THERMOCLINE_BATCH) is 0, wanted a whole number from 1",
        ),
        (&["run", "-m", "x", "-p", "a", "-n", "-1"], "invalid value '-1' for '--max-tokens <N>'"),
        (&["score", "-m", "x", "--ids", "1,-2"], "invalid value '-2' for '--ids <ID>'"),
        (&["bench", "-m", "x", "--pp", "0", "--tg", "0"], "nothing to measure: --pp and --tg are both 0"),
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
    // Every fault is told, tables of plug-ins included, each key's own nearest word with it.
    let several =
        check("[runtime]\nbatchs = 3\n[sampling]\ntemp = 1\ntop_k = -1\n[compute.options.cpu]\nthread = 1\n");
    several.fails_with(&[
        "4 faults",
        "unknown key `batchs`; did you mean `batch`?",
        "unknown key `temp`; did you mean `temperature`?",
        "`top_k` is -1",
        "unknown key `thread`; did you mean `threads`?",
    ]);
    run(&["config", "check", "/dev/zero"]).fails_with(&["/dev/zero", "more than 1 MiB"]);
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
    for arguments in [
        &["config", "schema"][..],
        &["--help"],
        &["run", "--help"],
        &["--version"],
        &["run", "-m", &model, "-p", "Once", "-n", "20", "--temp", "0"],
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let outcome = Outcome::of(command(arguments).stdout(full).stderr(Stdio::piped()));
        outcome.fails_with(&["cannot write to standard output", "No space left"]);
    }
    // Messages that nobody can be given are no reason to stop.
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let arguments = ["run", "-m", &model, "-p", "Once", "-n", "5", "--temp", "0"];
    let outcome = Outcome::of(command(&arguments).stdout(Stdio::piped()).stderr(full));
    assert_eq!((outcome.code, outcome.stdout), (0, run(&arguments).stdout));
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

/// Types with kernels, types that are converted, and models that cannot be run.
fn inspect_says_how_types_run() {
    use formats::quantise::{dequantise, quantise};
    let folder = tempfile::tempdir().unwrap();
    let source = formats::GgufFile::open(model()).unwrap();
    let tensor = source.tensor("blk.2.attn_q.weight").unwrap();
    let mut values = vec![0.0; tensor.elements() as usize];
    dequantise(tensor.dtype, source.tensor_bytes(tensor), &mut values).unwrap();
    // Q5_0 of Q4_0's codes: a fifth bit that is 0 for each, with codes moved to its middle.
    let four = quantise(engine_core::DType::Q4_0, &values).unwrap();
    let five: Vec<u8> = four
        .chunks_exact(18)
        .flat_map(|block| {
            let code = |at: usize| (block[2 + at % 16] >> (at / 16 * 4) & 15) + 8;
            let mut bits = [0_u8; 4];
            (0..32).for_each(|at| bits[at / 8] |= (code(at) >> 4) << (at % 8));
            let nibbles = (0..16).map(|at| code(at) & 15 | (code(at + 16) & 15) << 4);
            [block[..2].to_vec(), bits.to_vec(), nibbles.collect()].concat()
        })
        .collect();
    let path = crate::program::changed_model(folder.path(), |writer| {
        writer.tensor(&tensor.name, engine_core::DType::Q5_0, &tensor.dims, five).unwrap();
    });
    let text = run(&["inspect", &path]);
    assert_eq!(text.code, 0, "{}", text.stderr);
    for wanted in ["Q8_0      56", "native", "Q5_0      1", "converted at load to F16, 128.0 KiB"] {
        assert!(text.stdout.contains(wanted), "{wanted}: {}", text.stdout);
    }
    let value = run(&["inspect", &path, "--json"]).json();
    let types = value["placement"]["weight_types"].as_array().unwrap();
    let of = types.iter().find(|of| of["stored"] == "Q5_0").unwrap();
    assert_eq!((&of["held"], &of["held_bytes"]), (&serde_json::json!("F16"), &serde_json::json!(131_072)));
    // It runs, and says what it costs; under strict it does not.
    let outcome = run(&["run", "-m", &path, "-p", "Once", "-n", "2", "--temp", "0"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("Q5_0") && outcome.stderr.contains("131072 bytes"), "{}", outcome.stderr);
    run(&["run", "-m", &path, "-p", "Once", "--strict"]).fails_with(&["strict is on", "Q5_0", "F16"]);
    // What cannot be run ends with 1, but is shown.
    let strict = run(&["inspect", &path, "--strict"]);
    assert_eq!(strict.code, 1);
    assert!(strict.stdout.contains("cannot run here: strict is on"), "{}", strict.stdout);
    let unknown = crate::program::changed_model(folder.path(), |writer| {
        writer.set("general.architecture", "invented");
    });
    let outcome = run(&["inspect", &unknown]);
    assert_eq!(outcome.code, 1, "{}", outcome.stdout);
    assert!(
        outcome.stdout.contains("cannot run here") && outcome.stdout.contains("`invented`"),
        "{}",
        outcome.stdout
    );
}

fn the_two_limits_are_told_apart() {
    let model = model();
    let limit = run(&["run", "-m", &model, "-p", "Once", "-n", "3", "--ignore-eos"]);
    assert!(
        limit.stderr.contains("limit of 3 tokens") && !limit.stderr.contains("context of"),
        "{}",
        limit.stderr
    );
    let full = run(&["run", "-m", &model, "-p", "Once", "--context", "6", "--ignore-eos"]);
    assert!(full.stderr.contains("context of 6 positions is full"), "{}", full.stderr);
}

fn inputs_without_end_are_refused() {
    let model = model();
    run(&["run", "-m", &model, "-f", "/dev/zero"]).fails_with(&["/dev/zero", "more than 256 MiB"]);
    let folder = tempfile::tempdir().unwrap();
    let ids = folder.path().join("ids.json");
    for (text, wanted) in
        [("[1, 2", "EOF"), ("[1, -2]", "-2"), ("1, x", "\"x\" is no token id"), ("[[1]]", "sequence")]
    {
        std::fs::write(&ids, text).unwrap();
        run(&["score", "-m", &model, "--ids-file", ids.to_str().unwrap()]).fails_with(&["ids.json", wanted]);
    }
}

fn threads_beyond_the_machine_are_warned_of() {
    let model = model();
    let many = run(&["run", "-m", &model, "-p", "Once", "-n", "1", "-t", "999", "-q"]);
    assert_eq!(many.code, 0, "{}", many.stderr);
    assert!(many.stderr.contains("--threads 999 is more than the"), "{}", many.stderr);
}

fn no_plugin_at_all_gets_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let alone = crate::program::installed(folder.path(), |_| false);
    let outcome = Outcome::of(crate::program::command_of(&alone).args(["plugins", "list"]));
    assert_eq!(outcome.code, 0);
    for wanted in ["no plug-in was found", "plugins doctor"] {
        assert!(outcome.stderr.contains(wanted), "{wanted}: {}", outcome.stderr);
    }
}
