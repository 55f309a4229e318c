//! What each way of skipping does to held-out tokens.

use super::guess::{Guess, High};
use super::{CHUNK, Layer, stop};
use crate::Result;
use crate::levels::Level;
use crate::network::Values;
use crate::outcome::{self, Exact, Outcome, Tally};
use crate::predictor::Predictor;
use std::sync::atomic::AtomicBool;

/// What is looked at.
pub(super) struct Rules<'a> {
    pub(super) high: Option<&'a High<'a>>,
    /// In deviations.
    pub(super) margin: f32,
    /// Thresholds for planes.
    pub(super) planes: &'a [Level],
    /// Thresholds for |f(gate)|.
    pub(super) cats: &'a [Level],
    pub(super) predictor: Option<&'a Predictor>,
}

/// An outcome per rule.
#[derive(Default)]
pub(super) struct Measured {
    pub(super) planes: Vec<Outcome>,
    pub(super) cats: Vec<Outcome>,
    pub(super) predictor: Outcome,
}

pub(super) fn measure(
    layer: &Layer<'_>,
    rules: &Rules<'_>,
    norms: &[f32],
    rows: &[usize],
    cancel: &AtomicBool,
) -> Result<Measured> {
    let network = layer.network;
    let neurons = network.neurons.max(1);
    let mut planes = vec![Tally::default(); rules.planes.len()];
    let mut cats = vec![Tally::default(); rules.cats.len()];
    let mut predicted = Tally::default();
    let (mut inputs, mut values, mut guess) = (Vec::new(), Values::default(), Guess::default());
    let [mut output, mut scores, mut residuals] = [const { Vec::new() }; 3];
    let (mut active, mut keep) = (Vec::new(), Vec::new());
    for rows in rows.chunks(CHUNK) {
        stop(cancel)?;
        layer.inputs.gather(rows.iter().copied(), &mut inputs);
        network.compute(&inputs, &mut values)?;
        network.output(&values.hidden, &mut output)?;
        outcome::active(network, &values.hidden, &mut active);
        let exact = Exact { network, norms, hidden: &values.hidden, active: &active, output: &output };
        let places = || (0..rows.len()).flat_map(|t| (0..neurons).map(move |i| (t, i)));
        if let Some(high) = rules.high {
            high.guess(network, &inputs, &mut guess)?;
            scores.clear();
            if network.is_zero_below() {
                scores.extend(places().map(|at| high.ratio(network, &guess, at) + rules.margin));
            } else {
                scores.extend(places().map(|at| high.score(network, &guess, norms, at)));
            }
            for (tally, level) in planes.iter_mut().zip(rules.planes) {
                above(&scores, level.threshold, &mut keep);
                tally.see(&exact, &keep)?;
            }
        }
        if !rules.cats.is_empty() {
            scores.clear();
            scores.extend(values.gate.iter().map(|&gate| network.function.of(gate).abs()));
            for (tally, level) in cats.iter_mut().zip(rules.cats) {
                above(&scores, level.threshold, &mut keep);
                tally.see(&exact, &keep)?;
            }
        }
        if let (Some(predictor), Some(from)) = (rules.predictor, layer.residuals) {
            from.gather(rows.iter().copied(), &mut residuals);
            predictor.scores(&residuals, &mut scores)?;
            keep.clear();
            keep.extend(scores.iter().map(|&score| score >= predictor.threshold));
            predicted.see(&exact, &keep)?;
        }
    }
    let outcomes = |tallies: Vec<Tally>| tallies.iter().map(Tally::outcome).collect();
    Ok(Measured { planes: outcomes(planes), cats: outcomes(cats), predictor: predicted.outcome() })
}

fn above(scores: &[f32], threshold: f32, keep: &mut Vec<bool>) {
    keep.clear();
    keep.extend(scores.iter().map(|&score| score > threshold));
}
