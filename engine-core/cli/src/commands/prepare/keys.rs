//! What a prepared file says about how its neurons may be skipped.

use crate::args::PrepareArgs;
use calibration::layer::Calibration;
use calibration::levels::{LEVELS, Level, within};
use formats::ModelDescription;
use formats::gguf::{Array, Value};
use formats::model::PredictorInput;

/// Keys, and the levels among them that are used where nobody asks for another.
pub(super) struct Keys {
    pub(super) entries: Vec<(String, Value)>,
    pub(super) levels: DefaultLevels,
}

/// Shares of skipped neurons that keep to the error budget.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DefaultLevels {
    /// 0 where neurons are off exactly, which have a margin instead.
    pub(super) planes: f32,
    pub(super) cats: f32,
}

pub(super) fn of_layers(
    model: &ModelDescription,
    layers: &[Calibration],
    args: &PrepareArgs,
    trained: bool,
) -> Keys {
    let mut keys = Keys { entries: Vec::new(), levels: DefaultLevels::default() };
    let planes: Vec<_> = layers.iter().filter_map(|layer| layer.calibrated.planes.as_ref()).collect();
    if !planes.is_empty() && planes.len() == layers.len() {
        let levels: Vec<&[Level]> = planes.iter().map(|planes| &planes.levels[..]).collect();
        let margins: Vec<f32> = planes.iter().map(|planes| planes.margin).collect();
        // A single level stands for a margin.
        let level = if levels.iter().any(|levels| levels.len() > 1) {
            within(&levels, args.level_missed)
        } else {
            0.0
        };
        keys.levels.planes = level;
        keys.floats("thermocline.bitplane.deviations", margins);
        keys.thresholds("bitplane", &levels, level);
    }
    let cats: Vec<_> = layers.iter().filter_map(|layer| layer.calibrated.cats.as_ref()).collect();
    if !cats.is_empty() && cats.len() == layers.len() {
        let levels: Vec<&[Level]> = cats.iter().map(|cats| &cats.levels[..]).collect();
        keys.levels.cats = within(&levels, args.level_missed);
        keys.thresholds("cats", &levels, keys.levels.cats);
    }
    if let Some(policy) = args.policy.as_deref() {
        keys.entries.push(("thermocline.policy".into(), Value::from(policy)));
    }
    if trained {
        let threshold = |layer: &Calibration| {
            layer.calibrated.predictor.as_ref().map_or(0.0, |predictor| predictor.threshold)
        };
        keys.floats("thermocline.predictor.threshold", layers.iter().map(threshold).collect());
        keys.entries.push(("powerinfer.sparse_threshold".into(), Value::F32(0.0)));
        let parallel = model.layers.iter().any(|layer| layer.parallel);
        let early = model.prediction.as_ref().map_or(parallel, |p| p.input == PredictorInput::LayerInput);
        let input = if early { "layer-input" } else { "residual" };
        let key = format!("{}.feed_forward_predictor_input", model.architecture);
        keys.entries.push((key, Value::from(input)));
    }
    keys
}

impl Keys {
    fn floats(&mut self, key: &str, values: Vec<f32>) {
        self.entries.push((key.into(), Value::Array(Array::F32(values))));
    }

    fn thresholds(&mut self, name: &str, layers: &[&[Level]], level: f32) {
        let shares = layers.first().map(|levels| levels.iter().map(|level| level.skipped).collect());
        let all = layers.iter().flat_map(|levels| levels.iter().map(|level| level.threshold)).collect();
        self.floats(&format!("thermocline.{name}.threshold"), all);
        self.floats(&format!("thermocline.{name}.levels"), shares.unwrap_or_default());
        self.entries.push((format!("thermocline.{name}.level"), Value::F32(level)));
    }
}

/// The place of a level among those that were calibrated.
pub(super) fn place(level: f32) -> usize {
    LEVELS.iter().position(|&found| found == level).unwrap_or(0)
}
