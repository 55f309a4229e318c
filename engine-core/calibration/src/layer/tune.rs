//! Margins and thresholds from tokens that are neither trained on nor reported.

use super::guess::{Guess, High};
use super::{CHUNK, Layer, stop};
use crate::Result;
use crate::levels::{Level, Scores};
use crate::margin::Margins;
use crate::network::Values;
use std::sync::atomic::AtomicBool;

/// What tokens that are neither trained on nor reported say about margins and thresholds.
pub(super) struct Tuned {
    pub(super) margins: Option<Margins>,
    pub(super) planes: Vec<Level>,
    pub(super) cats: Vec<Level>,
    /// What each neuron adds to the output, a row per token.
    pub(super) masses: Vec<f32>,
}

pub(super) fn tuned(
    layer: &Layer<'_>,
    high: Option<&High<'_>>,
    norms: &[f32],
    rows: &[usize],
    cancel: &AtomicBool,
) -> Result<Tuned> {
    let network = layer.network;
    let neurons = network.neurons.max(1);
    let mut margins = (high.is_some() && network.is_zero_below()).then(Margins::default);
    let (mut by_planes, mut by_gate) = (Scores::default(), Scores::default());
    let mut masses = Vec::with_capacity(rows.len() * neurons);
    let (mut inputs, mut values, mut guess) = (Vec::new(), Values::default(), Guess::default());
    let every = rows.len().div_ceil((Scores::MOST / neurons).max(1)).max(1);
    for (chunk, rows) in rows.chunks(CHUNK).enumerate() {
        stop(cancel)?;
        layer.inputs.gather(rows.iter().copied(), &mut inputs);
        network.compute(&inputs, &mut values)?;
        if let Some(high) = high {
            high.guess(network, &inputs, &mut guess)?;
        }
        for (t, hidden) in values.hidden.chunks_exact(neurons).enumerate() {
            let counts = (chunk * CHUNK + t).is_multiple_of(every);
            for (i, (&h, &norm)) in hidden.iter().zip(norms).enumerate() {
                let mass = h.abs() * norm;
                masses.push(mass);
                if let (Some(margins), Some(high), true) = (&mut margins, high, h != 0.0) {
                    margins.see(high.ratio(network, &guess, (t, i)), f64::from(mass));
                }
                if let (None, Some(high), true) = (&margins, high, counts) {
                    by_planes.see(high.score(network, &guess, norms, (t, i)), mass);
                }
                if let (Some(&gate), true) = (values.gate.get(t * neurons + i), counts) {
                    by_gate.see(network.function.of(gate).abs(), mass);
                }
            }
        }
    }
    let cats = if network.gate.is_some() { by_gate.levels() } else { Vec::new() };
    let planes = if high.is_some() && margins.is_none() { by_planes.levels() } else { Vec::new() };
    Ok(Tuned { margins, planes, cats, masses })
}
