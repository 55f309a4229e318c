//! Turns ids into text as they come, holding back bytes that do not yet make a character.

use super::{Method, Tokenizer};

/// Decoder for one stream of ids. A character may be spread over several tokens; it is given out when complete.
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    pending: Vec<u8>,
    /// Whether the tokenizer's space prefix would stand here.
    at_start: bool,
    show_control: bool,
    /// Of a `tokenizer.json`, instead of `pending`.
    window: Window,
}

/// The last ids, for a decoder that needs to see what a token stands behind.
#[derive(Clone, Debug)]
pub(super) struct Window {
    pub(super) ids: Vec<u32>,
    /// How many of them, the last ones, gave no text yet.
    pub(super) held: usize,
    /// The text that they would give as they are.
    pub(super) pending: String,
    /// The text of the others.
    pub(super) given: String,
    /// Whether nothing stands before the first.
    pub(super) at_start: bool,
}

impl StreamDecoder {
    /// At the start of a text; `show_control` decides whether control tokens (markers) give their text or nothing.
    pub fn new(show_control: bool) -> StreamDecoder {
        let window =
            Window { ids: Vec::new(), held: 0, pending: String::new(), given: String::new(), at_start: true };
        StreamDecoder { pending: Vec::new(), at_start: true, show_control, window }
    }

    /// In the middle of a text (after a prompt): a leading space is the model's own and stays.
    pub fn continuing(show_control: bool) -> StreamDecoder {
        let mut decoder = StreamDecoder::new(show_control);
        (decoder.at_start, decoder.window.at_start) = (false, false);
        decoder
    }

    /// The text that this id completes; perhaps none. Bytes that can never be UTF-8 become U+FFFD.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        if let Method::Library(library) = &tokenizer.method {
            return library.push(&mut self.window, id, self.show_control);
        }
        tokenizer.append_bytes(id, self.show_control, &mut self.at_start, &mut self.pending);
        self.drain(false)
    }

    /// What was held back, as U+FFFD: the stream ended inside a character.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.window.pending);
        held + &self.drain(true)
    }

    fn drain(&mut self, all: bool) -> String {
        let mut text = String::new();
        let mut kept = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            kept += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            // Only the last chunk can be an incomplete character rather than a wrong one.
            let incomplete = kept + invalid.len() == self.pending.len()
                && std::str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if incomplete && !all {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            kept += invalid.len();
        }
        self.pending.drain(..kept);
        text
    }
}
