//! Operations that treat each element, or each row, by itself: copy, embed, activate, add, multiply.

use super::functions;
use crate::execute::Run;
use engine_core::operation::{Activation, SlotId};
use engine_core::{Error, Result};

/// `to = from`, row by row.
pub(crate) fn copy(run: &Run<'_>, from: SlotId, to: SlotId) -> Result<()> {
    let rows = if run.is_per_token(from) { run.tokens } else { run.tensor(from).rows as usize };
    for row in 0..rows {
        run.write_row_bytes(to, row, &run.row_bytes(from, row));
    }
    Ok(())
}

/// `output[t] = scale * table[ids[t]]`. Every id is checked before anything is written.
pub(crate) fn embed(
    run: &Run<'_>,
    label: &str,
    ids: SlotId,
    table: SlotId,
    output: SlotId,
    scale: f32,
) -> Result<()> {
    let vocabulary = run.tensor(table).rows;
    let mut rows = Vec::with_capacity(run.tokens);
    for token in 0..run.tokens {
        let bytes = run.row_bytes(ids, token);
        let id = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        match u64::try_from(id) {
            Ok(row) if row < vocabulary => rows.push(row as usize),
            _ => {
                return Err(Error::data(format!(
                    "{label} (embed): token {token} has id {id}, the table has {vocabulary} rows"
                )));
            }
        }
    }
    for (token, row) in rows.into_iter().enumerate() {
        let values: Vec<f64> = run.row(table, row).iter().map(|x| f64::from(scale) * x).collect();
        run.write_row(output, token, &values);
    }
    Ok(())
}

/// `output = function(input)`.
pub(crate) fn activate(run: &Run<'_>, function: Activation, input: SlotId, output: SlotId) -> Result<()> {
    for token in 0..run.tokens {
        let values: Result<Vec<f64>> =
            run.row(input, token).into_iter().map(|x| functions::activate(function, x)).collect();
        run.write_row(output, token, &values?);
    }
    Ok(())
}

/// `output[t] = f(left[t], right[t])`, element by element; a `right` that is not per token goes with every row.
pub(crate) fn combine(
    run: &Run<'_>,
    left: SlotId,
    right: SlotId,
    output: SlotId,
    f: fn(f64, f64) -> f64,
) -> Result<()> {
    for token in 0..run.tokens {
        let right = run.row(right, if run.is_per_token(right) { token } else { 0 });
        let values: Vec<f64> = run.row(left, token).iter().zip(&right).map(|(a, b)| f(*a, *b)).collect();
        run.write_row(output, token, &values);
    }
    Ok(())
}
