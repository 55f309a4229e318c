//! Mixtures of experts: each expert's neurons sorted by how often they are active for the tokens that use it.

use crate::layer::{Activity, Calibrated, Layer, activity};
use crate::network::Network;
use crate::rows::{Rows, row_bytes};
use crate::{CalibrationError, Result};
use std::sync::atomic::AtomicBool;

/// What is known of a mixture.
pub struct Mixture<'a> {
    /// Experts.
    pub count: usize,
    /// Weights of an expert.
    pub network: &'a dyn Fn(usize) -> Result<Network>,
    /// What the experts were given.
    pub inputs: Rows<'a>,
    /// The experts that each token used, as many for every one.
    pub chosen: &'a [u32],
    /// Tokens of each text.
    pub texts: &'a [usize],
}

/// Looks at every expert with the tokens that used it. In the result orders and frequencies of experts follow one another;
/// how active they are is a mean over all uses. `progress` is told the share that is done.
///
/// # Errors
/// Where sizes do not belong together, and [`CalibrationError::Cancelled`].
pub fn sort(mixture: &Mixture<'_>, cancel: &AtomicBool, progress: &mut dyn FnMut(f64)) -> Result<Calibrated> {
    let tokens = mixture.inputs.len();
    let used = mixture.chosen.len() / tokens.max(1);
    if mixture.texts.iter().sum::<usize>() != tokens || used * tokens != mixture.chosen.len() || used == 0 {
        return Err(CalibrationError::Shape(format!(
            "{tokens} rows and {} choices of experts were recorded of {} tokens; remove the recording",
            mixture.chosen.len(),
            mixture.texts.iter().sum::<usize>()
        )));
    }
    let mut result = Calibrated::default();
    let mut uses = 0;
    for expert in 0..mixture.count {
        let network = (mixture.network)(expert)?;
        let (rows, texts) = routed(mixture, expert, used);
        let layer = Layer {
            network: &network,
            gate_planes: None,
            up_planes: None,
            inputs: Rows::new(&rows, network.width, row_bytes(network.width), 0),
            residuals: None,
            texts: &texts,
            predictor: None,
        };
        let told = &mut |share: f64| progress((expert as f64 + share) / mixture.count as f64);
        let found = activity(&layer, cancel, told)?;
        let count = layer.inputs.len();
        add(&mut result.activity, &found.activity, count as f64);
        uses += count;
        result.order.extend(found.order);
        result.frequency.extend(found.frequency);
    }
    let sum = std::mem::take(&mut result.activity);
    add(&mut result.activity, &sum, 1.0 / uses.max(1) as f64);
    Ok(result)
}

/// The rows of the tokens that use an expert, and how many of them each text has.
fn routed(mixture: &Mixture<'_>, expert: usize, used: usize) -> (Vec<u8>, Vec<usize>) {
    let mut rows = Vec::new();
    let mut at = 0;
    let texts = mixture.texts.iter().map(|&length| {
        let here = at..at + length;
        at += length;
        let uses =
            |token: &usize| mixture.chosen[token * used..][..used].iter().any(|&id| id as usize == expert);
        here.filter(uses).map(|token| rows.extend_from_slice(mixture.inputs.encoded(token))).count()
    });
    let texts = texts.collect();
    (rows, texts)
}

/// Adds `times` the figures of `other`, those that have a mean.
fn add(sum: &mut Activity, other: &Activity, times: f64) {
    sum.active += times * other.active;
    sum.overlap += times * other.overlap;
    sum.hottest += times * other.hottest;
    sum.coactivation.companion += times * other.coactivation.companion;
    sum.coactivation.lift += times * other.coactivation.lift;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Function;
    use crate::rows::encode;

    /// Two neurons: the first of expert 0 fires where x[0] is positive, the second always; of expert 1 the first never.
    fn network(expert: usize) -> Network {
        let gate = match expert {
            0 => vec![1.0, 0.0, 0.0, 1.0],
            _ => vec![0.0, -1.0, 0.0, 1.0],
        };
        Network {
            width: 2,
            neurons: 2,
            gate: Some(gate),
            up: vec![0.0, 1.0, 0.0, 1.0],
            down: vec![1.0; 4],
            gate_bias: None,
            up_bias: None,
            function: Function::Relu,
            up_function: Function::Identity,
        }
    }

    #[test]
    fn experts_are_sorted_by_the_tokens_that_use_them() {
        let mut bytes = Vec::new();
        for x in [1.0, -1.0, -1.0, 1.0] {
            encode(&[x, 1.0], &mut bytes);
        }
        let found = |chosen: &[u32]| {
            let mixture = Mixture {
                count: 3,
                network: &|expert| Ok(network(expert)),
                inputs: Rows::new(&bytes, 2, row_bytes(2), 0),
                chosen,
                texts: &[1, 3],
            };
            sort(&mixture, &AtomicBool::new(false), &mut |_| {})
        };
        let result = found(&[0, 0, 1, 1]).unwrap();
        assert_eq!(result.order, [1, 0, 1, 0, 0, 1]);
        assert_eq!(result.frequency, [0.5, 1.0, 0.0, 1.0, 0.0, 0.0]);
        assert!((result.activity.active - (0.75 * 2.0 + 0.5 * 2.0) / 4.0).abs() < 1e-12);
        assert!(found(&[0, 0, 1]).is_err() && found(&[]).is_err());
    }
}
