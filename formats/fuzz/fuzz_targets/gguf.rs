//! A GGUF file of any bytes: opened, described, its tensors and tokenizer read.

#![no_main]

use formats::gguf::GgufFile;
use formats::tokenizer::{Tokenizer, TokenizerOptions};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(file) = GgufFile::parse("fuzz.gguf", data.to_vec()) else { return };
    formats_fuzz::use_file(&file);
    if let Ok(tokenizer) = Tokenizer::from_gguf(&file, &TokenizerOptions::default()) {
        formats_fuzz::use_tokenizer(&tokenizer, "hello <|im_end|> 12\n", true);
    }
});
