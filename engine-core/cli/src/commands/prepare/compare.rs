//! How far what was written is from the model it was made of, dense.

use crate::args::ModelArg;
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
        let (p, q) = (log_softmax(a), log_softmax(b));
        difference.divergence += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        let size = a.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let apart = a.iter().zip(b).fold(0.0f32, |most, (x, y)| most.max((x - y).abs()));
        difference.largest = difference.largest.max(f64::from(apart / size));
        difference.same_best += f64::from(u8::from(best(a) == best(b)));
    }
    difference.divergence /= a.len() as f64;
    difference.same_best /= a.len() as f64;
    Ok(difference)
}

fn best(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - most).exp()).sum();
    logits.iter().map(|&x| f64::from(x - most) - sum.ln()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_equal_logits_is_nothing() {
        let p = log_softmax(&[1.0, 2.0, 3.0]);
        assert!((p.iter().map(|p| p.exp()).sum::<f64>() - 1.0).abs() < 1e-12);
        assert_eq!(best(&[1.0, 3.0, 3.0]), 1);
    }
}
