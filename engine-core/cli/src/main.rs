//! The `thermocline` program: a command line over the engine.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod failure;
mod interrupt;
mod likelihood;
mod log;
mod model;
mod output;
mod placed;
mod placement;
mod progress;
mod prompt;
mod settings;
mod stack;
mod template;

use args::{Cli, LogFormat};
use clap::{CommandFactory, FromArgMatches};
use std::process::ExitCode;

/// Prints help or version, and sees whether that worked.
fn show(help: &clap::Error) -> ExitCode {
    let written = help.print().and_then(|()| std::io::Write::flush(&mut std::io::stdout()));
    match written {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            output::note(&format!("error: cannot write to standard output: {error}\n"));
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

fn main() -> ExitCode {
    // Where this process was started to probe or to test a plug-in, it does that and ends here.
    conformance::main_if_child(stack::register);
    let matches = match Cli::command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) if error.use_stderr() => error.exit(),
        Err(help) => return show(&help),
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let format = cli.global.log_format;
    match log::start(&cli.global).and_then(|()| commands::dispatch(cli, &matches)) {
        Ok(code) => code,
        Err(error) => {
            let (message, code) = failure::describe(&error);
            match (message, format) {
                (None, _) => {}
                (Some(message), LogFormat::Text) => output::note(&format!("{message}\n")),
                (Some(message), LogFormat::Json) => {
                    tracing::error!("{}", message.strip_prefix("error: ").unwrap_or(&message));
                }
            }
            code
        }
    }
}
