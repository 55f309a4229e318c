//! Copies, embedding, norms and element-wise operations: a share of the tokens per thread.

use super::{Env, Operand, Run, Weight};
use crate::kernels::norm::Norm as NormJob;
use crate::pool::Stopped;
use engine_core::Error;
use engine_core::operation::Activation;

/// `OperationKind::Copy`.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) from: Operand,
    pub(crate) to: Operand,
    pub(crate) row_bytes: usize,
    pub(crate) per_token: bool,
}

/// Row by row; packed rows as one run, shared out by bytes.
pub(crate) fn copy(run: &Run<'_>, op: &Copy) {
    let rows = if op.per_token { run.env.tokens } else { op.from.rows };
    if op.from.stride == op.row_bytes && op.to.stride == op.row_bytes {
        let (start, end) = run.worker.share(rows * op.row_bytes, 4096);
        let (from, to) = (run.env.row(&op.from, 0), run.env.row(&op.to, 0));
        // SAFETY: both sides have the rows; the host promises that they do not overlap while work is under way, and
        // `copy` bears it even so.
        unsafe { std::ptr::copy(from.add(start), to.add(start), end - start) };
        return;
    }
    let (start, end) = run.worker.share(rows, 1);
    for row in start..end {
        // SAFETY: as above.
        unsafe { std::ptr::copy(run.env.row(&op.from, row), run.env.row(&op.to, row), op.row_bytes) };
    }
}

/// `OperationKind::Embed`.
#[derive(Clone, Debug)]
pub(crate) struct Embed {
    pub(crate) label: String,
    pub(crate) ids: Operand,
    pub(crate) table: Weight,
    pub(crate) output: Operand,
    pub(crate) scale: f32,
}

/// Rows of the table; every id is looked at before any row is written.
pub(crate) fn embed(run: &Run<'_>, op: &Embed) -> Result<(), Stopped> {
    let env = run.env;
    let id = |t: usize| {
        // SAFETY: the ids have a row per token, aligned for i32.
        let id = unsafe { *env.row(&op.ids, t).cast::<i32>() };
        usize::try_from(id).ok().filter(|&row| row < op.table.operand.rows).ok_or(id)
    };
    for t in 0..env.tokens {
        if let Err(id) = id(t) {
            return Err(run.worker.fail(Error::data(format!(
                "{}: the id of token {t} is {id}, but the table has {} rows",
                op.label, op.table.operand.rows
            ))));
        }
    }
    let (start, end) = run.worker.share(env.tokens, 1);
    for t in start..end {
        if let Ok(row) = id(t) {
            let (from, n) = (env.matrix(&op.table).row(row), op.table.operand.columns);
            // SAFETY: the row lies within the table, the output has a row per token.
            unsafe { (run.kernels.weight_row)(from, op.table.format, n, op.scale, env.f32(&op.output, t)) };
        }
    }
    Ok(())
}

/// `OperationKind::Norm`.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    pub(crate) centred: bool,
    pub(crate) epsilon: f32,
    pub(crate) input: Operand,
    pub(crate) weight: Operand,
    pub(crate) bias: Option<Operand>,
    pub(crate) output: Operand,
}

/// Group by group.
pub(crate) fn norm(run: &Run<'_>, op: &Norm) {
    let env = run.env;
    let n = op.weight.columns;
    let (start, end) = run.worker.share(env.tokens, 1);
    for t in start..end {
        for group in 0..op.input.columns / n {
            let job = NormJob {
                centred: op.centred,
                epsilon: op.epsilon,
                n,
                x: env.f32(&op.input, t).wrapping_add(group * n),
                weight: env.f32(&op.weight, 0),
                bias: env.optional(op.bias.as_ref()),
                out: env.f32(&op.output, t).wrapping_add(group * n),
            };
            // SAFETY: rows are whole groups, as validated.
            unsafe { (run.kernels.norm)(&job) };
        }
    }
}

/// `OperationKind::Activate`.
#[derive(Clone, Debug)]
pub(crate) struct Activate {
    pub(crate) function: Activation,
    pub(crate) input: Operand,
    pub(crate) output: Operand,
}

/// Token by token.
pub(crate) fn activate(run: &Run<'_>, op: &Activate) {
    let (start, end) = run.worker.share(run.env.tokens, 1);
    for t in start..end {
        let (x, out) = (run.env.f32(&op.input, t), run.env.f32(&op.output, t));
        // SAFETY: rows of equal length.
        unsafe { (run.kernels.activate)(op.function, x, out, op.input.columns) };
    }
}

/// `OperationKind::Add` and `OperationKind::Multiply`.
#[derive(Clone, Debug)]
pub(crate) struct Binary {
    pub(crate) multiply: bool,
    pub(crate) left: Operand,
    pub(crate) right: Operand,
    pub(crate) right_per_token: bool,
    pub(crate) output: Operand,
}

/// Token by token.
pub(crate) fn binary(run: &Run<'_>, op: &Binary) {
    let env: &Env = run.env;
    let kernel = if op.multiply { run.kernels.multiply } else { run.kernels.add };
    let (start, end) = run.worker.share(env.tokens, 1);
    for t in start..end {
        let right = env.f32(&op.right, if op.right_per_token { t } else { 0 });
        // SAFETY: rows of equal length.
        unsafe { kernel(env.f32(&op.left, t), right, env.f32(&op.output, t), op.left.columns) };
    }
}
