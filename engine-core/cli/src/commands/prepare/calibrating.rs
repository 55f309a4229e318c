//! Layers side by side: each thread takes the next one, calibrates it, and leaves its result in the recording's folder.

use super::recording::{Recording, replace};
use crate::progress::Bar;
use anyhow::{Context, Result, anyhow};
use calibration::CalibrationError;
use calibration::layer::{Calibrated, Calibration, Layer, Options, calibrate};
use calibration::mixture::{self, Mixture};
use calibration::weights::{self, Experts, InPlanes};
use formats::ModelDescription;
use formats::convert::Output;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What layers are calibrated from.
pub(super) struct Work<'a> {
    pub(super) model: &'a ModelDescription,
    /// The plan of what is written, neurons in the model's order.
    pub(super) output: &'a Output<'a>,
    pub(super) recording: &'a Recording,
    pub(super) texts: &'a [usize],
    pub(super) in_planes: InPlanes,
    pub(super) options: Options,
    /// Of everything that results depend on.
    pub(super) key: String,
    pub(super) threads: usize,
    /// Results of an earlier run by their layers: read by [`Work::read_kept`], taken by [`Work::run`].
    pub(super) kept: Mutex<BTreeMap<usize, Calibration>>,
}

/// A layer's result as it is kept.
#[derive(Serialize, Deserialize)]
struct Kept {
    key: String,
    /// Bytes of fc1, where a predictor was trained.
    fc1: Option<usize>,
    calibrated: Calibrated,
}

/// Parts of a layer that are told apart.
const PARTS: f64 = 1000.0;

impl Work<'_> {
    fn paths(&self, layer: usize) -> (PathBuf, PathBuf) {
        let file = |kind: &str| self.recording.folder().join(format!("layer-{layer}.{kind}"));
        (file("json"), file("predictor"))
    }

    /// The result of an earlier run, where it is of the same options.
    fn read_layer(&self, layer: usize) -> Option<Calibration> {
        let (result, predictor) = self.paths(layer);
        let kept: Kept = serde_json::from_slice(&fs::read(result).ok()?).ok()?;
        let ffn = &self.model.layers.get(layer)?.ffn;
        let networks = ffn.experts.as_ref().map_or(1, |experts| experts.count);
        if kept.key != self.key || !kept.calibrated.is_of(networks, ffn.n_ff) {
            return None;
        }
        let trained = match kept.fc1 {
            None => None,
            Some(length) => {
                let mut fc1 = fs::read(predictor).ok()?;
                if fc1.len() < length {
                    return None;
                }
                let fc2 = fc1.split_off(length);
                Some((fc1, fc2))
            }
        };
        Some(Calibration { calibrated: kept.calibrated, trained })
    }

    /// Reads what an earlier run calibrated with the same options, and tells how many layers these are.
    pub(super) fn read_kept(&self) -> usize {
        let found = (0..self.model.n_layer()).filter_map(|layer| Some((layer, self.read_layer(layer)?)));
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = found.collect();
        kept.len()
    }

    fn keep(&self, layer: usize, result: &Calibration) -> Result<()> {
        let (path, predictor) = self.paths(layer);
        if let Some((fc1, fc2)) = &result.trained {
            replace(&predictor, &[&fc1[..], fc2].concat())?;
        }
        let fc1 = result.trained.as_ref().map(|(fc1, _)| fc1.len());
        let kept = Kept { key: self.key.clone(), fc1, calibrated: result.calibrated.clone() };
        replace(&path, &serde_json::to_vec(&kept)?)
    }

    fn layer(&self, layer: usize, stop: &AtomicBool, share: &AtomicU32) -> Result<Calibration> {
        if let Some(kept) = self.kept.lock().unwrap_or_else(PoisonError::into_inner).remove(&layer) {
            return Ok(kept);
        }
        let bytes = self.recording.read(layer)?;
        let mut told = |done: f64| share.store((done * PARTS) as u32, Ordering::Relaxed);
        if self.model.layers.get(layer).is_some_and(|layer| layer.ffn.experts.is_some()) {
            let experts = Experts::read(self.output, self.model, layer)?;
            let mixture = Mixture {
                count: experts.count(),
                network: &|expert| experts.network(expert),
                inputs: self.recording.rows(&bytes).0,
                chosen: &self.recording.chosen(&bytes),
                texts: self.texts,
            };
            let calibrated = mixture::sort(&mixture, stop, &mut told)?;
            let result = Calibration { calibrated, trained: None };
            self.keep(layer, &result)?;
            return Ok(result);
        }
        let (inputs, residuals) = self.recording.rows(&bytes);
        let weights = weights::read(self.output, self.model, layer, self.in_planes)?;
        let found = Layer {
            network: &weights.network,
            gate_planes: weights.gate_planes.as_deref(),
            up_planes: weights.up_planes.as_deref(),
            inputs,
            residuals,
            texts: self.texts,
            predictor: weights.predictor.as_ref(),
        };
        let result = calibrate(&found, &self.options, stop, &mut told)?;
        self.keep(layer, &result)?;
        Ok(result)
    }

    /// All layers; nothing where it was stopped.
    pub(super) fn run(&self, bar: &Bar, cancel: &AtomicBool) -> Result<Option<Vec<Calibration>>> {
        let count = self.model.n_layer();
        let shares: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
        let results: Mutex<Vec<Option<Result<Calibration>>>> = Mutex::new((0..count).map(|_| None).collect());
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let one_after_another = || {
                loop {
                    let layer = next.fetch_add(1, Ordering::SeqCst);
                    if layer >= count || stop.load(Ordering::SeqCst) {
                        break;
                    }
                    let result = self.layer(layer, &stop, &shares[layer]);
                    if result.is_err() {
                        stop.store(true, Ordering::SeqCst); // the others need not go on
                    }
                    shares[layer].store(PARTS as u32, Ordering::Relaxed);
                    results.lock().unwrap_or_else(PoisonError::into_inner)[layer] = Some(result);
                }
            };
            let threads = 0..self.threads.clamp(1, count.max(1));
            let threads: Vec<_> = threads.map(|_| scope.spawn(one_after_another)).collect();
            while threads.iter().any(|thread| !thread.is_finished()) {
                std::thread::sleep(Duration::from_millis(50));
                if cancel.load(Ordering::Relaxed) {
                    stop.store(true, Ordering::SeqCst);
                }
                let done: u64 = shares.iter().map(|share| u64::from(share.load(Ordering::Relaxed))).sum();
                bar.at("calibrating", done);
            }
        });
        let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut found = Vec::with_capacity(count);
        let mut stopped = false;
        for (layer, result) in results.into_iter().enumerate() {
            match result {
                Some(Ok(result)) => found.push(result),
                Some(Err(error)) => match error.downcast_ref() {
                    Some(CalibrationError::Cancelled) => stopped = true,
                    _ => return Err(error).with_context(|| format!("calibrating layer {layer}")),
                },
                None => stopped = true,
            }
        }
        if stopped && !cancel.load(Ordering::Relaxed) {
            return Err(anyhow!("a thread that calibrates ended early"));
        }
        Ok((!stopped).then_some(found))
    }

    /// Parts of all layers.
    pub(super) fn parts(&self) -> u64 {
        self.model.n_layer() as u64 * PARTS as u64
    }
}
