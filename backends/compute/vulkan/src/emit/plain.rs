//! Copies, and the operations of one shader each.

use engine_core::operation::{Activation, NormKind, Place as Where, Quantization, SlotId};
use engine_core::{Error, Result};

use super::{Emitter, Operand, Rows, Step, groups, read, weights, write};
use crate::kernels::{Mode, PRODUCT_ROWS, flags, format_name, function_code};
use crate::memory::Place;
use crate::program::transfer::{Stream, rows_of};
use crate::record::Command;

/// The experts that the rows of a product belong to.
#[derive(Clone)]
pub(super) struct Chosen {
    /// Ids, and words from row to row.
    pub(super) ids: Rows,
    /// Experts of a token.
    pub(super) each: u32,
    /// Experts in all.
    pub(super) experts: u32,
}

/// What a product does beside multiplying.
#[derive(Default)]
pub(super) struct Extras {
    pub(super) flags: u32,
    pub(super) bias: Option<Place>,
    pub(super) function: u32,
    /// Bits of an f32.
    pub(super) threshold: u32,
    pub(super) mask: Option<(Place, u32)>,
    /// Parameters, and the first word of the active neurons in them.
    pub(super) active: Option<(Place, u32)>,
    pub(super) chosen: Option<Chosen>,
}

impl Emitter<'_> {
    pub(super) fn copy(&mut self, from: SlotId, to: SlotId) -> Result<()> {
        let (source, target) = (self.slot(from)?, self.slot(to)?);
        let (rows_from, rows_to) = (rows_of(source, self.env.tokens), rows_of(target, self.env.tokens));
        // One of the two may have gaps between its rows.
        let runs: Vec<(u64, u64, u64)> = if rows_from.len() == 1 && rows_to.len() == 1 {
            vec![(0, 0, rows_from[0].1)]
        } else {
            let rows = rows_from.len().max(rows_to.len()) as u64;
            let (bytes, strides) =
                (source.tensor.row_bytes(), (source.tensor.row_stride, target.tensor.row_stride));
            (0..rows).map(|row| (row * strides.0, row * strides.1, bytes)).collect()
        };
        let streams = |id: SlotId, place: Where| place == Where::Host && self.env.place(id).is_none();
        let step = if streams(from, source.place) {
            Step::Stream(Stream { host: from, device: self.place(to)?, to_host: false, runs })
        } else if streams(to, target.place) {
            let runs = runs.into_iter().map(|(from, to, bytes)| (to, from, bytes)).collect();
            Step::Stream(Stream { host: to, device: self.place(from)?, to_host: true, runs })
        } else {
            Step::Command(Command::Copy { from: self.place(from)?, to: self.place(to)?, runs })
        };
        self.steps.push(step);
        Ok(())
    }

    pub(super) fn embed(
        &mut self,
        index: usize,
        ids: SlotId,
        table: SlotId,
        output: SlotId,
        scale: f32,
    ) -> Result<()> {
        let (t, ids, out) = (self.tensor(table)?, self.rows(ids)?, self.rows(output)?);
        let shader = format!("embed_{}", format_name(t.dtype).unwrap_or_default());
        let (parameters, place) = self.parameters()?;
        let complaint = parameters
            .complaint(index)
            .ok_or_else(|| Error::internal("an embed has no word to complain in"))?;
        for (first, rows, window) in self.windows(table, 1, u64::MAX)? {
            self.dispatch(
                &shader,
                vec![weights(0, &window), read(1, &ids.place), write(2, &out.place), write(3, &place)],
                &[
                    t.columns as u32,
                    t.row_stride as u32,
                    out.stride,
                    ids.stride,
                    first as u32,
                    rows as u32,
                    t.rows as u32,
                    scale.to_bits(),
                    complaint,
                ],
                [groups(t.columns.div_ceil(4)), self.env.tokens, 1],
            )?;
        }
        Ok(())
    }

    pub(super) fn norm(
        &mut self,
        norm: NormKind,
        epsilon: f32,
        [input, weight, output]: [SlotId; 3],
        bias: Option<SlotId>,
    ) -> Result<()> {
        let (columns, group) = (self.tensor(input)?.columns, self.tensor(weight)?.columns);
        let (from, to, weight) = (self.rows(input)?, self.rows(output)?, self.place(weight)?);
        let added = bias.map(|bias| self.place(bias)).transpose()?;
        self.dispatch(
            "norm",
            vec![
                read(0, &from.place),
                read(1, &weight),
                read(2, added.as_ref().unwrap_or(&weight)),
                write(3, &to.place),
            ],
            &[
                group as u32,
                from.stride,
                to.stride,
                0,
                u32::from(norm == NormKind::Layer),
                u32::from(added.is_some()),
                epsilon.to_bits(),
            ],
            [(columns / group.max(1)) as u32, self.env.tokens, 1],
        )
    }

    /// A product with a weight matrix, window by window.
    pub(super) fn product(
        &mut self,
        mode: Mode,
        operand: &Operand,
        weight: SlotId,
        output: &Rows,
        extras: &Extras,
    ) -> Result<()> {
        let t = self.tensor(weight)?;
        let each = extras.chosen.as_ref().map_or(1, |chosen| chosen.each);
        let tokens = self.env.tokens * each;
        let tile = if tokens == 1 || extras.chosen.is_some() { 1 } else { 4 };
        let input = &operand.rows;
        let of = if extras.chosen.is_some() { "_experts" } else { "" };
        let dot = if operand.scales.is_some() { "_dot" } else { "" };
        let shader =
            format!("product_{}_{}_{tile}{dot}{of}", format_name(t.dtype).unwrap_or_default(), mode.name());
        let most = self.program.shared.limits.max_groups.saturating_mul(PRODUCT_ROWS);
        let nothing = (input.place.clone(), 0);
        let (mask, mask_stride) = extras.mask.as_ref().unwrap_or(&nothing);
        let (parameters, active) = extras.active.as_ref().unwrap_or(&nothing);
        // The rows of a mixture are those of one expert, and windows hold whole experts.
        let of_expert = extras.chosen.as_ref().map(|chosen| t.rows / u64::from(chosen.experts.max(1)));
        for (first, rows, window) in self.windows(weight, of_expert.unwrap_or(PRODUCT_ROWS), most)? {
            let here = rows / of_expert.unwrap_or(rows).max(1);
            let first_expert = first / of_expert.unwrap_or(u64::MAX);
            let (first, rows) = of_expert.map_or((first, rows), |rows| (0, rows));
            self.dispatch(
                &shader,
                vec![
                    weights(0, &window),
                    read(1, &input.place),
                    write(2, &output.place),
                    read(3, extras.bias.as_ref().unwrap_or(&input.place)),
                    read(4, extras.chosen.as_ref().map_or(mask, |chosen| &chosen.ids.place)),
                    read(5, parameters),
                ],
                &[
                    rows as u32,
                    t.columns as u32,
                    tokens,
                    t.row_stride as u32,
                    input.stride,
                    output.stride,
                    extras.flags,
                    first as u32,
                    extras.function,
                    extras.threshold,
                    *mask_stride,
                    *active,
                    operand.scales.unwrap_or(0),
                    each,
                    extras.chosen.as_ref().map_or(0, |chosen| chosen.ids.stride),
                    first_expert as u32,
                    here as u32,
                ],
                [rows.div_ceil(PRODUCT_ROWS) as u32, tokens.div_ceil(tile), 1],
            )?;
        }
        Ok(())
    }

    pub(super) fn linear(
        &mut self,
        quantization: Quantization,
        [input, weight, output]: [SlotId; 3],
        bias: Option<SlotId>,
        accumulate: bool,
    ) -> Result<()> {
        let from = self.input(input, quantization, weight)?;
        let to = self.rows(output)?;
        let bias = bias.map(|bias| self.place(bias)).transpose()?;
        let extras = Extras {
            flags: u32::from(bias.is_some()) * flags::BIAS + u32::from(accumulate) * flags::ACCUMULATE,
            bias,
            ..Extras::default()
        };
        self.product(Mode::Linear, &from, weight, &to, &extras)
    }

    pub(super) fn activate(&mut self, function: Activation, input: SlotId, output: SlotId) -> Result<()> {
        let columns = self.tensor(input)?.columns;
        let (from, to) = (self.rows(input)?, self.rows(output)?);
        let function = function_code(function).unwrap_or_default();
        self.elementwise([0, function, 0], columns, &from, None, &to)
    }

    /// Sum (1) or product (2).
    pub(super) fn combine(&mut self, what: u32, left: SlotId, right: SlotId, output: SlotId) -> Result<()> {
        let columns = self.tensor(left)?.columns;
        let mut other = self.rows(right)?;
        if !self.slot(right)?.per_token {
            other.stride = 0;
        }
        let (from, to) = (self.rows(left)?, self.rows(output)?);
        self.elementwise([what, 0, 0], columns, &from, Some(&other), &to)
    }

    /// `[what, function, threshold]` of `elementwise.wgsl` on rows of `columns`.
    pub(super) fn elementwise(
        &mut self,
        [what, function, threshold]: [u32; 3],
        columns: u64,
        left: &Rows,
        right: Option<&Rows>,
        output: &Rows,
    ) -> Result<()> {
        let right = right.unwrap_or(left);
        self.dispatch(
            "elementwise",
            vec![read(0, &left.place), read(1, &right.place), write(2, &output.place)],
            &[columns as u32, left.stride, right.stride, output.stride, what, function, threshold],
            [groups(columns), self.env.tokens, 1],
        )
    }
}
