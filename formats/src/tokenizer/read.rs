//! Reads a tokenizer out of metadata: GGUF's keys, and our own for what GGUF has none for.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::bpe::Merges;
use super::charsmap::Charsmap;
use super::library::Library;
use super::normalise::Normaliser;
use super::pieces::Pieces;
use super::pre::{self, PreTokenizer};
use super::special::SpecialTokens;
use super::unigram::Unigram;
use super::vocabulary::{self, Spelling, Vocabulary};
use super::{Method, SpacePrefix, TokenKind, Tokenizer, TokenizerOptions, byte_alphabet};
use crate::gguf::{Array, Container, GgufFile, Metadata, Value};
use crate::{FormatError, Result, safetensors};

/// The object `normalizer` of a `tokenizer.json`, as text.
pub(crate) const NORMALISER: &str = "thermocline.tokenizer.normalizer";
/// Whether words between white space are all that is tokenized.
pub(crate) const WORDS: &str = "thermocline.tokenizer.words";
/// Whether a token begins at every space.
pub(crate) const SPLIT_WORDS: &str = "thermocline.tokenizer.split_words";
/// Whether no space is put before a text that has one.
pub(crate) const UNLESS_THERE: &str = "thermocline.tokenizer.space_unless_there";
/// Whether no space is put behind special tokens.
pub(crate) const FIRST_ONLY: &str = "thermocline.tokenizer.space_first_only";

/// Added tokens that want more of the text than themselves, which is not done here.
pub(crate) const GREEDY: &str = "thermocline.tokenizer.greedy_tokens";

const MODEL: &str = "tokenizer.ggml.model";

impl Tokenizer {
    /// Reads the tokenizer in `file`, or in the `tokenizer.json` beside it where it is a folder of safetensors.
    ///
    /// # Errors
    /// Where there is none, it is damaged, or of a kind that is not known; names the key or the file.
    pub fn from_gguf(file: &GgufFile, options: &TokenizerOptions) -> Result<Tokenizer> {
        match file.container() {
            Container::Safetensors => {
                library(file.path().parent().unwrap_or(Path::new(".")), file.metadata(), options)
            }
            Container::Gguf | Container::PowerInfer => read(file.path(), file.metadata(), options),
        }
    }

    /// Reads the `tokenizer.json` in `folder`, and what other files there say about it; no weights are needed.
    ///
    /// # Errors
    /// As [`Tokenizer::from_gguf`].
    pub fn from_folder(folder: &Path, options: &TokenizerOptions) -> Result<Tokenizer> {
        let mut metadata = Metadata::new(folder);
        safetensors::tokenizer::read(folder, &mut metadata)?;
        library(folder, &metadata, options)
    }
}

/// The `tokenizer.json` in `folder` by the crate that does it; `metadata` has its tokens, and what the other files say.
fn library(folder: &Path, metadata: &Metadata, options: &TokenizerOptions) -> Result<Tokenizer> {
    let path = folder.join(safetensors::tokenizer::FILE);
    if metadata.get(MODEL).is_none() {
        return Err(FormatError::Unsupported {
            path: folder.to_path_buf(),
            what: format!("a folder without `{}`", safetensors::tokenizer::FILE),
            advice: "text cannot be tokenized without it; put the one of the model into the folder".into(),
        });
    }
    if let Some(name) = &options.pre {
        return Err(FormatError::Unsupported {
            path,
            what: format!("the pre-tokenizer override `{name}`"),
            advice: "a `tokenizer.json` says itself how text is split; only GGUF files name it".into(),
        });
    }
    if metadata.get(vocabulary::TOKENS).is_none() {
        return Err(FormatError::Unsupported {
            path,
            what: format!("tokenizer `{}`", metadata.string(MODEL)?.unwrap_or_default()),
            advice: format!("accepted: {}", safetensors::tokenizer::MODELS.join(", ")),
        });
    }
    let mut notices = Vec::new();
    let vocabulary = Vocabulary::read(metadata, Spelling::AsWritten, &mut notices)?;
    let library = Library::read(&path, &vocabulary)?;
    Ok(Tokenizer {
        special: special_tokens(&vocabulary),
        add_bos: adds_bos(metadata, &vocabulary, false, &mut notices)?,
        chat_template: metadata.string("tokenizer.chat_template")?.map(str::to_owned),
        vocabulary,
        method: Method::Library(Arc::new(library)),
        normaliser: Normaliser::default(),
        space: SpacePrefix::default(),
        notices,
    })
}

/// What is found in a text before it is split.
fn special_tokens(vocabulary: &Vocabulary) -> SpecialTokens {
    let mut special = SpecialTokens::new();
    for (id, (bytes, kind)) in vocabulary.bytes.iter().zip(&vocabulary.kinds).enumerate() {
        match kind {
            TokenKind::UserDefined => special.push(bytes, id as u32, true),
            TokenKind::Control | TokenKind::Unknown => special.push(bytes, id as u32, false),
            TokenKind::Normal | TokenKind::Unused | TokenKind::Byte => {}
        }
    }
    special
}

/// Whether a text starts with BOS: as the file says, else `default`.
fn adds_bos(
    metadata: &Metadata,
    vocabulary: &Vocabulary,
    default: bool,
    notices: &mut Vec<String>,
) -> Result<bool> {
    let wanted = metadata.boolean("tokenizer.ggml.add_bos_token")?;
    if wanted == Some(true) && vocabulary.special.bos.is_none() {
        notices
            .push("`tokenizer.ggml.add_bos_token` is true, but there is no BOS token: none is added".into());
    }
    Ok(wanted.unwrap_or(default) && vocabulary.special.bos.is_some())
}

fn read(path: &Path, metadata: &Metadata, options: &TokenizerOptions) -> Result<Tokenizer> {
    let (spelling, unigram) = match metadata.string(MODEL)? {
        Some("gpt2") => (Spelling::ByteAlphabet, false),
        Some("llama") => (Spelling::SentencePiece, false),
        Some("t5") => (Spelling::SentencePiece, true),
        None => return Err(metadata.missing(MODEL, "the file has no tokenizer; fetch a complete one")),
        Some(other) => {
            return Err(FormatError::Unsupported {
                path: path.to_path_buf(),
                what: format!("tokenizer `{other}` (`{MODEL}`)"),
                advice:
                    "accepted: gpt2 (byte-level BPE), llama (SentencePiece BPE), t5 (SentencePiece unigram)"
                        .into(),
            });
        }
    };
    let mut notices = Vec::new();
    let sentence = spelling == Spelling::SentencePiece;
    // Named before the vocabulary is read: what is wrong with it is the clearest error.
    let pre = if sentence { None } else { Some(pre_tokenizer(path, metadata, options, &mut notices)?) };
    if let Some(tokens) = metadata.string(GREEDY)? {
        notices.push(format!(
            "the tokens {tokens} take white space beside them, or only whole words, where the model comes from; \
             here they are found as they stand"
        ));
    }
    let normaliser = normaliser(metadata, sentence, unigram)?;
    let vocabulary = Vocabulary::read(metadata, spelling, &mut notices)?;
    let by_bytes = vocabulary.by_bytes(&mut notices);
    let unknown = vocabulary.special.unknown;
    let flag = |key: &str| metadata.boolean(key).map(Option::unwrap_or_default);
    let method = match pre {
        None => {
            let scores = scores(metadata, &vocabulary)?;
            let bytes = byte_tokens(&vocabulary);
            let tokens = by_bytes.iter().map(|(&bytes, &id)| (bytes, id, scores[id as usize] as f32));
            let split_words = flag(SPLIT_WORDS)?;
            if unigram {
                let unigram = Unigram::new(tokens, |byte| bytes[usize::from(byte)]);
                // None at all is how these models usually are.
                notices.extend(lost(unigram.bytes_without_token() % 256, unknown));
                Method::Unigram { unigram, split_words }
            } else {
                let pieces = Pieces::new(tokens, |byte| bytes[usize::from(byte)]);
                notices.extend(lost(pieces.bytes_without_token(), unknown));
                Method::Pieces { pieces, split_words }
            }
        }
        Some(pre) => {
            let merges = merges(metadata, &by_bytes, unknown, &mut notices)?;
            let whole = match pre.whole_pieces {
                true => by_bytes.iter().map(|(bytes, &id)| (bytes.to_vec(), id)).collect(),
                false => HashMap::new(),
            };
            Method::Merges { merges, pre, whole }
        }
    };
    let special = special_tokens(&vocabulary);
    let by_kind = pre.map_or(!unigram, |pre| pre.add_bos);
    let add_bos = adds_bos(metadata, &vocabulary, by_kind, &mut notices)?;
    let space = SpacePrefix {
        add: metadata.boolean("tokenizer.ggml.add_space_prefix")?.unwrap_or(sentence),
        unless_there: flag(UNLESS_THERE)?,
        first_only: flag(FIRST_ONLY)?,
    };
    let chat_template = metadata.string("tokenizer.chat_template")?.map(str::to_owned);
    Ok(Tokenizer { vocabulary, method, special, normaliser, space, add_bos, chat_template, notices })
}

/// What is done to a text first: as the `tokenizer.json` said that the file was made from, else SentencePiece's own.
fn normaliser(metadata: &Metadata, sentence: bool, unigram: bool) -> Result<Normaliser> {
    const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";
    let mut normaliser = if let Some(text) = metadata.string(NORMALISER)? {
        let json = serde_json::from_str(text)
            .map_err(|error| metadata.bad_value(NORMALISER, format!("is no JSON: {error}")))?;
        Normaliser::from_json(&json, sentence).map_err(|problem| metadata.bad_value(NORMALISER, problem))?
    } else if unigram {
        let map = match metadata.get(CHARSMAP) {
            None => None,
            Some(Value::Array(Array::U8(bytes))) => Some(bytes.clone()),
            Some(Value::Array(Array::I8(bytes))) => Some(bytes.iter().map(|&byte| byte as u8).collect()),
            Some(other) => return Err(metadata.wrong_type(CHARSMAP, other, "an array of bytes")),
        };
        let map = map.filter(|bytes| !bytes.is_empty()).map(|bytes| Charsmap::parse(&bytes)).transpose();
        let map = map.map_err(|problem| metadata.bad_value(CHARSMAP, problem))?;
        let collapse = metadata.boolean("tokenizer.ggml.remove_extra_whitespaces")?;
        Normaliser::sentence_piece(map, collapse.unwrap_or(false))
    } else {
        Normaliser::default()
    };
    if metadata.boolean(WORDS)? == Some(true) {
        normaliser.push_words();
    }
    Ok(normaliser)
}

fn pre_tokenizer(
    path: &Path,
    metadata: &Metadata,
    options: &TokenizerOptions,
    notices: &mut Vec<String>,
) -> Result<&'static PreTokenizer> {
    const KEY: &str = "tokenizer.ggml.pre";
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
        path: path.to_path_buf(),
        what: format!("pre-tokenizer `{name}` (`{KEY}`)"),
        advice: format!(
            "accepted: {}; if the model splits text like one of these, name it with the pre-tokenizer override",
            pre::names().join(", ")
        ),
    })
}

/// SentencePiece's score of each token.
fn scores(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<Vec<f64>> {
    const KEY: &str = "tokenizer.ggml.scores";
    let Some(scores) = metadata.floats(KEY)? else {
        return Err(metadata.missing(KEY, "SentencePiece cannot choose between tokens without it"));
    };
    let count = vocabulary.bytes.len();
    if scores.len() != count {
        let problem =
            format!("holds {} scores for the {count} tokens of `{}`", scores.len(), vocabulary::TOKENS);
        return Err(metadata.bad_value(KEY, problem));
    }
    // As f32, which is what they are kept as.
    if let Some(id) = scores.iter().position(|&score| !(score as f32).is_finite()) {
        return Err(metadata.bad_value(KEY, format!("gives token {id} the score {}", scores[id])));
    }
    Ok(scores)
}

/// The token of each byte.
fn byte_tokens(vocabulary: &Vocabulary) -> [Option<u32>; 256] {
    let mut bytes = [None; 256];
    for (id, (token, kind)) in vocabulary.bytes.iter().zip(&vocabulary.kinds).enumerate() {
        if let (TokenKind::Byte, &[byte]) = (kind, token) {
            bytes[usize::from(byte)] = Some(id as u32);
        }
    }
    bytes
}

/// What a person should know about bytes that have no token.
fn lost(count: usize, unknown: Option<u32>) -> Option<String> {
    let becomes = if unknown.is_some() { "become the unknown token" } else { "are left out" };
    (count > 0).then(|| {
        let key = vocabulary::TOKENS;
        format!("`{key}`: {count} bytes have no token: characters of them that are no tokens {becomes}")
    })
}

fn merges(
    metadata: &Metadata,
    by_bytes: &HashMap<&[u8], u32>,
    unknown: Option<u32>,
    notices: &mut Vec<String>,
) -> Result<Merges> {
    const KEY: &str = "tokenizer.ggml.merges";
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
