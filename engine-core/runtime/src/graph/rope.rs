//! The rope of a layer's queries and keys, from the description's terms to the operation's.

use super::builder::Builder;
use super::layer::size;
use crate::weight::Weight;
use crate::{Result, RuntimeError};
use engine_core::operation::{OperationKind, Rope, RopeScaling, RopeStyle, SlotId};
use formats::ModelDescription;
use formats::model;

/// Turns the heads in `slot` in place; nothing where the model has no rope.
pub(super) fn emit(
    builder: &mut Builder<'_>,
    label: String,
    rope: &model::Rope,
    slot: SlotId,
    head_dim: u32,
) -> Result<()> {
    if rope.dim == 0 {
        return Ok(());
    }
    let model = builder.options.model;
    let style = match rope.style {
        model::RopeStyle::Interleaved => RopeStyle::Interleaved,
        model::RopeStyle::Split => RopeStyle::Halves,
        other => {
            let advice = "interleaved and split pairs are";
            return Err(builder.unsupported(format!("rope style {other:?}"), advice));
        }
    };
    let (scaling, divisors) = scaling(model, rope)?;
    let factors = match (&rope.factors, divisors) {
        (Some(_), Some(_)) => {
            let what = "rope scaling `llama3` by key and by `rope_freqs.weight` at once".to_owned();
            return Err(builder.unsupported(what, "one of the two is"));
        }
        (Some(factors), None) => Some(builder.vector(factors)?),
        (None, Some(divisors)) => Some(builder.constant(divisors)),
        (None, None) => None,
    };
    let rope = Rope {
        input: slot,
        output: slot,
        factors,
        style,
        head_dim,
        rotary_dim: size(model, "rope.dimension_count", rope.dim)?,
        base: rope.base,
        scaling,
    };
    builder.push(label, OperationKind::Rope(rope));
    Ok(())
}

/// The operation's scaling, or what divides the frequencies instead.
fn scaling(model: &ModelDescription, rope: &model::Rope) -> Result<(RopeScaling, Option<Weight>)> {
    let refused = |what: String| RuntimeError::Model {
        path: model.path.clone(),
        what,
        advice: "an ext_factor of 1 (YaRN) or 0 without attention factor (linear) is".into(),
    };
    let scaling = match rope.scaling {
        model::RopeScaling::None => RopeScaling::None,
        model::RopeScaling::Linear { factor } => RopeScaling::Linear { factor },
        model::RopeScaling::Llama3 { .. } => return Ok((RopeScaling::None, Some(llama3(rope)))),
        model::RopeScaling::Yarn {
            factor,
            original_context,
            ext_factor,
            attn_factor,
            beta_fast,
            beta_slow,
        } => {
            if ext_factor == 0.0 && attn_factor == 1.0 {
                return Ok((RopeScaling::Linear { factor }, None));
            }
            if ext_factor != 1.0 {
                return Err(refused(format!("rope scaling `yarn` with ext_factor {ext_factor}")));
            }
            RopeScaling::Yarn {
                factor,
                original_context: size(model, "rope.scaling.original_context_length", original_context)?,
                attention_factor: attn_factor,
                beta_fast,
                beta_slow,
            }
        }
        other => return Err(refused(format!("rope scaling {other:?}"))),
    };
    Ok((scaling, None))
}

/// What Llama 3.1's scaling divides each pair's frequency by: 1 for turns shorter than `original_context /
/// high_freq_factor` positions, the factor for those longer than `original_context / low_freq_factor`, and between them
/// what keeps the frequency itself on a line from one to the other.
fn llama3(rope: &model::Rope) -> Weight {
    let model::RopeScaling::Llama3 { factor, original_context, low_freq_factor, high_freq_factor } =
        rope.scaling
    else {
        return Weight::values("rope".into(), Vec::new());
    };
    let (factor, original) = (f64::from(factor), original_context as f64);
    let (low, high) = (f64::from(low_freq_factor), f64::from(high_freq_factor));
    let divisor = |pair: usize| {
        let frequency = f64::from(rope.base).powf(-2.0 * pair as f64 / rope.dim as f64);
        let turns = original * frequency / std::f64::consts::TAU;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - kept) / factor + kept)) as f32
    };
    // The layers of a model may turn differently.
    let name = format!("llama3 rope of base {}, factor {factor}, {} elements", rope.base, rope.dim);
    Weight::values(name, (0..rope.dim / 2).map(divisor).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::story;
    use formats::GgufFile;

    #[test]
    fn llama3_leaves_fast_pairs_and_slows_slow_ones() {
        let model = ModelDescription::describe(&GgufFile::open(story()).unwrap()).unwrap();
        let mut rope = model.rope.clone();
        (rope.dim, rope.base) = (128, 500_000.0);
        rope.scaling = model::RopeScaling::Llama3 {
            factor: 8.0,
            original_context: 8192,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
        };
        let (scaling, divisors) = scaling(&model, &rope).unwrap();
        assert_eq!(scaling, RopeScaling::None);
        let mut bytes = Vec::new();
        let mut read = |_, _| unreachable!("they are in no file");
        let made = divisors.unwrap().make(1, &mut read, &mut |portion| {
            bytes.extend_from_slice(portion);
            Ok(())
        });
        made.unwrap();
        let found: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        // The tensor `rope_freqs.weight` of Llama 3.1's GGUF files: 1 up to pair 28, 8 from pair 35 on.
        assert_eq!(found.len(), 64);
        assert!(found[..29].iter().all(|&divisor| divisor == 1.0), "{found:?}");
        assert!(found[35..].iter().all(|&divisor| divisor == 8.0), "{found:?}");
        assert!(found[29..35].windows(2).all(|pair| 1.0 < pair[0] && pair[0] < pair[1] && pair[1] < 8.0));
    }
}
