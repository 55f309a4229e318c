//! How many standard deviations of margin bit planes need: for neurons that are off exactly where their gate (and, where
//! up goes through ReLU, their up) is not above 0.

/// Margins that are tried are multiples of 1 / STEPS, up to MOST.
const STEPS: f32 = 16.0;
const MOST: usize = 6 * STEPS as usize;

/// What would be missed, by margin.
#[derive(Clone, Debug)]
pub struct Margins {
    /// Mass of active neurons that need this margin at least, in steps; the last entry is for more than the most.
    needed: Vec<f64>,
    total: f64,
}

impl Default for Margins {
    fn default() -> Self {
        Margins { needed: vec![0.0; MOST + 2], total: 0.0 }
    }
}

impl Margins {
    /// An active neuron that makes a difference of `mass` and is kept iff `ratio + k > 0`: ratio is the estimate by its
    /// standard deviation, the least one where there are several.
    pub fn see(&mut self, ratio: f32, mass: f64) {
        // A neuron without any deviation is estimated exactly, and active.
        let steps = if ratio > 0.0 || ratio.is_nan() { 0.0 } else { (-ratio * STEPS).floor() + 1.0 };
        let at = if steps > MOST as f32 { MOST + 1 } else { steps as usize };
        self.needed[at] += mass;
        self.total += mass;
    }

    /// The least margin that misses at most this share of the mass, and the share that it misses; the largest margin there is
    /// where none keeps to it.
    pub fn least(&self, budget: f64) -> (f32, f64) {
        let mut missed = 0.0;
        let mut least = (MOST, self.needed[MOST + 1]);
        for at in (0..=MOST).rev() {
            missed += self.needed[at + 1];
            if missed > budget * self.total {
                break;
            }
            least = (at, missed);
        }
        (least.0 as f32 / STEPS, if self.total > 0.0 { least.1 / self.total } else { 0.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_margin_within_the_budget() {
        let mut margins = Margins::default();
        for _ in 0..97 {
            margins.see(0.5, 1.0);
        }
        margins.see(-1.0, 2.0); // kept from 1 + 1/16 on
        margins.see(-9.0, 1.0); // never
        assert_eq!(margins.least(0.05), (0.0, 0.03));
        assert_eq!(margins.least(0.02), (1.0 + 1.0 / 16.0, 0.01));
        assert_eq!(margins.least(0.001), (6.0, 0.01));
        assert_eq!(Margins::default().least(0.1), (0.0, 0.0));
    }

    #[test]
    fn just_at_nothing_needs_a_step() {
        let mut margins = Margins::default();
        margins.see(0.0, 1.0);
        assert_eq!(margins.least(0.0), (1.0 / 16.0, 0.0));
    }
}
