//! What layers were given, kept in a folder beside the output while a model is prepared: a run that is interrupted goes on
//! where it stopped, and other options can be tried on the same recording.

use crate::progress::Bar;
use anyhow::{Context, Result, anyhow};
use calibration::rows::{Rows, encode, row_bytes};
use engine_runtime::{Engine, Observer, Wanted};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
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
    /// Experts that a token uses; 0 where layers have one network.
    used: usize,
    /// Whether the folder was not there before.
    new: bool,
    /// Held while a run is at work in the folder.
    _lock: File,
}

/// How far a recording came.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct State {
    /// Of model and texts.
    key: String,
    /// Whether what predictors are given is recorded, too.
    #[serde(default)]
    residuals: bool,
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
        refuse_foreign(&folder, found.is_some())?;
        let state = match found {
            // What holds more than is needed serves as well.
            Some(state) if state.key == key && (state.residuals || !residuals) => {
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
                State { key: key.to_owned(), residuals, ..State::default() }
            }
        };
        let new = match fs::create_dir(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("{}: cannot be made", folder.display()));
            }
            made => made.is_ok(),
        };
        let lock = lock(&folder)?;
        let model = engine.model();
        let (width, layers) = (model.n_embd, model.n_layer());
        let mixture = model.layers.first().and_then(|layer| layer.ffn.experts.as_ref());
        let used = mixture.map_or(0, |experts| experts.used);
        let residuals = state.residuals;
        let mut recording = Recording { folder, state, width, layers, residuals, used, new, _lock: lock };
        if !recording.is_whole() {
            tracing::warn!(
                "{}: files there are shorter than they were: made anew",
                recording.folder.display()
            );
            recording.state = State { key: key.to_owned(), residuals, ..State::default() };
        }
        Ok(recording)
    }

    /// Whether every layer's file has the tokens that the recording speaks of.
    fn is_whole(&self) -> bool {
        let whole = (self.state.tokens * self.stride()) as u64;
        let long_enough = |layer| fs::metadata(self.path(layer)).is_ok_and(|file| file.len() >= whole);
        whole == 0 || (0..self.layers).all(long_enough)
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
        row_bytes(self.width) * if self.residuals { 2 } else { 1 } + 4 * self.used
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
        let mut observer = Observer::new(
            engine,
            Wanted { input: true, residual: self.residuals, hidden: false, chosen: true },
        )?;
        let mut files = Vec::new();
        for layer in 0..self.layers {
            let path = self.path(layer);
            let whole = (self.state.tokens * self.stride()) as u64;
            let open = || -> std::io::Result<File> {
                let file = File::options().create(true).read(true).append(true).open(&path)?;
                file.set_len(whole)?; // what a run wrote after it last said how far it was
                Ok(file)
            };
            files.push(open().with_context(|| format!("{}: cannot be opened", path.display()))?);
        }
        let (width, used) = (self.width.max(1), self.used);
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
                    let chosen = seen.chosen.iter().skip(at * used).take(used);
                    out.extend(chosen.flat_map(|id| id.to_le_bytes()));
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

    /// The experts that each token used.
    pub(super) fn chosen(&self, bytes: &[u8]) -> Vec<u32> {
        let rows = bytes.chunks_exact(self.stride());
        let ids = rows.flat_map(|row| row[row.len() - 4 * self.used..].as_chunks::<4>().0);
        ids.map(|id| u32::from_le_bytes(*id)).collect()
    }

    /// Removes the folder where this run made it and recorded nothing: for a run that ends with an error.
    pub(super) fn discard_empty(self) {
        if self.new
            && self.state.tokens == 0
            && let Err(error) = self.remove()
        {
            tracing::warn!("{error:#}");
        }
    }

    /// Removes what runs of this program have put into the folder, and the folder, where nothing else is in it.
    pub(super) fn remove(self) -> Result<()> {
        let cannot = || format!("{}: cannot be removed", self.folder.display());
        let mut foreign = false;
        for entry in fs::read_dir(&self.folder).with_context(cannot)? {
            let entry = entry.with_context(cannot)?;
            match is_own(&entry.file_name()) {
                true => fs::remove_file(entry.path()).with_context(cannot)?,
                false => foreign = true,
            }
        }
        if foreign {
            tracing::warn!("{}: stays, for there are other files in it", self.folder.display());
            return Ok(());
        }
        fs::remove_dir(&self.folder).with_context(cannot)
    }
}

/// Whether a file of this name is one that preparing makes.
fn is_own(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name == LOCK || name.starts_with("recording.") || name.starts_with("layer-")
}

/// Refuses a folder that was not made by preparing; where `recorded`, a file in it says that it was.
fn refuse_foreign(folder: &Path, recorded: bool) -> Result<()> {
    let Ok(found) = fs::symlink_metadata(folder) else { return Ok(()) };
    let refused =
        |what: &str| Err(anyhow!("{}: {what}; move it, or choose another --output", folder.display()));
    if !found.is_dir() {
        return refused("is in the way of what is recorded, and no folder");
    }
    let entries = fs::read_dir(folder).with_context(|| format!("{}: cannot be read", folder.display()))?;
    let foreign = entries.flatten().any(|entry| !is_own(&entry.file_name()));
    if foreign && !recorded {
        return refused("is in the way of what is recorded, and holds files that preparing did not make");
    }
    Ok(())
}

/// The name of the file that a run holds locked.
const LOCK: &str = "lock";

fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(LOCK);
    let file = File::options().create(true).write(true).truncate(false).open(&path);
    let file = file.with_context(|| format!("{}: cannot be made", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(anyhow!("{}: another run is preparing the same output; wait for it", folder.display()))
        }
        // Not every file system has locks.
        Err(TryLockError::Error(_)) => Ok(file),
    }
}
