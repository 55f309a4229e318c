//! `plugins diverge`: a model on a device beside the oracle, operation by operation.

use crate::args::{DivergeArgs, EngineArgs, Global, SizeArgs};
use crate::failure::Usage;
use crate::model::read_tokenizer;
use crate::settings::Settings;
use crate::{output, stack};
use anyhow::{Context, Result, anyhow};
use conformance::diverge::{Divergence, Source, Submission, Trace};
use conformance::mutants;
use engine_core::ComputeBackend;
use engine_core::module::PluginKind;
use engine_core::operation::SlotId;
use engine_loader::Catalogue;
use engine_runtime::EngineOptions;
use engine_runtime::trace::{self, TraceOptions};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

pub(super) fn diverge(global: &Global, args: &DivergeArgs) -> Result<ExitCode> {
    let engine = EngineArgs {
        plugins: args.search.plugins.clone(),
        activations: args.activations.clone(),
        sparsity: args.sparsity.clone(),
        ..EngineArgs::default()
    };
    let size = SizeArgs { threads: args.threads, context: None };
    let settings = Settings::resolve(global, &engine, &size, None)?;
    let catalogue = stack::catalogue(&settings);
    let device = device(&settings, &catalogue, args)?;
    let oracle = oracle(&settings, &catalogue, &args.oracle)?;
    let file = args.model.open()?;
    let tokenizer = read_tokenizer(&file, &args.model.tokenizer_options())?;
    let EngineOptions { activations, sparsity, .. } = EngineOptions::from_config(&settings.config)?;
    let trace = trace::Trace::new(
        &file,
        &TraceOptions {
            ids: tokenizer.encode(&args.prompt, tokenizer.adds_bos(), true)?,
            decoded: args.decode,
            batch: args.batch,
            activations,
            sparsity,
            shares: args.shares,
            alignment: device.describe().alignment,
        },
    )?;
    let mut source = Model { trace: &trace, next: 0 };
    let found = conformance::diverge::diverge(&mut source, &*device, &*oracle, args.whole)?;
    if args.search.json {
        output::json(&report(args, &trace, &found))?;
    } else {
        output::write(&text(args, &trace, &found))?;
    }
    Ok(if found.first.is_some() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The device, with a fault where one is asked for.
fn device(settings: &Settings, catalogue: &Catalogue, args: &DivergeArgs) -> Result<Arc<dyn ComputeBackend>> {
    let options = stack::device_options(settings, catalogue, &args.device);
    let device = catalogue.open_compute(&args.device, &options)?;
    let Some(fault) = &args.planted_fault else { return Ok(device) };
    mutants::wrap(fault, device).ok_or_else(|| {
        let known: Vec<&str> = mutants::MUTANTS.iter().map(|mutant| mutant.name).collect();
        anyhow!(Usage(format!("there is no fault `{fault}`; there are {}", known.join(", "))))
    })
}

/// The device that is right, doing the arithmetic that the descriptors state.
fn oracle(settings: &Settings, catalogue: &Catalogue, name: &str) -> Result<Arc<dyn ComputeBackend>> {
    let mut options = stack::device_options(settings, catalogue, name);
    let entry = catalogue.find(PluginKind::Compute, stack::plugin_of(name));
    let schema = entry.and_then(|entry| entry.schema.as_ref());
    if schema.is_some_and(|schema| schema.fields.iter().any(|field| field.name == "arithmetic")) {
        options.insert("arithmetic".into(), "stated".into());
    }
    catalogue.open_compute(name, &options).with_context(|| format!("the oracle `{name}` cannot be had"))
}

/// The runtime's lists as the finder takes them.
struct Model<'a> {
    trace: &'a trace::Trace<'a>,
    next: usize,
}

impl Source for Model<'_> {
    fn next(&mut self) -> engine_core::Result<Option<Submission>> {
        let Some(submission) = self.trace.submissions().get(self.next) else { return Ok(None) };
        self.next += 1;
        Ok(Some(Submission {
            list: submission.list.clone(),
            tokens: submission.tokens,
            sequences: submission.sequences.clone(),
            ranges: submission.ranges.clone(),
            keys: submission.kept.iter().map(|(slot, name)| (slot.0, name.clone())).collect(),
        }))
    }

    /// Only ever asked about the submission that was handed out last.
    fn bytes(&mut self, _: &Submission, slot: SlotId) -> engine_core::Result<Vec<u8>> {
        let current = self.next.checked_sub(1).and_then(|at| self.trace.submissions().get(at));
        let bytes = current.and_then(|submission| self.trace.bytes(submission, slot));
        let lost = || engine_core::Error::internal(format!("slot {} of a trace has no bytes", slot.0));
        bytes.map(std::borrow::Cow::into_owned).ok_or_else(lost)
    }
}

/// The layer that a label such as `blk.3.ffn` names.
fn layer(label: &str) -> Option<u32> {
    label.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

fn what<'a>(trace: &'a trace::Trace<'_>, divergence: &Divergence) -> &'a str {
    let submission = trace.submissions().get(divergence.submission as usize);
    submission.map_or("", |submission| submission.what.as_str())
}

/// Lines of operations that are not run, before the rest is only counted.
const SHOWN: usize = 5;

fn text(args: &DivergeArgs, trace: &trace::Trace<'_>, found: &Trace) -> String {
    let mut text = format!(
        "{} beside {} on {}: {} operations compared in {} submissions\n",
        args.device,
        args.oracle,
        args.model.model.display(),
        found.compared,
        found
            .first
            .as_ref()
            .filter(|_| !args.whole)
            .map_or(trace.submissions().len(), |d| d.submission as usize + 1),
    );
    for (label, reason) in found.not_supported.iter().take(SHOWN) {
        let _ = writeln!(text, "not run by {}: {label}: {reason}", args.device);
    }
    if found.not_supported.len() > SHOWN {
        let _ = writeln!(text, "and {} more", found.not_supported.len() - SHOWN);
    }
    match &found.first {
        None => text.push_str("no operation departs beyond its limit\n"),
        Some(first) => {
            let layer = layer(&first.label).map_or(String::new(), |layer| format!(", layer {layer}"));
            let _ = writeln!(
                text,
                "first departure: {} ({}){layer}, operation {} of {}",
                first.label,
                first.kind,
                first.operation,
                what(trace, first)
            );
            let _ = writeln!(text, "  shape  {}", first.shape);
            if !first.parameters.is_empty() {
                let _ = writeln!(text, "  with   {}", first.parameters);
            }
            let _ = writeln!(text, "  {}", first.finding);
        }
    }
    if !found.worst.is_empty() {
        let worst = found.worst.iter().map(|(kind, worst)| format!("{kind} {worst:.3}"));
        let _ = writeln!(text, "worst error of its limit: {}", worst.collect::<Vec<_>>().join(", "));
    }
    text
}

fn report(args: &DivergeArgs, trace: &trace::Trace<'_>, found: &Trace) -> Value {
    let submissions: Vec<&str> = trace.submissions().iter().map(|s| s.what.as_str()).collect();
    let first = found.first.as_ref().map(|first| {
        json!({
            "submission": first.submission,
            "what": what(trace, first),
            "operation": first.operation,
            "label": first.label,
            "kind": first.kind,
            "layer": layer(&first.label),
            "shape": first.shape,
            "parameters": first.parameters,
            "finding": first.finding,
        })
    });
    json!({
        "model": args.model.model,
        "device": args.device,
        "oracle": args.oracle,
        "prompt": args.prompt,
        "submissions": submissions,
        "compared": found.compared,
        "not_supported": found.not_supported,
        "worst": found.worst,
        "first": first,
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn layers_of_labels() {
        assert_eq!(super::layer("blk.31.ffn"), Some(31));
        assert_eq!(super::layer("output"), None);
    }
}
