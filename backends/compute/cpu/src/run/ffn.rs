//! Feed-forward layers, dense and sparse.
//!
//! Two parts with a barrier between them: gate, up and the hidden activations by chunks of neurons, then down. In the
//! dense case both are plain products. In the sparse case a chunk computes only the rows that its selection lets
//! through and marks who took part; down then reads only those. Both sum in neuron order, so they agree bit for bit
//! wherever the skipped terms are zero.

use std::ops::Range;

use super::input::{Needs, Ready, Source, ready};
use super::planes::{NO_NORMS, Norms, PlaneRule, input_norms};
use super::{Local, Operand, Run, Weight};
use crate::kernels::axpy::{Axpy, AxpyTokens};
use crate::kernels::format::Matrix;
use crate::kernels::masked::Masked;
use crate::kernels::matmul::{Input, Matmul, Rows, Tile};
use crate::kernels::simd::BLOCK;
use crate::pool::Stopped;
use engine_core::ClusterRange;
use engine_core::operation::{Activation, DownLayout};

/// Most bytes of a matrix that a thread claims of a sparse layer at once.
const SPARSE_PART: usize = 512 * 1024;

/// Who takes part, beside the active ranges.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Select {
    All,
    Mask(Operand),
    /// Neurons whose activated gate is not zero.
    GateFirst,
    /// Neurons whose activated gate is larger.
    Threshold(f32),
    /// Neurons that the high halves of their weights do not rule out.
    Planes(PlaneRule),
}

/// `OperationKind::Ffn`.
#[derive(Clone, Debug)]
pub(crate) struct Ffn {
    /// Its index in the list, by which active ranges name it.
    pub(crate) operation: usize,
    pub(crate) input: Operand,
    pub(crate) gate: Option<Weight>,
    pub(crate) up: Weight,
    pub(crate) down: Weight,
    pub(crate) gate_bias: Option<Operand>,
    pub(crate) up_bias: Option<Operand>,
    pub(crate) output: Operand,
    pub(crate) hidden: Option<Operand>,
    pub(crate) active_count: Option<Operand>,
    pub(crate) layout: DownLayout,
    pub(crate) function: Activation,
    pub(crate) up_function: Activation,
    pub(crate) select: Select,
    pub(crate) accumulate: bool,
    pub(crate) needs: Needs,
    pub(crate) hidden_needs: Needs,
}

/// Runs the layer on this thread's share.
pub(crate) fn ffn(run: &Run<'_>, op: &Ffn, local: &mut Local) -> Result<(), Stopped> {
    ffn_of(run, op, run.env.tokens, local)
}

/// The same for the first `tokens` rows of its operands.
pub(crate) fn ffn_of(run: &Run<'_>, op: &Ffn, tokens: usize, local: &mut Local) -> Result<(), Stopped> {
    let neurons = op.up.operand.rows;
    let all = [ClusterRange::new(0, neurons as u32)];
    let ranges = run.env.ranges_of(op.operation).unwrap_or(&all);
    let dense = matches!(op.select, Select::All) && matches!(ranges, [r] if r.len() as usize == neurons);
    let input =
        Source { data: run.env.f32(&op.input, 0), stride: op.input.stride / 4, n: op.input.columns, tokens };
    let input = ready(run, input, op.needs, &mut local.input, run.shared.layout.input, false)?;
    if dense {
        return Layer { run, op, input, ranges, first: 0, tokens, dense, norms: NO_NORMS }.run(local);
    }
    // Sparse layers keep a mask per neuron and token, so they go through a long batch in parts.
    let step = run.shared.layout.sparse_tokens.max(1);
    let mut first = 0;
    while first < tokens {
        let part = step.min(tokens - first);
        if first > 0 {
            // The claim counters and the shared rows are used again.
            run.worker.barrier()?;
            if run.is_first() {
                for claim in run.claims {
                    claim.store(0, std::sync::atomic::Ordering::Relaxed);
                }
            }
            run.worker.barrier()?;
        }
        let norms = input_norms(run, op, first..first + part);
        Layer { run, op, input, ranges, first, tokens: part, dense, norms }.run(local)?;
        first += part;
    }
    Ok(())
}

/// Some tokens of a layer.
pub(super) struct Layer<'a> {
    pub(super) run: &'a Run<'a>,
    pub(super) op: &'a Ffn,
    input: Ready,
    ranges: &'a [ClusterRange],
    /// First of the tokens.
    pub(super) first: usize,
    /// Their number.
    pub(super) tokens: usize,
    dense: bool,
    /// The Euclidean norms of these tokens' inputs, where planes ask for them.
    pub(super) norms: Norms,
}

impl Layer<'_> {
    fn run(&self, local: &mut Local) -> Result<(), Stopped> {
        let (run, op) = (self.run, self.op);
        let neurons = op.up.operand.rows;
        let mut grain = run.grain(neurons, op.up.operand.columns * 4, self.tokens);
        if !self.dense && self.tokens == 1 {
            grain = grain.max(self.sparse_grain());
        }
        if let (Select::Planes(rule), 1) = (&op.select, self.tokens) {
            grain = grain.min(rule.chunk(op));
        }
        while let Some(chunk) = run.claim(0, neurons, grain) {
            if self.dense { self.dense_chunk(chunk, local) } else { self.sparse_chunk(chunk, local) }
        }
        run.worker.barrier()?;
        self.report();
        let hidden = Source { data: self.hidden(0), stride: self.stride(), n: neurons, tokens: self.tokens };
        let hidden = ready(run, hidden, op.hidden_needs, &mut local.hidden, run.shared.layout.hidden, false)?;
        match op.layout {
            DownLayout::OutputRows => self.down_by_outputs(hidden, local),
            DownLayout::NeuronRows => self.down_by_neurons(hidden, local),
        }
        Ok(())
    }

    /// Neurons to claim at a time where some are skipped. What is listed of a small part are a few rows, and each list
    /// begins with waiting for its first ones; so parts are as large as keeps all threads busy, up to what a second-level
    /// cache holds of a matrix. Neurons at the front, where a prepared layer has the most active ones, are claimed first.
    fn sparse_grain(&self) -> usize {
        let threads = self.run.worker.threads;
        let parts = if threads == 1 { 1 } else { 2 * threads };
        let active: usize = self.ranges.iter().map(|range| range.len() as usize).sum();
        active.div_ceil(parts).min(SPARSE_PART / self.op.up.operand.stride.max(1)).next_multiple_of(4)
    }

    pub(super) fn stride(&self) -> usize {
        self.run.shared.layout.neurons
    }

    /// Activated gate, then `h`, of a token of this part.
    pub(super) fn hidden(&self, token: usize) -> *mut f32 {
        self.run.shared.at::<f32>(self.run.shared.layout.gate).wrapping_add(token * self.stride())
    }

    pub(super) fn up(&self, token: usize) -> *mut f32 {
        self.run.shared.at::<f32>(self.run.shared.layout.up).wrapping_add(token * self.stride())
    }

    pub(super) fn keep(&self, token: usize) -> *mut u32 {
        self.run.shared.at::<u32>(self.run.shared.layout.keep).wrapping_add(token * self.stride())
    }

    /// The input of this part's tokens for a weight.
    fn input_for(&self, weight: &Weight) -> Input {
        match self.input.for_format(weight.format) {
            Input::F32 { data, stride } => {
                Input::F32 { data: data.wrapping_add(self.first * stride), stride }
            }
            Input::Int8 { codes, scales, stride } => Input::Int8 {
                codes: codes.wrapping_add(self.first * stride),
                scales: scales.wrapping_add(self.first * (stride / BLOCK)),
                stride,
            },
        }
    }

    /// Rows of gate or up for this part's tokens.
    fn multiply(
        &self,
        weight: &Weight,
        bias: Option<&Operand>,
        rows: Rows<'_>,
        out: *mut f32,
        tile: &mut Tile,
    ) {
        self.multiply_matrix(self.run.env.matrix(weight), weight, bias, rows, out, tile);
    }

    /// The same with another view of the weight's matrix.
    pub(super) fn multiply_matrix(
        &self,
        matrix: Matrix,
        weight: &Weight,
        bias: Option<&Operand>,
        rows: Rows<'_>,
        out: *mut f32,
        tile: &mut Tile,
    ) {
        let job = Matmul {
            weight: matrix,
            rows,
            input: self.input_for(weight),
            tokens: self.tokens,
            out,
            out_stride: self.stride(),
            bias: self.run.env.optional(bias),
            accumulate: false,
        };
        // SAFETY: shapes and memory were checked; each chunk of neurons has one thread.
        unsafe { (self.run.kernels.matmul)(&job, tile) };
    }

    pub(super) fn activate(&self, function: Activation, run: *mut f32, len: usize) {
        if function != Activation::Identity {
            // SAFETY: callers pass runs within the shared rows.
            unsafe { (self.run.kernels.activate)(function, run, run, len) };
        }
    }

    fn dense_chunk(&self, chunk: Range<usize>, local: &mut Local) {
        let op = self.op;
        let rows = Rows::Range(chunk.start, chunk.end);
        let (first_weight, first_bias) = match &op.gate {
            Some(gate) => (gate, op.gate_bias.as_ref()),
            None => (&op.up, op.up_bias.as_ref()),
        };
        self.multiply(first_weight, first_bias, rows, self.hidden(0), &mut local.tile);
        if op.gate.is_some() {
            self.multiply(&op.up, op.up_bias.as_ref(), rows, self.up(0), &mut local.tile);
        }
        for t in 0..self.tokens {
            let h = self.hidden(t).wrapping_add(chunk.start);
            self.activate(op.function, h, chunk.len());
            if op.gate.is_some() {
                let up = self.up(t).wrapping_add(chunk.start);
                self.activate(op.up_function, up, chunk.len());
                // SAFETY: the chunk lies within the shared rows.
                unsafe { (self.run.kernels.multiply)(h, up, h, chunk.len()) };
            }
        }
    }

    fn sparse_chunk(&self, chunk: Range<usize>, local: &mut Local) {
        let op = self.op;
        let (start, len) = (chunk.start, chunk.len());
        for t in 0..self.tokens {
            // SAFETY: the chunk lies within the shared rows, and this thread alone has it.
            unsafe {
                self.hidden(t).add(start).write_bytes(0, len);
                self.up(t).add(start).write_bytes(0, len);
                self.keep(t).add(start).write_bytes(0, len);
            }
        }
        let active: Vec<Range<usize>> = self
            .ranges
            .iter()
            .map(|r| (r.start as usize).max(chunk.start)..(r.end as usize).min(chunk.end))
            .filter(|r| r.start < r.end)
            .collect();
        // Who is computed first (with a gate: its rows), as ranges or, where that is known before, the union of the
        // tokens' lists.
        local.list.clear();
        if let Select::Mask(mask) = &op.select {
            self.keep_by_mask(mask, &active, &mut local.list);
        }
        if let Select::Planes(rule) = &op.select {
            self.keep_by_planes(rule, chunk.clone(), &active, local);
        }
        let listed = matches!(op.select, Select::Mask(_) | Select::Planes(_));
        let (first_weight, first_bias) = match &op.gate {
            Some(gate) => (gate, op.gate_bias.as_ref()),
            None => (&op.up, op.up_bias.as_ref()),
        };
        if listed {
            self.multiply(first_weight, first_bias, Rows::List(&local.list), self.hidden(0), &mut local.tile);
            self.forget_estimated(first_weight, local);
        } else {
            for r in &active {
                let rows = Rows::Range(r.start, r.end);
                self.multiply(first_weight, first_bias, rows, self.hidden(0), &mut local.tile);
            }
        }
        for t in 0..self.tokens {
            self.activate(op.function, self.hidden(t).wrapping_add(start), len);
        }
        match op.select {
            Select::Planes(_) | Select::Mask(_) if self.drops_zero_gates() => {
                self.drop_zero_gates(&mut local.list);
            }
            Select::Planes(_) | Select::Mask(_) => {}
            _ => self.keep_by_gate(&active, &mut local.list),
        }
        if op.gate.is_some() {
            self.multiply(&op.up, op.up_bias.as_ref(), Rows::List(&local.list), self.up(0), &mut local.tile);
            if matches!(&op.select, Select::Planes(rule) if rule.up_deviation.is_some()) {
                self.forget_estimated(&op.up, local);
            }
            for t in 0..self.tokens {
                let (h, up) = (self.hidden(t).wrapping_add(start), self.up(t).wrapping_add(start));
                self.activate(op.up_function, up, len);
                // SAFETY: the chunk lies within the shared rows.
                unsafe { (self.run.kernels.multiply)(h, up, h, len) };
            }
        }
        let skips_zero = match op.select {
            Select::GateFirst | Select::Threshold(_) | Select::Planes(_) => true,
            Select::Mask(_) => op.function.is_zero_below(),
            Select::All => false,
        };
        for t in 0..self.tokens {
            // SAFETY: the chunk lies within the shared rows, and this thread alone has it.
            let (hidden, keep) = unsafe {
                (
                    std::slice::from_raw_parts_mut(self.hidden(t).add(start), len),
                    std::slice::from_raw_parts_mut(self.keep(t).add(start), len),
                )
            };
            // Without branches, for who takes part is as good as random; a mark is all ones.
            for (h, keep) in hidden.iter_mut().zip(keep) {
                *h = f32::from_bits(h.to_bits() & *keep);
                *keep &= u32::from(!(skips_zero & (*h == 0.0))).wrapping_neg();
            }
        }
    }

    /// Marks the active neurons that the mask names; `union` gets those of any token.
    fn keep_by_mask(&self, mask: &Operand, active: &[Range<usize>], union: &mut Vec<u32>) {
        for range in active {
            for t in 0..self.tokens {
                // SAFETY: the mask has a byte per neuron and token, the shared rows a mark, and this thread alone has the
                // range.
                let (mask, keep) = unsafe {
                    let mask = self.run.env.row(mask, self.first + t).add(range.start);
                    (
                        std::slice::from_raw_parts(mask, range.len()),
                        std::slice::from_raw_parts_mut(self.keep(t).add(range.start), range.len()),
                    )
                };
                // As good as random, so without branches.
                keep.iter_mut()
                    .zip(mask)
                    .for_each(|(keep, &byte)| *keep = u32::from(byte != 0).wrapping_neg());
            }
        }
        self.list_kept(active, union);
    }

    /// Whether a neuron that was selected before its gate was known takes no part where its activated gate is zero.
    fn drops_zero_gates(&self) -> bool {
        self.op.gate.is_some() && self.op.function.is_zero_below()
    }

    /// Lists the marked neurons of any token.
    pub(super) fn list_kept(&self, active: &[Range<usize>], list: &mut Vec<u32>) {
        list.clear();
        for range in active {
            // SAFETY: the range lies within the shared rows.
            let marks = |t| unsafe { std::slice::from_raw_parts(self.keep(t).add(range.start), range.len()) };
            if self.tokens == 1 {
                let marks = marks(0);
                append_where(list, range.clone(), |i| marks[i - range.start] != 0);
            } else {
                append_where(list, range.clone(), |i| {
                    (0..self.tokens).any(|t| marks(t)[i - range.start] != 0)
                });
            }
        }
    }

    /// Marks the active neurons that the selection keeps by their activated gate; `union` gets those of any token.
    fn keep_by_gate(&self, active: &[Range<usize>], union: &mut Vec<u32>) {
        for range in active {
            for t in 0..self.tokens {
                // SAFETY: the range lies within the shared rows, and this thread alone has it.
                let (gate, keep) = unsafe {
                    (
                        std::slice::from_raw_parts(self.hidden(t).add(range.start), range.len()),
                        std::slice::from_raw_parts_mut(self.keep(t).add(range.start), range.len()),
                    )
                };
                let mark = |kept: bool| if kept { u32::MAX } else { 0 };
                match self.op.select {
                    Select::GateFirst => {
                        keep.iter_mut().zip(gate).for_each(|(keep, gate)| *keep = mark(*gate != 0.0));
                    }
                    Select::Threshold(limit) => {
                        // NaN is kept, too.
                        let below = |gate: f32| gate.abs() <= limit;
                        keep.iter_mut().zip(gate).for_each(|(keep, gate)| *keep = mark(!below(*gate)));
                    }
                    Select::All | Select::Mask(_) | Select::Planes(_) => keep.fill(u32::MAX),
                }
            }
        }
        self.list_kept(active, union);
    }

    /// The optional outputs: a share of the tokens each.
    fn report(&self) {
        let (run, op) = (self.run, self.op);
        let neurons = op.up.operand.rows;
        if op.hidden.is_none() && op.active_count.is_none() {
            return;
        }
        let (start, end) = run.worker.share(self.tokens, 1);
        for t in start..end {
            // SAFETY: rows of `neurons` elements; the outputs have a row per token.
            unsafe {
                let h = std::slice::from_raw_parts(self.hidden(t), neurons);
                if let Some(out) = &op.hidden {
                    std::ptr::copy_nonoverlapping(h.as_ptr(), run.env.f32(out, self.first + t), neurons);
                }
                if let Some(out) = &op.active_count {
                    let count = h.iter().filter(|&&h| h != 0.0).count();
                    *run.env.row(out, self.first + t).cast::<i32>() = count as i32;
                }
            }
        }
    }

    fn down_by_outputs(&self, hidden: Ready, local: &mut Local) {
        let (run, op) = (self.run, self.op);
        let weight = run.env.matrix(&op.down);
        let input = hidden.for_format(op.down.format);
        let out = run.env.f32(&op.output, self.first);
        let out_stride = op.output.stride / 4;
        let rows = op.down.operand.rows;
        let grain = run.grain(rows, op.down.operand.stride, self.tokens);
        if !self.dense && self.tokens == 1 {
            self.blocks_of(0, &mut local.list);
            let block = op.down.operand.stride / op.down.operand.columns.div_ceil(BLOCK).max(1);
            while let Some(part) = run.claim(1, rows, grain) {
                local.tile.read += (part.len() * local.list.len() * block) as u64;
                let job = Masked {
                    weight,
                    rows: (part.start, part.end),
                    input,
                    blocks: &local.list,
                    keep: self.keep(0),
                    out,
                    accumulate: op.accumulate,
                };
                // SAFETY: shapes and memory were checked; rows are claimed once.
                unsafe { (run.kernels.masked)(&job) };
            }
            return;
        }
        while let Some(part) = run.claim(1, rows, grain) {
            let guard = !self.dense;
            if guard && op.accumulate {
                local.saved.clear();
                for t in 0..self.tokens {
                    // SAFETY: the output has the rows.
                    local.saved.extend(part.clone().map(|r| unsafe { *out.add(t * out_stride + r) }));
                }
            }
            let job = Matmul {
                weight,
                rows: Rows::Range(part.start, part.end),
                input,
                tokens: self.tokens,
                out,
                out_stride,
                bias: std::ptr::null(),
                accumulate: op.accumulate,
            };
            // SAFETY: as above.
            unsafe { (run.kernels.matmul)(&job, &mut local.tile) };
            if guard {
                self.repair(part, hidden, local);
            }
        }
    }

    /// The product over all neurons multiplies what takes no part by zero, which is right unless a weight there is not
    /// finite. Then the result is not finite either: such elements are computed again from the participants alone.
    fn repair(&self, part: Range<usize>, hidden: Ready, local: &mut Local) {
        let (run, op) = (self.run, self.op);
        let out_stride = op.output.stride / 4;
        for t in 0..self.tokens {
            let out = run.env.f32(&op.output, self.first).wrapping_add(t * out_stride);
            // SAFETY: the output has the rows.
            if part.clone().all(|r| unsafe { *out.add(r) }.is_finite()) {
                continue;
            }
            self.blocks_of(t, &mut local.list);
            for r in part.clone() {
                // SAFETY: as above; the kernel's needs are those of `down_by_outputs`.
                unsafe {
                    if (*out.add(r)).is_finite() {
                        continue;
                    }
                    if op.accumulate {
                        *out.add(r) = local.saved[t * part.len() + (r - part.start)];
                    }
                    let job = Masked {
                        weight: run.env.matrix(&op.down),
                        rows: (r, r + 1),
                        input: at_token(hidden.for_format(op.down.format), t),
                        blocks: &local.list,
                        keep: self.keep(t),
                        out,
                        accumulate: op.accumulate,
                    };
                    (run.kernels.masked)(&job);
                }
            }
        }
    }

    /// The blocks of 32 neurons in which any takes part, for one token.
    fn blocks_of(&self, token: usize, list: &mut Vec<u32>) {
        // SAFETY: a row of `neurons` marks.
        let keep = unsafe { std::slice::from_raw_parts(self.keep(token), self.op.up.operand.rows) };
        list.clear();
        list.extend(
            (0u32..).zip(keep.chunks(BLOCK)).filter(|(_, c)| c.iter().any(|&k| k != 0)).map(|(b, _)| b),
        );
    }

    fn down_by_neurons(&self, hidden: Ready, local: &mut Local) {
        let (run, op) = (self.run, self.op);
        let neurons = op.up.operand.rows;
        let out_stride = op.output.stride / 4;
        let columns = run.worker.share(op.down.operand.columns, BLOCK);
        let out = run.env.f32(&op.output, self.first);
        if !op.accumulate {
            for t in 0..self.tokens {
                // SAFETY: the output has the columns.
                unsafe { out.add(t * out_stride + columns.0).write_bytes(0, columns.1 - columns.0) };
            }
        }
        let weight = run.env.matrix(&op.down);
        if self.dense {
            local.list.clear();
            local.list.extend(0..neurons as u32);
            local.tile.read += self.read_by_neurons(neurons, columns);
            let first = Axpy { weight, neurons: &local.list, hidden: hidden.row(0), columns, out };
            // SAFETY: shapes and memory were checked; each thread has its own columns.
            unsafe {
                if self.tokens == 1 {
                    (run.kernels.axpy)(&first);
                } else {
                    let Input::F32 { stride, .. } = hidden.values() else { return };
                    let job = AxpyTokens { first, tokens: self.tokens, hidden_stride: stride, out_stride };
                    (run.kernels.axpy_tokens)(&job, &mut local.tile);
                }
            }
            return;
        }
        for t in 0..self.tokens {
            // SAFETY: a row of `neurons` marks.
            let keep = unsafe { std::slice::from_raw_parts(self.keep(t), neurons) };
            local.list.clear();
            append_where(&mut local.list, 0..neurons, |i| keep[i] != 0);
            local.tile.read += self.read_by_neurons(local.list.len(), columns);
            let out = out.wrapping_add(t * out_stride);
            let job = Axpy { weight, neurons: &local.list, hidden: hidden.row(t), columns, out };
            // SAFETY: as above.
            unsafe { (run.kernels.axpy)(&job) };
        }
    }
}

impl Layer<'_> {
    /// Bytes of these columns in so many rows of down.
    fn read_by_neurons(&self, neurons: usize, (start, end): (usize, usize)) -> u64 {
        let down = &self.op.down.operand;
        (neurons * down.stride * (end - start) / down.columns.max(1)) as u64
    }
}

/// Appends those of a range for which `chosen` holds, which costs the same for every outcome.
fn append_where(list: &mut Vec<u32>, range: Range<usize>, chosen: impl Fn(usize) -> bool) {
    let mut count = list.len();
    list.resize(count + range.len(), 0);
    for i in range {
        list[count] = i as u32;
        count += usize::from(chosen(i));
    }
    list.truncate(count);
}

fn at_token(input: Input, token: usize) -> Input {
    match input {
        Input::F32 { data, stride } => Input::F32 { data: data.wrapping_add(token * stride), stride },
        Input::Int8 { codes, scales, stride } => Input::Int8 {
            codes: codes.wrapping_add(token * stride),
            scales: scales.wrapping_add(token * (stride / BLOCK)),
            stride,
        },
    }
}
