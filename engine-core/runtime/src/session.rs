//! One sequence: its KV cache, its ids so far, and the logits after the last of them.

use crate::caches::{Caches, Phase};
use crate::graph::residual_stride;
use crate::resource::DeviceBuffer;
use crate::stages::{Bind, Bound, Named, Prepared, ProgramMemory, StageTimes, Times};
use crate::statistics::{DeviceCounters, Statistics};
use crate::{Engine, Result, RuntimeError};
use engine_core::HostMemory;
use engine_core::backend::{BufferUse, Counter};
use formats::ModelDescription;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A sequence of tokens in the making. Made by [`Engine::session`].
///
/// After an error the ids of the call that failed are not part of the sequence, and no logits are known; calling again is
/// allowed.
pub struct Session {
    caches: Caches,
    step_memory: ProgramMemory,
    body_memory: ProgramMemory,
    head_memory: ProgramMemory,
    residual: DeviceBuffer,
    ids_memory: HostMemory,
    positions_memory: HostMemory,
    logits_memory: HostMemory,
    active_memory: Vec<HostMemory>,
    /// Empty where the last token's logits are not known.
    logits: Vec<f32>,
    history: Vec<u32>,
    times: AllTimes,
    active: Vec<u64>,
    active_tokens: u64,
    created: Snapshot,
    pace: Pace,
    engine: Engine,
}

/// How many ids of a batch go at once, where it may be given up.
#[derive(Clone, Copy, Debug)]
struct Pace {
    most: usize,
    /// The last part that took too long: its ids, and seconds per id.
    slow: Option<(usize, f64)>,
    /// Whether larger parts were tried and did not pay.
    settled: bool,
}

/// A part of a batch has a multiple of so many ids, so that devices divide it as they would divide the batch.
const PART: usize = 16;
/// What a part may take: as long as a person waits without wondering.
const PATIENCE: Duration = Duration::from_millis(500);
/// Twice as many ids at once pay where one of them takes no more than this share of what it took.
const PAYS: f64 = 0.8;

impl Pace {
    /// Nothing is known of the devices yet: a part that is soon done on any.
    const UNKNOWN: Pace = Pace { most: PART, slow: None, settled: false };

    /// How many of so many ids that are left of a batch.
    fn next(self, left: usize) -> usize {
        left.min(self.most)
    }

    /// So many ids took so long: the next part is as large as patience allows. Where that is little, weights may be what
    /// takes the time, read anew for each part, and smaller parts would only multiply it: then parts double for as long as
    /// an id takes less in them.
    fn took(&mut self, ids: usize, time: Duration) {
        if ids < PART {
            return; // the time says more of the weights than of the ids
        }
        let each = time.as_secs_f64().max(1e-6) / ids as f64;
        let fits =
            |each: f64| ((PATIENCE.as_secs_f64() / each / PART as f64) as usize).max(1).saturating_mul(PART);
        if time <= PATIENCE {
            *self = Pace { most: fits(each), ..Pace::UNKNOWN };
            return;
        }
        match self.slow {
            _ if self.settled => {}
            Some((before, _)) if ids <= before => {} // the end of a batch
            Some((_, least)) if each > PAYS * least => {
                *self = Pace { most: fits(least), slow: None, settled: true };
            }
            _ => *self = Pace { most: ids.saturating_mul(2), slow: Some((ids, each)), settled: false },
        }
    }
}

/// Counters at one moment.
#[derive(Clone, Default)]
pub(crate) struct Snapshot {
    times: AllTimes,
    active: Vec<u64>,
    active_tokens: u64,
    kv_bytes_moved: u64,
    /// Per device of the engine.
    backends: Vec<Vec<Counter>>,
    storage: Vec<Counter>,
}

/// How often and how long each part ran.
#[derive(Clone, Default)]
struct AllTimes {
    step: Times,
    body: Times,
    head: Times,
    /// By the devices that keys and values were moved from and to.
    moves: BTreeMap<(u32, u32), Times>,
}

impl Session {
    pub(crate) fn new(engine: Engine) -> Result<Session> {
        let host =
            |bytes| HostMemory::allocate(bytes).map_err(RuntimeError::device("host", "starting a session"));
        let devices = engine.devices();
        let caches = Caches::new(&engine)?;
        let (model, batch) = (engine.model(), u64::from(engine.options().batch));
        let residual_bytes = batch * residual_stride(model, engine.row_alignment());
        let Named { name, backend } = engine.home()?;
        let residual = DeviceBuffer::allocate(backend, residual_bytes, BufferUse::Activations)
            .map_err(RuntimeError::device(name, "allocating the residual"))?;
        let ids_memory = host(batch * 4)?;
        let positions_memory = host(batch * 4)?;
        let logits_memory = host(u64::from(engine.score_rows()) * model.vocab_size as u64 * 4)?;
        let counted = engine.step_list().program.active.len();
        let active_memory = (0..counted).map(|_| host(4)).collect::<Result<_>>()?;
        let mut session = Session {
            caches,
            step_memory: ProgramMemory::new(engine.step_list(), devices)?,
            body_memory: ProgramMemory::new(engine.body_list(), devices)?,
            head_memory: ProgramMemory::new(engine.head_list(), devices)?,
            residual,
            ids_memory,
            positions_memory,
            logits_memory,
            active_memory,
            logits: Vec::new(),
            history: Vec::new(),
            times: AllTimes::default(),
            active: vec![0; engine.model().layers.len()],
            active_tokens: 0,
            created: Snapshot::default(),
            pace: Pace::UNKNOWN,
            engine,
        };
        session.created = session.snapshot();
        Ok(session)
    }

    /// The engine that runs it.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Ids in the KV cache, in order.
    pub fn tokens(&self) -> &[u32] {
        &self.history
    }

    /// Positions in use.
    pub fn past(&self) -> u32 {
        self.history.len() as u32 // never more than the context
    }

    /// Logits after the last token, one per row of the embedding (rows from
    /// [`sampleable_vocab`](formats::ModelDescription::sampleable_vocab) on have no token). Empty before the first token and
    /// after [`Session::rewind`].
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// The logits of ids that have a token: what may be sampled.
    pub fn sampleable_logits(&self) -> &[f32] {
        &self.logits[..self.logits.len().min(self.engine.model().sampleable_vocab)]
    }

    /// Appends ids in batches; returns the logits after the last.
    ///
    /// # Errors
    /// For no ids, ids that the model does not have, ids that do not fit the context, logits that are not finite, and
    /// where the device fails.
    pub fn prefill(&mut self, ids: &[u32]) -> Result<&[f32]> {
        self.prefill_all(ids, None)?;
        Ok(&self.logits)
    }

    /// [`Session::prefill`], given up when `cancel` is set; returns whether it came to its end. A batch that takes long goes
    /// in several parts, so that giving up does not: which ids go together changes no result.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn prefill_until(&mut self, ids: &[u32], cancel: &AtomicBool) -> Result<bool> {
        self.prefill_all(ids, Some(cancel))
    }

    fn prefill_all(&mut self, ids: &[u32], cancel: Option<&AtomicBool>) -> Result<bool> {
        self.check(ids)?;
        let before = self.history.len();
        let result = self.prefill_batches(ids, cancel);
        self.or_forget(before, result)
    }

    /// After an error the sequence is what it was before the call, however far that came.
    fn or_forget<T>(&mut self, before: usize, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.forget(before);
            self.engine.keep_if_lost(error);
        }
        result
    }

    fn prefill_batches(&mut self, ids: &[u32], cancel: Option<&AtomicBool>) -> Result<bool> {
        let engine = self.engine.clone();
        let cancelled = || cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed));
        // What compiles a list into graphs takes as long for one id as for all that the list has room for.
        let cut = cancel.is_some()
            && engine.backends().iter().all(|device| !device.describe().needs_constant_weights);
        // Where batches run elsewhere, one id that is left over runs there as well: which ids make a batch changes no result.
        let elsewhere = engine.plan().layers.iter().any(|layer| layer.prefill.is_some());
        let mut rest = ids;
        while !rest.is_empty() {
            if cancelled() {
                return Ok(false);
            }
            let (batch, after) = rest.split_at(rest.len().min(engine.options().batch as usize));
            if let ([id], true, false) = (batch, after.is_empty(), elsewhere) {
                self.step(*id)?;
                return Ok(true);
            }
            let mut left = batch;
            while !left.is_empty() {
                if cancelled() {
                    return Ok(false);
                }
                let (part, others) = left.split_at(if cut { self.pace.next(left.len()) } else { left.len() });
                let started = Instant::now();
                self.body(part)?;
                self.pace.took(part.len(), started.elapsed());
                if others.is_empty() && after.is_empty() {
                    self.head(engine.head_list(), part.len() as u64 - 1, 1)?;
                    self.take_logits(0, self.past() - 1)?;
                }
                left = others;
            }
            rest = after;
        }
        Ok(true)
    }

    /// Appends one id; returns the logits after it.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, id: u32) -> Result<&[f32]> {
        self.check(&[id])?;
        let before = self.history.len();
        let result = self.step(id);
        self.or_forget(before, result)?;
        Ok(&self.logits)
    }

    /// Appends ids and gives the logits after each: `on_logits(position, logits)`, positions counted from the start of
    /// the sequence.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn score(&mut self, ids: &[u32], on_logits: &mut dyn FnMut(u32, &[f32])) -> Result<()> {
        self.check(ids)?;
        let before = self.history.len();
        let result = self.score_batches(ids, on_logits);
        self.or_forget(before, result)
    }

    fn score_batches(&mut self, ids: &[u32], on_logits: &mut dyn FnMut(u32, &[f32])) -> Result<()> {
        let list = self.engine.score_list()?;
        let (batch, rows) = (self.engine.options().batch as usize, u64::from(self.engine.score_rows()));
        for batch in ids.chunks(batch) {
            let first = self.past();
            self.body(batch)?;
            let mut row = 0;
            while row < batch.len() as u64 {
                let count = rows.min(batch.len() as u64 - row);
                self.head(&list, row, count as u32)?;
                for at in 0..count {
                    let position = first + (row + at) as u32;
                    self.take_logits(at, position)?;
                    on_logits(position, &self.logits);
                }
                row += count;
            }
        }
        Ok(())
    }

    /// Forgets everything from `position` on; the next ids follow there.
    ///
    /// # Errors
    /// For a position beyond the present one.
    pub fn rewind(&mut self, position: u32) -> Result<()> {
        if position > self.past() {
            return Err(RuntimeError::Rewind { position, past: self.past() });
        }
        self.forget(position as usize);
        Ok(())
    }

    fn forget(&mut self, from: usize) {
        self.history.truncate(from);
        self.caches.forget(from as u32); // no more than the context
        self.logits.clear();
    }

    /// Rewinds to what the sequence and `ids` have in common, leaving at least the last of `ids` to be appended;
    /// returns how many ids are kept: append `ids[kept..]`.
    pub fn reuse_prefix(&mut self, ids: &[u32]) -> usize {
        let common = self.history.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let kept = common.min(ids.len().saturating_sub(1));
        self.forget(kept);
        kept
    }

    /// What was done since the session was made.
    pub fn statistics(&self) -> Statistics {
        self.statistics_since(&self.created)
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot {
            times: AllTimes { moves: self.caches.times(), ..self.times.clone() },
            active: self.active.clone(),
            active_tokens: self.active_tokens,
            kv_bytes_moved: self.caches.bytes_moved,
            backends: self.engine.backends().iter().map(|backend| backend.counters()).collect(),
            storage: self.engine.storage().counters(),
        }
    }

    pub(crate) fn statistics_since(&self, before: &Snapshot) -> Statistics {
        let engine = &self.engine;
        let tokens = self.active_tokens - before.active_tokens;
        let share = |(layer, &count): (usize, &u64)| {
            let neurons = engine.model().layers.get(layer).map_or(1, |layer| neurons_per_token(&layer.ffn));
            let earlier = before.active.get(layer).copied().unwrap_or(0);
            (count - earlier) as f64 / (tokens as f64 * neurons as f64)
        };
        let active_neurons =
            if tokens == 0 { Vec::new() } else { self.active.iter().enumerate().map(share).collect() };
        let tier = &engine.storage().describe().name;
        let used = engine.device_names().into_iter().zip(engine.backends());
        let counters = used.enumerate().map(|(at, (name, backend))| {
            let earlier = before.backends.get(at).map_or(&[][..], Vec::as_slice);
            DeviceCounters::between(name, earlier, backend.counters())
        });
        let counters = counters
            .chain([DeviceCounters::between(tier, &before.storage, engine.storage().counters())])
            .collect();
        let stages = self.stages_since(&before.times);
        Statistics {
            weight_bytes_per_token: engine.weight_bytes_per_token(),
            weight_bytes: engine.weight_bytes(),
            weights_imported: engine.weights_imported(),
            kv_bytes: self.caches.bytes,
            kv_bytes_moved: self.caches.bytes_moved - before.kv_bytes_moved,
            submissions: stages.iter().map(|stage| stage.submissions).sum(),
            stages,
            active_neurons,
            devices: counters,
        }
    }

    fn stages_since(&self, before: &AllTimes) -> Vec<StageTimes> {
        let engine = &self.engine;
        let names: Vec<&str> = engine.devices().iter().map(|device| device.name.as_str()).collect();
        let now = &self.times;
        let mut stages = now.body.since(&before.body, &engine.body_list().program, &names);
        stages.extend(now.head.since(&before.head, &engine.head_list().program, &names));
        stages.extend(now.step.since(&before.step, &engine.step_list().program, &names));
        stages.extend(self.caches.times_since(&before.moves, &names));
        stages
    }

    /// Ids exist and fit.
    fn check(&self, ids: &[u32]) -> Result<()> {
        self.engine.check_ids(ids, self.past())
    }

    /// One token through everything.
    fn step(&mut self, id: u32) -> Result<()> {
        let engine = self.engine.clone();
        let (list, past) = (engine.step_list(), self.past());
        self.write_ids(&[id])?;
        self.caches.ready(&engine, Phase::Step, past)?;
        let mut host = vec![
            (Bind::Ids, &mut self.ids_memory),
            (Bind::Positions, &mut self.positions_memory),
            (Bind::Logits, &mut self.logits_memory),
        ];
        host.extend(self.active_memory.iter_mut().enumerate().map(|(at, memory)| (Bind::Active(at), memory)));
        let bound = Bound {
            tokens: 1,
            past: Some(past),
            base: 0,
            residual: None,
            caches: self.caches.views(Phase::Step),
            host,
        };
        let spans = list.run(engine.devices(), &mut self.step_memory, bound, "decoding")?;
        self.times.step.add(&list.program, &spans);
        self.history.push(id);
        self.caches.filled(Phase::Step, self.past());
        self.count_active()?;
        self.take_logits(0, self.past() - 1)
    }

    /// A batch through the layers; the residual stays on the device.
    fn body(&mut self, ids: &[u32]) -> Result<()> {
        let engine = self.engine.clone();
        let (list, past) = (engine.body_list(), self.past());
        self.write_ids(ids)?;
        self.caches.ready(&engine, Phase::Body, past)?;
        let bound = Bound {
            tokens: ids.len() as u32,
            past: Some(past),
            base: 0,
            residual: Some(self.residual.at(0)),
            caches: self.caches.views(Phase::Body),
            host: vec![(Bind::Ids, &mut self.ids_memory), (Bind::Positions, &mut self.positions_memory)],
        };
        let spans = list.run(engine.devices(), &mut self.body_memory, bound, "prefill")?;
        self.times.body.add(&list.program, &spans);
        self.history.extend_from_slice(ids);
        self.caches.filled(Phase::Body, self.past());
        self.logits.clear();
        Ok(())
    }

    /// Head on `rows` rows of the last body's residual from `row` on.
    fn head(&mut self, list: &Prepared, row: u64, rows: u32) -> Result<()> {
        let engine = self.engine.clone();
        let offset = row * residual_stride(engine.model(), engine.row_alignment());
        let bound = Bound {
            tokens: rows,
            past: None,
            base: 0,
            residual: Some(self.residual.at(offset)),
            caches: Vec::new(),
            host: vec![(Bind::Logits, &mut self.logits_memory)],
        };
        let spans = list.run(engine.devices(), &mut self.head_memory, bound, "computing logits")?;
        self.times.head.add(&list.program, &spans);
        Ok(())
    }

    /// Ids, and the rows of their positions where these are learned.
    fn write_ids(&mut self, ids: &[u32]) -> Result<()> {
        let signed: Vec<i32> = ids.iter().map(|&id| id as i32).collect(); // `check` saw that they fit
        self.ids_memory.write(0, &signed).map_err(RuntimeError::device("host", "passing the ids"))?;
        let rows = position_rows(self.engine.model(), self.past(), ids.len());
        self.positions_memory.write(0, &rows).map_err(RuntimeError::device("host", "passing the positions"))
    }

    /// Reads row `row` of the logits from the host's memory, those after the token at `position`, and checks it.
    fn take_logits(&mut self, row: u64, position: u32) -> Result<()> {
        let model = self.engine.model();
        let (width, sampleable) = (model.vocab_size, model.sampleable_vocab);
        self.logits.resize(width, 0.0);
        self.logits_memory
            .read(row * width as u64 * 4, &mut self.logits)
            .map_err(RuntimeError::device("host", "reading the logits"))?;
        let row = &self.logits[..sampleable.min(width)];
        // Without a branch per element, so that it costs nothing beside the head itself.
        if row.iter().fold(true, |finite, value| finite & value.is_finite()) {
            return Ok(());
        }
        let id = row.iter().position(|value| !value.is_finite()).unwrap_or(0);
        let value = row[id];
        self.logits.clear();
        Err(RuntimeError::NonFinite { position, id, value })
    }

    fn count_active(&mut self) -> Result<()> {
        if self.active_memory.is_empty() {
            return Ok(());
        }
        for (&layer, memory) in self.engine.step_list().program.active.iter().zip(&self.active_memory) {
            let mut count = [0i32];
            memory.read(0, &mut count).map_err(RuntimeError::device("host", "reading the active counts"))?;
            self.active[layer] += u64::from(count[0].max(0).cast_unsigned());
        }
        self.active_tokens += 1;
        Ok(())
    }
}

/// The rows of a model's learned positions for `count` tokens from position `past` on; none where it has none.
pub(crate) fn position_rows(model: &ModelDescription, past: u32, count: usize) -> Vec<i32> {
    let Some(learned) = &model.positions else { return Vec::new() };
    // No more than the rows of the table, which was held against the context.
    let first = past as usize + learned.offset;
    (first..first + count).map(|row| i32::try_from(row).unwrap_or(i32::MAX)).collect()
}

/// Neurons of a layer that a token could make active.
fn neurons_per_token(ffn: &formats::model::FeedForward) -> usize {
    let networks = ffn.experts.as_ref().map_or(1, |experts| experts.used);
    (ffn.n_ff * networks).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_takes_about_as_long_as_a_person_waits() {
        let after = |parts: &[(usize, u64)]| {
            let mut pace = Pace::UNKNOWN;
            for &(ids, milliseconds) in parts {
                pace.took(ids, Duration::from_millis(milliseconds));
            }
            pace.next(512)
        };
        assert_eq!(
            (after(&[]), after(&[(16, 100)]), after(&[(16, 0)]), after(&[(3, 60_000)])),
            (16, 80, 512, 16)
        );
        // Ids take the time: twice as many are tried once, and take twice as long.
        assert_eq!((after(&[(64, 1000)]), after(&[(64, 1000), (128, 2000)])), (128, 32));
        assert_eq!(after(&[(64, 1000), (128, 2000), (32, 600), (32, 500)]), 32);
        // Weights that are read anew do.
        let reading = [(16, 9000), (32, 9100), (64, 9300), (128, 9600)];
        assert_eq!((after(&reading[..1]), after(&reading[..3]), after(&reading)), (32, 128, 256));
        assert_eq!(
            after(&[(16, 9000), (32, 9100), (5, 9000), (16, 9000)]),
            64,
            "the end of a batch says nothing"
        );
    }
}
