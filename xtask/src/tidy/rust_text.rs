//! Rust source without its comments, strings and test modules: what a search for a word may look at.

/// `source` with comments and the content of string and character literals replaced by spaces; lines are kept.
pub(super) fn code_only(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes.get(at + 1) == Some(&b'/') => line_end(bytes, at),
            b'/' if bytes.get(at + 1) == Some(&b'*') => comment_end(bytes, at),
            b'"' => string_end(bytes, at + 1),
            b'r' if !follows_word(bytes, at) => raw_string_end(bytes, at).unwrap_or(at + 1),
            b'\'' => character_end(bytes, at),
            _ => at + 1,
        };
        if end > at + 1 {
            out[at..end].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
        }
        at = end;
    }
    // Only whole literals and comments were replaced, so what is left is UTF-8 still.
    String::from_utf8_lossy(&out).into_owned()
}

/// Whether `code` has `word` as a word of its own.
pub(super) fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        !code[..at].ends_with(is_name) && !code[at + word.len()..].starts_with(is_name)
    })
}

fn follows_word(bytes: &[u8], at: usize) -> bool {
    at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_') && bytes[at - 1] != b'b'
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|&b| b == b'\n').map_or(bytes.len(), |n| at + n)
}

fn comment_end(bytes: &[u8], at: usize) -> usize {
    let (mut depth, mut i) = (0usize, at);
    while i < bytes.len() {
        match bytes[i..] {
            [b'/', b'*', ..] => (depth, i) = (depth + 1, i + 2),
            [b'*', b'/', ..] => {
                (depth, i) = (depth - 1, i + 2);
                if depth == 0 {
                    return i;
                }
            }
            _ => i += 1,
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn raw_string_end(bytes: &[u8], at: usize) -> Option<usize> {
    let hashes = bytes[at + 1..].iter().take_while(|&&b| b == b'#').count();
    let open = at + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let rest = &bytes[open + 1..];
    let end = rest.windows(close.len()).position(|w| w == close).map_or(rest.len(), |n| n + close.len());
    Some(open + 1 + end)
}

/// The end of a character literal; a lifetime's quote stands alone.
fn character_end(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at + 1..];
    if rest.first() == Some(&b'\\') {
        // The escaped character itself may be a quote.
        return rest.iter().skip(2).position(|&b| b == b'\'').map_or(at + 1, |n| at + n + 4);
    }
    let width = match rest.first() {
        Some(b) if *b >= 0xF0 => 4,
        Some(b) if *b >= 0xE0 => 3,
        Some(b) if *b >= 0xC0 => 2,
        _ => 1,
    };
    if rest.get(width) == Some(&b'\'') { at + width + 2 } else { at + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_what_is_no_code() {
        let source = "let a = \"unsafe \\\" x\"; // unsafe\nlet b = 'x'; let c = '\\''; /* unsafe /* y */ z */ fn f<'a>() {}\n\
                      let r = r#\"unsafe \" \"#; let n = 'é'; keep";
        let code = code_only(source);
        assert!(!code.contains("unsafe") && !code.contains('x') && !code.contains('z'), "{code}");
        assert!(code.contains("fn f<'a>() {}") && code.ends_with("keep"), "{code}");
        assert_eq!(code.lines().count(), source.lines().count());
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("unsafe { }", "unsafe"));
        assert!(!has_word("unsafe_code", "unsafe"));
        assert!(!has_word("not_unsafe", "unsafe"));
    }
}
