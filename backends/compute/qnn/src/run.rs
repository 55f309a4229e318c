//! One run of an executable: copies, rows into and out of graphs, and what is told where numbers leave f16.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use engine_core::operation::{OperationKind, SlotId};
use engine_core::{ClusterRange, Error, Result, TensorType};
use half::f16;

use crate::check::shape;
use crate::emit::{In, Out, Part};
use crate::graph::Port;
use crate::program::{Built, Kept, Step, Submission};
use crate::weights::{Matrix, to_f16};

/// Sets of active ranges for which one layer keeps graphs; the one that was not used for longest makes room.
const KEPT_RANGES: usize = 4;

impl Submission {
    /// Runs the list once, on the queue's thread.
    pub(crate) fn run(&self) -> Result<()> {
        let program = &*self.program;
        if !self.overlaps {
            return program.steps.iter().try_for_each(|step| self.step(step));
        }
        let mut careful = program.careful.lock().unwrap_or_else(PoisonError::into_inner);
        let steps = match &*careful {
            Some(steps) => steps.clone(),
            None => careful.insert(Arc::new(program.plan(false)?)).clone(),
        };
        drop(careful);
        steps.iter().try_for_each(|step| self.step(step))
    }

    fn step(&self, step: &Step) -> Result<()> {
        match step {
            Step::Copy { from, to } => self.copy(*from, *to),
            Step::Graph(built) => self.graph(built),
            Step::Ffn { operation, kept } => {
                let OperationKind::Ffn(ffn) = &self.program.list.operations[*operation].kind else {
                    return Err(Error::internal("a feed-forward step without one"));
                };
                let neurons = self.tensor(ffn.up).rows as u32;
                let whole = vec![ClusterRange::new(0, neurons)];
                let ranges = self.ranges.get(operation).unwrap_or(&whole);
                for slot in [ffn.hidden, ffn.active_count].into_iter().flatten() {
                    self.zero(slot);
                }
                if ranges.is_empty() {
                    if !ffn.accumulate {
                        self.zero(ffn.output);
                    }
                    return Ok(());
                }
                let built = self.layer(*operation, ranges, kept)?;
                self.graph(&built)
            }
        }
    }

    /// The graph of a layer for these ranges.
    fn layer(&self, operation: usize, ranges: &[ClusterRange], kept: &Mutex<Kept>) -> Result<Arc<Built>> {
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = kept.iter().position(|(known, _)| known == ranges) {
            let found = kept.remove(at);
            let built = found.1.clone();
            kept.push(found);
            return Ok(built);
        }
        let active = ranges.iter().flat_map(|range| range.start..range.end).collect();
        if kept.len() == KEPT_RANGES {
            kept.remove(0);
        }
        let built = Arc::new(self.program.build(operation..operation + 1, active)?);
        kept.push((ranges.to_vec(), built.clone()));
        Ok(built)
    }

    fn tensor(&self, slot: SlotId) -> TensorType {
        self.program.list.slots[slot.0 as usize].tensor
    }

    /// Row `at` of a slot.
    fn row(&self, slot: SlotId, at: u32) -> &[u8] {
        let tensor = self.tensor(slot);
        // SAFETY: the slot was bound with room for its rows, `at` among them; nothing writes it meanwhile, since the queue's
        // thread runs one step at a time.
        unsafe {
            let start =
                self.addresses[slot.0 as usize].add(u64::from(at).wrapping_mul(tensor.row_stride) as usize);
            std::slice::from_raw_parts(start, tensor.row_bytes() as usize)
        }
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "memory that the host lends to this submission, one row at a time"
    )]
    fn row_mut(&self, slot: SlotId, at: u32) -> &mut [u8] {
        let tensor = self.tensor(slot);
        // SAFETY: as for `row`; written slots were bound to writable memory.
        unsafe {
            let start =
                self.addresses[slot.0 as usize].add(u64::from(at).wrapping_mul(tensor.row_stride) as usize);
            std::slice::from_raw_parts_mut(start, tensor.row_bytes() as usize)
        }
    }

    fn rows_of(&self, slot: SlotId) -> u32 {
        let of = &self.program.list.slots[slot.0 as usize];
        if of.per_token { self.tokens } else { of.tensor.rows as u32 }
    }

    fn zero(&self, slot: SlotId) {
        (0..self.rows_of(slot)).for_each(|at| self.row_mut(slot, at).fill(0));
    }

    fn copy(&self, from: SlotId, to: SlotId) -> Result<()> {
        let (source, target) = (self.tensor(from), self.tensor(to));
        let rows = self.rows_of(to).min(self.rows_of(from));
        let bytes = source.row_bytes().min(target.row_bytes()) as usize;
        for at in 0..u64::from(rows) {
            // SAFETY: both were bound with room for these rows; they may overlap.
            unsafe {
                let from = self.addresses[from.0 as usize].add((at * source.row_stride) as usize);
                let to = self.addresses[to.0 as usize].add((at * target.row_stride) as usize);
                std::ptr::copy(from, to, bytes);
            }
        }
        Ok(())
    }

    fn graph(&self, built: &Built) -> Result<()> {
        let mut staging = built.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut inputs, mut outputs) = std::mem::take(&mut *staging);
        let compiled = built.compiled.as_ref().ok_or_else(|| Error::internal("a graph that was freed"))?;
        let shared = &built.shared;
        let chunk = shape(self.program.list.token_capacity);
        for first in (0..self.tokens).step_by(chunk as usize) {
            let tokens = chunk.min(self.tokens - first);
            for (input, buffer) in built.ins.iter().zip(&mut inputs) {
                self.fill(built, *input, (first, tokens), buffer);
            }
            // The matrix units take 0 times infinity for 0: rows that are not finite are known here, and told here.
            let broken = self.broken(built, (first, tokens));
            let graph = compiled.clone();
            let ran = shared.driver.call(shared.run_limit, ("a graph", "submit_timeout_s"), move |_| {
                graph.execute(&mut inputs, &mut outputs)?;
                Ok((inputs, outputs))
            });
            match ran {
                Ok(back) => (inputs, outputs) = back,
                Err(error) => {
                    let empty = |ports: &[Port]| ports.iter().map(|p| vec![0; p.bytes()]).collect();
                    *staging = (empty(&compiled.inputs), empty(&compiled.outputs));
                    return Err(error);
                }
            }
            shared.counts.executed.fetch_add(1, Relaxed);
            // What was found not to be finite has the last word.
            for last in [false, true] {
                for (output, buffer) in built.outs.iter().zip(&outputs) {
                    if last == matches!(output, Out::Witness { .. } | Out::Check { .. }) {
                        self.deliver(built, *output, (first, tokens), buffer);
                    }
                }
            }
            for (token, input) in &broken {
                let dependent = built.outs.iter().zip(&built.depends).filter(|(_, on)| on.contains(input));
                dependent.for_each(|(output, _)| self.break_row(built, *output, *token));
            }
        }
        *staging = (inputs, outputs);
        Ok(())
    }

    /// Writes one input's bytes. What does not depend on the tokens is written with the first of them.
    fn fill(&self, built: &Built, input: In, (first, tokens): (u32, u32), buffer: &mut [u8]) {
        match input {
            In::Tokens(slot) => {
                let bytes = self.tensor(slot).columns as usize * 2;
                for (at, to) in buffer.chunks_exact_mut(bytes).enumerate() {
                    match at as u32 {
                        at if at < tokens => to_f16(self.row(slot, first + at), to),
                        _ => to.fill(0),
                    }
                }
            }
            In::Weight(..) | In::Vector(..) if first > 0 => {}
            In::Weight(slot, part) => {
                let matrix = self.matrix(slot);
                let rows: Vec<u32>;
                let picked = match (part, built.active.is_empty()) {
                    (_, false) => &built.active,
                    (_, true) => {
                        rows = (0..matrix.tensor.rows as u32).collect();
                        &rows
                    }
                };
                buffer.copy_from_slice(&match part {
                    Part::Rows => matrix.rows(picked),
                    Part::Columns => matrix.picked_columns(picked),
                });
            }
            In::Vector(slot, None) => to_f16(self.row(slot, 0), buffer),
            In::Vector(slot, Some(_)) => {
                buffer.copy_from_slice(&self.matrix(slot).picked_columns(&built.active))
            }
        }
    }

    fn matrix(&self, slot: SlotId) -> Matrix<'_> {
        let tensor = self.tensor(slot);
        // SAFETY: as for `row`, over all rows.
        let bytes =
            unsafe { std::slice::from_raw_parts(self.addresses[slot.0 as usize], tensor.bytes() as usize) };
        Matrix { tensor, bytes }
    }

    /// Tokens whose row of an input is not finite, with the input.
    fn broken(&self, built: &Built, (first, tokens): (u32, u32)) -> Vec<(u32, usize)> {
        let mut found = Vec::new();
        for (input, what) in built.ins.iter().enumerate() {
            let In::Tokens(slot) = what else { continue };
            let finite = |x: &[u8]| f32::from_le_bytes([x[0], x[1], x[2], x[3]]).is_finite();
            let rows = (first..first + tokens).filter(|at| !self.row(*slot, *at).chunks_exact(4).all(finite));
            found.extend(rows.map(|at| (at, input)));
        }
        found
    }

    /// Makes what an output has for a token no number.
    fn break_row(&self, built: &Built, output: Out, at: u32) {
        match output {
            Out::Tokens { slot, .. } => self.spoil(slot, at),
            Out::Hidden { hidden: Some(slot), .. } => {
                let row = self.row_mut(slot, at);
                built.active.iter().for_each(|neuron| row[*neuron as usize * 4..][..4].copy_from_slice(&NAN));
            }
            _ => {}
        }
    }

    fn spoil(&self, slot: SlotId, at: u32) {
        self.row_mut(slot, at).chunks_exact_mut(4).for_each(|x| x.copy_from_slice(&NAN));
    }

    fn deliver(&self, built: &Built, output: Out, (first, tokens): (u32, u32), buffer: &[u8]) {
        let rows = |columns: usize| buffer.chunks_exact(columns * 2).take(tokens as usize).zip(first..);
        match output {
            Out::Tokens { slot, accumulate } => {
                for (from, at) in rows(self.tensor(slot).columns as usize) {
                    let numbers = self.row_mut(slot, at).chunks_exact_mut(4).zip(numbers(from));
                    for (to, x) in numbers {
                        let before =
                            if accumulate { f32::from_le_bytes([to[0], to[1], to[2], to[3]]) } else { 0.0 };
                        to.copy_from_slice(&(if accumulate { before + x } else { x }).to_le_bytes());
                    }
                }
            }
            Out::Hidden { hidden, count } => {
                for (from, at) in rows(built.active.len()) {
                    if let Some(slot) = hidden {
                        let row = self.row_mut(slot, at);
                        for (neuron, x) in built.active.iter().zip(numbers(from)) {
                            row[*neuron as usize * 4..][..4].copy_from_slice(&x.to_le_bytes());
                        }
                    }
                    if let Some(slot) = count {
                        let not_zero = numbers(from).filter(|x| *x != 0.0).count() as i32;
                        self.row_mut(slot, at).copy_from_slice(&not_zero.to_le_bytes());
                    }
                }
            }
            Out::Witness { output, hidden } => {
                for (from, at) in rows(built.active.len()) {
                    let broken = || built.active.iter().zip(numbers(from)).filter(|(_, x)| !x.is_finite());
                    if let Some(slot) = hidden {
                        let row = self.row_mut(slot, at);
                        broken()
                            .for_each(|(neuron, _)| row[*neuron as usize * 4..][..4].copy_from_slice(&NAN));
                    }
                    if broken().next().is_some() {
                        self.spoil(output, at);
                    }
                }
            }
            Out::Check { output } => {
                for (_, at) in rows(1).filter(|(from, _)| numbers(from).any(|x| !x.is_finite())) {
                    self.spoil(output, at);
                }
            }
        }
    }
}

const NAN: [u8; 4] = f32::NAN.to_le_bytes();

/// f16 numbers in bytes.
fn numbers(from: &[u8]) -> impl Iterator<Item = f32> {
    from.chunks_exact(2).map(|x| f16::from_le_bytes([x[0], x[1]]).to_f32())
}
