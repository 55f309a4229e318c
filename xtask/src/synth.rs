//! `cargo xtask synth`: a seeded model for benchmarks, and what its neurons really do, measured by running it.

use crate::process;
use anyhow::{Context, Result, bail};
use engine_core::DType;
use formats::model::Activation;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Instant;
use synthetic_models::{Experts, Shape, activity, sample_ids, sample_text};

/// Tokens that the activity is measured on.
const MEASURED: usize = 1024;

struct Options {
    shape: Shape,
    output: PathBuf,
    /// Where sample text goes, and how many tokens of it.
    text: Option<PathBuf>,
    tokens: usize,
    force: bool,
}

/// Makes the model, then runs it.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let options = parse(arguments)?;
    let Options { shape, output, .. } = &options;
    for path in [Some(output), options.text.as_ref()].into_iter().flatten() {
        if path.exists() && !options.force {
            bail!("{} exists already; --force replaces it", path.display());
        }
    }
    process::build()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let started = Instant::now();
    synthetic_models::write(shape, output, threads, &mut |tensor| eprintln!("{tensor}"))
        .with_context(|| format!("cannot make {}", output.display()))?;
    let bytes = std::fs::metadata(output)?.len();
    let seconds = started.elapsed().as_secs_f64();
    println!("{}: {bytes} bytes in {seconds:.1} s, {shape:?}", output.display());
    if let Some(path) = &options.text {
        let text = sample_text(&sample_ids(shape, shape.seed.wrapping_add(1), options.tokens));
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    measure(shape, output)
}

fn parse(arguments: &[String]) -> Result<Options> {
    let Some((preset, rest)) = arguments.split_first() else {
        bail!("name a preset: {}", names());
    };
    let mut shape = Shape::preset(preset)?;
    let (mut output, mut text, mut tokens, mut force) = (None, None, 20_000, false);
    let mut rest = rest.iter();
    while let Some(argument) = rest.next() {
        if argument == "--force" {
            force = true;
            continue;
        }
        let value = rest.next().with_context(|| format!("{argument} needs a value"))?;
        let number = || value.parse::<u32>().with_context(|| format!("{argument} {value}"));
        match argument.as_str() {
            "-o" => output = Some(PathBuf::from(value)),
            "--text" => text = Some(PathBuf::from(value)),
            "--tokens" => tokens = number()? as usize,
            "--type" => {
                shape.dtype = DType::from_name(&value.to_uppercase())
                    .with_context(|| format!("no type `{value}`; Q8_0 and F16 are some"))?;
            }
            "--width" => shape.width = number()?,
            "--hidden" => shape.hidden = number()?,
            "--layers" => shape.layers = number()?,
            "--heads" => shape.heads = number()?,
            "--kv-heads" => shape.kv_heads = number()?,
            "--vocabulary" => shape.vocabulary = number()?,
            "--context" => shape.context = number()?,
            "--predictor-rank" => shape.predictor_rank = number()?,
            "--seed" => shape.seed = value.parse().with_context(|| format!("--seed {value}"))?,
            "--activation" => {
                let found = Activation::NAMES.iter().find(|(name, _)| name == value);
                shape.activation =
                    found.with_context(|| format!("no activation `{value}`; relu and drelu are made"))?.1;
            }
            "--experts" => {
                let (count, used) = value.split_once(',').context("--experts needs COUNT,USED")?;
                shape.experts = Some(Experts { count: count.parse()?, used: used.parse()? });
                shape.predictor_rank = 0;
            }
            other => bail!("unknown argument `{other}`"),
        }
    }
    shape.check()?;
    let output = output.context("-o FILE says where the model goes")?;
    Ok(Options { shape, output, text, tokens, force })
}

fn names() -> String {
    synthetic_models::PRESETS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

/// Runs the model on sample ids and prints what its neurons did beside what they are made for.
fn measure(shape: &Shape, model: &Path) -> Result<()> {
    let ids = sample_ids(shape, shape.seed.wrapping_add(2), MEASURED.min(shape.context as usize));
    let file = process::target().join(format!("synth-ids-{}.txt", std::process::id()));
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    std::fs::write(&file, list.join(",")).with_context(|| format!("cannot write {}", file.display()))?;
    let mut command = process::program(process::thermocline());
    // The program runs in the workspace's folder, which need not be this one.
    command.args(["activity", "--quiet", "--json", "-m"]).arg(std::path::absolute(model)?);
    let printed = process::output(command.arg("--ids-file").arg(&file));
    let _ = std::fs::remove_file(&file); // a few kilobytes of target/, if it stays
    let printed: Value =
        serde_json::from_str(&printed?).context("`thermocline activity --json` printed no JSON")?;
    let layers = printed["layers"].as_array().context("`thermocline activity --json` has no `layers`")?;
    println!(
        "measured on {} tokens:\n\n| layer | active | overlap | by the hottest 26% |\n|---|---|---|---|",
        ids.len()
    );
    for (index, layer) in layers.iter().enumerate() {
        let percent =
            |key: &str| layer[key].as_f64().map_or("-".into(), |share| format!("{:.1}%", share * 100.0));
        println!("| {index} | {} | {} | {} |", percent("active"), percent("overlap"), percent("hottest"));
    }
    println!(
        "| made for | {:.1}% | about {:.0}% | {:.1}% |",
        activity::ACTIVE * 100.0,
        activity::OVERLAP * 100.0,
        activity::HOTTEST_PART * 100.0
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_change_the_preset() {
        let parse = |line: &str| parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let options = parse("tiny -o x.gguf --type q4_0 --experts 4,2 --hidden 512 --seed 7").unwrap();
        let tiny = Shape::preset("tiny").unwrap();
        let experts = Some(Experts { count: 4, used: 2 });
        let wanted = Shape { dtype: DType::Q4_0, hidden: 512, seed: 7, experts, predictor_rank: 0, ..tiny };
        assert_eq!(options.shape, wanted);
        for (line, text) in [
            ("tiny", "-o FILE"),
            ("huge -o x", "not known"),
            ("tiny -o x --type q9", "q9"),
            ("tiny -o x --heads 7", "heads"),
            ("tiny -o x --what 7", "unknown argument"),
            ("tiny -o x --experts 4", "COUNT,USED"),
        ] {
            let error = parse(line).map(|_| ()).unwrap_err();
            assert!(format!("{error:#}").contains(text), "{error:#}");
        }
    }
}
