//! Ids: their topics, their text, and sample text made of them.

use crate::activity::STAYS;
use crate::random::Stream;
use crate::{Result, Shape};
use formats::gguf::{Array, GgufWriter};

/// The first ids are the 256 bytes, as every byte-level vocabulary has them.
const BYTES: u32 = 256;
/// The smallest vocabulary: the bytes and an end of text.
pub(crate) const FEWEST: u32 = BYTES + 1;
/// Ids of one topic, one behind the other.
const TOPIC: u32 = 64;

/// The topic of an id.
pub(crate) fn topic(id: u32) -> u32 {
    id / TOPIC
}

/// The id that the head foretells before `id`: the one before it in its topic, in a circle.
pub(crate) fn before(id: u32, vocabulary: u32) -> u32 {
    let first = topic(id) * TOPIC;
    let last = (first + TOPIC - 1).min(vocabulary - 1);
    if id == first { last } else { id - 1 }
}

/// The text of an id beyond the bytes and the end of text.
fn token_text(id: u32) -> String {
    format!("[{id}]")
}

/// The text of sampled ids, the tokenizer of [`write`](crate::write)'s models makes the same ids of it; bytes and ends of
/// text are left out.
pub fn sample_text(ids: &[u32]) -> String {
    ids.iter().filter(|&&id| id > BYTES).map(|&id| token_text(id)).collect()
}

/// `count` ids as a text has them: the next id is of the same topic with probability [`STAYS`].
pub fn sample_ids(shape: &Shape, seed: u64, count: usize) -> Vec<u32> {
    let mut stream = Stream::new(seed, "sample", 0);
    let mut id = 0;
    let mut ids = Vec::with_capacity(count);
    for index in 0..count {
        let stays = index > 0 && (stream.below(1 << 20) as f64) < STAYS * f64::from(1 << 20);
        let (first, length) = match stays {
            true => (topic(id) * TOPIC, TOPIC.min(shape.vocabulary - topic(id) * TOPIC)),
            false => (0, shape.vocabulary),
        };
        id = first + stream.below(u64::from(length)) as u32;
        ids.push(id);
    }
    ids
}

/// Writes the keys of a byte-level tokenizer without merges: ids beyond the bytes are words in brackets, `[300]`.
pub(crate) fn set_tokenizer(file: &mut GgufWriter<'_>, shape: &Shape) -> Result<()> {
    let tokens: Vec<String> = (0..shape.vocabulary)
        .map(|id| match u8::try_from(id) {
            Ok(byte) => byte_letter(byte).to_string(),
            Err(_) if id == BYTES => "<|endoftext|>".to_owned(),
            Err(_) => token_text(id),
        })
        .collect();
    // 1 normal, 3 control, 4 defined by the user: found in text as they stand.
    let kinds: Vec<i32> = (0..shape.vocabulary)
        .map(|id| match id {
            0..BYTES => 1,
            BYTES => 3,
            _ => 4,
        })
        .collect();
    file.set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", "smollm");
    file.set("tokenizer.ggml.tokens", Array::Strings(tokens.iter().map(String::as_str).collect()));
    file.set("tokenizer.ggml.token_type", Array::I32(kinds));
    file.set("tokenizer.ggml.merges", Array::Strings(std::iter::empty::<&str>().collect()));
    file.set("tokenizer.ggml.bos_token_id", BYTES).set("tokenizer.ggml.eos_token_id", BYTES);
    file.set("tokenizer.ggml.add_bos_token", false);
    Ok(())
}

/// The letter that byte-level vocabularies spell a byte with: itself where it is printable, else one from U+0100 on.
fn byte_letter(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or('\u{fffd}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_stay_in_their_topic_mostly() {
        let shape = Shape::preset("tiny").unwrap();
        let ids = sample_ids(&shape, 1, 4000);
        assert_eq!(ids, sample_ids(&shape, 1, 4000));
        assert_ne!(ids, sample_ids(&shape, 2, 4000));
        assert!(ids.iter().all(|&id| id < shape.vocabulary));
        let same = ids.windows(2).filter(|pair| topic(pair[0]) == topic(pair[1])).count();
        let share = same as f64 / 3999.0;
        assert!((share - STAYS).abs() < 0.03, "{share}");
    }

    #[test]
    fn every_id_follows_another_of_its_topic() {
        let befores: std::collections::BTreeSet<u32> = (0..300).map(|id| before(id, 300)).collect();
        assert_eq!(befores.len(), 300);
        assert!((0..300).all(|id| topic(before(id, 300)) == topic(id)));
    }
}
