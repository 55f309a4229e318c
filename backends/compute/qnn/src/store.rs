//! Context binaries on disk, so that a graph is finalised once and loaded from then on.
//!
//! A file's name is the hash of everything that the binary depends on: system-on-chip, build of the library, the graph and
//! every byte of its weights. The file says all of that again, with what a run must bind and a checksum: a file that was
//! moved, cut short or made for another chip is an error with its name, never something that is quietly made anew.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use engine_core::{Error, Result};
use sha2::{Digest, Sha256};

use crate::graph::{Encoding, Port, Spec, TensorSpec};

const MAGIC: &[u8; 8] = b"THQNN\x001\n";

/// Whom a binary is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Number of the system-on-chip; 0 is the library's own choice.
    pub(crate) soc: u32,
    /// The library's build.
    pub(crate) build: String,
}

/// The folder, or none.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    /// Graphs with fewer bytes of weights are not kept.
    least: usize,
    target: Target,
}

/// A binary with what a run must bind.
pub(crate) struct Stored {
    pub(crate) inputs: Vec<Port>,
    pub(crate) outputs: Vec<Port>,
    pub(crate) binary: Vec<u8>,
}

/// Weights of a graph from which on the user's cache folder keeps it; smaller ones are compiled faster than they are read.
const LEAST: usize = 1 << 20;

impl Store {
    /// What the option `context_cache` asks for.
    pub(crate) fn of(option: &str, target: Target) -> Option<Store> {
        match option {
            "off" => None,
            "auto" => {
                let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
                let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
                Some(Store { folder: base.join("thermocline/qnn"), least: LEAST, target })
            }
            folder => Some(Store { folder: folder.into(), least: 0, target }),
        }
    }

    /// Whether graphs with so many bytes of weights are kept.
    pub(crate) fn keeps(&self, weights: usize) -> bool {
        weights >= self.least
    }

    /// The file of a graph.
    pub(crate) fn file(&self, spec: &Spec) -> (PathBuf, [u8; 32]) {
        let mut hash = Sha256::new();
        hash.update(self.target.soc.to_le_bytes());
        hash.update(self.target.build.as_bytes());
        hash_spec(&mut hash, spec);
        let key: [u8; 32] = hash.finalize().into();
        let name: String = key.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        (self.folder.join(format!("{name}.qnnctx")), key)
    }

    /// Bytes of the file; 0 where there is none.
    pub(crate) fn bytes(file: &Path) -> u64 {
        std::fs::metadata(file).map_or(0, |metadata| metadata.len())
    }

    /// What the file holds; `None` where there is none.
    ///
    /// # Errors
    /// `Data`, naming the file, where it is not what its name says.
    pub(crate) fn read(&self, file: &Path, key: &[u8; 32]) -> Result<Option<Stored>> {
        let mut bytes = match std::fs::read(file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(Error::Io { detail: format!("{}: reading it: {error}", file.display()) });
            }
        };
        let wrong = |what: &str| Error::Data {
            detail: format!(
                "{}: {what}; remove the file, or set the option `context_cache` to another folder or to off",
                file.display()
            ),
        };
        let damaged = || wrong("the context binary is damaged (its checksum does not fit)");
        let (sum, body) = bytes
            .strip_prefix(MAGIC.as_slice())
            .ok_or_else(|| wrong("no context binary of this program"))?
            .split_first_chunk::<32>()
            .ok_or_else(damaged)?;
        if Sha256::digest(body).as_slice() != sum {
            return Err(damaged());
        }
        let mut reader = Reader(body);
        let stored = (|| {
            let target = Target { soc: reader.number()?, build: reader.text()? };
            let known = reader.take(32)? == key.as_slice();
            Some((target, known, (reader.ports()?, reader.ports()?), reader.0.len()))
        })();
        let (target, known, (inputs, outputs), length) = stored.ok_or_else(damaged)?;
        if target != self.target {
            let of = |target: &Target| format!("SoC {} and library build {}", target.soc, target.build);
            return Err(wrong(&format!(
                "the context binary was made for {}, this device is {}",
                of(&target),
                of(&self.target)
            )));
        }
        if !known {
            return Err(wrong("the context binary is of another graph or of other weights"));
        }
        // Where it is: a copy would be as large as the weights.
        bytes.drain(..bytes.len() - length);
        Ok(Some(Stored { inputs, outputs, binary: bytes }))
    }

    /// Writes a file beside its place and renames it.
    ///
    /// # Errors
    /// `Io`, naming the file.
    pub(crate) fn write(
        &self,
        file: &Path,
        key: &[u8; 32],
        (inputs, outputs): (&[Port], &[Port]),
        binary: &[u8],
    ) -> Result<()> {
        let mut head = Vec::new();
        head.extend(self.target.soc.to_le_bytes());
        text(&mut head, &self.target.build);
        head.extend(key);
        ports(&mut head, inputs);
        ports(&mut head, outputs);
        let sum = Sha256::new().chain_update(&head).chain_update(binary).finalize();
        let failed = |what: &str, error: std::io::Error| Error::Io {
            detail: format!("{}: {what} (option `context_cache`): {error}", file.display()),
        };
        std::fs::create_dir_all(&self.folder).map_err(|e| failed("making its folder", e))?;
        // Two devices of one process may write the same graph at a time.
        static WRITTEN: AtomicU32 = AtomicU32::new(0);
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let beside = file.with_extension(format!("{}-{number}.part", std::process::id()));
        // Piece by piece: the binary is as large as the weights.
        let write = || {
            let mut to = std::fs::File::create(&beside)?;
            [MAGIC.as_slice(), &sum, &head, binary].into_iter().try_for_each(|piece| to.write_all(piece))
        };
        write()
            .and_then(|()| std::fs::rename(&beside, file))
            .inspect_err(|_| {
                // What could be written is of no use to anybody.
                let _ = std::fs::remove_file(&beside);
            })
            .map_err(|e| failed("writing it", e))
    }
}

fn hash_spec(hash: &mut Sha256, spec: &Spec) {
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    for TensorSpec { name, kind, data_type, dimensions, encoding, data } in &spec.tensors {
        let (block, scales): ([u32; 2], &[f32]) = match encoding {
            Encoding::None => ([0; 2], &[]),
            Encoding::Rows(scales) => ([1, 0], scales),
            Encoding::Blocks { block, scales } => (*block, scales),
        };
        part(format!("{name} {kind} {data_type} {dimensions:?} {block:?}").as_bytes());
        part(&scales.iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<u8>>());
        part(data);
    }
    part(format!("{:?}", spec.nodes).as_bytes());
}

fn text(to: &mut Vec<u8>, words: &str) {
    to.extend((words.len() as u32).to_le_bytes());
    to.extend(words.as_bytes());
}

fn ports(to: &mut Vec<u8>, ports: &[Port]) {
    to.extend((ports.len() as u32).to_le_bytes());
    for port in ports {
        for number in [port.id, port.kind, port.data_type, port.dimensions.len() as u32] {
            to.extend(number.to_le_bytes());
        }
        port.dimensions.iter().for_each(|n| to.extend(n.to_le_bytes()));
        text(to, &port.name);
    }
}

/// Reads what [`ports`] and [`text`] wrote; `None` where it ends early.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn text(&mut self) -> Option<String> {
        let length = self.number()? as usize;
        String::from_utf8(self.take(length)?.to_vec()).ok()
    }

    fn ports(&mut self) -> Option<Vec<Port>> {
        let count = self.number()?;
        (0..count)
            .map(|_| {
                let (id, kind, data_type, rank) =
                    (self.number()?, self.number()?, self.number()?, self.number()?);
                let dimensions = (0..rank).map(|_| self.number()).collect::<Option<Vec<u32>>>()?;
                Some(Port { id, kind, data_type, dimensions, name: self.text()? })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::tensor_type;

    fn spec(weight: u8) -> Spec {
        let mut spec = Spec::default();
        let x = spec.tensor("x", tensor_type::APP_WRITE, &[1, 2]);
        let w = spec.constant("w", &[1, 2], (0x216, Encoding::None, vec![weight; 4]));
        let y = spec.tensor("y", tensor_type::APP_READ, &[1, 1]);
        spec.node(c"FullyConnected", &[x, w], y);
        spec
    }

    fn store(folder: &Path, soc: u32) -> Store {
        let target = Target { soc, build: "v1".into() };
        Store::of(&folder.display().to_string(), target).unwrap()
    }

    #[test]
    fn what_was_written_is_read_by_its_own_device_only() {
        let folder = tempfile::tempdir().unwrap();
        let mine = store(folder.path(), 57);
        let (file, key) = mine.file(&spec(1));
        assert!(mine.read(&file, &key).unwrap().is_none());
        let port = Port::of(&spec(1).tensors[0]);
        mine.write(&file, &key, (std::slice::from_ref(&port), &[]), b"binary").unwrap();
        let stored = mine.read(&file, &key).unwrap().unwrap();
        assert_eq!((stored.inputs, stored.outputs.len(), stored.binary), (vec![port], 0, b"binary".to_vec()));

        let theirs = store(folder.path(), 30);
        let (other, _) = theirs.file(&spec(1));
        assert_ne!(file, other);
        std::fs::copy(&file, &other).unwrap();
        let error = theirs.read(&other, &key).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("made for SoC 57") && error.contains("remove the file"), "{error}");

        let (changed, other_key) = mine.file(&spec(2));
        assert_ne!(file, changed);
        std::fs::copy(&file, &changed).unwrap();
        let error = mine.read(&changed, &other_key).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("other weights"), "{error}");

        let mut bytes = std::fs::read(&file).unwrap();
        bytes.pop();
        std::fs::write(&file, &bytes).unwrap();
        assert!(mine.read(&file, &key).map(|_| ()).unwrap_err().to_string().contains("damaged"));
    }
}
