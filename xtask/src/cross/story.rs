//! The story model on an emulated processor, held against the reference that came with it.

use super::toolchain::{ENGINE, Toolchain};
use super::{Tier, uses};
use crate::{demo, process};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// Logits of the first step and greedy ids of a float32 computation in another program (see models/README.md).
const REFERENCE: &str = "models/tiny-story-9m-reference.json";

const MODEL: &str = "models/tiny-story-9m-q8_0.gguf";

/// Largest difference of a logit as a share of the largest logit, by activations: f32 differs by the f16 KV cache and
/// the order of sums; int8 by the activations' rounding as well (measured with the oracle: 3.1e-3).
const LIMITS: [(&str, f64); 2] = [("f32", 1e-3), ("int8", 2e-2)];

/// Generates and scores the reference's prompts, and fails where ids or logits differ from it.
pub(super) fn check(toolchain: &Toolchain, tier: &Tier) -> Result<()> {
    let path = process::root().join(REFERENCE);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let reference: Value = serde_json::from_str(&text)?;
    for prompt in reference["prompts"].as_array().context("no prompts in the reference")? {
        let text = prompt["prompt"].as_str().context("no prompt")?;
        let dense = &prompt["dense"];
        let wanted = ids(&dense["greedy_ids"])?;
        let count = wanted.len().to_string();
        let found = engine(
            toolchain,
            tier,
            &["run", "-m", MODEL, "-p", text, "-n", &count, "--temp", "0", "--activations", "f32"],
        )?;
        same_ids(text, &ids(&found["prompt_ids"])?, &ids(&prompt["token_ids"])?)?;
        same_ids(text, &ids(&found["ids"])?, &wanted)?;
        uses(tier, &json!({"subject": {"notes": found["plan"]["device_notes"]}}))?;
        for (activations, limit) in LIMITS {
            let fed = [ids(&prompt["token_ids"])?, wanted.clone()].concat();
            let fed: Vec<String> = fed.iter().map(u32::to_string).collect();
            let scored = engine(
                toolchain,
                tier,
                &[
                    "score",
                    "-m",
                    MODEL,
                    "--ids",
                    &fed.join(","),
                    "--all-logits",
                    "--activations",
                    activations,
                ],
            )?;
            let worst =
                follows(prompt, &scored, limit).with_context(|| format!("{text:?}, {activations}"))?;
            println!(
                "{text:?}, {activations}: ids and logits agree, worst difference {worst:.1e} of {limit:.0e}"
            );
        }
    }
    process::run(toolchain.program(ENGINE, tier)?.args(demo::ARGUMENTS))
}

/// Runs the engine on a tier and reads the one object that it prints.
fn engine(toolchain: &Toolchain, tier: &Tier, arguments: &[&str]) -> Result<Value> {
    let mut command = toolchain.program(ENGINE, tier)?;
    command.args(arguments).args(["--device", "cpu"]);
    if arguments.first() == Some(&"run") {
        command.arg("--json");
    }
    let text = process::output(&mut command)?;
    serde_json::from_str(&text).with_context(|| format!("`{}` printed no JSON", arguments[0]))
}

/// The worst difference, as a share of the largest logit, of the first step's ten largest logits, and of each greedy id's
/// distance to the largest of its step.
fn follows(prompt: &Value, scored: &Value, limit: f64) -> Result<f64> {
    let positions = scored["positions"].as_array().context("no positions")?;
    let fed = ids(&prompt["token_ids"])?.len();
    let first = positions.get(fed - 1).context("too few positions")?;
    let top = prompt["dense"]["top10"].as_array().context("no top10")?;
    let largest = number(&top.first().context("empty top10")?[1])?.abs();
    let mut worst = 0.0f64;
    let mut hold = |what: String, share: f64| {
        worst = worst.max(share);
        ensure!(share <= limit, "{what}: off by {share:.2e} of the largest logit, allowed {limit:.0e}");
        Ok(())
    };
    for pair in top {
        let (id, wanted) = (pair[0].as_u64().context("no id")?, number(&pair[1])?);
        let found = number(&first["logits"][id as usize])?;
        hold(format!("logit of {id}: {found}, wanted {wanted}"), (found - wanted).abs() / largest)?;
    }
    for (step, id) in ids(&prompt["dense"]["greedy_ids"])?.into_iter().enumerate() {
        let position = positions.get(fed - 1 + step).context("too few positions")?;
        let (most, own) = (number(&position["max_logit"])?, number(&position["logits"][id as usize])?);
        hold(format!("step {step}: id {id} is under the largest"), (most - own) / most.abs())?;
    }
    Ok(worst)
}

fn same_ids(prompt: &str, found: &[u32], wanted: &[u32]) -> Result<()> {
    if let Some(at) = (0..wanted.len().max(found.len())).find(|&i| found.get(i) != wanted.get(i)) {
        bail!("{prompt:?}: id {at} is {:?}, the reference has {:?}", found.get(at), wanted.get(at));
    }
    Ok(())
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("{value} is no number"))
}

fn ids(value: &Value) -> Result<Vec<u32>> {
    let ids = value.as_array().context("no ids")?;
    ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).context("no id")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt() -> Value {
        json!({"token_ids": [0, 5], "dense": {"top10": [[2, 10.0], [1, 4.0]], "greedy_ids": [2, 1]}})
    }

    fn scored(first: [f64; 3], second: [f64; 3]) -> Value {
        let position = |logits: [f64; 3]| json!({"logits": logits, "max_logit": logits.iter().copied().fold(f64::MIN, f64::max)});
        json!({"positions": [position([0.0; 3]), position(first), position(second), position([0.0; 3])]})
    }

    #[test]
    fn a_wrong_logit_or_choice_is_found() {
        let close = follows(&prompt(), &scored([0.0, 4.0, 10.005], [1.0, 6.0, 2.0]), 1e-3).unwrap();
        assert!((close - 5e-4).abs() < 1e-9);
        assert!(follows(&prompt(), &scored([0.0, 4.1, 10.0], [1.0, 6.0, 2.0]), 1e-3).is_err());
        assert!(follows(&prompt(), &scored([0.0, 4.0, 10.0], [1.0, 6.0, 6.1]), 1e-3).is_err());
        assert!(follows(&prompt(), &json!({"positions": []}), 1e-3).is_err());
        assert!(same_ids("", &[1, 2], &[1, 2]).is_ok() && same_ids("", &[1], &[1, 2]).is_err());
    }
}
