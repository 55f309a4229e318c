//! Which texts train, which set thresholds, and which are held out for the report.

use std::ops::Range;

/// Of ten texts in turn, the one that is held out and the ones that set margins, thresholds and ranks.
const HELD: usize = 4;
const TUNED: [usize; 2] = [0, 7];

/// Rows of each part; texts are whole, but for a single text, which is cut in three.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// For training.
    pub train: Vec<Range<usize>>,
    /// For margins, thresholds and ranks.
    pub tune: Vec<Range<usize>>,
    /// For what is reported.
    pub held: Vec<Range<usize>>,
}

impl Split {
    /// By the lengths of the texts, which follow each other. Fewer than five texts are cut into tenths.
    pub fn of(texts: &[usize]) -> Split {
        let total: usize = texts.iter().sum();
        let cut: Vec<usize> = (0..10).map(|part| total * (part + 1) / 10 - total * part / 10).collect();
        let texts = if texts.len() < 5 { &cut } else { texts };
        let mut split = Split::default();
        let mut start = 0;
        for (index, &length) in texts.iter().enumerate().filter(|(_, length)| **length > 0) {
            let part = match index % 10 {
                HELD => &mut split.held,
                at if TUNED.contains(&at) => &mut split.tune,
                _ => &mut split.train,
            };
            part.push(start..start + length);
            start += length;
        }
        split
    }
}

/// Numbers of the rows, at most `most` of them, taken evenly.
pub fn evenly(ranges: &[Range<usize>], most: usize) -> Vec<usize> {
    let all: Vec<usize> = ranges.iter().cloned().flatten().collect();
    if all.len() <= most {
        return all;
    }
    (0..most).map(|at| all[at * all.len() / most]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_part() {
        for texts in [vec![5; 23], vec![100], vec![3, 0, 9], vec![]] {
            let split = Split::of(&texts);
            let mut rows: Vec<usize> =
                [&split.train, &split.tune, &split.held].into_iter().flatten().cloned().flatten().collect();
            rows.sort_unstable();
            assert_eq!(rows, (0..texts.iter().sum::<usize>()).collect::<Vec<_>>());
            if rows.len() > 10 {
                assert!(!split.held.is_empty() && !split.tune.is_empty() && !split.train.is_empty());
            }
        }
    }

    #[test]
    fn some_are_taken_evenly() {
        assert_eq!(evenly(&[0..2, 10..14], 3), [0, 10, 12]);
        assert_eq!(evenly(&[0..1, 4..5], 3), [0, 4]);
    }
}
