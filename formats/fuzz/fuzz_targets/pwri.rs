//! A file of PowerInfer's container: whatever stands behind the magic, which is set right.

#![no_main]

use formats::gguf::GgufFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut bytes = data.to_vec();
    for (byte, magic) in bytes.iter_mut().zip(b"PWRI\x03\0\0\0") {
        *byte = *magic;
    }
    let Ok(file) = GgufFile::parse("fuzz.gguf", bytes) else { return };
    formats_fuzz::use_file(&file);
});
