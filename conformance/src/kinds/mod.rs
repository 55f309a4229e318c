//! Cases of the other three kinds of plug-in: storage tiers, cache policies, planners.

mod cache;
mod planner;
mod storage;

use crate::finding::{Fallible, Finding, Outcome};
use crate::open::Subject;
use engine_core::module::PluginKind;

/// The names of a kind's cases.
pub fn names(kind: PluginKind) -> Vec<String> {
    match kind {
        PluginKind::Storage => storage::CASES.iter().map(|c| c.0.to_owned()).collect(),
        PluginKind::Cache => cache::CASES.iter().map(|c| c.0.to_owned()).collect(),
        PluginKind::Planner => planner::CASES.iter().map(|c| c.0.to_owned()).collect(),
        _ => Vec::new(),
    }
}

/// Runs a case; `None` where the kind has no such case.
pub fn run(subject: &Subject, name: &str, seed: u64) -> Option<Outcome> {
    let outcome: Fallible<Outcome> = match subject {
        Subject::Storage(tier) => {
            let (_, case) = storage::CASES.iter().find(|c| c.0 == name)?;
            storage::with_file(tier.as_ref(), seed, *case)
        }
        Subject::Cache(open) => {
            let (_, case) = cache::CASES.iter().find(|c| c.0 == name)?;
            case(open.as_ref(), seed)
        }
        Subject::Planner(planner) => {
            let (_, case) = planner::CASES.iter().find(|c| c.0 == name)?;
            case(planner.as_ref())
        }
        Subject::Compute(_) => return None,
    };
    Some(outcome.into())
}

/// Fails with this sentence unless `ok`.
fn must(ok: bool, check: &str, otherwise: impl FnOnce() -> String) -> Fallible<()> {
    if ok { Ok(()) } else { Err(Finding::new(check, otherwise())) }
}
