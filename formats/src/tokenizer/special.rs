//! Finds special tokens in text: leftmost, and of those the longest, by a trie; at most one walk of it per byte.

use std::collections::HashMap;

/// A trie of special tokens' texts.
#[derive(Clone, Debug)]
pub(super) struct SpecialTokens {
    edges: HashMap<(u32, u8), u32>,
    /// By node: the token that ends there, and whether it is matched even where special tokens are not asked for.
    ends: Vec<Option<(u32, bool)>>,
    starts: Box<[bool; 256]>,
}

/// A stretch of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

impl SpecialTokens {
    pub(super) fn new() -> SpecialTokens {
        SpecialTokens { edges: HashMap::new(), ends: vec![None], starts: Box::new([false; 256]) }
    }

    /// Adds a token; `always` are those that are matched in any text (user-defined ones).
    pub(super) fn push(&mut self, text: &[u8], id: u32, always: bool) {
        let Some(&start) = text.first() else { return }; // an empty text would match everywhere
        self.starts[usize::from(start)] = true;
        let mut node = 0;
        for &byte in text {
            let fresh = self.ends.len() as u32;
            node = *self.edges.entry((node, byte)).or_insert(fresh);
            if node == fresh {
                self.ends.push(None);
            }
        }
        self.ends[node as usize] = Some((id, always));
    }

    /// The longest token at the start of `bytes`, and its length.
    fn longest(&self, bytes: &[u8], all: bool) -> Option<(u32, usize)> {
        let mut node = 0;
        let mut found = None;
        for (at, &byte) in bytes.iter().enumerate() {
            let Some(&next) = self.edges.get(&(node, byte)) else { break };
            node = next;
            match self.ends[node as usize] {
                Some((id, always)) if all || always => found = Some((id, at + 1)),
                _ => {}
            }
        }
        found
    }

    /// Cuts `text` at special tokens: all of them, or only those that are always matched.
    pub(super) fn fragments<'t>(&self, text: &'t str, all: bool) -> Vec<Fragment<'t>> {
        let bytes = text.as_bytes();
        let mut fragments = Vec::new();
        let (mut start, mut at) = (0, 0);
        while at < bytes.len() {
            let found =
                if self.starts[usize::from(bytes[at])] { self.longest(&bytes[at..], all) } else { None };
            match found {
                Some((id, length)) => {
                    if at > start {
                        fragments.push(Fragment::Text(&text[start..at]));
                    }
                    fragments.push(Fragment::Token(id));
                    at += length;
                    start = at;
                }
                None => at += 1,
            }
        }
        if at > start {
            fragments.push(Fragment::Text(&text[start..]));
        }
        fragments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftmost_longest_and_only_what_is_asked_for() {
        let mut special = SpecialTokens::new();
        for (id, text) in ["<a>", "<a><b>", "é!"].iter().enumerate() {
            special.push(text.as_bytes(), id as u32, *text == "é!");
        }
        special.push(b"", 9, true);
        assert_eq!(
            special.fragments("x<a><b><a>yé!", true),
            [
                Fragment::Text("x"),
                Fragment::Token(1),
                Fragment::Token(0),
                Fragment::Text("y"),
                Fragment::Token(2)
            ]
        );
        assert_eq!(
            special.fragments("<a>é!<", false),
            [Fragment::Text("<a>"), Fragment::Token(2), Fragment::Text("<")]
        );
        assert!(special.fragments("", true).is_empty());
    }
}
