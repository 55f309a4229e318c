//! SentencePiece's BPE: neighbours are joined where the vocabulary has what they make, best score first.
//!
//! The rule (of `sentencepiece`, model type BPE): start from single characters; of all neighbouring pairs whose
//! concatenation is a token, join that of the highest score, of equals the leftmost; characters without a token become
//! one byte token per byte. Vocabularies write a space as U+2581; here tokens are kept with the space itself, so that a
//! U+2581 in the text is spelled in bytes and comes back as it was.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// No neighbour.
const END: u32 = u32::MAX;

/// Tokens that text is made of.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    tokens: HashMap<Vec<u8>, (u32, f32)>,
    /// Bytes of the longest token: nothing longer is looked up.
    longest: usize,
    bytes: Box<[Option<u32>; 256]>,
}

/// A stretch of the text; joined ones are empty.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: u32,
    end: u32,
    previous: u32,
    next: u32,
}

/// A possible join; greater is better.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    score: f32,
    left: u32,
    right: u32,
    /// Bytes of both: another number means that either has changed since.
    length: u32,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        self.score
            .total_cmp(&other.score)
            .then(other.left.cmp(&self.left))
            .then(self.length.cmp(&other.length))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

/// Buffers kept between texts.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Candidate>,
}

impl Pieces {
    /// From tokens with their ids and scores; `byte_ids` gives the token of each byte.
    pub(super) fn new<'t>(
        tokens: impl IntoIterator<Item = (&'t [u8], u32, f32)>,
        byte_ids: impl Fn(u8) -> Option<u32>,
    ) -> Pieces {
        let tokens: HashMap<Vec<u8>, (u32, f32)> =
            tokens.into_iter().map(|(bytes, id, score)| (bytes.to_vec(), (id, score))).collect();
        let longest = tokens.keys().map(Vec::len).max().unwrap_or(0);
        let mut table = Box::new([None; 256]);
        for byte in 0..=255_u8 {
            // A vocabulary without byte tokens may still have the ASCII character.
            table[usize::from(byte)] =
                byte_ids(byte).or_else(|| tokens.get(&[byte][..]).map(|token| token.0));
        }
        Pieces { tokens, longest, bytes: table }
    }

    /// Bytes that have no token.
    pub(super) fn bytes_without_token(&self) -> usize {
        self.bytes.iter().filter(|id| id.is_none()).count()
    }

    /// Appends the tokens of `text` (less than 4 GiB); a byte without a token becomes `unknown`, or nothing.
    pub(super) fn encode(&self, text: &str, unknown: Option<u32>, scratch: &mut Scratch, out: &mut Vec<u32>) {
        let Scratch { symbols, heap } = scratch;
        symbols.clear();
        heap.clear();
        for (start, character) in text.char_indices() {
            let at = symbols.len() as u32;
            symbols.push(Symbol {
                start: start as u32,
                end: (start + character.len_utf8()) as u32,
                previous: if at == 0 { END } else { at - 1 },
                next: at + 1,
            });
        }
        let Some(last) = symbols.last_mut() else { return };
        last.next = END;
        let bytes = text.as_bytes();
        for left in 1..symbols.len() as u32 {
            self.offer(bytes, symbols, left - 1, heap);
        }
        while let Some(Candidate { left, right, length, .. }) = heap.pop() {
            let (a, b) = (symbols[left as usize], symbols[right as usize]);
            if a.next != right || a.start == a.end || b.end - a.start != length {
                continue;
            }
            symbols[left as usize] = Symbol { end: b.end, next: b.next, ..a };
            symbols[right as usize].end = b.start;
            if b.next != END {
                symbols[b.next as usize].previous = left;
                self.offer(bytes, symbols, left, heap);
            }
            if a.previous != END {
                self.offer(bytes, symbols, a.previous, heap);
            }
        }
        for symbol in symbols.iter().filter(|symbol| symbol.start < symbol.end) {
            let piece = &bytes[symbol.start as usize..symbol.end as usize];
            match self.tokens.get(piece) {
                Some(&(id, _)) => out.push(id),
                None => {
                    out.extend(piece.iter().filter_map(|&byte| self.bytes[usize::from(byte)].or(unknown)))
                }
            }
        }
    }

    fn offer(&self, text: &[u8], symbols: &[Symbol], left: u32, heap: &mut BinaryHeap<Candidate>) {
        let Symbol { start, next: right, .. } = symbols[left as usize];
        let end = symbols[right as usize].end;
        let piece = &text[start as usize..end as usize];
        if piece.len() > self.longest {
            return;
        }
        if let Some(&(_, score)) = self.tokens.get(piece) {
            heap.push(Candidate { score, left, right, length: end - start });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rule taken literally, in O(n^2).
    fn slow(pieces: &Pieces, text: &str) -> Vec<u32> {
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let scored = parts.windows(2).enumerate().filter_map(|(at, pair)| {
                let score = pieces.tokens.get(pair.concat().as_bytes())?.1;
                Some((score, at))
            });
            let best = scored.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
            let Some((_, at)) = best else { break };
            let joined = parts[at..at + 2].concat();
            parts.splice(at..at + 2, [joined]);
        }
        parts.iter().map(|part| pieces.tokens.get(part.as_bytes()).map_or(99, |token| token.0)).collect()
    }

    proptest! {
        #[test]
        fn equals_the_literal_rule(
            text in "[abé]{0,40}",
            tokens in prop::collection::vec(("[abé]{1,5}", -3_i8..3), 0..20),
        ) {
            let tokens: Vec<_> = tokens.iter().enumerate().map(|(id, (t, s))| (t.as_bytes(), id as u32, f32::from(*s))).collect();
            let pieces = Pieces::new(tokens, |_| None);
            let mut out = Vec::new();
            // One unknown per byte here, one per character there.
            pieces.encode(&text, Some(99), &mut Scratch::default(), &mut out);
            out.dedup_by(|a, b| *a == 99 && *b == 99);
            let mut wanted = slow(&pieces, &text);
            wanted.dedup_by(|a, b| *a == 99 && *b == 99);
            prop_assert_eq!(out, wanted);
        }
    }

    #[test]
    fn bytes_where_there_is_no_token() {
        let pieces = Pieces::new([(&b"a"[..], 7, 0.0)], |byte| (byte >= 0x80).then_some(u32::from(byte)));
        assert_eq!(pieces.bytes_without_token(), 127);
        let mut out = Vec::new();
        pieces.encode("aéb", Some(1), &mut Scratch::default(), &mut out);
        pieces.encode("b", None, &mut Scratch::default(), &mut out);
        pieces.encode("", None, &mut Scratch::default(), &mut out);
        assert_eq!(out, [7, 0xc3, 0xa9, 1]);
    }
}
