//! GPT-2's alphabet: byte-level vocabularies write each byte as one printable character.
//!
//! The printable characters of Latin-1 stand for themselves; the other 68 bytes, in order, are U+0100 onwards.

/// Whether a byte stands for itself.
const fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// For U+0000 to U+0143 the byte it stands for, or -1.
const BYTES: [i16; 324] = {
    let mut table = [-1; 324];
    let mut shifted = 0;
    let mut byte = 0;
    while byte < 256 {
        if is_printable(byte as u8) {
            table[byte] = byte as i16;
        } else {
            table[256 + shifted] = byte as i16;
            shifted += 1;
        }
        byte += 1;
    }
    table
};

/// The byte that a character stands for.
fn byte_of(character: char) -> Option<u8> {
    let value = *BYTES.get(character as usize)?;
    u8::try_from(value).ok()
}

/// Appends the bytes that `text` stands for to `out`; `false` (and nothing appended) where it leaves the alphabet.
pub(super) fn decode(text: &str, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    for character in text.chars() {
        match byte_of(character) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                return false;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut seen: Vec<u8> = (0..400).filter_map(char::from_u32).filter_map(byte_of).collect();
        assert_eq!(seen.len(), 256);
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 256);
        assert_eq!(
            (byte_of('Ġ'), byte_of('Ċ'), byte_of('!'), byte_of('Ń')),
            (Some(b' '), Some(b'\n'), Some(b'!'), Some(0xad))
        );
        assert_eq!((byte_of(' '), byte_of('→')), (None, None));
    }
}
