//! Generating and scoring with the story model, on loaded plug-ins.

use crate::Test;
use crate::program::{Outcome, changed_model, command, model, run, run_with_input};
use serde_json::{Value, json};
use std::io::Read;
use std::process::{Command, Stdio};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("run_prints_only_the_text", run_prints_only_the_text),
        ("run_json_equals_the_reference", run_json_equals_the_reference),
        ("must_show_3_same_ids_everywhere", must_show_3_same_ids_everywhere),
        ("active_neurons_are_counted", active_neurons_are_counted),
        ("must_show_3_the_library_is_mapped", must_show_3_the_library_is_mapped),
        ("prompt_from_file_and_standard_input", prompt_from_file_and_standard_input),
        ("trap_15_text_round_trips", trap_15_text_round_trips),
        ("trap_17_one_bos", trap_17_one_bos),
        ("trap_20_temperature_and_seed", trap_20_temperature_and_seed),
        ("trap_21_edge_values", trap_21_edge_values),
        ("trap_22_damaged_weights", trap_22_damaged_weights),
        ("stop_texts_are_not_printed", stop_texts_are_not_printed),
        ("score_agrees_with_generation", score_agrees_with_generation),
        ("score_reports_wrong_ids", score_reports_wrong_ids),
        ("context_full", context_full),
        ("ctrl_c_stops_and_reports", ctrl_c_stops_and_reports),
        ("bench_reports_every_run", bench_reports_every_run),
        ("bench_bounds_by_bytes", bench_bounds_by_bytes),
    ]
}

/// First prompt of the reference, which was made in float32 on the dequantised weights (see the model card).
const PROMPT: &str = "Once upon a time, there was a little";
const PROMPT_IDS: [u32; 10] = [0, 731, 894, 259, 586, 12, 478, 287, 259, 342];
/// What the reference generates greedily after it.
const GREEDY: [u32; 32] = [
    601, 461, 886, 428, 626, 346, 259, 349, 736, 14, 362, 313, 259, 349, 736, 334, 1018, 293, 2297, 12, 271,
    328, 376, 266, 519, 334, 345, 506, 14, 879, 367, 12,
];

/// A run with `--json` and these flags more.
fn generate(more: &[&str]) -> Value {
    let model = model();
    let mut arguments = vec!["run", "-m", &model, "--json"];
    arguments.extend(more);
    run(&arguments).json()
}

fn run_prints_only_the_text() {
    let model = model();
    let outcome =
        run(&["run", "-m", &model, "-p", PROMPT, "-n", "32", "--temp", "0", "--activations", "f32"]);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(
        outcome.stdout,
        generate(&["-p", PROMPT, "-n", "32", "--temp", "0", "--activations", "f32"])["text"]
            .as_str()
            .unwrap()
            .to_owned()
            + "\n"
    );
    assert!(outcome.stdout.starts_with(" girl named Lily who lived in a big house."));
    for wanted in ["blk.0-7 attention", "cpu", "tokens/s", "seed"] {
        assert!(outcome.stderr.contains(wanted), "{wanted}: {}", outcome.stderr);
    }
}

fn run_json_equals_the_reference() {
    let value = generate(&["-p", PROMPT, "-n", "32", "--temp", "0", "--activations", "f32"]);
    assert_eq!(value["prompt_ids"], json!(PROMPT_IDS));
    assert_eq!(value["ids"], json!(GREEDY));
    assert_eq!(value["finish_reason"], "length");
    assert_eq!(value["plan"]["fallbacks"], json!([]));
    assert!(value["timings"]["decode_tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(value["seed"].is_u64() && value["statistics"]["weight_bytes"].as_u64().unwrap() > 1_000_000);
}

fn must_show_3_same_ids_everywhere() {
    let base = ["-p", PROMPT, "-n", "60", "--temp", "0"];
    let with = |more: &[&str]| generate(&[&base[..], more].concat())["ids"].clone();
    let wanted = with(&["--threads", "1", "--storage", "mmap"]);
    assert_eq!(wanted, with(&["--threads", "2", "--storage", "mmap"]));
    assert_eq!(wanted, with(&["--threads", "1", "--storage", "ram"]));
    assert_eq!(wanted, with(&["--batch", "3"]));
    assert_eq!(wanted, with(&["--sparsity", "dense"]));
}

fn active_neurons_are_counted() {
    let base = ["-p", PROMPT, "-n", "16", "--temp", "0", "--sparsity", "gate-first"];
    let value = generate(&[&base[..], &["--count-active"]].concat());
    let shares = value["statistics"]["active_neurons"].as_array().unwrap();
    assert_eq!(shares.len(), 8);
    assert!(shares.iter().all(|share| (0.001..0.5).contains(&share.as_f64().unwrap())), "{shares:?}");
    assert_eq!(value["ids"], generate(&base)["ids"]);
}

fn must_show_3_the_library_is_mapped() {
    let value = generate(&["-p", PROMPT, "-n", "1"]);
    let plugins = value["plugins"].as_array().unwrap();
    for (kind, name) in [("compute", "cpu"), ("storage", "mmap"), ("cache", "lru"), ("planner", "greedy")] {
        let found = plugins.iter().find(|plugin| plugin["kind"] == kind).unwrap();
        assert_eq!((&found["name"], &found["mapped"]), (&json!(name), &json!(true)), "{found}");
        assert!(found["path"].as_str().unwrap().ends_with(&format!("_{name}.so")), "{found}");
    }
}

fn prompt_from_file_and_standard_input() {
    let model = model();
    let outcome = run_with_input(&["run", "-m", &model, "-f", "-", "--json", "-n", "1"], PROMPT);
    assert_eq!(outcome.json()["prompt_ids"], json!(PROMPT_IDS));
    run(&["run", "-m", &model, "-f", "/no/such/file"]).fails_with(&["/no/such/file", "No such file"]);
    let outcome =
        Outcome::of(command(&["run", "-m", &model, "-f", "x", "-p", PROMPT]).env("THERMOCLINE_FILE", "y"));
    assert_eq!(outcome.code, 2, "two flags: {}", outcome.stderr);
    let mut flag_wins = command(&["run", "-m", &model, "-p", PROMPT, "--json", "-n", "1"]);
    assert_eq!(
        Outcome::of(flag_wins.env("THERMOCLINE_FILE", "/nonexistent")).json()["prompt_ids"],
        json!(PROMPT_IDS)
    );
}

fn trap_15_text_round_trips() {
    let model = model();
    // The ids of a text, as `score` makes them: read back they are the text, a token at a time.
    let file = formats::GgufFile::open(&model).unwrap();
    let tokenizer =
        formats::Tokenizer::from_gguf(&file, &formats::tokenizer::TokenizerOptions::default()).unwrap();
    for text in [" a", "a ", "\n\n", "x<|endoftext|>x", "Zoë 漢字 \u{1f600}"] {
        let scored = run(&["score", "-m", &model, "-p", text, "--no-bos"]).json()["ids"].clone();
        let ids: Vec<u32> = serde_json::from_value(scored.clone()).unwrap();
        assert_eq!(String::from_utf8(tokenizer.decode(&ids)).unwrap(), text);
        assert_eq!(generate(&["-p", text, "-n", "1", "--no-bos"])["prompt_ids"], scored, "{text:?}");
    }
    // An empty text is BOS alone.
    assert_eq!(generate(&["-p", "", "-n", "1"])["prompt_ids"], json!([0]));
    run(&["run", "-m", &model, "-p", "", "--no-bos"]).fails_with(&["no token ids were given"]);
}

/// BOS is put in front once; a prompt that begins with it gets no second one, and a warning.
fn trap_17_one_bos() {
    let model = model();
    let ids = |arguments: &[&str]| {
        let outcome = run(&[&["run", "-m", &model, "--json", "-n", "1"][..], arguments].concat());
        (
            outcome.json()["prompt_ids"].clone(),
            outcome.stderr.contains("begins with the beginning-of-text token"),
        )
    };
    assert_eq!(ids(&["-p", "Once"]), (json!([0, 731]), false));
    assert_eq!(ids(&["-p", "<|endoftext|>Once"]), (json!([0, 731]), true));
    assert_eq!(ids(&["-p", "Once", "--no-bos"]), (json!([731]), false));
    assert_eq!(ids(&["-p", "<|endoftext|>Once", "--no-bos"]), (json!([0, 731]), false));
}

fn trap_20_temperature_and_seed() {
    let ids = |temperature: &str, seed: &str| {
        generate(&["-p", PROMPT, "-n", "16", "--temp", temperature, "--seed", seed])["ids"].clone()
    };
    let greedy = ids("0", "0");
    for seed in 1..10 {
        assert_eq!(ids("0", &seed.to_string()), greedy);
    }
    assert_eq!(ids("1", "7"), ids("1", "7"));
    assert_ne!(ids("1", "7"), ids("1", "8"));
    let drawn = generate(&["-p", PROMPT, "-n", "16", "--temp", "1"]);
    assert_eq!(drawn["ids"], ids("1", &drawn["seed"].to_string()), "the reported seed repeats the run");
}

fn trap_21_edge_values() {
    let model = model();
    for flags in [
        &["--top-k", "0"][..],
        &["--top-k", "1"],
        &["--top-k", "4000000000"],
        &["--top-p", "0"],
        &["--top-p", "1"],
        &["--min-p", "1"],
        &["--temp", "1e-9"],
        &["--temp", "1e9"],
        &["--repeat-penalty", "100", "--repeat-last", "4000000000"],
    ] {
        assert_eq!(
            generate(&[&["-p", PROMPT, "-n", "4"][..], flags].concat())["ids"].as_array().unwrap().len(),
            4
        );
    }
    for flags in
        [["--top-k", "-1"], ["--temp", "-1"], ["--top-p", "1.01"], ["--temp", "nan"], ["--min-p", "inf"]]
    {
        let outcome = run(&[&["run", "-m", &model, "-p", PROMPT][..], &flags].concat());
        outcome.ends_with(2, &["wanted a"]);
    }
}

fn trap_22_damaged_weights() {
    let folder = tempfile::tempdir().unwrap();
    let source = formats::GgufFile::open(model()).unwrap();
    let tensor = source.tensor("blk.0.ffn_down.weight").unwrap();
    let mut bytes = source.tensor_bytes(tensor).to_vec();
    // Scale of block 5: NaN as f16.
    bytes[5 * 34..5 * 34 + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let path = changed_model(folder.path(), |writer| {
        writer.tensor("blk.0.ffn_down.weight", tensor.dtype, &tensor.dims, bytes).unwrap();
    });
    let outcome = run(&["run", "-m", &path, "-p", PROMPT, "--sparsity", "dense", "--json"]);
    outcome.fails_with(&["non-finite logits", "--check"]);
    let checked = run(&["inspect", &path, "--check"]);
    assert_eq!(checked.code, 1);
    assert!(
        checked.stdout.contains("blk.0.ffn_down.weight") && checked.stdout.contains("block 5"),
        "{}",
        checked.stdout
    );
}

fn stop_texts_are_not_printed() {
    let value =
        generate(&["-p", PROMPT, "-n", "32", "--temp", "0", "--activations", "f32", "--stop", "lived in"]);
    assert_eq!(value["text"], " girl named Lily who ");
    assert_eq!(value["finish_reason"], "stop");
}

/// Feeding the greedy ids back: at every step the generated id has the largest logit.
fn score_agrees_with_generation() {
    let model = model();
    let ids: Vec<String> = PROMPT_IDS.iter().chain(&GREEDY).map(u32::to_string).collect();
    let ids = ids.join(",");
    let value = run(&["score", "-m", &model, "--ids", &ids, "--activations", "f32", "--top", "3"]).json();
    let positions = value["positions"].as_array().unwrap();
    assert_eq!(positions.len(), PROMPT_IDS.len() + GREEDY.len());
    for position in &positions[PROMPT_IDS.len() - 1..positions.len() - 1] {
        assert_eq!(position["top"][0][0], position["next_id"], "{position}");
        assert_eq!(position["max_logit"], position["next_logit"]);
        assert!(position["next_log_probability"].as_f64().unwrap() < 0.0);
    }
    assert!(positions.last().unwrap()["next_id"].is_null());
    assert!(value["perplexity"].as_f64().unwrap() > 1.0);
    let all = run(&["score", "-m", &model, "--ids", "0,731", "--all-logits"]).json();
    assert_eq!(all["positions"][1]["logits"].as_array().unwrap().len(), 4096);
    let text = run(&["score", "-m", &model, "-p", PROMPT]).json();
    assert_eq!(text["ids"], json!(PROMPT_IDS));
}

fn score_reports_wrong_ids() {
    let model = model();
    run(&["score", "-m", &model, "--ids", "0,4096"]).fails_with(&["4096", "vocabulary of 4096"]);
    assert_eq!(run(&["score", "-m", &model, "--ids", "x"]).code, 2);
    assert_eq!(run(&["score", "-m", &model]).code, 2);
}

fn context_full() {
    let value = generate(&["-p", PROMPT, "--temp", "0", "--context", "16", "--ignore-eos"]);
    assert_eq!(value["finish_reason"], "length");
    let model = model();
    run(&["run", "-m", &model, "-p", PROMPT, "--context", "4"]).fails_with(&["do not fit the context of 4"]);
}

fn ctrl_c_stops_and_reports() {
    let model = model();
    let arguments = [
        "run",
        "-m",
        &model,
        "-p",
        PROMPT,
        "--temp",
        "0",
        "--ignore-eos",
        "--context",
        "60000",
        "-n",
        "50000",
    ];
    let mut child = command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 8];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    let killed = Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().unwrap();
    assert!(killed.success());
    let outcome = Outcome::from(child.wait_with_output().unwrap());
    assert_eq!(outcome.code, 130, "{}", outcome.stderr);
    assert!(
        outcome.stderr.contains("stopped by Ctrl-C") && outcome.stderr.contains("tokens/s"),
        "{}",
        outcome.stderr
    );
}

fn bench_reports_every_run() {
    let model = model();
    let arguments = ["bench", "-m", &model, "--pp", "32", "--tg", "8", "--repeat", "2", "--threads", "1,2"];
    let value = run(&[&arguments[..], &["--json"]].concat()).json();
    let results = value["results"].as_array().unwrap();
    let tests: Vec<_> =
        results.iter().map(|r| (r["test"].as_str().unwrap(), r["threads"].as_u64().unwrap())).collect();
    assert_eq!(tests, [("pp32", 1), ("tg8", 1), ("pp32", 2), ("tg8", 2)]);
    for result in results {
        assert_eq!(result["runs"].as_array().unwrap().len(), 2);
        assert!(result["tokens_per_second"].as_f64().unwrap() > 0.0);
    }
    assert!(results[1]["weight_gigabytes_per_second"].is_number());
    let text = run(&arguments);
    assert!(text.stdout.starts_with("test  threads  policy  tokens/s"), "{}", text.stdout);
}

/// Bytes are the device's own count: a dense token reads every matrix once, and exact skipping fewer.
fn bench_bounds_by_bytes() {
    let model = model();
    let folder = tempfile::tempdir().unwrap();
    let story = folder.path().join("story.txt");
    std::fs::write(&story, "Once upon a time, there was a little girl named Lily who lived in a big house.")
        .unwrap();
    let arguments = ["bench", "-m", &model, "--pp", "0", "--tg", "16", "--repeat", "2", "--threads", "1"];
    let story = story.to_str().unwrap();
    let more = ["--sparsity", "gate-first", "--against", "dense", "--text", story];
    let value = run(&[&arguments[..], &more, &["--json"]].concat()).json();
    let results = value["results"].as_array().unwrap();
    let policies: Vec<_> = results.iter().map(|r| r["policy"].as_str().unwrap()).collect();
    assert_eq!(policies, ["gate-first", "dense"]);
    let number = |at: usize, key: &str| results[at][key].as_f64().unwrap();
    let read = |at: usize, part: &str| results[at]["read"][part].as_f64().unwrap();
    // Three matrices of 1024 x 256 in each of 8 layers, Q8_0: 34 bytes for 32 weights.
    assert_eq!(read(1, "ffn"), f64::from(8 * 3 * 1024 * 256) / 32.0 * 34.0);
    assert!(read(0, "ffn") < 0.9 * read(1, "ffn"), "{results:#?}");
    assert_eq!((read(0, "attention"), read(0, "head")), (read(1, "attention"), read(1, "head")));
    // 16 tokens see 8.5 positions on average, of 4 heads of 32 keys and values in f16.
    assert_eq!(read(1, "kv"), 8.0 * 8.5 * f64::from(4 * 64 * 2));
    let bound = |key: &str| results[0]["bound"][key].as_f64().unwrap();
    let allowed = number(1, "tokens_per_second") * bound("against_bytes") / bound("bytes");
    assert!((bound("tokens_per_second") / allowed - 1.0).abs() < 1e-9, "{results:#?}");
    assert!((bound("reached") * allowed / number(0, "tokens_per_second") - 1.0).abs() < 1e-9);
    assert!(results[1]["bound"].is_null());
    let text = run(&[&arguments[..], &more].concat()).stdout;
    assert!(
        text.contains("tg16 gate-first: MB per token: ffn") && text.contains("of its bytes allow"),
        "{text}"
    );
    run(&[&arguments[..], &["--text", story, "--tg", "300"]].concat())
        .fails_with(&["text", "a run takes 300"]);
}
