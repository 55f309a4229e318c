//! Golden draws, the ends of every option, and any option at all.

use super::*;
use proptest::prelude::*;

fn options() -> SamplingOptions {
    SamplingOptions {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_penalty: 1.0,
        repeat_last: 64,
        seed: Some(1),
    }
}

fn draws(options: SamplingOptions, logits: &[f32], count: usize) -> Vec<u32> {
    let mut sampler = Sampler::new(options).unwrap();
    (0..count).map(|_| sampler.sample(logits, &[])).collect()
}

/// Ids that come up at least once in many draws.
fn support(options: SamplingOptions, logits: &[f32]) -> Vec<u32> {
    let mut ids = draws(options, logits, 2000);
    ids.sort_unstable();
    ids.dedup();
    ids
}

const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, 3.0, -1.0];

#[test]
fn temperature_zero_ignores_the_seed_and_takes_the_lower_id_of_equals() {
    for seed in 0..10 {
        let ids = draws(SamplingOptions { temperature: 0.0, seed: Some(seed), ..options() }, &LOGITS, 10);
        assert_eq!(ids, [1; 10]);
    }
}

#[test]
fn seeds_repeat_and_differ() {
    let with = |seed| draws(SamplingOptions { seed: Some(seed), ..options() }, &LOGITS, 50);
    assert_eq!(with(5), with(5));
    assert_ne!(with(5), with(6));
    let unseeded = SamplingOptions { seed: None, ..options() };
    let sampler = Sampler::new(unseeded.clone()).unwrap();
    let again = SamplingOptions { seed: Some(sampler.seed()), ..unseeded };
    assert_eq!(Sampler::new(again).unwrap().seed(), sampler.seed());
}

#[test]
fn golden_draws() {
    // From the formulas, computed apart in Python; a change of order, arithmetic or generator shows here.
    let all =
        SamplingOptions { temperature: 0.8, top_k: 4, top_p: 0.9, min_p: 0.05, seed: Some(42), ..options() };
    assert_eq!(draws(all, &LOGITS, 16), [3, 1, 2, 3, 3, 3, 1, 3, 1, 2, 3, 3, 3, 1, 1, 3]);
}

#[test]
fn ends_of_the_ranges() {
    assert_eq!(support(SamplingOptions { top_k: 1, ..options() }, &LOGITS), [1]);
    assert_eq!(support(SamplingOptions { top_k: 2, ..options() }, &LOGITS), [1, 3]);
    assert_eq!(support(SamplingOptions { top_k: 99, ..options() }, &LOGITS), [0, 1, 2, 3, 4]);
    assert_eq!(support(SamplingOptions { top_p: 0.0, ..options() }, &LOGITS), [1]);
    assert_eq!(support(SamplingOptions { top_p: 1.0, ..options() }, &LOGITS), [0, 1, 2, 3, 4]);
    assert_eq!(support(SamplingOptions { min_p: 1.0, ..options() }, &LOGITS), [1, 3]);
    assert_eq!(support(SamplingOptions { temperature: 1e-9, ..options() }, &LOGITS), [1, 3]);
    let hot = draws(SamplingOptions { temperature: 1e9, ..options() }, &LOGITS, 5000);
    for id in 0..5 {
        let share = hot.iter().filter(|&&drawn| drawn == id).count();
        assert!((900..1100).contains(&share), "{id}: {share}");
    }
    assert_eq!(draws(options(), &[], 1), [0]);
}

#[test]
fn frequencies_follow_the_softmax() {
    let logits = [0.0f32, 1.0, 2.0];
    let drawn = draws(options(), &logits, 20_000);
    let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    for (id, logit) in logits.iter().enumerate() {
        let wanted = f64::from(*logit).exp() / total;
        let found = drawn.iter().filter(|&&d| d as usize == id).count() as f64 / 20_000.0;
        assert!((found - wanted).abs() < 0.015, "{id}: {found} against {wanted}");
    }
}

#[test]
fn penalty_covers_the_window_only() {
    let greedy = SamplingOptions { temperature: 0.0, repeat_penalty: 4.0, repeat_last: 2, ..options() };
    let mut sampler = Sampler::new(greedy.clone()).unwrap();
    assert_eq!(sampler.sample(&LOGITS, &[]), 1);
    assert_eq!(sampler.sample(&LOGITS, &[1]), 3);
    assert_eq!(sampler.sample(&LOGITS, &[1, 3]), 2);
    assert_eq!(sampler.sample(&LOGITS, &[1, 3, 0, 0, 77]), 1, "ids outside the window and the vocabulary");
    let none = SamplingOptions { repeat_last: 0, ..greedy };
    assert_eq!(Sampler::new(none).unwrap().sample(&LOGITS, &[1, 3]), 1);
    // Negative logits become more negative.
    let mut sampler =
        Sampler::new(SamplingOptions { temperature: 0.0, repeat_penalty: 2.0, ..options() }).unwrap();
    assert_eq!(sampler.sample(&[-1.0, -1.5], &[0]), 1);
}

#[test]
fn options_out_of_range_are_named() {
    let bad = [
        SamplingOptions { temperature: -1.0, ..options() },
        SamplingOptions { temperature: f32::NAN, ..options() },
        SamplingOptions { top_p: 1.5, ..options() },
        SamplingOptions { min_p: -0.1, ..options() },
        SamplingOptions { repeat_penalty: 0.0, ..options() },
    ];
    let names = ["temperature", "temperature", "top_p", "min_p", "repeat_penalty"];
    for (options, name) in bad.into_iter().zip(names) {
        let error = Sampler::new(options).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

proptest! {
    #[test]
    fn any_choice_is_among_the_logits(
        logits in prop::collection::vec(-1e30f32..1e30, 1..50),
        temperature in prop_oneof![Just(0.0f32), Just(1e-9), Just(1.0), Just(1e9)],
        top_k in 0u32..60,
        top_p in 0f32..=1.0,
        min_p in 0f32..=1.0,
        repeat_penalty in 0.01f32..100.0,
        recent in prop::collection::vec(0u32..60, 0..20),
        seed: u64,
    ) {
        let options = SamplingOptions {
            temperature, top_k, top_p, min_p, repeat_penalty, repeat_last: 8, seed: Some(seed),
        };
        let first = Sampler::new(options.clone()).unwrap().sample(&logits, &recent);
        let second = Sampler::new(options).unwrap().sample(&logits, &recent);
        prop_assert!((first as usize) < logits.len());
        prop_assert_eq!(first, second);
    }
}
