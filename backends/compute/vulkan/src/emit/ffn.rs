//! Feed-forward layers and predictors.
//!
//! `h` is made by one product with gate and one with up, over it; a neuron that takes no part is marked in `h`, and what is
//! marked is neither read nor added by what follows. The order of sums depends on a neuron's number alone.

use engine_core::operation::{Arithmetic, DownLayout, Ffn, Quantization, Selection, SlotId};
use engine_core::{Error, Result};

use super::plain::Extras;
use super::{Emitter, Operand, Rows, groups, read, weights, write};
use crate::check::partials;
use crate::kernels::{CHUNK, DOWN_TILE, LANES, Mode, flags, format_name, function_code};
use crate::memory::Place;

impl Emitter<'_> {
    pub(super) fn ffn(&mut self, index: usize, arithmetic: Arithmetic, ffn: &Ffn) -> Result<()> {
        let neurons = self.tensor(ffn.up)?.rows;
        let bytes = neurons * 4 * u64::from(self.env.tokens);
        let h =
            Rows { place: Self::temporary(&self.program.temporary.hidden, bytes)?, stride: neurons as u32 };
        self.hidden(index, ffn, arithmetic.input, &h)?;
        self.report(ffn, &h, neurons)?;
        if arithmetic.hidden == Quantization::Int8Blocks {
            self.quantise(&h.clone(), &h, neurons)?;
        }
        match ffn.down_layout {
            DownLayout::OutputRows => {
                let output = self.rows(ffn.output)?;
                let flags = u32::from(ffn.accumulate) * flags::ACCUMULATE;
                self.product(
                    Mode::Down,
                    &Operand { rows: h, scales: None },
                    ffn.down,
                    &output,
                    &Extras { flags, ..Extras::default() },
                )
            }
            DownLayout::NeuronRows => self.down_by_neuron(ffn, &h),
        }
    }

    fn hidden(&mut self, index: usize, ffn: &Ffn, quantization: Quantization, h: &Rows) -> Result<()> {
        let place = |id: Option<SlotId>| id.map(|id| self.place(id)).transpose();
        let (gate_bias, up_bias) = (place(ffn.gate_bias)?, place(ffn.up_bias)?);
        let drop = match ffn.selection {
            Selection::GateFirst => Some(0.0f32),
            Selection::Mask(_) if ffn.function.is_zero_below() => Some(0.0f32),
            Selection::Threshold(threshold) => Some(threshold),
            _ => None,
        };
        let bits = |on: bool, bit: u32| u32::from(on) * bit;
        // Without a gate, up decides.
        let (decides, bias) = match ffn.gate {
            Some(gate) => (gate, gate_bias),
            None => (ffn.up, up_bias.clone()),
        };
        let mask = match ffn.selection {
            Selection::Mask(mask) => Some((self.place(mask)?, self.tensor(mask)?.row_stride as u32)),
            _ => None,
        };
        let ranged = self.env.ranges.iter().any(|(operation, _)| *operation as usize == index);
        let active = if ranged {
            let (parameters, place) = self.parameters()?;
            let first = parameters.active(index);
            Some((place, first.ok_or_else(|| Error::internal("an ffn has no room for ranges"))?))
        } else {
            None
        };
        let first = Extras {
            flags: bits(bias.is_some(), flags::BIAS)
                | bits(mask.is_some(), flags::MASK)
                | bits(ranged, flags::RANGES)
                | bits(drop.is_some(), flags::DROP),
            bias,
            function: function_code(ffn.function).unwrap_or_default(),
            threshold: drop.unwrap_or(0.0).to_bits(),
            mask,
            active,
            chosen: None,
        };
        let input = self.input(ffn.input, quantization, decides)?;
        self.product(Mode::Gate, &input, decides, h, &first)?;
        if ffn.gate.is_some() {
            let second = Extras {
                flags: bits(up_bias.is_some(), flags::BIAS) | bits(drop.is_some(), flags::DROP),
                bias: up_bias,
                function: function_code(ffn.up_function).unwrap_or_default(),
                threshold: 0,
                ..Extras::default()
            };
            let input = self.input(ffn.input, quantization, ffn.up)?;
            self.product(Mode::Up, &input, ffn.up, h, &second)?;
        }
        Ok(())
    }

    /// The optional outputs.
    fn report(&mut self, ffn: &Ffn, h: &Rows, neurons: u64) -> Result<()> {
        if ffn.hidden.is_none() && ffn.active_count.is_none() {
            return Ok(());
        }
        let rows = |id: Option<SlotId>| id.map(|id| self.rows(id)).transpose();
        let (hidden, counts) = (rows(ffn.hidden)?, rows(ffn.active_count)?);
        let what = u32::from(hidden.is_some()) + 2 * u32::from(counts.is_some());
        let mut bindings = vec![read(0, &h.place)];
        for (at, rows) in [(1, &hidden), (2, &counts)] {
            bindings.push(rows.as_ref().map_or_else(|| read(at, &h.place), |rows| write(at, &rows.place)));
        }
        let stride = |rows: &Option<Rows>| rows.as_ref().map_or(0, |rows| rows.stride);
        self.dispatch(
            "count",
            bindings,
            &[neurons as u32, h.stride, stride(&hidden), stride(&counts), what, 1],
            [self.env.tokens, 1, 1],
        )
    }

    /// `down` with a row per neuron: sums of chunks for some tokens at a time, then their sum.
    fn down_by_neuron(&mut self, ffn: &Ffn, h: &Rows) -> Result<()> {
        let t = self.tensor(ffn.down)?;
        let output = self.rows(ffn.output)?;
        let shader = format!("down_neurons_{}", format_name(t.dtype).unwrap_or_default());
        let limits = self.program.shared.limits;
        let (at_once, bytes) = partials(t.rows, t.columns, self.program.list.token_capacity.into(), limits);
        let chunks = t.rows.div_ceil(CHUNK);
        let windows = self.windows(ffn.down, CHUNK, limits.max_groups.saturating_mul(CHUNK))?;
        let mut token = 0u64;
        while token < u64::from(self.env.tokens) {
            let tokens = at_once.min(u64::from(self.env.tokens) - token);
            let sums = Self::temporary(&self.program.temporary.sums, tokens * bytes)?;
            let row = u64::from(h.stride) * 4;
            let rows: Place = h.place.part(token * row, tokens * row);
            for (first, count, window) in &windows {
                self.dispatch(
                    &shader,
                    vec![weights(0, window), read(1, &rows), write(2, &sums), read(3, &rows)],
                    &[
                        *count as u32,
                        t.columns as u32,
                        tokens as u32,
                        t.row_stride as u32,
                        h.stride,
                        *first as u32,
                        (first / CHUNK) as u32,
                        chunks as u32,
                    ],
                    [
                        t.columns.div_ceil(4 * LANES) as u32,
                        count.div_ceil(CHUNK) as u32,
                        tokens.div_ceil(DOWN_TILE) as u32,
                    ],
                )?;
            }
            let stride = u64::from(output.stride) * 4;
            let length = ((tokens - 1) * stride + t.columns * 4).min(output.place.bytes - token * stride);
            self.dispatch(
                "add_partials",
                vec![read(0, &sums), write(1, &output.place.part(token * stride, length))],
                &[t.columns as u32, chunks as u32, output.stride, u32::from(ffn.accumulate)],
                [groups(t.columns), tokens as u32, 1],
            )?;
            token += tokens;
        }
        Ok(())
    }

    pub(super) fn predict(
        &mut self,
        arithmetic: Arithmetic,
        [input, fc1, fc2, mask]: [SlotId; 4],
        threshold: f32,
    ) -> Result<()> {
        let from = self.input(input, arithmetic.input, fc1)?;
        let (rank, neurons) = (self.tensor(fc1)?.rows, self.tensor(fc2)?.rows);
        let tokens = u64::from(self.env.tokens);
        let hidden = Rows {
            place: Self::temporary(&self.program.temporary.hidden, rank * 4 * tokens)?,
            stride: rank as u32,
        };
        let scores = Rows {
            place: Self::temporary(&self.program.temporary.sums, neurons * 4 * tokens)?,
            stride: neurons as u32,
        };
        self.product(Mode::Linear, &from, fc1, &hidden, &Extras::default())?;
        self.elementwise([0, 1, 0], rank, &hidden.clone(), None, &hidden)?;
        if arithmetic.hidden == Quantization::Int8Blocks {
            self.quantise(&hidden.clone(), &hidden, rank)?;
        }
        self.product(
            Mode::Linear,
            &Operand { rows: hidden, scales: None },
            fc2,
            &scores,
            &Extras::default(),
        )?;
        self.elementwise([3, 0, threshold.to_bits()], neurons, &scores.clone(), None, &scores)?;
        let (place, stride) = (self.place(mask)?, self.tensor(mask)?.row_stride);
        // Rows that may share a word of the mask are written one after the other.
        let apart: u64 = match stride {
            s if s.is_multiple_of(4) => 1,
            s if s >= 4 => 2,
            _ => tokens,
        };
        for first in 0..apart.min(tokens) {
            let rows = (tokens - first).div_ceil(apart);
            self.dispatch(
                "pack_mask",
                vec![read(0, &scores.place), write(1, &place)],
                &[neurons as u32, scores.stride, stride as u32, first as u32, 0, apart as u32],
                [groups(neurons.div_ceil(4) + 1), rows as u32, 1],
            )?;
        }
        Ok(())
    }
}
