//! Tells what a file is by its first bytes, so that a wrong file is refused in words that help.

use super::Container;

/// The container, by magic.
pub(crate) fn container(bytes: &[u8]) -> Option<Container> {
    match bytes.get(..4)? {
        b"GGUF" => Some(Container::Gguf),
        b"PWRI" => Some(Container::PowerInfer),
        _ => None,
    }
}

/// What a file without either magic seems to be, and what to do.
pub(crate) fn describe(bytes: &[u8]) -> String {
    let head = &bytes[..bytes.len().min(512)];
    let text = String::from_utf8_lossy(head);
    let start = text.trim_start().to_ascii_lowercase();
    if bytes.is_empty() {
        return "the file is empty (0 bytes); fetch it again".into();
    }
    if b"GGUF".starts_with(head) || b"PWRI".starts_with(head) {
        return format!("the file ends after {} bytes; fetch it again", bytes.len());
    }
    if start.starts_with("<!doctype html") || start.starts_with("<html") || start.starts_with("<?xml") {
        return "it is HTML (a web page saved instead of the file); fetch it by its download link".into();
    }
    if text.starts_with("version https://git-lfs.github.com/spec/") {
        return "it is a git-LFS pointer, not the file itself; run `git lfs pull` or download the file"
            .into();
    }
    if bytes.starts_with(b"PK\x03\x04") {
        return "it is a zip archive (perhaps a PyTorch checkpoint); unpack or convert it first".into();
    }
    if bytes.starts_with(&[0x1f, 0x8b]) || bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        return "it is compressed; unpack it first".into();
    }
    if [&b"lmgg"[..], b"fmgg", b"tjgg", b"algg"].iter().any(|magic| bytes.starts_with(magic)) {
        return "it is a file of GGML's time before GGUF; fetch a GGUF of the model".into();
    }
    if bytes.get(8) == Some(&b'{') && bytes.get(7) == Some(&0) {
        return "it looks like safetensors; name it `.safetensors`, with its `config.json` beside it".into();
    }
    if start.starts_with('{') {
        return "it looks like JSON; give the .gguf file itself".into();
    }
    let magic: Vec<String> = head.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("it starts with bytes {}, where `GGUF` or `PWRI` is wanted", magic.join(" "))
}
