//! Which cuts a vocabulary wants, by the name in `tokenizer.ggml.pre`.

use super::split::Cut;

/// A named pre-tokenizer.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Names in files.
    names: &'static [&'static str],
    /// The cuts, in order.
    pub(super) cuts: &'static [Cut],
    /// A piece that is a token as a whole is taken as it is, whatever the merges say.
    pub(super) whole_pieces: bool,
    /// Whether BOS is added where the file does not say.
    pub(super) add_bos: bool,
}

/// The name that is assumed where a file has none.
pub(super) const DEFAULT: &str = "default";

const TABLE: &[PreTokenizer] = &[
    PreTokenizer {
        names: &[DEFAULT],
        cuts: &[Cut::Punctuation { backtick: false }, Cut::Gpt2, Cut::Numbers, Cut::ThreeDigits],
        whole_pieces: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "mpt",
            "olmo",
            "jais",
            "gigachat",
        ],
        cuts: &[Cut::Gpt2],
        whole_pieces: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        cuts: &[Cut::EachNumber, Cut::Gpt2],
        whole_pieces: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"],
        cuts: &[Cut::Llama3 { digits: 3 }],
        whole_pieces: true,
        add_bos: true,
    },
    PreTokenizer {
        names: &["dbrx", "smaug-bpe", "chatglm-bpe"],
        cuts: &[Cut::Llama3 { digits: 3 }],
        whole_pieces: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"],
        cuts: &[Cut::Llama3 { digits: 1 }],
        whole_pieces: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        cuts: &[
            Cut::EachLineEnd,
            Cut::SpacedLetters,
            Cut::SpacedPunctuation,
            Cut::EastAsian,
            Cut::EachNumber,
        ],
        whole_pieces: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["falcon"],
        cuts: &[Cut::Punctuation { backtick: true }, Cut::Gpt2, Cut::ThreeDigits],
        whole_pieces: false,
        add_bos: false,
    },
];

/// The pre-tokenizer of this name.
pub(super) fn named(name: &str) -> Option<&'static PreTokenizer> {
    TABLE.iter().find(|row| row.names.contains(&name))
}

/// Every name that is accepted.
pub(super) fn names() -> Vec<&'static str> {
    TABLE.iter().flat_map(|row| row.names).copied().collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_unique() {
        let mut names = super::names();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(super::named(super::DEFAULT).is_some());
    }
}
