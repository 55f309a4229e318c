//! A tokenizer of any bytes, as `tokenizer.json` or as the metadata of a GGUF file, and a text for it.

#![no_main]

use formats::gguf::GgufFile;
use formats::tokenizer::{Tokenizer, TokenizerOptions};
use libfuzzer_sys::fuzz_target;

/// Files of a folder that say something about its tokenizer.
const FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
];

fuzz_target!(|data: &[u8]| {
    let parts = formats_fuzz::parts(data);
    let text = String::from_utf8_lossy(formats_fuzz::part(&parts, "text").unwrap_or(b"a  b"));
    let options = TokenizerOptions::default();
    let tokenizer = match formats_fuzz::part(&parts, "gguf") {
        Some(gguf) => {
            let Ok(file) = GgufFile::parse("fuzz.gguf", gguf.to_vec()) else { return };
            Tokenizer::from_gguf(&file, &options)
        }
        None => Tokenizer::from_folder(formats_fuzz::folder(&parts, FILES), &options),
    };
    if let Ok(tokenizer) = tokenizer {
        formats_fuzz::use_tokenizer(&tokenizer, &text);
    }
});
