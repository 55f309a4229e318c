//! A tokenizer of any bytes, as `tokenizer.json` or as the metadata of a GGUF file, and a text for it.

#![no_main]

use std::sync::Once;

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

/// A panic inside the crate `tokenizers` becomes an error where it is called, so it is no finding; any other ends the
/// process, by the hook that the fuzzer has set.
fn let_the_crate_panic() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let fatal = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if info.location().is_none_or(|at| at.file().contains("formats")) {
                fatal(info);
            }
        }));
    });
}

fuzz_target!(|data: &[u8]| {
    let_the_crate_panic();
    let parts = formats_fuzz::parts(data);
    let text = String::from_utf8_lossy(formats_fuzz::part(&parts, "text").unwrap_or(b"a  b"));
    let options = TokenizerOptions::default();
    let gguf = formats_fuzz::part(&parts, "gguf");
    let tokenizer = match gguf {
        Some(gguf) => {
            let Ok(file) = GgufFile::parse("fuzz.gguf", gguf.to_vec()) else { return };
            Tokenizer::from_gguf(&file, &options)
        }
        None => Tokenizer::from_folder(formats_fuzz::folder(&parts, FILES), &options),
    };
    if let Ok(tokenizer) = tokenizer {
        formats_fuzz::use_tokenizer(&tokenizer, &text, gguf.is_some());
    }
});
