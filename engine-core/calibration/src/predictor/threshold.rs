//! The score from which on a neuron counts as active: as high as recall and missed mass allow.

/// Scores and masses of active neurons, and scores of the others.
#[derive(Clone, Debug, Default)]
pub(super) struct Calibration {
    active: Vec<(f32, f32)>,
    others: Vec<f32>,
}

impl Calibration {
    pub(super) fn see(&mut self, score: f32, active: bool, mass: f32) {
        if active { self.active.push((score, mass)) } else { self.others.push(score) }
    }

    /// The highest threshold with at least `recall` and at most `missed`, and the share of all neurons that reaches it.
    pub(super) fn threshold(mut self, recall: f64, missed: f64) -> (f32, f64) {
        self.active.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let total: f64 = self.active.iter().map(|seen| f64::from(seen.1)).sum();
        let allowed = ((1.0 - recall) * self.active.len() as f64).floor() as usize;
        let (mut lost, mut count) = (0.0, 0);
        for &(_, mass) in self.active.iter().take(allowed) {
            lost += f64::from(mass);
            if lost > missed * total {
                break;
            }
            count += 1;
        }
        // Those before `count` may be missed: the next one's score is the threshold.
        let threshold = self.active.get(count).map_or(0.0, |seen| seen.0);
        let reached = self.active.iter().filter(|seen| seen.0 >= threshold).count()
            + self.others.iter().filter(|&&score| score >= threshold).count();
        let all = (self.active.len() + self.others.len()).max(1);
        (threshold, reached as f64 / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_limits_hold() {
        let mut calibration = Calibration::default();
        for i in 0..100 {
            calibration.see(i as f32, true, if i == 2 { 50.0 } else { 0.5 });
            calibration.see(i as f32 - 50.0, false, 0.0);
        }
        // Five may be missed by number; the third has half of all mass.
        let (threshold, reached) = calibration.clone().threshold(0.95, 0.02);
        assert_eq!((threshold, reached), (2.0, (98.0 + 48.0) / 200.0));
        let (threshold, _) = calibration.clone().threshold(0.95, 1.0);
        assert_eq!(threshold, 5.0);
        assert_eq!(calibration.threshold(1.0, 1.0).0, 0.0);
        assert_eq!(Calibration::default().threshold(0.9, 0.1), (0.0, 0.0));
    }
}
