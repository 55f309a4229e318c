//! One layer from what was observed to what is stored of it and reported.

mod guess;
mod measure;
mod tune;

use crate::activity::{BATCHES, LayerActivity};
use crate::coactivation::{Coactivation, Columns};
use crate::levels::Level;
use crate::network::{Network, Values};
use crate::outcome::{self, Outcome};
use crate::planes::{BlockShares, HighPlane};
use crate::predictor::{self, Labels, Predictor, Task};
use crate::rows::Rows;
use crate::split::{Split, evenly};
use crate::{CalibrationError, Result};
use guess::High;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, Ordering};

/// Tokens that are computed at once.
const CHUNK: usize = 128;
/// Most tokens that set margins and thresholds, and most that the report is made of.
const TUNED: usize = 2048;
const HELD: usize = 1024;

/// What is known of a layer.
pub struct Layer<'a> {
    /// Weights as they will be stored.
    pub network: &'a Network,
    /// Gate in Q8_0, where it will be stored in planes.
    pub gate_planes: Option<&'a [u8]>,
    /// The same of up.
    pub up_planes: Option<&'a [u8]>,
    /// What the network was given.
    pub inputs: Rows<'a>,
    /// What a predictor is given; needed where there is or will be one.
    pub residuals: Option<Rows<'a>>,
    /// Tokens of each text.
    pub texts: &'a [usize],
    /// The model's own predictor.
    pub predictor: Option<&'a Predictor>,
}

/// What a layer is held to.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Largest share of the output's mass that bit planes may miss, where neurons are off exactly.
    pub missed: f64,
    /// Trains a predictor.
    pub train: Option<predictor::Options>,
}

/// How active a layer is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// Mean share of active neurons.
    pub active: f64,
    /// Of a token's active neurons, the share that was active at the token before.
    pub overlap: f64,
    /// Share of all activations that the hottest neurons make.
    pub hottest: f64,
    /// Share of neurons that any token of a batch makes active, for the sizes in [`BATCHES`].
    pub of_batch: [Option<f64>; BATCHES.len()],
    /// Which neurons are active together.
    pub coactivation: Coactivation,
}

/// What is stored beside planes, a value per neuron in the model's order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Planes {
    /// Deviation of gate's high plane.
    pub gate_deviation: Vec<f32>,
    /// Deviation of up's, where it is in planes.
    pub up_deviation: Option<Vec<f32>>,
    /// Length of each row of down.
    pub down_norm: Vec<f32>,
    /// Margin in deviations.
    pub margin: f32,
    /// Thresholds; a single one that skips nothing more where neurons are off exactly.
    pub levels: Vec<Level>,
    /// On held-out tokens, for each level.
    pub outcomes: Vec<Outcome>,
}

/// Thresholds on |f(gate)| (CATS).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cats {
    /// Thresholds.
    pub levels: Vec<Level>,
    /// On held-out tokens, for each level.
    pub outcomes: Vec<Outcome>,
}

/// A predictor's part of the result; the weights of a trained one are beside it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// Rows of fc1.
    pub rank: usize,
    /// Scores from here on count as active.
    pub threshold: f32,
    /// On held-out tokens.
    pub outcome: Outcome,
    /// Ranks that were compared, and the share of the network's bytes that a token reads with each.
    pub compared: Vec<(usize, f64)>,
}

/// Everything that was found out about a layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibrated {
    /// Neurons from the most to the least active.
    pub order: Vec<u32>,
    /// How often each is active, in the model's order.
    pub frequency: Vec<f32>,
    /// How active the layer is.
    pub activity: Activity,
    /// Where gate is stored in planes.
    pub planes: Option<Planes>,
    /// Where there is a gate.
    pub cats: Option<Cats>,
    /// Where there is a predictor.
    pub predictor: Option<Predicted>,
}

impl Calibrated {
    /// Whether everything is of a layer of this many networks (1, or its experts) of this many neurons: what was kept in a
    /// file may be of anything.
    pub fn is_of(&self, networks: usize, neurons: usize) -> bool {
        let each_once = self.order.chunks(neurons.max(1)).all(|order| {
            let mut seen = vec![false; neurons];
            order.iter().all(|&at| seen.get_mut(at as usize).is_some_and(|s| !std::mem::replace(s, true)))
        });
        let planes = self.planes.as_ref().is_none_or(|planes| {
            let up = planes.up_deviation.as_ref().is_none_or(|up| up.len() == neurons);
            up && planes.gate_deviation.len() == neurons && planes.down_norm.len() == neurons
        });
        let all = neurons * networks;
        each_once && self.order.len() == all && self.frequency.len() == all && planes
    }
}

/// A layer's result and, where a predictor was trained, its tensors.
#[derive(Clone, Debug, Default)]
pub struct Calibration {
    /// What was found out.
    pub calibrated: Calibrated,
    /// fc1 and fc2 as they are stored.
    pub trained: Option<(Vec<u8>, Vec<u8>)>,
}

/// What one pass over all tokens leaves.
struct Seen {
    activity: LayerActivity,
    columns: Columns,
    labels: Labels,
    large: Labels,
    shares: BlockShares,
}

/// Calibrates one layer. `progress` is told the share that is done.
///
/// # Errors
/// Where sizes do not belong together, and [`CalibrationError::Cancelled`].
pub fn calibrate(
    layer: &Layer<'_>,
    options: &Options,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(f64),
) -> Result<Calibration> {
    let network = layer.network;
    let training = options.train.is_some();
    let (first, second) = if training { (0.15, 0.25) } else { (0.6, 0.8) };
    let norms = network.down_norms();
    let seen = look(layer, training.then_some(&norms[..]), cancel, &mut |share| progress(first * share))?;
    let split = Split::of(layer.texts);
    let tune = evenly(&split.tune, TUNED);
    let plane = |bytes: Option<&[u8]>| {
        bytes.map(|bytes| HighPlane::of_q8_0(bytes, network.width, &seen.shares)).transpose()
    };
    let (gate, up) = (plane(layer.gate_planes)?, plane(layer.up_planes)?);
    let high = gate.as_ref().map(|gate| High { gate, up: up.as_ref() });
    let set = tune::tuned(layer, high.as_ref(), &norms, &tune, cancel)?;
    progress(second);
    let mut result = Calibration { calibrated: seen.sorted(), trained: None };
    let mut predictor = layer.predictor.cloned();
    let mut compared = Vec::new();
    if let (Some(train), Some(residuals)) = (&options.train, layer.residuals) {
        let rows: Vec<usize> = split.train.iter().cloned().flatten().collect();
        let task = Task {
            residuals,
            labels: &seen.labels,
            large: &seen.large,
            neurons: network.neurons,
            train: &rows,
            tune: &tune,
            masses: &set.masses,
            active: seen.activity.active(),
            hottest: seen.activity.hottest(),
            matrices: if network.gate.is_some() { 3 } else { 2 },
            gate_decides: network.gate.is_some() && network.is_zero_below(),
        };
        let mut told = |share: f64| progress(second + (0.95 - second) * share);
        let trained = predictor::search(&task, train, cancel, &mut told)?;
        compared = trained.compared;
        predictor = Some(trained.predictor);
        result.trained = Some((trained.fc1, trained.fc2));
    }
    let (margin, margin_levels) = match (&set.margins, &set.planes) {
        (Some(margins), _) => {
            let (margin, missed) = margins.least(options.missed);
            (margin, vec![Level { skipped: 0.0, threshold: 0.0, missed }])
        }
        (None, levels) => (0.0, levels.clone()),
    };
    let rules = measure::Rules {
        high: high.as_ref(),
        margin,
        planes: &margin_levels,
        cats: &set.cats,
        predictor: predictor.as_ref(),
    };
    let held = evenly(&split.held, HELD);
    let measured = measure::measure(layer, &rules, &norms, &held, cancel)?;
    let found = &mut result.calibrated;
    found.cats = network.gate.as_ref().map(|_| Cats { levels: set.cats, outcomes: measured.cats });
    found.predictor = predictor.map(|predictor| Predicted {
        rank: predictor.rank,
        threshold: predictor.threshold,
        outcome: measured.predictor,
        compared,
    });
    found.planes = gate.map(|gate| Planes {
        gate_deviation: gate.deviation,
        up_deviation: up.map(|up| up.deviation),
        down_norm: norms,
        margin,
        levels: margin_levels,
        outcomes: measured.planes,
    });
    progress(1.0);
    Ok(result)
}

impl Seen {
    /// The order and what it is made from.
    fn sorted(&self) -> Calibrated {
        let order = self.activity.order();
        Calibrated {
            frequency: self.activity.frequency(),
            activity: Activity {
                active: self.activity.active(),
                overlap: self.activity.overlap(),
                hottest: self.activity.hottest(),
                of_batch: self.activity.unions(),
                coactivation: self.columns.coactivation(&order),
            },
            order,
            ..Calibrated::default()
        }
    }
}

/// How active a layer is, and the order of its neurons; nothing is calibrated.
///
/// # Errors
/// Where sizes do not belong together, and [`CalibrationError::Cancelled`].
pub fn activity(layer: &Layer<'_>, cancel: &AtomicBool, progress: &mut dyn FnMut(f64)) -> Result<Calibrated> {
    Ok(look(layer, None, cancel, progress)?.sorted())
}

/// Every token once: which neurons are active and, where a predictor is trained, which of them add much, by the lengths of
/// down's rows.
fn look(
    layer: &Layer<'_>,
    training: Option<&[f32]>,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(f64),
) -> Result<Seen> {
    let network = layer.network;
    let tokens: usize = layer.texts.iter().sum();
    if tokens != layer.inputs.len() || layer.inputs.width() != network.width {
        return Err(CalibrationError::Shape(format!(
            "{} rows of {} were recorded of {tokens} tokens that a network of width {} was given; remove the recording",
            layer.inputs.len(),
            layer.inputs.width(),
            network.width
        )));
    }
    let mut seen = Seen {
        activity: LayerActivity::new(network.neurons),
        columns: Columns::new(network.neurons, layer.inputs.len()),
        labels: Labels::default(),
        large: Labels::default(),
        shares: BlockShares::default(),
    };
    let (mut inputs, mut values, mut on) = (Vec::new(), Values::default(), Vec::new());
    let mut start = 0;
    for &length in layer.texts {
        seen.activity.start();
        let end = start + length;
        while start < end {
            stop(cancel)?;
            let chunk = start..end.min(start + CHUNK);
            layer.inputs.gather(chunk.clone(), &mut inputs);
            network.compute(&inputs, &mut values)?;
            seen.activity.see(&values.hidden, network.is_zero_below());
            outcome::active(network, &values.hidden, &mut on);
            on.chunks_exact(network.neurons.max(1)).for_each(|row| seen.columns.see(row));
            if let Some(norms) = training {
                seen.labels.extend(&on, network.neurons);
                outcome::large(network, norms, &values.hidden, &mut on);
                seen.large.extend(&on, network.neurons);
            }
            seen.shares.see(&inputs, network.width);
            start = chunk.end;
            progress(start as f64 / layer.inputs.len().max(1) as f64);
        }
    }
    Ok(seen)
}

fn stop(cancel: &AtomicBool) -> Result<()> {
    if cancel.load(Ordering::Relaxed) { Err(CalibrationError::Cancelled) } else { Ok(()) }
}
