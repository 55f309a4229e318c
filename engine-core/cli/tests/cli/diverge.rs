//! The divergence finder on the story model: silent where nothing is wrong, and right about each planted fault.

use crate::Test;
use crate::program::{Outcome, model, run};
use serde_json::Value;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("diverge_cpu_agrees_with_the_reference", agrees),
        ("diverge_points_at_each_planted_fault", points_at_faults),
        ("diverge_reports_wrong_use", wrong_use),
    ]
}

fn diverge(more: &[&str]) -> Outcome {
    let model = model();
    run(&[&["plugins", "diverge", "-m", &model, "--device", "cpu"][..], more].concat())
}

fn agrees() {
    for more in
        [&[][..], &["--activations", "f32"], &["--sparsity", "predictor"], &["--batch", "3", "--shares", "3"]]
    {
        let value = diverge(&[more, &["--json"]].concat()).json();
        assert_eq!(value["first"], Value::Null, "{value}");
        assert_eq!(value["not_supported"].as_array().unwrap().len(), 0, "{value}");
        // 8 tokens prefilled, their logits, 2 decoded: 90 + 3 + 2 x 93 operations at the least.
        assert!(value["compared"].as_u64().unwrap() >= 279, "{value}");
    }
    let text = diverge(&[]);
    assert_eq!(text.code, 0);
    assert!(text.stdout.contains("no operation departs beyond its limit"), "{}", text.stdout);
}

/// A fault, flags that bring the operation it touches, and the first operation that shows it: label, kind, layer,
/// submission.
type Planted = (&'static str, &'static [&'static str], &'static str, &'static str, u64, u64);

const PLANTED: [Planted; 7] = [
    ("scale-off", &[], "blk.0.attn_q", "linear", 0, 0),
    ("last-row", &[], "blk.0.attn_q", "linear", 0, 0),
    ("rope-order", &[], "blk.0.rope_q", "rope", 0, 0),
    ("mask-off-by-one", &[], "blk.0.attention", "attention", 0, 0),
    ("stale-cache", &[], "blk.0.kv_append", "kv-append", 0, 2),
    ("peeking-predictor", &["--sparsity", "predictor"], "blk.0.ffn", "ffn", 0, 0),
    ("past-cluster", &["--shares", "2"], "blk.0.ffn", "ffn", 0, 0),
];

fn points_at_faults() {
    for (fault, flags, label, kind, layer, submission) in PLANTED {
        let outcome = diverge(&[flags, &["--planted-fault", fault, "--json"]].concat());
        assert_eq!(outcome.code, 1, "{fault}: {}{}", outcome.stdout, outcome.stderr);
        let value: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let first = &value["first"];
        assert_eq!(
            (&first["label"], &first["kind"], &first["layer"], &first["submission"]),
            (&label.into(), &kind.into(), &layer.into(), &submission.into()),
            "{fault}: {first}"
        );
        let element = &first["finding"]["element"];
        for part in ["slot", "got", "want", "allowed", "limit", "reason"] {
            assert!(element[part].as_str().is_some_and(|text| !text.is_empty()), "{fault}: {part}: {first}");
        }
        assert_ne!(element["got"], element["want"], "{fault}");
        assert!(first["shape"].as_str().unwrap().contains('['), "{fault}: {first}");
    }
    let text = diverge(&["--planted-fault", "rope-order"]);
    for wanted in
        ["first departure: blk.0.rope_q (rope), layer 0, operation", "prefill of 8 tokens", "wanted"]
    {
        assert!(text.stdout.contains(wanted), "{wanted}: {}", text.stdout);
    }
}

fn wrong_use() {
    diverge(&["--planted-fault", "gremlin"]).ends_with(2, &["gremlin", "scale-off"]);
    diverge(&["--oracle", "oracel"]).fails_with(&["oracel", "reference"]);
    let model = model();
    run(&["plugins", "diverge", "-m", &model, "--device", "cqu"]).fails_with(&["cqu"]);
    run(&["plugins", "diverge", "-m", "/nonexistent.gguf", "--device", "cpu"])
        .fails_with(&["/nonexistent.gguf"]);
}
