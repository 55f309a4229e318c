//! `--override`, and what `strict` makes of a key that is missing.

use crate::Test;
use crate::program::{changed_model, command, model, run};
use serde_json::Value;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("trap_10_an_override_wins_and_is_logged", an_override_wins),
        ("trap_3_strict_assumes_nothing", strict_assumes_nothing),
    ]
}

fn logits(path: &str, more: &[&str]) -> (Value, String) {
    let ids = "0,731,894,259,586,12,478,287,259,342";
    let outcome = run(&[&["score", "-m", path, "--ids", ids, "--all-logits"][..], more].concat());
    (outcome.json()["positions"].clone(), outcome.stderr)
}

/// facts/traps.md, row 10: bit for bit what a file with these keys gives.
fn an_override_wins() {
    let folder = tempfile::tempdir().unwrap();
    let path = changed_model(folder.path(), |writer| {
        writer.set("llama.rope.freq_base", 500.0_f32);
        writer.set("llama.rope.scaling.type", "linear").set("llama.rope.scaling.factor", 4.0_f32);
    });
    let flags = [
        "--override",
        "llama.rope.freq_base=500",
        "--override",
        "llama.rope.scaling.type=linear",
        "--override",
        "llama.rope.scaling.factor=4",
    ];
    let (changed, _) = logits(&path, &[]);
    let (overridden, log) = logits(&model(), &flags);
    assert!(changed == overridden, "the override and the file differ");
    assert!(logits(&model(), &[]).0 != changed, "the keys do nothing");
    for line in [
        "override: llama.rope.freq_base is f32 500, not the file's f32 10000",
        "override: llama.rope.scaling.factor is u64 4; the file has no such key",
    ] {
        assert!(log.contains(line), "{line}: {log}");
    }
    let base = ["run", "-m", &model(), "-p", "Once", "-n", "1"].map(str::to_owned);
    let with = |text: &str| {
        let arguments: Vec<&str> = base.iter().map(String::as_str).chain(["--override", text]).collect();
        run(&arguments)
    };
    with("llama.rope.freq_base=fast").fails_with(&["llama.rope.freq_base", "\"fast\"", "type f32 is wanted"]);
    with("llama.rope.scaling.type=invented").fails_with(&["llama.rope.scaling.type", "invented"]);
    with("general.alignment=64").fails_with(&["general.alignment"]);
    with("llama.rope.freq_base").ends_with(2, &["KEY=VALUE"]);
    // The variable of the same name.
    let mut by_variable = command(&base.iter().map(String::as_str).collect::<Vec<_>>());
    let outcome = by_variable.env("THERMOCLINE_OVERRIDE", "tokenizer.ggml.pre=invented").output().unwrap();
    assert_eq!(outcome.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&outcome.stderr).contains("invented"));
}

fn strict_assumes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for key in ["tokenizer.ggml.pre", "tokenizer.ggml.token_type"] {
        let path = changed_model(folder.path(), |writer| {
            writer.remove(key);
        });
        let base = ["run", "-m", &path, "-p", "Once", "-n", "1"];
        let outcome = run(&base);
        assert_eq!(outcome.code, 0, "{}", outcome.stderr);
        assert!(outcome.stderr.contains(&format!("`{key}` is missing")), "{}", outcome.stderr);
        run(&[&base[..], &["--strict"]].concat()).fails_with(&["strict", key, "is missing", "--override"]);
    }
    let path = changed_model(folder.path(), |writer| {
        writer.remove("tokenizer.ggml.pre");
    });
    let base = ["run", "-m", &path, "-p", "Once", "-n", "1", "--strict", "--json"];
    let named = run(&[&base[..], &["--pre-tokenizer", "smollm"]].concat());
    assert_eq!(named.json()["prompt_ids"], serde_json::json!([0, 731]));
    let overridden = run(&[&base[..], &["--override", "tokenizer.ggml.pre=smollm"]].concat());
    assert_eq!(overridden.json()["prompt_ids"], serde_json::json!([0, 731]));
    // Ids need no tokenizer.
    assert_eq!(run(&["score", "-m", &path, "--ids", "0,731", "--strict"]).code, 0);
}
