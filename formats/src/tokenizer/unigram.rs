//! SentencePiece's unigram model: of all ways to cut a text into tokens, the one of the highest sum of scores.
//!
//! The rule (Kudo 2018, section 3.2; found by Viterbi as `sentencepiece` does): scores are log probabilities; a character
//! that is no token costs ten more than the worst token. Of equal sums the one whose last token is longest wins.
//! Characters without a token become one byte token per byte where the vocabulary has those, else one unknown token for
//! a whole run of them. Sums are taken in f64, as llama.cpp and Hugging Face do; `sentencepiece` itself takes f32.

use super::trie::Trie;

/// What an unknown character costs beyond the worst token.
const UNKNOWN_PENALTY: f64 = 10.0;
/// No token: an unknown character.
const NONE: u32 = u32::MAX;

/// Tokens that text is made of.
#[derive(Clone, Debug)]
pub(super) struct Unigram {
    /// Ids and scores.
    tokens: Trie<(u32, f64)>,
    unknown_score: f64,
    bytes: Box<[Option<u32>; 256]>,
}

/// The best way to a place in the text.
#[derive(Clone, Copy, Debug)]
struct Best {
    score: f64,
    /// Where its last token starts.
    start: u32,
    id: u32,
}

const UNREACHED: Best = Best { score: f64::NEG_INFINITY, start: 0, id: NONE };

/// Buffers kept between texts.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    best: Vec<Best>,
    cuts: Vec<(u32, u32, u32)>,
}

impl Unigram {
    /// From tokens with their ids and (finite) scores; `byte_ids` gives the token of each byte.
    pub(super) fn new<'t>(
        tokens: impl IntoIterator<Item = (&'t [u8], u32, f32)>,
        byte_ids: impl Fn(u8) -> Option<u32>,
    ) -> Unigram {
        let mut trie = Trie::new();
        let mut worst = 0.0_f64;
        for (bytes, id, score) in tokens {
            let score = f64::from(score);
            worst = worst.min(score);
            trie.push(bytes, (id, score));
        }
        let mut bytes = Box::new([None; 256]);
        for byte in 0..=255_u8 {
            bytes[usize::from(byte)] = byte_ids(byte);
        }
        Unigram { tokens: trie, unknown_score: worst - UNKNOWN_PENALTY, bytes }
    }

    /// Bytes that have no token.
    pub(super) fn bytes_without_token(&self) -> usize {
        self.bytes.iter().filter(|id| id.is_none()).count()
    }

    /// Appends the tokens of `text` (less than 4 GiB); a run of characters without a token becomes bytes or one
    /// `unknown`, or nothing.
    pub(super) fn encode(&self, text: &str, unknown: Option<u32>, scratch: &mut Scratch, out: &mut Vec<u32>) {
        let Scratch { best, cuts } = scratch;
        let bytes = text.as_bytes();
        best.clear();
        best.resize(bytes.len() + 1, UNREACHED);
        best[0].score = 0.0;
        for (start, character) in text.char_indices() {
            let here = best[start].score;
            let mut offer = |end: usize, id: u32, score: f64| {
                if here + score > best[end].score {
                    best[end] = Best { score: here + score, start: start as u32, id };
                }
            };
            let width = character.len_utf8();
            let mut whole = false;
            for (length, (id, score)) in self.tokens.prefixes(&bytes[start..]) {
                // A token that ends inside a character leads nowhere.
                if text.is_char_boundary(start + length) {
                    whole |= length == width;
                    offer(start + length, id, score);
                }
            }
            if !whole {
                offer(start + width, NONE, self.unknown_score);
            }
        }
        cuts.clear();
        let mut end = bytes.len();
        while end > 0 {
            let Best { start, id, .. } = best[end];
            match cuts.last_mut() {
                // Runs of unknown characters count as one.
                Some(next) if id == NONE && next.2 == NONE => next.0 = start,
                _ => cuts.push((start, end as u32, id)),
            }
            end = start as usize;
        }
        for &(start, end, id) in cuts.iter().rev() {
            if id != NONE {
                out.push(id);
                continue;
            }
            let piece = &bytes[start as usize..end as usize];
            let before = out.len();
            out.extend(piece.iter().map_while(|&byte| self.bytes[usize::from(byte)]));
            if out.len() - before < piece.len() {
                out.truncate(before);
                out.extend(unknown);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The best sum of scores by trying every way.
    fn best_sum(tokens: &[(String, f32)], unknown: f64, text: &str) -> f64 {
        let Some(character) = text.chars().next() else { return 0.0 };
        let mut best = f64::NEG_INFINITY;
        let mut single = false;
        for (token, score) in tokens {
            if let Some(rest) = text.strip_prefix(token.as_str()) {
                single |= token.len() == character.len_utf8();
                best = best.max(f64::from(*score) + best_sum(tokens, unknown, rest));
            }
        }
        if !single {
            best = best.max(unknown + best_sum(tokens, unknown, &text[character.len_utf8()..]));
        }
        best
    }

    proptest! {
        #[test]
        fn equals_trying_every_way(
            text in "[abé]{0,9}",
            tokens in prop::collection::btree_map("[abé]{1,4}", -8_i8..0, 0..12),
        ) {
            let tokens: Vec<_> = tokens.into_iter().map(|(token, score)| (token, f32::from(score))).collect();
            let rows = tokens.iter().enumerate().map(|(id, (token, score))| (token.as_bytes(), id as u32, *score));
            let model = Unigram::new(rows, |_| None);
            let mut out = Vec::new();
            model.encode(&text, Some(99), &mut Scratch::default(), &mut out);
            // An unknown run is as many characters as the text has beyond its tokens.
            let known: usize = out.iter().filter(|&&id| id != 99).map(|&id| tokens[id as usize].0.chars().count()).sum();
            let unknown = (text.chars().count() - known) as f64 * model.unknown_score;
            let sum: f64 = out.iter().filter(|&&id| id != 99).map(|&id| f64::from(tokens[id as usize].1)).sum();
            prop_assert_eq!(sum + unknown, best_sum(&tokens, model.unknown_score, &text));
        }
    }

    #[test]
    fn unknown_characters() {
        let tokens = [(&b"a"[..], 0, -1.0), (&b"ab"[..], 1, -1.5), (&b"b"[..], 2, -2.0)];
        let model = Unigram::new(tokens, |_| None);
        assert_eq!(model.bytes_without_token(), 256);
        let encode = |model: &Unigram, text: &str, unknown| {
            let mut out = Vec::new();
            model.encode(text, unknown, &mut Scratch::default(), &mut out);
            out
        };
        assert_eq!(encode(&model, "abxéa", Some(9)), [1, 9, 0]);
        assert_eq!(encode(&model, "xab", None), [1]);
        assert!(encode(&model, "", Some(9)).is_empty());
        let bytes = Unigram::new(tokens, |byte| (byte >= 0x80).then_some(u32::from(byte)));
        assert_eq!(encode(&bytes, "aéb", Some(9)), [0, 0xc3, 0xa9, 2]);
        assert_eq!(encode(&bytes, "aéxb", Some(9)), [0, 9, 2], "a run is spelled as a whole or not at all");
    }
}
