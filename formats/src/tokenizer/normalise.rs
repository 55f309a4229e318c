//! What a tokenizer does to a text before it splits it: Unicode normal forms, replacements, white space.
//!
//! The steps are SentencePiece's, and those of a `tokenizer.json`'s `normalizer` that models of GGUF's kinds of tokenizers
//! have, as [Hugging Face](https://huggingface.co/docs/tokenizers) documents them: a file converted from such a folder
//! keeps them in a key of ours. In vocabularies that write a space as U+2581 the steps write the space.

use std::borrow::Cow;

use serde_json::Value as Json;
use unicode_normalization::UnicodeNormalization;

use super::charsmap::Charsmap;

/// Steps in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Normaliser {
    steps: Vec<Step>,
}

#[derive(Clone, Debug)]
enum Step {
    Nfc,
    Nfkc,
    Replace {
        from: String,
        to: String,
    },
    /// Two or more spaces become this.
    Runs {
        to: String,
    },
    /// Without white space at the ends.
    Strip {
        left: bool,
        right: bool,
    },
    Prepend(String),
    Charsmap(Box<Charsmap>),
    /// Words between any white space, with one space between them.
    Words,
}

impl Normaliser {
    /// From the object `normalizer` of a `tokenizer.json`; `sentence` where U+2581 stands for a space.
    ///
    /// # Errors
    /// What is not known here or damaged, as a predicate.
    pub(crate) fn from_json(json: &Json, sentence: bool) -> Result<Normaliser, String> {
        let mut steps = Vec::new();
        read(json, sentence, &mut steps, 0)?;
        Ok(Normaliser { steps })
    }

    /// SentencePiece's own: rewriting rules, and whether runs of spaces are made one.
    pub(super) fn sentence_piece(charsmap: Option<Charsmap>, collapse: bool) -> Normaliser {
        let mut steps: Vec<Step> = charsmap.map(|map| Step::Charsmap(Box::new(map))).into_iter().collect();
        if collapse {
            steps.push(Step::Runs { to: " ".into() });
            steps.push(Step::Strip { left: true, right: true });
        }
        Normaliser { steps }
    }

    /// Adds the step that leaves words with one space between them.
    pub(super) fn push_words(&mut self) {
        self.steps.push(Step::Words);
    }

    /// The text as the rest of the tokenizer takes it.
    pub(super) fn apply<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut text = Cow::Borrowed(text);
        for step in &self.steps {
            if let Some(changed) = step.apply(&text) {
                text = Cow::Owned(changed);
            }
        }
        text
    }
}

fn read(json: &Json, sentence: bool, steps: &mut Vec<Step>, depth: u32) -> Result<(), String> {
    let string = |value: &Json, what: &str| {
        let text = value.as_str().ok_or_else(|| format!("has a normaliser without {what}: {json}"))?;
        Ok::<String, String>(if sentence { text.replace('\u{2581}', " ") } else { text.to_owned() })
    };
    let step = match json["type"].as_str() {
        None if json.is_null() => return Ok(()),
        Some("Sequence") if depth < 8 => {
            for step in json["normalizers"].as_array().into_iter().flatten() {
                read(step, sentence, steps, depth + 1)?;
            }
            return Ok(());
        }
        Some("NFC") => Step::Nfc,
        Some("NFKC") => Step::Nfkc,
        Some("Strip") => {
            Step::Strip { left: json["strip_left"] != false, right: json["strip_right"] != false }
        }
        Some("Prepend") => Step::Prepend(string(&json["prepend"], "`prepend`")?),
        Some("Replace") => {
            let to = string(&json["content"], "`content`")?;
            match (&json["pattern"]["String"], json["pattern"]["Regex"].as_str()) {
                (_, Some(" {2,}")) => Step::Runs { to },
                (Json::String(from), _) if !from.is_empty() => {
                    Step::Replace { from: string(&json["pattern"]["String"], "`String`")?, to }
                }
                _ => return Err(format!("has a replacement of an unknown pattern: {}", json["pattern"])),
            }
        }
        Some("Precompiled") => {
            let text = json["precompiled_charsmap"].as_str().unwrap_or_default();
            let bytes = base64(text).ok_or("has a `precompiled_charsmap` that is not base64")?;
            if bytes.is_empty() {
                return Ok(());
            }
            let map =
                Charsmap::parse(&bytes).map_err(|problem| format!("`precompiled_charsmap` {problem}"))?;
            Step::Charsmap(Box::new(map))
        }
        other => {
            return Err(format!(
                "has a normaliser of kind {}, which is not known",
                other.unwrap_or("unnamed")
            ));
        }
    };
    // A space written as a space.
    if !matches!(&step, Step::Replace { from, to } if from == to) {
        steps.push(step);
    }
    Ok(())
}

impl Step {
    /// The changed text; nothing where it stays.
    fn apply(&self, text: &str) -> Option<String> {
        // ASCII is in every normal form.
        let plain = text.is_ascii();
        match self {
            Step::Nfc => (!plain).then(|| text.nfc().collect()),
            Step::Nfkc => (!plain).then(|| text.nfkc().collect()),
            Step::Replace { from, to } => {
                text.contains(from.as_str()).then(|| text.replace(from.as_str(), to))
            }
            Step::Runs { to } => text.contains("  ").then(|| runs(text, to)),
            Step::Strip { left, right } => {
                let kept = if *left { text.trim_start() } else { text };
                let kept = if *right { kept.trim_end() } else { kept };
                (kept.len() < text.len()).then(|| kept.to_owned())
            }
            Step::Prepend(prefix) => (!text.is_empty()).then(|| format!("{prefix}{text}")),
            Step::Charsmap(map) => Some(map.apply(text)),
            Step::Words => Some(text.split_whitespace().collect::<Vec<_>>().join(" ")),
        }
    }
}

fn runs(text: &str, to: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("  ") {
        out.push_str(&rest[..start]);
        out.push_str(to);
        rest = rest[start..].trim_start_matches(' ');
    }
    out.push_str(rest);
    out
}

/// Bytes of standard base64 (RFC 4648, section 4).
fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').as_bytes();
    let mut out = Vec::with_capacity(digits.len() / 4 * 3 + 2);
    for group in digits.chunks(4) {
        let mut bits = 0_u32;
        for &digit in group {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        let missing = 4 - group.len();
        if missing == 3 {
            return None;
        }
        bits <<= 6 * missing;
        out.extend_from_slice(&bits.to_be_bytes()[1..4 - missing]);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn apply(normaliser: Json, text: &str) -> String {
        Normaliser::from_json(&normaliser, true).unwrap().apply(text).into_owned()
    }

    #[test]
    fn steps_by_hand() {
        assert_eq!(apply(json!(null), "e\u{301}"), "e\u{301}");
        assert_eq!(apply(json!({"type": "NFC"}), "e\u{301}ﬁ"), "éﬁ");
        assert_eq!(apply(json!({"type": "NFKC"}), "ﬁ①e\u{301}"), "fi1é");
        assert_eq!(apply(json!({"type": "Strip", "strip_left": false, "strip_right": true}), " a \n"), " a");
        let spaces = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
        assert_eq!(
            apply(json!({"type": "Sequence", "normalizers": [spaces, {"type": "NFC"}]}), "a   b  "),
            "a b "
        );
        assert_eq!(
            apply(json!({"type": "Replace", "pattern": {"String": "``"}, "content": "\""}), "``a"),
            "\"a"
        );
        assert_eq!(apply(json!({"type": "Prepend", "prepend": "▁"}), "a"), " a");
        let mut words = Normaliser::default();
        words.push_words();
        assert_eq!(words.apply("\ta \n b "), "a b");
    }

    #[test]
    fn what_is_not_known_is_named() {
        for (json, wanted) in [
            (json!({"type": "Nmt"}), "kind Nmt"),
            (json!({"type": "Lowercase"}), "kind Lowercase"),
            (json!({}), "unnamed"),
            (json!({"type": "Prepend"}), "without `prepend`"),
            (json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}), "a+"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "A"}), "base64"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "////"}), "3 bytes"),
        ] {
            let problem = Normaliser::from_json(&json, false).unwrap_err();
            assert!(problem.contains(wanted), "{problem}");
        }
        let mut deep = json!(null);
        for _ in 0..100 {
            deep = json!({"type": "Sequence", "normalizers": [deep]});
        }
        assert!(Normaliser::from_json(&deep, false).is_err());
    }

    #[test]
    fn base64_by_hand() {
        assert_eq!(base64("aGk=").as_deref(), Some(&b"hi"[..]));
        assert_eq!(base64("aGkh").as_deref(), Some(&b"hi!"[..]));
        assert_eq!(base64("aA==").as_deref(), Some(&b"h"[..]));
        assert_eq!(base64(""), Some(Vec::new()));
        assert_eq!((base64("a"), base64("a-bc")), (None, None));
    }
}
