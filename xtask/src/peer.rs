//! `cargo xtask bench-peer`: decode and prefill speed beside llama.cpp, on the same files, in interleaved rounds.

use crate::process;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The peer: a fixed version, so that a figure means the same thing later.
const PACKAGE: &str = "llama-cpp-python==0.3.36";

/// What to measure.
struct Options {
    models: Vec<PathBuf>,
    threads: Vec<u32>,
    rounds: usize,
    prompt: u32,
    generated: u32,
}

/// One engine's speeds of one round, in tokens per second.
#[derive(Clone, Copy)]
struct Speed {
    prefill: f64,
    decode: f64,
}

/// Measures and prints a table in Markdown.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let options = parse(arguments)?;
    let python = python()?;
    process::build()?;
    let mut rows = Vec::new();
    let mut version = String::new();
    for model in &options.models {
        for &threads in &options.threads {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for round in 0..options.rounds {
                // The one that goes first alternates, so that a drift of the machine meets both.
                for turn in [round % 2, 1 - round % 2] {
                    if turn == 0 {
                        ours.push(measure_ours(model, threads, &options)?);
                    } else {
                        let (speed, of) = measure_theirs(&python, model, threads, &options)?;
                        theirs.push(speed);
                        version = of;
                    }
                }
                eprintln!(
                    "{} t{threads} round {}: ours {:.1} / {:.1}, llama.cpp {:.1} / {:.1}",
                    model.display(),
                    round + 1,
                    ours[round].prefill,
                    ours[round].decode,
                    theirs[round].prefill,
                    theirs[round].decode
                );
            }
            rows.push(row(model, threads, "pp", options.prompt, &ours, &theirs, |s| s.prefill));
            rows.push(row(model, threads, "tg", options.generated, &ours, &theirs, |s| s.decode));
        }
    }
    println!(
        "Tokens per second, median [lowest..highest] of {} interleaved rounds; peer llama-cpp-python {version}.\n",
        options.rounds
    );
    println!("| model | threads | test | thermocline | llama.cpp | ratio |\n|---|---|---|---|---|---|");
    rows.iter().for_each(|row| println!("{row}"));
    Ok(())
}

fn parse(arguments: &[String]) -> Result<Options> {
    let mut options =
        Options { models: Vec::new(), threads: vec![1, 2], rounds: 3, prompt: 512, generated: 128 };
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--threads" => {
                options.threads = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?;
            }
            "--rounds" => options.rounds = value()?.parse()?,
            "--pp" => options.prompt = value()?.parse()?,
            "--tg" => options.generated = value()?.parse()?,
            flag if flag.starts_with("--") => bail!("unknown argument `{flag}`"),
            model => options.models.push(model.into()),
        }
    }
    if options.models.is_empty() {
        bail!("name a model; `cargo xtask models --fetch smollm2 --quantize q8_0,f16` makes some");
    }
    if options.rounds < 3 || options.prompt == 0 || options.generated == 0 {
        bail!("a median needs at least 3 rounds, and a speed at least one token");
    }
    Ok(options)
}

/// The Python that has the peer; builds it once, which takes minutes.
pub(crate) fn python() -> Result<PathBuf> {
    let venv = process::target().join("peer/venv");
    let python = venv.join("bin/python");
    if !python.is_file() {
        process::run(process::program("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    let wanted = PACKAGE.rsplit("==").next().unwrap_or_default();
    let check = format!("import llama_cpp, sys; sys.exit(llama_cpp.__version__ != '{wanted}')");
    let present = process::program(&python)
        .args(["-c", &check])
        .stderr(std::process::Stdio::null())
        .status()
        .with_context(|| format!("cannot start {}", python.display()))?;
    if !present.success() {
        eprintln!("building {PACKAGE}: about 7 minutes on two cores, once");
        process::run(process::program(&python).args(["-m", "pip", "install", "--quiet", PACKAGE]))?;
    }
    Ok(python)
}

fn measure_ours(model: &Path, threads: u32, options: &Options) -> Result<Speed> {
    let text = process::output(
        process::program(process::thermocline())
            .args(["bench", "--json", "--quiet", "--repeat", "1", "-m"])
            .arg(model)
            .args([
                "--threads",
                &threads.to_string(),
                "--pp",
                &options.prompt.to_string(),
                "--tg",
                &options.generated.to_string(),
            ]),
    )?;
    let printed: Value = serde_json::from_str(&text).context("`thermocline bench --json` printed no JSON")?;
    let results = printed["results"].as_array().context("`thermocline bench --json` has no `results`")?;
    let speed = |test: &str| {
        results
            .iter()
            .find(|r| r["test"].as_str().is_some_and(|t| t.starts_with(test)))
            .and_then(|r| r["tokens_per_second"].as_f64())
            .with_context(|| format!("`thermocline bench --json` has no speed of {test}"))
    };
    Ok(Speed { prefill: speed("pp")?, decode: speed("tg")? })
}

fn measure_theirs(python: &Path, model: &Path, threads: u32, options: &Options) -> Result<(Speed, String)> {
    let text = process::output(process::program(python).arg("xtask/peer/speed.py").arg(model).args([
        threads.to_string(),
        options.prompt.to_string(),
        options.generated.to_string(),
    ]))?;
    let printed: Value = serde_json::from_str(&text).context("the peer printed no JSON")?;
    let speed = |key: &str| printed[key].as_f64().with_context(|| format!("the peer printed no `{key}`"));
    let version = printed["version"].as_str().unwrap_or("?").to_owned();
    Ok((Speed { prefill: speed("pp")?, decode: speed("tg")? }, version))
}

fn row(
    model: &Path,
    threads: u32,
    test: &str,
    tokens: u32,
    ours: &[Speed],
    theirs: &[Speed],
    of: fn(&Speed) -> f64,
) -> String {
    let name = model.file_name().unwrap_or(model.as_os_str()).to_string_lossy();
    let (a, b) = (spread(ours, of), spread(theirs, of));
    format!("| {name} | {threads} | {test}{tokens} | {} | {} | {:.2} |", a.1, b.1, a.0 / b.0)
}

/// The median, and how it is printed.
fn spread(speeds: &[Speed], of: fn(&Speed) -> f64) -> (f64, String) {
    let mut values: Vec<f64> = speeds.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let median = if values.len().is_multiple_of(2) {
        (values[middle - 1] + values[middle]) / 2.0
    } else {
        values[middle]
    };
    (median, format!("{median:.1} [{:.1}..{:.1}]", values[0], values[values.len() - 1]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let speeds = [3.0, 1.0, 2.0, 10.0].map(|decode| Speed { prefill: 0.0, decode });
        assert_eq!(spread(&speeds, |s| s.decode), (2.5, "2.5 [1.0..10.0]".to_owned()));
        assert_eq!(spread(&speeds[..3], |s| s.decode).0, 2.0);
    }
}
