//! Turns ids into text as they come, holding back bytes that do not yet make a character.

use super::Tokenizer;

/// Decoder for one stream of ids. A character may be spread over several tokens; it is given out when complete.
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    pending: Vec<u8>,
    /// Whether the tokenizer's space prefix would stand here.
    at_start: bool,
    show_control: bool,
}

impl StreamDecoder {
    /// At the start of a text; `show_control` decides whether control tokens (markers) give their text or nothing.
    pub fn new(show_control: bool) -> StreamDecoder {
        StreamDecoder { pending: Vec::new(), at_start: true, show_control }
    }

    /// In the middle of a text (after a prompt): a leading space is the model's own and stays.
    pub fn continuing(show_control: bool) -> StreamDecoder {
        StreamDecoder { at_start: false, ..StreamDecoder::new(show_control) }
    }

    /// The text that this id completes; perhaps none. Bytes that can never be UTF-8 become U+FFFD.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        tokenizer.append_bytes(id, self.show_control, &mut self.at_start, &mut self.pending);
        self.drain(false)
    }

    /// What was held back, as U+FFFD: the stream ended inside a character.
    pub fn finish(&mut self) -> String {
        self.drain(true)
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
