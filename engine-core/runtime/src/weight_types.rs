//! Types of weights as stored and as a device holds them: what has no kernels there is told, or refused under `strict`.

use crate::planning::Planned;
use crate::weight::Weight;
use crate::{EngineOptions, Placement, Result, RuntimeError, Stack};
use engine_core::DType;
use engine_core::planner::Fallback;
use formats::GgufFile;
use std::collections::BTreeMap;

/// The matrices of a model that are stored in one type, and what becomes of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightType {
    /// In the file.
    pub stored: DType,
    /// On the device; the same where it has kernels for it.
    pub held: DType,
    /// How many.
    pub weights: usize,
    /// Their bytes in the file.
    pub stored_bytes: u64,
    /// Their bytes on the device.
    pub held_bytes: u64,
}

/// [`Engine::plan_file`](crate::Engine::plan_file), and what the device would hold; vectors, which are F32 everywhere,
/// are left out.
///
/// # Errors
/// As [`Engine::plan_file`](crate::Engine::plan_file).
pub fn plan_with_types(
    file: &GgufFile,
    stack: &Stack,
    options: EngineOptions,
) -> Result<(Placement, Vec<WeightType>)> {
    let planned = Planned::new(file, stack, options)?;
    let types = of(planned.weights.iter().flatten());
    Ok((Placement::of(planned), types))
}

fn of<'a>(weights: impl IntoIterator<Item = &'a Weight>) -> Vec<WeightType> {
    let mut found: BTreeMap<(DType, DType), (usize, u64, u64)> = BTreeMap::new();
    for weight in weights.into_iter().filter(|weight| weight.shape.rows > 1) {
        let Some(stored) = weight.stored().or_else(|| weight.made_from()) else { continue };
        let bytes = stored.byte_len();
        let entry = found.entry((stored.dtype, weight.shape.dtype)).or_default();
        *entry = (entry.0 + 1, entry.1 + bytes, entry.2 + weight.byte_len());
    }
    let row = |((stored, held), (weights, stored_bytes, held_bytes))| WeightType {
        stored,
        held,
        weights,
        stored_bytes,
        held_bytes,
    };
    found.into_iter().map(row).collect()
}

/// Lines of the plan for types that the device has no kernels for.
///
/// # Errors
/// [`RuntimeError::Strict`] with them under `strict`.
pub(crate) fn fallbacks(weights: &[Weight], device: &str, strict: bool) -> Result<Vec<Fallback>> {
    let fallback = |of: WeightType| Fallback {
        what: format!("{} weight(s)", of.weights),
        wanted: of.stored.to_string(),
        got: of.held.to_string(),
        reason: format!(
            "device `{device}` has no kernels for {}; converted they take {} bytes instead of {}",
            of.stored, of.held_bytes, of.stored_bytes
        ),
    };
    let converted = of(weights).into_iter().filter(|of| of.stored != of.held);
    let fallbacks: Vec<Fallback> = converted.map(fallback).collect();
    match strict && !fallbacks.is_empty() {
        true => Err(RuntimeError::Strict { fallbacks }),
        false => Ok(fallbacks),
    }
}
