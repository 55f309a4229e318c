//! Cuts text into pieces before merging, by hand-written splitters that look at each character a bounded number of times.
//!
//! Vocabularies define their splits by regular expressions. Backtracking engines need a stack frame or a retry per
//! character of a long run; the few alternatives that occur need neither. Each function here states the expression that
//! it equals, with alternatives tried in order. `\s` is Unicode's White_Space, `\p{L}`, `\p{N}`, `\p{P}` general
//! categories, and the end of a piece is the end of the text for a look-ahead.

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// One cut through every piece that the cuts before it left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|
    /// \s+(?!\S)|\s+`
    Llama3 {
        /// Digits that stay together.
        digits: usize,
    },
    /// `\p{N}`, the rest as it is.
    EachNumber,
    /// `\p{N}+`, the rest as it is.
    Numbers,
    /// `[0-9][0-9][0-9]`, the rest as it is.
    ThreeDigits,
    /// ``[\p{P}$+<=>^~|`]+`` (the backtick where asked for), the rest as it is.
    Punctuation {
        /// Whether the backtick counts.
        backtick: bool,
    },
    /// `[\r\n]`, the rest as it is.
    EachLineEnd,
    /// `\s?\p{L}+`, the rest as it is.
    SpacedLetters,
    /// `\s?\p{P}+`, the rest as it is.
    SpacedPunctuation,
    /// `[一-龥ࠀ-一가-\u{d7ff}]+`, the rest as it is: most scripts from Samaritan to Katakana, Han, Hangul.
    EastAsian,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Number,
    Space,
    Other,
}

fn class(character: char) -> Class {
    if character.is_ascii() {
        return match character {
            'a'..='z' | 'A'..='Z' => Class::Letter,
            '0'..='9' => Class::Number,
            ' ' | '\t'..='\r' => Class::Space,
            _ => Class::Other,
        };
    }
    if character.is_whitespace() {
        return Class::Space;
    }
    match character.general_category_group() {
        GeneralCategoryGroup::Letter => Class::Letter,
        GeneralCategoryGroup::Number => Class::Number,
        _ => Class::Other,
    }
}

/// The ends of the pieces that `cuts` make of `text`, in order; the last is its length.
pub(super) fn pieces(text: &str, cuts: &[Cut]) -> Vec<usize> {
    let mut ends = if text.is_empty() { Vec::new() } else { vec![text.len()] };
    for cut in cuts {
        let mut finer = Vec::with_capacity(ends.len());
        let mut start = 0;
        for end in ends {
            cut.apply(&text[start..end], start, &mut finer);
            start = end;
        }
        ends = finer;
    }
    ends
}

impl Cut {
    /// Appends the ends of the pieces of `text`, which starts at `base`.
    fn apply(self, text: &str, base: usize, ends: &mut Vec<usize>) {
        let mut at = 0;
        match self {
            Cut::Gpt2 | Cut::Llama3 { .. } => {
                while at < text.len() {
                    at = match self {
                        Cut::Llama3 { digits } => llama3(text, at, digits),
                        _ => gpt2(text, at),
                    };
                    ends.push(base + at);
                }
            }
            _ => {
                // Matches and the gaps between them are pieces.
                let mut gap = 0;
                while at < text.len() {
                    let end = self.match_at(text, at);
                    if end > at {
                        if at > gap {
                            ends.push(base + at);
                        }
                        ends.push(base + end);
                        (at, gap) = (end, end);
                    } else {
                        at = step(text, at);
                    }
                }
                if at > gap {
                    ends.push(base + at);
                }
            }
        }
    }

    /// The end of this cut's match at `at`, or `at` where there is none.
    fn match_at(self, text: &str, at: usize) -> usize {
        match self {
            Cut::EachNumber => match first(text, at) {
                Some(c) if class(c) == Class::Number => at + c.len_utf8(),
                _ => at,
            },
            Cut::Numbers => run(text, at, |c| class(c) == Class::Number),
            Cut::ThreeDigits => match text.as_bytes().get(at..at + 3) {
                Some(three) if three.iter().all(u8::is_ascii_digit) => at + 3,
                _ => at,
            },
            Cut::Punctuation { backtick } => run(text, at, |c| match c {
                '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|' => true,
                '`' => backtick,
                c => c.general_category_group() == GeneralCategoryGroup::Punctuation,
            }),
            Cut::EachLineEnd => match first(text, at) {
                Some('\r' | '\n') => at + 1,
                _ => at,
            },
            Cut::SpacedLetters => spaced(text, at, |c| class(c) == Class::Letter),
            Cut::SpacedPunctuation => {
                spaced(text, at, |c| c.general_category_group() == GeneralCategoryGroup::Punctuation)
            }
            Cut::EastAsian => {
                run(text, at, |c| matches!(c, '\u{800}'..='\u{9fa5}' | '\u{ac00}'..='\u{d7ff}'))
            }
            Cut::Gpt2 | Cut::Llama3 { .. } => at,
        }
    }
}

/// The end of `\s?` and a run of characters that satisfy `test` (no spaces), or `at` where there is none.
fn spaced(text: &str, at: usize, test: impl Fn(char) -> bool) -> usize {
    let body = match first(text, at) {
        Some(c) if class(c) == Class::Space => at + c.len_utf8(),
        _ => at,
    };
    let end = run(text, body, test);
    if end > body { end } else { at }
}

fn first(text: &str, at: usize) -> Option<char> {
    text[at..].chars().next()
}

/// The position after the character at `at`.
fn step(text: &str, at: usize) -> usize {
    first(text, at).map_or(text.len(), |character| at + character.len_utf8())
}

/// The end of the run of characters that satisfy `test`, from `at`.
fn run(text: &str, at: usize, test: impl Fn(char) -> bool) -> usize {
    text[at..].find(|character| !test(character)).map_or(text.len(), |length| at + length)
}

/// The end of `'s|'t|'re|'ve|'m|'ll|'d` at `at`; without regard to case, the long s counts as s.
fn contraction(text: &str, at: usize, any_case: bool) -> Option<usize> {
    let rest = text[at..].strip_prefix('\'')?;
    let mut letters = rest.chars();
    let mut next = || {
        let character = letters.next()?;
        match (any_case, character) {
            (true, 'ſ') => Some('s'),
            (true, c) => Some(c.to_ascii_lowercase()),
            (false, c) => Some(c),
        }
    };
    let first = next()?;
    match first {
        's' | 't' | 'm' | 'd' => Some(step(text, at + 1)),
        'r' | 'v' if next() == Some('e') => Some(at + 3),
        'l' if next() == Some('l') => Some(at + 3),
        _ => None,
    }
}

/// `\s+(?!\S)|\s+` over the run of spaces from `at` to `end`: all of it at the end of the text, else all but its last
/// character, which the next piece may want; but at least one.
fn spaces(text: &str, at: usize, end: usize) -> usize {
    if end == text.len() {
        return end;
    }
    let last = text[at..end].chars().next_back().map_or(0, char::len_utf8);
    if end - last > at { end - last } else { end }
}

fn gpt2(text: &str, at: usize) -> usize {
    if let Some(end) = contraction(text, at, false) {
        return end;
    }
    let Some(character) = first(text, at) else { return text.len() };
    // A space belongs to what follows it, unless that is a space, too.
    let body = if character == ' ' { at + 1 } else { at };
    let kind = first(text, body).map_or(Class::Space, class);
    if kind == Class::Space {
        return spaces(text, at, run(text, at, |c| class(c) == Class::Space));
    }
    run(text, body, |c| class(c) == kind)
}

fn llama3(text: &str, at: usize, digits: usize) -> usize {
    if let Some(end) = contraction(text, at, true) {
        return end;
    }
    let Some(character) = first(text, at) else { return text.len() };
    let letter = |c| class(c) == Class::Letter;
    let kind = class(character);
    let next = at + character.len_utf8();
    match kind {
        Class::Letter => return run(text, next, letter),
        Class::Number => {
            let others = text[next..].chars().take(digits - 1).take_while(|&c| class(c) == Class::Number);
            return next + others.map(char::len_utf8).sum::<usize>();
        }
        _ => {}
    }
    // One character that is no line end may lead a word.
    if !matches!(character, '\r' | '\n') && first(text, next).is_some_and(letter) {
        return run(text, next, letter);
    }
    let body = if character == ' ' { next } else { at };
    if first(text, body).is_some_and(|c| class(c) == Class::Other) {
        let end = run(text, body, |c| class(c) == Class::Other);
        return run(text, end, |c| matches!(c, '\r' | '\n'));
    }
    let end = run(text, at, |c| class(c) == Class::Space);
    match text[at..end].rfind(['\r', '\n']) {
        Some(line_end) => at + line_end + 1,
        None => spaces(text, at, end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(text: &str, cuts: &[Cut]) -> Vec<String> {
        let mut start = 0;
        let mut out = Vec::new();
        for end in pieces(text, cuts) {
            out.push(text[start..end].to_owned());
            start = end;
        }
        out
    }

    #[test]
    fn gpt2_by_hand() {
        let cut = |text| cut(text, &[Cut::Gpt2]);
        assert_eq!(cut("I'll go, it's  fine"), ["I", "'ll", " go", ",", " it", "'s", " ", " fine"]);
        assert_eq!(cut("a1b22 333"), ["a", "1", "b", "22", " 333"]);
        assert_eq!(cut("x \n\n y  "), ["x", " \n\n", " y", "  "]);
        assert_eq!(cut("IT'S"), ["IT", "'", "S"]);
        assert_eq!(cut("\u{3000}\u{3000}e\u{301}"), ["\u{3000}", "\u{3000}", "e", "\u{301}"]);
        assert_eq!(cut("  'tis"), [" ", " '", "tis"]);
        assert!(cut("").is_empty());
    }

    #[test]
    fn llama3_and_qwen2_by_hand() {
        let three = |text| cut(text, &[Cut::Llama3 { digits: 3 }]);
        assert_eq!(
            three("IT'S 12345.\n\nGo(now)"),
            ["IT", "'S", " ", "123", "45", ".\n\n", "Go", "(now", ")"]
        );
        assert_eq!(three("a \n \n  b"), ["a", " \n \n", " ", " b"]);
        assert_eq!(three("\tx  \t"), ["\tx", "  \t"]);
        assert_eq!(three("'ſo"), ["'ſ", "o"]);
        assert_eq!(three(" !?\r\n x"), [" !?\r\n", " x"]);
        assert_eq!(cut("2024", &[Cut::Llama3 { digits: 1 }]), ["2", "0", "2", "4"]);
    }

    #[test]
    fn cuts_in_a_row_by_hand() {
        let smollm = |text| cut(text, &[Cut::EachNumber, Cut::Gpt2]);
        assert_eq!(smollm("a  12 b"), ["a", "  ", "1", "2", " b"]);
        assert_eq!(smollm("½٣x"), ["½", "٣", "x"]);
        let falcon = |text| cut(text, &[Cut::Punctuation { backtick: true }, Cut::Gpt2, Cut::ThreeDigits]);
        assert_eq!(
            falcon("a `b` 12345"),
            ["a", " ", "`", "b", "`", " ", "123", "45"].map(String::from).to_vec()
        );
        assert_eq!(cut("ab12c", &[Cut::Numbers]), ["ab", "12", "c"]);
        let deepseek = |text| {
            let east = [Cut::SpacedPunctuation, Cut::EastAsian, Cut::EachNumber];
            cut(text, &[&[Cut::EachLineEnd, Cut::SpacedLetters][..], &east].concat())
        };
        assert_eq!(deepseek("a  b\n\n12 ."), ["a", " ", " b", "\n", "\n", "1", "2", " ."]);
        assert_eq!(deepseek(" 中文かな。  +"), [" ", "中文かな", "。", "  +"]);
    }

    proptest! {
        #[test]
        fn pieces_cover_the_text_in_order(text in "\\PC*|[ \t\r\na'sſ1٣.\u{301}中]*") {
            for cuts in [
                &[Cut::Gpt2][..],
                &[Cut::EachNumber, Cut::Gpt2],
                &[Cut::Llama3 { digits: 3 }],
                &[Cut::Punctuation { backtick: true }, Cut::Gpt2, Cut::Numbers, Cut::ThreeDigits],
                &[Cut::EachLineEnd, Cut::SpacedLetters, Cut::SpacedPunctuation, Cut::EastAsian],
            ] {
                let ends = pieces(&text, cuts);
                prop_assert!(ends.windows(2).all(|pair| pair[0] < pair[1]));
                prop_assert!(ends.iter().all(|&end| text.is_char_boundary(end)));
                prop_assert_eq!(ends.last().copied().unwrap_or(0), text.len());
            }
        }
    }
}
