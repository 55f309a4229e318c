//! Bit planes as a guess of the whole: the high plane's product, and how far off it is.

use crate::{CalibrationError, Result, network};

/// Elements of a block of Q8_0.
const BLOCK: usize = 32;
/// Variance of the low nibble about its middle, in units of the block's scale squared: (16^2 - 1) / 12.
const VARIANCE: f64 = 21.25;

/// The high plane of a matrix with a row per neuron.
#[derive(Clone, Debug)]
pub struct HighPlane {
    /// What it says of each element: `[neurons x width]`.
    pub estimate: Vec<f32>,
    /// Per neuron, the standard deviation of what it leaves out, by the length of the input.
    pub deviation: Vec<f32>,
}

impl HighPlane {
    /// Of a matrix in Q8_0.
    ///
    /// # Errors
    /// Where the bytes are no matrix of rows of `width`.
    pub fn of_q8_0(bytes: &[u8], width: usize, shares: &BlockShares) -> Result<HighPlane> {
        let scales = formats::quantise::planes::scales_q8_0(bytes);
        let mut estimate = vec![0.0; scales.len() * BLOCK];
        formats::quantise::planes::estimate_q8_0(bytes, &mut estimate)?;
        if width == 0 || !width.is_multiple_of(BLOCK) || !estimate.len().is_multiple_of(width) {
            return Err(CalibrationError::Shape(format!("{} elements in rows of {width}", estimate.len())));
        }
        let shares = shares.mean(width / BLOCK);
        let deviation = |scales: &[f32]| {
            let squares = scales.iter().zip(&shares).map(|(&d, share)| f64::from(d) * f64::from(d) * share);
            (VARIANCE * squares.sum::<f64>()).sqrt() as f32
        };
        let deviation = scales.chunks_exact(width / BLOCK).map(deviation).collect();
        Ok(HighPlane { estimate, deviation })
    }

    /// Estimates for some inputs, a row of neurons per token.
    ///
    /// # Errors
    /// Where sizes do not belong together.
    pub fn estimate(&self, bias: Option<&[f32]>, inputs: &[f32], out: &mut Vec<f32>) -> Result<()> {
        let (neurons, width) = (self.deviation.len(), self.estimate.len() / self.deviation.len().max(1));
        out.resize(inputs.len() / width.max(1) * neurons, 0.0);
        network::linear(&self.estimate, bias, inputs, width, out)
    }
}

/// Which share of an input's squared length lies in each block, on average.
#[derive(Clone, Debug, Default)]
pub struct BlockShares {
    sums: Vec<f64>,
    tokens: u64,
}

impl BlockShares {
    /// Some inputs, a row of `width` per token.
    pub fn see(&mut self, inputs: &[f32], width: usize) {
        self.sums.resize(width / BLOCK, 0.0);
        for row in inputs.chunks_exact(width.max(1)) {
            let square = |part: &[f32]| part.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
            let whole = square(row);
            if whole > 0.0 {
                let blocks = self.sums.iter_mut().zip(row.chunks_exact(BLOCK));
                blocks.for_each(|(sum, block)| *sum += square(block) / whole);
                self.tokens += 1;
            }
        }
    }

    /// The mean shares; even where nothing was seen.
    fn mean(&self, blocks: usize) -> Vec<f64> {
        if self.tokens == 0 || self.sums.len() != blocks {
            return vec![1.0 / blocks as f64; blocks];
        }
        self.sums.iter().map(|sum| sum / self.tokens as f64).collect()
    }
}

/// Lengths of inputs, a row of `width` per token.
pub fn lengths(inputs: &[f32], width: usize) -> Vec<f32> {
    let length = |row: &[f32]| row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32;
    inputs.chunks_exact(width.max(1)).map(length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine_core::DType;
    use formats::quantise::{dequantise, quantise};

    fn noise(count: usize, seed: u64) -> Vec<f32> {
        let mut random = crate::predictor::Random::new(seed);
        (0..count).map(|_| random.symmetric() as f32).collect()
    }

    #[test]
    fn deviations_are_those_that_are_found() {
        let (width, neurons, tokens) = (256, 40, 400);
        let mut weights = noise(neurons * width, 1);
        // Neurons of different sizes, and inputs whose first block is large.
        weights.chunks_exact_mut(width).enumerate().for_each(|(i, row)| {
            row.iter_mut().for_each(|x| *x *= 1.0 + i as f32);
            row[..32].iter_mut().for_each(|x| *x *= 3.0);
        });
        let mut inputs = noise(tokens * width, 2);
        inputs.chunks_exact_mut(width).for_each(|row| row[..32].iter_mut().for_each(|x| *x *= 5.0));
        let mut shares = BlockShares::default();
        shares.see(&inputs, width);
        assert!((shares.mean(8).iter().sum::<f64>() - 1.0).abs() < 1e-9);
        let bytes = quantise(DType::Q8_0, &weights).unwrap();
        let plane = HighPlane::of_q8_0(&bytes, width, &shares).unwrap();
        let mut stored = vec![0.0; weights.len()];
        dequantise(DType::Q8_0, &bytes, &mut stored).unwrap();
        let (mut exact, mut guess) = (vec![0.0; tokens * neurons], Vec::new());
        network::linear(&stored, None, &inputs, width, &mut exact).unwrap();
        plane.estimate(None, &inputs, &mut guess).unwrap();
        let lengths = lengths(&inputs, width);
        for i in 0..neurons {
            let square = |t: usize| ((exact[t * neurons + i] - guess[t * neurons + i]) / lengths[t]).powi(2);
            let found = ((0..tokens).map(square).sum::<f32>() / tokens as f32).sqrt();
            let ratio = found / plane.deviation[i];
            assert!((0.75..1.35).contains(&ratio), "neuron {i}: {found} of {}", plane.deviation[i]);
        }
        assert!(HighPlane::of_q8_0(&bytes, 48, &shares).is_err());
    }
}
