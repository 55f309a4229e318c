//! Finds special tokens in text: leftmost, and of those the longest, by a trie; at most one walk of it per byte.

use super::trie::Trie;

/// Special tokens by their texts.
#[derive(Clone, Debug)]
pub(super) struct SpecialTokens {
    /// The id, and whether it is matched even where special tokens are not asked for.
    texts: Trie<(u32, bool)>,
}

/// A stretch of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

impl SpecialTokens {
    pub(super) fn new() -> SpecialTokens {
        SpecialTokens { texts: Trie::new() }
    }

    /// Adds a token; `always` are those that are matched in any text (user-defined ones).
    pub(super) fn push(&mut self, text: &[u8], id: u32, always: bool) {
        self.texts.push(text, (id, always));
    }

    /// The longest token at the start of `bytes`, and its length.
    fn longest(&self, bytes: &[u8], all: bool) -> Option<(u32, usize)> {
        let found = self.texts.prefixes(bytes).filter(|(_, (_, always))| all || *always).last();
        found.map(|(length, (id, _))| (id, length))
    }

    /// Cuts `text` at special tokens: all of them, or only those that are always matched.
    pub(super) fn fragments<'t>(&self, text: &'t str, all: bool) -> Vec<Fragment<'t>> {
        let bytes = text.as_bytes();
        let mut fragments = Vec::new();
        let (mut start, mut at) = (0, 0);
        while at < bytes.len() {
            let found = if self.texts.may_start(bytes[at]) { self.longest(&bytes[at..], all) } else { None };
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
