//! What the targets share: inputs of several parts, and folders that are really files in memory.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use formats::gguf::GgufFile;
use formats::model::ModelDescription;
use formats::quantise::{READABLE, dequantise};
use formats::tokenizer::{StreamDecoder, Tokenizer};

/// A line that starts with this begins the part that it names.
const MARK: &[u8] = b"--- ";

/// The parts of an input, in order: `--- NAME` on a line of its own, then the bytes up to the next such line.
pub fn parts(data: &[u8]) -> Vec<(&str, &[u8])> {
    let mut parts: Vec<(&str, &[u8])> = Vec::new();
    let (mut start, mut at) = (0, 0);
    while at < data.len() {
        let end =
            data[at..].iter().position(|&byte| byte == b'\n').map_or(data.len(), |length| at + length + 1);
        let name = data[at..end].strip_prefix(MARK).and_then(|name| std::str::from_utf8(name).ok());
        if let Some(name) = name {
            if let Some(last) = parts.last_mut() {
                last.1 = data[start..at].strip_suffix(b"\n").unwrap_or(&data[start..at]);
            }
            parts.push((name.trim(), &[]));
            start = end;
        }
        at = end;
    }
    if let Some(last) = parts.last_mut() {
        last.1 = &data[start..];
    }
    parts
}

/// The last part of this name.
pub fn part<'d>(parts: &[(&str, &'d [u8])], name: &str) -> Option<&'d [u8]> {
    parts.iter().rev().find(|part| part.0 == name).map(|part| part.1)
}

/// A folder of this process alone, in memory where the system has such; it holds the parts of these names and no other
/// file.
pub fn folder(parts: &[(&str, &[u8])], names: &[&str]) -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        let folder = parent.join(format!("formats-fuzz-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for the parts");
        folder
    });
    for name in names {
        let path = folder.join(name);
        match part(parts, name) {
            Some(bytes) => fs::write(path, bytes).expect("a part is written"),
            None if path.exists() => fs::remove_file(path).expect("an old part is removed"),
            None => {}
        }
    }
    folder
}

/// Uses a file that was accepted as the engine does: describes the model, reads every tensor's first and last row.
pub fn use_file(file: &GgufFile) {
    for (key, value) in file.metadata().iter() {
        let _ = format!("{key} {value:?}").len();
    }
    for tensor in file.tensors() {
        let bytes = file.tensor_bytes(tensor);
        assert_eq!(bytes.len() as u64, tensor.byte_len());
        let row = (bytes.len() as u64 / tensor.rows()) as usize;
        // A row may be as long as the file claims; what is checked is the reader, not the allocator.
        if READABLE.contains(&tensor.dtype) && tensor.row_elements() <= 1 << 16 {
            let mut values = vec![0.0; tensor.row_elements() as usize];
            for start in [0, bytes.len() - row] {
                dequantise(tensor.dtype, &bytes[start..start + row], &mut values).expect("a checked tensor");
            }
        }
    }
    if let Ok(model) = ModelDescription::from_gguf(file) {
        assert!(model.sampleable_vocab <= model.vocab_size);
        let _ = model.head().name.len();
    }
}

/// Uses a tokenizer that was accepted: ids are in range, and, where it is ours, a stream of them gives the text that all
/// of them give.
pub fn use_tokenizer(tokenizer: &Tokenizer, text: &str, ours: bool) {
    for parse_special in [false, true] {
        let ids = match tokenizer.encode(text, tokenizer.adds_bos(), parse_special) {
            Ok(ids) => ids,
            Err(error) => {
                assert!(!ours, "{error}");
                continue;
            }
        };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        let whole = tokenizer.decode(&ids);
        let mut decoder = StreamDecoder::new(true);
        let mut streamed: String = ids.iter().map(|&id| decoder.push(tokenizer, id)).collect();
        streamed += &decoder.finish();
        assert!(!ours || streamed == String::from_utf8_lossy(&whole));
        let _ = tokenizer.decode_visible(&ids);
    }
    let _ = tokenizer.special_token(text);
    let last = tokenizer.vocab_size() as u32;
    let _ = tokenizer.decode(&[last, last - 1, u32::MAX]);
}
