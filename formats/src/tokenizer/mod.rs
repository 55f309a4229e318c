//! Text to token ids and back, as a model's file defines it.
//!
//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`): the text is cut at special tokens, each stretch into pieces by the
//! pre-tokenizer, each piece merged by the learned rules. Time is linear in the text but for the logarithm of the
//! longest piece; nothing recurses. SentencePiece (`llama`, which Gemma's files name, too, and `t5` for its unigram
//! model): the same stretches are joined, or cut, by the tokens' scores, with a space put before the first where the
//! file says so. A `tokenizer.json` is not read here but by the crate `tokenizers`, in `library`; what it says beyond
//! GGUF's keys (normal forms, where the space is put) a converted file keeps in keys of our own,
//! `thermocline.tokenizer.*`, so that it tokenizes as its source does.
//!
//! Rules where programs differ: a file without `tokenizer.ggml.pre` gets `default` and a notice; user-defined tokens
//! are matched in any text, control tokens only where asked for; of several special tokens at one place the longest
//! wins; a text that starts with BOS gets another one where it is asked for (callers see it by
//! [`Tokenizer::starts_with_bos`]). Equality with other programs, and where it ends: `docs/tokenizers.md`.

mod bpe;
mod byte_alphabet;
mod charsmap;
mod library;
pub(crate) mod normalise;
mod pieces;
mod pre;
pub(crate) mod read;
mod special;
mod split;
mod stream;
mod trie;
mod unigram;
mod vocabulary;

use std::collections::HashMap;
use std::sync::Arc;

pub use stream::StreamDecoder;
pub use vocabulary::{SpecialIds, TokenKind};

use crate::Result;
use bpe::Merges;
use library::Library;
use normalise::Normaliser;
use pieces::Pieces;
use pre::PreTokenizer;
use special::{Fragment, SpecialTokens};
use unigram::Unigram;
use vocabulary::Vocabulary;

/// The names of pre-tokenizers that are known.
pub(crate) fn pre_tokenizers() -> Vec<&'static str> {
    pre::names()
}

/// What a caller may decide against the file.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TokenizerOptions {
    /// Name of the pre-tokenizer, instead of `tokenizer.ggml.pre`.
    pub pre: Option<String>,
}

impl TokenizerOptions {
    /// With this pre-tokenizer instead of the file's.
    pub fn with_pre(name: impl Into<String>) -> TokenizerOptions {
        TokenizerOptions { pre: Some(name.into()) }
    }
}

/// The tokenizer of a model.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    method: Method,
    special: SpecialTokens,
    normaliser: Normaliser,
    space: SpacePrefix,
    add_bos: bool,
    chat_template: Option<String>,
    notices: Vec<String>,
}

/// The space that is put before a text.
#[derive(Clone, Copy, Debug, Default)]
struct SpacePrefix {
    add: bool,
    /// Not where the text starts with one already.
    unless_there: bool,
    /// Not behind special tokens.
    first_only: bool,
}

/// How a stretch of text becomes ids.
#[derive(Clone, Debug)]
enum Method {
    /// Byte-level BPE.
    Merges {
        merges: Merges,
        pre: &'static PreTokenizer,
        /// Normal tokens by their bytes, where whole pieces are looked up.
        whole: HashMap<Vec<u8>, u32>,
    },
    /// SentencePiece's BPE.
    Pieces {
        pieces: Pieces,
        /// A token begins at every space and holds no other.
        split_words: bool,
    },
    /// SentencePiece's unigram model.
    Unigram { unigram: Unigram, split_words: bool },
    /// A `tokenizer.json`, done from text to ids.
    Library(Arc<Library>),
}

/// Buffers kept between stretches.
#[derive(Debug, Default)]
struct Scratch {
    merges: bpe::Scratch,
    pieces: pieces::Scratch,
    unigram: unigram::Scratch,
}

impl Tokenizer {
    /// What a person should be told, one sentence each, naming the key.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Those notices that tell of a key that the file lacks, and of what is assumed instead.
    pub fn assumptions(&self) -> impl Iterator<Item = &str> {
        self.notices.iter().map(String::as_str).filter(|notice| notice.contains("` is missing: "))
    }

    /// How many tokens there are.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.bytes.len()
    }

    /// Ids with a special meaning.
    pub fn special_ids(&self) -> SpecialIds {
        self.vocabulary.special
    }

    /// Whether the file wants BOS before a text.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether ids start with BOS.
    pub fn starts_with_bos(&self, ids: &[u32]) -> bool {
        self.vocabulary.special.bos.is_some_and(|bos| ids.first() == Some(&bos))
    }

    /// The file's chat template.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// Whether a sequence ends with this id: end of text, of turn, of message, or a marker known to end a turn.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.vocabulary.ends_of_generation.binary_search(&id).is_ok()
    }

    /// Every id that ends a sequence, in order.
    pub fn ends_of_generation(&self) -> &[u32] {
        &self.vocabulary.ends_of_generation
    }

    /// What a token is for.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.vocabulary.kinds.get(id as usize).copied()
    }

    /// The bytes that a token stands for; for a special token, and for any of a `tokenizer.json`, how it is written.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary.bytes.get(id as usize)
    }

    /// The special token with exactly this text.
    pub fn special_token(&self, text: &str) -> Option<u32> {
        match self.special.fragments(text, true)[..] {
            [Fragment::Token(id)] => Some(id),
            _ => None,
        }
    }

    /// The ids of `text`: behind BOS if `add_bos` (and there is one; pass [`Tokenizer::adds_bos`] to do as the file
    /// says), with control tokens' texts read as these tokens if `parse_special`.
    ///
    /// # Errors
    /// Only for a `tokenizer.json`: where the crate that does it fails on the text, or the text has more than 16 MiB.
    pub fn encode(&self, text: &str, add_bos: bool, parse_special: bool) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        if add_bos {
            ids.extend(self.vocabulary.special.bos);
        }
        if let Method::Library(library) = &self.method {
            ids.extend(library.encode(text, parse_special)?);
            return Ok(ids);
        }
        let mut scratch = Scratch::default();
        let mut at_start = true;
        for fragment in self.special.fragments(text, parse_special) {
            let text = match fragment {
                Fragment::Token(id) => {
                    ids.push(id);
                    at_start = !self.space.first_only;
                    continue;
                }
                Fragment::Text(text) => self.normaliser.apply(text),
            };
            let there = self.space.unless_there && text.starts_with(' ');
            if std::mem::take(&mut at_start) && self.space.add && !there && !text.is_empty() {
                self.encode_text(&format!(" {text}"), &mut scratch, &mut ids);
            } else {
                self.encode_text(&text, &mut scratch, &mut ids);
            }
        }
        Ok(ids)
    }

    /// [`Tokenizer::encode`] of bytes: what is no UTF-8 is read as U+FFFD, one for each part that is wrong.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_bytes(&self, text: &[u8], add_bos: bool, parse_special: bool) -> Result<Vec<u32>> {
        self.encode(&String::from_utf8_lossy(text), add_bos, parse_special)
    }

    fn encode_text(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let unknown = self.vocabulary.special.unknown;
        let (merges, pre, whole) = match &self.method {
            Method::Pieces { pieces, split_words } => {
                return words(text, *split_words)
                    .for_each(|text| pieces.encode(text, unknown, &mut scratch.pieces, ids));
            }
            Method::Unigram { unigram, split_words } => {
                return words(text, *split_words)
                    .for_each(|text| unigram.encode(text, unknown, &mut scratch.unigram, ids));
            }
            Method::Merges { merges, pre, whole } => (merges, pre, whole),
            Method::Library(_) => return, // done in `encode`
        };
        let mut start = 0;
        for end in split::pieces(text, pre.cuts) {
            let piece = &text.as_bytes()[start..end];
            match whole.get(piece) {
                Some(&id) => ids.push(id),
                None => merges.encode(piece, unknown, &mut scratch.merges, ids),
            }
            start = end;
        }
    }

    /// The bytes of `ids`, special tokens as their text: the inverse of [`Tokenizer::encode`] with `parse_special` (and
    /// without `add_bos`). They need not be UTF-8. An id past the vocabulary gives U+FFFD. A `tokenizer.json` decodes as
    /// it says, which need not be the inverse, and gives U+FFFD for what is no UTF-8, nothing for an id past the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        self.decode_with(ids, true)
    }

    /// [`Tokenizer::decode`] without the texts of control tokens: what a person should see.
    pub fn decode_visible(&self, ids: &[u32]) -> Vec<u8> {
        self.decode_with(ids, false)
    }

    fn decode_with(&self, ids: &[u32], show_control: bool) -> Vec<u8> {
        if let Method::Library(library) = &self.method {
            return library.decode(ids, show_control).into_bytes();
        }
        let mut out = Vec::with_capacity(ids.len() * 4);
        let mut at_start = true;
        for &id in ids {
            self.append_bytes(id, show_control, &mut at_start, &mut out);
        }
        out
    }

    /// Appends one token's bytes, less the space prefix where the tokenizer put one.
    fn append_bytes(&self, id: u32, show_control: bool, at_start: &mut bool, out: &mut Vec<u8>) {
        let (Some(bytes), Some(kind)) = (self.token_bytes(id), self.kind(id)) else {
            out.extend_from_slice("\u{fffd}".as_bytes());
            return;
        };
        if matches!(kind, TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined) {
            *at_start = !self.space.first_only;
            if show_control || kind == TokenKind::UserDefined {
                out.extend_from_slice(bytes);
            }
            return;
        }
        let prefixed = std::mem::take(at_start) && self.space.add;
        out.extend_from_slice(bytes.strip_prefix(b" ").filter(|_| prefixed).unwrap_or(bytes));
    }
}

/// The text as it is, or cut before every space.
fn words(text: &str, cut: bool) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let next = if cut { rest.match_indices(' ').map(|found| found.0).find(|&at| at > 0) } else { None };
        let (word, after) = rest.split_at(next.unwrap_or(rest.len()));
        rest = after;
        Some(word)
    })
}
