//! Rows of every matrix, each from a stream of its own.
//!
//! Units: the residual is `s` (elements +1 and -1, constant) plus a rest whose elements have variance `rest(layer)`: 1
//! behind the embedding, 2 behind the last layer. The norm divides both by the root of `1 + rest`.

use crate::Shape;
use crate::activity;
use crate::random::{Stream, shuffled};
use crate::vocabulary::{before, topic};
use formats::model::Activation;

/// Share of a gate row's variance that is low rank.
pub const LOW_RANK: f64 = 0.9;
/// Directions of the low-rank part that a neuron uses.
const USED: usize = 4;
/// What all layers' networks add to the variance of the residual's rest, together.
const GROWTH: f64 = 1.0;
/// What all layers' attention adds, at most.
const ATTENTION: f64 = 0.1;
/// A predictor's score is raised by this many deviations of what it does not know.
const MARGIN: f64 = 1.0;
/// Decides how sure the head is of what it foretells.
const CERTAINTY: f32 = 20.0;

/// Makes the rows of one model.
pub(crate) struct Weights<'a> {
    shape: &'a Shape,
    /// The constant direction: +1 and -1.
    constant: Vec<f32>,
}

/// What the rows of one network have in common: a layer's, or an expert's.
pub(crate) struct Network {
    name: String,
    /// Directions of the gate's low-rank part, a row each.
    directions: Vec<Vec<f32>>,
    /// Biases in standard deviations, by neuron.
    biases: Vec<f64>,
    /// Standard deviation of the residual's rest.
    rest: f64,
    /// Standard deviation of an element of `down`.
    down: f32,
}

impl<'a> Weights<'a> {
    pub(crate) fn new(shape: &'a Shape) -> Weights<'a> {
        let mut stream = Stream::new(shape.seed, "constant", 0);
        let mut sign = || if stream.next() >> 63 == 0 { 1.0 } else { -1.0 };
        Weights { shape, constant: (0..shape.width).map(|_| sign()).collect() }
    }

    fn stream(&self, name: &str, row: u64) -> Stream {
        Stream::new(self.shape.seed, name, row)
    }

    fn width(&self) -> f32 {
        self.shape.width as f32
    }

    /// Takes a row's part along the constant direction away, then puts `along` times that direction there.
    fn set_along(&self, row: &mut [f32], along: f32) {
        let part: f32 = row.iter().zip(&self.constant).map(|(w, s)| w * s).sum::<f32>() / self.width();
        row.iter_mut().zip(&self.constant).for_each(|(w, s)| *w += (along - part) * s);
    }

    /// Normal numbers with which a normed input gives a value of variance 1, times `scale`.
    pub(crate) fn plain(&self, name: &str, index: u64, scale: f32, row: &mut [f32]) {
        row.fill(0.0);
        let scale = scale / (row.len() as f32).sqrt();
        self.stream(name, index).add_normal(row, scale);
    }

    pub(crate) fn router(&self, name: &str, index: u64, row: &mut [f32]) {
        self.plain(name, index, 2.0, row);
        self.set_along(row, 0.0);
    }

    /// Scale of attention's output matrix.
    pub(crate) fn attention_scale(&self) -> f32 {
        (ATTENTION / f64::from(self.shape.layers)).sqrt() as f32
    }

    pub(crate) fn embedding(&self, id: u32, row: &mut [f32]) {
        row.fill(0.0);
        self.stream("topic", u64::from(topic(id))).add_normal(row, 0.5f32.sqrt());
        self.stream("own", u64::from(id)).add_normal(row, 0.5f32.sqrt());
        self.set_along(row, 1.0);
    }

    pub(crate) fn head(&self, id: u32, row: &mut [f32]) {
        row.fill(0.0);
        let scale = CERTAINTY / self.width();
        self.stream("topic", u64::from(topic(id))).add_normal(row, scale);
        self.stream("own", u64::from(before(id, self.shape.vocabulary))).add_normal(row, scale);
        self.set_along(row, 0.0);
    }

    /// The network of a layer (expert 0), or of an expert.
    pub(crate) fn network(&self, layer: u32, expert: u32) -> Network {
        let shape = self.shape;
        let name = format!("blk.{layer}.{expert}");
        let rest = 1.0 + GROWTH * f64::from(layer) / f64::from(shape.layers);
        let both = shape.activation == Activation::DRelu;
        let places = shuffled(shape.hidden as usize, self.stream(&format!("{name}.places"), 0));
        let share = |&place: &u32| {
            let share = activity::share((f64::from(place) + 0.5) / f64::from(shape.hidden));
            // Gate and up are independent, so both are positive as often as their shares' product says.
            activity::bias(if both { share.sqrt() } else { share })
        };
        let biases: Vec<f64> = places.iter().map(share).collect();
        let squares: f64 = biases
            .iter()
            .map(|&bias| {
                let of_one = rest / (1.0 + rest) * activity::mean_square(bias);
                if both { of_one * of_one } else { of_one }
            })
            .sum();
        let down = (GROWTH / f64::from(shape.layers) / squares).sqrt() as f32;
        let direction = |index| {
            let mut row = vec![0.0; shape.width as usize];
            self.plain(&format!("{name}.directions"), index, 1.0, &mut row);
            self.set_along(&mut row, 0.0);
            row
        };
        let directions = (0..u64::from(shape.gate_rank())).map(direction).collect();
        Network { name, directions, biases, rest: rest.sqrt(), down }
    }

    /// The low-rank part of a neuron's gate: directions and factors. One direction out of each quarter.
    fn low_rank(&self, network: &Network, neuron: u32) -> [(usize, f32); USED] {
        let mut stream = self.stream(&format!("{}.picks", network.name), u64::from(neuron));
        let rank = network.directions.len();
        let factor = (LOW_RANK / USED as f64).sqrt() as f32;
        std::array::from_fn(|part| {
            let (start, end) = (part * rank / USED, (part + 1) * rank / USED);
            let draw = stream.next();
            let sign = if draw >> 63 == 0 { factor } else { -factor };
            (start + (draw % (end - start).max(1) as u64) as usize, sign)
        })
    }

    pub(crate) fn gate(&self, network: &Network, neuron: u32, row: &mut [f32]) {
        self.plain(&format!("{}.gate", network.name), u64::from(neuron), (1.0 - LOW_RANK).sqrt() as f32, row);
        for (direction, factor) in self.low_rank(network, neuron) {
            row.iter_mut().zip(&network.directions[direction]).for_each(|(w, d)| *w += factor * d);
        }
        self.set_bias(network, neuron, row);
    }

    /// Gives a row the neuron's bias: `s . s` is the width.
    fn set_bias(&self, network: &Network, neuron: u32, row: &mut [f32]) {
        let bias = network.biases[neuron as usize] * network.rest;
        self.set_along(row, bias as f32 / self.width());
    }

    pub(crate) fn up(&self, network: &Network, neuron: u32, row: &mut [f32]) {
        self.plain(&format!("{}.up", network.name), u64::from(neuron), 1.0, row);
        if self.shape.activation == Activation::DRelu {
            self.set_bias(network, neuron, row);
        }
    }

    pub(crate) fn down(&self, network: &Network, neuron: u32, row: &mut [f32]) {
        row.fill(0.0);
        self.stream(&format!("{}.down", network.name), u64::from(neuron)).add_normal(row, network.down);
    }

    /// Rows of the predictor's first matrix: every direction, every direction turned round, the constant one, nothing.
    pub(crate) fn fc1(&self, network: &Network, index: u32, row: &mut [f32]) {
        let (index, rank) = (index as usize, network.directions.len());
        row.fill(0.0);
        if let Some(direction) = network.directions.get(index % rank).filter(|_| index < 2 * rank) {
            let sign = if index < rank { 1.0 } else { -1.0 };
            row.iter_mut().zip(direction).for_each(|(w, d)| *w = sign * d);
        } else if index == 2 * rank {
            self.set_along(row, 1.0 / self.width());
        }
    }

    /// A neuron's row of the predictor's second matrix: at least 0 where the low-rank part and the margin say active.
    pub(crate) fn fc2(&self, network: &Network, neuron: u32, row: &mut [f32]) {
        let rank = network.directions.len();
        row.fill(0.0);
        for (direction, factor) in self.low_rank(network, neuron) {
            row[direction] += factor;
            row[rank + direction] -= factor;
        }
        let bias = network.biases[neuron as usize] + MARGIN * (1.0 - LOW_RANK).sqrt();
        row[2 * rank] = (bias * network.rest) as f32;
    }
}
