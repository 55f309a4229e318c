//! `bench`: tokens per second of prompt processing and of generation, and what a generated token reads.

use crate::args::{BenchArgs, Global, SizeArgs};
use crate::failure::Usage;
use crate::model::Running;
use crate::settings::Settings;
use crate::{output, placement, prompt};
use anyhow::{Result, bail};
use engine_runtime::StepBytes;
use engine_runtime::bench::{BenchOptions, BenchReport, Bound, bench as measure, mean_and_deviation, median};
use serde_json::{Value, json};

/// One test on one count of threads.
struct Row {
    test: String,
    threads: Option<u32>,
    /// The sparsity policy that the plan has, where two are measured.
    policy: Option<String>,
    runs: Vec<f64>,
    /// Bytes of weights of one token, no neuron skipped; only where tokens are generated one by one.
    bytes_per_token: Option<u64>,
    /// What one token read.
    read: Option<StepBytes>,
    /// Against the other policy.
    bound: Option<Bound>,
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
        let mut settings = Settings::resolve(global, &args.engine, &size, None)?;
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
        let against = match &args.against {
            Some(policy) => {
                settings.config.planner.sparsity = policy.clone();
                Some(Running::load(&args.model, &settings)?)
            }
            None => None,
        };
        let policy = |running: &Running| Some(placement::policies(running.engine.plan()));
        let ids = match &args.text {
            Some(path) => {
                let tokenizer = running.tokenizer()?;
                Some(tokenizer.encode(&prompt::read_text(path)?, tokenizer.adds_bos(), true)?)
            }
            None => None,
        };
        let engines: Vec<_> =
            [Some(&running), against.as_ref()].into_iter().flatten().map(|running| &running.engine).collect();
        // The two lists side by side, so that pp and tg take turns.
        for index in 0..args.pp.len().max(args.tg.len()) {
            let at = |list: &[u32]| list.get(index).copied().unwrap_or(0);
            let options = BenchOptions { prompt: at(&args.pp), generate: at(&args.tg), repeats: args.repeat };
            if options.prompt == 0 && options.generate == 0 {
                continue;
            }
            let mut reports = measure(&engines, options, ids.as_deref())?.into_iter();
            let Some(first) = reports.next() else { continue };
            let bytes = running.engine.weight_bytes_per_token();
            match (reports.next(), &against) {
                (Some(second), Some(other)) => {
                    let bound = Bound::of(&first, &second);
                    rows.extend(Row::of(first, threads, policy(&running), bytes, bound));
                    rows.extend(Row::of(second, threads, policy(other), bytes, None));
                }
                _ => rows.extend(Row::of(first, threads, None, bytes, None)),
            }
        }
    }
    if args.json {
        let mut object = described.unwrap_or_else(|| json!({}));
        object["results"] = rows.iter().map(Row::json).collect();
        return output::json(&object);
    }
    let cells: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
    let head = ["test", "threads", "policy", "tokens/s", "median", "MB read", "GB/s"];
    output::write(&output::table(&head, &cells))?;
    rows.iter().filter_map(Row::explained).try_for_each(|line| output::line(&line))
}

impl Row {
    /// Of what a report has: prefill, generation, or both.
    fn of(
        report: BenchReport,
        threads: Option<u32>,
        policy: Option<String>,
        bytes: u64,
        bound: Option<Bound>,
    ) -> Vec<Row> {
        let plain = Row {
            test: format!("pp{}", report.prompt),
            threads,
            policy: policy.clone(),
            runs: report.prompt_runs,
            bytes_per_token: None,
            read: None,
            bound: None,
        };
        let decode = Row {
            test: format!("tg{}", report.generate),
            threads,
            policy,
            runs: report.generate_runs,
            bytes_per_token: Some(bytes),
            read: report.step_bytes,
            bound,
        };
        [plain, decode].into_iter().filter(|row| !row.runs.is_empty()).collect()
    }

    /// Bytes of weights per second, in 10^9, at the median speed, all neurons counted.
    fn gigabytes_per_second(&self) -> Option<f64> {
        self.bytes_per_token.map(|bytes| bytes as f64 * median(&self.runs) / 1e9)
    }

    /// The same of what was read, KV cache included.
    fn read_per_second(&self) -> Option<f64> {
        self.read.map(|read| read.total() * median(&self.runs) / 1e9)
    }

    fn json(&self) -> Value {
        let (mean, deviation) = mean_and_deviation(&self.runs);
        json!({
            "test": self.test,
            "threads": self.threads,
            "policy": self.policy,
            "tokens_per_second": median(&self.runs),
            "mean": mean,
            "standard_deviation": deviation,
            "runs": self.runs,
            "weight_bytes_per_token": self.bytes_per_token,
            "weight_gigabytes_per_second": self.gigabytes_per_second(),
            "read": self.read,
            "read_bytes_per_token": self.read.map(|read| read.total()),
            "read_gigabytes_per_second": self.read_per_second(),
            "bound": self.bound,
        })
    }

    fn cells(&self) -> Vec<String> {
        let (mean, deviation) = mean_and_deviation(&self.runs);
        let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        vec![
            self.test.clone(),
            self.threads.map_or("auto".into(), |n| n.to_string()),
            self.policy.clone().unwrap_or_else(|| "-".into()),
            format!("{mean:.2} ± {deviation:.2}"),
            format!("{:.2}", median(&self.runs)),
            figure(self.read.map(|read| read.total() / 1e6)),
            figure(self.read_per_second()),
        ]
    }

    /// What is read, by part, and the bound.
    fn explained(&self) -> Option<String> {
        let read = self.read?;
        let megabytes = |bytes: f64| format!("{:.2}", bytes / 1e6);
        let parts = format!(
            "MB per token: ffn {}, attention {}, head {}, predictors {}, KV {}",
            megabytes(read.ffn),
            megabytes(read.attention as f64),
            megabytes(read.head as f64),
            megabytes(read.predictors as f64),
            megabytes(read.kv)
        );
        let name = format!("{} {}", self.test, self.policy.as_deref().unwrap_or(""));
        let bound = self.bound.map_or(String::new(), |bound| {
            format!(
                "; {:.2}x the other's speed, {:.1}% of the {:.2} tokens/s that {:.3} of its bytes allow",
                median(&self.runs) / bound.against_tokens_per_second,
                bound.reached * 100.0,
                bound.tokens_per_second,
                bound.bytes / bound.against_bytes
            )
        });
        Some(format!("{}: {parts}{bound}", name.trim_end()))
    }
}
