//! `convert` and `quantize`: GGUF files of other models, and of the same with other types.

use crate::args::{ConvertArgs, Global, QuantizeArgs, WritingArgs};
use crate::failure::EXIT_CANCELLED;
use crate::interrupt::Interrupt;
use crate::output;
use crate::progress::Bar;
use crate::settings::warn_of_threads;
use anyhow::Result;
use formats::convert::{Options, Types, WriteOptions, check_target, partial_path, plan_from};
use formats::{FormatError, GgufFile};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

pub(super) fn convert(global: &Global, args: &ConvertArgs) -> Result<ExitCode> {
    let options = Options {
        types: args.writing.types(args.dtype.0),
        pre_tokenizer: args.pre_tokenizer.clone(),
        without_tokenizer: args.no_tokenizer,
        predictors: args.predictors.clone(),
        without_predictors: args.no_predictors,
        ..Options::default()
    };
    write_model(global, &args.input, &args.output, &options, &args.writing)
}

pub(super) fn quantize(global: &Global, args: &QuantizeArgs) -> Result<ExitCode> {
    let options = Options { types: args.writing.types(args.dtype.0), ..Options::default() };
    write_model(global, &args.input, &args.output, &options, &args.writing)
}

impl WritingArgs {
    fn types(&self, matrices: Option<engine_core::DType>) -> Types {
        Types {
            matrices,
            head: self.output_type.and_then(|dtype| dtype.0),
            embedding: self.embedding_type.and_then(|dtype| dtype.0),
        }
    }
}

fn write_model(
    global: &Global,
    input: &Path,
    target: &Path,
    options: &Options,
    args: &WritingArgs,
) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let file = GgufFile::open(input)?;
    write(global, (&file, target), options, (args.threads, args.force), &interrupt)
}

fn write(
    global: &Global,
    (file, target): (&GgufFile, &Path),
    options: &Options,
    how: (u32, bool),
    interrupt: &Interrupt,
) -> Result<ExitCode> {
    write_from(global, (file, None, target), options, how, interrupt)
}

/// Writes what [`plan_from`] plans.
pub(super) fn write_from(
    global: &Global,
    (file, original, target): (&GgufFile, Option<&GgufFile>, &Path),
    options: &Options,
    (wanted, force): (u32, bool),
    interrupt: &Interrupt,
) -> Result<ExitCode> {
    let started = Instant::now();
    // Before the work of planning, so that the most common mistake is told at once.
    check_target(target, &file.files().collect::<Vec<_>>(), force)?;
    let written = plan_from(file, original, options)?;
    for line in &written.lines {
        tracing::info!("{line}");
    }
    warn_of_threads(Some(wanted));
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match usize::try_from(wanted) {
        Ok(threads @ 1..) => threads.min(processors.max(64)),
        _ => processors,
    };
    let bar = Bar::start(written.bytes(), global.quiet);
    let options = WriteOptions { threads, force };
    let outcome = interrupt.during_with(partial_path(target), |cancel| {
        written.write(target, &options, &mut |tensor, done| bar.at(tensor, done), cancel)
    });
    drop(bar);
    match outcome {
        Err(error @ FormatError::Cancelled { .. }) => {
            tracing::warn!("{error}");
            return Ok(ExitCode::from(EXIT_CANCELLED));
        }
        other => other?,
    }
    let seconds = started.elapsed().as_secs_f64();
    tracing::info!(
        "wrote {}: {} of weights in {seconds:.1} s",
        target.display(),
        output::bytes(written.bytes())
    );
    Ok(ExitCode::SUCCESS)
}
