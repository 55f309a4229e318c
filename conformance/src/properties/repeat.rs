//! The same answer again: repeats, threads, neighbours in a batch, neighbouring sequences.

use crate::bench::Bench;
use crate::compare::identical;
use crate::finding::{Fallible, Finding, Outcome};
use crate::problem::Problem;
use crate::run::{Outputs, prepare};
use engine_core::operation::SlotId;

/// Threads of the concurrency check; more than a test machine has cores.
const THREADS: usize = 4;
/// Runs per thread, and of a repeat.
const ROUNDS: usize = 3;

pub(super) fn repeats(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let reason = "sums run in a fixed order: a result depends on the operands alone";
    let prepared = prepare(bench.lab(), problem)?;
    let first = prepared.run(problem)?;
    for _ in 0..ROUNDS {
        identical(problem, "repeats", reason, &prepared.run(problem)?, &first, false)?;
    }
    prepared.close(problem)?;
    identical(problem, "repeats (prepared again)", reason, &bench.run(problem)?, &first, false)?;
    Ok(Outcome::OK)
}

pub(super) fn concurrent(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let prepared = prepare(bench.lab(), problem)?;
    let first = prepared.run(problem)?;
    let reason =
        "an executable may be submitted from several threads; results do not depend on what else runs";
    let work = || -> Fallible<()> {
        // All of a thread's submissions are under way together.
        let operands = (0..ROUNDS).map(|_| prepared.bind(problem)).collect::<Fallible<Vec<_>>>()?;
        let values =
            operands.iter().map(|o| prepared.submit(problem, o, &[])).collect::<Fallible<Vec<_>>>()?;
        for (operands, value) in operands.into_iter().zip(values) {
            bench.lab().finish(value)?;
            let got = operands.outputs(problem)?;
            identical(problem, "concurrent submissions", reason, &got, &first, false)?;
            operands.free()?;
        }
        Ok(())
    };
    let results: Vec<Fallible<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .map(|t| {
                t.join().unwrap_or_else(|_| Err(Finding::new("concurrent submissions", "a thread panicked")))
            })
            .collect()
    });
    results.into_iter().collect::<Fallible<Vec<()>>>()?;
    prepared.close(problem)?;
    Ok(Outcome::OK)
}

/// The rows `first..first + count` of per-token outputs.
pub(crate) fn cut(problem: &Problem, outputs: &Outputs, first: u32, count: u32) -> Outputs {
    let mut part = Outputs::new();
    for (&index, bytes) in outputs {
        let Some(slot) = problem.list.slot(SlotId(index)).filter(|s| s.per_token) else { continue };
        let stride = slot.tensor.row_stride as usize;
        let start = first as usize * stride;
        let end = ((first + count) as usize * stride).min(bytes.len());
        part.insert(index, bytes[start..end].to_vec());
    }
    part
}

pub(super) fn neighbours(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let reason =
        "sums depend on nothing but the row's length: not on the number of tokens, not on other rows";
    let prepared = prepare(bench.lab(), problem)?;
    let whole = prepared.run(problem)?;
    for count in 1..problem.tokens {
        let part = problem.slice_tokens(0, count);
        let what = format!("batch neighbours ({count} of {} tokens)", problem.tokens);
        identical(&part, &what, reason, &prepared.run(&part)?, &cut(problem, &whole, 0, count), false)?;
    }
    for token in 1..problem.tokens {
        let part = problem.slice_tokens(token, 1);
        let what = format!("batch neighbours (token {token} alone)");
        identical(&part, &what, reason, &prepared.run(&part)?, &cut(problem, &whole, token, 1), false)?;
    }
    prepared.close(problem)?;
    Ok(Outcome::OK)
}

pub(super) fn sequences(bench: &Bench<'_>, problem: &Problem) -> Fallible<Outcome> {
    let reason = "a sequence's result does not depend on the other sequences of its submission";
    let prepared = prepare(bench.lab(), problem)?;
    let whole = prepared.run(problem)?;
    for (index, span) in problem.sequences.iter().enumerate() {
        let part = problem.slice_tokens(span.first_token, span.tokens);
        let what = format!("sequences (number {index} alone)");
        let want = cut(problem, &whole, span.first_token, span.tokens);
        identical(&part, &what, reason, &prepared.run(&part)?, &want, false)?;
    }
    prepared.close(problem)?;
    Ok(Outcome::OK)
}
