//! Real models answer simple questions, and one writes a function that does what it should. The page docs/real-models.md
//! shows the same runs.

use crate::program::{run, shared_model};
use crate::{ModelTest, SystemTest};
use std::process::Command;

const GEMMA: &str = "gemma-3-270m-q4_k_m.gguf";
const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const QWEN: &str = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf";

pub(crate) fn tests_with_models() -> Vec<ModelTest> {
    vec![
        ("must_show_2_gemma_answers_after_examples", GEMMA, gemma),
        ("must_show_2_smollm2_answers", SMOLLM2, smollm2),
    ]
}

/// Tests that need a model and Python.
pub(crate) fn tests_with_python() -> Vec<SystemTest> {
    let python = Command::new(python()).arg("--version").output();
    let lacking = match (shared_model(QWEN), python.is_ok_and(|output| output.status.success())) {
        (None, _) => Some(format!("needs ../shared/models/{QWEN}")),
        (Some(_), false) => Some("needs python3".to_owned()),
        (Some(_), true) => None,
    };
    vec![("must_show_2_qwen_answers_and_writes_a_function", lacking, qwen)]
}

fn python() -> String {
    std::env::var("THERMOCLINE_TEST_PYTHON").unwrap_or_else(|_| "python3".into())
}

/// The file is a base model: it goes on as examples do, and has no template.
fn gemma(path: &str) {
    for (question, wanted) in [
        ("What is the capital of France?", "Paris"),
        ("What is the opposite of hot?", "cold"),
        ("What is the largest planet?", "Jupiter"),
        ("What language is spoken in Spain?", "Spanish"),
        ("In which country is Rome?", "Italy"),
    ] {
        let examples = "Question: What is the capital of Germany?\nAnswer: Berlin\n\n\
            Question: How many legs does a spider have?\nAnswer: eight\n\n\
            Question: What color is the sky on a clear day?\nAnswer: blue\n\n";
        let prompt = format!("{examples}Question: {question}\nAnswer:");
        let answer =
            run(&["run", "-m", path, "-p", &prompt, "-n", "6", "--temp", "0", "--stop", "\n", "--json"]);
        assert_eq!(answer.json()["text"].as_str().unwrap().trim(), wanted, "{question}");
    }
}

fn chat(path: &str, question: &str, most: &str) -> String {
    // Not rounded: the smallest models say something else where activations are.
    let arguments = ["chat", "-m", path, "-p", question, "-n", most, "--temp", "0", "-q"];
    let outcome = run(&[&arguments[..], &["--activations", "f32"]].concat());
    assert_eq!(outcome.code, 0, "{}", outcome.stderr);
    outcome.stdout
}

fn smollm2(path: &str) {
    for (question, wanted) in [
        ("What is the capital of France?", "Paris"),
        ("What is 2 + 2?", " 4"),
        ("What color is the sky?", "blue"),
    ] {
        let answer = chat(path, question, "24");
        assert!(answer.contains(wanted), "{question} {answer}");
    }
}

fn qwen() {
    let path = shared_model(QWEN).unwrap();
    let answer = chat(&path, "What is the capital of France?", "16");
    assert!(answer.contains("Paris"), "{answer}");
    let question = "Write a Python function is_prime(n). Answer with the code only, no example.";
    let answer = chat(&path, question, "160");
    let code = answer.split("```").nth(1).unwrap_or_else(|| panic!("no code in {answer}"));
    let code = code.strip_prefix("python").unwrap_or(code);
    assert!(code.contains("def is_prime(n"), "{answer}");
    let asked = "print([n for n in range(-3, 200) if is_prime(n)])";
    let ran = Command::new(python()).args(["-I", "-c", &format!("{code}\n{asked}")]).output().unwrap();
    let primes: Vec<u32> = (2..200).filter(|n| (2..*n).all(|d| n % d != 0)).collect();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert_eq!(said.trim(), format!("{primes:?}"), "{answer}{}", String::from_utf8_lossy(&ran.stderr));
}
