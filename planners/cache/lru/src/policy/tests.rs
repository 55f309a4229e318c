//! The policy against a naive model, and its promises for any sequence of steps.

use super::*;
use proptest::prelude::*;

fn unit(cluster: u32) -> Unit {
    Unit { region: 0, layer: 0, cluster }
}

fn miss(cluster: u32, deadline: u32) -> Miss {
    Miss { unit: unit(cluster), deadline }
}

fn lru(capacity: u64) -> Lru {
    let mut lru = Lru::default();
    lru.configure(&[Region { unit_bytes: 10, budget_bytes: 10 * capacity + 9 }]).unwrap();
    lru
}

fn units(decided: &[Unit]) -> Vec<u32> {
    decided.iter().map(|unit| unit.cluster).collect()
}

#[test]
fn the_oldest_goes() {
    let mut lru = lru(2);
    let mut step = |hits: &[Unit], misses: &[Miss], pinned: &[Unit]| {
        let decision = lru.step(0, hits, misses, pinned).unwrap();
        (units(&decision.admit), units(&decision.evict))
    };
    assert_eq!(step(&[], &[miss(1, 5), miss(2, 0)], &[]), (vec![2, 1], vec![]));
    assert_eq!(step(&[unit(2)], &[miss(3, 0)], &[]), (vec![3], vec![1]));
    assert_eq!(step(&[], &[miss(4, 0)], &[unit(2)]), (vec![4], vec![3]));
    assert_eq!(step(&[unit(4)], &[miss(5, 0)], &[unit(2)]), (vec![], vec![]));
    // More misses than room: the most urgent stay, the others are used once.
    assert_eq!(step(&[], &[miss(6, 1), miss(7, 0), miss(8, 0), miss(7, 3)], &[]), (vec![7, 8], vec![2, 4]));
    // A load that failed is asked for again.
    assert_eq!(step(&[], &[miss(8, 0)], &[]), (vec![8], vec![]));
}

#[test]
fn wrong_steps_change_nothing() {
    let mut policy = lru(1);
    for regions in [Region { unit_bytes: 0, budget_bytes: 5 }, Region { unit_bytes: 6, budget_bytes: 5 }] {
        assert!(policy.configure(&[regions]).is_err());
    }
    policy.step(0, &[], &[miss(1, 0)], &[]).unwrap();
    let elsewhere = Unit { region: 1, layer: 0, cluster: 0 };
    assert!(policy.step(0, &[elsewhere], &[], &[]).is_err());
    assert!(policy.step(0, &[unit(1)], &[miss(1, 0)], &[]).is_err());
    assert!(policy.step(0, &[], &[miss(2, 0)], &[unit(1), unit(3)]).is_err());
    assert_eq!(units(&policy.step(0, &[], &[miss(2, 0)], &[]).unwrap().evict), [1]);
}

/// LRU as one would write it down: a vector per region, oldest first.
struct Naive {
    capacities: Vec<usize>,
    resident: Vec<Vec<Unit>>,
}

impl Naive {
    fn step(&mut self, hits: &[Unit], misses: &[Miss], pinned: &[Unit]) -> Decision {
        let mut decision = Decision::default();
        let mut accessed = hits.to_vec();
        for unit in hits {
            let resident = &mut self.resident[unit.region as usize];
            resident.retain(|u| u != unit);
            resident.push(*unit);
        }
        let mut misses = misses.to_vec();
        misses.sort_by_key(|miss| miss.deadline);
        for miss in misses {
            if accessed.contains(&miss.unit) {
                continue;
            }
            accessed.push(miss.unit);
            let region = miss.unit.region as usize;
            let resident = &mut self.resident[region];
            if resident.len() == self.capacities[region] {
                let victim = resident.iter().position(|u| !accessed.contains(u) && !pinned.contains(u));
                let Some(victim) = victim else { continue };
                decision.evict.push(resident.remove(victim));
            }
            resident.push(miss.unit);
            decision.admit.push(miss.unit);
        }
        decision
    }
}

/// One step as drawn: accesses (split into hits and misses by what is resident) and which resident units are pinned.
type Drawn = (Vec<(u32, u32, u32)>, Vec<usize>);

fn drawn() -> impl Strategy<Value = (Vec<u64>, Vec<Drawn>)> {
    let access = (0u32..2, 0u32..12, 0u32..3);
    let step = (prop::collection::vec(access, 0..10), prop::collection::vec(0usize..16, 0..4));
    (prop::collection::vec(1u64..6, 2), prop::collection::vec(step, 0..60))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn equals_the_naive_model_and_keeps_its_promises((capacities, steps) in drawn()) {
        let regions: Vec<Region> =
            capacities.iter().map(|c| Region { unit_bytes: 7, budget_bytes: 7 * c }).collect();
        let (mut policy, mut replayed) = (Lru::default(), Lru::default());
        policy.configure(&regions).unwrap();
        replayed.configure(&regions).unwrap();
        let mut naive = Naive {
            capacities: capacities.iter().map(|c| *c as usize).collect(),
            resident: vec![vec![]; capacities.len()],
        };
        let mut table: HashSet<Unit> = HashSet::new();
        for (layer, (accesses, pins)) in steps.into_iter().enumerate() {
            let (mut hits, mut misses) = (vec![], vec![]);
            for (region, cluster, deadline) in accesses {
                let unit = Unit { region, layer: cluster % 3, cluster };
                if table.contains(&unit) {
                    hits.push(unit);
                } else {
                    misses.push(Miss { unit, deadline });
                }
            }
            let mut resident: Vec<Unit> = table.iter().copied().collect();
            resident.sort();
            let mut pinned: Vec<Unit> =
                pins.iter().filter_map(|pin| resident.get(pin % resident.len().max(1)).copied()).collect();
            pinned.extend(pinned.clone());
            let decision = policy.step(layer as u32, &hits, &misses, &pinned).unwrap();
            prop_assert_eq!(&decision, &replayed.step(layer as u32, &hits, &misses, &pinned).unwrap());
            prop_assert_eq!(&decision, &naive.step(&hits, &misses, &pinned));
            for unit in &decision.evict {
                prop_assert!(table.remove(unit), "evicted what is not resident");
                prop_assert!(!pinned.contains(unit) && !hits.contains(unit));
            }
            for unit in &decision.admit {
                prop_assert!(misses.iter().any(|miss| miss.unit == *unit));
                prop_assert!(table.insert(*unit), "admitted twice");
            }
            for (region, capacity) in capacities.iter().enumerate() {
                let count = table.iter().filter(|unit| unit.region as usize == region).count();
                prop_assert!(count as u64 <= *capacity);
            }
        }
    }
}
