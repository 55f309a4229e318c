//! Tokenizers of a `tokenizer.json`: the crate `tokenizers` does them, every kind that it knows, so ids are its ids.
//!
//! What a runtime needs beyond it is here: control tokens that are text where they are not asked for, a stream of text
//! that holds back incomplete characters, bounds, and errors that name the file. The files come from strangers, and a
//! panic inside the crate becomes an error, too.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use tokenizers::{AddedVocabulary, Model as _, ModelWrapper, OffsetType, PreTokenizer as _};

use super::stream::Window;
use super::vocabulary::Vocabulary;
use crate::{FormatError, Result, safetensors};

/// Bytes of a text at most: the crate keeps some hundred bytes for each of them.
const TEXT_LIMIT: usize = 1 << 24;
/// Characters of white space in a row at most. Splitters go back through such a run, the crate's pattern matcher keeps a
/// place for each of its characters, and where it has no more than a million it stops splitting without a word.
const RUN_LIMIT: usize = 500_000;
/// Tokens that are held back at most while a character is incomplete: it has four bytes at most, some may be wrong.
const HELD: usize = 8;
/// What stands for bytes that are no character.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// A `tokenizer.json` as the crate has it.
pub(super) struct Library {
    path: PathBuf,
    tokenizer: tokenizers::Tokenizer,
    /// The added tokens less the special ones, for texts in which these are text.
    plain: AddedVocabulary,
    /// A token that makes visible text: what stands before a text that goes on. Some decoders treat the first token of
    /// a text in a way of its own.
    lead: Option<u32>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Library {
    /// Reads the file; `vocabulary` is what the same file was said to hold.
    ///
    /// # Errors
    /// Where the crate does not know it, or numbers its tokens in another way than the file says.
    pub(super) fn read(path: &Path, vocabulary: &Vocabulary) -> Result<Library> {
        let text = safetensors::text(path)?;
        let tokenizer = contained(path, "be used", || tokenizers::Tokenizer::from_bytes(&text))?;
        let bad = |problem| FormatError::NotSafetensors { path: path.to_path_buf(), problem };
        if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
            && bpe.dropout.is_some_and(|share| share != 0.0)
        {
            let problem = "joins tokens at random (`model.dropout`), which is for training; set it to null";
            return Err(bad(problem.into()));
        }
        let mut plain = tokenizer.get_added_vocabulary().clone();
        plain.set_encode_special_tokens(true);
        for (id, token) in tokenizer.get_added_vocabulary().get_added_tokens_decoder() {
            // Its own number may differ from the file's, which it only warns of.
            if vocabulary.bytes.get(*id as usize) != Some(token.content.as_bytes()) {
                return Err(bad(format!(
                    "gives the added token `{}` another id than {id}, which follows from the vocabulary; ids would not \
                     be those that the model was trained with",
                    token.content
                )));
            }
        }
        let mut library = Library { path: path.to_path_buf(), tokenizer, plain, lead: None };
        let last = library.encode("a", false).ok().and_then(|ids| ids.last().copied());
        library.lead = last.filter(|&id| {
            let text = library.decode(&[id], true);
            !text.trim().is_empty() && !text.contains(REPLACEMENT)
        });
        Ok(library)
    }

    /// The ids of `text`, without any that the file puts around a text.
    ///
    /// # Errors
    /// Where the text is too long, or the crate fails, as for text without a token in a vocabulary without an unknown one.
    pub(super) fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        let too_long = |what: String, limit: usize| FormatError::Unsupported {
            path: self.path.clone(),
            what: format!("tokenizing {what} at once"),
            advice: format!("at most {limit} are; give a shorter text"),
        };
        if text.len() > TEXT_LIMIT {
            return Err(too_long(format!("{} bytes of text", text.len()), TEXT_LIMIT));
        }
        let runs = text.split(|character: char| !character.is_whitespace());
        let longest = runs.filter(|run| run.len() > RUN_LIMIT).map(|run| run.chars().count()).max();
        if let Some(run) = longest.filter(|&run| run > RUN_LIMIT) {
            return Err(too_long(format!("a run of {run} characters of white space"), RUN_LIMIT));
        }
        let added = if parse_special { self.tokenizer.get_added_vocabulary() } else { &self.plain };
        contained(&self.path, "tokenize the text", || {
            let mut pieces = added.extract_and_normalize(self.tokenizer.get_normalizer(), text);
            if let Some(pre) = self.tokenizer.get_pre_tokenizer() {
                pre.pre_tokenize(&mut pieces)?;
            }
            self.tokenizer.get_model().tokenize_in_pretokenized(&mut pieces, None)?;
            Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
        })
    }

    /// The text of `ids`, those of special tokens only if asked for. Ids that are in no vocabulary give nothing; ids that
    /// the crate fails on give U+FFFD each.
    pub(super) fn decode(&self, ids: &[u32], show_control: bool) -> String {
        contained(&self.path, "decode", || self.tokenizer.decode(ids, !show_control))
            .unwrap_or_else(|_| ids.iter().map(|_| REPLACEMENT).collect())
    }

    /// The text that `id` adds to what came before; perhaps none yet. What came before is known by the last tokens that
    /// gave text: decoders look no further back.
    pub(super) fn push(&self, window: &mut Window, id: u32, show_control: bool) -> String {
        if window.ids.is_empty() && !window.at_start {
            window.ids.extend(self.lead);
            window.given = self.decode(&window.ids, true);
        }
        window.ids.push(id);
        window.held += 1;
        let text = self.decode(&window.ids, show_control);
        if text == window.given && window.held == 1 {
            // It has no text of its own, and is no context for what follows.
            window.ids.pop();
            window.held = 0;
            return String::new();
        }
        let new = behind(&window.given, &text).to_owned();
        if text.ends_with(REPLACEMENT) && window.held < HELD {
            window.pending = new;
            return String::new();
        }
        window.pending.clear();
        window.ids.drain(..window.ids.len() - window.held);
        window.held = 0;
        window.given = self.decode(&window.ids, show_control);
        new
    }
}

/// `text` without what it begins with in common with `given`.
fn behind<'t>(given: &str, text: &'t str) -> &'t str {
    let same = given.chars().zip(text.chars()).take_while(|(a, b)| a == b);
    &text[same.map(|(a, _)| a.len_utf8()).sum::<usize>()..]
}

/// What the crate answers; an error of its own, or a panic inside it, as one that names the file.
fn contained<T>(
    path: &Path,
    what: &str,
    work: impl FnOnce() -> tokenizers::Result<T>,
) -> Result<T, FormatError> {
    let problem = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error.to_string(),
        Err(panic) => format!("it failed inside: {}", message(&*panic)),
    };
    let problem = format!("cannot {what} by the crate `tokenizers`: {problem}");
    Err(FormatError::NotSafetensors { path: path.to_path_buf(), problem })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
