//! Linear layers and PowerInfer's predictor.

use super::input::{Needs, Source, ready};
use super::{Local, Operand, Run, Weight};
use crate::kernels::matmul::{Matmul, Rows};
use crate::pool::Stopped;
use engine_core::operation::Activation;

/// `OperationKind::Linear`.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    pub(crate) input: Operand,
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Operand>,
    pub(crate) output: Operand,
    pub(crate) accumulate: bool,
    pub(crate) needs: Needs,
    /// The operation before this one quantised the same input.
    pub(crate) reuse: bool,
}

/// All of a linear layer's rows, shared out.
pub(crate) fn linear(run: &Run<'_>, op: &Linear, local: &mut Local) -> Result<(), Stopped> {
    let env = run.env;
    let source = Source {
        data: env.f32(&op.input, 0),
        stride: op.input.stride / 4,
        n: op.input.columns,
        tokens: env.tokens,
    };
    let input =
        ready(run, source, op.needs, &mut local.input, run.shared.layout.input, op.reuse && !run.careful)?;
    let rows = op.weight.operand.rows;
    let grain = run.grain(rows, op.weight.operand.stride, env.tokens);
    while let Some(part) = run.claim(0, rows, grain) {
        let job = Matmul {
            weight: env.matrix(&op.weight),
            rows: Rows::Range(part.start, part.end),
            input: input.for_format(op.weight.format),
            tokens: env.tokens,
            out: env.f32(&op.output, 0),
            out_stride: op.output.stride / 4,
            bias: env.optional(op.bias.as_ref()),
            accumulate: op.accumulate,
        };
        // SAFETY: shapes and memory were checked at prepare and submit; rows are claimed once.
        unsafe { (run.kernels.matmul)(&job, &mut local.tile) };
    }
    Ok(())
}

/// `OperationKind::Predict`.
#[derive(Clone, Debug)]
pub(crate) struct Predict {
    pub(crate) input: Operand,
    pub(crate) fc1: Weight,
    pub(crate) fc2: Weight,
    pub(crate) mask: Operand,
    pub(crate) threshold: f32,
    pub(crate) needs: Needs,
    pub(crate) hidden_needs: Needs,
}

/// The low-rank scores, compared with the threshold.
pub(crate) fn predict(run: &Run<'_>, op: &Predict, local: &mut Local) -> Result<(), Stopped> {
    let env = run.env;
    let layout = &run.shared.layout;
    let source = Source {
        data: env.f32(&op.input, 0),
        stride: op.input.stride / 4,
        n: op.input.columns,
        tokens: env.tokens,
    };
    let input = ready(run, source, op.needs, &mut local.input, layout.input, false)?;
    let (rank, neurons) = (op.fc1.operand.rows, op.fc2.operand.rows);
    let hidden = run.shared.at::<f32>(layout.gate);
    let mut job = Matmul {
        weight: env.matrix(&op.fc1),
        rows: Rows::Range(0, 0),
        input: input.for_format(op.fc1.format),
        tokens: env.tokens,
        out: hidden,
        out_stride: layout.neurons,
        bias: std::ptr::null(),
        accumulate: false,
    };
    let grain = run.grain(rank, op.fc1.operand.stride, env.tokens);
    while let Some(part) = run.claim(0, rank, grain) {
        job.rows = Rows::Range(part.start, part.end);
        // SAFETY: as in `linear`; the shared rows hold `rank` elements.
        unsafe {
            (run.kernels.matmul)(&job, &mut local.tile);
            for t in 0..env.tokens {
                let h = hidden.add(t * layout.neurons + part.start);
                (run.kernels.activate)(Activation::Relu, h, h, part.len());
            }
        }
    }
    run.worker.barrier()?;
    let source = Source { data: hidden, stride: layout.neurons, n: rank, tokens: env.tokens };
    let hidden = ready(run, source, op.hidden_needs, &mut local.hidden, layout.hidden, false)?;
    let scores = run.shared.at::<f32>(layout.up);
    let mut job =
        Matmul { weight: env.matrix(&op.fc2), input: hidden.for_format(op.fc2.format), out: scores, ..job };
    let grain = run.grain(neurons, op.fc2.operand.stride, env.tokens);
    while let Some(part) = run.claim(1, neurons, grain) {
        job.rows = Rows::Range(part.start, part.end);
        // SAFETY: as above; the shared rows hold `neurons` scores and the mask's rows as many bytes.
        unsafe {
            (run.kernels.matmul)(&job, &mut local.tile);
            for t in 0..env.tokens {
                let mask = env.row(&op.mask, t);
                for i in part.clone() {
                    let score = *scores.add(t * layout.neurons + i);
                    *mask.add(i) = u8::from(score >= op.threshold);
                }
            }
        }
    }
    Ok(())
}
