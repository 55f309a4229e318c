//! A KV cache over several submissions: appended step by step, attended to, exported, compared with the canonical
//! layout that the suite keeps itself.

use crate::bench::{Bench, refusal};
use crate::finding::{Fallible, Finding, Outcome};
use crate::problem::{CacheContent, Content, Problem};
use crate::rng::Rng;
use crate::run::{Outputs, prepare};
use crate::spec::{AttentionSpec, Spec};
use crate::values::{ValueClass, f32_bytes, numbers, u16_bytes};
use engine_core::DType;
use engine_core::backend::SequenceSpan;
use engine_core::operation::{Arithmetic, OperationKind, SlotId};
use half::f16;

/// Tokens of the steps: a prefill, then decoding, then a second chunk.
const STEPS: [u32; 5] = [5, 1, 1, 3, 1];

struct Step {
    problem: Problem,
    output: SlotId,
    cache: SlotId,
}

/// Append and attention in one list over a cache that is not filled beforehand.
fn step(
    spec: &AttentionSpec,
    positions: u32,
    values: [Vec<f32>; 3],
    past: u32,
    tokens: u32,
) -> Fallible<Step> {
    let mut p = Problem::new(STEPS[0], tokens);
    let (kv_heads, head_dim) = (spec.kv_heads, spec.head_dim);
    let columns = u64::from(kv_heads * head_dim);
    let rows = |values: &[f32], columns: u64| {
        let mut bytes = f32_bytes(values);
        bytes.resize((u64::from(STEPS[0]) * columns * 4) as usize, crate::values::FILL);
        bytes
    };
    let key = p.rows_in("key", DType::F32, columns, rows(&values[0], columns))?;
    let value = p.rows_in("value", DType::F32, columns, rows(&values[1], columns))?;
    let query_columns = u64::from(spec.heads * head_dim);
    let query = p.rows_in("query", DType::F32, query_columns, rows(&values[2], query_columns))?;
    let size = positions as usize * columns as usize;
    let empty = vec![0; size];
    let cache = p.cache(CacheContent {
        kv_heads,
        head_dim,
        key: empty.clone(),
        value: empty,
        filled: 0,
        read: past + tokens,
    })?;
    let output = p.rows_out("output", DType::F32, query_columns)?;
    p.push(OperationKind::KvAppend { key, value, cache, kv_heads, head_dim }, Arithmetic::F32);
    p.push(attention(spec, query, cache, output), Arithmetic::F32);
    p.sequences.push(SequenceSpan { first_token: 0, tokens, past, cache_base: 0 });
    Ok(Step { problem: p, output, cache })
}

fn attention(spec: &AttentionSpec, query: SlotId, cache: SlotId, output: SlotId) -> OperationKind {
    OperationKind::Attention {
        query,
        cache,
        output,
        heads: spec.heads,
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        scale: 1.0 / (spec.head_dim as f32).sqrt(),
        window: spec.window,
        soft_cap: spec.soft_cap,
    }
}

pub(super) fn steps(bench: &Bench<'_>, spec: &Spec, seed: u64) -> Fallible<Outcome> {
    let Spec::Attention(spec) = spec else {
        return Err(Finding::new("suite", "this property needs attention"));
    };
    let mut rng = Rng::new(seed);
    let columns = (spec.kv_heads * spec.head_dim) as usize;
    let query_columns = (spec.heads * spec.head_dim) as usize;
    let positions: u32 = STEPS.iter().sum();
    let (mut key, mut value) = (Vec::new(), Vec::new());
    let mut draw =
        |columns: usize, tokens: u32| numbers(&mut rng, ValueClass::Plain, columns * tokens as usize);
    let mut drawn: Vec<[Vec<f32>; 3]> =
        STEPS.iter().map(|&t| [draw(columns, t), draw(columns, t), draw(query_columns, t)]).collect();
    let first = step(spec, positions, drawn[0].clone(), 0, STEPS[0])?;
    if let Some(reason) = refusal(bench.dut, &first.problem) {
        return Ok(Outcome::NotSupported { reason });
    }
    let prepared = prepare(bench.lab(), &first.problem)?;
    let operands = prepared.bind(&first.problem)?;
    let (mut worst, mut past) = (0.0f64, 0u32);
    for (index, &tokens) in STEPS.iter().enumerate() {
        let values = std::mem::take(&mut drawn[index]);
        let round = |x: &f32| f16::from_f32(*x).to_bits();
        key.extend(values[0].iter().map(round));
        value.extend(values[1].iter().map(round));
        let query = values[2].clone();
        let step = step(spec, positions, values, past, tokens)?;
        operands.refill(&step.problem, &[step.cache])?;
        let done = prepared.submit(&step.problem, &operands, &[])?;
        bench.lab().finish(done)?;
        let mut got = operands.outputs(&step.problem)?;
        let name = format!("step {index} ({tokens} tokens after {past})");
        same_cache(&got, step.cache, &key, &value, columns).map_err(|f| f.during(&name))?;
        let (alone, output) = attention_alone(spec, &key, &value, query, past, tokens)?;
        let rows = got.remove(&step.output.0).unwrap_or_default();
        let judged = bench.judge(&alone, &Outputs::from([(output.0, rows), cache_of(&alone)]), 1.0);
        worst = worst.max(judged.map_err(|f| f.during(&name))?);
        past += tokens;
    }
    operands.free()?;
    prepared.close(&first.problem)?;
    Ok(Outcome::Passed { worst })
}

/// What the cache of a problem holds, as an output: attention leaves it as it is.
fn cache_of(problem: &Problem) -> (u32, Vec<u8>) {
    for (index, content) in problem.content.iter().enumerate() {
        if let Content::Cache(cache) = content {
            let mut bytes = u16_bytes(&cache.key);
            bytes.extend(u16_bytes(&cache.value));
            return (index as u32, bytes);
        }
    }
    (u32::MAX, Vec::new())
}

fn same_cache(got: &Outputs, slot: SlotId, key: &[u16], value: &[u16], columns: usize) -> Fallible<()> {
    let mut want = u16_bytes(key);
    want.extend(u16_bytes(value));
    let got = got.get(&slot.0).map_or(&[][..], |b| b);
    let pairs = got.chunks_exact(2).zip(want.chunks_exact(2));
    match pairs.enumerate().find(|(_, (g, w))| g != w) {
        None if got.len() == want.len() => Ok(()),
        None => Err(Finding::new("kv cache", "the export has another length than the import")),
        Some((at, (g, w))) => {
            let side = if at < key.len() { "key" } else { "value" };
            let at = at % key.len();
            let number = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]);
            Err(Finding::new(
                "kv cache",
                format!(
                    "{side} of position {}, element {} is {}, wanted {} (appended f32 rounded to nearest even, \
                     in the canonical layout)",
                    at / columns,
                    at % columns,
                    number(g),
                    number(w)
                ),
            ))
        }
    }
}

/// The attention of one step by itself, over the canonical cache.
fn attention_alone(
    spec: &AttentionSpec,
    key: &[u16],
    value: &[u16],
    query: Vec<f32>,
    past: u32,
    tokens: u32,
) -> Fallible<(Problem, SlotId)> {
    let mut p = Problem::new(tokens, tokens);
    let columns = u64::from(spec.heads * spec.head_dim);
    let query = p.rows_in("query", DType::F32, columns, f32_bytes(&query))?;
    let filled = past + tokens;
    let cache = p.cache(CacheContent {
        kv_heads: spec.kv_heads,
        head_dim: spec.head_dim,
        key: key.to_vec(),
        value: value.to_vec(),
        filled,
        read: filled,
    })?;
    let output = p.rows_out("output", DType::F32, columns)?;
    p.push(attention(spec, query, cache, output), Arithmetic::F32);
    p.sequences.push(SequenceSpan { first_token: 0, tokens, past, cache_base: 0 });
    Ok((p, output))
}
