//! A small valid model, as a writer to be changed and as raw bytes to be damaged.

use engine_core::DType;
use formats::gguf::{Array, Container, GgufFile, GgufWriter, Value};
use formats::model::ModelDescription;
use formats::tokenizer::{Tokenizer, TokenizerOptions};
use formats::{FormatError, Result};

/// Sizes of a sample model.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) n_embd: u64,
    pub(crate) n_head: u64,
    pub(crate) n_head_kv: u64,
    pub(crate) head_dim: u64,
    pub(crate) n_ff: u64,
    pub(crate) n_layer: u64,
    pub(crate) rows: u64,
}

pub(crate) const SIZES: Sizes =
    Sizes { n_embd: 32, n_head: 4, n_head_kv: 2, head_dim: 8, n_ff: 32, n_layer: 2, rows: 264 };

/// The character for a byte in GPT-2's alphabet, by its published definition.
fn letter(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let shifted = (0..byte).filter(|&earlier| !printable(earlier)).count() as u32;
    if printable(byte) { char::from(byte) } else { char::from_u32(256 + shifted).unwrap() }
}

/// Two markers, every byte, and what the merges make: `he`, `ll`, `llo`, `hello`, ` t`, `12`.
pub(crate) fn tokens() -> Vec<String> {
    let markers = ["<|endoftext|>", "<|im_end|>"].map(String::from);
    let bytes = (0..=255).map(|byte| letter(byte).to_string());
    let merged = ["he", "ll", "llo", "hello", "Ġt", "12"].map(String::from);
    markers.into_iter().chain(bytes).chain(merged).collect()
}

pub(crate) const MERGES: [&str; 6] = ["h e", "l l", "ll o", "he llo", "Ġ t", "1 2"];

pub(crate) fn strings<S: AsRef<[u8]>>(strings: impl IntoIterator<Item = S>) -> Array {
    Array::Strings(strings.into_iter().collect())
}

/// A writer of a model of these sizes, all weights 0.
pub(crate) fn model(sizes: Sizes) -> GgufWriter<'static> {
    let Sizes { n_embd, n_head, n_head_kv, head_dim, n_ff, n_layer, rows } = sizes;
    let mut w = GgufWriter::new(Container::Gguf);
    w.set("general.architecture", "llama").set("general.name", "sample");
    w.set("llama.block_count", n_layer as u32).set("llama.context_length", 64_u32);
    w.set("llama.embedding_length", n_embd as u32).set("llama.feed_forward_length", n_ff as u32);
    w.set("llama.attention.head_count", n_head as u32).set("llama.attention.head_count_kv", n_head_kv as u32);
    w.set("llama.attention.layer_norm_rms_epsilon", 1e-5_f32).set("llama.rope.freq_base", 10_000.0_f32);
    w.set("llama.rope.dimension_count", head_dim as u32);
    w.set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", "smollm");
    let kinds = (0..tokens().len()).map(|id| if id < 2 { 3 } else { 1 }).collect();
    w.set("tokenizer.ggml.tokens", strings(tokens())).set("tokenizer.ggml.token_type", Array::I32(kinds));
    w.set("tokenizer.ggml.merges", strings(MERGES));
    w.set("tokenizer.ggml.bos_token_id", 0_u32).set("tokenizer.ggml.eos_token_id", 0_u32);
    zeros(&mut w, "token_embd.weight", &[n_embd, rows]);
    zeros(&mut w, "output_norm.weight", &[n_embd]);
    for layer in 0..n_layer {
        for (part, dims) in [
            ("attn_norm", &[n_embd][..]),
            ("attn_q", &[n_embd, n_head * head_dim]),
            ("attn_k", &[n_embd, n_head_kv * head_dim]),
            ("attn_v", &[n_embd, n_head_kv * head_dim]),
            ("attn_output", &[n_head * head_dim, n_embd]),
            ("ffn_norm", &[n_embd]),
            ("ffn_gate", &[n_embd, n_ff]),
            ("ffn_up", &[n_embd, n_ff]),
            ("ffn_down", &[n_ff, n_embd]),
        ] {
            zeros(&mut w, &format!("blk.{layer}.{part}.weight"), dims);
        }
    }
    w
}

/// The change that sets a key.
pub(crate) fn set(key: &str, value: impl Into<Value>) -> impl Fn(&mut GgufWriter<'static>) {
    let value = value.into();
    move |writer| {
        writer.set(key, value.clone());
    }
}

/// The change that removes a key.
pub(crate) fn remove(key: &str) -> impl Fn(&mut GgufWriter<'static>) {
    move |writer| {
        writer.remove(key);
    }
}

/// The change that chooses the container.
pub(crate) fn set_container(container: Container) -> impl Fn(&mut GgufWriter<'static>) {
    move |writer| {
        writer.set_container(container);
    }
}

/// Adds a tensor of zeros, F16.
pub(crate) fn zeros(writer: &mut GgufWriter<'static>, name: &str, dims: &[u64]) {
    let bytes = vec![0; dims.iter().product::<u64>() as usize * 2];
    writer.tensor(name, DType::F16, dims, bytes).unwrap();
}

/// All that loading a model reads.
pub(crate) fn load(bytes: Vec<u8>) -> Result<(GgufFile, ModelDescription, Tokenizer)> {
    let file = GgufFile::parse("sample.gguf", bytes)?;
    let model = ModelDescription::from_gguf(&file)?;
    let tokenizer = Tokenizer::from_gguf(&file, &TokenizerOptions::default())?;
    Ok((file, model, tokenizer))
}

/// The error of loading what `change` makes of the sample.
pub(crate) fn refused(change: impl FnOnce(&mut GgufWriter<'static>)) -> FormatError {
    let mut writer = model(SIZES);
    change(&mut writer);
    load(writer.to_bytes()).map(drop).unwrap_err()
}

/// What loading gives for what `change` makes of the sample.
pub(crate) fn loaded(
    change: impl FnOnce(&mut GgufWriter<'static>),
) -> (GgufFile, ModelDescription, Tokenizer) {
    let mut writer = model(SIZES);
    change(&mut writer);
    load(writer.to_bytes()).unwrap()
}

/// Panics unless the error's text, on one line, has all of `parts`.
#[track_caller]
pub(crate) fn says(error: &FormatError, parts: &[&str]) {
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn the_sample_is_valid() {
    let (_, model, tokenizer) = loaded(|_| {});
    assert!(
        model.notices.is_empty() && tokenizer.notices().is_empty(),
        "{:?} {:?}",
        model.notices,
        tokenizer.notices()
    );
    let ids = tokenizer.encode("hello to 123", false, false).unwrap();
    let texts: Vec<_> = ids.iter().map(|&id| tokenizer.token_bytes(id).unwrap()).collect();
    assert_eq!(texts, [&b"hello"[..], b" t", b"o", b" ", b"1", b"2", b"3"]);
}
