//! Prompt in, text out: prefill, then sampling until something ends it.

use crate::stop::StopWatch;
use crate::{Result, Sampler, SamplingOptions, Session, Statistics};
use formats::Tokenizer;
use formats::tokenizer::StreamDecoder;
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How much to generate, and how.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Tokens at most; `None` goes on until the model ends or the context is full.
    pub max_tokens: Option<u32>,
    /// Texts that end the generation; they are not given out, nor is anything after them.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// Whether an end-of-generation token ends the generation (benchmarks and tests may go on).
    pub stop_at_end: bool,
}

impl Default for GenerateOptions {
    fn default() -> GenerateOptions {
        GenerateOptions {
            max_tokens: None,
            stop: Vec::new(),
            sampling: SamplingOptions::default(),
            stop_at_end: true,
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The model ended (an end-of-generation token) or a stop string was completed.
    Stop,
    /// The limit of tokens was reached, or the context is full.
    Length,
    /// The caller asked for it.
    Cancelled,
}

/// How long things took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Loading the engine.
    pub load_seconds: f64,
    /// Prompt tokens that were computed.
    pub prompt_tokens: u32,
    /// Time for them.
    pub prompt_seconds: f64,
    /// Speed.
    pub prompt_tokens_per_second: f64,
    /// Tokens that were computed one by one.
    pub decode_tokens: u32,
    /// Time for them, sampling included.
    pub decode_seconds: f64,
    /// Speed.
    pub decode_tokens_per_second: f64,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Generation {
    /// The ids that were given.
    pub prompt_ids: Vec<u32>,
    /// The ids that were sampled; an end-of-generation id is not among them.
    pub ids: Vec<u32>,
    /// Their text, up to a stop string.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Whether it was a stop string that ended it, and not the model.
    pub stop_string: bool,
    /// The seed that was used.
    pub seed: u64,
    /// How long things took.
    pub timings: Timings,
    /// What was done.
    pub statistics: Statistics,
}

/// Appends `prompt` to the session and generates. `on_text` gets the text as it comes, in whole characters; joined it is
/// [`Generation::text`]. Setting `cancel` (from a signal handler, say) ends it between two tokens or parts of a prefill
/// with what there is.
///
/// Where the context is full the generation ends with [`FinishReason::Length`]: nothing is ever shifted out.
///
/// # Errors
/// For a wrong option, as [`Session::prefill`], and where the device fails.
pub fn generate(
    session: &mut Session,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: &GenerateOptions,
    on_text: &mut dyn FnMut(&str),
    cancel: &AtomicBool,
) -> Result<Generation> {
    let mut sampler = Sampler::new(options.sampling.clone())?;
    let before = session.snapshot();
    let first_position = session.past();

    let started = Instant::now();
    let complete = session.prefill_until(prompt, cancel)?;
    let prompt_time = started.elapsed();
    let prompt_tokens = session.past() - first_position;

    let mut output = Output {
        text: String::new(),
        decoder: StreamDecoder::continuing(false),
        watch: StopWatch::new(&options.stop),
        stopped: false,
        on_text,
    };
    let mut ids = Vec::new();
    let started = Instant::now();
    let reason = if complete {
        sample_until_done(session, tokenizer, &mut sampler, options, &mut output, &mut ids, cancel)
    } else {
        Ok(FinishReason::Cancelled)
    };
    let decode_time = started.elapsed();
    output.finish();
    let finish_reason = reason?;
    let decode_tokens = session.past() - first_position - prompt_tokens;
    Ok(Generation {
        prompt_ids: prompt.to_vec(),
        ids,
        text: output.text,
        finish_reason,
        stop_string: output.stopped,
        seed: sampler.seed(),
        timings: Timings {
            load_seconds: session.engine().load_seconds(),
            prompt_tokens,
            prompt_seconds: prompt_time.as_secs_f64(),
            prompt_tokens_per_second: per_second(prompt_tokens, prompt_time),
            decode_tokens,
            decode_seconds: decode_time.as_secs_f64(),
            decode_tokens_per_second: per_second(decode_tokens, decode_time),
        },
        statistics: session.statistics_since(&before),
    })
}

fn sample_until_done(
    session: &mut Session,
    tokenizer: &Tokenizer,
    sampler: &mut Sampler,
    options: &GenerateOptions,
    output: &mut Output<'_>,
    ids: &mut Vec<u32>,
    cancel: &AtomicBool,
) -> Result<FinishReason> {
    loop {
        if options.max_tokens.is_some_and(|most| ids.len() >= most as usize) {
            return Ok(FinishReason::Length);
        }
        if cancel.load(Ordering::Relaxed) {
            return Ok(FinishReason::Cancelled);
        }
        let id = sampler.sample(session.sampleable_logits(), session.tokens());
        if options.stop_at_end && tokenizer.is_end_of_generation(id) {
            return Ok(FinishReason::Stop);
        }
        ids.push(id);
        let text = output.decoder.push(tokenizer, id);
        if output.push(&text) {
            return Ok(FinishReason::Stop);
        }
        // The last id allowed need not be computed: nothing is sampled after it.
        if options.max_tokens.is_some_and(|most| ids.len() >= most as usize)
            || session.past() >= session.engine().context()
        {
            return Ok(FinishReason::Length);
        }
        session.decode(id)?;
    }
}

/// The text on its way out.
struct Output<'a> {
    text: String,
    decoder: StreamDecoder,
    watch: StopWatch,
    /// Whether a stop string was completed: nothing more is given out.
    stopped: bool,
    on_text: &'a mut dyn FnMut(&str),
}

impl Output<'_> {
    /// Gives text out; returns whether a stop string was completed.
    fn push(&mut self, text: &str) -> bool {
        let watched = self.watch.push(text);
        self.emit(&watched.text);
        self.stopped = watched.stopped;
        watched.stopped
    }

    fn finish(&mut self) {
        if self.stopped {
            return;
        }
        let rest = self.decoder.finish();
        if !self.push(&rest) {
            let held = self.watch.finish();
            self.emit(&held);
        }
    }

    fn emit(&mut self, text: &str) {
        if !text.is_empty() {
            (self.on_text)(text);
            self.text.push_str(text);
        }
    }
}

pub(crate) fn per_second(tokens: u32, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { f64::from(tokens) / time.as_secs_f64() }
}
