//! A model that is ready to run: planned, its weights on their devices, its lists prepared.

use crate::conversions::Conversions;
use crate::graph::{Graph, OnDevice, body, head, observed, step};
use crate::observe::Wanted;
use crate::options::EngineOptions;
use crate::planning::{Graphs, Planned, notes, used};
use crate::profile::Sizes;
use crate::stages::kv::Move;
use crate::stages::{Named, Prepared, Program, named};
use crate::weights::Weights;
use crate::{Result, RuntimeError, Session};
use engine_core::cache::Region;
use engine_core::planner::{ModelProfile, Plan};
use engine_core::{CachePolicy, ComputeBackend, Planner, StorageTier};
use formats::{GgufFile, ModelDescription};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What an engine runs on; the caller opens plug-ins and gives them here.
pub struct Stack {
    /// Devices by their names in the config, in the order of preference.
    pub compute: Vec<(String, Arc<dyn ComputeBackend>)>,
    /// Where weights come from.
    pub storage: Arc<dyn StorageTier>,
    /// What stays in memory when not everything fits.
    pub cache: Box<dyn CachePolicy>,
    /// What decides the placement.
    pub planner: Arc<dyn Planner>,
}

/// Where a model would run: the answer of [`Engine::plan_file`].
#[derive(Clone, Debug)]
pub struct Placement {
    /// The plan; its devices can run it.
    pub plan: Plan,
    /// Names (in the config) of the devices that would have a part of the model, the one with embedding and head first.
    pub devices: Vec<String>,
    /// Choices that these made, a sentence each; behind the device's name where there are several.
    pub device_notes: Vec<String>,
    /// Positions of a session's KV cache.
    pub context: u32,
}

impl Placement {
    pub(crate) fn of(planned: Planned) -> Placement {
        let devices = planned.used().into_iter().map(|device| device.name.clone()).collect();
        let device_notes = planned.notes();
        Placement { devices, device_notes, plan: planned.plan, context: planned.context }
    }
}

/// A model, ready to run. Clones are the same engine; sessions keep it alive.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    // Executables hold weights as constants, so they are declared (and dropped) before them.
    step: Prepared,
    body: Prepared,
    head: Prepared,
    score: Mutex<Option<Arc<Prepared>>>,
    /// Moves of the KV cache between devices.
    moves: BTreeMap<Move, Arc<Prepared>>,
    weights: Weights,
    // The policy is kept although nothing is ever evicted: a model that is resident needs no decisions.
    _cache: Mutex<Box<dyn CachePolicy>>,
    model: ModelDescription,
    plan: Plan,
    options: EngineOptions,
    context: u32,
    /// The plan's, in its order.
    devices: Vec<Named>,
    on: Vec<OnDevice>,
    storage: Arc<dyn StorageTier>,
    load_seconds: f64,
}

/// Rows that the head computes at once when scoring: enough to read the head's weights seldom, few enough that a large
/// vocabulary's logits stay small.
pub(crate) const SCORE_ROWS: u32 = 16;

impl Engine {
    /// Opens the model at `path` and gets it ready.
    ///
    /// # Errors
    /// Where the file is refused, nothing can run it, the plan is wrong, or a device or tier fails.
    pub fn load(path: impl AsRef<Path>, stack: Stack, options: EngineOptions) -> Result<Engine> {
        let file = GgufFile::open(path)?;
        Engine::load_file(&file, stack, options)
    }

    /// What [`Engine::load_file`] would do, without reading or copying anything. Lists are prepared with nothing in them, so
    /// that devices with a limited memory tell what they take, and given back.
    ///
    /// # Errors
    /// As [`Engine::load`], but for what only shows when weights are brought to a device.
    pub fn plan_file(file: &GgufFile, stack: &Stack, options: EngineOptions) -> Result<Placement> {
        Ok(Placement::of(Planned::new(file, stack, options)?))
    }

    /// Gets the model of an open file ready.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load_file(file: &GgufFile, stack: Stack, options: EngineOptions) -> Result<Engine> {
        let started = Instant::now();
        let planned = Planned::new(file, &stack, options)?;
        let Stack { storage, mut cache, .. } = stack;
        configure_cache(&planned.profile, &mut *cache)?;
        let seconds = started.elapsed();
        let (devices, files_len) = (&planned.devices, file.file_len());
        let weights = Weights::load(&planned.model, files_len, &planned.weights, &storage, devices)?;
        let weighed = started.elapsed();
        let graphs = planned.graphs();
        let prepare = |graph: Graph, what: &str| -> Result<Prepared> {
            Prepared::new(Program::of(graph, &weights.places)?, devices, what)
        };
        let graph_options = graphs.options();
        let step = prepare(step(graph_options)?, "decode")?;
        let body = prepare(body(graph_options, planned.options.batch)?, "prefill")?;
        let head = prepare(head(graph_options, 1)?, "the head")?;
        let moves = graphs.moves().into_iter().map(|moved| {
            let prepared = Prepared::new(moved.program()?, devices, "moves of the KV cache")?;
            Ok((moved, Arc::new(prepared)))
        });
        let moves = moves.collect::<Result<_>>()?;
        let load_seconds = started.elapsed().as_secs_f64();
        tracing::debug!(
            "plan {seconds:.1?}, weights {:.1?}, lists {:.1?}",
            weighed - seconds,
            started.elapsed() - weighed,
        );
        let used: Vec<String> = planned.used().iter().map(|device| format!("`{}`", device.name)).collect();
        tracing::debug!(
            "loaded in {load_seconds:.3} s: {} bytes of weights, {} of them copied to device {}, context {}",
            weights.bytes,
            weights.copied,
            used.join(", "),
            planned.context,
        );
        let Planned { model, options, context, plan, devices, on, .. } = planned;
        let inner = Inner {
            step,
            body,
            head,
            score: Mutex::new(None),
            moves,
            weights,
            _cache: Mutex::new(cache),
            model,
            plan,
            options,
            context,
            devices,
            on,
            storage,
            load_seconds,
        };
        Ok(Engine { inner: Arc::new(inner) })
    }

    /// A sequence of its own, with an empty KV cache.
    ///
    /// # Errors
    /// Where the device has no memory for the KV cache.
    pub fn session(&self) -> Result<Session> {
        Session::new(self.clone())
    }

    /// What the model is.
    pub fn model(&self) -> &ModelDescription {
        &self.inner.model
    }

    /// Where everything is.
    pub fn plan(&self) -> &Plan {
        &self.inner.plan
    }

    /// As given, with `batch` limited to the context.
    pub fn options(&self) -> &EngineOptions {
        &self.inner.options
    }

    /// Positions of a session's KV cache.
    pub fn context(&self) -> u32 {
        self.inner.context
    }

    /// Names (in the config) of the devices with a part of the model, the one with embedding and head first.
    pub fn device_names(&self) -> Vec<&str> {
        self.used().into_iter().map(|device| device.name.as_str()).collect()
    }

    /// These devices, in the same order.
    pub fn backends(&self) -> Vec<&Arc<dyn ComputeBackend>> {
        self.used().into_iter().map(|device| &device.backend).collect()
    }

    /// Choices that these devices made, a sentence each; behind the device's name where there are several.
    pub fn device_notes(&self) -> Vec<String> {
        notes(&self.used())
    }

    fn used(&self) -> Vec<&Named> {
        used(&self.inner.plan, &self.inner.devices)
    }

    /// The plan's devices, in its order.
    pub(crate) fn devices(&self) -> &[Named] {
        &self.inner.devices
    }

    /// The device with embedding and head.
    pub(crate) fn home(&self) -> Result<&Named> {
        named(&self.inner.devices, self.inner.plan.embedding)
    }

    /// The one device of a model that is not divided.
    ///
    /// # Errors
    /// [`RuntimeError::Hybrid`] where there are several; `what` says what needs one.
    pub(crate) fn only_device(&self, what: &'static str) -> Result<&Named> {
        match self.used()[..] {
            [device] => Ok(device),
            _ => Err(RuntimeError::Hybrid {
                what,
                planner: self.inner.plan.planner.clone(),
                devices: self.device_names().into_iter().map(str::to_owned).collect(),
            }),
        }
    }

    /// The tier that the weights come from.
    pub fn storage(&self) -> &Arc<dyn StorageTier> {
        &self.inner.storage
    }

    /// Seconds that loading took, from reading the description to the last prepared list.
    pub fn load_seconds(&self) -> f64 {
        self.inner.load_seconds
    }

    /// Bytes of weights in memory: what devices view, once, however many do, and what each holds itself. Tied embeddings
    /// count once.
    pub fn weight_bytes(&self) -> u64 {
        self.inner.weights.bytes
    }

    /// Bytes of weights that the device holds itself: copies of what it cannot view where the storage tier has it, and
    /// what is converted for it.
    pub fn weight_bytes_copied(&self) -> u64 {
        self.inner.weights.copied
    }

    /// Whether the device views the tier's memory, at least for some of the weights, instead of holding copies of all.
    pub fn weights_imported(&self) -> bool {
        self.inner.weights.copied < self.inner.weights.bytes
    }

    /// Bytes of weights that one token reads where no neuron is skipped.
    pub fn weight_bytes_per_token(&self) -> u64 {
        self.sizes().per_token()
    }

    /// Sizes as the device with embedding and head has them.
    pub(crate) fn sizes(&self) -> Sizes<'_> {
        self.sizes_on(self.inner.plan.embedding as usize)
    }

    /// Sizes as a device of the plan has them.
    pub(crate) fn sizes_on(&self, device: usize) -> Sizes<'_> {
        let on = self.inner.on.get(device);
        let conversions = on.map_or(Conversions::NONE, |device| &device.conversions);
        Sizes { model: &self.inner.model, conversions }
    }

    pub(crate) fn step_list(&self) -> &Prepared {
        &self.inner.step
    }

    pub(crate) fn body_list(&self) -> &Prepared {
        &self.inner.body
    }

    pub(crate) fn head_list(&self) -> &Prepared {
        &self.inner.head
    }

    fn graphs(&self) -> Graphs<'_> {
        let inner = &*self.inner;
        Graphs {
            model: &inner.model,
            plan: &inner.plan,
            options: &inner.options,
            context: inner.context,
            devices: &inner.devices,
            on: &inner.on,
        }
    }

    /// The head for several rows, prepared when it is first needed.
    pub(crate) fn score_list(&self) -> Result<Arc<Prepared>> {
        let inner = &*self.inner;
        let mut score = lock(&inner.score);
        if let Some(prepared) = &*score {
            return Ok(Arc::clone(prepared));
        }
        let prepared =
            self.prepare(head(self.graphs().options(), self.score_rows())?, "the head for scoring")?;
        Ok(Arc::clone(score.insert(Arc::new(prepared))))
    }

    /// A body that gives the host what is wanted of every layer.
    pub(crate) fn observed_list(&self, wanted: Wanted) -> Result<Prepared> {
        self.only_device("observing neurons")?;
        let graph = observed(self.graphs().options(), self.inner.options.batch, wanted)?;
        self.prepare(graph, "to observe layers")
    }

    fn prepare(&self, graph: Graph, what: &str) -> Result<Prepared> {
        let program = Program::of(graph, &self.inner.weights.places)?;
        self.graphs().check(std::slice::from_ref(&program))?;
        Prepared::new(program, &self.inner.devices, what)
    }

    /// What moves keys and values of a layer.
    pub(crate) fn move_list(&self, moved: Move) -> Result<Arc<Prepared>> {
        self.inner.moves.get(&moved).map(Arc::clone).ok_or_else(|| {
            let source = engine_core::Error::internal(format!("no list was prepared for {moved:?}"));
            RuntimeError::device("host", "moving the KV cache")(source)
        })
    }

    /// Ids that may be appended behind `past` others: at least one, of the vocabulary, within the context.
    pub(crate) fn check_ids(&self, ids: &[u32], past: u32) -> Result<()> {
        let (vocabulary, context) = (self.model().vocab_size, self.context());
        if ids.is_empty() {
            return Err(RuntimeError::NoTokens);
        }
        if let Some(index) = ids.iter().position(|&id| id as usize >= vocabulary || id > i32::MAX as u32) {
            return Err(RuntimeError::TokenId { id: ids[index], index, vocabulary });
        }
        if ids.len() > (context - past) as usize {
            return Err(RuntimeError::ContextFull { past, tokens: ids.len(), context });
        }
        Ok(())
    }

    /// Rows that [`Engine::score_list`] takes at once.
    pub(crate) fn score_rows(&self) -> u32 {
        SCORE_ROWS.min(self.inner.options.batch)
    }

    /// A device that is lost may be at work for ever, on weights where the storage tier has them: those stay until the
    /// program ends. Whatever runs lists of the engine tells it of their errors.
    pub(crate) fn keep_if_lost(&self, error: &RuntimeError) {
        if error.is_device_lost() {
            std::mem::forget(self.clone());
        }
    }

    /// Alignment of the residual's rows.
    pub(crate) fn row_alignment(&self) -> u64 {
        let home = self.inner.on.get(self.inner.plan.embedding as usize);
        home.map_or(1, |device| device.row_alignment)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A region per size of neuron, as large as all neurons of that size: everything is resident.
fn configure_cache(profile: &ModelProfile, cache: &mut dyn CachePolicy) -> Result<()> {
    let mut bytes_by_unit: BTreeMap<u64, u64> = BTreeMap::new();
    for layer in &profile.layers {
        let unit = layer.neuron_bytes.max(1);
        *bytes_by_unit.entry(unit).or_default() += unit.saturating_mul(u64::from(layer.neurons.max(1)));
    }
    let regions: Vec<Region> = bytes_by_unit
        .iter()
        .map(|(&unit_bytes, &budget_bytes)| Region { unit_bytes, budget_bytes })
        .collect();
    cache.configure(&regions).map_err(|source| RuntimeError::Cache { source })?;
    tracing::debug!("every weight is resident: the cache policy is configured and never asked");
    Ok(())
}
