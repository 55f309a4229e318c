//! What runs where, decided before a weight is read: options checked, the planner asked, the plan held against the
//! device.

use crate::conversions::Conversions;
use crate::engine::SCORE_ROWS;
use crate::fit::fit;
use crate::graph::{GraphOptions, OnDevice, body, head, step};
use crate::held;
use crate::options::EngineOptions;
use crate::profile::{hardware_profile, model_profile, uniform_plan};
use crate::stages::kv::Move;
use crate::stages::{Named, Program};
use crate::support::{condensed, denied, distinct};
use crate::weight::Weight;
use crate::weight_types;
use crate::{Result, RuntimeError, Stack};
use engine_core::planner::{
    Budget, HardwareProfile, LayerPlan, ModelProfile, Plan, SparsityKind, SparsityPolicy,
};
use engine_core::{ComputeBackend, Error};
use formats::model::{Layer, Requirement};
use formats::{Container, GgufFile, ModelDescription};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A model with a plan that its devices can run.
pub(crate) struct Planned {
    pub(crate) model: ModelDescription,
    pub(crate) options: EngineOptions,
    pub(crate) context: u32,
    pub(crate) profile: ModelProfile,
    pub(crate) plan: Plan,
    /// The plan's devices, in its order.
    pub(crate) devices: Vec<Named>,
    /// What each asks.
    pub(crate) on: Vec<OnDevice>,
    /// The weights that the lists of each device read, each once; nothing of a device without a part.
    pub(crate) weights: Vec<Vec<Weight>>,
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
        let question = Question::new(file, &model, stack, &options, context)?;
        let Drawn { mut plan, devices, on, weights, .. } = fit(&question)?;
        let profile = question.profile;
        tell(&model, &options, &plan)?;
        for (device, weights) in devices.iter().zip(&weights) {
            plan.fallbacks.extend(weight_types::fallbacks(weights, &device.name, options.strict)?);
        }
        Ok(Planned { model, options, context, profile, plan, devices, on, weights })
    }

    /// The lists of the plan.
    pub(crate) fn graphs(&self) -> Graphs<'_> {
        Graphs {
            model: &self.model,
            plan: &self.plan,
            options: &self.options,
            context: self.context,
            devices: &self.devices,
            on: &self.on,
        }
    }

    /// The devices with a part of the model, the one with embedding and head first.
    pub(crate) fn used(&self) -> Vec<&Named> {
        used(&self.plan, &self.devices)
    }

    /// Choices that the devices made, each behind its device's name where there are several.
    pub(crate) fn notes(&self) -> Vec<String> {
        notes(&self.used())
    }
}

/// The devices with a part of the model, the one with embedding and head first.
pub(crate) fn used<'a>(plan: &Plan, devices: &'a [Named]) -> Vec<&'a Named> {
    let others = plan.used_devices().into_iter().filter(|at| *at != plan.embedding);
    [plan.embedding].into_iter().chain(others).filter_map(|at| devices.get(at as usize)).collect()
}

pub(crate) fn notes(used: &[&Named]) -> Vec<String> {
    let of = |device: &&Named| -> Vec<String> {
        let notes = device.backend.describe().notes.clone();
        match used.len() {
            1 => notes,
            _ => notes.into_iter().map(|note| format!("{}: {note}", device.name)).collect(),
        }
    };
    used.iter().flat_map(of).collect()
}

/// The lists of one model, before the weights have places.
#[derive(Clone, Copy)]
pub(crate) struct Graphs<'a> {
    pub(crate) model: &'a ModelDescription,
    pub(crate) plan: &'a Plan,
    pub(crate) options: &'a EngineOptions,
    pub(crate) context: u32,
    pub(crate) devices: &'a [Named],
    pub(crate) on: &'a [OnDevice],
}

impl<'a> Graphs<'a> {
    pub(crate) fn options(&self) -> GraphOptions<'a> {
        GraphOptions {
            model: self.model,
            plan: &self.plan.layers,
            embedding: self.plan.embedding,
            activations: self.options.activations,
            context: self.context,
            count_active: self.options.count_active,
            devices: self.on,
        }
    }

    /// Asks each device for every operation of its lists; returns these, those for scoring among them, and the weights
    /// that they read, each once.
    fn check_support(&self) -> Result<(Vec<Program>, Vec<Vec<Weight>>)> {
        let options = self.options();
        let scored = SCORE_ROWS.min(self.options.batch);
        let graphs =
            [step(options)?, body(options, self.options.batch)?, head(options, 1)?, head(options, scored)?];
        let mut programs =
            graphs.into_iter().map(|graph| Program::of(graph, &[])).collect::<Result<Vec<_>>>()?;
        programs.extend(self.moves().into_iter().map(Move::program).collect::<Result<Vec<_>>>()?);
        self.check(&programs)?;
        let weights = (0..self.devices.len() as u32).map(|device| {
            let mut known = BTreeSet::new();
            let weights = programs.iter().filter_map(|program| program.weights.get(&device)).flatten();
            weights.filter(|weight| known.insert(weight.name.clone())).cloned().collect()
        });
        let weights = weights.collect();
        Ok((programs, weights))
    }

    /// Asks each device for every operation of its stages.
    pub(crate) fn check(&self, programs: &[Program]) -> Result<()> {
        for (at, Named { name, backend }) in self.devices.iter().enumerate() {
            let of_program = |program: &Program| {
                let stages = program.stages.iter().filter(|stage| stage.device as usize == at);
                stages.flat_map(|stage| denied(&**backend, &stage.list)).collect()
            };
            let denied = distinct(programs.iter().map(of_program));
            if let Some(first) = denied.first() {
                for line in condensed(&denied[1..]) {
                    tracing::warn!("device `{name}` also denies {line}");
                }
                return Err(first.error(name));
            }
        }
        Ok(())
    }

    /// The kinds of moves of keys and values: from where batches leave them to where single tokens need them, and back.
    pub(crate) fn moves(&self) -> BTreeSet<Move> {
        let layers = self.plan.layers.iter().zip(&self.model.layers);
        let there = layers.filter_map(|(plan, layer)| moved(plan, layer, self.context));
        there.flat_map(|moved| [moved, moved.back()]).collect()
    }
}

/// The move of a layer's keys and values, where batches and single tokens have their caches on different devices.
pub(crate) fn moved(plan: &LayerPlan, layer: &Layer, context: u32) -> Option<Move> {
    let prefill = plan.prefill.as_ref().filter(|prefill| prefill.attention != plan.attention)?;
    let attention = &layer.attention;
    Some(Move {
        from: prefill.attention,
        to: plan.attention,
        // Sizes that do not fit were refused when the lists were made.
        kv_heads: u32::try_from(attention.n_head_kv).unwrap_or(u32::MAX),
        head_dim: u32::try_from(attention.head_dim).unwrap_or(u32::MAX),
        context,
    })
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

/// What a planner is asked, and what its answers are turned into.
pub(crate) struct Question<'a> {
    pub(crate) model: &'a ModelDescription,
    pub(crate) options: &'a EngineOptions,
    stack: &'a Stack,
    context: u32,
    /// Length of the files, where the storage tier keeps them in memory.
    pub(crate) resident: Option<u64>,
    pub(crate) profile: ModelProfile,
    /// With memory as it is.
    pub(crate) hardware: HardwareProfile,
    budget: Budget,
}

/// A plan that its devices can run, with the lists that it comes to.
pub(crate) struct Drawn {
    pub(crate) plan: Plan,
    pub(crate) devices: Vec<Named>,
    pub(crate) on: Vec<OnDevice>,
    pub(crate) weights: Vec<Vec<Weight>>,
    pub(crate) programs: Vec<Program>,
}

impl Drawn {
    /// Whether more than one device has a part.
    pub(crate) fn is_divided(&self) -> bool {
        self.plan.used_devices().len() > 1
    }
}

impl<'a> Question<'a> {
    fn new(
        file: &GgufFile,
        model: &'a ModelDescription,
        stack: &'a Stack,
        options: &'a EngineOptions,
        context: u32,
    ) -> Result<Question<'a>> {
        let compute = &stack.compute;
        if compute.is_empty() {
            let problem = "is empty; name at least one device, such as \"cpu\"".into();
            return Err(RuntimeError::Option { option: "devices", problem });
        }
        for (option, name) in [("attention", &options.attention), ("prefill", &options.prefill)] {
            if let Some(name) = name.as_ref().filter(|name| compute.iter().all(|(device, _)| device != *name))
            {
                let known: Vec<&str> = compute.iter().map(|(device, _)| device.as_str()).collect();
                let problem = format!("is {name:?}, which is none of the devices: {}", known.join(", "));
                return Err(RuntimeError::Option { option, problem });
            }
        }
        let dense = uniform_plan(model, SparsityPolicy::Dense);
        // Whichever device is chosen, its weights take no more than this.
        let conversions = Conversions::largest(
            compute.iter().map(|(_, backend)| Conversions::of(&**backend, model, options.activations)),
        );
        let largest = [OnDevice { conversions, ..OnDevice::plain(1) }];
        let largest = GraphOptions {
            model,
            plan: &dense,
            embedding: 0,
            activations: options.activations,
            context,
            count_active: false,
            devices: &largest,
        };
        let profile = model_profile(file, largest, options, &body(largest, options.batch)?);
        let resident = stack.storage.describe().resident.then(|| file.file_len());
        let sparsity = options.sparsity.kind(model)?;
        let hardware = hardware_profile(model, compute, (options, sparsity), context, resident)?;
        let budget = Budget {
            slowdown: 0.0,
            strict: options.strict,
            sparsity,
            hot: options.hot.map(f64::from),
            attention: options.attention.clone(),
            prefill: options.prefill.clone(),
        };
        Ok(Question { model, options, stack, context, resident, profile, hardware, budget })
    }

    /// Bytes that a planner reckons with for lists on each device.
    pub(crate) fn allowance(&self) -> u64 {
        let divided = self.profile.divided_bytes.saturating_mul(self.profile.layers.len() as u64);
        self.profile.activation_bytes.saturating_add(divided)
    }

    /// A valid plan for this hardware, held to what was asked.
    ///
    /// # Errors
    /// The planner's own, and those of a plan that is none.
    pub(crate) fn ask(&self, hardware: &HardwareProfile) -> engine_core::Result<Plan> {
        let mut plan = self.stack.planner.plan(&self.profile, hardware, &self.budget)?;
        plan.validate(&self.profile)?;
        held::hold(&mut plan, &self.profile, hardware, &self.budget)?;
        Ok(plan)
    }

    /// An error of the planner, with the model's name and what can be done.
    pub(crate) fn failed(&self, error: Error) -> RuntimeError {
        let source = held::with_remedy(error, &self.profile, self.context);
        RuntimeError::Plan { path: self.model.path.clone(), source }
    }

    /// The lists of a plan, each operation of which its device can run.
    ///
    /// # Errors
    /// Where one cannot.
    pub(crate) fn draw(&self, plan: Plan) -> Result<Drawn> {
        let (model, options) = (self.model, self.options);
        let devices = devices(&plan, &self.stack.compute)?;
        let on = devices.iter().enumerate().map(|(at, device)| {
            let conversions = Conversions::of(&*device.backend, model, options.activations);
            let given = (conversions, self.resident);
            held::on_device(model, &plan, at as u32, device.backend.describe(), given)
        });
        let on: Vec<OnDevice> = on.collect::<Result<_>>()?;
        let graphs =
            Graphs { model, plan: &plan, options, context: self.context, devices: &devices, on: &on };
        let (programs, weights) = graphs.check_support()?;
        Ok(Drawn { plan, devices, on, weights, programs })
    }
}

/// Tells what is otherwise than asked for.
///
/// # Errors
/// Under `strict`, where anything is.
fn tell(model: &ModelDescription, options: &EngineOptions, plan: &Plan) -> Result<()> {
    for fallback in &plan.fallbacks {
        tracing::warn!("fallback: {fallback}");
    }
    for note in &plan.notes {
        tracing::warn!("plan: {note}");
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
    outside_of_levels(model, options, plan);
    if options.strict && !plan.fallbacks.is_empty() {
        return Err(RuntimeError::Strict { fallbacks: plan.fallbacks.clone() });
    }
    Ok(())
}

/// Tells where a share is asked for that nothing was calibrated for.
fn outside_of_levels(model: &ModelDescription, options: &EngineOptions, plan: &Plan) {
    let uses =
        |kind| plan.layers.iter().flat_map(|layer| &layer.ffn).any(|share| share.sparsity.kind() == kind);
    let calibration = &model.calibration;
    let levels =
        [(SparsityKind::Threshold, &calibration.cats), (SparsityKind::Bitplane, &calibration.bitplane)];
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

/// The plan's devices among those that are open.
fn devices(plan: &Plan, compute: &[(String, Arc<dyn ComputeBackend>)]) -> Result<Vec<Named>> {
    let find = |name: &String| {
        let found = compute.iter().find(|(device, _)| device == name);
        found.map(|(name, backend)| Named { name: name.clone(), backend: Arc::clone(backend) }).ok_or_else(
            || RuntimeError::Option {
                option: "devices",
                problem: format!(
                    "the plan by `{}` has device `{name}`, which is not among them",
                    plan.planner
                ),
            },
        )
    };
    plan.devices.iter().map(find).collect()
}
