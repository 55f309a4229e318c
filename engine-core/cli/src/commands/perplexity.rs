//! `perplexity`: how well a model foretells a text, the way that llama.cpp's tool of that name measures it.

use crate::args::{Global, PerplexityArgs, SizeArgs};
use crate::likelihood::{Sum, best, divergence, negative_log_likelihood};
use crate::model::Running;
use crate::settings::Settings;
use crate::{failure::WithHint, output, placement, prompt};
use anyhow::{Result, anyhow};
use engine_runtime::Session;
use formats::ModelDescription;
use serde::Serialize;

/// Tokens of a chunk where neither flag nor model says otherwise.
const CHUNK: usize = 512;

#[derive(Serialize)]
struct Report<'a> {
    model: serde_json::Value,
    plan: serde_json::Value,
    /// Tokens of a chunk at most; each chunk starts anew.
    chunk: usize,
    /// Tokens that were foretold: those of each chunk's second half, or all but the first of each text.
    tokens: u64,
    mean_negative_log_likelihood: f64,
    perplexity: f64,
    /// Of the perplexity.
    standard_error: f64,
    /// Mean negative log-likelihood of each chunk.
    chunks: Vec<f64>,
    /// Beside another policy, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<AgainstReport<'a>>,
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
    let mut settings = Settings::resolve(global, &args.engine, &size, None)?;
    let running = Running::load(&args.model, &settings)?;
    let texts = if args.separate { texts(&running, args)? } else { chunks(&running, args)? };
    let chunk = running.engine.context() as usize;
    let mut against = match &args.against {
        Some(policy) => {
            settings.config.planner.sparsity.clone_from(policy);
            let other = Running::load(&args.model, &settings)?;
            let policy = placement::policies(other.engine.plan());
            let session = other.engine.session()?;
            Some(Against { session, policy, rows: Vec::new(), seen: Compared::default() })
        }
        None => None,
    };
    let width = running.engine.model().sampleable_vocab;
    let mut session = running.engine.session()?;
    let (mut all, mut means) = (Sum::default(), Vec::new());
    for (number, ids) in texts.iter().enumerate() {
        let counted = if args.separate { 0 } else { chunk / 2 };
        let mut one = Sum::default();
        if let Some(against) = &mut against {
            against.run(ids, counted, width)?;
        }
        session.rewind(0)?;
        session.score(ids, &mut |at, logits| {
            let at = at as usize;
            let Some(&next) = ids.get(at + 1).filter(|_| at >= counted) else { return };
            let logits = &logits[..logits.len().min(width)];
            let value = negative_log_likelihood(logits, next);
            one.add(value);
            if let Some(against) = &mut against {
                against.compare(at - counted, logits, (next, value));
            }
        })?;
        means.push(one.mean());
        all.add_all(&one);
        let so_far = all.mean().exp();
        tracing::info!("chunk {} of {}: perplexity so far {so_far:.4}", number + 1, texts.len());
    }
    let (mean, error) = (all.mean(), all.standard_error());
    let seen = against.map(|against| (against.seen, against.policy));
    if !args.json {
        let unit = if args.separate { "texts" } else { "chunks" };
        output::line(&format!(
            "perplexity {:.4} +- {:.4} ({} tokens in {} {unit} of {}{chunk})",
            mean.exp(),
            mean.exp() * error,
            all.count,
            texts.len(),
            if args.separate { "at most " } else { "" },
        ))?;
        return seen.map_or(Ok(()), |(seen, policy)| output::line(&seen.line(&policy)));
    }
    let report = Report {
        model: running.model_json(),
        plan: running.placed.plan_json(),
        chunk,
        tokens: all.count,
        mean_negative_log_likelihood: mean,
        perplexity: mean.exp(),
        standard_error: mean.exp() * error,
        chunks: means,
        against: seen.as_ref().map(|(seen, policy)| seen.report(policy)),
        ids: args.ids.then(|| texts.iter().map(Vec::as_slice).collect()),
    };
    output::line(&serde_json::to_string(&report)?)
}

/// The text in chunks of the context.
fn chunks(running: &Running, args: &PerplexityArgs) -> Result<Vec<Vec<u32>>> {
    let tokenizer = running.tokenizer()?;
    let chunk = running.engine.context() as usize;
    let text = prompt::read_text(&args.file)?;
    let mut ids = tokenizer.encode(&text, tokenizer.adds_bos(), false)?;
    drop(text);
    let bos = tokenizer.special_ids().bos.filter(|_| tokenizer.adds_bos());
    let count = (ids.len() / chunk).min(args.chunks.unwrap_or(u32::MAX) as usize);
    if count == 0 || chunk < 4 {
        return Err(anyhow!("{} has {} tokens, and a chunk {chunk}", args.file.display(), ids.len()))
            .hint("a longer text, a smaller --context of at least 4, or --separate");
    }
    ids.truncate(count * chunk);
    if let Some(bos) = bos {
        ids.chunks_mut(chunk).for_each(|chunk| chunk[0] = bos);
    }
    Ok(ids.chunks(chunk).map(<[u32]>::to_vec).collect())
}

/// Each text by itself, as far as the context reaches.
fn texts(running: &Running, args: &PerplexityArgs) -> Result<Vec<Vec<u32>>> {
    let mut texts = super::prepare::corpus::texts_of(running, &args.file)?;
    texts.iter_mut().for_each(|ids| ids.truncate(running.engine.context() as usize));
    texts.retain(|ids| ids.len() > 1);
    texts.truncate(args.chunks.unwrap_or(u32::MAX) as usize);
    if texts.is_empty() {
        return Err(anyhow!("{} has no text of two tokens", args.file.display())).hint("another --file");
    }
    Ok(texts)
}

/// The same model by another policy.
struct Against {
    session: Session,
    /// The policy that its plan has.
    policy: String,
    /// Its logits for the text under way, from the first token that counts.
    rows: Vec<Vec<f32>>,
    seen: Compared,
}

impl Against {
    fn run(&mut self, ids: &[u32], counted: usize, width: usize) -> Result<()> {
        self.rows.clear();
        self.session.rewind(0)?;
        let rows = &mut self.rows;
        self.session.score(ids, &mut |at, logits| {
            if at as usize >= counted {
                rows.push(logits[..logits.len().min(width)].to_vec());
            }
        })?;
        Ok(())
    }

    fn compare(&mut self, row: usize, logits: &[f32], (next, value): (u32, f64)) {
        let Some(other) = self.rows.get(row) else { return };
        self.seen.divergence.add(divergence(other, logits));
        self.seen.difference.add(value - negative_log_likelihood(other, next));
        self.seen.same_best += u64::from(best(other) == best(logits));
    }
}

/// How the plan's logits differ from the other policy's.
#[derive(Default)]
struct Compared {
    divergence: Sum,
    /// Of the negative log-likelihoods of the tokens that came.
    difference: Sum,
    same_best: u64,
}

#[derive(Serialize)]
struct AgainstReport<'a> {
    policy: &'a str,
    /// Mean Kullback-Leibler divergence from it, in nats.
    divergence: f64,
    /// The plan's perplexity as a multiple of its.
    perplexity_ratio: f64,
    /// What that ratio does not exceed, with 95% confidence.
    perplexity_ratio_at_most: f64,
    /// Share of tokens whose most likely successor is the same.
    same_best: f64,
}

impl Compared {
    fn report<'a>(&self, policy: &'a str) -> AgainstReport<'a> {
        // 1.645 standard errors: one-sided, 95%.
        let at_most = self.difference.mean() + 1.645 * self.difference.standard_error();
        AgainstReport {
            policy,
            divergence: self.divergence.mean(),
            perplexity_ratio: self.difference.mean().exp(),
            perplexity_ratio_at_most: at_most.exp(),
            same_best: self.same_best as f64 / self.divergence.count.max(1) as f64,
        }
    }

    fn line(&self, policy: &str) -> String {
        let report = self.report(policy);
        format!(
            "beside {policy}: divergence {:.2e}, perplexity {:.4} times (at most {:.4}, 95%), most likely token the same \
             in {:.2}%",
            report.divergence,
            report.perplexity_ratio,
            report.perplexity_ratio_at_most,
            report.same_best * 100.0
        )
    }
}
