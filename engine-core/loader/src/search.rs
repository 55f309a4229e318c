//! Where libraries are looked for, in order, with a record of every place for messages.

use crate::error::Tried;
use crate::manifest::{self, Manifest};
use engine_core::config::Plugins;
use engine_core::options::OptionTable;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fmt;
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Why a place is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// `paths` of `[plugins]` in the config.
    Config,
    /// `THERMOCLINE_PLUGIN_PATH`.
    Environment,
    /// A folder of manifests.
    Manifest,
    /// The program's own folder, or `../lib/thermocline` from there.
    BesideProgram,
    /// Linked into the program.
    Linked,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Config => "`paths` of [plugins]",
            Source::Environment => "THERMOCLINE_PLUGIN_PATH",
            Source::Manifest => "manifests",
            Source::BesideProgram => "beside the program",
            Source::Linked => "linked in",
        })
    }
}

/// What the search depends on besides the config.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Environment {
    /// Value of `THERMOCLINE_PLUGIN_PATH`: files and folders, separated by colons.
    pub plugin_path: Option<OsString>,
    /// Folders of manifests, in order.
    pub manifest_folders: Vec<PathBuf>,
    /// Folder of the program's own file, symbolic links resolved.
    pub program_folder: Option<PathBuf>,
    /// The program that probes libraries; see [`crate::probe_main_if_requested`]. Without one, no library is loaded.
    pub probe: Option<PathBuf>,
    /// The compute plug-ins whose devices are listed while they are probed, each with its options: opening a driver takes
    /// time, and may go wrong. `None` lists those of all, with [`Environment::options`].
    pub listed: Option<Vec<(String, OptionTable)>>,
    /// Options of compute plug-ins where the devices of all are listed; those that are not here have their defaults.
    pub options: Vec<(String, OptionTable)>,
}

impl Environment {
    /// That of this process. The probe is `THERMOCLINE_PROBE` where that is set (such as a script that starts it under
    /// an emulator); otherwise the process's own program where its `main` has called
    /// [`crate::probe_main_if_requested`]; otherwise `thermocline-probe` in the program's folder or the one above
    /// (where test programs find it).
    pub fn from_process() -> Environment {
        let program = std::env::current_exe().ok().and_then(|path| path.canonicalize().ok());
        let program_folder = program.as_deref().and_then(Path::parent).map(Path::to_owned);
        let data_home = std::env::var_os("XDG_DATA_HOME")
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
            .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/share")));
        let manifest_folders = data_home
            .into_iter()
            .chain(["/usr/local/lib".into(), "/usr/lib".into()])
            .map(|base| base.join("thermocline/plugins.d"))
            .collect();
        Environment {
            plugin_path: std::env::var_os("THERMOCLINE_PLUGIN_PATH").filter(|value| !value.is_empty()),
            manifest_folders,
            probe: probe_program(program_folder.as_deref()),
            program_folder,
            listed: None,
            options: Vec::new(),
        }
    }
}

/// The compute plug-ins whose devices are listed: what a probe is asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Listed {
    /// Those that `options` does not name as well, with their defaults.
    others: bool,
    options: Vec<(String, OptionTable)>,
}

impl Listed {
    /// As the environment says.
    pub(crate) fn of(environment: &Environment) -> Listed {
        let options = environment.listed.as_ref().unwrap_or(&environment.options).clone();
        Listed { others: environment.listed.is_none(), options }
    }

    /// The options that a plug-in's devices are listed with; `None` where they are not.
    pub(crate) fn options_of(&self, name: &str) -> Option<OptionTable> {
        let named = self.options.iter().find(|(plugin, _)| plugin == name).map(|(_, options)| options);
        named.cloned().or_else(|| self.others.then(OptionTable::new))
    }
}

fn probe_program(folder: Option<&Path>) -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("THERMOCLINE_PROBE").filter(|named| !named.is_empty()) {
        return Some(named.into());
    }
    if crate::probe::is_own_probe() {
        // Also right where the file has been replaced since the start.
        let own = Path::new("/proc/self/exe");
        return if own.exists() { Some(own.to_owned()) } else { std::env::current_exe().ok() };
    }
    let folder = folder?;
    [Some(folder), folder.parent()]
        .into_iter()
        .flatten()
        .map(|folder| folder.join("thermocline-probe"))
        .find(|path| path.is_file())
}

/// A library file that may be a plug-in.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    /// Canonical.
    pub(crate) path: PathBuf,
    pub(crate) source: Source,
    pub(crate) manifest: Option<Manifest>,
    pub(crate) identity: Identity,
    /// Why it is not even probed.
    pub(crate) refused: Option<String>,
}

/// What changes when a file is changed or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(metadata: &Metadata) -> Identity {
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }

    /// Of the file at a path now.
    pub(crate) fn at(path: &Path) -> std::io::Result<Identity> {
        std::fs::metadata(path).map(|metadata| Identity::of(&metadata))
    }
}

/// What a search found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) tried: Vec<Tried>,
    /// Places named by the user, or manifests, that lead to no library.
    pub(crate) dead_ends: Vec<(Source, PathBuf, String)>,
    allow_world_writable: bool,
}

/// Looks at every place, in order.
pub(crate) fn search(plugins: &Plugins, config_dir: &Path, environment: &Environment) -> Found {
    let mut found = Found { allow_world_writable: plugins.allow_world_writable, ..Found::default() };
    if plugins.paths.is_empty() {
        found.note(Source::Config, None, "not set");
    }
    for path in &plugins.paths {
        found.named(Source::Config, &config_dir.join(path));
    }
    match &environment.plugin_path {
        None => found.note(Source::Environment, None, "not set"),
        Some(list) => {
            for path in list.as_bytes().split(|byte| *byte == b':').filter(|path| !path.is_empty()) {
                found.named(Source::Environment, Path::new(std::ffi::OsStr::from_bytes(path)));
            }
        }
    }
    for folder in &environment.manifest_folders {
        found.manifests(folder);
    }
    match &environment.program_folder {
        None => found.note(Source::BesideProgram, None, "the program's own folder is not known"),
        Some(folder) => {
            found.folder(Source::BesideProgram, folder);
            if let Some(above) = folder.parent() {
                found.folder(Source::BesideProgram, &above.join("lib/thermocline"));
            }
        }
    }
    found
}

impl Found {
    fn note(&mut self, source: Source, path: Option<&Path>, outcome: impl Into<String>) {
        self.tried.push(Tried { source, path: path.map(Path::to_owned), outcome: outcome.into() });
    }

    /// A file or folder that the user named: it has to exist.
    fn named(&mut self, source: Source, path: &Path) {
        match std::fs::metadata(path) {
            Err(error) => {
                self.note(source, Some(path), error.to_string());
                self.dead_ends.push((source, path.to_owned(), format!("cannot be read: {error}")));
            }
            Ok(metadata) if metadata.is_dir() => self.folder(source, path),
            Ok(_) => {
                self.note(source, Some(path), "a file");
                self.library(source, path, None);
            }
        }
    }

    fn folder(&mut self, source: Source, folder: &Path) {
        let is_library = |path: &Path| {
            let name = path.file_name().unwrap_or_default().as_bytes();
            name.starts_with(b"libthermocline_") && name.ends_with(b".so")
        };
        match list(folder) {
            Err(error) => self.note(source, Some(folder), error.to_string()),
            Ok(paths) => {
                let libraries: Vec<PathBuf> = paths.into_iter().filter(|path| is_library(path)).collect();
                let outcome = match libraries.len() {
                    0 => "no libthermocline_*.so in it".to_owned(),
                    1 => "1 library".to_owned(),
                    n => format!("{n} libraries"),
                };
                self.note(source, Some(folder), outcome);
                for path in libraries {
                    self.library(source, &path, None);
                }
            }
        }
    }

    fn manifests(&mut self, folder: &Path) {
        let paths = match list(folder) {
            Err(error) => return self.note(Source::Manifest, Some(folder), error.to_string()),
            Ok(paths) => paths,
        };
        let manifests: Vec<PathBuf> =
            paths.into_iter().filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
        self.note(Source::Manifest, Some(folder), format!("{} manifests", manifests.len()));
        for path in manifests {
            match manifest::read(&path) {
                Err(problem) => self.dead_ends.push((Source::Manifest, path, problem)),
                Ok(manifest) => {
                    let library = manifest.library.clone();
                    if let Some(problem) = self.world_writable(&path) {
                        self.dead_ends.push((Source::Manifest, path, problem));
                    } else if library.is_file() {
                        self.library(Source::Manifest, &library, Some(manifest));
                    } else {
                        let problem = format!("names the library {}, which is no file", library.display());
                        self.dead_ends.push((Source::Manifest, path, problem));
                    }
                }
            }
        }
    }

    fn library(&mut self, source: Source, path: &Path, manifest: Option<Manifest>) {
        let (canonical, identity) = match path.canonicalize().and_then(|p| Identity::at(&p).map(|i| (p, i))) {
            Ok(both) => both,
            Err(error) => {
                return self.dead_ends.push((source, path.to_owned(), format!("cannot be read: {error}")));
            }
        };
        let same = |c: &Candidate| (c.identity.device, c.identity.inode) == (identity.device, identity.inode);
        if let Some(first) = self.candidates.iter().find(|c| same(c)) {
            let outcome = format!("the same file as {} ({})", first.path.display(), first.source);
            return self.note(source, Some(path), outcome);
        }
        let refused = self
            .world_writable(&canonical)
            .or_else(|| manifest.as_ref().and_then(|m| manifest::check_hash(m, &canonical).err()));
        self.candidates.push(Candidate { path: canonical, source, manifest, identity, refused });
    }

    /// Why a file is not trusted: anybody could replace what is in it.
    fn world_writable(&self, path: &Path) -> Option<String> {
        if self.allow_world_writable {
            return None;
        }
        let open = |path: &Path| std::fs::metadata(path).is_ok_and(|m| m.mode() & 0o002 != 0);
        let hint = "; tighten it, or set `allow_world_writable = true` in [plugins]";
        if open(path) {
            return Some(format!("may be written by every user (chmod o-w){hint}"));
        }
        let folder = path.parent()?;
        open(folder).then(|| format!("lies in {}, which every user may write{hint}", folder.display()))
    }
}

/// The entries of a folder, sorted by name, so that the same folder gives the same order always.
fn list(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| entry.map(|e| e.path())).collect::<std::io::Result<_>>()?;
    paths.sort();
    Ok(paths)
}
