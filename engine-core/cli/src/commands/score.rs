//! `score`: logits after each of given tokens, as JSON.

use super::run;
use crate::args::{Global, ScoreArgs};
use crate::model::Running;
use crate::settings::Settings;
use crate::{output, prompt};
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::Path;

/// One position.
#[derive(Debug, Serialize)]
struct Position {
    position: u32,
    /// The token at this position.
    id: u32,
    /// The largest logits after it, with their ids; the larger first, of equal ones the lower id.
    #[serde(skip_serializing_if = "Option::is_none")]
    top: Option<Vec<(u32, f32)>>,
    /// Every logit after it, by id.
    #[serde(skip_serializing_if = "Option::is_none")]
    logits: Option<Vec<f32>>,
    /// The largest logit.
    max_logit: f32,
    /// The token that follows in what was given.
    next_id: Option<u32>,
    next_logit: Option<f32>,
    /// Natural logarithm of its probability.
    next_log_probability: Option<f64>,
}

pub(super) fn score(global: &Global, args: &ScoreArgs) -> Result<()> {
    let settings = Settings::resolve(global, &args.engine, &args.size, None)?;
    let running = Running::load(&args.model, &settings)?;
    let ids = match &args.input {
        input if !input.ids.is_empty() => input.ids.clone(),
        input if input.ids_file.is_some() => {
            let path = input.ids_file.as_deref().unwrap_or(Path::new("-"));
            prompt::parse_ids(&prompt::read_text(path)?).with_context(|| path.display().to_string())?
        }
        input => {
            let file = input.file.as_deref().map(prompt::read_text).transpose()?;
            let text = input.prompt.clone().or(file).unwrap_or_default();
            run::prompt_ids(&running, &text, args.no_bos)?
        }
    };
    let mut session = running.engine.session()?;
    let width = running.engine.model().sampleable_vocab;
    // Positions are written as they come: all logits of a long text need not fit into memory.
    let head = serde_json::json!({
        "model": running.model_json(), "plan": running.placed.plan_json(), "plugins": running.placed.plugins_json(), "ids": ids,
    });
    let head = serde_json::to_string(&head)?;
    let mut written = Ok(());
    let mut begun = false;
    let (mut sum, mut count) = (0.0, 0u32);
    let scored = session.score(&ids, &mut |at, logits| {
        let logits = &logits[..logits.len().min(width)];
        let (Some(&id), next) = (ids.get(at as usize), ids.get(at as usize + 1).copied()) else { return };
        let position = position(at, id, next, logits, args);
        if let Some(log_probability) = position.next_log_probability {
            sum += log_probability;
            count += 1;
        }
        if written.is_ok() {
            written = serde_json::to_string(&position).map_err(Into::into).and_then(|line| {
                let before = if begun {
                    ",\n".into()
                } else {
                    format!("{},\"positions\":[\n", head.trim_end_matches('}'))
                };
                begun = true;
                output::write(&format!("{before}{line}"))
            });
        }
    });
    written?;
    if let Err(error) = scored {
        // What is out is out: the object ends, and says why before its end.
        if begun {
            output::line(&format!("\n],\"error\":{}}}", serde_json::to_string(&error.to_string())?))?;
        }
        return Err(error.into());
    }
    let mean = (count > 0).then(|| -sum / f64::from(count));
    let tail = serde_json::json!({"mean_negative_log_likelihood": mean, "perplexity": mean.map(f64::exp)});
    output::line(&format!("\n],{}", serde_json::to_string(&tail)?.trim_start_matches('{')))
}

fn position(at: u32, id: u32, next: Option<u32>, logits: &[f32], args: &ScoreArgs) -> Position {
    let max_logit = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let next_logit = next.and_then(|id| logits.get(id as usize).copied());
    let log_sum = || {
        let max = f64::from(max_logit);
        max + logits.iter().map(|&logit| (f64::from(logit) - max).exp()).sum::<f64>().ln()
    };
    Position {
        position: at,
        id,
        top: (!args.all_logits).then(|| largest(logits, args.top as usize)),
        logits: args.all_logits.then(|| logits.to_vec()),
        max_logit,
        next_id: next,
        next_logit,
        next_log_probability: next_logit.map(|logit| f64::from(logit) - log_sum()),
    }
}

/// The `count` largest with their ids.
fn largest(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count < all.len() {
        if count > 0 {
            all.select_nth_unstable_by(count - 1, order);
        }
        all.truncate(count);
    }
    all.sort_unstable_by(order);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_first_then_lower_id() {
        let logits = [1.0, 3.0, 2.0, 3.0];
        assert_eq!(largest(&logits, 3), [(1, 3.0), (3, 3.0), (2, 2.0)]);
        assert_eq!(largest(&logits, 0), []);
        assert_eq!(largest(&logits, 99).len(), 4);
    }
}
