//! Traps that users of other engines fell into (facts/traps.md, by row): each behaves as it should.

use engine_core::DType;
use formats::gguf::{Array, GgufFile, GgufWriter, Value};
use formats::model::{OutputHead, RopeScaling};
use formats::tokenizer::{StreamDecoder, Tokenizer, TokenizerOptions};
use proptest::prelude::*;

use crate::sample::{
    self, SIZES, Sizes, loaded, refused, remove, says, set, set_container, strings, tokens, zeros,
};

fn story() -> GgufFile {
    GgufFile::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tiny-story-9m-q8_0.gguf")).unwrap()
}

fn story_tokenizer() -> Tokenizer {
    Tokenizer::from_gguf(&story(), &TokenizerOptions::default()).unwrap()
}

#[test]
fn row_01_token_list_and_embedding_rows_differ() {
    let list = |count: usize| {
        let fill = (tokens().len()..count).map(|id| format!("fill{id}"));
        let all: Vec<String> = tokens().into_iter().chain(fill).take(count).collect();
        (strings(all), Array::I32(vec![1; count]))
    };
    let with = |w: &mut GgufWriter<'static>, count| {
        let (names, kinds) = list(count);
        w.set("tokenizer.ggml.tokens", names).set("tokenizer.ggml.token_type", kinds);
    };
    says(&refused(|w| with(w, 268)), &["token_embd.weight", "264 rows", "268 tokens"]);
    let (_, model, tokenizer) = loaded(|w| with(w, 260));
    assert_eq!((model.vocab_size, model.sampleable_vocab, tokenizer.vocab_size()), (264, 260, 260));
    assert!(model.notices[0].contains("260 tokens for 264 embedding rows"), "{:?}", model.notices);
    let mut writer = sample::model(Sizes { rows: 32_003, ..SIZES });
    with(&mut writer, 32_003);
    let (_, model, _) = sample::load(writer.to_bytes()).unwrap();
    assert_eq!((model.vocab_size, model.sampleable_vocab), (32_003, 32_003));
}

#[test]
fn row_02_tied_and_separate_heads() {
    let (_, model, _) = loaded(|_| {});
    assert!(matches!(model.output, OutputHead::Tied));
    assert_eq!(model.head(), &model.token_embd, "the same bytes, once");
    let (_, model, _) = loaded(|w| zeros(w, "output.weight", &[32, 264]));
    assert_eq!(model.head().name, "output.weight");
    says(&refused(|w| zeros(w, "output.weight", &[32, 263])), &["output.weight", "[32, 263]", "[32, 264]"]);
}

#[test]
fn row_03_pre_tokenizer_missing_or_unknown() {
    let key = "tokenizer.ggml.pre";
    let (_, _, tokenizer) = loaded(remove(key));
    let notices = tokenizer.notices();
    assert!(
        notices.len() == 1 && notices[0].contains(key) && notices[0].contains("`default`"),
        "{notices:?}"
    );
    says(&refused(set(key, "invented")), &["`invented`", key, "accepted: default, gpt-2", "override"]);
    let mut writer = sample::model(SIZES);
    writer.set(key, "invented");
    let file = GgufFile::parse("sample", writer.to_bytes()).unwrap();
    let tokenizer = Tokenizer::from_gguf(&file, &TokenizerOptions::with_pre("gpt-2")).unwrap();
    assert!(tokenizer.notices().is_empty());
    let texts = |t: &Tokenizer, text| t.encode(text, false, false).unwrap().len();
    // `12` is one token unless digits are cut one by one, as smollm does.
    assert_eq!((texts(&tokenizer, "12"), texts(&loaded(|_| {}).2, "12")), (1, 2));
    says(&Tokenizer::from_gguf(&file, &TokenizerOptions::with_pre("typo")).unwrap_err(), &["`typo`"]);
}

#[test]
fn row_05_cut_files_and_other_files() {
    let bytes = std::fs::read(story().path()).unwrap();
    let cut = |length: usize| GgufFile::parse("cut.gguf", bytes[..length].to_vec()).map(drop).unwrap_err();
    says(&cut(bytes.len() - 1), &["`output_norm.weight`", "needs 1024 bytes", "only 1023"]);
    says(&cut(bytes.len() - 2000), &["`blk.7.fc2.weight`", "needs 104448 bytes"]);
    says(&cut(100_000), &["tokenizer.ggml.merges", "claims 3839 entries", "cut short"]);
    says(&GgufFile::parse("x", b"<html>no".to_vec()).unwrap_err(), &["HTML"]);
    says(&GgufFile::parse("x", Vec::new()).unwrap_err(), &["empty"]);
}

// Row 6, crafted files: `malformed.rs` and `mutated.rs`.

#[test]
fn row_07_integer_widths_and_per_layer_arrays() {
    let (_, model, _) = loaded(|w| {
        w.set("llama.attention.head_count_kv", Array::I32(vec![2, 2]));
        w.set("llama.attention.head_count", Array::U8(vec![4, 4]));
        w.set("llama.feed_forward_length", Array::U64(vec![32, 32]));
        w.set("llama.context_length", 64_u64).set("llama.rope.dimension_count", 8_i32);
        w.set("llama.attention.layer_norm_rms_epsilon", 1e-5_f64);
        w.set("llama.embedding_length", 32_i8).set("tokenizer.ggml.bos_token_id", 0_i64);
        w.set("tokenizer.ggml.token_type", Array::U32(vec![1; 264]));
    });
    assert_eq!((model.context_length, model.rope.dim, model.rms_epsilon), (64, 8, 1e-5));
    loaded(set("tokenizer.ggml.token_type", Array::I64(vec![1; 264])));
    // Really different per layer.
    let (_, model, _) = loaded(|w| {
        w.set("llama.attention.head_count_kv", Array::U32(vec![2, 4]));
        w.set("llama.feed_forward_length", Array::U32(vec![32, 64]));
        zeros(w, "blk.1.attn_k.weight", &[32, 32]);
        zeros(w, "blk.1.attn_v.weight", &[32, 32]);
        zeros(w, "blk.1.ffn_gate.weight", &[32, 64]);
        zeros(w, "blk.1.ffn_up.weight", &[32, 64]);
        zeros(w, "blk.1.ffn_down.weight", &[64, 32]);
    });
    let kv: Vec<_> = model.layers.iter().map(|layer| (layer.attention.n_head_kv, layer.ffn.n_ff)).collect();
    assert_eq!(kv, [(2, 32), (4, 64)]);
    let key = "llama.attention.head_count_kv";
    says(&refused(set(key, Array::I32(vec![2, 2, 2]))), &[key, "3 values for 2 layers"]);
    says(&refused(set(key, Array::I32(vec![2, 0]))), &[key, "is 0"]);
    says(&refused(set(key, Array::I32(vec![2, -2]))), &[key, "is -2"]);
    says(&refused(set(key, Array::F32(vec![2.0, 2.0]))), &[key, "array of 2 f32", "whole numbers"]);
    says(&refused(set(key, true)), &[key, "bool true", "a whole number"]);
    let key = "llama.context_length";
    says(&refused(set(key, Array::U32(vec![64]))), &[key, "array of 1 u32", "a whole number"]);
}

#[test]
fn row_08_special_ids_out_of_range_and_zero() {
    let (_, _, tokenizer) = loaded(|w| {
        w.set("tokenizer.ggml.eos_token_id", u32::MAX).set("tokenizer.ggml.bos_token_id", 264_u32);
        w.set("tokenizer.ggml.padding_token_id", -1_i32).set("tokenizer.ggml.add_bos_token", true);
    });
    let ids = tokenizer.special_ids();
    assert_eq!((ids.bos, ids.eos, ids.padding), (None, None, None));
    let notices = tokenizer.notices().join("\n");
    for part in
        ["eos_token_id` is 4294967295", "bos_token_id` is 264", "padding_token_id` is -1", "add_bos_token"]
    {
        assert!(notices.contains(part), "{part}: {notices}");
    }
    assert_eq!(tokenizer.encode("hello", tokenizer.adds_bos(), true).unwrap().len(), 1);
    let (_, _, tokenizer) = loaded(set("tokenizer.ggml.eos_token_id", 0_u32));
    assert_eq!(tokenizer.special_ids().eos, Some(0));
    assert!(tokenizer.is_end_of_generation(0));
    says(&refused(set("tokenizer.ggml.eos_token_id", "0")), &["eos_token_id", "string"]);
}

#[test]
fn row_09_head_width_by_key_length() {
    let sizes = Sizes { n_embd: 64, head_dim: 32, ..SIZES };
    let mut writer = sample::model(sizes);
    writer.set("llama.attention.key_length", 32_u32).set("llama.attention.value_length", 32_u32);
    let (_, model, _) = sample::load(writer.to_bytes()).unwrap();
    let attention = &model.layers[0].attention;
    assert_eq!((attention.head_dim, attention.value_dim, model.rope.dim), (32, 32, 32));
    assert_eq!(attention.q.weight.dims, [64, 128]);
    writer.remove("llama.attention.key_length").remove("llama.rope.dimension_count");
    says(
        &sample::load(writer.to_bytes()).map(drop).unwrap_err(),
        &["attn_q.weight", "[64, 128]", "[64, 64]"],
    );
}

#[test]
fn row_10_rope_scaling() {
    let scaling = |pairs: &[(&str, Value)]| {
        loaded(|w| {
            for (key, value) in pairs {
                w.set(&format!("llama.rope.{key}"), value.clone());
            }
        })
        .1
        .rope
    };
    let factor = ("scaling.factor", Value::F32(4.0));
    assert_eq!(scaling(&[]).scaling, RopeScaling::None);
    assert_eq!(scaling(&[("scaling.type", "none".into()), factor.clone()]).scaling, RopeScaling::None);
    let linear = RopeScaling::Linear { factor: 4.0 };
    assert_eq!(scaling(&[("scaling.type", "linear".into()), factor.clone()]).scaling, linear);
    assert_eq!(scaling(std::slice::from_ref(&factor)).scaling, linear);
    assert_eq!(scaling(&[("scale_linear", Value::F32(4.0))]).scaling, linear);
    let original = ("scaling.original_context_length", Value::U32(16));
    match scaling(&[("scaling.type", "yarn".into()), factor.clone(), original]).scaling {
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, ext_factor, attn_factor } => {
            assert_eq!((factor, original_context), (4.0, 16));
            assert_eq!((beta_fast, beta_slow, ext_factor, attn_factor), (32.0, 1.0, 1.0, 1.0));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(scaling(&[("freq_base", Value::F32(1e6))]).base, 1e6);
    let invented = set("llama.rope.scaling.type", "invented");
    says(&refused(invented), &["llama.rope.scaling.type", "\"invented\"", "none, linear, yarn"]);
    says(&refused(set("llama.rope.scaling.factor", -2.0_f32)), &["rope.scaling.factor", "-2"]);
    let (_, model, _) = loaded(|w| zeros(w, "rope_freqs.weight", &[4]));
    assert_eq!(model.rope.factors.unwrap().dims, [4]);
    says(&refused(|w| zeros(w, "rope_freqs.weight", &[8])), &["rope_freqs.weight", "[8]", "[4]"]);
}

#[test]
fn row_11_a_tensor_that_cannot_be_is_refused_by_name() {
    let error = GgufWriter::new(formats::Container::Gguf)
        .tensor("blk.0.attn_q.weight", DType::Q4K, &[576, 1], vec![0; 324])
        .map(drop)
        .unwrap_err();
    says(&error, &["blk.0.attn_q.weight", "Q4_K"]);
    // The same in a file: `malformed.rs`.
}

#[test]
fn row_12_predictors_for_some_layers() {
    let add = |w: &mut GgufWriter<'static>, layer: usize| {
        zeros(w, &format!("blk.{layer}.fc1.weight"), &[32, 16]);
        zeros(w, &format!("blk.{layer}.fc2.weight"), &[16, 32]);
    };
    let (_, model, _) = loaded(|w| add(w, 1));
    assert_eq!(model.layers_without_predictor, [0]);
    assert!(model.notices[0].contains("incomplete for layer 0: dense"), "{:?}", model.notices);
    assert_eq!(model.layers[1].ffn.predictor.as_ref().unwrap().rank, 16);
    let (_, model, _) = loaded(|w| {
        add(w, 0);
        add(w, 1);
    });
    assert!(model.layers_without_predictor.is_empty() && model.notices.is_empty());
    let (_, model, _) = loaded(set_container(formats::Container::PowerInfer));
    assert_eq!(model.layers_without_predictor, [0, 1]);
    assert!(model.notices[0].starts_with("no predictors"), "{:?}", model.notices);
    says(&refused(|w| zeros(w, "blk.0.fc1.weight", &[32, 16])), &["blk.0.fc2.weight", "is missing"]);
    says(&refused(|w| zeros(w, "blk.0.fc2.weight", &[16, 32])), &["blk.0.fc1.weight", "is missing"]);
    says(
        &refused(|w| {
            zeros(w, "blk.0.fc1.weight", &[32, 16]);
            zeros(w, "blk.0.fc2.weight", &[8, 32]);
        }),
        &["blk.0.fc2.weight", "[8, 32]", "[16, 32]"],
    );
}

#[test]
fn row_14_long_runs_take_linear_time() {
    // Quadratic time would be minutes here; the test ends or it does not.
    let tokenizer = story_tokenizer();
    let mut others = Vec::new();
    for pre in ["default", "gpt-2", "llama-bpe", "qwen2", "falcon", "deepseek-coder"] {
        others.push(Tokenizer::from_gguf(&story(), &TokenizerOptions::with_pre(pre)).unwrap());
    }
    for unit in ["a", " ", "7", "\u{301}", "^", "\n", " \n", "'", "<", "<|", "\r", "中", "a'", "'s", "\t"] {
        // The file's own pre-tokenizer on a megabyte, the others on an eighth of it.
        for (tokenizer, size) in
            std::iter::once((&tokenizer, 1 << 20)).chain(others.iter().map(|t| (t, 1 << 17)))
        {
            let text = unit.repeat(size / unit.len());
            let ids = tokenizer.encode(&text, false, true).unwrap();
            assert_eq!(tokenizer.decode(&ids), text.as_bytes(), "{unit:?}");
        }
    }
}

#[test]
fn row_15_texts_round_trip() {
    let tokenizer = story_tokenizer();
    for text in
        ["", " a", "a ", "\n\n", "<|endoftext|> a", "<|endoftext|>a<|endoftext|>", "  ", "\0\u{7f}", "é ½ 😀"]
    {
        for parse_special in [false, true] {
            let ids = tokenizer.encode(text, false, parse_special).unwrap();
            assert_eq!(tokenizer.decode(&ids), text.as_bytes(), "{text:?}");
        }
    }
    assert_eq!(tokenizer.encode("", true, true).unwrap(), [0]);
    // Both keys, both ways.
    for (bos, space) in [(false, false), (false, true), (true, false), (true, true)] {
        let (_, _, tokenizer) = loaded(|w| {
            w.set("tokenizer.ggml.add_bos_token", bos).set("tokenizer.ggml.add_space_prefix", space);
        });
        for text in ["to", " to", "", "<|im_end|>to", "to<|im_end|> to"] {
            let ids = tokenizer.encode(text, tokenizer.adds_bos(), true).unwrap();
            assert_eq!(tokenizer.starts_with_bos(&ids), bos);
            let body = if bos { &ids[1..] } else { &ids[..] };
            assert_eq!(tokenizer.decode(body), text.as_bytes(), "{text:?} {bos} {space}");
        }
        let first = tokenizer.encode("to", false, true).unwrap()[0];
        assert_eq!(tokenizer.token_bytes(first).unwrap(), if space { &b" t"[..] } else { b"t" });
    }
}

#[test]
fn row_16_every_end_token_ends() {
    let ends =
        |change: &dyn Fn(&mut GgufWriter<'static>)| loaded(|w| change(w)).2.ends_of_generation().to_vec();
    assert_eq!(ends(&|_| {}), [0, 1], "eos by key, <|im_end|> by name");
    assert_eq!(ends(&set("tokenizer.ggml.eos_token_id", 1_u32)), [0, 1]);
    assert_eq!(ends(&remove("tokenizer.ggml.eos_token_id")), [0, 1]);
    assert_eq!(ends(&set("tokenizer.ggml.eot_token_id", 7_u32)), [0, 1, 7]);
    assert_eq!(ends(&set("tokenizer.ggml.eom_token_id", 8_u64)), [0, 1, 8]);
    // Markers are not shown, even where the file forgot their type.
    let (_, _, tokenizer) = loaded(remove("tokenizer.ggml.token_type"));
    let ids = tokenizer.encode("hello<|im_end|>", false, true).unwrap();
    assert_eq!(ids.last(), Some(&1));
    assert_eq!(tokenizer.decode_visible(&ids), b"hello");
    let mut decoder = StreamDecoder::new(false);
    assert_eq!(ids.iter().map(|&id| decoder.push(&tokenizer, id)).collect::<String>(), "hello");
}

#[test]
fn streams_hold_back_parts_of_characters() {
    let tokenizer = loaded(|_| {}).2;
    let byte = |byte: u8| u32::from(byte) + 2;
    let mut decoder = StreamDecoder::new(false);
    let texts: Vec<String> = "é😀!".bytes().map(|b| decoder.push(&tokenizer, byte(b))).collect();
    assert_eq!(texts, ["", "é", "", "", "", "😀", "!"]);
    assert_eq!(decoder.push(&tokenizer, byte(0xe4)), "");
    assert_eq!(decoder.push(&tokenizer, byte(b'x')), "\u{fffd}x");
    assert_eq!(decoder.push(&tokenizer, byte(0xff)), "\u{fffd}");
    assert_eq!(decoder.push(&tokenizer, 264), "\u{fffd}", "past the vocabulary");
    assert_eq!(decoder.push(&tokenizer, byte(0xf0)), "");
    assert_eq!((decoder.finish(), decoder.finish()), ("\u{fffd}".into(), String::new()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn row_15_random_text_round_trips_and_streams(text in any::<String>(), special in any::<bool>()) {
        let (_, _, tokenizer) = loaded(|_| {});
        let ids = tokenizer.encode(&text, false, special).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids), text.as_bytes());
        let mut decoder = StreamDecoder::new(true);
        let mut streamed: String = ids.iter().map(|&id| decoder.push(&tokenizer, id)).collect();
        streamed += &decoder.finish();
        prop_assert_eq!(streamed, text);
    }
}

#[test]
fn row_15_a_megabyte_of_random_text_round_trips() {
    let tokenizer = story_tokenizer();
    let mut state = 1_u64;
    let mut text = String::new();
    while text.len() < 1 << 20 {
        // A linear congruential generator (Knuth's constants); half plain ASCII, half any character.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let range = if state >> 63 == 0 { 128 } else { 0x11_0000 };
        text.extend(char::from_u32(((state >> 33) as u32) % range));
    }
    assert_eq!(tokenizer.decode(&tokenizer.encode(&text, false, true).unwrap()), text.as_bytes());
}
