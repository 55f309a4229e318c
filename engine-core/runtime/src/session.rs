//! One sequence: its KV cache, its ids so far, and the logits after the last of them.

use crate::engine::Prepared;
use crate::graph::residual_stride;
use crate::host_binding::Submission;
use crate::resource::DeviceBuffer;
use crate::statistics::{DeviceCounters, Statistics};
use crate::{Engine, Result, RuntimeError};
use engine_core::HostMemory;
use engine_core::backend::{ActiveRanges, BufferUse, Counter, SequenceSpan};
use engine_core::operation::SlotId;
use formats::ModelDescription;
use std::sync::atomic::{AtomicBool, Ordering};

/// A sequence of tokens in the making. Made by [`Engine::session`].
///
/// After an error the ids of the call that failed are not part of the sequence, and no logits are known; calling again is
/// allowed.
pub struct Session {
    caches: Vec<DeviceBuffer>,
    residual: DeviceBuffer,
    ids_memory: HostMemory,
    positions_memory: HostMemory,
    logits_memory: HostMemory,
    active_memory: Vec<HostMemory>,
    /// Empty where the last token's logits are not known.
    logits: Vec<f32>,
    history: Vec<u32>,
    kv_bytes: u64,
    submissions: u64,
    active: Vec<u64>,
    active_tokens: u64,
    created: Snapshot,
    engine: Engine,
}

/// Counters at one moment.
#[derive(Clone, Default)]
pub(crate) struct Snapshot {
    submissions: u64,
    active: Vec<u64>,
    active_tokens: u64,
    backend: Vec<Counter>,
    storage: Vec<Counter>,
}

impl Session {
    pub(crate) fn new(engine: Engine) -> Result<Session> {
        let (backend, device) = (engine.backend(), engine.device());
        let allocate = |bytes, purpose, what: &str| {
            DeviceBuffer::allocate(backend, bytes, purpose).map_err(RuntimeError::device(device, what))
        };
        let host =
            |bytes| HostMemory::allocate(bytes).map_err(RuntimeError::device("host", "starting a session"));
        let body = &engine.body_list().graph;
        let (mut caches, mut kv_bytes) = (Vec::new(), 0);
        for (layer, &slot) in body.caches.iter().enumerate() {
            let bytes = body.list.slot(slot).map_or(0, |slot| slot.tensor.bytes());
            let what = format!(
                "allocating the KV cache of layer {layer}; lower [runtime] context if memory is short"
            );
            caches.push(allocate(bytes, BufferUse::KvCache, &what)?);
            kv_bytes += bytes;
        }
        let (model, batch) = (engine.model(), u64::from(engine.options().batch));
        let residual_bytes = batch * residual_stride(model, engine.row_alignment());
        let residual = allocate(residual_bytes, BufferUse::Activations, "allocating the residual")?;
        let ids_memory = host(batch * 4)?;
        let positions_memory = host(batch * 4)?;
        let logits_memory = host(u64::from(engine.score_rows()) * model.vocab_size as u64 * 4)?;
        let counted = engine.step_list().graph.active.len();
        let active_memory = (0..counted).map(|_| host(4)).collect::<Result<_>>()?;
        let mut session = Session {
            caches,
            residual,
            ids_memory,
            positions_memory,
            logits_memory,
            active_memory,
            logits: Vec::new(),
            history: Vec::new(),
            kv_bytes,
            submissions: 0,
            active: vec![0; engine.model().layers.len()],
            active_tokens: 0,
            created: Snapshot::default(),
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
        self.prefill_until(ids, &AtomicBool::new(false))?;
        Ok(&self.logits)
    }

    /// [`Session::prefill`], given up between batches when `cancel` is set; returns whether it came to its end.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn prefill_until(&mut self, ids: &[u32], cancel: &AtomicBool) -> Result<bool> {
        self.check(ids)?;
        let before = self.history.len();
        let result = self.prefill_batches(ids, cancel);
        self.or_forget(before, result)
    }

    /// After an error the sequence is what it was before the call, however far that came.
    fn or_forget<T>(&mut self, before: usize, result: Result<T>) -> Result<T> {
        if result.is_err() {
            self.history.truncate(before);
            self.logits.clear();
        }
        result
    }

    fn prefill_batches(&mut self, ids: &[u32], cancel: &AtomicBool) -> Result<bool> {
        let engine = self.engine.clone();
        let mut rest = ids;
        while !rest.is_empty() {
            if cancel.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let (batch, after) = rest.split_at(rest.len().min(engine.options().batch as usize));
            if let ([id], true) = (batch, after.is_empty()) {
                self.step(*id)?;
            } else {
                self.body(batch)?;
                if after.is_empty() {
                    self.head(engine.head_list(), batch.len() as u64 - 1, 1)?;
                    self.take_logits(0, self.past() - 1)?;
                }
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
        self.history.truncate(position as usize);
        self.logits.clear();
        Ok(())
    }

    /// Rewinds to what the sequence and `ids` have in common, leaving at least the last of `ids` to be appended;
    /// returns how many ids are kept: append `ids[kept..]`.
    pub fn reuse_prefix(&mut self, ids: &[u32]) -> usize {
        let common = self.history.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let kept = common.min(ids.len().saturating_sub(1));
        self.history.truncate(kept);
        self.logits.clear();
        kept
    }

    /// What was done since the session was made.
    pub fn statistics(&self) -> Statistics {
        self.statistics_since(&self.created)
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        Snapshot {
            submissions: self.submissions,
            active: self.active.clone(),
            active_tokens: self.active_tokens,
            backend: self.engine.backend().counters(),
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
        Statistics {
            weight_bytes_per_token: engine.weight_bytes_per_token(),
            weight_bytes: engine.weight_bytes(),
            weights_imported: engine.weights_imported(),
            kv_bytes: self.kv_bytes,
            submissions: self.submissions - before.submissions,
            active_neurons,
            devices: vec![
                DeviceCounters::between(engine.device(), &before.backend, engine.backend().counters()),
                DeviceCounters::between(tier, &before.storage, engine.storage().counters()),
            ],
        }
    }

    /// Ids exist and fit.
    fn check(&self, ids: &[u32]) -> Result<()> {
        self.engine.check_ids(ids, self.past())
    }

    /// One token through everything.
    fn step(&mut self, id: u32) -> Result<()> {
        let engine = self.engine.clone();
        let list = engine.step_list();
        let graph = &list.graph;
        self.write_ids(&[id])?;
        let mut submission = layers(list, &self.caches, 1, self.history.len() as u32);
        submission.host.extend(graph.ids.map(|slot| (slot, &mut self.ids_memory)));
        submission.host.extend(graph.positions.map(|slot| (slot, &mut self.positions_memory)));
        submission.host.extend(graph.logits.map(|slot| (slot, &mut self.logits_memory)));
        submission.host.extend(graph.active.iter().map(|&(_, slot)| slot).zip(&mut self.active_memory));
        run(&engine, list, submission, "decoding")?;
        self.submissions += 1;
        self.history.push(id);
        self.count_active()?;
        self.take_logits(0, self.past() - 1)
    }

    /// A batch through the layers; the residual stays on the device.
    fn body(&mut self, ids: &[u32]) -> Result<()> {
        let engine = self.engine.clone();
        let list = engine.body_list();
        self.write_ids(ids)?;
        let mut submission = layers(list, &self.caches, ids.len() as u32, self.history.len() as u32);
        submission.device.extend(list.graph.residual.map(|slot| (slot, self.residual.at(0))));
        submission.host.extend(list.graph.ids.map(|slot| (slot, &mut self.ids_memory)));
        submission.host.extend(list.graph.positions.map(|slot| (slot, &mut self.positions_memory)));
        run(&engine, list, submission, "prefill")?;
        self.submissions += 1;
        self.history.extend_from_slice(ids);
        self.logits.clear();
        Ok(())
    }

    /// Head on `rows` rows of the last body's residual from `row` on.
    fn head(&mut self, list: &Prepared, row: u64, rows: u32) -> Result<()> {
        let engine = self.engine.clone();
        let offset = row * residual_stride(engine.model(), engine.row_alignment());
        let mut submission = Submission { tokens: rows, ..Submission::default() };
        submission.device.extend(list.graph.residual.map(|slot| (slot, self.residual.at(offset))));
        submission.host.extend(list.graph.logits.map(|slot| (slot, &mut self.logits_memory)));
        run(&engine, list, submission, "computing logits")?;
        self.submissions += 1;
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
        for (&(layer, _), memory) in self.engine.step_list().graph.active.iter().zip(&self.active_memory) {
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

/// A submission of a list with layers, bound to the KV cache.
pub(crate) fn layers<'a>(
    list: &'a Prepared,
    caches: &[DeviceBuffer],
    tokens: u32,
    past: u32,
) -> Submission<'a> {
    let slots: &[SlotId] = &list.graph.caches;
    let ranges = list.graph.ranges.iter();
    Submission {
        tokens,
        device: slots.iter().zip(caches).map(|(&slot, cache)| (slot, cache.at(0))).collect(),
        host: Vec::new(),
        sequences: vec![SequenceSpan { first_token: 0, tokens, past, cache_base: 0 }],
        ranges: ranges.map(|(operation, ranges)| ActiveRanges { operation: *operation, ranges }).collect(),
    }
}

/// Neurons of a layer that a token could make active.
fn neurons_per_token(ffn: &formats::model::FeedForward) -> usize {
    let networks = ffn.experts.as_ref().map_or(1, |experts| experts.used);
    (ffn.n_ff * networks).max(1)
}

fn run(engine: &Engine, list: &Prepared, submission: Submission<'_>, doing: &str) -> Result<()> {
    submission
        .run(&**engine.backend(), list.executable.id())
        .map_err(RuntimeError::device(engine.device(), doing))
}
