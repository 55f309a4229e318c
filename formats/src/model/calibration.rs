//! What preparing a model found out about skipping its neurons: numbers per layer for each sparsity policy.

use super::{Layer, Reader};
use crate::Result;

/// Calibrated numbers of a prepared model.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Calibration {
    /// The policy that the model was prepared for, by name; none means an exact one.
    pub policy: Option<String>,
    /// What each layer's predictor score is compared with; none means [`Prediction::threshold`](super::Prediction).
    pub predictor: Option<Vec<f32>>,
    /// Thresholds of the activated gate (CATS).
    pub cats: Option<Levels>,
    /// Thresholds of the bit planes' score.
    pub bitplane: Option<Levels>,
    /// Standard deviations that bit planes allow for, per layer.
    pub deviations: Option<Vec<f32>>,
}

/// Thresholds per layer for several shares of skipped neurons.
#[derive(Clone, Debug, PartialEq)]
pub struct Levels {
    /// The shares, ascending.
    levels: Vec<f32>,
    /// Layer after layer, one threshold per share.
    thresholds: Vec<f32>,
    /// The share that the error budget allows.
    pub default: f32,
}

impl Levels {
    /// The threshold of a layer at which about this share of its neurons is skipped; between levels by interpolation, and
    /// beyond them the nearest.
    pub fn at(&self, layer: usize, share: f32) -> f32 {
        let count = self.levels.len();
        let thresholds = self.thresholds.get(layer * count..(layer + 1) * count).unwrap_or(&[]);
        let above = self.levels.iter().position(|level| *level >= share);
        match (above, thresholds) {
            (_, []) => 0.0,
            (None, [.., last]) => *last,
            (Some(0), [first, ..]) => *first,
            (Some(i), _) => {
                let (low, high) = (self.levels[i - 1], self.levels[i]);
                let part = (share - low) / (high - low);
                thresholds[i - 1] + (thresholds[i] - thresholds[i - 1]) * part
            }
        }
    }

    /// The shares that were calibrated.
    pub fn levels(&self) -> &[f32] {
        &self.levels
    }
}

/// Reads the keys of a prepared file; nothing where there are none.
///
/// # Errors
/// For a key of another type, with a number that is negative or not finite, or of another length than the layers ask for.
pub(super) fn read(reader: &Reader<'_>, layers: &[Layer]) -> Result<Calibration> {
    let per_layer = |key: &str| numbers(reader, key, layers.len());
    let metadata = reader.file.metadata();
    Ok(Calibration {
        policy: metadata.string("thermocline.policy")?.map(str::to_owned),
        predictor: signed(reader, "thermocline.predictor.threshold", layers.len())?,
        cats: levels(reader, "cats", layers.len())?,
        bitplane: levels(reader, "bitplane", layers.len())?,
        deviations: per_layer("thermocline.bitplane.deviations")?,
    })
}

fn levels(reader: &Reader<'_>, name: &str, layers: usize) -> Result<Option<Levels>> {
    let metadata = reader.file.metadata();
    let key = |part: &str| format!("thermocline.{name}.{part}");
    let Some(levels) = metadata.floats(&key("levels"))? else { return Ok(None) };
    let levels: Vec<f32> = levels.into_iter().map(|level| level as f32).collect();
    let rising = levels.windows(2).all(|pair| pair[0] < pair[1]);
    if levels.is_empty() || !rising || !levels.iter().all(|level| (0.0..1.0).contains(level)) {
        let problem = "must be shares of at least 0 and below 1, ascending";
        return Err(metadata.bad_value(&key("levels"), problem));
    }
    let count = layers.saturating_mul(levels.len());
    let Some(thresholds) = numbers(reader, &key("threshold"), count)? else {
        let advice = "the model was not prepared to its end; prepare it again";
        return Err(metadata.missing(&key("threshold"), advice));
    };
    let default = metadata.float(&key("level"))?.map_or(levels[0], |level| level as f32);
    Ok(Some(Levels { levels, thresholds, default }))
}

/// Numbers of which none may be negative.
fn numbers(reader: &Reader<'_>, key: &str, count: usize) -> Result<Option<Vec<f32>>> {
    let found = signed(reader, key, count)?;
    match found.as_ref().and_then(|numbers| numbers.iter().position(|number| *number < 0.0)) {
        Some(index) => {
            let problem = format!("has a negative number at {index}");
            Err(reader.file.metadata().bad_value(key, problem))
        }
        None => Ok(found),
    }
}

fn signed(reader: &Reader<'_>, key: &str, count: usize) -> Result<Option<Vec<f32>>> {
    let metadata = reader.file.metadata();
    let Some(numbers) = metadata.floats(key)? else { return Ok(None) };
    if numbers.len() != count {
        let problem = format!("has {} numbers, wanted {count}", numbers.len());
        return Err(metadata.bad_value(key, problem));
    }
    let numbers: Vec<f32> = numbers.into_iter().map(|number| number as f32).collect();
    match numbers.iter().position(|number| !number.is_finite()) {
        Some(index) => Err(metadata.bad_value(key, format!("has {} at {index}", numbers[index]))),
        None => Ok(Some(numbers)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_lie_between_levels() {
        let levels = Levels { levels: vec![0.1, 0.5], thresholds: vec![1.0, 2.0, 3.0, 7.0], default: 0.5 };
        assert_eq!([0.0, 0.1, 0.3, 0.5, 0.9].map(|share| levels.at(1, share)), [3.0, 3.0, 5.0, 7.0, 7.0]);
        assert_eq!(levels.at(0, 0.5), 2.0);
        assert_eq!(levels.at(9, 0.5), 0.0);
        let one = Levels { levels: vec![0.0], thresholds: vec![0.0], default: 0.0 };
        assert_eq!(one.at(0, 0.7), 0.0);
    }
}
