//! A small model made by formula, against golden logits from `synthetic.py`: heads wider than their share of the
//! residual, and every way of stretching the context (facts/traps.md, rows 9 and 10).

use crate::stack::{Outcome, Setup, ensure};
use engine_core::DType;
use formats::Container;
use formats::gguf::GgufWriter;
use libtest_mimic::{Failed, Trial};
use std::path::Path;

const WIDTH: u64 = 64;
const LAYERS: u64 = 2;
const HEADS: u64 = 4;
const KV_HEADS: u64 = 2;
const HEAD: u64 = 32;
const NEURONS: u64 = 96;
const VOCABULARY: u64 = 50;
const TOKENS: u32 = 40;

/// The first logits after 40 ids, printed by `synthetic.py`.
const GOLDEN: [(&str, [f32; 6]); 5] = [
    ("plain", [0.62777, 0.27962, 0.92573, -1.02043, -0.00814, -1.30927]),
    ("base", [1.03634, 0.66577, -0.20049, -1.35106, -0.83169, -2.37389]),
    ("linear", [0.89607, 1.04912, 0.02240, -2.13554, -0.13499, -1.65142]),
    ("yarn", [0.62847, 1.57287, -0.79224, -1.68357, -0.20537, -2.60757]),
    ("factors", [1.03388, 0.03661, 0.32697, -1.53871, -0.20086, -1.67343]),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for device in ["cpu", "reference"] {
        for (variant, golden) in GOLDEN {
            let name = format!("synthetic::{variant}::{device}");
            trials.push(Trial::test(name, move || answers(device, variant, &golden)));
        }
    }
    trials
}

fn answers(device: &'static str, variant: &str, golden: &[f32; 6]) -> Outcome {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("synthetic.gguf");
    write(&path, variant)?;
    let mut session = Setup::on(device).load(&path)?.session()?;
    let ids: Vec<u32> = (0..TOKENS).map(|index| index * 7 % VOCABULARY as u32).collect();
    let logits = session.prefill(&ids)?;
    let worst = logits.iter().zip(golden).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    ensure(worst < 1e-3, || format!("logits {:?}, wanted {golden:?}", &logits[..6]))
}

/// Numbers in -0.5..0.5 that any language computes alike.
fn values(seed: u64, count: u64) -> Vec<f32> {
    let value = |index: u64| {
        let mixed = (index.wrapping_mul(2_654_435_761) + seed * 40_503 + 12_345) & 0xffff_ffff;
        let mixed = ((mixed ^ (mixed >> 15)).wrapping_mul(2_246_822_519)) & 0xffff_ffff;
        (mixed as f64 / 4_294_967_296.0 - 0.5) as f32
    };
    (0..count).map(value).collect()
}

fn bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn write(path: &Path, variant: &str) -> Result<(), Failed> {
    let mut file = GgufWriter::new(Container::Gguf);
    file.set("general.architecture", "llama");
    for (key, value) in [
        ("block_count", LAYERS),
        ("embedding_length", WIDTH),
        ("context_length", 64),
        ("feed_forward_length", NEURONS),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD),
        ("attention.value_length", HEAD),
        ("rope.dimension_count", HEAD),
    ] {
        file.set(&format!("llama.{key}"), u32::try_from(value)?);
    }
    file.set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
    match variant {
        "base" => drop(file.set("llama.rope.freq_base", 1e6f32)),
        "linear" | "yarn" => {
            file.set("llama.rope.scaling.type", variant);
            file.set("llama.rope.scaling.factor", 4f32);
            file.set("llama.rope.scaling.original_context_length", 16u32);
        }
        "factors" => {
            let factors = (0..HEAD / 2).map(|pair| 1.0 + pair as f32 / 4.0);
            file.tensor("rope_freqs.weight", DType::F32, &[HEAD / 2], bytes(factors))?;
        }
        _ => {}
    }
    let mut matrix = |name: &str, seed, rows: u64, columns: u64| -> Result<(), Failed> {
        let data = bytes(values(seed, rows * columns).into_iter().map(|value| value * 0.5));
        file.tensor(name, DType::F32, &[columns, rows], data)?;
        Ok(())
    };
    matrix("token_embd.weight", 1, VOCABULARY, WIDTH)?;
    matrix("output.weight", 2, VOCABULARY, WIDTH)?;
    for layer in 0..LAYERS {
        let mut part = |name: &str, seed, rows, columns| {
            matrix(&format!("blk.{layer}.{name}.weight"), 100 * (layer + 1) + seed, rows, columns)
        };
        part("attn_q", 0, HEADS * HEAD, WIDTH)?;
        part("attn_k", 1, KV_HEADS * HEAD, WIDTH)?;
        part("attn_v", 2, KV_HEADS * HEAD, WIDTH)?;
        part("attn_output", 3, WIDTH, HEADS * HEAD)?;
        part("ffn_gate", 4, NEURONS, WIDTH)?;
        part("ffn_up", 5, NEURONS, WIDTH)?;
        part("ffn_down", 6, WIDTH, NEURONS)?;
    }
    let mut norm = |name: &str, seed| -> Result<(), Failed> {
        let data = bytes(values(seed, WIDTH).into_iter().map(|value| 1.0 + value));
        file.tensor(name, DType::F32, &[WIDTH], data)?;
        Ok(())
    };
    norm("output_norm.weight", 3)?;
    for layer in 0..LAYERS {
        norm(&format!("blk.{layer}.attn_norm.weight"), 100 * (layer + 1) + 10)?;
        norm(&format!("blk.{layer}.ffn_norm.weight"), 100 * (layer + 1) + 11)?;
    }
    file.write(path)?;
    Ok(())
}
