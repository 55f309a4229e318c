//! The tokens of a file: their bytes, their kinds, and the ids with a special meaning.

use std::collections::HashMap;

use super::byte_alphabet;
use crate::gguf::{Metadata, StringArray};
use crate::{FormatError, Result};

pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Text.
    Normal,
    /// Stands for what has no token.
    Unknown,
    /// A marker, such as the end of a turn; never made of plain text.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// A row without use.
    Unused,
    /// One byte.
    Byte,
}

/// Ids with a special meaning; 0 is an id like any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpecialIds {
    /// Beginning of a text.
    pub bos: Option<u32>,
    /// End of a text.
    pub eos: Option<u32>,
    /// End of a turn.
    pub eot: Option<u32>,
    /// End of a message.
    pub eom: Option<u32>,
    /// Stands for what has no token.
    pub unknown: Option<u32>,
    /// Padding.
    pub padding: Option<u32>,
}

/// Texts of tokens that end a turn or a text, whatever the keys say.
const TURN_ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<EOT>",
    "_<EOT>",
    "<end_of_turn>",
    "<|return|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
];

/// Every token of a file.
#[derive(Clone, Debug)]
pub(super) struct Vocabulary {
    /// By id: the bytes that the token stands for.
    pub(super) bytes: StringArray,
    pub(super) kinds: Vec<TokenKind>,
    pub(super) special: SpecialIds,
    /// Sorted.
    pub(super) ends_of_generation: Vec<u32>,
}

/// How a vocabulary writes what its tokens stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Normal tokens in GPT-2's alphabet.
    ByteAlphabet,
    /// Text, with U+2581 for a space.
    SentencePiece,
    /// However the crate `tokenizers` has it.
    AsWritten,
}

impl Vocabulary {
    /// Reads the tokens, their kinds and the special ids.
    pub(super) fn read(
        metadata: &Metadata,
        spelling: Spelling,
        notices: &mut Vec<String>,
    ) -> Result<Vocabulary> {
        let Some(tokens) = metadata.strings(TOKENS)? else {
            return Err(metadata.missing(TOKENS, "the file has no vocabulary; fetch a complete one"));
        };
        if tokens.is_empty() || u32::try_from(tokens.len()).is_err() {
            return Err(metadata.bad_value(TOKENS, format!("lists {} tokens", tokens.len())));
        }
        let mut kinds = kinds(metadata, tokens.len(), notices)?;
        let mut bytes = StringArray::default();
        let mut foreign = Vec::new();
        let mut ends = Vec::new();
        let mut spelled = Vec::new();
        for (id, token) in tokens.iter().enumerate() {
            let text = std::str::from_utf8(token).map_err(|error| {
                let problem =
                    format!("token {id} is not UTF-8 ({error}); the file is damaged or was written wrongly");
                metadata.bad_value(TOKENS, problem)
            })?;
            if TURN_ENDS.contains(&text) {
                ends.push(id as u32); // the count fits, checked above
                if kinds[id] == TokenKind::Normal {
                    kinds[id] = TokenKind::Control;
                }
            }
            spelled.clear();
            match kinds[id] {
                _ if spelling == Spelling::AsWritten => spelled.extend_from_slice(token),
                TokenKind::Byte => spelled.push(byte_token(metadata, id, text)?),
                TokenKind::Normal | TokenKind::Unused | TokenKind::UserDefined
                    if spelling == Spelling::SentencePiece =>
                {
                    spelled.extend_from_slice(text.replace('\u{2581}', " ").as_bytes());
                }
                TokenKind::Normal | TokenKind::Unused if byte_alphabet::decode(text, &mut spelled) => {}
                TokenKind::Normal => {
                    foreign.push(id);
                    spelled.extend_from_slice(token);
                }
                _ => spelled.extend_from_slice(token),
            }
            bytes.push(&spelled);
        }
        if let Some(first) = foreign.first() {
            notices.push(format!(
                "`{TOKENS}`: {} normal tokens (first: id {first}) are not written in the byte alphabet: they are \
                 decoded as they stand and never made of text",
                foreign.len()
            ));
        }
        let mut special = special_ids(metadata, tokens.len(), notices)?;
        let by_kind = kinds.iter().position(|&kind| kind == TokenKind::Unknown);
        special.unknown = special.unknown.or(by_kind.map(|id| id as u32));
        ends.extend([special.eos, special.eot, special.eom].into_iter().flatten());
        ends.sort_unstable();
        ends.dedup();
        if special.eos.is_none() && ends.is_empty() {
            notices.push("no end-of-text token is known: generation ends only by its length".to_owned());
        }
        Ok(Vocabulary { bytes, kinds, special, ends_of_generation: ends })
    }

    /// Normal tokens by their bytes; of equal ones, the last.
    pub(super) fn by_bytes(&self, notices: &mut Vec<String>) -> HashMap<&[u8], u32> {
        let mut map = HashMap::with_capacity(self.bytes.len());
        let mut twice = Vec::new();
        for (id, (bytes, kind)) in self.bytes.iter().zip(&self.kinds).enumerate() {
            if *kind == TokenKind::Normal && !bytes.is_empty() && map.insert(bytes, id as u32).is_some() {
                twice.push(id);
            }
        }
        if let Some(first) = twice.first() {
            let count = twice.len();
            notices.push(format!(
                "`{TOKENS}`: {count} tokens occur twice (first again: id {first}): the later id counts"
            ));
        }
        map
    }
}

fn kinds(metadata: &Metadata, count: usize, notices: &mut Vec<String>) -> Result<Vec<TokenKind>> {
    let Some(codes) = metadata.integers(TOKEN_TYPE)? else {
        notices.push(format!("`{TOKEN_TYPE}` is missing: all tokens but known markers count as normal text"));
        return Ok(vec![TokenKind::Normal; count]);
    };
    if codes.len() != count {
        let problem = format!("holds {} types for the {count} tokens of `{TOKENS}`", codes.len());
        return Err(metadata.bad_value(TOKEN_TYPE, problem));
    }
    let kind =
        |(id, code): (usize, i128)| match code {
            0 | 1 => Ok(TokenKind::Normal),
            2 => Ok(TokenKind::Unknown),
            3 => Ok(TokenKind::Control),
            4 => Ok(TokenKind::UserDefined),
            5 => Ok(TokenKind::Unused),
            6 => Ok(TokenKind::Byte),
            other => Err(metadata
                .bad_value(TOKEN_TYPE, format!("gives token {id} the type {other}; 1 to 6 are known"))),
        };
    codes.into_iter().enumerate().map(kind).collect()
}

/// The byte of a token `<0xNN>`.
fn byte_token(metadata: &Metadata, id: usize, text: &str) -> Result<u8> {
    let digits =
        text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|digits| digits.len() == 2);
    digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).ok_or_else(|| {
        let problem =
            format!("token {id} is of type byte, but its text {text:?} is not of the form <0x00> to <0xFF>");
        metadata.bad_value(TOKENS, problem)
    })
}

fn special_ids(metadata: &Metadata, count: usize, notices: &mut Vec<String>) -> Result<SpecialIds> {
    let mut read = |name: &str| -> Result<Option<u32>, FormatError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let Some(number) = metadata.integer(&key)? else { return Ok(None) };
        match u32::try_from(number) {
            Ok(id) if (id as usize) < count => Ok(Some(id)),
            _ => {
                notices
                    .push(format!("`{key}` is {number}, but there are {count} tokens: it counts as absent"));
                Ok(None)
            }
        }
    };
    Ok(SpecialIds {
        bos: read("bos")?,
        eos: read("eos")?,
        eot: read("eot")?,
        eom: read("eom")?,
        unknown: read("unknown")?,
        padding: read("padding")?,
    })
}
