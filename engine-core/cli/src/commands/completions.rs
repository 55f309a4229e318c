//! `completions`: scripts made from the definition of the command line; needs no model and no plug-in.

use crate::args::Cli;
use crate::output;
use anyhow::{Context, Result};
use clap::CommandFactory;

pub(super) fn completions(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "thermocline", &mut script);
    output::write(&String::from_utf8(script).context("the completion script is not UTF-8")?)
}
