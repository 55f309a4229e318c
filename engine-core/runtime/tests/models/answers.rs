//! The same answer everywhere: threads, tiers, batches, exact skipping and plug-ins that only copy change no bit.

use crate::stack::{Outcome, Setup, ensure, story};
use engine_runtime::{
    Activations, FinishReason, GenerateOptions, Generation, SamplingOptions, SparsityChoice, generate,
};
use formats::tokenizer::TokenizerOptions;
use formats::{GgufFile, Tokenizer};
use libtest_mimic::{Failed, Trial};
use std::sync::atomic::AtomicBool;

const PROMPT: &str = "Once upon a time, there was a little";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("answers::nothing_but_arithmetic_changes_a_bit", nothing_changes_a_bit),
        Trial::test("answers::cpu_agrees_with_the_oracle", cpu_agrees_with_the_oracle),
        Trial::test("answers::score_decode_and_prefill_agree", ways_agree),
        Trial::test("answers::temperature_zero_is_always_the_same", temperature_zero),
        Trial::test("answers::seeds_repeat_and_differ", seeds),
        Trial::test("answers::story_ends_and_streams", story_ends),
        Trial::test("answers::a_rewound_session_answers_as_a_fresh_one", rewound),
    ]
}

fn tokenizer() -> Result<Tokenizer, Failed> {
    Ok(Tokenizer::from_gguf(&GgufFile::open(story())?, &TokenizerOptions::default())?)
}

fn prompt(tokenizer: &Tokenizer) -> Result<Vec<u32>, Failed> {
    Ok(tokenizer.encode(PROMPT, true, false)?)
}

fn run(setup: Setup, sampling: SamplingOptions) -> Result<Generation, Failed> {
    let tokenizer = tokenizer()?;
    let mut session = setup.load(&story())?.session()?;
    let options = GenerateOptions { max_tokens: Some(40), sampling, ..GenerateOptions::default() };
    let cancel = AtomicBool::new(false);
    Ok(generate(&mut session, &tokenizer, &prompt(&tokenizer)?, &options, &mut |_| (), &cancel)?)
}

/// Logits after the prompt and after ten more ids, as bits.
fn bits(setup: Setup) -> Result<Vec<u32>, Failed> {
    let mut session = setup.load(&story())?.session()?;
    let mut bits: Vec<u32> = session.prefill(&prompt(&tokenizer()?)?)?.iter().map(|l| l.to_bits()).collect();
    for id in 300..310 {
        session.decode(id)?;
    }
    bits.extend(session.logits().iter().map(|logit| logit.to_bits()));
    Ok(bits)
}

fn nothing_changes_a_bit() -> Outcome {
    for activations in [Activations::F32, Activations::Int8] {
        let base = Setup { activations, ..Setup::on("cpu") };
        let wanted = bits(base)?;
        let others = [
            ("1 thread", Setup { threads: 1, ..base }),
            ("tier ram", Setup { tier: "ram", ..base }),
            ("batch 3", Setup { batch: 3, ..base }),
            ("batch 1", Setup { batch: 1, ..base }),
            ("gate-first", Setup { sparsity: SparsityChoice::GateFirst, ..base }),
        ];
        for (what, setup) in others {
            ensure(bits(setup)? == wanted, || format!("{what} changes logits ({})", activations.name()))?;
        }
    }
    Ok(())
}

/// With f32 activations logit by logit. With int8 ones a last bit decides roundings, and these the next layer's, so that
/// two devices end up as far apart as int8 is from f32: there the CPU must be no worse than the oracle.
fn cpu_agrees_with_the_oracle() -> Outcome {
    let on = |device, activations| -> Result<Vec<f32>, Failed> {
        let bits = bits(Setup { activations, ..Setup::on(device) })?;
        Ok(bits.into_iter().map(f32::from_bits).collect())
    };
    let oracle = on("reference", Activations::F32)?;
    let largest = oracle.iter().fold(0f32, |most, logit| most.max(logit.abs()));
    let cpu = on("cpu", Activations::F32)?;
    let worst = cpu.iter().zip(&oracle).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    ensure(worst <= 1e-4 * largest, || format!("f32: logits differ by {worst} of {largest}"))?;

    let distance = |logits: &[f32]| {
        let squares: f64 = logits.iter().zip(&oracle).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        (squares / logits.len() as f64).sqrt()
    };
    let own = distance(&on("reference", Activations::Int8)?);
    let found = distance(&on("cpu", Activations::Int8)?);
    ensure(found <= 1.5 * own, || format!("int8: the CPU is {found} from f32, the oracle {own}"))
}

fn ways_agree() -> Outcome {
    let engine = Setup::on("cpu").load(&story())?;
    let ids = prompt(&tokenizer()?)?;
    let (mut scored, mut decoded) = (Vec::new(), Vec::new());
    engine.session()?.score(&ids, &mut |_, logits| scored.push(logits.to_vec()))?;
    let mut session = engine.session()?;
    for &id in &ids {
        decoded.push(session.decode(id)?.to_vec());
    }
    let prefilled = engine.session()?.prefill(&ids)?.to_vec();
    ensure(scored == decoded, || "score and decode differ".into())?;
    ensure(decoded.last() == Some(&prefilled), || "decode and prefill differ".into())
}

fn temperature_zero() -> Outcome {
    let first =
        run(Setup::on("cpu"), SamplingOptions { temperature: 0.0, seed: Some(0), ..Default::default() })?;
    for seed in 1..10 {
        let again = SamplingOptions { temperature: 0.0, seed: Some(seed), ..SamplingOptions::default() };
        ensure(run(Setup::on("cpu"), again)?.ids == first.ids, || format!("seed {seed} changes greedy ids"))?;
    }
    ensure(first.text.starts_with(" girl named Lily"), || format!("greedy text: {:?}", first.text))
}

fn seeds() -> Outcome {
    let with = |seed| {
        run(Setup::on("cpu"), SamplingOptions { temperature: 1.0, seed: Some(seed), ..Default::default() })
    };
    let (first, again, other) = (with(1)?, with(1)?, with(2)?);
    ensure(first.ids == again.ids, || "one seed gives two answers".into())?;
    ensure(first.ids != other.ids, || "two seeds give one answer".into())
}

fn story_ends() -> Outcome {
    let tokenizer = tokenizer()?;
    let mut session =
        Setup { activations: Activations::Int8, ..Setup::on("cpu") }.load(&story())?.session()?;
    let options = GenerateOptions { sampling: SamplingOptions::greedy(), ..GenerateOptions::default() };
    let mut streamed = String::new();
    let mut on_text = |text: &str| streamed.push_str(text);
    let cancel = AtomicBool::new(false);
    let generation =
        generate(&mut session, &tokenizer, &prompt(&tokenizer)?, &options, &mut on_text, &cancel)?;
    ensure(generation.text == streamed, || "the stream is not the text".into())?;
    ensure(!generation.text.contains("<|endoftext|>"), || "the end marker is shown".into())?;
    let full = session.past() == session.engine().context();
    let reason = if full { FinishReason::Length } else { FinishReason::Stop };
    ensure(generation.finish_reason == reason, || {
        format!("{:?} at {}", generation.finish_reason, session.past())
    })?;
    let submissions = generation.statistics.submissions;
    ensure(submissions == 2 + u64::from(generation.timings.decode_tokens), || {
        format!("{submissions} submissions")
    })
}

fn rewound() -> Outcome {
    let engine = Setup::on("cpu").load(&story())?;
    let ids = prompt(&tokenizer()?)?;
    let mut session = engine.session()?;
    session.prefill(&[7; 100])?;
    session.rewind(0)?;
    let fresh = engine.session()?.prefill(&ids)?.to_vec();
    ensure(session.prefill(&ids)? == fresh, || "what was before a rewind shows".into())
}
