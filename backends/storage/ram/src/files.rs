//! Opening a file and reading the whole of it into memory, in parallel chunks.

use engine_core::{Error, HostMemory, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that one thread reads before it takes the next chunk.
const CHUNK: usize = 8 << 20;

/// An error of a file operation.
fn failed(path: &Path, operation: &str, error: &io::Error) -> Error {
    Error::io(format!("{}: {operation}: {error}", path.display()))
}

/// Opens a regular file that is not empty; returns it with its length.
pub(crate) fn open(path: &Path) -> Result<(File, u64)> {
    // Before opening: opening a pipe would wait for a writer.
    let before = std::fs::metadata(path).map_err(|error| failed(path, "open", &error))?;
    let unusable = |what| Err(Error::io(format!("{}: {what}; wanted a model file", path.display())));
    if before.is_dir() {
        return unusable("it is a directory");
    }
    if !before.is_file() {
        return unusable("it is no regular file");
    }
    let file = File::open(path).map_err(|error| failed(path, "open", &error))?;
    let length = file.metadata().map_err(|error| failed(path, "open", &error))?.len();
    if length == 0 {
        return unusable("it is empty");
    }
    Ok((file, length))
}

/// Reads the first `memory.len()` bytes.
pub(crate) fn load(path: &Path, file: &File, memory: &mut HostMemory, threads: usize) -> Result<()> {
    let chunks = memory.bytes_mut().chunks_mut(CHUNK).enumerate();
    let queue = std::sync::Mutex::new(chunks);
    let work = || -> io::Result<()> {
        loop {
            // A thread that panicked had taken its chunk already; the others go on.
            let next = queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next();
            let Some((index, chunk)) = next else { return Ok(()) };
            file.read_exact_at(chunk, index as u64 * CHUNK as u64)?;
        }
    };
    let result = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        others.into_iter().map(|thread| thread.join()).fold(own, |result, other| match other {
            Ok(other) => result.and(other),
            Err(_) => result.and(Err(io::Error::other("a reading thread panicked"))),
        })
    });
    result.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            Error::io(format!("{}: it became shorter while it was read", path.display()))
        }
        _ => failed(path, "read", &error),
    })
}
