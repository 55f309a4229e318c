//! Prompts beside those of transformers: 20 conversations by templates written for this, and by those of real models
//! (templates/make_expected.py).

use crate::program::{model, run};
use crate::{ModelTest, Test};
use formats::gguf::GgufFile;
use formats::tokenizer::{Tokenizer, TokenizerOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

// The program is no library.
#[allow(dead_code, unused_imports)]
#[path = "../../src/template/mod.rs"]
mod template;

use template::{ChatTemplate, Conversation, TemplateError};

pub(crate) fn tests() -> Vec<Test> {
    vec![
        ("prompts_equal_transformers", prompts_equal_transformers),
        ("templates_without_end_are_given_up", bombs),
    ]
}

/// Few instructions could fill any memory, and few more any file: the error says where.
fn bombs() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("bomb.jinja");
    let doubled = |twice: &str| {
        format!(
            "{{% set ns = namespace(x='aaaa') %}}\n{{% for i in range(60) %}}\n{{% set ns.x = {twice} %}}\n{{% endfor %}}"
        )
    };
    for (source, line) in [
        (doubled("ns.x ~ ns.x"), "line 3"),
        (doubled("ns.x + ns.x"), "line 3"),
        (doubled("ns.x * 2"), "line 3"),
        (doubled("[ns.x, ns.x] | join"), "line 3"),
        (doubled("ns.x.replace('a', 'aa')"), "line 3"),
        ("\n{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}".into(), "line 2"),
    ] {
        std::fs::write(&template, &source).unwrap();
        let template = template.to_str().unwrap();
        run(&["chat", "-m", &model(), "--template", template]).fails_with(&[
            "chat template",
            line,
            "out of fuel",
            "MiB of text",
            "--template FILE",
        ]);
    }
}

pub(crate) fn tests_with_models() -> Vec<ModelTest> {
    vec![
        ("smollm2_prompts_equal_transformers", SMOLLM2, |path| equals(SMOLLM2, &own(path))),
        ("qwen_prompts_equal_transformers", QWEN, |path| equals(QWEN, &own(path))),
    ]
}

const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const QWEN: &str = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

fn read(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(folder().join(name)).unwrap()).unwrap()
}

fn prompts_equal_transformers() {
    for name in ["llama3-style", "mistral-style", "gemma-style", "chatml-tools", "language"] {
        let source = std::fs::read_to_string(folder().join(format!("{name}.jinja"))).unwrap();
        equals(name, &source);
    }
}

/// The template in a model's file.
fn own(path: &str) -> String {
    let file = GgufFile::open(path).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file, &TokenizerOptions::default()).unwrap();
    tokenizer.chat_template().unwrap().to_owned()
}

fn equals(name: &str, source: &str) {
    let template = ChatTemplate::new(source, "<s>", "</s>").unwrap();
    let conversations = read("conversations.json");
    let expected = read("expected.json");
    let rendered = expected["rendered"][name].as_array().unwrap();
    assert_eq!((conversations.as_array().unwrap().len(), rendered.len()), (20, 20));
    for (number, (case, wanted)) in conversations.as_array().unwrap().iter().zip(rendered).enumerate() {
        let conversation = Conversation::from_json(&json!({
            "messages": case["messages"], "tools": case["tools"], "chat_template_kwargs": case["variables"],
        }));
        let found = match template.render(&conversation.unwrap(), case["add_generation_prompt"] == true) {
            Ok(text) => json!({ "text": text }),
            Err(TemplateError::Refused { message }) => json!({ "refused": message }),
            Err(error) => json!({ "fails": error.to_string() }),
        };
        assert_eq!(found, *wanted, "{name}, conversation {number}");
    }
}
