//! Conversations: template, BOS, ends of generation, reuse of the KV cache.

use crate::program::{changed_model, model, run, run_with_input};
use crate::{ModelTest, Test};
use formats::gguf::Value as Gguf;
use serde_json::{Value, json};
use std::path::Path;

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("chat_needs_a_template", chat_needs_a_template),
        ("chat_one_turn", chat_one_turn),
        ("chat_piped_turns_reuse_the_cache", chat_piped_turns_reuse_the_cache),
        ("chat_messages_from_a_file", chat_messages_from_a_file),
        ("trap_16_every_end_of_generation", trap_16_every_end_of_generation),
        ("trap_17_chat_has_one_bos", trap_17_chat_has_one_bos),
        ("trap_19_template_errors_at_load", trap_19_template_errors_at_load),
    ]
}

pub(crate) fn tests_with_models() -> Vec<ModelTest> {
    vec![("chat_with_the_models_own_template", "smol-drelu-135m-q8_0.gguf", chat_with_its_own_template)]
}

/// Says what is said, and leaves the model to go on.
const PLAIN: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

fn template(folder: &Path, text: &str) -> String {
    let path = folder.join("template.jinja");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn chat_needs_a_template() {
    run(&["chat", "-m", &model(), "-p", "Hello"]).fails_with(&[
        "has no chat template",
        "hint: ",
        "--template",
    ]);
}

fn chat_one_turn() {
    let folder = tempfile::tempdir().unwrap();
    let template = template(folder.path(), PLAIN);
    let model = model();
    let chat =
        ["chat", "-m", &model, "--template", &template, "-n", "8", "--temp", "0", "-p", "Once upon a time"];
    let continued = run(&["run", "-m", &model, "-n", "8", "--temp", "0", "-p", "Once upon a time"]);
    let outcome = run(&chat);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    assert_eq!(outcome.stdout, continued.stdout);
}

fn chat_piped_turns_reuse_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let template =
        template(folder.path(), "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}");
    let model = model();
    let flags =
        ["chat", "-m", &model, "--template", &template, "-n", "5", "--temp", "0", "--json", "--quiet"];
    let input = "Once upon\\\na time\n\n/reset\nOnce upon a time\nOne day\n/exit\nnever said\n";
    let outcome = run_with_input(&flags, input);
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    let turns = lines(&outcome.stdout);
    assert_eq!(turns.len(), 3);
    let computed = |turn: &Value| turn["timings"]["prompt_tokens"].as_u64().unwrap();
    let given = |turn: &Value| turn["prompt_ids"].as_array().unwrap().len() as u64;
    assert!(computed(&turns[2]) < given(&turns[2]), "the first turn is in the cache: {}", turns[2]);
    // With the cache or without it, the answer is the same.
    let fresh = run_with_input(&flags, "Once upon a time\nOne day\n");
    let fresh = lines(&fresh.stdout);
    assert_eq!(fresh[0]["ids"], turns[1]["ids"]);
    assert_eq!(fresh[1]["ids"], turns[2]["ids"]);
}

fn chat_messages_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let template = template(folder.path(), PLAIN);
    let messages = folder.path().join("messages.json");
    let model = model();
    let ids = |value: Value| {
        std::fs::write(&messages, value.to_string()).unwrap();
        let path = messages.to_str().unwrap();
        run(&["chat", "-m", &model, "--template", &template, "-n", "1", "--json", "--messages", path])
    };
    let text = ids(json!([{"role": "user", "content": "Once"}])).json();
    let parts = ids(json!([{"role": "user", "content": [{"type": "text", "text": "Once"}]}])).json();
    assert_eq!(text["prompt_ids"], parts["prompt_ids"]);
    ids(json!([{"role": "user", "content": [{"type": "image_url"}]}])).fails_with(&["`image_url`"]);
    ids(json!({"role": "user"})).fails_with(&["messages.json", "no list"]);
}

/// Several tokens may end a generation; each does, whichever key says so, and none is printed.
fn trap_16_every_end_of_generation() {
    let folder = tempfile::tempdir().unwrap();
    let first = |path: &str| {
        let arguments =
            ["run", "-m", path, "-p", "Once upon a time, there was a little", "-n", "12", "--temp", "0"];
        run(&[&arguments[..], &["--activations", "f32", "--json"]].concat()).json()
    };
    // The reference goes on " girl named Lily who lived in": ids 601, 461, 886, ...
    let plain = first(&model());
    assert_eq!(plain["ids"].as_array().unwrap().len(), 12);
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
        let path = changed_model(folder.path(), |writer| {
            writer.set(key, Gguf::U32(886));
        });
        let stopped = first(&path);
        assert_eq!(
            (&stopped["ids"], &stopped["finish_reason"]),
            (&json!([601, 461]), &json!("stop")),
            "{key}"
        );
        assert_eq!(stopped["text"], " girl named");
    }
    let path = changed_model(folder.path(), |writer| {
        writer.remove("tokenizer.ggml.eos_token_id");
    });
    assert_eq!(first(&path)["ids"], plain["ids"]);
}

/// A template that writes BOS and a tokenizer that adds it make one (traps 17).
fn trap_17_chat_has_one_bos() {
    let folder = tempfile::tempdir().unwrap();
    let model = model();
    let ids = |text: &str| {
        let template = template(folder.path(), text);
        run(&["chat", "-m", &model, "--template", &template, "-n", "1", "--json", "-p", "Once"]).json()["prompt_ids"]
            .clone()
    };
    let wanted = json!([0, 731]);
    assert_eq!(ids("{{ messages[0].content }}"), wanted);
    assert_eq!(ids("{{ bos_token }}{{ messages[0].content }}"), wanted);
    assert_eq!(ids("{{ bos_token }}{{ bos_token }}{{ messages[0].content }}"), wanted);
}

fn trap_19_template_errors_at_load() {
    let folder = tempfile::tempdir().unwrap();
    let model = model();
    let template = template(folder.path(), "a\n{{ messages | nosuch }}");
    run(&["chat", "-m", &model, "--template", &template, "-p", "x"]).fails_with(&[
        "chat template: line 2",
        "nosuch",
        "--template FILE replaces",
    ]);
}

fn chat_with_its_own_template(model: &str) {
    let base = ["chat", "-m", model, "-n", "24", "--temp", "0", "--json", "--quiet"];
    let one = run(&[&base[..], &["-p", "What is the capital of France?"]].concat()).json();
    let ids = one["prompt_ids"].as_array().unwrap();
    // <|im_start|> is token 1 and BOS: the system's turn, the user's, and the one to come; nothing else in front.
    assert_eq!(ids.iter().filter(|id| **id == 1).count(), 3, "{one}");
    assert_eq!((&ids[0], ids[1] == json!(1)), (&json!(1), false));
    let text = one["text"].as_str().unwrap();
    assert!(!text.trim().is_empty() && !text.contains("<|im_"), "{text}");
    let two = run_with_input(&base, "What is the capital of France?\nAnd of Italy?\n");
    let two = lines(&two.stdout);
    assert_eq!(two[0]["ids"], one["ids"]);
    let computed = two[1]["timings"]["prompt_tokens"].as_u64().unwrap();
    assert!(computed < ids.len() as u64, "only the second question is computed: {computed}");
}
