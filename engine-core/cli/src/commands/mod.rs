//! The commands, a file each.

mod activity;
mod bench;
mod chat;
mod completions;
mod config;
mod conformance;
mod convert;
mod diverge;
mod inspect;
mod perplexity;
mod plugins;
mod prepare;
mod run;
mod score;

use crate::args::{Cli, Command};
use anyhow::Result;
use std::process::ExitCode;

/// Does what the command line asks for.
pub(crate) fn dispatch(cli: Cli, matches: &clap::ArgMatches) -> Result<ExitCode> {
    let Cli { global, command } = cli;
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::Run(args) => {
            let matches = matches.subcommand_matches("run").unwrap_or(matches);
            run::run(&global, &args, matches)
        }
        Command::Chat(args) => chat::chat(&global, &args),
        Command::Score(args) => score::score(&global, &args).map(done),
        Command::Perplexity(args) => perplexity::perplexity(&global, &args).map(done),
        Command::Bench(args) => bench::bench(&global, &args).map(done),
        Command::Inspect(args) => inspect::inspect(&global, &args),
        Command::Convert(args) => convert::convert(&global, &args),
        Command::Quantize(args) => convert::quantize(&global, &args),
        Command::Activity(args) => activity::activity(&global, &args).map(done),
        Command::Prepare(args) => prepare::prepare(&global, &args),
        Command::Config(command) => config::config(&global, &command).map(done),
        Command::Completions { shell } => completions::completions(shell).map(done),
        Command::Plugins(command) => plugins::plugins(&global, &command),
        Command::Devices(args) => plugins::devices(&global, &args).map(done),
    }
}
