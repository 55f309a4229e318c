//! `cargo xtask`: the tasks of the workspace, a module each.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for a terminal")]

mod ci;
mod codegen;
mod conformance;
mod cross;
mod demo;
mod fuzz;
mod models;
mod peer;
mod perplexity;
mod process;
mod synth;
mod test;
mod tidy;

use anyhow::{Result, bail};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask TASK

  demo                         build, then generate text from the model in this repository
  test                         build, then run every test of the workspace
  tidy                         check the rules of ARCHITECTURE.md that a program can check
  codegen [--check]            write (or compare) the files that are made from code
  ci [--full | --only STAGE...]
                               every check, with the time of each; --full adds the long ones
  conformance [--plugin PATH] [--full] [OPTIONS]
                               hold every compute plug-in, or this one, to the suite
  models [--fetch smollm2] [--quantize TYPE,...]
                               real models for benchmarks, under target/models
  synth PRESET -o FILE [--type q8_0] [--width N] [--hidden N] [--layers N] [--heads N] [--kv-heads N]
        [--vocabulary N] [--context N]
        [--experts COUNT,USED] [--activation relu|drelu] [--predictor-rank N] [--seed N]
        [--text FILE [--tokens 20000]] [--force]
                               a seeded model of the preset's shape (1b, wide, tiny, tiny-moe) or another one; --text
                               writes text for it; its activity is measured and printed
  bench-peer MODEL... [--threads 1,2] [--rounds 3] [--pp 512] [--tg 128]
                               speed beside llama.cpp on the same files
  perplexity-peer MODEL... --text FILE [--chunks 8] [--context 512]
                               perplexity beside llama.cpp on the same files
  fuzz [--seconds 60] [TARGET]...
                               the readers of formats/ on inputs made up from seeds (needs a C++ compiler)
  cross setup|conformance [--full]|demo [--tier max|neoverse-n1|cortex-a72]...
                               the aarch64 build, run by qemu
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Answers whether all is well; a task whose last line is a summary says by itself what is not.
fn run(arguments: &[String]) -> Result<bool> {
    let Some((task, rest)) = arguments.split_first() else {
        bail!("no task given\n{USAGE}");
    };
    let done = match task.as_str() {
        "test" => return test::run(rest),
        "ci" => return ci::run(rest),
        "demo" => no_arguments(rest).and_then(|()| demo::run()),
        "tidy" => no_arguments(rest).and_then(|()| tidy::run()),
        "codegen" => codegen::run(has_flag(rest, "--check")?),
        "conformance" => conformance::run(rest),
        "models" => models::run(rest),
        "synth" => synth::run(rest),
        "bench-peer" => peer::run(rest),
        "perplexity-peer" => perplexity::run(rest),
        "fuzz" => fuzz::run(rest),
        "cross" => cross::run(rest),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(())
        }
        other => bail!("unknown task `{other}`\n{USAGE}"),
    };
    done.map(|()| true)
}

/// Whether the one flag that a task takes is there; any other argument is refused.
fn has_flag(arguments: &[String], flag: &str) -> Result<bool> {
    if let Some(unknown) = arguments.iter().find(|a| *a != flag) {
        bail!("unknown argument `{unknown}`\n{USAGE}");
    }
    Ok(!arguments.is_empty())
}

fn no_arguments(arguments: &[String]) -> Result<()> {
    match arguments.first() {
        Some(unknown) => bail!("unknown argument `{unknown}`\n{USAGE}"),
        None => Ok(()),
    }
}
