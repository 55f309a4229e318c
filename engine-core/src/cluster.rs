//! Neuron clusters: contiguous runs of neurons of one FFN, the unit of placement, compute, caching and I/O.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The neurons `start..end` of one FFN layer (or of one expert).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClusterRange {
    /// First neuron.
    pub start: u32,
    /// One past the last neuron.
    pub end: u32,
}

impl ClusterRange {
    /// The run `start..end`.
    pub fn new(start: u32, end: u32) -> ClusterRange {
        ClusterRange { start, end }
    }

    /// Number of neurons.
    pub fn len(&self) -> u32 {
        self.end.saturating_sub(self.start)
    }

    /// Whether it holds no neuron.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Display for ClusterRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// A set of neurons as sorted, disjoint, non-empty, non-touching ranges: what a device owns of a layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct ClusterSet {
    ranges: Vec<ClusterRange>,
}

impl ClusterSet {
    /// All neurons of a layer of `neurons`.
    pub fn all(neurons: u32) -> ClusterSet {
        ClusterSet { ranges: if neurons == 0 { vec![] } else { vec![ClusterRange::new(0, neurons)] } }
    }

    /// The set made of these ranges, in any order; touching ranges are joined, empty ones dropped.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where a range ends before it starts, or two overlap (a neuron owned twice is
    /// always a mistake).
    pub fn from_ranges(mut ranges: Vec<ClusterRange>) -> Result<ClusterSet> {
        ranges.sort();
        let mut joined: Vec<ClusterRange> = Vec::with_capacity(ranges.len());
        for range in ranges {
            if range.end < range.start {
                return Err(Error::invalid(format!("cluster range {range} ends before it starts")));
            }
            if range.is_empty() {
                continue;
            }
            match joined.last_mut() {
                Some(last) if range.start < last.end => {
                    return Err(Error::invalid(format!("cluster ranges {last} and {range} overlap")));
                }
                Some(last) if range.start == last.end => last.end = range.end,
                _ => joined.push(range),
            }
        }
        Ok(ClusterSet { ranges: joined })
    }

    /// The ranges, sorted.
    pub fn ranges(&self) -> &[ClusterRange] {
        &self.ranges
    }

    /// Number of neurons.
    pub fn len(&self) -> u32 {
        self.ranges.iter().map(ClusterRange::len).sum()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether `neuron` is in the set.
    pub fn contains(&self, neuron: u32) -> bool {
        let after = self.ranges.partition_point(|r| r.start <= neuron);
        after > 0 && neuron < self.ranges[after - 1].end
    }

    /// The neurons, ascending.
    pub fn neurons(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranges.iter().flat_map(|r| r.start..r.end)
    }

    /// One past the highest neuron; 0 for the empty set.
    pub fn end(&self) -> u32 {
        self.ranges.last().map_or(0, |r| r.end)
    }

    /// The neurons that are in one of the two sets.
    pub fn union(&self, other: &ClusterSet) -> ClusterSet {
        let mut ranges: Vec<ClusterRange> = self.ranges.iter().chain(&other.ranges).copied().collect();
        ranges.sort();
        let mut joined: Vec<ClusterRange> = Vec::with_capacity(ranges.len());
        for range in ranges {
            match joined.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => joined.push(range),
            }
        }
        ClusterSet { ranges: joined }
    }

    /// The set with every range made to begin and end at multiples of `block` (the last at most at `neurons`).
    pub fn in_blocks(&self, block: u32, neurons: u32) -> ClusterSet {
        let block = block.max(1);
        let widen = |range: &ClusterRange| ClusterRange {
            start: range.start - range.start % block,
            end: range.end.checked_next_multiple_of(block).unwrap_or(neurons).min(neurons),
        };
        ClusterSet { ranges: self.ranges.iter().map(widen).collect() }.union(&ClusterSet::default())
    }

    /// The ranges of `part` counted within this set, its neurons numbered from 0 without gaps; `None` where one of them is
    /// not in the set.
    pub fn within(&self, part: &ClusterSet) -> Option<Vec<ClusterRange>> {
        let mut found: Vec<ClusterRange> = Vec::with_capacity(part.ranges.len());
        for range in &part.ranges {
            let after = self.ranges.partition_point(|own| own.start <= range.start);
            let own = self.ranges[..after].last().filter(|own| range.end <= own.end)?;
            let before: u32 = self.ranges[..after - 1].iter().map(ClusterRange::len).sum();
            let start = before + range.start - own.start;
            match found.last_mut() {
                // What a gap kept apart may touch now.
                Some(last) if last.end == start => last.end = start + range.len(),
                _ => found.push(ClusterRange::new(start, start + range.len())),
            }
        }
        Some(found)
    }

    /// The neurons below `neurons` that are not in the set.
    pub fn complement(&self, neurons: u32) -> ClusterSet {
        let mut rest = Vec::new();
        let mut next = 0;
        for range in &self.ranges {
            if range.start.min(neurons) > next {
                rest.push(ClusterRange::new(next, range.start.min(neurons)));
            }
            next = range.end;
        }
        if next < neurons {
            rest.push(ClusterRange::new(next, neurons));
        }
        ClusterSet { ranges: rest }
    }
}

impl<'de> Deserialize<'de> for ClusterSet {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let ranges = Vec::<ClusterRange>::deserialize(deserializer)?;
        ClusterSet::from_ranges(ranges).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_algebra() {
        let r = ClusterRange::new;
        let set = ClusterSet::from_ranges(vec![r(8, 9), r(0, 3), r(3, 5), r(7, 7)]).unwrap();
        assert_eq!(set.ranges(), &[r(0, 5), r(8, 9)]);
        assert_eq!((set.len(), set.end()), (6, 9));
        assert!(
            set.contains(0) && set.contains(4) && !set.contains(5) && set.contains(8) && !set.contains(9)
        );
        assert_eq!(set.complement(12).ranges(), &[r(5, 8), r(9, 12)]);
        assert_eq!(set.complement(4).ranges(), &[] as &[ClusterRange]);
        assert_eq!(ClusterSet::all(4).complement(4), ClusterSet::default());
        assert_eq!(set.neurons().count(), 6);
        let other = ClusterSet::from_ranges(vec![r(4, 8), r(20, 21)]).unwrap();
        assert_eq!(set.union(&other).ranges(), &[r(0, 9), r(20, 21)]);
        assert_eq!(other.in_blocks(8, 22).ranges(), &[r(0, 8), r(16, 22)]);
        let part = ClusterSet::from_ranges(vec![r(3, 5), r(8, 9)]).unwrap();
        assert_eq!(set.within(&part), Some(vec![r(3, 6)]));
        assert_eq!(set.within(&other), None);
        assert_eq!(set.within(&set), Some(vec![r(0, 6)]));
        assert!(ClusterSet::from_ranges(vec![r(0, 3), r(2, 5)]).is_err());
        assert!(ClusterSet::from_ranges(vec![r(3, 2)]).is_err());
    }
}
