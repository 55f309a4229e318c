//! Numbers for weights: a stream per row of a tensor, so that rows can be made in any order by any thread.

/// SplitMix64 (Steele, Lea and Flood 2014): a full-period generator whose streams are told apart by their start.
pub(crate) struct Stream(u64);

impl Stream {
    /// The stream of a row of a named tensor.
    pub(crate) fn new(seed: u64, name: &str, row: u64) -> Stream {
        // FNV-1a of the name; the first draws mix the rest.
        let name = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut start = Stream(seed ^ name);
        let mixed = start.next() ^ row.wrapping_mul(0xd134_2543_de82_ef95);
        Stream(Stream(mixed).next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0..bound; the bias of the remainder is far below what any statistic here can show.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// Mean 0, variance 1, close to normal within two deviations: the sum of four uniform 16-bit numbers of one draw.
    /// Exact integers up to the last step, so the same on every machine.
    pub(crate) fn normal(&mut self) -> f32 {
        let draw = self.next();
        let sum: u64 = (0..4).map(|i| (draw >> (16 * i)) & 0xffff).sum();
        // Each number has variance (2^32 - 1) / 12.
        (sum as f32 - 131_070.0) * (1.0 / 37_837.2)
    }

    /// Adds `scale` times normal numbers to a row.
    pub(crate) fn add_normal(&mut self, row: &mut [f32], scale: f32) {
        row.iter_mut().for_each(|value| *value += scale * self.normal());
    }
}

/// A permutation of `0..count`, by Fisher and Yates.
pub(crate) fn shuffled(count: usize, mut stream: Stream) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    for last in (1..count).rev() {
        order.swap(last, stream.below(last as u64 + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_the_normal_numbers() {
        let mut stream = Stream::new(1, "test", 0);
        let values: Vec<f64> = (0..100_000).map(|_| f64::from(stream.normal())).collect();
        let mean = values.iter().sum::<f64>() / 1e5;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.015 && (variance - 1.0).abs() < 0.015, "{mean} {variance}");
    }

    #[test]
    fn streams_differ_by_seed_name_and_row() {
        let first = |seed, name, row| Stream::new(seed, name, row).next();
        let all = [first(1, "a", 0), first(2, "a", 0), first(1, "b", 0), first(1, "a", 1)];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), 4);
        assert_eq!(first(1, "a", 0), all[0]);
    }

    #[test]
    fn a_shuffle_has_everything_once() {
        let mut order = shuffled(100, Stream::new(3, "order", 0));
        assert!(!order.is_sorted());
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..100));
    }
}
