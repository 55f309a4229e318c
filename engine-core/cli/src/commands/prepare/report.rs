//! What was measured, as tables or as JSON.

use super::compare::Difference;
use super::keys::{DefaultLevels, place};
use crate::args::PrepareArgs;
use crate::output;
use anyhow::Result;
use calibration::activity::{BATCHES, HOTTEST};
use calibration::layer::{Calibrated, Calibration};
use calibration::levels::{LEVELS, Level};
use calibration::outcome::Outcome;
use serde_json::{Value, json};

pub(super) fn report(
    layers: &[Calibration],
    difference: &Difference,
    levels: DefaultLevels,
    tokens: usize,
    args: &PrepareArgs,
) -> Result<()> {
    let layers: Vec<&Calibrated> = layers.iter().map(|layer| &layer.calibrated).collect();
    if args.json {
        let object = json!({
            "output": args.output, "tokens": tokens, "hottest_share": HOTTEST,
            "layers": layers.iter().map(|layer| of_layer(layer)).collect::<Vec<_>>(),
            "bitplane_level": tenths(levels.planes), "cats_level": tenths(levels.cats),
            "compared_tokens": difference.tokens, "divergence": difference.divergence,
            "largest_difference": difference.largest, "same_best": difference.same_best,
        });
        return output::line(&object.to_string());
    }
    activity(&layers)?;
    skipping(&layers, levels)?;
    output::line(&format!(
        "{tokens} tokens profiled. Dense, over {} tokens: divergence from the source {:.1e}, logits at most {:.1e} apart, \
         {:.1}% of the most likely tokens are the same",
        difference.tokens,
        difference.divergence,
        difference.largest,
        difference.same_best * 100.0
    ))
}

/// A level as it is written: 0.4, not the nearest f32.
fn tenths(level: f32) -> f64 {
    (f64::from(level) * 10.0).round() / 10.0
}

fn of_level(level: &Level, outcome: &Outcome) -> Value {
    json!({
        "level": tenths(level.skipped), "threshold": level.threshold, "missed_when_tuned": level.missed,
        "kept": outcome.kept, "recall": outcome.recall, "precision": outcome.precision,
        "missed": outcome.missed, "cosine": outcome.cosine,
    })
}

fn of_layer(layer: &Calibrated) -> Value {
    let both = |levels: &[Level], outcomes: &[Outcome]| -> Vec<Value> {
        levels.iter().zip(outcomes).map(|(level, outcome)| of_level(level, outcome)).collect()
    };
    let activity = &layer.activity;
    json!({
        "active": activity.active, "overlap": activity.overlap, "hottest": activity.hottest,
        "active_of_batch": BATCHES.iter().zip(activity.of_batch).collect::<Vec<_>>(),
        "coactivation": activity.coactivation,
        "bitplane": layer.planes.as_ref().map(|planes| json!({
            "margin": planes.margin, "levels": both(&planes.levels, &planes.outcomes),
        })),
        "cats": layer.cats.as_ref().map(|cats| both(&cats.levels, &cats.outcomes)),
        "predictor": layer.predictor,
    })
}

fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

fn activity(layers: &[&Calibrated]) -> Result<()> {
    let hottest = format!("hottest {:.0}%", HOTTEST * 100.0);
    output::line(&format!("layer  active  overlap  {hottest}  companion  active in batches of 2, 4, 8, 32"))?;
    for (index, layer) in layers.iter().enumerate() {
        let activity = &layer.activity;
        let unions = activity.of_batch.into_iter().skip(1);
        let unions: Vec<String> = unions.map(|u| u.map_or_else(|| "-".to_owned(), percent)).collect();
        output::line(&format!(
            "{index:>5}  {:>6}  {:>7}  {:>width$}  {:>9}  {}",
            percent(activity.active),
            percent(activity.overlap),
            percent(activity.hottest),
            percent(activity.coactivation.companion),
            unions.join(", "),
            width = hottest.len(),
        ))?;
    }
    let count = layers.len().max(1) as f64;
    let mean = |of: fn(&Calibrated) -> f64| layers.iter().map(|layer| of(layer)).sum::<f64>() / count;
    output::line(&format!(
        "companion: the hottest aside, how often an active neuron's most frequent companion is active with it; on average \
         {}, {:.1} times as often as by chance",
        percent(mean(|layer| layer.activity.coactivation.companion)),
        mean(|layer| layer.activity.coactivation.lift),
    ))
}

/// One way of skipping, layer by layer, measured on texts that nothing was set by.
fn skipping(layers: &[&Calibrated], levels: DefaultLevels) -> Result<()> {
    let planes = |layer: &Calibrated| {
        let planes = layer.planes.as_ref()?;
        let at = if planes.levels.len() > 1 { place(levels.planes) } else { 0 };
        let what = match planes.levels.len() {
            1 => format!("margin {:.4}", planes.margin),
            _ => format!("above {:.2e}", planes.levels.get(at)?.threshold),
        };
        Some((what, *planes.outcomes.get(at)?))
    };
    let exact =
        layers.iter().any(|layer| layer.planes.as_ref().is_some_and(|planes| planes.levels.len() == 1));
    let title = match (exact, levels.planes > 0.0) {
        (true, _) => "bitplane".to_owned(),
        (false, true) => format!("bitplane, {:.0}% skipped", levels.planes * 100.0),
        (false, false) => format!("bitplane (no level keeps to the budget; here {:.0}%)", LEVELS[0] * 100.0),
    };
    table(&title, layers.iter().map(|layer| planes(layer)))?;
    let cats = |layer: &Calibrated| {
        let (cats, at) = (layer.cats.as_ref()?, place(levels.cats));
        Some((format!("above {:.2e}", cats.levels.get(at)?.threshold), *cats.outcomes.get(at)?))
    };
    let title = match levels.cats > 0.0 {
        true => format!("threshold (CATS), {:.0}% skipped", levels.cats * 100.0),
        false => format!("threshold (CATS; no level keeps to the budget; here {:.0}%)", LEVELS[0] * 100.0),
    };
    table(&title, layers.iter().map(|layer| cats(layer)))?;
    let predictor = |layer: &Calibrated| {
        let predictor = layer.predictor.as_ref()?;
        Some((format!("rank {}, from {:.3}", predictor.rank, predictor.threshold), predictor.outcome))
    };
    table("predictor", layers.iter().map(|layer| predictor(layer)))
}

fn table(title: &str, rows: impl Iterator<Item = Option<(String, Outcome)>>) -> Result<()> {
    let rows: Vec<(usize, (String, Outcome))> =
        rows.enumerate().filter_map(|(index, row)| Some((index, row?))).collect();
    if rows.is_empty() {
        return Ok(());
    }
    let width = rows.iter().map(|(_, (what, _))| what.len()).max().unwrap_or(0);
    output::line(&format!(
        "{title}, on held-out tokens\nlayer  {:width$}  computed  recall  precision  missed mass  cosine",
        ""
    ))?;
    let line = |name: &str, what: &str, outcome: &Outcome| {
        output::line(&format!(
            "{name:>5}  {what:width$}  {:>8}  {:>6}  {:>9}  {:>11}  {:.5}",
            percent(outcome.kept),
            percent(outcome.recall),
            percent(outcome.precision),
            format!("{:.3}%", outcome.missed * 100.0),
            outcome.cosine
        ))
    };
    let mut mean = Outcome::default();
    for (index, (what, outcome)) in &rows {
        line(&index.to_string(), what, outcome)?;
        let share = 1.0 / rows.len() as f64;
        mean.kept += outcome.kept * share;
        mean.recall += outcome.recall * share;
        mean.precision += outcome.precision * share;
        mean.missed += outcome.missed * share;
        mean.cosine += outcome.cosine * share;
    }
    line("mean", "", &mean)
}
