//! SentencePiece's `precompiled_charsmap`: which character sequences are rewritten to which, as a double-array trie.
//!
//! Layout (of `sentencepiece`, `Normalizer::DecodePrecompiledCharsMap`): the trie's length in bytes, u32 little-endian;
//! its units, u32 each; then texts, each ended by a zero byte. A unit of Darts-clone holds a label (bits 0 to 7, and bit
//! 31 set in units that are values), an offset (from bit 10, shifted by eight where bit 9 is set) and whether a value
//! follows (bit 8). The value is where the replacement starts.

/// The rewriting rules of a vocabulary.
#[derive(Clone, Debug)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    texts: Vec<u8>,
}

impl Charsmap {
    /// From the bytes of the key.
    ///
    /// # Errors
    /// What is wrong with them, as a predicate.
    pub(super) fn parse(bytes: &[u8]) -> Result<Charsmap, String> {
        let Some((length, rest)) = bytes.split_first_chunk::<4>() else {
            return Err(format!("holds {} bytes; at least 4 are wanted", bytes.len()));
        };
        let length = u32::from_le_bytes(*length) as usize;
        if !length.is_multiple_of(4) || length > rest.len() {
            return Err(format!("claims a trie of {length} bytes, but {} bytes follow", rest.len()));
        }
        let (units, texts) = rest.split_at(length);
        let units =
            units.chunks_exact(4).map(|unit| u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]]));
        if std::str::from_utf8(texts).is_err() {
            return Err("holds replacements that are not UTF-8".into());
        }
        Ok(Charsmap { units: units.collect(), texts: texts.to_vec() })
    }

    /// The longest rule for the start of `text`: bytes that it takes, and where its replacement is.
    fn longest(&self, text: &[u8]) -> Option<(usize, usize)> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let mut at = offset(*self.units.first()?);
        let mut found = None;
        for (taken, &byte) in text.iter().enumerate() {
            at ^= usize::from(byte);
            let Some(&unit) = self.units.get(at) else { break };
            if unit & (1 << 31 | 0xff) != u32::from(byte) {
                break;
            }
            at ^= offset(unit);
            if unit >> 8 & 1 == 1
                && let Some(&value) = self.units.get(at)
            {
                found = Some((taken + 1, (value & 0x7fff_ffff) as usize));
            }
        }
        found
    }

    /// Rewrites a text from left to right, by the longest rule at each place.
    pub(super) fn apply(&self, text: &str) -> String {
        let mut out = Vec::with_capacity(text.len());
        let bytes = text.as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            let rule = self.longest(&bytes[at..]).filter(|(taken, _)| text.is_char_boundary(at + taken));
            let replacement = rule.and_then(|(taken, start)| {
                let rest = self.texts.get(start..)?;
                Some((taken, rest.split(|&byte| byte == 0).next()?))
            });
            let (taken, replacement) = replacement.unwrap_or_else(|| {
                let width = text[at..].chars().next().map_or(1, char::len_utf8);
                (width, &bytes[at..at + width])
            });
            out.extend_from_slice(replacement);
            at += taken;
        }
        // A replacement that starts inside a character makes no text; only a damaged file has one.
        String::from_utf8(out).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trie of `a` to "X", `ab` to "" and nothing else, laid out by hand.
    fn map() -> Vec<u8> {
        let mut units = vec![0_u32; 1024];
        let set = |units: &mut Vec<u32>, at: usize, unit: u32| units[at] = unit;
        set(&mut units, 0, 256 << 10); // root: children at 256
        set(&mut units, 256 ^ 0x61, 0x61 | 1 << 8 | 512 << 10 ^ (0x61 << 10)); // `a`: at 353, children at 353 ^ offset
        let a = 256 ^ 0x61;
        let base = a ^ (512 ^ 0x61);
        set(&mut units, base, 1 << 31);
        set(&mut units, base ^ 0x62, 0x62 | 1 << 8 | 3 << 10);
        let b = base ^ 0x62;
        set(&mut units, b ^ 3, 1 << 31 | 1);
        let mut bytes = (units.len() as u32 * 4).to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(b"X\0\0");
        bytes
    }

    #[test]
    fn the_longest_rule_wins() {
        let map = Charsmap::parse(&map()).unwrap();
        assert_eq!(map.apply("a-ab-aab-é\0"), "X--X-é\0");
        assert_eq!(map.apply(""), "");
    }

    #[test]
    fn damaged_maps() {
        for (bytes, wanted) in [
            (&[1, 2][..], "2 bytes"),
            (&[8, 0, 0, 0, 1], "trie of 8 bytes"),
            (&[3, 0, 0, 0, 1, 2, 3], "trie of 3 bytes"),
            (&[0, 0, 0, 0, 0xff], "not UTF-8"),
        ] {
            assert!(Charsmap::parse(bytes).unwrap_err().contains(wanted));
        }
        // Offsets that point anywhere: no panic.
        for fill in [u32::MAX, 0x8000_0161, 0x0000_0361, 1 << 9 | 1 << 8 | 0x61] {
            let mut bytes = 64_u32.to_le_bytes().to_vec();
            bytes.extend([fill; 16].iter().flat_map(|unit| unit.to_le_bytes()));
            bytes.extend("é".as_bytes());
            Charsmap::parse(&bytes).unwrap().apply("aaé");
        }
        assert_eq!(Charsmap::parse(&[0; 4]).unwrap().apply("aé"), "aé");
    }
}
