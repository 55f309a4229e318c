//! Independent results shared out among threads: who computes an item changes nothing about it.

/// Least number of items for which a thread is worth starting.
const LEAST: usize = 64;

/// Calls `f` with the index of every item and the item, in chunks, one thread each.
pub(crate) fn for_each<T: Send>(items: &mut [T], threads: usize, f: impl Fn(usize, &mut T) + Sync) {
    let chunk = items.len().div_ceil(threads.max(1)).max(LEAST);
    let run = |first: usize, items: &mut [T]| {
        items.iter_mut().enumerate().for_each(|(n, item)| f(first + n, item));
    };
    if items.len() <= chunk {
        return run(0, items);
    }
    std::thread::scope(|scope| {
        for (n, items) in items.chunks_mut(chunk).enumerate() {
            let run = &run;
            scope.spawn(move || run(n * chunk, items));
        }
    });
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_item_once() {
        for (length, threads) in [(0, 2), (1, 0), (64, 3), (65, 3), (1000, 7)] {
            let mut items = vec![0; length];
            super::for_each(&mut items, threads, |index, item| *item += index + 1);
            assert!(items.iter().enumerate().all(|(index, item)| *item == index + 1));
        }
    }
}
