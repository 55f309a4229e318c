//! A model that is ready to run: planned, its weights on the device, its lists prepared.

use crate::graph::{Graph, GraphOptions, Places, body, head, step};
use crate::options::EngineOptions;
use crate::profile::{hardware_profile, model_profile, uniform_plan, weight_bytes_per_token};
use crate::resource::Executable;
use crate::support::denied;
use crate::weights::Weights;
use crate::{Result, RuntimeError, Session};
use engine_core::cache::Region;
use engine_core::planner::{Budget, LayerPlan, ModelProfile, Plan, SparsityPolicy};
use engine_core::{CachePolicy, ComputeBackend, Planner, StorageTier};
use formats::{Container, GgufFile, ModelDescription, TensorInfo};
use std::collections::{BTreeMap, BTreeSet};
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
    context: u32,
    device: String,
    backend: Arc<dyn ComputeBackend>,
    storage: Arc<dyn StorageTier>,
    load_seconds: f64,
}

/// Rows that the head computes at once when scoring: enough to read the head's weights seldom, few enough that a large
/// vocabulary's logits stay small.
const SCORE_ROWS: u32 = 16;

impl Engine {
    /// Opens the model at `path` and gets it ready.
    ///
    /// # Errors
    /// Where the file is refused, nothing can run it, the plan is wrong, or a device or tier fails.
    pub fn load(path: impl AsRef<Path>, stack: Stack, options: EngineOptions) -> Result<Engine> {
        let file = GgufFile::open(path)?;
        Engine::load_file(&file, stack, options)
    }

    /// Gets the model of an open file ready.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load_file(file: &GgufFile, stack: Stack, mut options: EngineOptions) -> Result<Engine> {
        let started = Instant::now();
        let model = ModelDescription::from_gguf(file)?;
        for notice in &model.notices {
            tracing::warn!("{}: {notice}", model.path.display());
        }
        let context = check_options(&model, &mut options)?;
        check_predictors(file, &model, &options)?;
        let Stack { compute, storage, mut cache, planner } = stack;

        let described = started.elapsed();
        let (profile, plan) = plan(file, &model, &compute, &*planner, &options, context)?;
        let at = single_device(&plan, &compute)?;
        let (device, backend) = &compute[at];
        configure_cache(&profile, &mut *cache)?;

        let graphs = Graphs { model: &model, plan: &plan.layers, options: &options, context, backend };
        let tensors = graphs.check_support(device)?;
        let planned = started.elapsed();
        let weights = Weights::load(file.path(), file.file_len(), &tensors, &storage, (device, backend))?;
        let weighed = started.elapsed();
        let prepare = |graph: Graph, what: &str| -> Result<Prepared> {
            let executable = Executable::prepare(backend, &graph.list)
                .map_err(RuntimeError::device(device, &format!("preparing {what}")))?;
            Ok(Prepared { executable, graph })
        };
        let graph_options = graphs.options();
        let places = &weights.places;
        let step = prepare(step(graph_options, places)?, "decode")?;
        let body = prepare(body(graph_options, places, options.batch)?, "prefill")?;
        let head = prepare(head(graph_options, places, 1)?, "the head")?;
        let load_seconds = started.elapsed().as_secs_f64();
        tracing::debug!(
            "description {described:.1?}, plan {:.1?}, weights {:.1?}, lists {:.1?}",
            planned - described,
            weighed - planned,
            started.elapsed() - weighed,
        );
        tracing::debug!(
            "loaded in {load_seconds:.3} s: {} bytes of weights {} device `{device}`, context {context}",
            weights.bytes,
            if weights.imported { "viewed by" } else { "copied to" },
        );
        let (device, backend) = (device.clone(), Arc::clone(backend));
        let (score, cache) = (Mutex::new(None), Mutex::new(cache));
        let inner = Inner {
            step, body, head, score, weights, _cache: cache, model, plan, options, context, device, backend,
            storage, load_seconds,
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

    /// Bytes of weights on the device (or viewed by it), each tensor once: tied embeddings count once.
    pub fn weight_bytes(&self) -> u64 {
        self.inner.weights.bytes
    }

    /// Whether the device views the tier's memory instead of holding a copy.
    pub fn weights_imported(&self) -> bool {
        self.inner.weights.imported
    }

    /// Bytes of weights that one token reads where no neuron is skipped.
    pub fn weight_bytes_per_token(&self) -> u64 {
        weight_bytes_per_token(&self.inner.model)
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
        };
        let graph = head(graphs.options(), &inner.weights.places, self.score_rows())?;
        if let Some(denied) = denied(&*inner.backend, &graph.list).first() {
            return Err(denied.error(&inner.device));
        }
        let executable = Executable::prepare(&inner.backend, &graph.list)
            .map_err(RuntimeError::device(&inner.device, "preparing the head for scoring"))?;
        Ok(Arc::clone(score.insert(Arc::new(Prepared { executable, graph }))))
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

/// The lists of one model, before the weights have places.
struct Graphs<'a> {
    model: &'a ModelDescription,
    plan: &'a [LayerPlan],
    options: &'a EngineOptions,
    context: u32,
    backend: &'a Arc<dyn ComputeBackend>,
}

impl<'a> Graphs<'a> {
    fn options(&self) -> GraphOptions<'a> {
        GraphOptions {
            model: self.model,
            plan: self.plan,
            activations: self.options.activations,
            context: self.context,
            row_alignment: self.backend.describe().alignment,
            count_active: self.options.count_active,
        }
    }

    /// Asks for every operation of the plan's lists; returns the weights that they read, each once.
    fn check_support(&self, device: &str) -> Result<Vec<TensorInfo>> {
        let nowhere = &Places::nowhere();
        let options = self.options();
        let graphs = [
            step(options, nowhere)?,
            body(options, nowhere, self.options.batch)?,
            head(options, nowhere, 1)?,
        ];
        let (mut tensors, mut known) = (Vec::new(), BTreeSet::new());
        for graph in graphs {
            let denied = denied(&**self.backend, &graph.list);
            for denied in denied.iter().skip(1) {
                tracing::warn!("device `{device}` also denies {denied}");
            }
            if let Some(denied) = denied.first() {
                return Err(denied.error(device));
            }
            tensors.extend(graph.weights.into_iter().filter(|tensor| known.insert(tensor.name.clone())));
        }
        Ok(tensors)
    }
}

/// Checks the options against the model; returns the context.
fn check_options(model: &ModelDescription, options: &mut EngineOptions) -> Result<u32> {
    let trained = u32::try_from(model.context_length).unwrap_or(u32::MAX);
    let context = if options.context == 0 { trained } else { options.context };
    if context == 0 {
        return Err(RuntimeError::Option {
            option: "context",
            problem: "is 0 and so is the model's own; give the positions that you need".into(),
        });
    }
    if context > trained {
        tracing::warn!("context {context} is more than the {trained} that the model was trained for");
    }
    if options.batch == 0 {
        return Err(RuntimeError::Option { option: "batch", problem: "is 0; give at least 1".into() });
    }
    options.batch = options.batch.min(context);
    Ok(context)
}

/// Predictors that are asked for (or that the container promises) and are not there.
fn check_predictors(file: &GgufFile, model: &ModelDescription, options: &EngineOptions) -> Result<()> {
    let without = &model.layers_without_predictor;
    let some = without.len() < model.layers.len();
    let wanted = options.sparsity == crate::SparsityChoice::Predictor
        || (file.container() == Container::PowerInfer && options.sparsity == crate::SparsityChoice::Auto)
        || some;
    if !options.strict || !wanted || without.is_empty() {
        return Ok(());
    }
    let fallback = |layer: &usize| engine_core::planner::Fallback {
        what: format!("blk.{layer} ffn"),
        wanted: "predictor".into(),
        got: "no predictor".into(),
        reason: format!("the file has no blk.{layer}.fc1.weight and blk.{layer}.fc2.weight"),
    };
    Err(RuntimeError::Strict { fallbacks: without.iter().map(fallback).collect() })
}

fn plan(
    file: &GgufFile,
    model: &ModelDescription,
    compute: &[(String, Arc<dyn ComputeBackend>)],
    planner: &dyn Planner,
    options: &EngineOptions,
    context: u32,
) -> Result<(ModelProfile, Plan)> {
    if compute.is_empty() {
        let problem = "is empty; name at least one device, such as \"cpu\"".into();
        return Err(RuntimeError::Option { option: "devices", problem });
    }
    let failed = |source| RuntimeError::Plan { path: model.path.clone(), source };
    let dense = uniform_plan(model, SparsityPolicy::Dense);
    let largest = GraphOptions {
        model,
        plan: &dense,
        activations: options.activations,
        context,
        row_alignment: 1,
        count_active: false,
    };
    let profile = model_profile(file, model, &body(largest, &Places::nowhere(), options.batch)?);
    let hardware = hardware_profile(model, compute, options, context)?;
    let threshold = model.prediction.as_ref().map_or(0.0, |prediction| prediction.threshold);
    let sparsity = options.sparsity.policy(threshold);
    let budget = Budget { slowdown: 0.0, strict: options.strict, sparsity };
    let plan = planner.plan(&profile, &hardware, &budget).map_err(failed)?;
    plan.validate(&profile).map_err(failed)?;
    for fallback in &plan.fallbacks {
        tracing::warn!("fallback: {fallback}");
    }
    if options.strict && !plan.fallbacks.is_empty() {
        return Err(RuntimeError::Strict { fallbacks: plan.fallbacks });
    }
    Ok((profile, plan))
}

/// The one device that the plan uses, as an index into `compute`.
fn single_device(plan: &Plan, compute: &[(String, Arc<dyn ComputeBackend>)]) -> Result<usize> {
    let mut used = BTreeSet::from([plan.embedding]);
    for layer in &plan.layers {
        used.insert(layer.attention);
        used.extend(layer.ffn.iter().filter(|share| !share.clusters.is_empty()).map(|share| share.device));
    }
    let names: Vec<String> = used.iter().filter_map(|&at| plan.devices.get(at as usize).cloned()).collect();
    let [name] = &names[..] else {
        return Err(RuntimeError::Hybrid { planner: plan.planner.clone(), devices: names });
    };
    compute.iter().position(|(device, _)| device == name).ok_or_else(|| RuntimeError::Option {
        option: "devices",
        problem: format!("the plan by `{}` uses device `{name}`, which is not among them", plan.planner),
    })
}

/// A region per size of neuron, as large as all neurons of that size: everything is resident.
fn configure_cache(profile: &ModelProfile, cache: &mut dyn CachePolicy) -> Result<()> {
    let mut bytes_by_unit: BTreeMap<u64, u64> = BTreeMap::new();
    for layer in &profile.layers {
        let unit = layer.neuron_bytes.max(1);
        *bytes_by_unit.entry(unit).or_default() += unit.saturating_mul(u64::from(layer.neurons.max(1)));
    }
    let regions: Vec<Region> =
        bytes_by_unit.iter().map(|(&unit_bytes, &budget_bytes)| Region { unit_bytes, budget_bytes }).collect();
    cache.configure(&regions).map_err(|source| RuntimeError::Cache { source })?;
    tracing::debug!("every weight is resident: the cache policy is configured and never asked");
    Ok(())
}
