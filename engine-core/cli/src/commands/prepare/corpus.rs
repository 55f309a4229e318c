//! Texts to profile with, tokenized.

use crate::model::Running;
use crate::prompt;
use anyhow::{Context, Result};
use std::path::Path;

/// What divides texts in a text file.
const DIVIDER: &str = "<|endoftext|>";

/// The texts of a file.
pub(in crate::commands) fn texts_of(running: &Running, path: &Path) -> Result<Vec<Vec<u32>>> {
    let tokenizer = running.tokenizer()?;
    let text = prompt::read_text(path)?;
    let lines = path.extension().is_some_and(|extension| extension == "jsonl");
    let parts: Vec<String> = if lines {
        let mut parts = Vec::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let at = || format!("{}, line {}", path.display(), number + 1);
            let object: serde_json::Value = serde_json::from_str(line).with_context(at)?;
            let text = object["text"].as_str().with_context(|| format!("{}: no `text`", at()))?;
            parts.push(text.to_owned());
        }
        parts
    } else {
        text.split(DIVIDER).map(|part| part.trim().to_owned()).collect()
    };
    let bos = tokenizer.adds_bos();
    let parts = parts.iter().filter(|part| !part.is_empty());
    Ok(parts.map(|part| tokenizer.encode(part, bos, true)).collect::<Result<_, _>>()?)
}

/// Texts of all files in turn, in parts that fit the context, until there are enough tokens.
pub(super) fn choose(files: Vec<Vec<Vec<u32>>>, wanted: usize, context: usize) -> Vec<Vec<u32>> {
    let mut files: Vec<_> = files.into_iter().map(Vec::into_iter).collect();
    let (mut chosen, mut count) = (Vec::new(), 0);
    while count < wanted {
        let round: Vec<Vec<u32>> = files.iter_mut().filter_map(Iterator::next).collect();
        if round.is_empty() {
            break;
        }
        for part in round.iter().flat_map(|ids| ids.chunks(context.max(1))) {
            let part = &part[..part.len().min(wanted - count)];
            if !part.is_empty() {
                count += part.len();
                chosen.push(part.to_vec());
            }
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_taken_in_turn_and_cut() {
        let files = vec![vec![vec![1; 5], vec![2; 5]], vec![vec![3; 2]]];
        assert_eq!(
            choose(files.clone(), 100, 3),
            [vec![1; 3], vec![1; 2], vec![3; 2], vec![2; 3], vec![2; 2]]
        );
        assert_eq!(choose(files, 6, 100), [vec![1; 5], vec![3; 1]]);
        assert!(choose(vec![], 6, 100).is_empty());
    }
}
