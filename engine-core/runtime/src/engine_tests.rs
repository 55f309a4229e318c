//! Loading, sessions and generation over a stack that computes nothing.

use crate::fakes::{FakeCache, FakeDevice, FakePlanner, FakeTier, load, load_planned, story};
use crate::{
    Engine, EngineOptions, FinishReason, GenerateOptions, RuntimeError, SamplingOptions, SparsityChoice,
    Stack,
};
use engine_core::DType;
use engine_core::backend::BufferUse;
use engine_core::operation::{OperationKind, OperationList, Selection, SlotRole};
use engine_core::planner::{Fallback, SparsityPolicy};
use formats::tokenizer::TokenizerOptions;
use formats::{GgufFile, TensorInfo, Tokenizer};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn options() -> EngineOptions {
    EngineOptions { context: 32, batch: 8, ..EngineOptions::default() }
}

fn refusal(result: crate::Result<Engine>) -> (RuntimeError, String) {
    let error = result.err().expect("an error");
    let text = error.to_string();
    (error, text)
}

#[test]
fn everything_is_given_back() {
    let device = Arc::new(FakeDevice::new());
    let engine = load(&device, options()).unwrap();
    let mut session = engine.session().unwrap();
    session.score(&[1, 2, 3], &mut |_, _| ()).unwrap();
    assert!(engine.weights_imported());
    assert!(!device.log.lock().unwrap().live.is_empty());
    drop(engine);
    session.decode(4).unwrap();
    drop(session);
    assert!(device.log.lock().unwrap().live.is_empty());
}

#[test]
fn options_are_checked() {
    let device = Arc::new(FakeDevice::new());
    assert!(matches!(
        refusal(load(&device, EngineOptions { batch: 0, ..options() })).0,
        RuntimeError::Option { option: "batch", .. }
    ));
    let engine = load(&device, EngineOptions { context: 0, batch: 4096, ..options() }).unwrap();
    assert_eq!((engine.context(), engine.options().batch), (256, 256), "the trained context bounds both");
}

#[test]
fn weights_are_copied_where_they_cannot_be_viewed() {
    for device in [
        FakeDevice::describing(|d| d.imports_host_memory = false),
        FakeDevice::describing(|d| d.alignment = 4096),
        FakeDevice::describing(|d| d.max_buffer_bytes = 1 << 20),
    ] {
        let device = Arc::new(device);
        let engine = load(&device, options()).unwrap();
        assert!(!engine.weights_imported());
        let log = device.log.lock().unwrap();
        let copied: u64 = log.allocated.iter().filter(|a| a.0 == BufferUse::Weights).map(|a| a.1).sum();
        assert_eq!(copied, engine.weight_bytes());
        // Some at a time: a device may hold as much beside them.
        let at_most = copied.div_ceil(1 << 20) as usize;
        assert!(
            log.imports == 0 && (2..=at_most).contains(&log.submissions.len()),
            "{}",
            log.submissions.len()
        );
    }
}

#[test]
fn predictors_are_brought_only_where_they_are_used() {
    let device = Arc::new(FakeDevice::new());
    let dense = load(&device, options()).unwrap().weight_bytes();
    let predicted =
        load(&device, EngineOptions { sparsity: SparsityChoice::Predictor, ..options() }).unwrap();
    let predictors: u64 = predicted
        .model()
        .layers
        .iter()
        .filter_map(|layer| layer.ffn.predictor.as_ref())
        .map(|predictor| predictor.fc1.byte_len() + predictor.fc2.byte_len())
        .sum();
    assert_eq!(predicted.weight_bytes(), dense + predictors);
    // Tied embeddings: the table is read as the head, and one row of it as the embedding.
    let row = DType::Q8_0.row_bytes(256).unwrap();
    assert_eq!(predicted.weight_bytes_per_token(), dense + row);
}

fn constant(list: &OperationList) -> Option<&engine_core::operation::Slot> {
    list.slots.iter().find(|slot| matches!(slot.role, SlotRole::Constant(_)))
}

fn no_linear(list: &OperationList, index: usize) -> Option<String> {
    let weight = constant(list)?;
    matches!(list.operations[index].kind, OperationKind::Linear { .. })
        .then(|| format!("no kernel for {}", weight.tensor.dtype))
}

fn no_quantised_linear(list: &OperationList, index: usize) -> Option<String> {
    if constant(list)?.tensor.dtype.is_quantised() { no_linear(list, index) } else { None }
}

#[test]
fn types_without_kernels_are_converted_where_they_are_used() {
    let plain = load(&Arc::new(FakeDevice::new()), options()).unwrap();
    let device = Arc::new(FakeDevice::denying(no_quantised_linear));
    let file = GgufFile::open(story()).unwrap();
    let stack = Stack {
        compute: vec![("first".into(), Arc::clone(&device) as _)],
        storage: Arc::new(FakeTier::reading(&story())),
        cache: Box::new(FakeCache),
        planner: Arc::new(FakePlanner(|_, _| ())),
    };
    let engine = Engine::load_file(&file, stack, options()).unwrap();
    // Attention and the head in F16, the rest viewed as it is; the table is tied to the head, so it is there twice.
    let as_f16 = |tensor: &TensorInfo| tensor.elements() * 2;
    let model = engine.model();
    let attention: Vec<&TensorInfo> = model
        .layers
        .iter()
        .flat_map(|layer| [&layer.attention.q, &layer.attention.k, &layer.attention.v, &layer.attention.o])
        .map(|linear| &linear.weight)
        .collect();
    let converted: u64 =
        attention.iter().map(|tensor| as_f16(tensor)).sum::<u64>() + as_f16(&model.token_embd);
    assert_eq!(engine.weight_bytes_copied(), converted);
    let stored: u64 = attention.iter().map(|tensor| tensor.byte_len()).sum();
    assert_eq!(engine.weight_bytes(), plain.weight_bytes() - stored + converted);
    let (before, after) = (plain.weight_bytes_per_token(), engine.weight_bytes_per_token());
    assert_eq!(after, before - stored - model.token_embd.byte_len() + converted);
    let log = device.log.lock().unwrap();
    let held: u64 = log.allocated.iter().filter(|a| a.0 == BufferUse::Weights).map(|a| a.1).sum();
    assert_eq!((held, log.imports), (converted, 1));
}

#[test]
fn a_denied_dtype_names_tensor_type_device_and_reason() {
    let device = Arc::new(FakeDevice::denying(no_linear));
    // The second fake can run everything, but this planner insists on the first.
    let (error, text) = refusal(load(&device, options()));
    assert!(matches!(error, RuntimeError::Unsupported { .. }));
    for part in ["`first`", "blk.0.attn_q.weight", "Q8_0", "no kernel for Q8_0"] {
        assert!(text.contains(part), "{text}");
    }
    let stack = Stack {
        compute: vec![("only".into(), device as _)],
        storage: Arc::new(FakeTier::new(&story(), true)),
        cache: Box::new(FakeCache),
        planner: Arc::new(FakePlanner(|_, _| ())),
    };
    let (error, text) = refusal(Engine::load(story(), stack, options()));
    assert!(matches!(error, RuntimeError::NoDevice { .. }));
    for part in ["`only`", "blk.0.attn_q.weight", "Q8_0", "no kernel for Q8_0", "more like it"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_device_without_sparse_selections_says_so_to_the_planner() {
    fn dense_only(list: &OperationList, index: usize) -> Option<String> {
        let OperationKind::Ffn(ffn) = &list.operations[index].kind else { return None };
        (ffn.selection != Selection::All).then(|| "dense only".to_owned())
    }
    let device = Arc::new(FakeDevice::denying(dense_only));
    load(&device, options()).unwrap();
    let (_, text) =
        refusal(load(&device, EngineOptions { sparsity: SparsityChoice::GateFirst, ..options() }));
    assert!(text.contains("dense only") && text.contains("blk.0.ffn"), "{text}");
}

#[test]
fn plans_are_checked_whoever_made_them() {
    let device = Arc::new(FakeDevice::new());
    let load = |planner| refusal(load_planned(&device, FakePlanner(planner), options()));
    let (error, text) = load(|plan, _| drop(plan.layers.pop()));
    assert!(matches!(error, RuntimeError::Plan { .. }) && text.contains("7 layers"), "{text}");
    let (error, text) = load(|plan, _| plan.devices[0] = "third".into());
    assert!(matches!(error, RuntimeError::Option { .. }) && text.contains("third"), "{text}");
}

#[test]
fn the_other_device_may_run_everything() {
    let device = Arc::new(FakeDevice::new());
    let planner = FakePlanner(|plan, _| {
        plan.embedding = 1;
        for layer in &mut plan.layers {
            layer.attention = 1;
            layer.ffn[0].device = 1;
        }
    });
    assert_eq!(load_planned(&device, planner, options()).unwrap().device_names(), ["second"]);
    assert!(device.log.lock().unwrap().allocated.is_empty());
}

#[test]
fn strict_forbids_fallbacks() {
    let device = Arc::new(FakeDevice::new());
    let fall_back = |plan: &mut engine_core::planner::Plan, _: &_| {
        plan.layers[0].ffn[0].sparsity = SparsityPolicy::Dense;
        plan.fallbacks.push(Fallback {
            what: "blk.0 ffn".into(),
            wanted: "gate-first".into(),
            got: "dense".into(),
            reason: "a test".into(),
        });
    };
    load_planned(&device, FakePlanner(fall_back), options()).unwrap();
    let strict = EngineOptions { strict: true, ..options() };
    let (error, text) = refusal(load_planned(&device, FakePlanner(fall_back), strict));
    assert!(
        matches!(error, RuntimeError::Strict { .. }) && text.contains("blk.0 ffn: wanted gate-first"),
        "{text}"
    );
}

#[test]
fn a_tier_must_hold_the_model_in_memory() {
    let stack = |resident| Stack {
        compute: vec![("first".into(), Arc::new(FakeDevice::new()) as _)],
        storage: Arc::new(FakeTier::new(&story(), resident)),
        cache: Box::new(FakeCache),
        planner: Arc::new(FakePlanner(|_, _| ())),
    };
    Engine::load(story(), stack(true), options()).unwrap();
    let (error, text) = refusal(Engine::load(story(), stack(false), options()));
    assert!(matches!(error, RuntimeError::Storage { .. }) && text.contains("mmap"), "{text}");
}

#[test]
fn prefill_goes_in_batches_and_decode_in_one_submission() {
    let device = Arc::new(FakeDevice::new());
    let engine = load(&device, options()).unwrap();
    let mut session = engine.session().unwrap();
    let ids: Vec<u32> = (0..20).collect();
    assert_eq!(session.prefill(&ids).unwrap().len(), engine.model().vocab_size);
    session.decode(5).unwrap();
    let submissions = |from: usize| -> Vec<(u32, Option<u32>)> {
        device.log.lock().unwrap().submissions[from..].iter().map(|s| (s.1, s.2)).collect()
    };
    assert_eq!(submissions(0), [(8, Some(0)), (8, Some(8)), (4, Some(16)), (1, None), (1, Some(20))]);
    assert_eq!((session.past(), session.tokens().len()), (21, 21));
    // A single id at the end of a prefill goes through everything at once.
    session.rewind(3).unwrap();
    assert!(session.logits().is_empty());
    session.prefill(&ids[..9]).unwrap();
    assert_eq!(submissions(5), [(8, Some(3)), (1, Some(11))]);
    assert_eq!(session.statistics().submissions, 7);
    // Scoring: a batch through the layers, then the head on some rows at a time.
    session.rewind(0).unwrap();
    let mut positions = Vec::new();
    session.score(&ids[..11], &mut |position, logits| positions.push((position, logits.len()))).unwrap();
    assert_eq!(positions, (0..11).map(|position| (position, 4096)).collect::<Vec<_>>());
    assert_eq!(submissions(7), [(8, Some(0)), (8, None), (3, Some(8)), (3, None)]);
}

#[test]
fn a_prefill_that_may_be_given_up_goes_in_parts() {
    let device = Arc::new(FakeDevice::new());
    let wide = EngineOptions { context: 256, batch: 64, ..options() };
    let mut session = load(&device, wide).unwrap().session().unwrap();
    let (ids, cancel): (Vec<u32>, _) = ((0..100).collect(), AtomicBool::new(false));
    assert!(session.prefill_until(&ids, &cancel).unwrap());
    session.rewind(0).unwrap();
    assert!(session.prefill_until(&ids[..64], &cancel).unwrap());
    let tokens: Vec<u32> = device.log.lock().unwrap().submissions.iter().map(|s| s.1).collect();
    // The first part finds out how fast the device is; each prefill ends with the head.
    assert_eq!(tokens, [16, 48, 36, 1, 64, 1]);
    cancel.store(true, Ordering::Relaxed);
    assert!(!session.prefill_until(&ids, &cancel).unwrap());
    assert_eq!(session.past(), 64);
    // What pads its lists is given whole ones.
    let device = Arc::new(FakeDevice::describing(|device| device.needs_constant_weights = true));
    let wide = EngineOptions { context: 256, batch: 64, ..options() };
    let mut session = load(&device, wide).unwrap().session().unwrap();
    assert!(session.prefill_until(&ids, &AtomicBool::new(false)).unwrap());
    let tokens: Vec<u32> = device.log.lock().unwrap().submissions.iter().map(|s| s.1).collect();
    assert!(tokens.ends_with(&[64, 36, 1]), "{tokens:?}");
}

#[test]
fn weights_of_a_lost_device_stay() {
    let lost = |device: &FakeDevice| {
        let mut log = device.log.lock().unwrap();
        log.fail_after = Some(log.submissions.len());
    };
    let ends: [fn(&Engine) -> RuntimeError; 2] = [
        |engine| engine.session().unwrap().prefill(&[1, 2]).unwrap_err(),
        |engine| {
            let mut observer = crate::Observer::new(engine, crate::Wanted::default()).unwrap();
            observer.run(&[1, 2], &mut |_, _| ()).unwrap_err()
        },
    ];
    for end in ends {
        let device = Arc::new(FakeDevice::new());
        let engine = load(&device, options()).unwrap();
        lost(&device);
        let error = end(&engine);
        assert!(error.is_device_lost(), "{error}");
        drop(engine);
        assert!(!device.log.lock().unwrap().live.is_empty(), "the file that the device views was given back");
    }
}

#[test]
fn mistakes_of_callers_are_errors_and_change_nothing() {
    let device = Arc::new(FakeDevice::new());
    let mut session = load(&device, options()).unwrap().session().unwrap();
    session.prefill(&[1, 2]).unwrap();
    assert!(matches!(session.prefill(&[]), Err(RuntimeError::NoTokens)));
    assert!(matches!(
        session.decode(4096),
        Err(RuntimeError::TokenId { id: 4096, index: 0, vocabulary: 4096 })
    ));
    assert!(matches!(session.prefill(&[1, u32::MAX]), Err(RuntimeError::TokenId { index: 1, .. })));
    assert!(matches!(
        session.prefill(&[0; 31]),
        Err(RuntimeError::ContextFull { past: 2, tokens: 31, context: 32 })
    ));
    assert!(matches!(session.score(&[0; 31], &mut |_, _| ()), Err(RuntimeError::ContextFull { .. })));
    assert!(matches!(session.rewind(3), Err(RuntimeError::Rewind { position: 3, past: 2 })));
    assert_eq!(session.tokens(), [1, 2]);
    session.prefill(&[0; 30]).unwrap();
    assert!(matches!(session.decode(0), Err(RuntimeError::ContextFull { past: 32, .. })));
}

#[test]
fn a_failed_submission_leaves_the_sequence_as_it_was() {
    let device = Arc::new(FakeDevice::new());
    let mut session = load(&device, options()).unwrap().session().unwrap();
    session.prefill(&[1, 2]).unwrap();
    device.log.lock().unwrap().fail_after = Some(2);
    let text = session.decode(3).unwrap_err().to_string();
    assert!(text.contains("device `first`, decoding") && text.contains("as the test wanted"), "{text}");
    assert_eq!(session.tokens(), [1, 2]);
    assert!(session.logits().is_empty());
    device.log.lock().unwrap().fail_after = None;
    session.decode(3).unwrap();
    assert_eq!(session.tokens(), [1, 2, 3]);
    // However many batches of the call were through.
    let fail_after = |count: usize| {
        let mut log = device.log.lock().unwrap();
        log.fail_after = Some(log.submissions.len() + count);
    };
    fail_after(1);
    session.prefill(&[0; 20]).unwrap_err();
    assert_eq!((session.tokens(), session.past()), (&[1, 2, 3][..], 3));
    fail_after(3);
    session.score(&[0; 20], &mut |_, _| ()).unwrap_err();
    assert_eq!(session.tokens(), [1, 2, 3]);
    device.log.lock().unwrap().fail_after = None;
    session.prefill(&[0; 20]).unwrap();
    assert_eq!(session.past(), 23);
}

#[test]
fn a_common_beginning_is_kept() {
    let device = Arc::new(FakeDevice::new());
    let mut session = load(&device, options()).unwrap().session().unwrap();
    session.prefill(&[1, 2, 3, 4]).unwrap();
    assert_eq!(session.reuse_prefix(&[1, 2, 9, 9]), 2);
    assert_eq!(session.tokens(), [1, 2]);
    assert_eq!(session.reuse_prefix(&[1, 2]), 1, "one id is left to make logits");
    assert_eq!(session.reuse_prefix(&[]), 0);
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_gguf(&GgufFile::open(story()).unwrap(), &TokenizerOptions::default()).unwrap()
}

/// The fake's logits are all 0, so that greedy always takes id 0, which ends the story model's texts.
fn greedy(max_tokens: Option<u32>, stop_at_end: bool) -> GenerateOptions {
    GenerateOptions {
        max_tokens,
        stop_at_end,
        sampling: SamplingOptions::greedy(),
        ..GenerateOptions::default()
    }
}

#[test]
fn generations_end_for_their_reasons() {
    let (device, tokenizer) = (Arc::new(FakeDevice::new()), tokenizer());
    let engine = load(&device, options()).unwrap();
    let cancel = AtomicBool::new(false);
    let generate = |options: &GenerateOptions| {
        let mut session = engine.session().unwrap();
        crate::generate(&mut session, &tokenizer, &[1, 2, 3], options, &mut |_| (), &cancel).unwrap()
    };
    let ended = generate(&greedy(Some(5), true));
    assert_eq!((ended.finish_reason, ended.ids.len()), (FinishReason::Stop, 0), "the marker is not shown");
    let limited = generate(&greedy(Some(5), false));
    assert_eq!((limited.finish_reason, &limited.ids[..]), (FinishReason::Length, &[0; 5][..]));
    assert_eq!((limited.timings.prompt_tokens, limited.timings.decode_tokens), (3, 4));
    assert_eq!(generate(&greedy(Some(0), false)).finish_reason, FinishReason::Length);
    let full = generate(&greedy(None, false));
    assert_eq!(
        (full.finish_reason, full.ids.len()),
        (FinishReason::Length, 30),
        "one more than the context holds"
    );
    cancel.store(true, Ordering::Relaxed);
    let cancelled = generate(&greedy(None, false));
    assert_eq!((cancelled.finish_reason, cancelled.timings.prompt_tokens), (FinishReason::Cancelled, 0));
}

#[test]
fn cancelling_while_text_comes_keeps_what_there_is() {
    let (device, tokenizer) = (Arc::new(FakeDevice::new()), tokenizer());
    let mut session = load(&device, options()).unwrap().session().unwrap();
    let cancel = AtomicBool::new(false);
    let hot = SamplingOptions { temperature: 1e9, seed: Some(3), top_k: 0, ..SamplingOptions::default() };
    let options = GenerateOptions { sampling: hot, stop_at_end: false, ..GenerateOptions::default() };
    let mut pieces = Vec::new();
    let mut on_text = |text: &str| {
        pieces.push(text.to_owned());
        cancel.store(pieces.len() == 3, Ordering::Relaxed);
    };
    let generation =
        crate::generate(&mut session, &tokenizer, &[1], &options, &mut on_text, &cancel).unwrap();
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert_eq!(generation.text, pieces.concat());
    assert!(generation.ids.len() >= 3 && session.past() > 3);
}

#[test]
fn stop_strings_are_not_shown() {
    let (device, tokenizer) = (Arc::new(FakeDevice::new()), tokenizer());
    let engine = load(&device, options()).unwrap();
    let hot = SamplingOptions { temperature: 1e9, seed: Some(3), top_k: 0, ..SamplingOptions::default() };
    let mut options = GenerateOptions { sampling: hot, stop_at_end: false, ..GenerateOptions::default() };
    let cancel = AtomicBool::new(false);
    let run = |options: &GenerateOptions| {
        let (mut shown, mut session) = (String::new(), engine.session().unwrap());
        let on_text = &mut |text: &str| shown.push_str(text);
        let generation = crate::generate(&mut session, &tokenizer, &[1], options, on_text, &cancel).unwrap();
        assert_eq!(generation.text, shown);
        generation
    };
    let whole = run(&options).text;
    // A stop string from the middle of what the same seed gives, across tokens.
    let at = whole.char_indices().nth(20).unwrap().0;
    let stop: String = whole[at..].chars().take(9).collect();
    options.stop = vec![stop.clone()];
    let stopped = run(&options);
    assert_eq!(stopped.finish_reason, FinishReason::Stop);
    assert_eq!(stopped.text, whole[..whole.find(&stop).unwrap()]);
}

#[test]
fn benches_measure_every_run() {
    let device = Arc::new(FakeDevice::new());
    let engine = load(&device, options()).unwrap();
    let options = crate::bench::BenchOptions { prompt: 20, generate: 10, repeats: 2 };
    let reports = crate::bench::bench(&[&engine, &engine], options, None).unwrap();
    assert_eq!(reports.len(), 2);
    for report in reports {
        assert_eq!((report.prompt_runs.len(), report.generate_runs.len()), (2, 2));
        // The fake counts no bytes, but skips nothing.
        let read = report.step_bytes.unwrap();
        assert!(read.ffn > 0.0 && read.total() - read.kv == engine.weight_bytes_uncounted().unwrap() as f64);
    }
    let skips = FakePlanner(|plan, _| plan.layers[3].ffn[0].sparsity = SparsityPolicy::GateFirst);
    let skipping = load_planned(&device, skips, self::options()).unwrap();
    let reports = crate::bench::bench(&[&skipping], options, None).unwrap();
    assert_eq!(reports[0].step_bytes, None);
    let few = crate::bench::bench(&[&engine], options, Some(&[1, 2, 3]));
    assert!(few.unwrap_err().to_string().contains("3 ids"));
    let too_long = crate::bench::BenchOptions { prompt: 33, ..options };
    assert!(matches!(crate::bench::bench(&[&engine], too_long, None), Err(RuntimeError::ContextFull { .. })));
}
