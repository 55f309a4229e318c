//! Writes what was planned: portions are converted by several threads and written in order, into a temporary file that
//! takes the target's name when it is complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use super::{Output, WriteOptions};
use crate::gguf::{GgufFile, writer};
use crate::model::ModelDescription;
use crate::{FormatError, Result};

/// The temporary file that [`Output::write`] fills: in the target's folder, hidden, with the process's number.
pub fn partial_path(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.partial", std::process::id()));
    path.with_file_name(name)
}

/// Removes a file unless it got its name.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0); // renamed, where all went well
    }
}

fn io_error(path: &Path, operation: &'static str) -> impl FnOnce(io::Error) -> FormatError + use<> {
    let path = path.to_path_buf();
    move |source| FormatError::Io { path, operation, source }
}

fn refused(path: &Path, problem: &str) -> FormatError {
    FormatError::Target { path: path.to_path_buf(), problem: problem.to_owned() }
}

/// Refuses a target that must not be written: one of the inputs, a folder, or (without `force`) anything that is there.
///
/// # Errors
/// [`FormatError::Target`] that says why.
pub fn check_target(path: &Path, inputs: &[&Path], force: bool) -> Result<()> {
    if path.file_name().is_none() {
        return Err(refused(path, "is no name of a file"));
    }
    let Ok(found) = fs::symlink_metadata(path) else {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        return match folder.filter(|folder| !folder.is_dir()) {
            Some(folder) => Err(refused(path, &format!("lies in {}, which is no folder", folder.display()))),
            None => Ok(()),
        };
    };
    let whole = |path: &Path| fs::canonicalize(path).ok();
    if let Some(target) = whole(path)
        && inputs.iter().any(|input| whole(input).as_ref() == Some(&target))
    {
        return Err(refused(path, "is the file that is read; give another name"));
    }
    let kind = fs::metadata(path).unwrap_or(found);
    if kind.is_dir() {
        return Err(refused(path, "is a folder; give the name of a file"));
    }
    if !kind.is_file() && !kind.is_symlink() {
        return Err(refused(path, "is no regular file but a device, pipe or socket"));
    }
    match force {
        true => Ok(()),
        false => Err(refused(path, "exists already; --force replaces it")),
    }
}

impl Output<'_> {
    /// Bytes of the file's data, padding not counted.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(super::Tensor::byte_len).sum()
    }

    /// Writes the file. `progress` is told the tensor under way and the bytes done; `cancel` is looked at between
    /// portions. Memory: some portions of 4 MiB per thread.
    ///
    /// Whatever happens, `path` holds the whole new file or what it held before: the new one is written beside it under
    /// [`partial_path`], brought to disk, read again, and renamed.
    ///
    /// # Errors
    /// What [`check_target`] says; values that the type cannot hold, with the tensor's name; the system's errors;
    /// [`FormatError::Cancelled`].
    pub fn write(
        &self,
        path: &Path,
        options: &WriteOptions,
        progress: &mut dyn FnMut(&str, u64),
        cancel: &AtomicBool,
    ) -> Result<()> {
        let inputs: Vec<&Path> = self.inputs.iter().map(PathBuf::as_path).collect();
        check_target(path, &inputs, options.force)?;
        let partial = Partial(partial_path(path));
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .open(&partial.0)
            .map_err(io_error(path, "create"))?;
        self.write_to(&mut file, path, options.threads, progress, cancel)?;
        file.sync_all().map_err(io_error(path, "write"))?;
        drop(file);
        self.check(&partial.0, path)?;
        if cancel.load(Ordering::Relaxed) {
            return Err(FormatError::Cancelled { path: path.to_path_buf() });
        }
        place(&partial.0, path, options.force)?;
        // The name, too, is to survive a power cut; file systems that cannot do it say so, and there is nothing to do.
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        let _ = File::open(folder).and_then(|folder| folder.sync_all());
        Ok(())
    }

    /// Reads the written file's header again: what cannot be loaded must not get the name.
    fn check(&self, partial: &Path, path: &Path) -> Result<()> {
        let file = GgufFile::open(partial)?;
        if !self.complete {
            return Ok(());
        }
        match ModelDescription::describe(&file) {
            Ok(_) | Err(FormatError::Unsupported { .. }) => Ok(()),
            Err(error) => {
                let text = error.to_string();
                let text = text.strip_prefix(&format!("{}: ", partial.display())).unwrap_or(&text);
                Err(refused(path, &format!("was not written: the model would not be whole: {text}")))
            }
        }
    }

    fn write_to(
        &self,
        out: &mut impl Write,
        path: &Path,
        threads: usize,
        progress: &mut dyn FnMut(&str, u64),
        cancel: &AtomicBool,
    ) -> Result<()> {
        let failed = |source| io_error(path, "write")(source);
        let alignment = writer::alignment(&self.metadata);
        let rows: Vec<writer::Row<'_>> = self.tensors.iter().map(super::Tensor::row).collect();
        let header = writer::header(self.container, 3, &self.metadata, &rows, alignment);
        out.write_all(&header).map_err(failed)?;
        writer::pad(out, header.len() as u64, alignment).map_err(failed)?;
        let work: Vec<(usize, std::ops::Range<u64>)> = (0..)
            .zip(&self.tensors)
            .flat_map(|(at, tensor)| tensor.portions().map(move |portion| (at, portion)))
            .collect();
        let threads = threads.clamp(1, work.len().max(1));
        thread::scope(|scope| {
            // Thread i has every i-th portion, and its own short queue: order and memory follow from that.
            let queues: Vec<_> = (0..threads)
                .map(|first| {
                    let (sender, receiver) = mpsc::sync_channel(1);
                    let work = &work;
                    scope.spawn(move || {
                        for (tensor, portion) in work.iter().skip(first).step_by(threads) {
                            // A queue that nobody reads any more ends the thread.
                            if sender.send(self.tensors[*tensor].read(portion.clone(), path)).is_err() {
                                return;
                            }
                        }
                    });
                    receiver
                })
                .collect();
            let mut done = 0;
            for (at, (tensor, _)) in work.iter().enumerate() {
                if cancel.load(Ordering::Relaxed) {
                    return Err(FormatError::Cancelled { path: path.to_path_buf() });
                }
                let Ok(bytes) = queues[at % threads].recv() else {
                    return Err(refused(path, "was not written: a thread that converts ended early"));
                };
                let bytes = bytes?;
                out.write_all(&bytes).map_err(failed)?;
                done += bytes.len() as u64;
                let tensor_done = work.get(at + 1).is_none_or(|next| next.0 != *tensor);
                let tensor = &self.tensors[*tensor];
                if tensor_done {
                    writer::pad(out, tensor.byte_len(), alignment).map_err(failed)?;
                }
                progress(&tensor.name, done);
            }
            Ok(())
        })
    }
}

/// Gives the complete file its name; without `force` never instead of another file, however late that came.
fn place(partial: &Path, path: &Path, force: bool) -> Result<()> {
    if !force {
        match fs::hard_link(partial, path) {
            Ok(()) => return Ok(()), // the temporary name goes with its guard
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(refused(path, "has come to exist meanwhile; --force replaces it"));
            }
            Err(_) => {} // a file system without hard links
        }
    }
    fs::rename(partial, path).map_err(io_error(path, "rename"))
}
