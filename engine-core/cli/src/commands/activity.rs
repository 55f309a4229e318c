//! `activity`: how a model's neurons behave, measured by running it.

use crate::args::{ActivityArgs, Global};
use crate::model::Running;
use crate::settings::Settings;
use crate::{output, prompt};
use anyhow::{Context, Result, bail};
use calibration::activity::{BATCHES, HOTTEST, LayerActivity};
use engine_runtime::{Observer, Wanted};
use serde_json::{Value, json};
use std::path::Path;

/// A layer's figures; some are not known of experts.
struct Row {
    active: f64,
    overlap: Option<f64>,
    hottest: Option<f64>,
    unions: Vec<Option<f64>>,
}

pub(super) fn activity(global: &Global, args: &ActivityArgs) -> Result<()> {
    let mut settings = Settings::resolve(global, &args.engine, &args.size, None)?;
    // Every neuron must be computed to be seen.
    settings.config.planner.sparsity = "dense".into();
    settings.count_active = true;
    let running = Running::load(&args.model, &settings)?;
    let ids = match &args.input.ids_file {
        Some(path) => {
            prompt::parse_ids(&prompt::read_text(path)?).with_context(|| path.display().to_string())?
        }
        None => {
            let path = args.input.file.as_deref().unwrap_or(Path::new("-"));
            let tokenizer = running.tokenizer()?;
            tokenizer.encode(&prompt::read_text(path)?, tokenizer.adds_bos(), true)?
        }
    };
    if ids.is_empty() {
        bail!("there are no ids to run the model on");
    }
    let has_experts = running.engine.model().layers.iter().any(|layer| layer.ffn.experts.is_some());
    let rows = if has_experts { count(&running, &ids)? } else { observed(&running, &ids)? };
    if args.json {
        let rows: Vec<Value> = rows.iter().map(Row::json).collect();
        let object = json!({
            "model": running.model_json(), "tokens": ids.len(), "hottest_share": HOTTEST, "layers": rows,
        });
        return output::json(&object);
    }
    let hottest = format!("hottest {:.0}%", HOTTEST * 100.0);
    let head = ["layer", "active", "overlap", hottest.as_str(), "in batches of 2, 4, 8, 32"];
    let cells: Vec<Vec<String>> = rows.iter().enumerate().map(|(index, row)| row.cells(index)).collect();
    output::write(&output::table(&head, &cells))
}

fn observed(running: &Running, ids: &[u32]) -> Result<Vec<Row>> {
    let layers = &running.engine.model().layers;
    let zero_below: Vec<bool> = layers.iter().map(|layer| layer.ffn.activation.is_sparse()).collect();
    let mut found: Vec<LayerActivity> =
        layers.iter().map(|layer| LayerActivity::new(layer.ffn.n_ff)).collect();
    let mut observer = Observer::new(&running.engine, Wanted { hidden: true, ..Wanted::default() })?;
    for part in ids.chunks(running.engine.context().max(1) as usize) {
        found.iter_mut().for_each(LayerActivity::start);
        observer.run(part, &mut |layer, seen| {
            if let (Some(activity), Some(&zero_below)) = (found.get_mut(layer), zero_below.get(layer)) {
                activity.see(seen.hidden, zero_below);
            }
        })?;
    }
    let row = |layer: LayerActivity| Row {
        active: layer.active(),
        overlap: Some(layer.overlap()),
        hottest: Some(layer.hottest()),
        unions: layer.unions().to_vec(),
    };
    Ok(found.into_iter().map(row).collect())
}

/// By the counts that decoding gives.
fn count(running: &Running, ids: &[u32]) -> Result<Vec<Row>> {
    let mut session = running.engine.session()?;
    for part in ids.chunks(running.engine.context().max(1) as usize) {
        session.rewind(0)?;
        for &id in part {
            session.decode(id)?;
        }
    }
    let shares = session.statistics().active_neurons.into_iter();
    Ok(shares.map(|active| Row { active, overlap: None, hottest: None, unions: Vec::new() }).collect())
}

impl Row {
    fn json(&self) -> Value {
        json!({
            "active": self.active, "overlap": self.overlap, "hottest": self.hottest,
            "active_of_batch": BATCHES.iter().zip(&self.unions).collect::<Vec<_>>(),
        })
    }

    fn cells(&self, index: usize) -> Vec<String> {
        let percent =
            |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.1}%", share * 100.0));
        let unions: Vec<String> = self.unions.iter().skip(1).map(|&union| percent(union)).collect();
        let first = vec![index.to_string(), percent(Some(self.active)), percent(self.overlap)];
        [first, vec![percent(self.hottest), unions.join(", ")]].concat()
    }
}
