//! A layer's feed-forward network in f32 on the host: what every neuron does for given inputs.

use crate::{Result, product};
use formats::model::Activation;

/// What a value goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// Itself.
    Identity,
    /// max(x, 0).
    Relu,
    /// x / (1 + e^-x).
    Silu,
    /// GELU by the tanh approximation.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
}

impl Function {
    /// Those of gate and up in a network that has both; without a gate the first one is up's.
    pub fn of_activation(activation: Activation, gated: bool) -> Option<(Function, Function)> {
        let first = match activation {
            Activation::Silu => Function::Silu,
            Activation::Relu | Activation::DRelu => Function::Relu,
            Activation::GeluTanh => Function::GeluTanh,
            Activation::GeluErf => Function::GeluErf,
            _ => return None,
        };
        let both = gated && activation == Activation::DRelu;
        Some((first, if both { Function::Relu } else { Function::Identity }))
    }

    /// The function's value.
    pub fn of(self, x: f32) -> f32 {
        match self {
            Function::Identity => x,
            Function::Relu => x.max(0.0),
            Function::Silu => x / (1.0 + (-x).exp()),
            Function::GeluTanh => {
                const ROOT: f32 = 0.797_884_6; // sqrt(2 / pi)
                0.5 * x * (1.0 + (ROOT * (x + 0.044_715 * x * x * x)).tanh())
            }
            Function::GeluErf => 0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2)),
        }
    }

    /// Whether it is 0 for everything up to 0.
    pub fn is_zero_below(self) -> bool {
        self == Function::Relu
    }
}

/// Weights as they will be stored; matrices with a row per neuron.
#[derive(Clone, Debug)]
pub struct Network {
    /// Width of the residual.
    pub width: usize,
    /// Neurons.
    pub neurons: usize,
    /// `[neurons x width]`, where there is a gate.
    pub gate: Option<Vec<f32>>,
    /// `[neurons x width]`.
    pub up: Vec<f32>,
    /// `[neurons x width]`: neuron i is row i.
    pub down: Vec<f32>,
    /// A value per neuron.
    pub gate_bias: Option<Vec<f32>>,
    /// A value per neuron.
    pub up_bias: Option<Vec<f32>>,
    /// What gate goes through, or up where there is no gate.
    pub function: Function,
    /// What up goes through where there is a gate.
    pub up_function: Function,
}

/// A chunk's values, a row of neurons per token.
#[derive(Clone, Debug, Default)]
pub struct Values {
    /// Gate with its bias, before its function; empty where there is no gate.
    pub gate: Vec<f32>,
    /// Up with its bias, before its function.
    pub up: Vec<f32>,
    /// What is multiplied with down.
    pub hidden: Vec<f32>,
}

impl Network {
    /// Length of each neuron's row of down.
    pub fn down_norms(&self) -> Vec<f32> {
        let length =
            |row: &[f32]| row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32;
        self.down.chunks_exact(self.width.max(1)).map(length).collect()
    }

    /// Values for some inputs, a row of `width` per token.
    ///
    /// # Errors
    /// Where sizes do not belong together.
    pub fn compute(&self, inputs: &[f32], values: &mut Values) -> Result<()> {
        let count = inputs.len() / self.width.max(1) * self.neurons;
        values.up.resize(count, 0.0);
        values.hidden.resize(count, 0.0);
        linear(&self.up, self.up_bias.as_deref(), inputs, self.width, &mut values.up)?;
        match &self.gate {
            Some(gate) => {
                values.gate.resize(count, 0.0);
                linear(gate, self.gate_bias.as_deref(), inputs, self.width, &mut values.gate)?;
                for ((hidden, &gate), &up) in values.hidden.iter_mut().zip(&values.gate).zip(&values.up) {
                    *hidden = self.function.of(gate) * self.up_function.of(up);
                }
            }
            None => {
                for (hidden, &up) in values.hidden.iter_mut().zip(&values.up) {
                    *hidden = self.function.of(up);
                }
            }
        }
        Ok(())
    }

    /// `out[tokens x width] = hidden . down`.
    ///
    /// # Errors
    /// Where sizes do not belong together.
    pub fn output(&self, hidden: &[f32], out: &mut Vec<f32>) -> Result<()> {
        out.resize(hidden.len() / self.neurons.max(1) * self.width, 0.0);
        product::plain(hidden, &self.down, self.neurons, out)
    }

    /// Whether neurons are off, exactly, for what their gate is not above.
    pub fn is_zero_below(&self) -> bool {
        self.function.is_zero_below()
    }
}

/// `out = inputs . weight^T + bias`.
pub(crate) fn linear(
    weight: &[f32],
    bias: Option<&[f32]>,
    inputs: &[f32],
    width: usize,
    out: &mut [f32],
) -> Result<()> {
    product::by_rows(inputs, weight, width, out)?;
    if let Some(bias) = bias {
        for row in out.chunks_exact_mut(bias.len().max(1)) {
            row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
    }
    Ok(())
}

/// `[rows x columns]` turned: `[columns x rows]`.
pub fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns.max(1);
    let mut out = vec![0.0; values.len()];
    for (row, values) in values.chunks_exact(columns.max(1)).enumerate() {
        for (column, &value) in values.iter().enumerate() {
            out[column * rows + row] = value;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_their_known_values() {
        let near = |a: f32, b: f32| assert!((a - b).abs() < 1e-6, "{a} is not {b}");
        near(Function::Silu.of(1.0), 0.731_058_6);
        near(Function::GeluErf.of(1.0), 0.841_344_7);
        near(Function::GeluTanh.of(1.0), 0.841_192);
        near(Function::Relu.of(-1.0), 0.0);
        assert!(Function::Silu.of(-200.0).abs() < 1e-30);
    }

    #[test]
    fn a_network_of_two_neurons() {
        let network = Network {
            width: 2,
            neurons: 2,
            gate: Some(vec![1.0, 0.0, 0.0, 1.0]),
            up: vec![2.0, 0.0, 0.0, 3.0],
            down: vec![1.0, 1.0, 3.0, 4.0],
            gate_bias: Some(vec![0.0, 5.0]),
            up_bias: None,
            function: Function::Relu,
            up_function: Function::Identity,
        };
        let mut values = Values::default();
        network.compute(&[1.0, -1.0, -1.0, -6.0], &mut values).unwrap();
        assert_eq!(values.gate, [1.0, 4.0, -1.0, -1.0]);
        assert_eq!(values.hidden, [2.0, -12.0, 0.0, 0.0]);
        let mut out = Vec::new();
        network.output(&values.hidden, &mut out).unwrap();
        assert_eq!(out, [2.0 - 36.0, 2.0 - 48.0, 0.0, 0.0]);
        assert_eq!(network.down_norms(), [2.0f32.sqrt(), 5.0]);
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
