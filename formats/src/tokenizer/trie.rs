//! A trie of byte strings: which of them start a text, walking it once.

use std::collections::HashMap;

/// Byte strings with a value each.
#[derive(Clone, Debug)]
pub(super) struct Trie<V> {
    edges: HashMap<(u32, u8), u32>,
    /// By node: the value of the string that ends there.
    ends: Vec<Option<V>>,
    /// Which bytes a string starts with.
    starts: Box<[bool; 256]>,
}

impl<V: Copy> Trie<V> {
    pub(super) fn new() -> Trie<V> {
        Trie { edges: HashMap::new(), ends: vec![None], starts: Box::new([false; 256]) }
    }

    /// Adds a string, or replaces its value; the empty one is left out, for it would match everywhere.
    pub(super) fn push(&mut self, string: &[u8], value: V) {
        let Some(&first) = string.first() else { return };
        self.starts[usize::from(first)] = true;
        let mut node = 0;
        for &byte in string {
            let fresh = self.ends.len() as u32; // fewer than the header's bytes
            node = *self.edges.entry((node, byte)).or_insert(fresh);
            if node == fresh {
                self.ends.push(None);
            }
        }
        self.ends[node as usize] = Some(value);
    }

    /// Whether a string starts with this byte.
    pub(super) fn may_start(&self, byte: u8) -> bool {
        self.starts[usize::from(byte)]
    }

    /// Lengths and values of the strings that `text` starts with, shortest first.
    pub(super) fn prefixes(&self, text: &[u8]) -> impl Iterator<Item = (usize, V)> {
        let mut node = 0;
        let walk = text.iter().map_while(move |&byte| {
            node = *self.edges.get(&(node, byte))?;
            Some(self.ends[node as usize])
        });
        walk.enumerate().filter_map(|(at, end)| Some((at + 1, end?)))
    }
}
