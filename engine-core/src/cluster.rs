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
        assert!(ClusterSet::from_ranges(vec![r(0, 3), r(2, 5)]).is_err());
        assert!(ClusterSet::from_ranges(vec![r(3, 2)]).is_err());
    }
}
