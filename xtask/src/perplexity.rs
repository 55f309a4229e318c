//! `cargo xtask perplexity-peer`: perplexity beside llama.cpp's, on the same file, the same ids, the same chunks.

use crate::{peer, process};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;

/// How far the two may be apart, as a share.
const LIMIT: f64 = 0.01;

/// Measures and prints a table in Markdown; fails where a model's two figures are further apart than a hundredth.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let mut models: Vec<PathBuf> = Vec::new();
    let (mut text, mut chunks, mut context) = (None, "8".to_owned(), "512".to_owned());
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--text" => text = Some(PathBuf::from(value()?)),
            "--chunks" => chunks.clone_from(value()?),
            "--context" => context.clone_from(value()?),
            flag if flag.starts_with("--") => bail!("unknown argument `{flag}`"),
            model => models.push(model.into()),
        }
    }
    let Some(text) = text.filter(|_| !models.is_empty()) else {
        bail!("perplexity-peer needs models, and --text FILE");
    };
    let python = peer::python()?;
    process::build()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from).to_string();
    println!("| model | activations | tokens | thermocline | llama.cpp | ratio |\n|---|---|---|---|---|---|");
    let mut far = Vec::new();
    for model in &models {
        let mut theirs = None;
        for activations in ["f32", "int8"] {
            let printed = process::output(
                process::program(process::thermocline())
                    .args(["perplexity", "--json", "--ids", "--quiet", "--activations", activations, "-m"])
                    .arg(model)
                    .arg("--file")
                    .arg(&text)
                    .args(["--chunks", &chunks, "--context", &context, "--threads", &threads]),
            )?;
            let ours: Value =
                serde_json::from_str(&printed).context("`thermocline perplexity` printed no JSON")?;
            let theirs = match theirs {
                Some(theirs) => theirs,
                None => *theirs.insert(peer_mean(&python, model, &threads, &ours["ids"])?),
            };
            let mean =
                ours["mean_negative_log_likelihood"].as_f64().context("no mean in what was printed")?;
            let ratio = (mean - theirs).exp();
            let name = model.file_name().unwrap_or(model.as_os_str()).to_string_lossy();
            println!(
                "| {name} | {activations} | {} | {:.4} | {:.4} | {ratio:.4} |",
                ours["tokens"],
                mean.exp(),
                theirs.exp()
            );
            if (ratio - 1.0).abs() > LIMIT {
                far.push(format!("{name} ({activations})"));
            }
        }
    }
    if far.is_empty() { Ok(()) } else { bail!("more than {LIMIT} apart: {}", far.join(", ")) }
}

/// The peer's mean over all chunks.
fn peer_mean(python: &PathBuf, model: &PathBuf, threads: &str, ids: &Value) -> Result<f64> {
    let mut peer = process::program(python)
        .arg("xtask/peer/perplexity.py")
        .arg(model)
        .arg(threads)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", python.display()))?;
    let mut input = peer.stdin.take().context("no standard input of the peer")?;
    input.write_all(ids.to_string().as_bytes())?;
    drop(input);
    let output = peer.wait_with_output()?;
    if !output.status.success() {
        bail!("the peer failed on {}", model.display());
    }
    let means: Vec<f64> = serde_json::from_slice(&output.stdout).context("the peer printed no JSON")?;
    Ok(means.iter().sum::<f64>() / means.len().max(1) as f64)
}
