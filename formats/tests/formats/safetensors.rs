//! Folders of safetensors as Hugging Face publishes them (facts/traps.md, row 13).

use std::fs;
use std::path::Path;

use formats::gguf::{Container, GgufFile, GgufWriter};
use formats::model::{Activation, ModelDescription, OutputHead, Requirement, RopeScaling, RopeStyle};
use formats::tokenizer::{Tokenizer, TokenizerOptions};
use serde_json::{Value as Json, json};

use crate::sample::says;

/// Tensors with their shapes, outermost dimension first; a tensor's bytes are all its position in the list.
type Tensors = Vec<(String, Vec<usize>)>;

fn layer(tensors: &mut Tensors, number: usize, parts: &[(&str, &[usize])]) {
    for (part, shape) in parts {
        tensors.push((format!("model.layers.{number}.{part}"), shape.to_vec()));
    }
}

fn llama() -> Tensors {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![264, 32]),
        ("model.norm.weight".into(), vec![32]),
        ("lm_head.weight".into(), vec![264, 32]),
    ];
    for number in 0..2 {
        layer(
            &mut tensors,
            number,
            &[
                ("input_layernorm.weight", &[32]),
                ("self_attn.q_proj.weight", &[32, 32]),
                ("self_attn.k_proj.weight", &[16, 32]),
                ("self_attn.v_proj.weight", &[16, 32]),
                ("self_attn.o_proj.weight", &[32, 32]),
                ("self_attn.rotary_emb.inv_freq", &[4]),
                ("post_attention_layernorm.weight", &[32]),
                ("mlp.gate_proj.weight", &[64, 32]),
                ("mlp.up_proj.weight", &[64, 32]),
                ("mlp.down_proj.weight", &[32, 64]),
            ],
        );
    }
    tensors
}

fn config() -> Json {
    json!({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": false, "rope_scaling": null,
    })
}

/// A shard of F16 tensors.
fn shard(tensors: &[(String, Vec<usize>)], first: usize) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (at, (name, shape)) in tensors.iter().enumerate() {
        let start = data.len();
        data.resize(start + shape.iter().product::<usize>() * 2, (first + at) as u8);
        header.insert(
            name.clone(),
            json!({"dtype": "F16", "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

fn write(folder: &Path, config: &Json, tensors: &Tensors) {
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("model.safetensors"), shard(tensors, 0)).unwrap();
}

fn describe(config: &Json, tensors: &Tensors) -> formats::Result<ModelDescription> {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), config, tensors);
    ModelDescription::describe(&GgufFile::open(folder.path())?)
}

fn with(changes: &[(&str, Json)]) -> Json {
    let mut config = config();
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    config
}

#[test]
fn a_folder_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config(), &llama());
    for path in [
        folder.path().to_path_buf(),
        folder.path().join("model.safetensors"),
        folder.path().join("config.json"),
    ] {
        let file = GgufFile::open(path).unwrap();
        assert_eq!(file.container(), Container::Safetensors);
        let model = ModelDescription::describe(&file).unwrap();
        assert_eq!(
            (model.n_layer(), model.n_embd, model.vocab_size, model.context_length),
            (2, 32, 264, 128)
        );
        assert_eq!((model.rope.style, model.rope.base, model.rope.dim), (RopeStyle::Split, 5e5, 8));
        let layer = &model.layers[1];
        assert_eq!((layer.attention.n_head, layer.attention.n_head_kv, layer.ffn.n_ff), (4, 2, 64));
        assert_eq!(layer.ffn.activation, Activation::Silu);
        assert_eq!(layer.ffn.down.linear().weight.dims, [64, 32]);
        assert!(matches!(model.output, OutputHead::Separate(_)));
        for (at, (_, shape)) in llama().iter().enumerate().take(3) {
            let names = ["token_embd.weight", "output_norm.weight", "output.weight"];
            let bytes = file.tensor_bytes(file.tensor(names[at]).unwrap());
            assert_eq!(bytes, vec![at as u8; shape.iter().product::<usize>() * 2]);
        }
        assert_eq!(model.requirements(), [Requirement::Unaligned]);
        says(&ModelDescription::from_gguf(&file).unwrap_err(), &["safetensors", "not aligned"]);
        // Written as GGUF it is the same model.
        let written = GgufFile::parse("x", GgufWriter::copy_of(&file).to_bytes()).unwrap();
        assert_eq!((written.container(), written.version()), (Container::Gguf, 3));
        let copy = ModelDescription::from_gguf(&written).unwrap();
        assert_eq!((copy.rope.style, copy.rms_epsilon, copy.layers.len()), (RopeStyle::Split, 1e-5, 2));
    }
}

#[test]
fn shards_by_their_index() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = llama();
    let names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let (first, second) = tensors.split_at(9);
    fs::write(folder.path().join("config.json"), config().to_string()).unwrap();
    let write = || {
        fs::write(folder.path().join(names[0]), shard(first, 0)).unwrap();
        fs::write(folder.path().join(names[1]), shard(second, 9)).unwrap();
    };
    write();
    let refused = |parts: &[&str]| says(&GgufFile::open(folder.path()).map(drop).unwrap_err(), parts);
    refused(&["model.safetensors.index.json", "is missing", "2 safetensors files"]);
    let map: serde_json::Map<String, Json> = tensors
        .iter()
        .enumerate()
        .map(|(at, (name, _))| (name.clone(), names[usize::from(at >= 9)].into()))
        .collect();
    let index = |map: &serde_json::Map<String, Json>| {
        fs::write(
            folder.path().join("model.safetensors.index.json"),
            json!({ "weight_map": map }).to_string(),
        )
        .unwrap();
    };
    index(&map);
    let file = GgufFile::open(folder.path().join(names[1])).unwrap();
    assert_eq!(file.files().len(), 2);
    let model = ModelDescription::describe(&file).unwrap();
    assert_eq!(model.requirements(), [Requirement::Unaligned, Requirement::SplitFiles]);
    let down = &model.layers[1].ffn.down.linear().weight;
    assert_eq!((down.file, file.tensor_bytes(down)[0]), (1, 22));
    // Wrong in turn.
    fs::remove_file(folder.path().join(names[1])).unwrap();
    refused(&[names[1], "missing", "shard 2 of 2"]);
    write();
    let mut wrong = map.clone();
    wrong["model.norm.weight"] = names[1].into();
    index(&wrong);
    refused(&["model.norm.weight", names[0], names[1]]);
    wrong.insert("ghost.weight".into(), names[0].into());
    wrong["model.norm.weight"] = names[0].into();
    index(&wrong);
    refused(&["ghost.weight", "in no file"]);
    wrong["ghost.weight"] = "../other.safetensors".into();
    index(&wrong);
    refused(&["ghost.weight", "../other.safetensors", "same folder"]);
    index(&map);
    fs::write(folder.path().join(names[1]), shard(&tensors[8..], 8)).unwrap();
    refused(&[&tensors[8].0, names[0], "different models"]);
    fs::write(folder.path().join("model.safetensors.index.json"), "{").unwrap();
    refused(&["index.json", "is no JSON"]);
}

#[test]
fn row_13_files_that_are_not_what_they_seem() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config(), &llama());
    let path = folder.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let refused = |bytes: &[u8], parts: &[&str]| {
        fs::write(&path, bytes).unwrap();
        says(
            &GgufFile::open(folder.path()).map(drop).unwrap_err(),
            &[&["model.safetensors"], parts].concat(),
        );
    };
    let length = whole.len().to_string();
    refused(&whole[..whole.len() - 1], &["cut short", &length]);
    refused(&whole[..100], &["claims a header", "cut short"]);
    refused(&whole[..5], &["only 5 bytes"]);
    refused(b"", &["0 bytes"]);
    refused(&[&whole[..], &[0; 16]].concat(), &["16 bytes behind", &length]);
    refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", &["git-LFS pointer"]);
    refused(&[&(1_u64 << 60).to_le_bytes()[..], b"{}"].concat(), &["header of 1152921504606846976"]);
    refused(&[&8_u64.to_le_bytes()[..], b"nonsense"].concat(), &["damaged header"]);
    let one = |entry: Json, data: usize| {
        let header = json!({ "t": entry }).to_string().into_bytes();
        [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0; data]].concat()
    };
    refused(&one(json!({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}), 4), &["`t`", "F8_E4M3"]);
    refused(&one(json!({"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}), 0), &["`t`", "[0]"]);
    refused(
        &one(json!({"dtype": "F16", "shape": [1, 1, 1, 1, 1], "data_offsets": [0, 2]}), 2),
        &["`t`", "dimensions"],
    );
    refused(&one(json!({"dtype": "F16", "shape": [3], "data_offsets": [0, 4]}), 4), &["damaged header"]);
    refused(
        &one(json!({"dtype": "F16", "shape": [1u64 << 62, 8], "data_offsets": [0, 4]}), 4),
        &["damaged header"],
    );
    refused(&one(json!({"dtype": "F16", "shape": [2], "data_offsets": [4, 8]}), 8), &["damaged header"]);
    fs::write(&path, &whole).unwrap();
    fs::remove_file(folder.path().join("config.json")).unwrap();
    says(&GgufFile::open(&path).unwrap_err(), &["config.json"]);
}

#[test]
fn configurations() {
    let tensors = llama();
    let refused = |changes: &[(&str, Json)], parts: &[&str]| {
        says(&describe(&with(changes), &tensors).map(drop).unwrap_err(), parts);
    };
    refused(&[("model_type", json!("mamba"))], &["config.json", "\"mamba\"", "accepted: llama"]);
    refused(&[("hidden_size", json!(null))], &["hidden_size", "is missing"]);
    refused(&[("hidden_size", json!("32"))], &["hidden_size", "\"32\"", "whole number"]);
    refused(&[("num_hidden_layers", json!(-1))], &["num_hidden_layers", "-1"]);
    refused(&[("hidden_act", json!("swish"))], &["hidden_act", "\"swish\"", "silu"]);
    refused(&[("rope_scaling", json!({"type": "dynamic"}))], &["rope_scaling", "\"dynamic\"", "llama3"]);
    refused(&[("intermediate_size", json!(65))], &["ffn_", "65"]);
    // Tied embeddings leave a stored head out.
    let model = describe(&with(&[("tie_word_embeddings", json!(true))]), &tensors).unwrap();
    assert!(matches!(model.output, OutputHead::Tied));
    let headless: Tensors = tensors.iter().filter(|(name, _)| name != "lm_head.weight").cloned().collect();
    says(&describe(&config(), &headless).unwrap_err(), &["lm_head.weight", "tie_word_embeddings"]);
    let mut more = tensors.clone();
    more.push(("model.layers.0.mystery.weight".into(), vec![2]));
    says(&describe(&config(), &more).unwrap_err(), &["model.layers.0.mystery.weight", "no place"]);
    // Rope scaling, in the older and the newer place.
    let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 7.0});
    let wanted = RopeScaling::Llama3 {
        factor: 8.0,
        original_context: 16,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
    };
    for (key, base) in [("rope_scaling", 5e5), ("rope_parameters", 7.0)] {
        let mut config = with(&[(key, scaling.clone())]);
        if key == "rope_parameters" {
            config["rope_theta"] = Json::Null;
        }
        let model = describe(&config, &tensors).unwrap();
        assert_eq!((model.rope.scaling, model.rope.base), (wanted, base));
        assert!(model.requirements().contains(&Requirement::Llama3Rope));
    }
    let model =
        describe(&with(&[("rope_scaling", json!({"type": "linear", "factor": 2.0}))]), &tensors).unwrap();
    assert_eq!(model.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    let model = describe(&with(&[("model_type", json!("mistral")), ("sliding_window", json!(64))]), &tensors)
        .unwrap();
    assert_eq!(model.layers[0].window, Some(64));
}

#[test]
fn qwen_gemma_and_opt() {
    let mut tensors = llama();
    for number in 0..2 {
        layer(&mut tensors, number, &[("self_attn.q_proj.bias", &[32]), ("self_attn.k_proj.bias", &[16])]);
    }
    let qwen = with(&[
        ("model_type", json!("qwen2")),
        ("use_sliding_window", json!(false)),
        ("sliding_window", json!(9)),
    ]);
    let model = describe(&qwen, &tensors).unwrap();
    assert!(model.layers[1].attention.k.bias.is_some() && model.layers[0].window.is_none());
    says(
        &describe(
            &with(&[
                ("model_type", json!("qwen2")),
                ("use_sliding_window", json!(true)),
                ("sliding_window", json!(9)),
            ]),
            &tensors,
        )
        .unwrap_err(),
        &["use_sliding_window"],
    );

    let mut tensors = llama();
    for number in 0..2 {
        layer(
            &mut tensors,
            number,
            &[
                ("self_attn.q_norm.weight", &[8]),
                ("self_attn.k_norm.weight", &[8]),
                ("pre_feedforward_layernorm.weight", &[32]),
                ("post_feedforward_layernorm.weight", &[32]),
            ],
        );
    }
    let gemma = with(&[
        ("model_type", json!("gemma3_text")),
        ("head_dim", json!(8)),
        ("query_pre_attn_scalar", json!(16)),
        ("hidden_activation", json!("gelu_pytorch_tanh")),
        ("sliding_window", json!(32)),
        ("layer_types", json!(["sliding_attention", "full_attention"])),
        ("tie_word_embeddings", json!(true)),
        ("rope_local_base_freq", json!(20000.0)),
        ("final_logit_softcapping", json!(null)),
    ]);
    let model = describe(&gemma, &tensors).unwrap();
    assert_eq!((model.norm_offset, model.embedding_scale), (1.0, 32_f32.sqrt()));
    assert_eq!((model.layers[0].window, model.layers[1].window), (Some(32), None));
    assert_eq!(model.layers[0].rope.as_ref().unwrap().base, 20_000.0);
    assert_eq!(
        (model.layers[1].attention.scale, model.layers[0].ffn.activation),
        (Some(0.25), Activation::GeluTanh)
    );
    assert_eq!(model.layers[0].ffn_norm.name, "blk.0.ffn_norm.weight");
    assert!(model.requirements().contains(&Requirement::NormOffset));

    let mut tensors: Tensors = vec![
        ("model.decoder.embed_tokens.weight".into(), vec![264, 32]),
        ("model.decoder.embed_positions.weight".into(), vec![130, 32]),
        ("model.decoder.final_layer_norm.weight".into(), vec![32]),
        ("model.decoder.final_layer_norm.bias".into(), vec![32]),
    ];
    for (part, shape) in [
        ("self_attn_layer_norm", vec![32]),
        ("self_attn.q_proj", vec![32, 32]),
        ("self_attn.k_proj", vec![32, 32]),
        ("self_attn.v_proj", vec![32, 32]),
        ("self_attn.out_proj", vec![32, 32]),
        ("final_layer_norm", vec![32]),
        ("fc1", vec![64, 32]),
        ("fc2", vec![32, 64]),
    ] {
        tensors.push((format!("model.decoder.layers.0.{part}.weight"), shape.clone()));
        tensors.push((format!("model.decoder.layers.0.{part}.bias"), shape[..1].to_vec()));
    }
    let opt = json!({"model_type": "opt", "num_hidden_layers": 1, "hidden_size": 32, "ffn_dim": 64,
        "num_attention_heads": 4, "max_position_embeddings": 128, "activation_function": "relu",
        "do_layer_norm_before": true, "word_embed_proj_dim": 32});
    let model = describe(&opt, &tensors).unwrap();
    assert_eq!((model.positions.as_ref().unwrap().offset, model.rope.dim), (2, 0));
    assert!(model.layers[0].ffn.up.bias.is_some() && matches!(model.output, OutputHead::Tied));
    let mut other = opt;
    other["do_layer_norm_before"] = json!(false);
    says(&describe(&other, &tensors).unwrap_err(), &["do_layer_norm_before"]);
}

/// The tokenizer of a folder with these files beside a model.
fn tokenizer(files: &[(&str, Json)]) -> formats::Result<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &config(), &llama());
    for (name, json) in files {
        fs::write(folder.path().join(name), json.to_string()).unwrap();
    }
    Tokenizer::from_gguf(&GgufFile::open(folder.path())?, &TokenizerOptions::default())
}

/// An added token.
pub(crate) fn added(id: u32, content: &str, special: bool) -> Json {
    json!({"id": id, "content": content, "special": special, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false})
}

/// `a`, `b` and a space, and what two merges make.
pub(crate) fn byte_level(pre_tokenizer: Json) -> Json {
    json!({
        "added_tokens": [added(6, "<|end|>", true), added(7, "<|start|>", true), added(8, "::", false)],
        "normalizer": null, "pre_tokenizer": pre_tokenizer,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [7], "tokens": ["<|start|>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "1": 5},
            "merges": [["a", "b"], ["Ġ", "ab"]]},
    })
}

#[test]
fn tokenizers_of_byte_level() {
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
    let settings =
        json!({"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>", "chat_template": "{{ x }}"});
    let generation = json!({"eos_token_id": [6, 0]});
    let files = [("tokenizer_config.json", settings), ("generation_config.json", generation)];
    let with = |json: Json| tokenizer(&[&files[..], &[("tokenizer.json", json)]].concat());
    let found = with(byte_level(level)).unwrap();
    assert_eq!(found.encode("ab ab<|end|>::a", true, true).unwrap(), [7, 3, 4, 6, 8, 0]);
    assert!(found.adds_bos());
    assert_eq!((found.special_ids().eos, found.ends_of_generation()), (Some(6), &[0, 6][..]));
    assert_eq!((found.chat_template(), found.vocab_size()), (Some("{{ x }}"), 9));
    assert_eq!(found.decode(&[7, 3, 4, 8]), b"<|start|>ab ab::");
    assert_eq!(found.decode_visible(&[7, 3, 4, 8]), b"ab ab::");
    assert_eq!(found.special_token("<|end|>"), Some(6));
    // The texts of special tokens are text, and stay what they are, where they are not asked for.
    assert_eq!(found.encode("a<|end|>::", false, false).unwrap(), [0, 8]);
    says(
        &Tokenizer::from_folder(Path::new("none"), &TokenizerOptions::with_pre("gpt-2")).unwrap_err(),
        &["without `tokenizer.json`"],
    );

    let mut gap = byte_level(json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}));
    gap["added_tokens"][2]["id"] = json!(9);
    says(&with(gap.clone()).unwrap_err(), &["tokenizer.json", "`::` another id than 8"]);
    gap["added_tokens"][2]["id"] = json!(1_u64 << 40);
    says(&with(gap.clone()).unwrap_err(), &["tokenizer.json", "ids up to 1099511627776"]);
    gap["added_tokens"][2] = added(8, "::", false);
    gap["model"]["dropout"] = json!(0.5);
    says(&with(gap).unwrap_err(), &["tokenizer.json", "model.dropout"]);
    says(&tokenizer(&[]).unwrap_err(), &["a folder without `tokenizer.json`"]);
}

/// The merges that make each token of a SentencePiece model, best first, as Hugging Face's converter lists them.
fn from_pieces(model: &Json, prefix: bool) -> Json {
    let tokens: Vec<&str> = model["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    let vocab: serde_json::Map<String, Json> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    let kinds: Vec<u64> =
        model["types"].as_array().unwrap().iter().map(|kind| kind.as_u64().unwrap()).collect();
    let mut merges = Vec::new();
    // Ids are in the order of the scores.
    for (token, _) in tokens.iter().zip(&kinds).filter(|(_, kind)| **kind == 1) {
        for (cut, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(cut);
            if vocab.contains_key(left) && vocab.contains_key(right) {
                merges.push(json!([left, right]));
            }
        }
    }
    let added: Vec<Json> = tokens
        .iter()
        .zip(&kinds)
        .enumerate()
        .filter(|(_, (_, kind))| matches!(kind, 3 | 4))
        .map(|(id, (token, kind))| {
            let mut token = added(id as u32, token, *kind == 3);
            token["normalized"] = json!(*kind == 4); // looked for where spaces are U+2581 already
            token
        })
        .collect();
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let steps =
        if prefix { json!([{"type": "Prepend", "prepend": "▁"}, replace]) } else { json!([replace]) };
    json!({"added_tokens": added, "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": null,
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": "<unk>", "vocab": vocab, "merges": merges}})
}

#[test]
fn tokenizers_of_sentencepiece() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/pieces.json");
    let fixture: Json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for (name, prefix) in [("llama", true), ("gemma", false)] {
        let found = tokenizer(&[("tokenizer.json", from_pieces(&fixture[name], prefix))]).unwrap();
        for (text, wanted) in
            fixture["texts"].as_array().unwrap().iter().zip(fixture[name]["ids"].as_array().unwrap())
        {
            let ids = found.encode(text.as_str().unwrap(), false, false).unwrap();
            assert_eq!(json!(ids), *wanted, "{name}: {text}");
        }
    }
}
