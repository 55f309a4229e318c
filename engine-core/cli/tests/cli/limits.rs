//! Memory limits, contexts that are too long, runs beside one another, and output that ends with an error.

use crate::Test;
use crate::program::{changed_model, command, model, run};
use formats::gguf::Value;
use std::process::Stdio;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("a_limit_below_the_weights_is_enough_where_they_are_mapped", mapped_weights),
        ("a_context_that_is_too_long_says_what_to_do", long_context),
        ("trap_20_four_at_once", four_at_once),
        ("score_ends_its_object_where_it_fails", score_fails),
    ]
}

/// The model's weights take 9 MiB; a session with a short context takes far less than the limit here.
fn mapped_weights() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("c.toml");
    let with = |limit: u64, context: &str| {
        std::fs::write(&config, format!("[compute.options.cpu]\nmemory_limit = {limit}\nthreads = 2\n"))
            .unwrap();
        let (model, config) = (model(), config.to_str().unwrap().to_owned());
        let base =
            ["run", "-m", &model, "-p", "Once", "-n", "4", "--temp", "0", "-c", context, "-b", "8", "--json"];
        run(&[&base[..], &["--config", &config]].concat())
    };
    let value = with(4_000_000, "32").json();
    let counters = value["statistics"]["devices"][0]["counters"].as_array().unwrap();
    let peak = counters.iter().find(|counter| counter[0] == "bytes_allocated_peak").unwrap();
    assert!((1..=4_000_000).contains(&peak[1].as_u64().unwrap()), "{value}");
    with(100_000, "32").fails_with(&["does not fit", "may use", "--context"]);
    with(4_000_000, "8192").fails_with(&["does not fit", "8192 positions", "--context"]);
}

/// The context that a file names is the default, whatever it is.
fn long_context() {
    let folder = tempfile::tempdir().unwrap();
    let path = changed_model(folder.path(), |writer| {
        writer.set("llama.context_length", Value::U32(u32::MAX));
    });
    let base = ["run", "-m", &path, "-p", "Once", "-n", "1"];
    let outcome = run(&base);
    outcome.fails_with(&["context", "--context"]);
    assert!(!outcome.stderr.contains("store it in another type"), "{}", outcome.stderr);
    assert_eq!(run(&[&base[..], &["-c", "64"]].concat()).code, 0);
}

/// facts/traps.md, row 20: the same ids when four run at the same time as when one does.
fn four_at_once() {
    let model = model();
    let arguments = ["run", "-m", &model, "-p", "Once upon a time", "-n", "24", "--temp", "0", "--json"];
    let alone = run(&arguments).json()["ids"].clone();
    let children: Vec<_> = (0..4)
        .map(|_| command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(value["ids"], alone);
    }
}

/// Token 7 has NaN for an embedding, and the head does not see it.
fn score_fails() {
    let folder = tempfile::tempdir().unwrap();
    let file = formats::GgufFile::open(model()).unwrap();
    let table = file.tensor("token_embd.weight").unwrap();
    let good = file.tensor_bytes(table).to_vec();
    let row = good.len() / table.rows() as usize;
    let mut bad = good.clone();
    bad[7 * row..7 * row + 2].copy_from_slice(&[0x01, 0x7e]);
    let path = changed_model(folder.path(), |writer| {
        writer.remove_tensor("token_embd.weight");
        writer.tensor("token_embd.weight", table.dtype, &table.dims, bad).unwrap();
        writer.tensor("output.weight", table.dtype, &table.dims, good).unwrap();
    });
    let outcome = run(&["score", "-m", &path, "--ids", "1,2,7,3"]);
    assert_eq!(outcome.code, 1, "{}", outcome.stderr);
    let value: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(value["positions"].as_array().unwrap().len(), 2, "{value}");
    assert!(value["error"].as_str().unwrap().contains("non-finite logits"), "{value}");
    assert!(outcome.stderr.contains("error: non-finite logits"), "{}", outcome.stderr);
}
