//! `perplexity`: how well a model foretells a text, the way that llama.cpp's tool of that name measures it.

use crate::args::{Global, PerplexityArgs, SizeArgs};
use crate::model::Running;
use crate::settings::Settings;
use crate::{failure::WithHint, output, prompt};
use anyhow::{Result, anyhow};
use formats::ModelDescription;
use serde::Serialize;

/// Tokens of a chunk where neither flag nor model says otherwise.
const CHUNK: usize = 512;

/// Negative log-likelihoods, added up.
#[derive(Default)]
struct Sum {
    count: u64,
    sum: f64,
    squares: f64,
}

impl Sum {
    fn add(&mut self, value: f64) {
        self.count += 1;
        self.sum += value;
        self.squares += value * value;
    }

    fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }

    /// Of the mean.
    fn standard_error(&self) -> f64 {
        let variance = (self.squares / self.count as f64 - self.mean().powi(2)).max(0.0);
        (variance / (self.count.max(2) - 1) as f64).sqrt()
    }
}

#[derive(Serialize)]
struct Report<'a> {
    model: serde_json::Value,
    plan: serde_json::Value,
    /// Tokens of a chunk; each chunk starts anew.
    chunk: usize,
    /// Tokens that were foretold: those of each chunk's second half.
    tokens: u64,
    mean_negative_log_likelihood: f64,
    perplexity: f64,
    /// Of the perplexity.
    standard_error: f64,
    /// Mean negative log-likelihood of each chunk.
    chunks: Vec<f64>,
    /// Every chunk's ids, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    ids: Option<Vec<&'a [u32]>>,
}

pub(super) fn perplexity(global: &Global, args: &PerplexityArgs) -> Result<()> {
    let size = match args.size.context {
        Some(_) => SizeArgs { threads: args.size.threads, context: args.size.context },
        None => {
            let trained = ModelDescription::describe(&args.model.open()?)?.context_length;
            SizeArgs { threads: args.size.threads, context: i64::try_from(CHUNK.min(trained)).ok() }
        }
    };
    let settings = Settings::resolve(global, &args.engine, &size, None)?;
    let running = Running::load(&args.model, &settings)?;
    let tokenizer = running.tokenizer()?;
    let chunk = running.engine.context() as usize;
    let text = prompt::read_text(&args.file)?;
    let mut ids = tokenizer.encode(&text, tokenizer.adds_bos(), false)?;
    drop(text);
    let bos = tokenizer.special_ids().bos.filter(|_| tokenizer.adds_bos());
    let count = (ids.len() / chunk).min(args.chunks.unwrap_or(u32::MAX) as usize);
    if count == 0 || chunk < 4 {
        return Err(anyhow!("{} has {} tokens, and a chunk {chunk}", args.file.display(), ids.len()))
            .hint("a longer text, or a smaller --context of at least 4");
    }
    ids.truncate(count * chunk);
    if let Some(bos) = bos {
        ids.chunks_mut(chunk).for_each(|chunk| chunk[0] = bos);
    }
    let width = running.engine.model().sampleable_vocab;
    let mut session = running.engine.session()?;
    let (mut all, mut chunks) = (Sum::default(), Vec::new());
    for (number, ids) in ids.chunks(chunk).enumerate() {
        let mut one = Sum::default();
        session.rewind(0)?;
        session.score(ids, &mut |at, logits| {
            let at = at as usize;
            let Some(&next) = ids.get(at + 1).filter(|_| at >= chunk / 2) else { return };
            one.add(negative_log_likelihood(&logits[..logits.len().min(width)], next));
        })?;
        chunks.push(one.mean());
        all.count += one.count;
        all.sum += one.sum;
        all.squares += one.squares;
        tracing::info!("chunk {} of {count}: perplexity so far {:.4}", number + 1, all.mean().exp());
    }
    let (mean, error) = (all.mean(), all.standard_error());
    if !args.json {
        let line = format!("perplexity {:.4} +- {:.4}", mean.exp(), mean.exp() * error);
        return output::line(&format!("{line} ({} tokens in {count} chunks of {chunk})", all.count));
    }
    let report = Report {
        model: running.model_json(),
        plan: running.placed.plan_json(),
        chunk,
        tokens: all.count,
        mean_negative_log_likelihood: mean,
        perplexity: mean.exp(),
        standard_error: mean.exp() * error,
        chunks,
        ids: args.ids.then(|| ids.chunks(chunk).collect()),
    };
    output::line(&serde_json::to_string(&report)?)
}

/// Of token `next`, by a softmax over `logits`.
fn negative_log_likelihood(logits: &[f32], next: u32) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - most).exp()).sum();
    let logit = logits.get(next as usize).map_or(f64::NEG_INFINITY, |&logit| f64::from(logit - most));
    sum.ln() - logit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likelihoods_of_a_softmax() {
        let logits = [0.0, 3.0f32.ln(), f32::NEG_INFINITY];
        assert!((negative_log_likelihood(&logits, 1) - (4.0f64 / 3.0).ln()).abs() < 1e-7);
        assert_eq!(negative_log_likelihood(&logits, 2), f64::INFINITY);
        let mut sum = Sum::default();
        [1.0, 2.0, 3.0].into_iter().for_each(|value| sum.add(value));
        assert!((sum.mean() - 2.0).abs() < 1e-12);
        assert!((sum.standard_error() - (2.0f64 / 3.0 / 2.0).sqrt()).abs() < 1e-12);
    }
}
