//! Text to token ids and back, as a model's file defines it.
//!
//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`): the text is cut at special tokens, each stretch into pieces by the
//! pre-tokenizer, each piece merged by the learned rules. Time is linear in the text but for the logarithm of the
//! longest piece; nothing recurses. SentencePiece (`llama`, which Gemma's files name, too): the same stretches are
//! joined by the tokens' scores, with a space put before the first where the file says so.
//!
//! Rules where programs differ: a file without `tokenizer.ggml.pre` gets `default` and a notice; user-defined tokens
//! are matched in any text, control tokens only where asked for; of several special tokens at one place the longest
//! wins; a text that starts with BOS gets another one where it is asked for (callers see it by
//! [`Tokenizer::starts_with_bos`]).

mod bpe;
mod byte_alphabet;
mod pieces;
mod pre;
mod special;
mod split;
mod stream;
mod vocabulary;

use std::collections::HashMap;

pub use stream::StreamDecoder;
pub use vocabulary::{SpecialIds, TokenKind};

use crate::gguf::GgufFile;
use crate::{FormatError, Result};
use bpe::Merges;
use pieces::Pieces;
use pre::PreTokenizer;
use special::{Fragment, SpecialTokens};
use vocabulary::{Spelling, Vocabulary};

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
    add_bos: bool,
    add_space_prefix: bool,
    chat_template: Option<String>,
    notices: Vec<String>,
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
    Pieces(Pieces),
}

/// Buffers kept between stretches.
#[derive(Debug, Default)]
struct Scratch {
    merges: bpe::Scratch,
    pieces: pieces::Scratch,
}

impl Tokenizer {
    /// Reads the tokenizer in `file`.
    pub fn from_gguf(file: &GgufFile, options: &TokenizerOptions) -> Result<Tokenizer> {
        const MODEL: &str = "tokenizer.ggml.model";
        let metadata = file.metadata();
        let spelling = match metadata.string(MODEL)? {
            Some("gpt2") => Spelling::ByteAlphabet,
            Some("llama") => Spelling::SentencePiece,
            None => return Err(metadata.missing(MODEL, "the file has no tokenizer; fetch a complete one")),
            Some(other) => {
                return Err(FormatError::Unsupported {
                    path: file.path().to_path_buf(),
                    what: format!("tokenizer `{other}` (`{MODEL}`)"),
                    advice: "accepted: gpt2 (byte-level BPE), llama (SentencePiece BPE)".into(),
                });
            }
        };
        let mut notices = Vec::new();
        if let Some(name) = metadata.string("tokenizer.normalizer")? {
            notices.push(format!(
                "text is not normalised ({name}), as the model's own tokenizer does before splitting"
            ));
        }
        let sentence = spelling == Spelling::SentencePiece;
        // Named before the vocabulary is read: what is wrong with it is the clearest error.
        let pre = if sentence { None } else { Some(pre_tokenizer(file, options, &mut notices)?) };
        let vocabulary = Vocabulary::read(file, spelling, &mut notices)?;
        let by_bytes = vocabulary.by_bytes(&mut notices);
        let unknown = vocabulary.special.unknown;
        let method = match pre {
            None => Method::Pieces(pieces(file, &vocabulary, &by_bytes, &mut notices)?),
            Some(pre) => {
                let merges = merges(file, &by_bytes, unknown, &mut notices)?;
                let whole = match pre.whole_pieces {
                    true => by_bytes.iter().map(|(bytes, &id)| (bytes.to_vec(), id)).collect(),
                    false => HashMap::new(),
                };
                Method::Merges { merges, pre, whole }
            }
        };
        let mut special = SpecialTokens::new();
        for (id, (bytes, kind)) in vocabulary.bytes.iter().zip(&vocabulary.kinds).enumerate() {
            match kind {
                TokenKind::UserDefined => special.push(bytes, id as u32, true),
                TokenKind::Control | TokenKind::Unknown => special.push(bytes, id as u32, false),
                TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => {}
            }
        }
        let wants_bos = metadata.boolean("tokenizer.ggml.add_bos_token")?;
        if wants_bos == Some(true) && vocabulary.special.bos.is_none() {
            notices.push(
                "`tokenizer.ggml.add_bos_token` is true, but there is no BOS token: none is added".into(),
            );
        }
        let add_bos =
            wants_bos.unwrap_or(pre.is_none_or(|pre| pre.add_bos)) && vocabulary.special.bos.is_some();
        let add_space_prefix = metadata.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(sentence);
        let chat_template = metadata.string("tokenizer.chat_template")?.map(str::to_owned);
        Ok(Tokenizer { vocabulary, method, special, add_bos, add_space_prefix, chat_template, notices })
    }

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

    /// The bytes that a token stands for; for a special token, its text.
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
    pub fn encode(&self, text: &str, add_bos: bool, parse_special: bool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        if add_bos {
            ids.extend(self.vocabulary.special.bos);
        }
        let mut scratch = Scratch::default();
        let mut at_start = true;
        for fragment in self.special.fragments(text, parse_special) {
            match fragment {
                Fragment::Token(id) => {
                    ids.push(id);
                    at_start = self.kind(id) != Some(TokenKind::UserDefined);
                }
                Fragment::Text(text) if at_start && self.add_space_prefix => {
                    self.encode_text(&format!(" {text}"), &mut scratch, &mut ids);
                    at_start = false;
                }
                Fragment::Text(text) => {
                    self.encode_text(text, &mut scratch, &mut ids);
                    at_start = false;
                }
            }
        }
        ids
    }

    fn encode_text(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let unknown = self.vocabulary.special.unknown;
        let (merges, pre, whole) = match &self.method {
            Method::Pieces(pieces) => return pieces.encode(text, unknown, &mut scratch.pieces, ids),
            Method::Merges { merges, pre, whole } => (merges, pre, whole),
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
    /// without `add_bos`). They need not be UTF-8. An id past the vocabulary gives U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        self.decode_with(ids, true)
    }

    /// [`Tokenizer::decode`] without the texts of control tokens: what a person should see.
    pub fn decode_visible(&self, ids: &[u32]) -> Vec<u8> {
        self.decode_with(ids, false)
    }

    fn decode_with(&self, ids: &[u32], show_control: bool) -> Vec<u8> {
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
        if matches!(kind, TokenKind::Control | TokenKind::Unknown) {
            *at_start = true;
            if show_control {
                out.extend_from_slice(bytes);
            }
            return;
        }
        let prefixed = std::mem::take(at_start)
            && self.add_space_prefix
            && matches!(kind, TokenKind::Normal | TokenKind::Byte);
        out.extend_from_slice(bytes.strip_prefix(b" ").filter(|_| prefixed).unwrap_or(bytes));
    }
}

fn pre_tokenizer(
    file: &GgufFile,
    options: &TokenizerOptions,
    notices: &mut Vec<String>,
) -> Result<&'static PreTokenizer> {
    const KEY: &str = "tokenizer.ggml.pre";
    let metadata = file.metadata();
    let name = match (&options.pre, metadata.string(KEY)?) {
        (Some(name), _) => name.as_str(),
        (None, Some(name)) => name,
        (None, None) => {
            notices.push(format!(
                "`{KEY}` is missing: `{}` is assumed, so text may be split differently from how the model was \
                 trained; name the right one with the pre-tokenizer override",
                pre::DEFAULT
            ));
            pre::DEFAULT
        }
    };
    pre::named(name).ok_or_else(|| FormatError::Unsupported {
        path: file.path().to_path_buf(),
        what: format!("pre-tokenizer `{name}` (`{KEY}`)"),
        advice: format!(
            "accepted: {}; if the model splits text like one of these, name it with the pre-tokenizer override",
            pre::names().join(", ")
        ),
    })
}

fn pieces(
    file: &GgufFile,
    vocabulary: &Vocabulary,
    by_bytes: &HashMap<&[u8], u32>,
    notices: &mut Vec<String>,
) -> Result<Pieces> {
    const KEY: &str = "tokenizer.ggml.scores";
    let metadata = file.metadata();
    let Some(scores) = metadata.floats(KEY)? else {
        return Err(metadata.missing(KEY, "SentencePiece cannot choose between tokens without it"));
    };
    let count = vocabulary.bytes.len();
    if scores.len() != count {
        let problem =
            format!("holds {} scores for the {count} tokens of `{}`", scores.len(), vocabulary::TOKENS);
        return Err(metadata.bad_value(KEY, problem));
    }
    if let Some(id) = scores.iter().position(|score| !score.is_finite()) {
        return Err(metadata.bad_value(KEY, format!("gives token {id} the score {}", scores[id])));
    }
    let mut bytes = [None; 256];
    for (id, (token, kind)) in vocabulary.bytes.iter().zip(&vocabulary.kinds).enumerate() {
        if let (TokenKind::Byte, &[byte]) = (kind, token) {
            bytes[usize::from(byte)] = Some(id as u32);
        }
    }
    let tokens = by_bytes.iter().map(|(&bytes, &id)| (bytes, id, scores[id as usize] as f32));
    let pieces = Pieces::new(tokens, |byte| bytes[usize::from(byte)]);
    let lost = pieces.bytes_without_token();
    if lost > 0 {
        let becomes =
            if vocabulary.special.unknown.is_some() { "become the unknown token" } else { "are left out" };
        notices.push(format!(
            "`{}`: {lost} bytes have no token: characters of them that are no tokens {becomes}",
            vocabulary::TOKENS
        ));
    }
    Ok(pieces)
}

fn merges(
    file: &GgufFile,
    by_bytes: &HashMap<&[u8], u32>,
    unknown: Option<u32>,
    notices: &mut Vec<String>,
) -> Result<Merges> {
    const KEY: &str = "tokenizer.ggml.merges";
    let metadata = file.metadata();
    let Some(rules) = metadata.strings(KEY)? else {
        return Err(metadata.missing(KEY, "byte-level BPE cannot join bytes to tokens without it"));
    };
    let mut merges = Merges::new(|byte| by_bytes.get(&[byte][..]).copied());
    let mut useless = 0;
    let mut joined = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let parts = std::str::from_utf8(rule).ok().and_then(|rule| rule.split_once(' '));
        let Some((left, right)) = parts.filter(|(left, right)| !left.is_empty() && !right.is_empty()) else {
            let found = String::from_utf8_lossy(&rule[..rule.len().min(40)]);
            return Err(metadata
                .bad_value(KEY, format!("rule {index} is {found:?}; two tokens and a space are wanted")));
        };
        joined.clear();
        let start = byte_alphabet::decode(left, &mut joined).then_some(joined.len());
        let whole = start.filter(|_| byte_alphabet::decode(right, &mut joined));
        let ids = whole.and_then(|middle| {
            let (left, right) = joined.split_at(middle);
            Some((*by_bytes.get(left)?, *by_bytes.get(right)?, *by_bytes.get(&joined[..])?))
        });
        match ids {
            Some((left, right, merged)) => merges.push(left, right, merged),
            None => useless += 1,
        }
    }
    if useless > 0 {
        notices.push(format!(
            "`{KEY}`: {useless} of {} rules name no tokens of the vocabulary: ignored",
            rules.len()
        ));
    }
    // Bytes C0, C1 and F5 to FF are in no UTF-8 text.
    let missing = merges.bytes_without_token();
    let lost = missing.iter().filter(|&&byte| !matches!(byte, 0xc0 | 0xc1 | 0xf5..)).count();
    if lost > 0 {
        let becomes = if unknown.is_some() { "become the unknown token" } else { "are left out" };
        notices
            .push(format!("`{}`: {lost} bytes have no token: in a text they {becomes}", vocabulary::TOKENS));
    }
    Ok(merges)
}
