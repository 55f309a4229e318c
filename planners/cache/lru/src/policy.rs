//! The policy: what a step admits and evicts.

use crate::order::Order;
use engine_core::cache::{Decision, Miss, Region, Unit};
use engine_core::{CachePolicy, Error, Result};
use std::collections::HashSet;

/// Exact LRU, a list per region.
#[derive(Default)]
pub struct Lru {
    regions: Vec<Slots>,
}

/// One region.
struct Slots {
    capacity: u64,
    order: Order,
}

/// What a step may not evict.
struct Kept {
    accessed: HashSet<Unit>,
    pinned: HashSet<Unit>,
}

impl Kept {
    fn contains(&self, unit: Unit) -> bool {
        self.accessed.contains(&unit) || self.pinned.contains(&unit)
    }
}

impl Slots {
    /// Evicts the oldest unit that may go. `from` is where the search of this step stands: everything older may not go
    /// and will not until the step is over.
    fn evict_one(&mut self, from: &mut Option<Unit>, kept: &Kept, evict: &mut Vec<Unit>) -> bool {
        let mut candidate = from.filter(|unit| self.order.contains(*unit)).or_else(|| self.order.oldest());
        while let Some(unit) = candidate {
            candidate = self.order.newer(unit);
            if !kept.contains(unit) {
                self.order.remove(unit);
                evict.push(unit);
                *from = candidate;
                return true;
            }
        }
        false
    }
}

impl Lru {
    fn region(&self, unit: Unit) -> Result<&Slots> {
        self.regions.get(unit.region as usize).ok_or_else(|| {
            Error::invalid(format!("{unit:?}: region {} of {} configured", unit.region, self.regions.len()))
        })
    }

    /// Checks a step before it changes anything.
    fn check(&self, hits: &[Unit], misses: &[Miss], pinned: &HashSet<Unit>) -> Result<()> {
        for unit in hits.iter().chain(misses.iter().map(|miss| &miss.unit)).chain(pinned) {
            self.region(*unit)?;
        }
        let missed: HashSet<Unit> = misses.iter().map(|miss| miss.unit).collect();
        if let Some(unit) = hits.iter().find(|unit| missed.contains(unit)) {
            return Err(Error::invalid(format!("{unit:?} is a hit and a miss in one step")));
        }
        let mut counts = vec![0u64; self.regions.len()];
        pinned.iter().for_each(|unit| counts[unit.region as usize] += 1);
        for (index, (count, region)) in counts.iter().zip(&self.regions).enumerate() {
            if *count > region.capacity {
                return Err(Error::invalid(format!(
                    "{count} pinned units exceed region {index}, which holds {}",
                    region.capacity
                )));
            }
        }
        Ok(())
    }
}

impl CachePolicy for Lru {
    fn configure(&mut self, regions: &[Region]) -> Result<()> {
        for (index, region) in regions.iter().enumerate() {
            if region.unit_bytes == 0 || region.capacity() == 0 {
                return Err(Error::invalid(format!(
                    "region {index} of {} bytes cannot hold a unit of {} bytes",
                    region.budget_bytes, region.unit_bytes
                )));
            }
        }
        self.regions =
            regions.iter().map(|r| Slots { capacity: r.capacity(), order: Order::new() }).collect();
        Ok(())
    }

    /// The host owns the table: a hit on a unit that was thought absent is taken as resident, a miss of one thought
    /// resident (its load failed) is admitted again.
    fn step(&mut self, _layer: u32, hits: &[Unit], misses: &[Miss], pinned: &[Unit]) -> Result<Decision> {
        let pinned: HashSet<Unit> = pinned.iter().copied().collect();
        self.check(hits, misses, &pinned)?;
        let mut decision = Decision::default();
        let mut kept = Kept { accessed: hits.iter().copied().collect(), pinned };
        let mut search: Vec<Option<Unit>> = vec![None; self.regions.len()];
        for unit in hits {
            self.regions[unit.region as usize].order.touch(*unit);
        }
        let mut by_deadline: Vec<&Miss> = misses.iter().collect();
        by_deadline.sort_by_key(|miss| miss.deadline);
        for &&Miss { unit, .. } in &by_deadline {
            if !kept.accessed.insert(unit) {
                continue;
            }
            let region = &mut self.regions[unit.region as usize];
            let from = &mut search[unit.region as usize];
            if *from == Some(unit) {
                *from = region.order.newer(unit);
            }
            region.order.remove(unit);
            let mut room = region.order.len() < region.capacity;
            while !room && region.evict_one(from, &kept, &mut decision.evict) {
                room = region.order.len() < region.capacity;
            }
            if room {
                region.order.touch(unit);
                decision.admit.push(unit);
            }
        }
        for (region, from) in self.regions.iter_mut().zip(&mut search) {
            while region.order.len() > region.capacity && region.evict_one(from, &kept, &mut decision.evict) {
            }
        }
        Ok(decision)
    }
}

#[cfg(test)]
mod tests;
