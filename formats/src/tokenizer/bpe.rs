//! Byte-pair merging in O(n log n): a linked list of symbols and a heap of the merges that are possible.
//!
//! The rule (Sennrich et al. 2016): of all neighbouring pairs, merge the one that was learned first; of equals, the
//! leftmost.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// A byte without a token; no merge has it.
const NO_TOKEN: u32 = u32::MAX;
/// A symbol that was merged into the one before it.
const MERGED: u32 = u32::MAX - 1;
/// The end of the list.
const END: u32 = u32::MAX;

/// Learned merges of a vocabulary.
#[derive(Clone, Debug)]
pub(super) struct Merges {
    byte_ids: Box<[u32; 256]>,
    /// (left, right) to (rank, merged).
    pairs: HashMap<(u32, u32), (u32, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    id: u32,
    previous: u32,
    next: u32,
}

/// A possible merge; the order of the fields is the order of the heap.
type Candidate = Reverse<(u32, u32, u32, u32)>; // rank, position, left, right

/// Buffers kept between pieces.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Candidate>,
}

impl Merges {
    /// No merges yet; `byte_ids` gives the token of each single byte.
    pub(super) fn new(byte_ids: impl Fn(u8) -> Option<u32>) -> Merges {
        let mut table = Box::new([NO_TOKEN; 256]);
        for byte in 0..=255 {
            table[usize::from(byte)] = byte_ids(byte).unwrap_or(NO_TOKEN);
        }
        Merges { byte_ids: table, pairs: HashMap::new() }
    }

    /// Adds the next merge; a pair that was there already keeps its earlier rank.
    pub(super) fn push(&mut self, left: u32, right: u32, merged: u32) {
        let rank = self.pairs.len() as u32; // fewer than the file's bytes, and the header is under 2^30
        self.pairs.entry((left, right)).or_insert((rank, merged));
    }

    /// Bytes that have no token.
    pub(super) fn bytes_without_token(&self) -> Vec<u8> {
        (0..=255).filter(|&byte| self.byte_ids[usize::from(byte)] == NO_TOKEN).collect()
    }

    /// Appends the tokens of `piece` (less than 4 GiB); a byte without a token becomes `unknown`, or nothing.
    pub(super) fn encode(
        &self,
        piece: &[u8],
        unknown: Option<u32>,
        scratch: &mut Scratch,
        out: &mut Vec<u32>,
    ) {
        let Scratch { symbols, heap } = scratch;
        symbols.clear();
        heap.clear();
        let last = piece.len().saturating_sub(1);
        symbols.extend(piece.iter().enumerate().map(|(at, &byte)| Symbol {
            id: self.byte_ids[usize::from(byte)],
            previous: if at == 0 { END } else { at as u32 - 1 },
            next: if at == last { END } else { at as u32 + 1 },
        }));
        for at in 0..last {
            self.offer(symbols, at as u32, heap);
        }
        while let Some(Reverse((_, at, left, right))) = heap.pop() {
            let symbol = symbols[at as usize];
            // Stale where either side has been merged since.
            if symbol.id != left || symbol.next == END || symbols[symbol.next as usize].id != right {
                continue;
            }
            let Some(&(_, merged)) = self.pairs.get(&(left, right)) else { continue };
            let gone = symbol.next as usize;
            let after = symbols[gone].next;
            symbols[gone].id = MERGED;
            symbols[at as usize] = Symbol { id: merged, next: after, ..symbol };
            if after != END {
                symbols[after as usize].previous = at;
                self.offer(symbols, at, heap);
            }
            if symbol.previous != END {
                self.offer(symbols, symbol.previous, heap);
            }
        }
        out.extend(symbols.iter().filter_map(|symbol| match symbol.id {
            MERGED => None,
            NO_TOKEN => unknown,
            id => Some(id),
        }));
    }

    fn offer(&self, symbols: &[Symbol], at: u32, heap: &mut BinaryHeap<Candidate>) {
        let left = symbols[at as usize];
        let right = symbols[left.next as usize].id;
        if let Some(&(rank, _)) = self.pairs.get(&(left.id, right)) {
            heap.push(Reverse((rank, at, left.id, right)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rule taken literally, in O(n^2).
    fn slow(merges: &Merges, piece: &[u8]) -> Vec<u32> {
        let mut ids: Vec<u32> = piece.iter().map(|&byte| merges.byte_ids[usize::from(byte)]).collect();
        loop {
            let best = ids.windows(2).enumerate().filter_map(|(at, pair)| {
                merges.pairs.get(&(pair[0], pair[1])).map(|&(rank, merged)| (rank, at, merged))
            });
            let Some((_, at, merged)) = best.min() else { return ids };
            ids.splice(at..at + 2, [merged]);
        }
    }

    proptest! {
        #[test]
        fn equals_the_literal_rule(
            piece in prop::collection::vec(0_u8..4, 0..60),
            rules in prop::collection::vec((0_u32..12, 0_u32..12), 0..12),
        ) {
            let mut merges = Merges::new(|byte| Some(u32::from(byte)));
            // A merge may only join tokens that exist before it, as in learned vocabularies.
            for (number, &(left, right)) in rules.iter().enumerate() {
                let known = 4 + number as u32;
                merges.push(left % known, right % known, known);
            }
            let mut out = Vec::new();
            merges.encode(&piece, None, &mut Scratch::default(), &mut out);
            prop_assert_eq!(out, slow(&merges, &piece));
        }
    }

    #[test]
    fn bytes_without_a_token() {
        let merges = Merges::new(|byte| (byte < 128).then_some(u32::from(byte)));
        assert_eq!(merges.bytes_without_token().len(), 128);
        let mut out = Vec::new();
        merges.encode(&[1, 200, 2], Some(9), &mut Scratch::default(), &mut out);
        merges.encode(&[1, 200, 2], None, &mut Scratch::default(), &mut out);
        merges.encode(&[], None, &mut Scratch::default(), &mut out);
        assert_eq!(out, [1, 9, 2, 1, 2]);
    }
}
