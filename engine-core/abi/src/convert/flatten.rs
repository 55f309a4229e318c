//! Operations to flat descriptors.

use super::codes::{activation_code, gating_code, layout_code, norm_code, style_code};
use crate::{NO_SLOT, OperationCode};
use engine_core::operation::{Experts, Ffn, OperationKind, Rope, RopeScaling, Selection, SlotId};
use engine_core::{Error, Result};

/// The part of a flat descriptor that depends on the operation.
pub(super) struct Flat {
    pub(super) code: OperationCode,
    pub(super) slots: [u32; 16],
    pub(super) u: [u64; 8],
    pub(super) f: [f64; 12],
}

fn flat(code: OperationCode, slots: &[Option<SlotId>], u: &[u64], f: &[f32]) -> Result<Flat> {
    let mut flat = Flat { code, slots: [NO_SLOT; 16], u: [0; 8], f: [0.0; 12] };
    for (target, slot) in flat.slots.iter_mut().zip(slots) {
        match slot {
            Some(SlotId(NO_SLOT)) => {
                return Err(Error::invalid(format!("slot {NO_SLOT} cannot exist")));
            }
            Some(SlotId(id)) => *target = *id,
            None => {}
        }
    }
    for (target, value) in flat.u.iter_mut().zip(u) {
        *target = *value;
    }
    for (target, value) in flat.f.iter_mut().zip(f) {
        *target = f64::from(*value);
    }
    Ok(flat)
}

pub(super) fn flatten(kind: &OperationKind) -> Result<Flat> {
    match kind {
        OperationKind::Copy { from, to } => flat(OperationCode::COPY, &[Some(*from), Some(*to)], &[], &[]),
        OperationKind::Embed { ids, table, output, scale } => {
            flat(OperationCode::EMBED, &[Some(*ids), Some(*table), Some(*output)], &[], &[*scale])
        }
        OperationKind::Norm { norm, epsilon, input, weight, bias, output } => flat(
            OperationCode::NORM,
            &[Some(*input), Some(*weight), *bias, Some(*output)],
            &[norm_code(*norm)?],
            &[*epsilon],
        ),
        OperationKind::Linear { input, weight, bias, output, accumulate } => flat(
            OperationCode::LINEAR,
            &[Some(*input), Some(*weight), *bias, Some(*output)],
            &[u64::from(*accumulate)],
            &[],
        ),
        OperationKind::Rope(rope) => flatten_rope(rope),
        OperationKind::KvAppend { key, value, cache, kv_heads, head_dim } => flat(
            OperationCode::KV_APPEND,
            &[Some(*key), Some(*value), Some(*cache)],
            &[(*kv_heads).into(), (*head_dim).into()],
            &[],
        ),
        OperationKind::Attention {
            query,
            cache,
            output,
            heads,
            kv_heads,
            head_dim,
            scale,
            window,
            soft_cap,
        } => {
            // 0 stands for absence, and is no valid value of either.
            if *window == Some(0) || *soft_cap == Some(0.0) {
                return Err(Error::invalid("attention: a window or a soft cap of 0"));
            }
            flat(
                OperationCode::ATTENTION,
                &[Some(*query), Some(*cache), Some(*output)],
                &[(*heads).into(), (*kv_heads).into(), (*head_dim).into(), window.unwrap_or(0).into()],
                &[*scale, soft_cap.unwrap_or(0.0)],
            )
        }
        OperationKind::Ffn(ffn) => flatten_ffn(ffn),
        OperationKind::Route { scores, chosen, weights, gating, normalise, scale } => flat(
            OperationCode::ROUTE,
            &[Some(*scores), Some(*chosen), Some(*weights)],
            &[gating_code(*gating)?, u64::from(*normalise)],
            &[*scale],
        ),
        OperationKind::Experts(experts) => flatten_experts(experts),
        OperationKind::Predict { input, fc1, fc2, mask, threshold } => flat(
            OperationCode::PREDICT,
            &[Some(*input), Some(*fc1), Some(*fc2), Some(*mask)],
            &[],
            &[*threshold],
        ),
        OperationKind::Activate { function, input, output } => {
            flat(OperationCode::ACTIVATE, &[Some(*input), Some(*output)], &[activation_code(*function)?], &[])
        }
        OperationKind::Add { left, right, output } => {
            flat(OperationCode::ADD, &[Some(*left), Some(*right), Some(*output)], &[], &[])
        }
        OperationKind::Multiply { left, right, output } => {
            flat(OperationCode::MULTIPLY, &[Some(*left), Some(*right), Some(*output)], &[], &[])
        }
        OperationKind::KvExport { cache, key, value, kv_heads, head_dim } => flat(
            OperationCode::KV_EXPORT,
            &[Some(*cache), Some(*key), Some(*value)],
            &[(*kv_heads).into(), (*head_dim).into()],
            &[],
        ),
        OperationKind::KvImport { key, value, cache, kv_heads, head_dim } => flat(
            OperationCode::KV_IMPORT,
            &[Some(*key), Some(*value), Some(*cache)],
            &[(*kv_heads).into(), (*head_dim).into()],
            &[],
        ),
        other => Err(Error::unsupported(format!(
            "operation `{}` has no code in this version of the interface",
            other.name()
        ))),
    }
}

fn flatten_rope(rope: &Rope) -> Result<Flat> {
    let (scaling, original, f) = match rope.scaling {
        RopeScaling::None => (0, 0, [rope.base, 0.0, 0.0, 0.0, 0.0]),
        RopeScaling::Linear { factor } => (1, 0, [rope.base, factor, 0.0, 0.0, 0.0]),
        RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => {
            (2, original_context, [rope.base, factor, attention_factor, beta_fast, beta_slow])
        }
        other => {
            return Err(Error::unsupported(format!(
                "rope scaling {other:?} has no code in this version of the interface"
            )));
        }
    };
    let u =
        [style_code(rope.style)?, rope.head_dim.into(), rope.rotary_dim.into(), scaling, u64::from(original)];
    flat(OperationCode::ROPE, &[Some(rope.input), rope.factors, Some(rope.output)], &u, &f)
}

/// Code, mask, threshold and deviations.
fn selection_code(selection: Selection) -> Result<(u64, Option<SlotId>, [f32; 2])> {
    match selection {
        Selection::All => Ok((0, None, [0.0; 2])),
        Selection::Mask(mask) => Ok((1, Some(mask), [0.0; 2])),
        Selection::GateFirst => Ok((2, None, [0.0; 2])),
        Selection::Threshold(threshold) => Ok((3, None, [threshold, 0.0])),
        Selection::Bitplane(rule) => Ok((4, None, [rule.threshold, rule.deviations])),
        other => Err(Error::unsupported(format!(
            "selection {other:?} has no code in this version of the interface"
        ))),
    }
}

fn flatten_experts(op: &Experts) -> Result<Flat> {
    let (selection, mask, numbers) = selection_code(op.selection)?;
    if mask.is_some() || matches!(op.selection, Selection::Bitplane(_)) {
        return Err(Error::invalid("experts: a mask or bit planes"));
    }
    let slots = [
        Some(op.input),
        Some(op.chosen),
        Some(op.weights),
        op.gate,
        Some(op.up),
        Some(op.down),
        Some(op.output),
        op.active_count,
    ];
    let u = [
        op.experts.into(),
        layout_code(op.down_layout)?,
        activation_code(op.function)?,
        activation_code(op.up_function)?,
        selection,
        u64::from(op.accumulate),
    ];
    flat(OperationCode::EXPERTS, &slots, &u, &numbers)
}

fn flatten_ffn(ffn: &Ffn) -> Result<Flat> {
    let (selection, mask, numbers) = selection_code(ffn.selection)?;
    let rule = match ffn.selection {
        Selection::Bitplane(rule) => [Some(rule.gate_deviation), rule.up_deviation, rule.down_norm],
        _ => [None; 3],
    };
    flat(
        OperationCode::FFN,
        &[
            Some(ffn.input),
            ffn.gate,
            Some(ffn.up),
            Some(ffn.down),
            ffn.gate_bias,
            ffn.up_bias,
            mask,
            Some(ffn.output),
            ffn.hidden,
            ffn.active_count,
            ffn.gate_low,
            ffn.up_low,
            rule[0],
            rule[1],
            rule[2],
        ],
        &[
            layout_code(ffn.down_layout)?,
            activation_code(ffn.function)?,
            activation_code(ffn.up_function)?,
            selection,
            u64::from(ffn.accumulate),
        ],
        &numbers,
    )
}
