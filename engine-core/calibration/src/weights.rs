//! A layer's weights as they will be stored, in f32: from the plan of what is written.

use crate::network::{Function, Network, transposed};
use crate::predictor::Predictor;
use crate::{CalibrationError, Result};
use engine_core::DType;
use formats::ModelDescription;
use formats::convert::{Encoded, Output};
use formats::quantise::dequantise;

/// Which matrices are stored in bit planes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InPlanes {
    /// Gate.
    pub gate: bool,
    /// Up.
    pub up: bool,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// The network.
    pub network: Network,
    /// Gate in Q8_0, where it is stored in planes.
    pub gate_planes: Option<Vec<u8>>,
    /// The same of up.
    pub up_planes: Option<Vec<u8>>,
    /// The predictor that the model has.
    pub predictor: Option<Predictor>,
}

/// The experts of one layer, as stored; one at a time becomes f32.
#[derive(Debug)]
pub struct Experts {
    layer: usize,
    width: usize,
    neurons: usize,
    count: usize,
    gate: Option<Encoded>,
    up: Encoded,
    function: Function,
    up_function: Function,
}

impl Experts {
    /// Reads the experts of layer `index` of `model` from the plan `output`, whose neurons are in the model's order.
    ///
    /// # Errors
    /// For layers that have one network, activations that are not known here, and tensors that are missing.
    pub fn read(output: &Output<'_>, model: &ModelDescription, index: usize) -> Result<Experts> {
        let layer = Reader { output, index };
        let found = model.layers.get(index).map(|layer| &layer.ffn);
        let Some((ffn, experts)) = found.and_then(|ffn| Some((ffn, ffn.experts.as_ref()?))) else {
            return Err(CalibrationError::Shape(format!("layer {index} of the model has no experts")));
        };
        let Some((function, up_function)) = Function::of_activation(ffn.activation, ffn.gated) else {
            let problem = format!("goes through `{}`, which is not calibrated", ffn.activation.name());
            return Err(layer.refused("ffn_up_exps.weight", problem));
        };
        let gate = ffn.gated.then(|| layer.tensor("ffn_gate_exps.weight", None)).transpose()?;
        let up = layer.tensor("ffn_up_exps.weight", None)?;
        let (width, neurons, count) = (model.n_embd, ffn.n_ff, experts.count);
        let wanted = [width as u64, neurons as u64, count as u64];
        for (part, matrix) in [("ffn_gate_exps.weight", gate.as_ref()), ("ffn_up_exps.weight", Some(&up))] {
            if matrix.is_some_and(|matrix| matrix.dims != wanted) {
                return Err(layer.refused(part, format!("is not {wanted:?}")));
            }
        }
        Ok(Experts { layer: index, width, neurons, count, gate, up, function, up_function })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Gate and up of an expert; down, which decides nothing about who is active, is left out.
    ///
    /// # Errors
    /// For an expert that the layer has not, and bytes that are too few.
    pub fn network(&self, expert: usize) -> Result<Network> {
        let matrix = |encoded: &Encoded| -> Result<Vec<f32>> {
            let size = encoded.bytes.len() / self.count.max(1);
            let Some(bytes) = encoded.bytes.get(expert * size..(expert + 1) * size) else {
                let problem = format!("layer {} has no expert {expert}", self.layer);
                return Err(CalibrationError::Shape(problem));
            };
            let mut values = vec![0.0; self.width * self.neurons];
            dequantise(encoded.dtype, bytes, &mut values)?;
            Ok(values)
        };
        Ok(Network {
            width: self.width,
            neurons: self.neurons,
            gate: self.gate.as_ref().map(matrix).transpose()?,
            up: matrix(&self.up)?,
            down: Vec::new(),
            gate_bias: None,
            up_bias: None,
            function: self.function,
            up_function: self.up_function,
        })
    }
}

/// Reads layer `index` of `model` from the plan `output`, whose neurons are in the model's order.
///
/// # Errors
/// For mixtures of experts, activations that are not known here, and tensors that are missing.
pub fn read(
    output: &Output<'_>,
    model: &ModelDescription,
    index: usize,
    in_planes: InPlanes,
) -> Result<LayerWeights> {
    let layer = Reader { output, index };
    let Some(ffn) = model.layers.get(index).map(|layer| &layer.ffn) else {
        return Err(CalibrationError::Shape(format!("the model has no layer {index}")));
    };
    if ffn.experts.is_some() {
        let problem = "is a mixture of experts, which are sorted only".into();
        return Err(layer.refused("ffn_gate_exps.weight", problem));
    }
    let Some((function, up_function)) = Function::of_activation(ffn.activation, ffn.gated) else {
        let problem = format!("goes through `{}`, which is not calibrated", ffn.activation.name());
        return Err(layer.refused("ffn_up.weight", problem));
    };
    let matrix = |part: &str, in_planes: bool| -> Result<(Vec<f32>, Option<Vec<u8>>)> {
        let encoded = layer.tensor(part, in_planes.then_some(DType::Q8_0))?;
        let values = layer.values(part, &encoded, (model.n_embd, ffn.n_ff))?;
        Ok((values, in_planes.then_some(encoded.bytes)))
    };
    let bias = |part: &str| -> Result<Option<Vec<f32>>> {
        match output.encoded(&layer.name(part), Some(DType::F32))? {
            None => Ok(None),
            Some(encoded) => layer.values(part, &encoded, (ffn.n_ff, 1)).map(Some),
        }
    };
    let (gate, gate_planes) = match ffn.gated {
        true => matrix("ffn_gate.weight", in_planes.gate).map(|(values, bytes)| (Some(values), bytes))?,
        false => (None, None),
    };
    let (up, up_planes) = matrix("ffn_up.weight", in_planes.up)?;
    let down = match output.encoded(&layer.name("ffn_down_t.weight"), None)? {
        Some(encoded) => layer.values("ffn_down_t.weight", &encoded, (model.n_embd, ffn.n_ff))?,
        None => {
            let encoded = layer.tensor("ffn_down.weight", None)?;
            transposed(&layer.values("ffn_down.weight", &encoded, (ffn.n_ff, model.n_embd))?, ffn.n_ff)
        }
    };
    let predictor = match (&ffn.predictor, &model.prediction) {
        (Some(predictor), Some(prediction)) if output.encoded(&layer.name("fc1.weight"), None)?.is_some() => {
            let read = |part: &str, shape| layer.values(part, &layer.tensor(part, None)?, shape);
            Some(Predictor {
                rank: predictor.rank,
                fc1: read("fc1.weight", (model.n_embd, predictor.rank))?,
                fc2: read("fc2.weight", (predictor.rank, ffn.n_ff))?,
                threshold: prediction.threshold,
            })
        }
        _ => None,
    };
    let network = Network {
        width: model.n_embd,
        neurons: ffn.n_ff,
        gate,
        up,
        down,
        gate_bias: bias("ffn_gate.bias")?,
        up_bias: bias("ffn_up.bias")?,
        function,
        up_function,
    };
    Ok(LayerWeights { network, gate_planes, up_planes, predictor })
}

struct Reader<'a> {
    output: &'a Output<'a>,
    index: usize,
}

impl Reader<'_> {
    fn name(&self, part: &str) -> String {
        format!("blk.{}.{part}", self.index)
    }

    fn refused(&self, part: &str, problem: String) -> CalibrationError {
        CalibrationError::Tensor { layer: self.index, tensor: self.name(part), problem }
    }

    fn tensor(&self, part: &str, dtype: Option<DType>) -> Result<Encoded> {
        let found = self.output.encoded(&self.name(part), dtype)?;
        found.ok_or_else(|| self.refused(part, "is missing; the file is incomplete".into()))
    }

    /// A matrix of this many columns and rows.
    fn values(&self, part: &str, encoded: &Encoded, (columns, rows): (usize, usize)) -> Result<Vec<f32>> {
        let found: Vec<u64> = encoded.dims.iter().copied().filter(|&dim| dim != 1).collect();
        let wanted: Vec<u64> = [columns as u64, rows as u64].into_iter().filter(|&dim| dim != 1).collect();
        if found != wanted {
            let problem = format!("is {found:?}, where {wanted:?} is wanted");
            return Err(self.refused(part, problem));
        }
        let mut values = vec![0.0; columns * rows];
        dequantise(encoded.dtype, &encoded.bytes, &mut values)?;
        Ok(values)
    }
}
