//! `prepare`: profiles a model's neurons, calibrates the ways of skipping them, trains predictors where asked, and writes
//! the model with its neurons sorted.

mod calibrating;
mod compare;
pub(super) mod corpus;
mod keys;
mod recording;
mod report;

use super::convert;
use crate::args::{Global, PlanesChoice, PredictorChoice, PrepareArgs};
use crate::failure::{EXIT_CANCELLED, WithHint};
use crate::interrupt::Interrupt;
use crate::model::Running;
use crate::progress::Bar;
use crate::settings::Settings;
use anyhow::{Result, anyhow};
use calibrating::Work;
use calibration::layer::{Calibration, Options};
use calibration::predictor;
use calibration::weights::InPlanes;
use engine_core::DType;
use formats::convert::{self as written, Neurons, check_target, hash_of, plan_from};
use formats::model::Layer;
use formats::{GgufFile, ModelDescription};
use recording::Recording;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

/// Tokens that source and result are compared on.
const COMPARED: usize = 128;
/// Another one whenever what is kept of a layer changes its meaning.
const KEPT: &str = "layers 2";
/// Tokens that are profiled where nobody says how many, and those that predictors are trained on.
const PROFILED: u64 = 20_000;
const TRAINED: u64 = 60_000;
/// Changes where recordings or results of older programs no longer serve.
const VERSION: &str = "2";

pub(super) fn prepare(global: &Global, args: &PrepareArgs) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let mut settings = Settings::resolve(global, &args.engine, &args.size, None)?;
    // Every neuron must be computed to be seen.
    settings.config.planner.sparsity = "dense".into();
    let file = args.model.open()?;
    let mut inputs: Vec<&Path> = file.files().collect();
    inputs.extend(args.corpora.iter().chain(&args.source).map(PathBuf::as_path));
    check_target(&args.output, &inputs, args.force)?;
    if file.metadata().get("thermocline.version").is_some() {
        return Err(anyhow!("{}: is prepared already", file.path().display()))
            .hint("prepare the model that it was made of");
    }
    let original = args.source.as_ref().map(GgufFile::open).transpose()?;
    let described = ModelDescription::describe(&file)?;
    let in_planes = planes(args.planes, &described)?;
    let trains = args.predictors == PredictorChoice::Train;
    if trains {
        check_training(&described)?;
    }
    let keeps = args.predictors == PredictorChoice::Keep && described.prediction.is_some();
    check_policy(args, &described, (in_planes, trains || keeps))?;

    let running = Running::load(&args.model, &settings)?;
    let mut texts = Vec::new();
    for path in &args.corpora {
        texts.push(corpus::texts_of(&running, path)?);
    }
    let wanted = args.tokens.unwrap_or(if trains { TRAINED } else { PROFILED });
    let chosen = corpus::choose(texts, wanted as usize, running.engine.context() as usize);
    let total: usize = chosen.iter().map(Vec::len).sum();
    if total == 0 {
        return Err(anyhow!("the texts have no tokens")).hint("--corpus FILE with text");
    }
    let hashes = (hash_of(&file)?, original.as_ref().map(hash_of).transpose()?);
    let residuals = trains || keeps;
    let key = recording_key(args, &settings, &chosen, &hashes.0);
    let mut recording =
        Recording::open(recording::folder_of(&args.output), &key, &running.engine, residuals)?;
    let bar = Bar::of_tokens(total as u64, global.quiet);
    let recorded = interrupt.during(|cancel| recording.record(&running.engine, &chosen, &bar, cancel));
    drop(bar);
    let whole = match recorded {
        Ok(whole) => whole,
        Err(error) => {
            recording.discard_empty();
            return Err(error);
        }
    };
    if !whole {
        return Ok(stopped(&recording));
    }

    // What is written is planned without its order first: that is what layers are calibrated from.
    let without_predictors = args.predictors != PredictorChoice::Keep;
    let unsorted = written::Options {
        without_predictors,
        keep_down_type: args.keep_down_type,
        ..written::Options::default()
    };
    let output = plan_from(&file, original.as_ref(), &unsorted)?;
    let lengths: Vec<usize> = chosen.iter().map(Vec::len).collect();
    let options = options(args);
    let work = Work {
        model: &described,
        output: &output,
        recording: &recording,
        texts: &lengths,
        in_planes,
        options,
        key: digest(&[
            recording.key(),
            KEPT,
            &format!("{:?} {in_planes:?} {options:?} {unsorted:?}", hashes.1),
        ]),
        threads: threads(args.size.threads),
        kept: Mutex::default(),
    };
    let done = work.read_kept();
    if done > 0 {
        let (folder, all) = (recording.folder().display(), described.n_layer());
        tracing::info!("{folder}: {done} of {all} layers are calibrated with these options already");
    }
    let bar = Bar::of_parts(work.parts(), global.quiet);
    let layers = interrupt.during(|cancel| work.run(&bar, cancel))?;
    drop(bar);
    let Some(layers) = layers else { return Ok(stopped(&recording)) };
    drop(output);

    let keys = keys::of_layers(&described, &layers, args, trains);
    let default_levels = keys.levels;
    let options = written::Options {
        neurons: Some(
            described.layers.iter().zip(&layers).map(|(layer, found)| neurons(layer, found)).collect(),
        ),
        keys: keys.entries,
        ..unsorted
    };
    let threads = args.size.threads.unwrap_or(0);
    let code = convert::write_from(
        global,
        (&file, original.as_ref(), &args.output),
        &options,
        (threads, args.force),
        &interrupt,
    )?;
    if code != ExitCode::SUCCESS {
        return Ok(code);
    }
    let compared = COMPARED.min(running.engine.context() as usize);
    let sample: Vec<u32> = chosen.iter().flatten().copied().take(compared).collect();
    let difference = compare::compare(&running, &args.output, &settings, &sample)?;
    report::report(&layers, &difference, default_levels, total, args)?;
    if args.keep_profile {
        tracing::info!("{}: kept", recording.folder().display());
        return Ok(ExitCode::SUCCESS);
    }
    recording.remove()?;
    Ok(ExitCode::SUCCESS)
}

fn stopped(recording: &Recording) -> ExitCode {
    tracing::warn!(
        "stopped: nothing is written; the same command goes on from {}",
        recording.folder().display()
    );
    ExitCode::from(EXIT_CANCELLED)
}

/// Refuses a policy that the result could not run by.
fn check_policy(
    args: &PrepareArgs,
    model: &ModelDescription,
    (in_planes, predicts): (InPlanes, bool),
) -> Result<()> {
    let experts = model.layers.iter().any(|layer| layer.ffn.experts.is_some());
    let zero_below = model.layers.iter().all(|layer| layer.ffn.activation.is_sparse());
    let (why, hint) = match args.policy.as_deref() {
        Some("bitplane") if !in_planes.gate => ("nothing is stored in planes", "--planes gate or gate-up"),
        Some("predictor") if !predicts => ("it will have no predictors", "--predictors train"),
        Some("threshold") if experts => ("no thresholds are calibrated for experts", "leave it out"),
        Some("gate-first") if !zero_below => {
            ("its activation is not zero below zero", "--policy threshold or bitplane")
        }
        _ => return Ok(()),
    };
    let policy = args.policy.as_deref().unwrap_or_default();
    Err(anyhow!("{}: it cannot run by `--policy {policy}`: {why}", args.output.display())).hint(hint)
}

/// Refuses models that no predictor can be trained for.
fn check_training(model: &ModelDescription) -> Result<()> {
    match model.layers.iter().position(|layer| layer.ffn.experts.is_some()) {
        None => Ok(()),
        Some(layer) => {
            let path = model.path.display();
            Err(anyhow!("{path}: no predictors can be trained for layer {layer}, a mixture of experts"))
                .hint("--predictors none")
        }
    }
}

/// What is stored in planes.
fn planes(choice: PlanesChoice, model: &ModelDescription) -> Result<InPlanes> {
    let Some(ffn) = model.layers.first().map(|layer| &layer.ffn) else { return Ok(InPlanes::default()) };
    let cannot = match (ffn.gated, DType::Q8_0.row_bytes(model.n_embd as u64)) {
        (false, _) => Some("its networks have no gate".to_owned()),
        (_, None) => Some(format!("rows of {} are no whole number of blocks of 32", model.n_embd)),
        _ if ffn.experts.is_some() => Some("it is a mixture of experts".to_owned()),
        _ if ffn.gate.bias.is_some() || ffn.up.bias.is_some() => Some("its gate or up has a bias".to_owned()),
        _ => None,
    };
    Ok(match (choice, cannot) {
        (PlanesChoice::None, _) => InPlanes::default(),
        (_, Some(why)) => {
            return Err(anyhow!("{}: nothing can be stored in bit planes: {why}", model.path.display()))
                .hint("--planes none");
        }
        (PlanesChoice::Gate, None) => InPlanes { gate: true, up: false },
        (PlanesChoice::GateUp, None) => InPlanes { gate: true, up: true },
    })
}

fn options(args: &PrepareArgs) -> Options {
    let train = predictor::Options {
        missed: args.predictor_missed,
        recall: args.predictor_recall,
        epochs: args.predictor_epochs as usize,
        most_rank: args.predictor_rank as usize,
        ..predictor::Options::default()
    };
    let trains = args.predictors == PredictorChoice::Train;
    Options { missed: args.bitplane_missed, train: trains.then_some(train) }
}

fn threads(wanted: Option<u32>) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    match wanted.and_then(|threads| usize::try_from(threads).ok()) {
        Some(threads @ 1..) => threads.min(processors.max(64)),
        _ => processors,
    }
}

/// Of everything that recorded inputs depend on.
fn recording_key(args: &PrepareArgs, settings: &Settings, texts: &[Vec<u32>], model: &str) -> String {
    let mut hash = Sha256::new();
    for text in texts {
        text.iter().for_each(|id| hash.update(id.to_le_bytes()));
        hash.update(u32::MAX.to_le_bytes());
    }
    let runtime = &settings.config.runtime;
    digest(&[
        VERSION,
        model,
        &hex(&hash.finalize()),
        &format!("{:?} {} {:?}", runtime.activations, runtime.batch, args.model.overrides),
    ])
}

fn digest(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    hex(&hash.finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is stored of a layer.
fn neurons(described: &Layer, layer: &Calibration) -> Neurons {
    let found = &layer.calibrated;
    // Of experts one after another; each counts its neurons from 0.
    let each = described.ffn.n_ff.max(1);
    let in_order = |values: &[f32]| {
        let orders = found.order.chunks(each).zip(values.chunks(each));
        orders.flat_map(|(order, values)| order.iter().map(|&i| values[i as usize])).collect::<Vec<f32>>()
    };
    let planes = found.planes.as_ref().map(|planes| written::Planes {
        gate_deviation: in_order(&planes.gate_deviation),
        up_deviation: planes.up_deviation.as_deref().map(in_order),
        down_norm: in_order(&planes.down_norm),
    });
    let rank = found.predictor.as_ref().map_or(0, |predictor| predictor.rank as u64);
    let trained = layer.trained.clone();
    Neurons {
        experts: described.ffn.experts.as_ref().map_or(0, |experts| experts.count),
        frequency: in_order(&found.frequency),
        order: found.order.clone(),
        planes,
        predictor: trained.map(|(fc1, fc2)| written::Predictor { rank, fc1, fc2 }),
    }
}
