//! `prepare`: profiles a model's neurons and writes it with them sorted.

use super::convert;
use crate::args::{Global, PrepareArgs};
use crate::failure::{EXIT_CANCELLED, WithHint};
use crate::interrupt::Interrupt;
use crate::model::Running;
use crate::progress::Bar;
use crate::settings::Settings;
use crate::{output, prompt};
use anyhow::{Context, Result, anyhow};
use engine_runtime::Observer;
use engine_runtime::activity::{BATCHES, HOTTEST, LayerActivity, observe};
use formats::convert::{Neurons, Options, check_target};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Tokens that source and result are compared on.
const COMPARED: usize = 128;
/// What divides texts in a text file.
const DIVIDER: &str = "<|endoftext|>";

pub(super) fn prepare(global: &Global, args: &PrepareArgs) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let mut settings = Settings::resolve(global, &args.engine, &args.size, None)?;
    // Every neuron must be computed to be seen.
    settings.config.planner.sparsity = "dense".into();
    let file = args.model.open()?;
    check_target(&args.output, &file.files().collect::<Vec<_>>(), args.force)?;
    let running = Running::load(&args.model, &settings)?;
    let mut texts = Vec::new();
    for corpus in &args.corpora {
        texts.push(texts_of(&running, corpus)?);
    }
    let chosen = choose(texts, args.tokens as usize, running.engine.context() as usize);
    let total: usize = chosen.iter().map(Vec::len).sum();
    if total == 0 {
        return Err(anyhow!("the texts have no tokens")).hint("--corpus FILE with text");
    }
    let zero_below: Vec<bool> =
        running.engine.model().layers.iter().map(|layer| layer.ffn.activation.is_sparse()).collect();
    let neurons = running.engine.model().layers.iter().map(|layer| LayerActivity::new(layer.ffn.n_ff));
    let mut layers: Vec<LayerActivity> = neurons.collect();
    let mut observer = Observer::new(&running.engine)?;
    let bar = Bar::of_tokens(total as u64, global.quiet);
    let stopped = interrupt.during(|cancel| -> Result<bool> {
        let mut done = 0;
        for ids in &chosen {
            if cancel.load(Ordering::Relaxed) {
                return Ok(true);
            }
            observe(&mut observer, &zero_below, &mut layers, ids)?;
            done += ids.len();
            bar.at("profiling", done as u64);
        }
        Ok(false)
    })?;
    drop((bar, observer));
    if stopped {
        tracing::warn!("stopped: nothing is written");
        return Ok(ExitCode::from(EXIT_CANCELLED));
    }
    let sorted = layers.iter().map(sorted).collect();
    let options = Options { neurons: Some(sorted), ..Options::default() };
    let threads = args.size.threads.unwrap_or(0);
    let code = convert::write(global, (&file, &args.output), &options, (threads, args.force), &interrupt)?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let sample: Vec<u32> =
        chosen.iter().flatten().copied().take(COMPARED.min(running.engine.context() as usize)).collect();
    let difference = compare(&running, &args.output, &settings, &sample)?;
    report(&layers, &difference, total, args)?;
    Ok(ExitCode::SUCCESS)
}

/// The texts of a file, tokenized.
fn texts_of(running: &Running, path: &Path) -> Result<Vec<Vec<u32>>> {
    let tokenizer = running.tokenizer()?;
    let text = prompt::read_text(path)?;
    let lines = path.extension().is_some_and(|extension| extension == "jsonl");
    let parts: Vec<String> = if lines {
        let mut parts = Vec::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let at = || format!("{}, line {}", path.display(), number + 1);
            let object: serde_json::Value = serde_json::from_str(line).with_context(at)?;
            let text = object["text"].as_str().with_context(|| format!("{}: no `text`", at()))?;
            parts.push(text.to_owned());
        }
        parts
    } else {
        text.split(DIVIDER).map(|part| part.trim().to_owned()).collect()
    };
    let bos = tokenizer.adds_bos();
    let parts = parts.iter().filter(|part| !part.is_empty());
    Ok(parts.map(|part| tokenizer.encode(part, bos, true)).collect::<Result<_, _>>()?)
}

/// Texts of all files in turn, in parts that fit the context, until there are enough tokens.
fn choose(files: Vec<Vec<Vec<u32>>>, wanted: usize, context: usize) -> Vec<Vec<u32>> {
    let mut files: Vec<_> = files.into_iter().map(Vec::into_iter).collect();
    let (mut chosen, mut count) = (Vec::new(), 0);
    while count < wanted {
        let round: Vec<Vec<u32>> = files.iter_mut().filter_map(Iterator::next).collect();
        if round.is_empty() {
            break;
        }
        for part in round.iter().flat_map(|ids| ids.chunks(context.max(1))) {
            let part = &part[..part.len().min(wanted - count)];
            if !part.is_empty() {
                count += part.len();
                chosen.push(part.to_vec());
            }
        }
    }
    chosen
}

fn sorted(layer: &LayerActivity) -> Neurons {
    let (order, frequency) = (layer.order(), layer.frequency());
    Neurons { frequency: order.iter().map(|&i| frequency[i as usize]).collect(), order }
}

/// How the result's logits differ from the source's.
struct Difference {
    tokens: usize,
    /// Mean Kullback-Leibler divergence from the source, in nats.
    divergence: f64,
    /// Largest difference of logits, as a share of the largest logit.
    largest: f64,
    /// Share of tokens whose most likely successor is the same.
    same_best: f64,
}

fn compare(source: &Running, path: &Path, settings: &Settings, ids: &[u32]) -> Result<Difference> {
    let logits = |running: &Running| -> Result<Vec<Vec<f32>>> {
        let mut rows = Vec::new();
        running.engine.session()?.score(ids, &mut |_, logits| rows.push(logits.to_vec()))?;
        Ok(rows)
    };
    let model =
        crate::args::ModelArg { model: path.to_path_buf(), pre_tokenizer: None, overrides: Vec::new() };
    let (a, b) = (logits(source)?, logits(&Running::load(&model, settings)?)?);
    let mut difference = Difference { tokens: a.len(), divergence: 0.0, largest: 0.0, same_best: 0.0 };
    for (a, b) in a.iter().zip(&b) {
        let (p, q) = (log_softmax(a), log_softmax(b));
        difference.divergence += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        let size = a.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let apart = a.iter().zip(b).fold(0.0f32, |most, (x, y)| most.max((x - y).abs()));
        difference.largest = difference.largest.max(f64::from(apart / size));
        difference.same_best += f64::from(u8::from(best(a) == best(b)));
    }
    difference.divergence /= a.len() as f64;
    difference.same_best /= a.len() as f64;
    Ok(difference)
}

fn best(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - most).exp()).sum();
    logits.iter().map(|&x| f64::from(x - most) - sum.ln()).collect()
}

fn report(
    layers: &[LayerActivity],
    difference: &Difference,
    tokens: usize,
    args: &PrepareArgs,
) -> Result<()> {
    if args.json {
        let rows = layers.iter().map(|layer| {
            json!({
                "active": layer.active(), "overlap": layer.overlap(), "hottest": layer.hottest(),
                "active_of_batch": BATCHES.iter().zip(layer.unions()).collect::<Vec<_>>(),
            })
        });
        let object = json!({
            "output": args.output, "tokens": tokens, "hottest_share": HOTTEST, "layers": rows.collect::<Vec<_>>(),
            "compared_tokens": difference.tokens, "divergence": difference.divergence,
            "largest_difference": difference.largest, "same_best": difference.same_best,
        });
        return output::line(&object.to_string());
    }
    let hottest = format!("hottest {:.0}%", HOTTEST * 100.0);
    output::line(&format!("layer  active  overlap  {hottest}  active in batches of 2, 4, 8, 32"))?;
    for (index, layer) in layers.iter().enumerate() {
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        let unions = layer.unions().into_iter().skip(1);
        let unions: Vec<String> = unions.map(|u| u.map_or_else(|| "-".to_owned(), percent)).collect();
        output::line(&format!(
            "{index:>5}  {:>6}  {:>7}  {:>width$}  {}",
            percent(layer.active()),
            percent(layer.overlap()),
            percent(layer.hottest()),
            unions.join(", "),
            width = hottest.len(),
        ))?;
    }
    output::line(&format!(
        "{tokens} tokens profiled. Dense, over {} tokens: divergence from the source {:.1e}, logits at most {:.1e} apart, \
         {:.1}% of the most likely tokens are the same",
        difference.tokens,
        difference.divergence,
        difference.largest,
        difference.same_best * 100.0
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_taken_in_turn_and_cut() {
        let files = vec![vec![vec![1; 5], vec![2; 5]], vec![vec![3; 2]]];
        assert_eq!(
            choose(files.clone(), 100, 3),
            [vec![1; 3], vec![1; 2], vec![3; 2], vec![2; 3], vec![2; 2]]
        );
        assert_eq!(choose(files, 6, 100), [vec![1; 5], vec![3; 1]]);
        assert!(choose(vec![], 6, 100).is_empty());
    }

    #[test]
    fn divergence_of_equal_logits_is_nothing() {
        let p = log_softmax(&[1.0, 2.0, 3.0]);
        assert!((p.iter().map(|p| p.exp()).sum::<f64>() - 1.0).abs() < 1e-12);
        assert_eq!(best(&[1.0, 3.0, 3.0]), 1);
    }
}
