//! Metadata laid over the file's own, what is assumed where the file lacks a key, and how much a header may hold.

use formats::gguf::Value;
use formats::model::RopeScaling;
use formats::tokenizer::TokenizerOptions;
use formats::{GgufFile, ModelDescription, Tokenizer};

use crate::allocations;
use crate::sample::{SIZES, loaded, model, remove, says};

fn file() -> GgufFile {
    let mut writer = model(SIZES);
    writer.set("llama.rope.freq_base", 500.0_f32).set("llama.some.flag", true).set("general.name", "old");
    GgufFile::parse("sample", writer.to_bytes()).unwrap()
}

/// facts/traps.md, row 10: what the caller says about the rope wins over the file.
#[test]
fn what_the_caller_says_wins() {
    let mut file = file();
    let done = file.override_key("llama.rope.freq_base", "1e6").unwrap();
    assert_eq!((done.value, done.before), (Value::F32(1e6), Some(Value::F32(500.0))));
    assert_eq!(file.override_key("llama.rope.scaling.type", "linear").unwrap().before, None);
    file.override_key("llama.rope.scaling.factor", "4").unwrap();
    file.override_key("general.name", "new").unwrap();
    let model = ModelDescription::from_gguf(&file).unwrap();
    assert_eq!(model.rope.base, 1e6);
    assert_eq!(model.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(model.name, "new");
    let key = "tokenizer.ggml.pre";
    file.override_key(key, "gpt-2").unwrap();
    assert!(Tokenizer::from_gguf(&file, &TokenizerOptions::default()).is_ok());
    file.override_key(key, "invented").unwrap();
    says(&Tokenizer::from_gguf(&file, &TokenizerOptions::default()).unwrap_err(), &["`invented`"]);
}

#[test]
fn a_new_key_has_the_type_that_it_looks_like() {
    let mut file = file();
    for (text, value) in [
        ("true", Value::Bool(true)),
        ("7", Value::U64(7)),
        ("-7", Value::I64(-7)),
        ("7.5", Value::F64(7.5)),
        ("inf", Value::from("inf")),
        ("", Value::from("")),
    ] {
        assert_eq!(file.override_key(&format!("x.{text}"), text).unwrap().value, value);
    }
}

#[test]
fn what_cannot_be_overridden_says_so() {
    let mut file = file();
    for (key, text, wanted) in [
        ("llama.block_count", "many", "a value of type u32 is wanted"),
        ("llama.block_count", "-1", "a value of type u32 is wanted"),
        ("llama.rope.freq_base", "nan", "a value of type f32 is wanted"),
        ("llama.some.flag", "1", "a value of type bool is wanted"),
        ("tokenizer.ggml.tokens", "a", "it is an array"),
        ("general.alignment", "64", "the file has been read by it"),
        ("split.count", "1", "the file has been read by it"),
    ] {
        says(&file.override_key(key, text).unwrap_err(), &["sample", key, wanted]);
    }
    // And a value that fits its type is still checked where it is read.
    file.override_key("llama.block_count", "0").unwrap();
    says(&ModelDescription::from_gguf(&file).unwrap_err(), &["llama.block_count"]);
}

#[test]
fn assumptions_are_told_from_other_notices() {
    assert_eq!(loaded(|_| {}).2.assumptions().count(), 0);
    for key in ["tokenizer.ggml.pre", "tokenizer.ggml.token_type"] {
        let (_, _, tokenizer) = loaded(remove(key));
        let assumed: Vec<&str> = tokenizer.assumptions().collect();
        assert!(assumed.len() == 1 && assumed[0].contains(key), "{assumed:?}");
    }
}

/// Each takes more memory than the twelve bytes of it in the file, which a sparse file need not even have.
#[test]
fn arrays_within_arrays_are_few() {
    let header = |count: u64| {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend([0_u64, 1, 1].iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend(b"k");
        bytes.extend([9_u32, 9].iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend(count.to_le_bytes());
        bytes.resize(bytes.len() + 12 * count as usize + 64, 0);
        GgufFile::parse("nested", bytes).map(drop)
    };
    header(1 << 16).unwrap();
    says(&header((1 << 16) + 1).unwrap_err(), &["nested", "key `k`", "65537 arrays; 65536 arrays within"]);
    allocations::assert_small();
}
