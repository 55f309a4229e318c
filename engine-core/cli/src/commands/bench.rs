//! `bench`: tokens per second of prompt processing and of generation.

use crate::args::{BenchArgs, Global, SizeArgs};
use crate::failure::Usage;
use crate::model::Running;
use crate::output;
use crate::settings::Settings;
use anyhow::{Result, bail};
use engine_runtime::bench::{BenchOptions, bench as measure, mean_and_deviation, median};
use serde_json::{Value, json};

/// One test on one count of threads.
struct Row {
    test: String,
    threads: Option<u32>,
    runs: Vec<f64>,
    /// Bytes of weights that one token reads; only where tokens are generated one by one.
    bytes_per_token: Option<u64>,
}

pub(super) fn bench(global: &Global, args: &BenchArgs) -> Result<()> {
    if args.pp.iter().chain(&args.tg).all(|&tokens| tokens == 0) {
        bail!(Usage("there is nothing to measure: --pp and --tg are both 0".into()));
    }
    let longest = args.pp.iter().chain(&args.tg).copied().max().unwrap_or(0).max(1);
    let threads: Vec<Option<u32>> =
        if args.threads.is_empty() { vec![None] } else { args.threads.iter().map(|n| Some(*n)).collect() };
    let mut rows = Vec::new();
    let mut described: Option<Value> = None;
    for threads in threads {
        let size = SizeArgs { threads, context: Some(longest.into()) };
        let settings = Settings::resolve(global, &args.engine, &size, None)?;
        let running = Running::load(&args.model, &settings)?;
        described.get_or_insert_with(|| {
            json!({
                "model": running.model_json(),
                "plan": running.placed.plan_json(),
                "plugins": running.placed.plugins_json(),
                "load_seconds": running.engine.load_seconds(),
                "repeat": args.repeat,
                "activations": settings.config.runtime.activations,
                "batch": running.engine.options().batch,
                "weight_bytes_per_token": running.engine.weight_bytes_per_token(),
            })
        });
        // The two lists side by side, so that pp and tg take turns.
        for index in 0..args.pp.len().max(args.tg.len()) {
            let at = |list: &[u32]| list.get(index).copied().unwrap_or(0);
            let options = BenchOptions { prompt: at(&args.pp), generate: at(&args.tg), repeats: args.repeat };
            if options.prompt == 0 && options.generate == 0 {
                continue;
            }
            let report = measure(&running.engine, options)?;
            let bytes = running.engine.weight_bytes_per_token();
            for (test, runs, bytes_per_token) in [
                (format!("pp{}", report.prompt), report.prompt_runs, None),
                (format!("tg{}", report.generate), report.generate_runs, Some(bytes)),
            ] {
                if !runs.is_empty() {
                    rows.push(Row { test, threads, runs, bytes_per_token });
                }
            }
        }
    }
    if args.json {
        let mut object = described.unwrap_or_else(|| json!({}));
        object["results"] = rows.iter().map(Row::json).collect();
        return output::json(&object);
    }
    let cells: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
    output::write(&output::table(&["test", "threads", "tokens/s", "median", "GB/s of weights"], &cells))
}

impl Row {
    /// Bytes of weights per second, in 10^9, at the median speed, all neurons counted.
    fn gigabytes_per_second(&self) -> Option<f64> {
        self.bytes_per_token.map(|bytes| bytes as f64 * median(&self.runs) / 1e9)
    }

    fn json(&self) -> Value {
        let (mean, deviation) = mean_and_deviation(&self.runs);
        json!({
            "test": self.test,
            "threads": self.threads,
            "tokens_per_second": median(&self.runs),
            "mean": mean,
            "standard_deviation": deviation,
            "runs": self.runs,
            "weight_bytes_per_token": self.bytes_per_token,
            "weight_gigabytes_per_second": self.gigabytes_per_second(),
        })
    }

    fn cells(&self) -> Vec<String> {
        let (mean, deviation) = mean_and_deviation(&self.runs);
        vec![
            self.test.clone(),
            self.threads.map_or("auto".into(), |n| n.to_string()),
            format!("{mean:.2} ± {deviation:.2}"),
            format!("{:.2}", median(&self.runs)),
            self.gigabytes_per_second().map_or(String::new(), |speed| format!("{speed:.2}")),
        ]
    }
}
