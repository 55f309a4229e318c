//! Cache policies: every decision keeps the budget, the pins and the step's own units, and can be replayed.

use super::must;
use crate::finding::{Fallible, Finding, Outcome};
use crate::rng::Rng;
use engine_core::cache::{Decision, Miss, Region, Unit};
use engine_core::{CachePolicy, Error};
use std::collections::BTreeSet;

type Open = dyn Fn() -> Fallible<Box<dyn CachePolicy>>;
type Case = fn(&Open, u64) -> Fallible<Outcome>;

/// Every case.
pub(super) const CASES: &[(&str, Case)] = &[
    ("cache/decisions", decisions),
    ("cache/replay", replay),
    ("cache/configure-forgets", forgets),
    ("cache/everything-fits", fits),
    ("cache/region-too-small", too_small),
    ("cache/unknown-region", unknown_region),
    ("cache/pins-exceed", pins_exceed),
    ("cache/no-misses", no_misses),
];

const REGIONS: [Region; 2] =
    [Region { unit_bytes: 100, budget_bytes: 1250 }, Region { unit_bytes: 7, budget_bytes: 70 }];

/// The host's tables, against which every decision is checked.
#[derive(Default)]
struct Host {
    resident: BTreeSet<Unit>,
}

impl Host {
    /// Draws a step's accesses, asks, checks and applies.
    fn step(&mut self, policy: &mut dyn CachePolicy, rng: &mut Rng, layer: u32) -> Fallible<Decision> {
        let mut accessed = BTreeSet::new();
        for _ in 0..1 + rng.below(8) {
            let region = rng.below(2) as u32;
            // Some units are asked for far more often than others.
            let cluster = (rng.below(30) * rng.below(30) / 30) as u32;
            accessed.insert(Unit { region, layer, cluster });
        }
        let hits: Vec<Unit> = accessed.iter().filter(|u| self.resident.contains(u)).copied().collect();
        let misses: Vec<Miss> = accessed
            .iter()
            .filter(|u| !self.resident.contains(u))
            .map(|u| Miss { unit: *u, deadline: rng.below(3) as u32 })
            .collect();
        let pinned: Vec<Unit> = self.resident.iter().filter(|_| rng.once_in(6)).copied().collect();
        let decision = policy.step(layer, &hits, &misses, &pinned)?;
        self.apply(&decision, &accessed, &misses, &pinned)?;
        Ok(decision)
    }

    fn apply(
        &mut self,
        decision: &Decision,
        accessed: &BTreeSet<Unit>,
        misses: &[Miss],
        pinned: &[Unit],
    ) -> Fallible<()> {
        let check = "decisions";
        for unit in &decision.evict {
            must(!pinned.contains(unit), check, || format!("{unit:?} is pinned and was evicted"))?;
            must(!accessed.contains(unit), check, || {
                format!("{unit:?} was accessed in the step that evicts it")
            })?;
            must(self.resident.remove(unit), check, || format!("{unit:?} was evicted and is not resident"))?;
        }
        for unit in &decision.admit {
            must(misses.iter().any(|m| m.unit == *unit), check, || {
                format!("{unit:?} was admitted and no miss")
            })?;
            must(self.resident.insert(*unit), check, || format!("{unit:?} was admitted twice"))?;
        }
        for (index, region) in REGIONS.iter().enumerate() {
            let held = self.resident.iter().filter(|u| u.region == index as u32).count() as u64;
            must(held <= region.capacity(), check, || {
                format!("region {index} holds {held} units, it has room for {}", region.capacity())
            })?;
        }
        Ok(())
    }
}

fn walk(policy: &mut dyn CachePolicy, seed: u64, steps: u32) -> Fallible<Vec<Decision>> {
    let (mut host, mut rng) = (Host::default(), Rng::new(seed));
    (0..steps)
        .map(|step| {
            host.step(policy, &mut rng, step % 4)
                .map_err(|f| f.during(&format!("step {step} of seed {seed}")))
        })
        .collect()
}

fn decisions(open: &Open, seed: u64) -> Fallible<Outcome> {
    for round in 0..8 {
        let mut policy = open()?;
        policy.configure(&REGIONS)?;
        walk(policy.as_mut(), seed ^ round, 400)?;
    }
    Ok(Outcome::OK)
}

fn replay(open: &Open, seed: u64) -> Fallible<Outcome> {
    let run = || -> Fallible<Vec<Decision>> {
        let mut policy = open()?;
        policy.configure(&REGIONS)?;
        walk(policy.as_mut(), seed, 300)
    };
    let (a, b) = (run()?, run()?);
    must(a == b, "replay", || "the same calls gave other decisions the second time".into())?;
    Ok(Outcome::OK)
}

fn forgets(open: &Open, seed: u64) -> Fallible<Outcome> {
    let mut policy = open()?;
    policy.configure(&REGIONS)?;
    let first = walk(policy.as_mut(), seed, 100)?;
    policy.configure(&REGIONS)?;
    let again = walk(policy.as_mut(), seed, 100)?;
    must(first == again, "configure", || {
        "after configuring again, decisions depend on what was before".into()
    })?;
    Ok(Outcome::OK)
}

fn fits(open: &Open, _: u64) -> Fallible<Outcome> {
    let mut policy = open()?;
    policy.configure(&[Region { unit_bytes: 1, budget_bytes: 64 }])?;
    for cluster in 0..64 {
        let unit = Unit { region: 0, layer: 0, cluster };
        let decision = policy.step(0, &[], &[Miss { unit, deadline: 0 }], &[])?;
        must(decision.evict.is_empty(), "decisions", || {
            format!("{:?} was evicted although everything fits", decision.evict)
        })?;
    }
    Ok(Outcome::OK)
}

fn invalid<T: std::fmt::Debug>(what: &str, got: engine_core::Result<T>) -> Fallible<Outcome> {
    match got {
        Err(Error::InvalidArgument { .. }) => Ok(Outcome::OK),
        other => {
            Err(Finding::new("error paths", format!("{what}: wanted an invalid argument, got {other:?}")))
        }
    }
}

fn too_small(open: &Open, _: u64) -> Fallible<Outcome> {
    let region = Region { unit_bytes: 100, budget_bytes: 99 };
    invalid("a region that cannot hold one unit", open()?.configure(&[region]))
}

fn unknown_region(open: &Open, _: u64) -> Fallible<Outcome> {
    let mut policy = open()?;
    policy.configure(&REGIONS)?;
    let unit = Unit { region: 2, layer: 0, cluster: 0 };
    invalid(
        "a miss in a region that was not configured",
        policy.step(0, &[], &[Miss { unit, deadline: 0 }], &[]),
    )
}

fn pins_exceed(open: &Open, _: u64) -> Fallible<Outcome> {
    let mut policy = open()?;
    policy.configure(&[Region { unit_bytes: 1, budget_bytes: 2 }])?;
    let pins: Vec<Unit> = (0..3).map(|cluster| Unit { region: 0, layer: 0, cluster }).collect();
    invalid("pins that exceed a region", policy.step(0, &[], &[], &pins))
}

fn no_misses(open: &Open, _: u64) -> Fallible<Outcome> {
    let mut policy = open()?;
    policy.configure(&REGIONS)?;
    let decision = policy.step(0, &[], &[], &[])?;
    must(decision == Decision::default(), "decisions", || {
        format!("a step without accesses decided {decision:?}")
    })?;
    Ok(Outcome::OK)
}
