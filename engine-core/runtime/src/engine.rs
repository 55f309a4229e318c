//! A model that is ready to run: planned, its weights on the device, its lists prepared.

use crate::conversions::Conversions;
use crate::graph::{Graph, body, head, observed, step};
use crate::observe::Wanted;
use crate::options::EngineOptions;
use crate::planning::{Graphs, Planned};
use crate::profile::Sizes;
use crate::resource::Executable;
use crate::support::denied;
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
    /// The plan; the device can run it.
    pub plan: Plan,
    /// Name (in the config) of the device that would run the model.
    pub device: String,
    /// Choices that the device made, a sentence each.
    pub device_notes: Vec<String>,
    /// Positions of a session's KV cache.
    pub context: u32,
}

/// A model, ready to run. Clones are the same engine; sessions keep it alive.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

/// A list with its executable.
pub(crate) struct Prepared {
    pub(crate) executable: Executable,
    pub(crate) graph: Graph,
}

struct Inner {
    // Executables hold weights as constants, so they are declared (and dropped) before them.
    step: Prepared,
    body: Prepared,
    head: Prepared,
    score: Mutex<Option<Arc<Prepared>>>,
    weights: Weights,
    // The policy is kept although nothing is ever evicted: a model that is resident needs no decisions.
    _cache: Mutex<Box<dyn CachePolicy>>,
    model: ModelDescription,
    plan: Plan,
    options: EngineOptions,
    conversions: Conversions,
    context: u32,
    device: String,
    backend: Arc<dyn ComputeBackend>,
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

    /// What [`Engine::load_file`] would do, without reading, copying or preparing anything.
    ///
    /// # Errors
    /// As [`Engine::load`], but for what only shows when weights are brought to a device.
    pub fn plan_file(file: &GgufFile, stack: &Stack, options: EngineOptions) -> Result<Placement> {
        let planned = Planned::new(file, stack, options)?;
        let (device, backend) = &stack.compute[planned.at];
        let device_notes = backend.describe().notes.clone();
        Ok(Placement { device: device.clone(), device_notes, plan: planned.plan, context: planned.context })
    }

    /// Gets the model of an open file ready.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load_file(file: &GgufFile, stack: Stack, options: EngineOptions) -> Result<Engine> {
        let started = Instant::now();
        let planned = Planned::new(file, &stack, options)?;
        let Planned { model, options, context, profile, plan, at, conversions, weights } = planned;
        let Stack { compute, storage, mut cache, .. } = stack;
        let (device, backend) = &compute[at];
        configure_cache(&profile, &mut *cache)?;
        let planned = started.elapsed();
        let weights = Weights::load(&model, file.file_len(), &weights, &storage, (device, backend))?;
        let weighed = started.elapsed();
        let prepare = |graph: Graph, what: &str| -> Result<Prepared> {
            let executable = Executable::prepare(backend, &graph.list)
                .map_err(RuntimeError::device(device, &format!("preparing {what}")))?;
            Ok(Prepared { executable, graph })
        };
        let graphs = Graphs {
            model: &model,
            plan: &plan.layers,
            options: &options,
            context,
            backend,
            conversions: &conversions,
        };
        let graph_options = graphs.options();
        let places = &weights.places;
        let step = prepare(step(graph_options, places)?, "decode")?;
        let body = prepare(body(graph_options, places, options.batch)?, "prefill")?;
        let head = prepare(head(graph_options, places, 1)?, "the head")?;
        let load_seconds = started.elapsed().as_secs_f64();
        tracing::debug!(
            "plan {planned:.1?}, weights {:.1?}, lists {:.1?}",
            weighed - planned,
            started.elapsed() - weighed,
        );
        tracing::debug!(
            "loaded in {load_seconds:.3} s: {} bytes of weights, {} of them copied to device `{device}`, context \
             {context}",
            weights.bytes,
            weights.copied,
        );
        let (device, backend) = (device.clone(), Arc::clone(backend));
        let (score, cache) = (Mutex::new(None), Mutex::new(cache));
        let inner = Inner {
            step,
            body,
            head,
            score,
            weights,
            _cache: cache,
            model,
            plan,
            options,
            conversions,
            context,
            device,
            backend,
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

    /// Name (in the config) of the device that runs the model.
    pub fn device(&self) -> &str {
        &self.inner.device
    }

    /// The device that runs the model.
    pub fn backend(&self) -> &Arc<dyn ComputeBackend> {
        &self.inner.backend
    }

    /// The tier that the weights come from.
    pub fn storage(&self) -> &Arc<dyn StorageTier> {
        &self.inner.storage
    }

    /// Seconds that loading took, from reading the description to the last prepared list.
    pub fn load_seconds(&self) -> f64 {
        self.inner.load_seconds
    }

    /// Bytes of weights on the device (or viewed by it) as it has them, each once: tied embeddings count once.
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
        Sizes { model: &self.inner.model, conversions: &self.inner.conversions }.per_token()
    }

    pub(crate) fn conversions(&self) -> &Conversions {
        &self.inner.conversions
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

    /// The head for several rows, prepared when it is first needed.
    pub(crate) fn score_list(&self) -> Result<Arc<Prepared>> {
        let inner = &*self.inner;
        let mut score = lock(&inner.score);
        if let Some(prepared) = &*score {
            return Ok(Arc::clone(prepared));
        }
        let graphs = Graphs {
            model: &inner.model,
            plan: &inner.plan.layers,
            options: &inner.options,
            context: inner.context,
            backend: &inner.backend,
            conversions: &inner.conversions,
        };
        let graph = head(graphs.options(), &inner.weights.places, self.score_rows())?;
        if let Some(denied) = denied(&*inner.backend, &graph.list).first() {
            return Err(denied.error(&inner.device));
        }
        let executable = Executable::prepare(&inner.backend, &graph.list)
            .map_err(RuntimeError::device(&inner.device, "preparing the head for scoring"))?;
        Ok(Arc::clone(score.insert(Arc::new(Prepared { executable, graph }))))
    }

    /// A body that gives the host what is wanted of every layer.
    pub(crate) fn observed_list(&self, wanted: Wanted) -> Result<Prepared> {
        let inner = &*self.inner;
        let graphs = Graphs {
            model: &inner.model,
            plan: &inner.plan.layers,
            options: &inner.options,
            context: inner.context,
            backend: &inner.backend,
            conversions: &inner.conversions,
        };
        let graph = observed(graphs.options(), &inner.weights.places, inner.options.batch, wanted)?;
        if let Some(denied) = denied(&*inner.backend, &graph.list).first() {
            return Err(denied.error(&inner.device));
        }
        let executable = Executable::prepare(&inner.backend, &graph.list)
            .map_err(RuntimeError::device(&inner.device, "preparing to observe layers"))?;
        Ok(Prepared { executable, graph })
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

    /// Alignment of the residual's rows.
    pub(crate) fn row_alignment(&self) -> u64 {
        self.inner.backend.describe().alignment
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
