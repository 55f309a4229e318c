//! Each architecture: its keys and tensors, the description that follows, and what it refuses.

use formats::gguf::{Container, GgufFile, GgufWriter, Value};
use formats::model::{
    Activation, ModelDescription, Norm, PredictorInput, Requirement, RopeScaling, RopeStyle,
};
use formats::{FormatError, Result};

use crate::sample::{self, SIZES, Sizes, says, zeros};

/// The sample as another architecture: the same sizes under its keys.
fn renamed(architecture: &str, sizes: Sizes) -> GgufWriter<'static> {
    let mut w = sample::model(sizes);
    w.set("general.architecture", architecture);
    let keys: [(&str, Value); 7] = [
        ("block_count", Value::U32(sizes.n_layer as u32)),
        ("context_length", Value::U32(64)),
        ("embedding_length", Value::U32(sizes.n_embd as u32)),
        ("feed_forward_length", Value::U32(sizes.n_ff as u32)),
        ("attention.head_count", Value::U32(sizes.n_head as u32)),
        ("attention.head_count_kv", Value::U32(sizes.n_head_kv as u32)),
        ("attention.layer_norm_rms_epsilon", Value::F32(1e-6)),
    ];
    for (suffix, value) in keys {
        w.remove(&format!("llama.{suffix}")).set(&format!("{architecture}.{suffix}"), value);
    }
    w.remove("llama.rope.freq_base").remove("llama.rope.dimension_count");
    w
}

fn describe(writer: &GgufWriter<'_>) -> Result<ModelDescription> {
    ModelDescription::describe(&GgufFile::parse("sample.gguf", writer.to_bytes())?)
}

fn refused(writer: &GgufWriter<'_>) -> FormatError {
    describe(writer).unwrap_err()
}

/// Adds a vector of zeros to each layer.
fn per_layer(w: &mut GgufWriter<'static>, n_layer: u64, parts: &[(&str, u64)]) {
    for layer in 0..n_layer {
        for (part, size) in parts {
            zeros(w, &format!("blk.{layer}.{part}"), &[*size]);
        }
    }
}

#[test]
fn mistral() {
    let mut w = renamed("mistral", SIZES);
    w.set("mistral.rope.freq_base", 1e6_f32);
    let model = describe(&w).unwrap();
    assert_eq!((model.rope.style, model.rope.base, model.rope.dim), (RopeStyle::Interleaved, 1e6, 8));
    assert_eq!((model.layers[0].ffn.activation, model.norm), (Activation::Silu, Norm::Rms));
    assert!(model.requirements().is_empty());
    for name in ["mistral", "llama"] {
        let mut w = renamed(name, SIZES);
        w.set(&format!("{name}.attention.sliding_window"), 16_u32);
        let model = describe(&w).unwrap();
        assert!(model.layers.iter().all(|layer| layer.window == Some(16)));
        assert_eq!(model.requirements(), [Requirement::SlidingWindow]);
    }
}

#[test]
fn qwen2() {
    let mut w = renamed("qwen2", SIZES);
    per_layer(&mut w, 2, &[("attn_q.bias", 32), ("attn_k.bias", 16), ("attn_v.bias", 16)]);
    let model = describe(&w).unwrap();
    assert_eq!(model.rope.style, RopeStyle::Split);
    let attention = &model.layers[1].attention;
    assert!([&attention.q, &attention.k, &attention.v].iter().all(|linear| linear.bias.is_some()));
    assert!(attention.o.bias.is_none() && model.requirements().is_empty());
    zeros(&mut w, "blk.1.attn_k.bias", &[32]);
    says(&refused(&w), &["blk.1.attn_k.bias", "[32]", "[16]"]);
}

#[test]
fn qwen3() {
    let mut w = renamed("qwen3", SIZES);
    says(&refused(&w), &["blk.0.attn_q_norm.weight", "is missing", "qwen3"]);
    per_layer(&mut w, 2, &[("attn_q_norm.weight", 8), ("attn_k_norm.weight", 8)]);
    let model = describe(&w).unwrap();
    assert_eq!(model.layers[1].attention.q_norm.as_ref().unwrap().name, "blk.1.attn_q_norm.weight");
    assert_eq!(model.layers[1].attention.k_norm.as_ref().unwrap().dims, [8]);
    assert_eq!((model.rope.style, model.requirements()), (RopeStyle::Split, vec![Requirement::QkNorm]));
    let file = GgufFile::parse("sample.gguf", w.to_bytes()).unwrap();
    says(&ModelDescription::from_gguf(&file).unwrap_err(), &["`qwen3`", "norms of queries and keys"]);
    model.check_supported(&[Requirement::QkNorm]).unwrap();
    zeros(&mut w, "blk.0.attn_k_norm.weight", &[16]);
    says(&refused(&w), &["blk.0.attn_k_norm.weight", "[16]", "[8]", "element of a head"]);
}

#[test]
fn gemma3() {
    let sizes = Sizes { n_layer: 7, head_dim: 16, ..SIZES };
    let mut w = renamed("gemma3", sizes);
    w.set("gemma3.attention.key_length", 16_u32).set("gemma3.attention.value_length", 16_u32);
    let norms = [
        ("attn_q_norm.weight", 16),
        ("attn_k_norm.weight", 16),
        ("post_attention_norm.weight", 32),
        ("post_ffw_norm.weight", 32),
    ];
    per_layer(&mut w, 7, &norms);
    says(&refused(&w), &["gemma3.attention.sliding_window", "is missing"]);
    w.set("gemma3.attention.sliding_window", 512_u32);
    w.set("gemma3.rope.scaling.type", "linear").set("gemma3.rope.scaling.factor", 8.0_f32);
    let model = describe(&w).unwrap();
    assert_eq!(model.embedding_scale, 32_f32.sqrt());
    assert_eq!((model.rope.base, model.rope.scaling), (1e6, RopeScaling::Linear { factor: 8.0 }));
    let windows: Vec<_> = model.layers.iter().map(|layer| layer.window.is_some()).collect();
    assert_eq!(windows, [true, true, true, true, true, false, true]);
    let (local, global) = (&model.layers[0], &model.layers[5]);
    let rope = local.rope.as_ref().unwrap();
    assert_eq!((local.window, rope.base, rope.scaling), (Some(512), 10_000.0, RopeScaling::None));
    assert_eq!((rope.dim, rope.style), (16, RopeStyle::Split));
    assert!(global.window.is_none() && global.rope.is_none());
    assert_eq!(local.attn_post_norm.as_ref().unwrap().name, "blk.0.post_attention_norm.weight");
    assert_eq!(global.ffn_post_norm.as_ref().unwrap().name, "blk.5.post_ffw_norm.weight");
    assert_eq!((local.ffn.activation, local.attention.scale), (Activation::GeluTanh, None));
    assert_eq!(
        model.requirements(),
        [
            Requirement::EmbeddingScale,
            Requirement::PostNorms,
            Requirement::SlidingWindow,
            Requirement::RopePerLayer,
            Requirement::QkNorm,
            Requirement::Gelu
        ]
    );
    w.set("gemma3.attention.sliding_window_pattern", 2_u32).set("gemma3.rope.freq_base_swa", 5e3_f32);
    let model = describe(&w).unwrap();
    assert!(model.layers[1].window.is_none() && model.layers[2].window.is_some());
    assert_eq!(model.layers[0].rope.as_ref().unwrap().base, 5e3);
    w.set("gemma3.final_logit_softcapping", 30.0_f32);
    says(&refused(&w), &["gemma3.final_logit_softcapping", "soft cap"]);
}

#[test]
fn opt() {
    let mut w = renamed("opt", SIZES);
    says(&refused(&w), &["opt.attention.layer_norm_epsilon", "is missing"]);
    w.set("opt.attention.layer_norm_epsilon", 1e-5_f32);
    for layer in 0..2 {
        w.remove_tensor(&format!("blk.{layer}.ffn_gate.weight"));
    }
    let biases = ["attn_norm", "attn_q", "attn_output", "ffn_norm", "ffn_up", "ffn_down"];
    per_layer(
        &mut w,
        2,
        &biases.map(|part| (format!("{part}.bias"), 32)).each_ref().map(|(n, s)| (n.as_str(), *s)),
    );
    per_layer(&mut w, 2, &[("attn_k.bias", 16), ("attn_v.bias", 16)]);
    zeros(&mut w, "output_norm.bias", &[32]);
    says(&refused(&w), &["position_embd.weight", "is missing"]);
    zeros(&mut w, "position_embd.weight", &[32, 66]);
    let model = describe(&w).unwrap();
    let positions = model.positions.as_ref().unwrap();
    assert_eq!((positions.offset, positions.tensor.rows()), (2, 66));
    assert_eq!((model.norm, model.rms_epsilon, model.rope.dim), (Norm::Layer, 1e-5, 0));
    assert!(model.output_norm_bias.is_some());
    let layer = &model.layers[1];
    assert!(layer.attn_norm_bias.is_some() && layer.ffn_norm_bias.is_some() && !layer.parallel);
    assert_eq!((layer.ffn.activation, layer.ffn.gated), (Activation::Relu, false));
    assert_eq!(layer.ffn.gate.weight, layer.ffn.up.weight);
    assert_eq!(layer.ffn.up.bias.as_ref().unwrap().name, "blk.1.ffn_up.bias");
    assert_eq!(
        model.requirements(),
        [Requirement::LayerNorm, Requirement::LearnedPositions, Requirement::UngatedFeedForward]
    );
    zeros(&mut w, "position_embd.weight", &[32, 64]);
    assert_eq!(describe(&w).unwrap().positions.unwrap().offset, 0);
    zeros(&mut w, "position_embd.weight", &[32, 65]);
    says(&refused(&w), &["position_embd.weight", "[32, 65]", "[32, 66]"]);
}

fn falcon_sample() -> GgufWriter<'static> {
    let mut w = renamed("falcon", SIZES);
    w.set("falcon.attention.layer_norm_epsilon", 1e-5_f32);
    for layer in 0..2 {
        for part in ["ffn_gate", "ffn_norm", "attn_q", "attn_k", "attn_v"] {
            w.remove_tensor(&format!("blk.{layer}.{part}.weight"));
        }
        zeros(&mut w, &format!("blk.{layer}.attn_qkv.weight"), &[32, 64]);
    }
    per_layer(&mut w, 2, &[("attn_norm.bias", 32)]);
    zeros(&mut w, "output_norm.bias", &[32]);
    w
}

#[test]
fn falcon() {
    let mut w = falcon_sample();
    let bytes: Vec<u8> = (0..64_u8).flat_map(|row| [row; 64]).collect();
    w.tensor("blk.1.attn_qkv.weight", engine_core::DType::F16, &[32, 64], bytes).unwrap();
    let file = GgufFile::parse("sample.gguf", w.to_bytes()).unwrap();
    let model = ModelDescription::describe(&file).unwrap();
    let layer = &model.layers[1];
    assert!(
        layer.parallel && layer.attn_norm == layer.ffn_norm && layer.attn_norm_bias == layer.ffn_norm_bias
    );
    for (linear, rows) in
        [(&layer.attention.q, 0..32), (&layer.attention.k, 32..48), (&layer.attention.v, 48..64)]
    {
        assert_eq!(linear.weight.dims, [32, rows.len() as u64]);
        let wanted: Vec<u8> = rows.flat_map(|row| [row; 64]).collect();
        assert_eq!(file.tensor_bytes(&linear.weight), wanted, "{}", linear.weight.name);
    }
    assert_eq!(layer.attention.k.weight.name, "blk.1.attn_qkv.weight[32..48]");
    assert_eq!((layer.ffn.activation, model.rope.style), (Activation::GeluErf, RopeStyle::Split));
    let mut wanted = vec![
        Requirement::LayerNorm,
        Requirement::ParallelLayers,
        Requirement::FusedQkv,
        Requirement::UngatedFeedForward,
        Requirement::Gelu,
    ];
    assert_eq!(model.requirements(), wanted);
    // The larger models have a norm each.
    per_layer(&mut w, 2, &[("attn_norm_2.weight", 32), ("attn_norm_2.bias", 32)]);
    let model = describe(&w).unwrap();
    assert_eq!(model.layers[0].attn_norm.name, "blk.0.attn_norm_2.weight");
    assert_eq!(model.layers[0].ffn_norm.name, "blk.0.attn_norm.weight");
    // PowerInfer's: ReLU, and predictors that see the layer's input.
    w.set_container(Container::PowerInfer);
    for layer in 0..2 {
        w.rename_tensor(&format!("blk.{layer}.ffn_down.weight"), &format!("blk.{layer}.ffn_down_t.weight"));
        zeros(&mut w, &format!("blk.{layer}.fc1.weight"), &[32, 4]);
        zeros(&mut w, &format!("blk.{layer}.fc2.weight"), &[4, 32]);
    }
    let model = describe(&w).unwrap();
    assert_eq!(model.layers[0].ffn.activation, Activation::Relu);
    assert_eq!(model.prediction.as_ref().unwrap().input, PredictorInput::LayerInput);
    wanted.retain(|requirement| *requirement != Requirement::Gelu);
    wanted.push(Requirement::PredictorFromLayerInput);
    assert_eq!(model.requirements(), wanted);
    zeros(&mut w, "blk.1.attn_qkv.weight", &[32, 96]);
    says(&refused(&w), &["blk.1.attn_qkv.weight", "[32, 96]", "[32, 64]"]);
}

#[test]
fn falcon_by_group() {
    let mut w = falcon_sample();
    for layer in 0..2 {
        w.remove_tensor(&format!("blk.{layer}.attn_qkv.weight"));
        zeros(&mut w, &format!("blk.{layer}.attn_qkv_by_group.weight"), &[32, 64]);
        zeros(&mut w, &format!("blk.{layer}.attn_qkv_by_group.bias"), &[64]);
    }
    let model = describe(&w).unwrap();
    let attention = &model.layers[1].attention;
    // Two groups of two query heads, a key and a value, 8 rows each.
    assert_eq!(attention.q.rows, [0..16, 32..48]);
    assert_eq!(
        (&attention.k.rows[..], &attention.v.rows[..]),
        (&[16..24, 48..56][..], &[24..32, 56..64][..])
    );
    assert_eq!((attention.q.outputs(), attention.k.outputs(), attention.o.outputs()), (32, 16, 32));
    assert!(attention.v.bias.is_some() && attention.is_fused_by_group() && !attention.is_fused());
    assert!(model.requirements().contains(&Requirement::FusedByGroup));
    w.tensor("blk.0.attn_qkv_by_group.bias", engine_core::DType::Q8_0, &[64], vec![0_u8; 68]).unwrap();
    says(&refused(&w), &["blk.0.attn_qkv_by_group.bias", "Q8_0", "store it as F32"]);
    zeros(&mut w, "blk.0.attn_qkv_by_group.bias", &[64]);
    zeros(&mut w, "blk.1.attn_qkv_by_group.weight", &[32, 60]);
    says(&refused(&w), &["blk.1.attn_qkv_by_group.weight", "[32, 60]", "[32, 64]"]);
}

#[test]
fn bamboo() {
    let model = describe(&renamed("bamboo", SIZES)).unwrap();
    assert_eq!(model.layers[1].ffn.activation, Activation::DRelu);
    assert!(model.requirements().is_empty());
    let mut w = renamed("bamboo", SIZES);
    w.set_container(Container::PowerInfer);
    assert_eq!(describe(&w).unwrap().layers[1].ffn.activation, Activation::DRelu);
}

#[test]
fn a_mixture_of_experts_is_refused_by_name() {
    let mut w = renamed("qwen2", SIZES);
    w.set("qwen2.expert_count", 8_u32);
    says(&refused(&w), &["qwen2.expert_count", "8 experts"]);
}
