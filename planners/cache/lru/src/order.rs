//! Units in the order of their last use: a doubly linked list in a table, every change in constant time.

use engine_core::cache::Unit;
use std::collections::HashMap;

/// End of the list.
const NONE: usize = usize::MAX;

/// One place of the list.
#[derive(Clone, Copy)]
struct Link {
    unit: Unit,
    older: usize,
    newer: usize,
}

/// The units of a region, oldest use first.
pub(crate) struct Order {
    places: HashMap<Unit, usize>,
    links: Vec<Link>,
    free: Vec<usize>,
    oldest: usize,
    newest: usize,
}

impl Order {
    pub(crate) fn new() -> Order {
        Order { places: HashMap::new(), links: Vec::new(), free: Vec::new(), oldest: NONE, newest: NONE }
    }

    pub(crate) fn len(&self) -> u64 {
        self.places.len() as u64
    }

    pub(crate) fn contains(&self, unit: Unit) -> bool {
        self.places.contains_key(&unit)
    }

    /// Makes `unit` the newest, adding it where it is not there.
    pub(crate) fn touch(&mut self, unit: Unit) {
        self.remove(unit);
        let link = Link { unit, older: self.newest, newer: NONE };
        let place = match self.free.pop() {
            Some(place) => {
                self.links[place] = link;
                place
            }
            None => {
                self.links.push(link);
                self.links.len() - 1
            }
        };
        match self.newest {
            NONE => self.oldest = place,
            newest => self.links[newest].newer = place,
        }
        self.newest = place;
        self.places.insert(unit, place);
    }

    /// Takes `unit` out, if it is there.
    pub(crate) fn remove(&mut self, unit: Unit) {
        let Some(place) = self.places.remove(&unit) else { return };
        let Link { older, newer, .. } = self.links[place];
        match older {
            NONE => self.oldest = newer,
            older => self.links[older].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer].older = older,
        }
        self.free.push(place);
    }

    /// The oldest unit.
    pub(crate) fn oldest(&self) -> Option<Unit> {
        self.links.get(self.oldest).map(|link| link.unit)
    }

    /// The unit used next after `unit`.
    pub(crate) fn newer(&self, unit: Unit) -> Option<Unit> {
        let place = *self.places.get(&unit)?;
        self.links.get(self.links[place].newer).map(|link| link.unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(cluster: u32) -> Unit {
        Unit { region: 0, layer: 0, cluster }
    }

    fn all(order: &Order) -> Vec<u32> {
        std::iter::successors(order.oldest(), |unit| order.newer(*unit)).map(|unit| unit.cluster).collect()
    }

    #[test]
    fn keeps_the_order_of_use() {
        let mut order = Order::new();
        [1, 2, 3, 1].into_iter().for_each(|n| order.touch(unit(n)));
        assert_eq!(all(&order), [2, 3, 1]);
        order.remove(unit(3));
        order.remove(unit(3));
        assert_eq!((all(&order), order.len()), (vec![2, 1], 2));
        order.touch(unit(4));
        assert_eq!((all(&order), order.links.len()), (vec![2, 1, 4], 3));
        [2, 1, 4].into_iter().for_each(|n| order.remove(unit(n)));
        assert_eq!((all(&order), order.contains(unit(1))), (vec![], false));
    }
}
