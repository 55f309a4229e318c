//! Keys and tensors of a model that contradict each other: one clear error each, naming key or tensor and both sides.

use formats::gguf::{Array, Container, GgufWriter, Value};
use formats::model::Activation;

use crate::sample::{loaded, refused, remove, says, set, set_container, strings, tokens, zeros};

#[test]
fn every_size_wrong_in_turn() {
    let keys = [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
    ];
    for key in keys {
        for value in [Value::U32(0), Value::I32(-1), Value::U64(1 << 32), Value::U64(u64::MAX)] {
            says(&refused(set(key, value.clone())), &[key, "is "]);
        }
        says(&refused(set(key, "8")), &[key, "string \"8\"", "whole number"]);
        says(&refused(set(key, 8.0_f32)), &[key, "f32 8", "whole number"]);
        if key != "llama.attention.head_count_kv" {
            says(&refused(remove(key)), &[key, "is missing"]);
        }
    }
    // Absent, the kv heads are as many as the heads: then the shapes tell.
    says(&refused(remove("llama.attention.head_count_kv")), &["attn_k.weight", "[32, 16]", "[32, 32]"]);
    says(&refused(set("llama.block_count", u32::MAX)), &["llama.block_count", "tensors"]);
    says(&refused(set("llama.block_count", 3_u32)), &["blk.2.", "is missing"]);
    says(&refused(set("llama.block_count", 1_u32)), &["blk.1.", "no place", "llama.block_count"]);
    says(&refused(set("llama.embedding_length", 64_u32)), &["token_embd.weight", "[32, 264]", "[64, 264]"]);
    says(&refused(set("llama.feed_forward_length", 64_u32)), &["ffn_", "64"]);
    says(&refused(set("llama.attention.head_count", 3_u32)), &["llama.attention.head_count", "3"]);
    says(&refused(set("llama.attention.head_count_kv", 3_u32)), &["head_count_kv", "3", "4 heads"]);
    says(&refused(set("llama.attention.key_length", u32::MAX)), &["attn_q.weight", "[32, 32]"]);
    let rope = "llama.rope.dimension_count";
    for dim in [7_u32, 10, u32::MAX] {
        says(&refused(set(rope, dim)), &[rope, &dim.to_string()]);
    }
    let epsilon = "llama.attention.layer_norm_rms_epsilon";
    for value in [f32::NAN, f32::INFINITY, -1.0, 2.0] {
        says(&refused(set(epsilon, value)), &[epsilon]);
    }
    says(&refused(set("llama.rope.freq_base", 0.0_f32)), &["llama.rope.freq_base", "is 0"]);
}

#[test]
fn every_tensor_absent_or_misshapen_in_turn() {
    let file = loaded(|_| {}).0;
    for tensor in file.tensors() {
        let name = &tensor.name;
        says(
            &refused(|w| {
                w.remove_tensor(name);
            }),
            &[name, "is missing"],
        );
        let dims: Vec<u64> = tensor.dims.iter().map(|size| size + 32).collect();
        says(&refused(|w| zeros(w, name, &dims)), &[&format!("{dims:?}"), "has shape"]);
    }
    says(&refused(|w| zeros(w, "blk.0.attn_q.bias", &[31])), &["blk.0.attn_q.bias", "[31]", "[32]"]);
    says(&refused(|w| zeros(w, "blk.0.attn_q_norm.weight", &[8])), &["blk.0.attn_q_norm.weight", "no place"]);
    let (_, model, _) = loaded(|w| zeros(w, "blk.0.attn_q.bias", &[32]));
    assert!(model.layers[0].attention.q.bias.is_some() && model.layers[1].attention.q.bias.is_none());
}

#[test]
fn what_is_not_built_is_named() {
    says(&refused(set("general.architecture", "mamba")), &["`mamba`", "accepted: llama, bamboo"]);
    says(&refused(remove("general.architecture")), &["general.architecture", "is missing"]);
    says(&refused(set("general.architecture", 1_u8)), &["general.architecture", "u8 1", "string"]);
    says(&refused(set("llama.expert_count", 8_u32)), &["llama.expert_used_count"]);
    says(&refused(set("split.count", 3_u16)), &["split into 3 files"]);
    says(&refused(set("tokenizer.ggml.model", "rwkv")), &["`rwkv`", "accepted: gpt2"]);
}

#[test]
fn activation_by_key_then_container_then_architecture() {
    let activation =
        |change: &dyn Fn(&mut GgufWriter<'static>)| loaded(|w| change(w)).1.layers[0].ffn.activation;
    let key = "llama.feed_forward_activation";
    assert_eq!(activation(&|_| {}), Activation::Silu);
    assert_eq!(activation(&set_container(Container::PowerInfer)), Activation::Relu);
    assert_eq!(
        activation(&|w| {
            w.set_container(Container::PowerInfer).set(key, "silu");
        }),
        Activation::Silu
    );
    assert_eq!(activation(&set(key, "drelu")), Activation::DRelu);
    says(&refused(set(key, "gelu")), &[key, "\"gelu\"", "silu, relu, drelu"]);
    let (_, model, _) = loaded(|w| {
        for part in [
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "attention.head_count",
            "attention.head_count_kv",
        ] {
            let value = [2_u32, 64, 32, 32, 4, 2];
            let at = ["bl", "co", "em", "fe", "attention.head_count", "attention.head_count_kv"];
            let index = at.iter().rposition(|start| part.starts_with(start)).unwrap();
            w.set(&format!("bamboo.{part}"), value[index]);
        }
        w.set("bamboo.attention.layer_norm_rms_epsilon", 1e-6_f32).set("general.architecture", "bamboo");
    });
    assert_eq!(model.layers[1].ffn.activation, Activation::DRelu);
}

#[test]
fn vocabularies_wrong_in_turn() {
    let list = "tokenizer.ggml.tokens";
    let types = "tokenizer.ggml.token_type";
    let merges = "tokenizer.ggml.merges";
    let with_token = |id: usize, bytes: &[u8]| {
        let mut all: Vec<Vec<u8>> = tokens().into_iter().map(String::into_bytes).collect();
        all[id] = bytes.to_vec();
        strings(all)
    };
    let kinds = |id: usize, kind: i8| {
        let mut all = vec![1_i8; tokens().len()];
        all[id] = kind;
        Array::I8(all)
    };
    says(&refused(set(list, with_token(9, b"\xff\xfe"))), &[list, "token 9", "not UTF-8"]);
    says(&refused(set(types, kinds(9, 6))), &[list, "token 9", "of type byte", "<0x00> to <0xFF>"]);
    says(
        &refused(|w| {
            w.set(list, with_token(9, b"<0xZZ>")).set(types, kinds(9, 6));
        }),
        &["token 9", "<0xZZ>"],
    );
    says(&refused(set(types, kinds(9, 17))), &[types, "token 9", "17"]);
    says(&refused(set(types, Array::I8(vec![1; 3]))), &[types, "3 types", "264 tokens"]);
    says(&refused(set(types, strings(["a"]))), &[types, "array of 1 string"]);
    says(&refused(set(list, Array::U8(vec![1]))), &[list, "array of 1 u8", "strings"]);
    says(&refused(set(list, strings::<&str>([]))), &[list, "0 tokens"]);
    says(&refused(remove(list)), &[list, "is missing"]);
    says(&refused(remove(merges)), &[merges, "is missing"]);
    says(&refused(set(merges, strings(["hello"]))), &[merges, "rule 0", "hello"]);
    let notice = |change: &dyn Fn(&mut GgufWriter<'static>), parts: &[&str]| {
        let tokenizer = loaded(|w| change(w)).2;
        let all = tokenizer.notices().join("\n");
        assert!(parts.iter().all(|part| all.contains(part)), "{parts:?}: {all}");
    };
    notice(&set(merges, strings(["h e", "x y"])), &[merges, "1 of 2 rules"]);
    notice(&set(list, with_token(9, "→".as_bytes())), &[list, "id 9", "byte alphabet"]);
    notice(&set(list, with_token(263, b"he")), &[list, "occur twice", "id 263"]);
    notice(&remove(types), &[types, "is missing"]);
    notice(
        &|w| {
            w.set(list, with_token(100, b"")).set(types, kinds(0, 3));
        },
        &["1 bytes have no token"],
    );
}
