//! Asks the planner until its plan fits. A planner estimates what lists need of a device's memory; what they really take is
//! known once they are there. So every plan is weighed, and where a device would be given too much, the planner is asked
//! again as if that device had less; where room is left, as if it had more.

use crate::need::{Need, Scales};
use crate::planning::{Drawn, Question};
use crate::{Result, RuntimeError};
use engine_core::Error;
use engine_core::planner::{HardwareProfile, Plan};

/// How often a planner is asked for less, and for more.
const LESS: usize = 24;
const MORE: usize = 8;
/// How often between a plan that is too much and one that is too little.
const BETWEEN: usize = 8;
/// Rounds that take away what is too much, no more.
const EXACT: usize = 3;
/// Less room than this is not worth a question.
const LITTLE: u64 = 64 << 10;

/// A plan with how far each device of the hardware is from its limit.
struct Weighed {
    drawn: Drawn,
    /// In the order of the hardware; nothing where a device has no limit or no part.
    scale: Vec<Option<(u64, u64)>>,
}

impl Weighed {
    /// Bytes that each device is given too much.
    fn excess(&self) -> Vec<u64> {
        self.scale.iter().map(|of| of.map_or(0, |(need, limit)| need.saturating_sub(limit))).collect()
    }

    /// Bytes that each device has left.
    fn room(&self) -> Vec<u64> {
        self.scale.iter().map(|of| of.map_or(0, |(need, limit)| limit.saturating_sub(need))).collect()
    }

    fn fits(&self) -> bool {
        self.excess().iter().all(|bytes| *bytes == 0)
    }
}

/// The planner's plan for memory as it is.
///
/// # Errors
/// The planner's own, and [`RuntimeError::Plan`] where nothing fits.
pub(crate) fn fit(question: &Question<'_>) -> Result<Drawn> {
    let mut scales = Scales::default();
    let mut weigh = |plan: Plan| weigh(question, &mut scales, plan);
    // Planners reckon with more than lists take, so the first question allows for that.
    let mut told = question.hardware.clone();
    let allowance = question.allowance();
    let allowances = vec![allowance; told.devices.len()];
    change(&mut told, &allowances, u64::saturating_add);
    let mut first: Option<Weighed> = None;
    let mut too_much: Option<HardwareProfile> = None;
    for round in 0..LESS {
        let weighed = match question.ask(&told) {
            Ok(plan) => Some(weigh(plan)?),
            Err(Error::Infeasible { .. }) => None,
            Err(error) => return Err(question.failed(error)),
        };
        match weighed {
            Some(weighed) if !weighed.fits() => {
                // A planner may count bytes that the device does not (weights that it views): where a little less changes
                // little, it is told of much less, and whatever that leaves is room.
                let step = 1 << round.saturating_sub(EXACT);
                let excess: Vec<u64> =
                    weighed.excess().into_iter().map(|bytes| bytes.saturating_mul(step)).collect();
                too_much = Some(told.clone());
                change(&mut told, &excess, u64::saturating_sub);
                first.get_or_insert(weighed);
            }
            weighed => {
                let found = weighed.map(|weighed| (weighed, told.clone()));
                let found = match too_much {
                    Some(much) if round > EXACT || found.is_none() => {
                        between(question, &mut weigh, (told, much), found)?
                    }
                    _ => found,
                };
                return match found {
                    Some((weighed, told)) => more(question, &mut weigh, weighed, told),
                    None => Err(infeasible(question, first.as_ref())),
                };
            }
        }
    }
    Err(infeasible(question, first.as_ref()))
}

/// Between memory for which the plan fits (or there is none) and memory for which it is too much: steps that grow may have
/// gone past plans that fit.
fn between(
    question: &Question<'_>,
    weigh: &mut dyn FnMut(Plan) -> Result<Weighed>,
    (mut little, mut much): (HardwareProfile, HardwareProfile),
    mut found: Option<(Weighed, HardwareProfile)>,
) -> Result<Option<(Weighed, HardwareProfile)>> {
    for _ in 0..BETWEEN {
        let mut middle = little.clone();
        for (device, much) in middle.devices.iter_mut().zip(&much.devices) {
            device.memory_bytes += much.memory_bytes.saturating_sub(device.memory_bytes) / 2;
        }
        match question.ask(&middle) {
            Ok(plan) => {
                let weighed = weigh(plan)?;
                if weighed.fits() {
                    found = Some((weighed, middle.clone()));
                    little = middle;
                } else {
                    much = middle;
                }
            }
            Err(Error::Infeasible { .. }) => little = middle,
            Err(error) => return Err(question.failed(error)),
        }
    }
    Ok(found)
}

/// Where a device has room left, a plan that makes more of it, as long as that is not too much.
fn more(
    question: &Question<'_>,
    weigh: &mut dyn FnMut(Plan) -> Result<Weighed>,
    mut found: Weighed,
    mut told: HardwareProfile,
) -> Result<Drawn> {
    // In eighths of the room that is left: it doubles while plans fit, for what a device views takes none of it.
    let mut step = 8;
    for _ in 0..MORE {
        let room: Vec<u64> = found.room().into_iter().map(|bytes| bytes.saturating_mul(step) / 8).collect();
        if !found.drawn.is_divided() || room.iter().all(|bytes| *bytes < LITTLE) {
            break;
        }
        let mut raised = told.clone();
        change(&mut raised, &room, u64::saturating_add);
        let plan = question.ask(&raised).ok().filter(|plan| plan.embedding == found.drawn.plan.embedding);
        // A plan that cannot even be weighed is no better one.
        match plan.and_then(|plan| weigh(plan).ok()).filter(Weighed::fits) {
            Some(weighed) if weighed.drawn.plan.layers == found.drawn.plan.layers => break,
            Some(weighed) => {
                (found, told, step) = (weighed, raised, step * 2);
            }
            None => step /= 2,
        }
    }
    Ok(found.drawn)
}

fn change(hardware: &mut HardwareProfile, by: &[u64], how: fn(u64, u64) -> u64) {
    for (device, bytes) in hardware.devices.iter_mut().zip(by) {
        if device.memory_bytes != u64::MAX {
            device.memory_bytes = how(device.memory_bytes, *bytes);
        }
    }
}

/// Draws a plan and weighs it.
fn weigh(question: &Question<'_>, scales: &mut Scales, plan: Plan) -> Result<Weighed> {
    let drawn = question.draw(plan)?;
    let needs = scales.needs(question.model, &drawn, (question.options.batch, question.resident));
    for (device, need) in drawn.devices.iter().zip(needs.iter().flatten()) {
        tracing::debug!("a plan that needs of device `{}`: {} bytes, {need:?}", device.name, need.total());
    }
    let at = |name: &str| drawn.devices.iter().position(|device| device.name == name);
    let of = |name: &str| -> Option<(u64, u64)> {
        let at = at(name)?;
        let limit = drawn.devices[at].backend.describe().memory_bytes;
        let need = match &needs {
            Ok(needs) => needs.get(at).map_or(0, Need::total),
            // Even one list is too much; by how much is not known.
            Err((short, Error::OutOfMemory { .. })) if *short == at => {
                limit.saturating_add(limit / 8 + LITTLE)
            }
            Err(_) => 0,
        };
        (limit != 0).then_some((need, limit))
    };
    let scale = question.hardware.devices.iter().map(|device| of(&device.name)).collect();
    if let Err((at, error)) = needs
        && !matches!(error, Error::OutOfMemory { .. })
    {
        let name = drawn.devices.get(at).map_or("", |device| device.name.as_str());
        return Err(RuntimeError::device(name, "asking what lists need")(error));
    }
    Ok(Weighed { drawn, scale })
}

/// Nothing fits: in the planner's words, where it says so of memory as it is.
fn infeasible(question: &Question<'_>, first: Option<&Weighed>) -> RuntimeError {
    let own = match question.ask(&question.hardware) {
        Err(error) => return question.failed(error),
        Ok(plan) => plan.planner,
    };
    let name = &question.profile.name;
    let short = first.into_iter().flat_map(|weighed| weighed.scale.iter().zip(&question.hardware.devices));
    let short = short.filter_map(|(of, device)| {
        let (need, limit) = of.filter(|(need, limit)| need > limit)?;
        Some(format!("device `{}` may use {limit} bytes and would need {need}", device.name))
    });
    let short: Vec<String> = short.collect();
    question.failed(Error::infeasible(format!(
        "`{name}` does not fit: {}, with the weights, caches and lists that planner `{own}` would give it; nor does it \
         with less there",
        short.join("; ")
    )))
}
