//! Mixtures of experts: the choice, and the layers of the chosen, a row of hidden activations per expert of a token.
//!
//! Weights are seen in windows of whole experts; a row whose expert is not in a dispatch's window is left to another.

use engine_core::operation::{
    Arithmetic, DownLayout, Experts, Gating, OperationKind, Quantization, Selection,
};
use engine_core::{Error, Result};

use super::plain::{Chosen, Extras};
use super::{Emitter, Operand, Rows, groups, read, weights, write};
use crate::check::partials;
use crate::kernels::{CHUNK, LANES, Mode, flags, format_name, function_code};

impl Emitter<'_> {
    pub(super) fn route(&mut self, kind: &OperationKind) -> Result<()> {
        let OperationKind::Route { scores, chosen, weights, gating, normalise, scale } = kind else {
            return Err(Error::internal("this is no route"));
        };
        let (experts, each) = (self.tensor(*scores)?.columns, self.tensor(*chosen)?.columns);
        let (from, ids, shares) = (self.rows(*scores)?, self.rows(*chosen)?, self.rows(*weights)?);
        self.dispatch(
            "route",
            vec![read(0, &from.place), write(1, &ids.place), write(2, &shares.place)],
            &[
                experts as u32,
                each as u32,
                from.stride,
                ids.stride,
                shares.stride,
                u32::from(*gating == Gating::Softmax),
                u32::from(*normalise),
                scale.to_bits(),
            ],
            [self.env.tokens, 1, 1],
        )
    }

    pub(super) fn experts(&mut self, index: usize, arithmetic: Arithmetic, op: &Experts) -> Result<()> {
        let (width, each) = (self.tensor(op.input)?.columns, self.tensor(op.chosen)?.columns);
        let neurons = self.tensor(op.up)?.rows / u64::from(op.experts.max(1));
        let rows = u64::from(self.env.tokens) * each;
        let chosen = Chosen { ids: self.rows(op.chosen)?, each: each as u32, experts: op.experts };
        let h = Rows {
            place: Self::temporary(&self.program.temporary.hidden, rows * neurons * 4)?,
            stride: neurons as u32,
        };
        let drop = match op.selection {
            Selection::GateFirst => Some(0.0f32),
            Selection::Threshold(threshold) => Some(threshold),
            _ => None,
        };
        let extras = |function, threshold: f32| Extras {
            flags: u32::from(drop.is_some()) * flags::DROP,
            function: function_code(function).unwrap_or_default(),
            threshold: threshold.to_bits(),
            chosen: Some(chosen.clone()),
            ..Extras::default()
        };
        let decides = op.gate.unwrap_or(op.up);
        let input = self.input(op.input, arithmetic.input, decides)?;
        self.product(Mode::Gate, &input, decides, &h, &extras(op.function, drop.unwrap_or(0.0)))?;
        if op.gate.is_some() {
            let input = self.input(op.input, arithmetic.input, op.up)?;
            self.product(Mode::Up, &input, op.up, &h, &extras(op.up_function, 0.0))?;
        }
        if let Some(counts) = op.active_count {
            let counts = self.rows(counts)?;
            self.dispatch(
                "count",
                vec![read(0, &h.place), read(1, &h.place), write(2, &counts.place)],
                &[neurons as u32, h.stride, 0, counts.stride, 2, each as u32],
                [self.env.tokens, 1, 1],
            )?;
        }
        if arithmetic.hidden == Quantization::Int8Blocks {
            self.quantise_rows(&h.clone(), &h, neurons, rows as u32)?;
        }
        let outputs = Rows {
            place: Self::temporary(&self.program.temporary.outputs, rows * width * 4)?,
            stride: width as u32,
        };
        match op.down_layout {
            DownLayout::OutputRows => {
                let operand = Operand { rows: h, scales: None };
                let extras = Extras { chosen: Some(chosen.clone()), ..Extras::default() };
                self.product(Mode::Down, &operand, op.down, &outputs, &extras)?;
            }
            DownLayout::NeuronRows => self.down_of_experts(op, &h, &outputs, &chosen)?,
        }
        self.combine_experts(index, op, &outputs, &chosen)
    }

    fn down_of_experts(&mut self, op: &Experts, h: &Rows, outputs: &Rows, chosen: &Chosen) -> Result<()> {
        let t = self.tensor(op.down)?;
        let neurons = t.rows / u64::from(op.experts.max(1));
        let shader = format!("down_neurons_{}_experts", format_name(t.dtype).unwrap_or_default());
        let each = u64::from(chosen.each);
        let capacity = u64::from(self.program.list.token_capacity) * each;
        let (at_once, bytes) = partials(neurons, t.columns, capacity, self.program.shared.limits);
        let chunks = neurons.div_ceil(CHUNK);
        let windows = self.windows(op.down, neurons, u64::MAX)?;
        let rows = u64::from(self.env.tokens) * each;
        let mut row = 0;
        while row < rows {
            let count = at_once.min(rows - row);
            let sums = Self::temporary(&self.program.temporary.sums, count * bytes)?;
            let hidden = h.place.part(row * neurons * 4, count * neurons * 4);
            for (first, here, window) in &windows {
                self.dispatch(
                    &shader,
                    vec![weights(0, window), read(1, &hidden), write(2, &sums), read(3, &chosen.ids.place)],
                    &[
                        neurons as u32,
                        t.columns as u32,
                        count as u32,
                        t.row_stride as u32,
                        h.stride,
                        0,
                        0,
                        chunks as u32,
                        chosen.each,
                        chosen.ids.stride,
                        (first / neurons) as u32,
                        (here / neurons) as u32,
                        row as u32,
                    ],
                    [t.columns.div_ceil(4 * LANES) as u32, chunks as u32, count as u32],
                )?;
            }
            let width = t.columns * 4;
            self.dispatch(
                "add_partials",
                vec![read(0, &sums), write(1, &outputs.place.part(row * width, count * width))],
                &[t.columns as u32, chunks as u32, outputs.stride, 0],
                [groups(t.columns), count as u32, 1],
            )?;
            row += count;
        }
        Ok(())
    }

    fn combine_experts(&mut self, index: usize, op: &Experts, outputs: &Rows, chosen: &Chosen) -> Result<()> {
        let width = self.tensor(op.output)?.columns;
        let (shares, to) = (self.rows(op.weights)?, self.rows(op.output)?);
        let (parameters, place) = self.parameters()?;
        let complaint = parameters
            .complaint(index)
            .ok_or_else(|| Error::internal("a mixture has no word to complain in"))?;
        self.dispatch(
            "combine",
            vec![
                read(0, &outputs.place),
                read(1, &shares.place),
                write(2, &to.place),
                write(3, &place),
                read(4, &chosen.ids.place),
            ],
            &[
                width as u32,
                chosen.each,
                to.stride,
                shares.stride,
                chosen.ids.stride,
                op.experts,
                u32::from(op.accumulate),
                complaint,
            ],
            [groups(width), self.env.tokens, 1],
        )
    }
}
