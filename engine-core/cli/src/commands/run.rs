//! `run`: continues a prompt.

use crate::args::{Global, RunArgs};
use crate::failure::EXIT_CANCELLED;
use crate::interrupt::Interrupt;
use crate::model::Running;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::{output, prompt};
use anyhow::Result;
use clap::ArgMatches;
use engine_runtime::{FinishReason, GenerateOptions, Generation, SamplingOptions, Session, generate};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

pub(super) fn run(global: &Global, args: &RunArgs, matches: &ArgMatches) -> Result<ExitCode> {
    let text = prompt::text(args.prompt.as_deref(), args.file.as_deref(), matches)?;
    let settings = Settings::resolve(global, &args.engine, &args.size, Some(&args.sampling))?;
    let interrupt = Interrupt::install()?;
    let running = Running::load(&args.model, &settings)?;
    let ids = prompt_ids(&running, &text, args.no_bos)?;
    let mut session = running.engine.session()?;
    let options = generate_options(&settings, args.max_tokens, !args.ignore_eos);
    let generation = stream(&running, &mut session, &ids, &options, &interrupt, !args.json)?;
    if args.json {
        output::json(&report(&running, &generation))?;
    } else {
        output::line("")?;
    }
    summarise(&running, &generation, options.max_tokens);
    Ok(exit_code(&generation))
}

/// The ids of a raw prompt. One rule for BOS: it is put in front where the model asks for it, unless the prompt begins
/// with it already; then nothing is added, and said.
pub(super) fn prompt_ids(running: &Running, text: &str, no_bos: bool) -> Result<Vec<u32>> {
    let tokenizer = running.tokenizer()?;
    let ids = tokenizer.encode(text, false, true)?;
    if no_bos || !tokenizer.adds_bos() {
        return Ok(ids);
    }
    if tokenizer.starts_with_bos(&ids) {
        tracing::warn!(
            "the prompt begins with the beginning-of-text token (BOS) already; no second one is added"
        );
        return Ok(ids);
    }
    Ok(tokenizer.encode(text, true, true)?)
}

/// What the settings say about a generation.
pub(super) fn generate_options(
    settings: &Settings,
    max_tokens: Option<u32>,
    stop_at_end: bool,
) -> GenerateOptions {
    let sampling = &settings.config.sampling;
    GenerateOptions {
        max_tokens,
        stop: sampling.stop.clone(),
        sampling: SamplingOptions::from(sampling),
        stop_at_end,
    }
}

/// Generates; where `show` is set, text goes to standard output as it comes. Ctrl-C ends it with what there is, and so
/// does a closed standard output.
pub(super) fn stream(
    running: &Running,
    session: &mut Session,
    ids: &[u32],
    options: &GenerateOptions,
    interrupt: &Interrupt,
    show: bool,
) -> Result<Generation> {
    let tokenizer = running.tokenizer()?;
    let mut written = Ok(());
    let generation = interrupt.during(|cancel| {
        let mut progress = Some(Progress::start(format!("reading {} tokens of the prompt", ids.len())));
        let mut on_text = |text: &str| {
            drop(progress.take());
            if show && written.is_ok() {
                written = output::write(text);
                if written.is_err() {
                    cancel.store(true, Ordering::Relaxed);
                }
            }
        };
        generate(session, tokenizer, ids, options, &mut on_text, cancel)
    });
    // Output that could not be written explains the cancellation, and is what to report.
    written?;
    Ok(generation?)
}

/// The one object of `--json`.
pub(super) fn report(running: &Running, generation: &Generation) -> Value {
    let mut object = json!({"model": running.model_json()});
    if let (Value::Object(object), Ok(Value::Object(generated))) =
        (&mut object, serde_json::to_value(generation))
    {
        object.extend(generated);
        object.insert("plan".into(), running.placed.plan_json());
        object.insert("plugins".into(), running.placed.plugins_json());
    }
    object
}

/// Which of the two limits cut a generation off.
pub(super) fn cut(running: &Running, generation: &Generation, max_tokens: Option<u32>) -> String {
    match max_tokens.filter(|&most| generation.ids.len() >= most as usize) {
        Some(most) => format!("the limit of {most} tokens was reached (--max-tokens)"),
        None => format!("the context of {} positions is full (--context)", running.engine.context()),
    }
}

/// A line of figures for people.
pub(super) fn summarise(running: &Running, generation: &Generation, max_tokens: Option<u32>) {
    let timings = &generation.timings;
    let why = match generation.finish_reason {
        FinishReason::Stop if generation.stop_string => "a stop text ended it (--stop)".to_owned(),
        FinishReason::Stop => "the model ended it".to_owned(),
        FinishReason::Length => cut(running, generation, max_tokens),
        FinishReason::Cancelled => "stopped by Ctrl-C".to_owned(),
    };
    tracing::info!(
        "prompt: {} tokens in {:.3} s, {:.1} tokens/s; generated: {} tokens in {:.3} s, {:.1} tokens/s; seed {}; {why}",
        timings.prompt_tokens,
        timings.prompt_seconds,
        timings.prompt_tokens_per_second,
        generation.ids.len(),
        timings.decode_seconds,
        timings.decode_tokens_per_second,
        generation.seed,
    );
    for stage in &generation.statistics.stages {
        tracing::debug!(
            "{}: {} x {}, {:.4} s, {:.4} s of these waited for",
            stage.device,
            stage.submissions,
            stage.what,
            stage.seconds,
            stage.waited_seconds,
        );
    }
    for device in &generation.statistics.devices {
        let counters: Vec<String> =
            device.counters.iter().map(|(name, value)| format!("{name} {value}")).collect();
        tracing::debug!("{}: {}", device.name, counters.join(", "));
    }
}

/// 130 where it was cancelled.
pub(super) fn exit_code(generation: &Generation) -> ExitCode {
    match generation.finish_reason {
        FinishReason::Cancelled => ExitCode::from(EXIT_CANCELLED),
        _ => ExitCode::SUCCESS,
    }
}
