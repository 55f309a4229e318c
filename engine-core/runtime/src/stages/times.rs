//! How often the stages of a program ran, and how long.

use super::Program;
use serde::Serialize;
use std::time::{Duration, Instant};

/// When one stage ran, as the host saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) submitted: Instant,
    pub(crate) ended: Option<Instant>,
    /// How long the host stood still for it.
    pub(crate) waited: Duration,
}

/// Sums over the stages of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    submissions: u64,
    busy: Duration,
    waited: Duration,
}

/// Sums by the kinds of a program's stages.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times {
    kinds: Vec<Sum>,
}

/// How often stages of one kind ran, and how long.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageTimes {
    /// The device's name in the config.
    pub device: String,
    /// The first and the last operation, without their layer.
    pub what: String,
    /// Submissions.
    pub submissions: u64,
    /// Seconds on the device: from when it could begin until the host saw its end.
    pub seconds: f64,
    /// Seconds that the host waited for them, of these.
    pub waited_seconds: f64,
}

impl Times {
    /// Adds one run of a program.
    pub(crate) fn add(&mut self, program: &Program, spans: &[Span]) {
        self.kinds.resize(program.kinds.len(), Sum::default());
        let mut free: Vec<(u32, Instant)> = Vec::new();
        for (stage, span) in program.stages.iter().zip(spans) {
            let (Some(ended), Some(sum)) = (span.ended, self.kinds.get_mut(stage.kind)) else { continue };
            // A device runs its stages one after the other.
            let before = free.iter_mut().find(|(device, _)| *device == stage.device);
            let begun = before.as_ref().map_or(span.submitted, |(_, free)| span.submitted.max(*free));
            match before {
                Some((_, free)) => *free = ended,
                None => free.push((stage.device, ended)),
            }
            sum.submissions += 1;
            sum.busy += ended.saturating_duration_since(begun);
            sum.waited += span.waited;
        }
    }

    /// The sums less those of `earlier`, with names; nothing of kinds that did not run.
    pub(crate) fn since(&self, earlier: &Times, program: &Program, names: &[&str]) -> Vec<StageTimes> {
        let kinds = program.kinds.iter().zip(&self.kinds).enumerate();
        let row = |(at, (kind, sum)): (usize, (&super::StageKind, &Sum))| {
            let before = earlier.kinds.get(at).copied().unwrap_or_default();
            StageTimes {
                device: names.get(kind.device as usize).copied().unwrap_or_default().to_owned(),
                what: kind.what.clone(),
                submissions: sum.submissions - before.submissions,
                seconds: (sum.busy - before.busy).as_secs_f64(),
                waited_seconds: (sum.waited - before.waited).as_secs_f64(),
            }
        };
        kinds.map(row).filter(|times| times.submissions > 0).collect()
    }
}
