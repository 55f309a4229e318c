//! What layers were given, kept in a folder beside the output while a model is prepared: a run that is interrupted goes on
//! where it stopped, and other options can be tried on the same recording.

use crate::progress::Bar;
use anyhow::{Context, Result};
use calibration::rows::{Rows, encode, row_bytes};
use engine_runtime::{Engine, Observer, Wanted};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// A folder of recorded inputs.
pub(super) struct Recording {
    folder: PathBuf,
    state: State,
    width: usize,
    layers: usize,
    residuals: bool,
}

/// How far a recording came.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct State {
    /// Of model, texts and what is recorded.
    key: String,
    /// Texts and tokens that are in the files.
    texts: usize,
    tokens: usize,
}

/// The folder that belongs to an output.
pub(super) fn folder_of(output: &Path) -> PathBuf {
    let mut name = output.file_name().unwrap_or_default().to_owned();
    name.push(".profile");
    output.with_file_name(name)
}

/// Replaces a file whole, or not at all.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let beside = path.with_extension("new");
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&beside, path)
    };
    write().with_context(|| format!("{}: cannot write", path.display()))
}

impl Recording {
    /// Opens the recording in `folder`, or begins one where there is none or it is of something else.
    pub(super) fn open(folder: PathBuf, key: &str, engine: &Engine, residuals: bool) -> Result<Recording> {
        let path = folder.join("recording.json");
        let found: Option<State> = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).ok(),
            Err(_) => None,
        };
        let state = match found {
            Some(state) if state.key == key => {
                tracing::info!("{}: goes on behind {} tokens", folder.display(), state.tokens);
                state
            }
            found => {
                if folder.exists() {
                    let why = if found.is_some() {
                        "of another model, other texts or options"
                    } else {
                        "not whole"
                    };
                    tracing::warn!("{}: the recording there is {why}: it is made anew", folder.display());
                }
                State { key: key.to_owned(), ..State::default() }
            }
        };
        fs::create_dir_all(&folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
        let model = engine.model();
        Ok(Recording { folder, state, width: model.n_embd, layers: model.n_layer(), residuals })
    }

    /// The folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Of what was recorded.
    pub(super) fn key(&self) -> &str {
        &self.state.key
    }

    fn stride(&self) -> usize {
        row_bytes(self.width) * if self.residuals { 2 } else { 1 }
    }

    fn path(&self, layer: usize) -> PathBuf {
        self.folder.join(format!("layer-{layer}.rows"))
    }

    /// Records the texts that are not recorded yet; whether it came to the end.
    pub(super) fn record(
        &mut self,
        engine: &Engine,
        texts: &[Vec<u32>],
        bar: &Bar,
        cancel: &AtomicBool,
    ) -> Result<bool> {
        if self.state.texts >= texts.len() {
            return Ok(true);
        }
        let mut observer =
            Observer::new(engine, Wanted { input: true, residual: self.residuals, hidden: false })?;
        let mut files = Vec::new();
        for layer in 0..self.layers {
            let path = self.path(layer);
            let whole = (self.state.tokens * self.stride()) as u64;
            let open = || -> std::io::Result<File> {
                let file = File::options().create(true).read(true).append(true).open(&path)?;
                if file.metadata()?.len() < whole {
                    return Err(std::io::Error::other("shorter than recorded; remove the folder"));
                }
                file.set_len(whole)?; // what a run wrote after it last said how far it was
                Ok(file)
            };
            files.push(open().with_context(|| format!("{}: cannot be opened", path.display()))?);
        }
        let width = self.width.max(1);
        for text in texts.iter().skip(self.state.texts) {
            if cancel.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let mut rows: Vec<Vec<u8>> = vec![Vec::new(); self.layers];
            observer.run(text, &mut |layer, seen| {
                let Some(out) = rows.get_mut(layer) else { return };
                for (at, input) in seen.input.chunks_exact(width).enumerate() {
                    encode(input, out);
                    if let Some(residual) = seen.residual.chunks_exact(width).nth(at) {
                        encode(residual, out);
                    }
                }
            })?;
            for (layer, (file, rows)) in files.iter_mut().zip(&rows).enumerate() {
                file.write_all(rows)
                    .with_context(|| format!("{}: cannot write", self.path(layer).display()))?;
            }
            self.state.texts += 1;
            self.state.tokens += text.len();
            replace(&self.folder.join("recording.json"), &serde_json::to_vec(&self.state)?)?;
            bar.at("profiling", self.state.tokens as u64);
        }
        Ok(true)
    }

    /// The bytes of a layer's rows.
    pub(super) fn read(&self, layer: usize) -> Result<Vec<u8>> {
        let path = self.path(layer);
        fs::read(&path).with_context(|| format!("{}: cannot be read", path.display()))
    }

    /// What the network was given, and what a predictor is given, in those bytes.
    pub(super) fn rows<'a>(&self, bytes: &'a [u8]) -> (Rows<'a>, Option<Rows<'a>>) {
        let (stride, own) = (self.stride(), row_bytes(self.width));
        let residuals = self.residuals.then(|| Rows::new(bytes, self.width, stride, own));
        (Rows::new(bytes, self.width, stride, 0), residuals)
    }

    /// Removes the folder.
    pub(super) fn remove(self) -> Result<()> {
        fs::remove_dir_all(&self.folder)
            .with_context(|| format!("{}: cannot be removed", self.folder.display()))
    }
}
