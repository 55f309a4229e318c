//! How far what was written is from the model it was made of, dense.

use crate::args::ModelArg;
use crate::likelihood::{best, divergence};
use crate::model::Running;
use crate::settings::Settings;
use anyhow::Result;
use std::path::Path;

/// How the result's logits differ from the source's.
pub(super) struct Difference {
    pub(super) tokens: usize,
    /// Mean Kullback-Leibler divergence from the source, in nats.
    pub(super) divergence: f64,
    /// Largest difference of logits, as a share of the largest logit.
    pub(super) largest: f64,
    /// Share of tokens whose most likely successor is the same.
    pub(super) same_best: f64,
}

pub(super) fn compare(source: &Running, path: &Path, settings: &Settings, ids: &[u32]) -> Result<Difference> {
    let logits = |running: &Running| -> Result<Vec<Vec<f32>>> {
        let mut rows = Vec::new();
        running.engine.session()?.score(ids, &mut |_, logits| rows.push(logits.to_vec()))?;
        Ok(rows)
    };
    let model = ModelArg { model: path.to_path_buf(), pre_tokenizer: None, overrides: Vec::new() };
    let (a, b) = (logits(source)?, logits(&Running::load(&model, settings)?)?);
    let mut difference = Difference { tokens: a.len(), divergence: 0.0, largest: 0.0, same_best: 0.0 };
    for (a, b) in a.iter().zip(&b) {
        difference.divergence += divergence(a, b);
        let size = a.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let apart = a.iter().zip(b).fold(0.0f32, |most, (x, y)| most.max((x - y).abs()));
        difference.largest = difference.largest.max(f64::from(apart / size));
        difference.same_best += f64::from(u8::from(best(a) == best(b)));
    }
    difference.divergence /= a.len() as f64;
    difference.same_best /= a.len() as f64;
    Ok(difference)
}
