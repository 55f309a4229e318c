//! A folder as Hugging Face publishes models: shards, index and configuration of any bytes.

#![no_main]

use formats::gguf::GgufFile;
use libfuzzer_sys::fuzz_target;

/// Files that the reader looks for, and a second shard.
const FILES: &[&str] = &[
    "config.json",
    "model.safetensors",
    "b.safetensors",
    "model.safetensors.index.json",
    "generation_config.json",
];

fuzz_target!(|data: &[u8]| {
    let parts = formats_fuzz::parts(data);
    let folder = formats_fuzz::folder(&parts, FILES);
    let Ok(file) = GgufFile::open(folder) else { return };
    formats_fuzz::use_file(&file);
});
