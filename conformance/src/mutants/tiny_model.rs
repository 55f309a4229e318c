//! One layer of a model over three submissions: what the divergence finder is proved with.

use crate::diverge::{Source, Submission};
use crate::rng::Rng;
use crate::values::{ValueClass, f32_bytes, numbers, weights};
use engine_core::backend::{BufferId, BufferView, SequenceSpan};
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Ffn, NormKind, OperationKind, OperationList, Rope, RopeScaling,
    RopeStyle, Selection, SlotId, SlotRole,
};
use engine_core::{ClusterRange, DType, Result, TensorType};
use std::collections::BTreeMap;

/// Operations of a submission.
pub const OPERATIONS: u64 = 9;

const WIDTH: u64 = 64;
const HEADS: u32 = 4;
const HEAD_DIM: u32 = 16;
const NEURONS: u64 = 96;
/// Submissions: tokens, and positions before them.
pub const STEPS: [(u32, u32); 3] = [(4, 0), (1, 4), (1, 5)];
/// The active neurons; the mask selects the one after them, which a device must not touch all the same.
const ACTIVE: (u32, u32) = (3, 50);

/// The model, and how far it has come.
#[derive(Default)]
pub struct TinyModel {
    step: usize,
}

impl TinyModel {
    /// Before its first submission.
    pub fn new() -> TinyModel {
        TinyModel { step: 0 }
    }
}

fn list() -> Result<(OperationList, u32)> {
    let mut l = OperationList::new(4);
    let constant = SlotRole::Constant(BufferView { buffer: BufferId(0), offset: 0 });
    let square = TensorType::matrix(DType::Q8_0, WIDTH, WIDTH)?;
    let rows = TensorType::matrix(DType::F32, NEURONS, WIDTH)?;
    let residual = l.per_token("residual", SlotRole::Input, DType::F32, WIDTH)?;
    let scratch = |l: &mut OperationList, name: &str| l.per_token(name, SlotRole::Scratch, DType::F32, WIDTH);
    let (normed, q, k, v) =
        (scratch(&mut l, "normed")?, scratch(&mut l, "q")?, scratch(&mut l, "k")?, scratch(&mut l, "v")?);
    let (mixed, joined) = (scratch(&mut l, "mixed")?, scratch(&mut l, "joined")?);
    let output = l.per_token("output", SlotRole::Output, DType::F32, WIDTH)?;
    let mask = l.per_token("mask", SlotRole::Input, DType::U8, NEURONS)?;
    let norm = l.fixed("norm", constant, TensorType::f32_vector(WIDTH));
    let [wq, wk, wv] = ["wq", "wk", "wv"].map(|name| l.fixed(name, constant, square));
    let [gate, up, down] = ["gate", "up", "down"].map(|name| l.fixed(name, constant, rows));
    let cache = l.fixed("cache", SlotRole::State, TensorType::matrix(DType::F16, 8, 2 * WIDTH)?);
    let linear = |weight, output| OperationKind::Linear {
        input: normed,
        weight,
        bias: None,
        output,
        accumulate: false,
    };
    let (kv_heads, head_dim) = (HEADS, HEAD_DIM);
    let rope = Rope {
        input: q,
        output: q,
        factors: None,
        style: RopeStyle::Halves,
        head_dim,
        rotary_dim: head_dim,
        base: 10000.0,
        scaling: RopeScaling::None,
    };
    let ffn = Ffn {
        input: joined,
        gate: Some(gate),
        up,
        down,
        gate_low: None,
        up_low: None,
        gate_bias: None,
        up_bias: None,
        output,
        hidden: None,
        active_count: None,
        down_layout: DownLayout::NeuronRows,
        function: Activation::Silu,
        up_function: Activation::Identity,
        selection: Selection::Mask(mask),
        accumulate: false,
    };
    let norm_kind = OperationKind::Norm {
        norm: NormKind::Rms,
        epsilon: 1e-5,
        input: residual,
        weight: norm,
        bias: None,
        output: normed,
    };
    let attention = OperationKind::Attention {
        query: q,
        cache,
        output: mixed,
        heads: HEADS,
        kv_heads,
        head_dim,
        scale: 0.25,
        window: None,
        soft_cap: None,
    };
    for (label, kind) in [
        ("blk.0.attn_norm", norm_kind),
        ("blk.0.attn_q", linear(wq, q)),
        ("blk.0.attn_k", linear(wk, k)),
        ("blk.0.attn_v", linear(wv, v)),
        ("blk.0.rope", OperationKind::Rope(rope)),
        ("blk.0.kv_append", OperationKind::KvAppend { key: k, value: v, cache, kv_heads, head_dim }),
        ("blk.0.attention", attention),
        ("blk.0.add", OperationKind::Add { left: residual, right: mixed, output: joined }),
        ("blk.0.ffn", OperationKind::Ffn(ffn)),
    ] {
        l.push(label, kind, Arithmetic::F32);
    }
    Ok((l, cache.0))
}

impl Source for TinyModel {
    fn next(&mut self) -> Result<Option<Submission>> {
        let Some(&(tokens, past)) = STEPS.get(self.step) else { return Ok(None) };
        self.step += 1;
        let (list, cache) = list()?;
        let ffn = list.operations.len() as u32 - 1;
        Ok(Some(Submission {
            list,
            tokens,
            sequences: vec![SequenceSpan { first_token: 0, tokens, past, cache_base: 0 }],
            ranges: vec![(ffn, vec![ClusterRange::new(ACTIVE.0, ACTIVE.1)])],
            keys: BTreeMap::from([(cache, "blk.0.cache".to_owned())]),
        }))
    }

    fn bytes(&mut self, submission: &Submission, slot: SlotId) -> Result<Vec<u8>> {
        let Some(slot) = submission.list.slot(slot) else { return Ok(Vec::new()) };
        let mut rng = Rng::named(self.step as u64 * u64::from(slot.per_token), &slot.name);
        Ok(if slot.tensor.dtype == DType::U8 {
            let neurons = slot.tensor.columns as u32;
            (0..slot.tensor.rows).flat_map(|_| (0..neurons).map(|i| u8::from(i % 2 == 0))).collect()
        } else if slot.per_token {
            f32_bytes(&numbers(
                &mut rng,
                ValueClass::Plain,
                (slot.tensor.rows * slot.tensor.columns) as usize,
            ))
        } else {
            weights(&mut rng, &slot.tensor, ValueClass::Plain)
        })
    }
}
