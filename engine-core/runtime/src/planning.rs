//! What runs where, decided before a weight is read: options checked, the planner asked, the plan held against the
//! device.

use crate::conversions::Conversions;
use crate::graph::{GraphOptions, Places, body, head, step};
use crate::held;
use crate::options::EngineOptions;
use crate::profile::{hardware_profile, model_profile, uniform_plan};
use crate::support::{condensed, denied, distinct};
use crate::weight::Weight;
use crate::weight_types;
use crate::{Result, RuntimeError, Stack};
use engine_core::ComputeBackend;
use engine_core::planner::{Budget, LayerPlan, ModelProfile, Plan, SparsityKind, SparsityPolicy};
use formats::model::Requirement;
use formats::{Container, GgufFile, ModelDescription};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A model with a plan that its device can run.
pub(crate) struct Planned {
    pub(crate) model: ModelDescription,
    pub(crate) options: EngineOptions,
    pub(crate) context: u32,
    pub(crate) profile: ModelProfile,
    pub(crate) plan: Plan,
    /// Index of the device.
    pub(crate) at: usize,
    /// Weight types that this device is given as others.
    pub(crate) conversions: Conversions,
    /// The weights that the lists read, each once.
    pub(crate) weights: Vec<Weight>,
}

/// What a model may ask for beyond a plain llama.
const SUPPORTED: &[Requirement] = &[
    Requirement::Unaligned,
    Requirement::SplitFiles,
    Requirement::LayerNorm,
    Requirement::NormOffset,
    Requirement::LearnedPositions,
    Requirement::Llama3Rope,
    Requirement::EmbeddingScale,
    Requirement::ParallelLayers,
    Requirement::PostNorms,
    Requirement::SlidingWindow,
    Requirement::RopePerLayer,
    Requirement::QkNorm,
    Requirement::AttentionScale,
    Requirement::FusedQkv,
    Requirement::FusedByGroup,
    Requirement::UngatedFeedForward,
    Requirement::Gelu,
    Requirement::PredictorFromLayerInput,
    Requirement::Experts,
    Requirement::Planes,
];

/// The model of a file, where it asks for nothing that is not built.
///
/// # Errors
/// Where the file holds no model, a wrong one, or one that cannot be run.
pub fn describe(file: &GgufFile) -> Result<ModelDescription> {
    let model = ModelDescription::describe(file)?;
    model.check_supported(SUPPORTED)?;
    Ok(model)
}

impl Planned {
    pub(crate) fn new(file: &GgufFile, stack: &Stack, mut options: EngineOptions) -> Result<Planned> {
        let model = describe(file)?;
        for notice in &model.notices {
            tracing::warn!("{}: {notice}", model.path.display());
        }
        let context = check_options(&model, &mut options)?;
        check_predictors(file, &model, &options)?;
        let (profile, mut plan) = plan(file, &model, stack, &options, context)?;
        let at = single_device(&plan, &stack.compute)?;
        let (device, backend) = &stack.compute[at];
        let conversions = Conversions::of(&**backend, &model, options.activations);
        let graphs = Graphs {
            model: &model,
            plan: &plan.layers,
            options: &options,
            context,
            backend,
            conversions: &conversions,
        };
        let weights = graphs.check_support(device)?;
        plan.fallbacks.extend(weight_types::fallbacks(&weights, device, options.strict)?);
        Ok(Planned { model, options, context, profile, plan, at, conversions, weights })
    }
}

/// The lists of one model, before the weights have places.
pub(crate) struct Graphs<'a> {
    pub(crate) model: &'a ModelDescription,
    pub(crate) plan: &'a [LayerPlan],
    pub(crate) options: &'a EngineOptions,
    pub(crate) context: u32,
    pub(crate) backend: &'a Arc<dyn ComputeBackend>,
    pub(crate) conversions: &'a Conversions,
}

impl<'a> Graphs<'a> {
    pub(crate) fn options(&self) -> GraphOptions<'a> {
        GraphOptions {
            model: self.model,
            plan: self.plan,
            activations: self.options.activations,
            context: self.context,
            row_alignment: self.backend.describe().alignment,
            count_active: self.options.count_active,
            conversions: self.conversions,
        }
    }

    /// Asks for every operation of the plan's lists; returns the weights that they read, each once.
    pub(crate) fn check_support(&self, device: &str) -> Result<Vec<Weight>> {
        let nowhere = &Places::nowhere();
        let options = self.options();
        let graphs = [
            step(options, nowhere)?,
            body(options, nowhere, self.options.batch)?,
            head(options, nowhere, 1)?,
        ];
        let denied = distinct(graphs.iter().map(|graph| denied(&**self.backend, &graph.list)));
        if let Some(first) = denied.first() {
            for line in condensed(&denied[1..]) {
                tracing::warn!("device `{device}` also denies {line}");
            }
            return Err(first.error(device));
        }
        let mut known = BTreeSet::new();
        let weights = graphs.into_iter().flat_map(|graph| graph.weights);
        Ok(weights.filter(|weight| known.insert(weight.name.clone())).collect())
    }
}

/// Checks the options against the model; returns the context.
pub(crate) fn check_options(model: &ModelDescription, options: &mut EngineOptions) -> Result<u32> {
    let trained = u32::try_from(model.context_length).unwrap_or(u32::MAX);
    let context = if options.context == 0 { trained } else { options.context };
    if context == 0 {
        return Err(RuntimeError::Option {
            option: "context",
            problem: "is 0 and so is the model's own; give the positions that you need".into(),
        });
    }
    if let Some(learned) = &model.positions {
        // Beyond the table there is nothing to add.
        let learned = learned.tensor.rows().saturating_sub(learned.offset as u64);
        if u64::from(context) > learned {
            let problem =
                format!("is {context}, but the model learned {learned} positions; give at most these");
            return Err(RuntimeError::Option { option: "context", problem });
        }
    }
    if context > trained {
        tracing::warn!("context {context} is more than the {trained} that the model was trained for");
    }
    if let Some(problem) = held::cache_problem(model, context) {
        return Err(RuntimeError::Option { option: "context", problem });
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
    stack: &Stack,
    options: &EngineOptions,
    context: u32,
) -> Result<(ModelProfile, Plan)> {
    let compute = &stack.compute;
    if compute.is_empty() {
        let problem = "is empty; name at least one device, such as \"cpu\"".into();
        return Err(RuntimeError::Option { option: "devices", problem });
    }
    let failed = |source| RuntimeError::Plan { path: model.path.clone(), source };
    let dense = uniform_plan(model, SparsityPolicy::Dense);
    // Whichever device is chosen, its weights take no more than this.
    let conversions = &Conversions::largest(
        compute.iter().map(|(_, backend)| Conversions::of(&**backend, model, options.activations)),
    );
    let largest = GraphOptions {
        model,
        plan: &dense,
        activations: options.activations,
        context,
        row_alignment: 1,
        count_active: false,
        conversions,
    };
    let profile = model_profile(file, largest, options, &body(largest, &Places::nowhere(), options.batch)?);
    let resident = stack.storage.describe().resident.then(|| file.file_len());
    let sparsity = options.sparsity.kind(model)?;
    let hardware = hardware_profile(model, compute, (options, sparsity), context, resident)?;
    let budget = Budget { slowdown: 0.0, strict: options.strict, sparsity };
    let plan = stack.planner.plan(&profile, &hardware, &budget);
    let mut plan = plan.map_err(|error| failed(held::with_remedy(error, &profile, context)))?;
    plan.validate(&profile).map_err(failed)?;
    held::hold(&mut plan, &profile, &hardware, sparsity).map_err(failed)?;
    for fallback in &plan.fallbacks {
        tracing::warn!("fallback: {fallback}");
    }
    let skips = |policy| matches!(policy, SparsityPolicy::Threshold { .. } | SparsityPolicy::Bitplane { .. });
    let shares = plan.layers.iter().flat_map(|layer| &layer.ffn);
    if options.skip > 0.0 && !shares.map(|share| share.sparsity).any(skips) {
        tracing::warn!(
            "skip = {}: nothing is skipped by it, for the plan has neither `threshold` nor `bitplane`; name one in \
             [planner] sparsity (--sparsity)",
            options.skip
        );
    }
    outside_of_levels(model, options, &plan);
    if options.strict && !plan.fallbacks.is_empty() {
        return Err(RuntimeError::Strict { fallbacks: plan.fallbacks });
    }
    Ok((profile, plan))
}

/// Tells where a share is asked for that nothing was calibrated for.
fn outside_of_levels(model: &ModelDescription, options: &EngineOptions, plan: &Plan) {
    let uses = |kind| plan.layers.iter().flat_map(|layer| &layer.ffn).any(|share| share.sparsity.kind() == kind);
    let calibration = &model.calibration;
    let levels = [(SparsityKind::Threshold, &calibration.cats), (SparsityKind::Bitplane, &calibration.bitplane)];
    for (kind, levels) in levels.into_iter().filter(|(kind, _)| options.skip > 0.0 && uses(*kind)) {
        let Some([first, .., last]) = levels.as_ref().map(|levels| levels.levels()) else { continue };
        if !(*first..=*last).contains(&options.skip) {
            let nearest = if options.skip < *first { first } else { last };
            tracing::warn!(
                "skip = {}: `{kind}` is calibrated for shares from {first} to {last}; {nearest} is used",
                options.skip
            );
        }
    }
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
