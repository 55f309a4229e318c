//! A model that is loaded on the plug-ins that the settings ask for.

use crate::args::ModelArg;
use crate::failure::WithHint;
use crate::placement;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::stack::{self, PluginInUse};
use anyhow::Result;
use engine_core::planner::Fallback;
use engine_runtime::{Engine, EngineOptions};
use formats::tokenizer::TokenizerOptions;
use formats::{GgufFile, Tokenizer};
use serde_json::{Value, json};
use std::sync::OnceLock;

/// An engine with everything that was used to make it.
pub(crate) struct Running {
    /// The engine.
    pub(crate) engine: Engine,
    file: GgufFile,
    tokenizer: OnceLock<Tokenizer>,
    tokenizer_options: TokenizerOptions,
    plugins: Vec<PluginInUse>,
    fallbacks: Vec<Fallback>,
}

impl Running {
    /// Opens the file, the plug-ins and the model, and logs what runs where.
    ///
    /// # Errors
    /// Where any of them is refused.
    pub(crate) fn load(model: &ModelArg, settings: &Settings) -> Result<Running> {
        let file = GgufFile::open(&model.model)?;
        let tokenizer_options = model.tokenizer_options();
        Running::from_file(file, tokenizer_options, settings)
    }

    /// [`Running::load`] for an open file.
    pub(crate) fn from_file(
        file: GgufFile,
        tokenizer_options: TokenizerOptions,
        settings: &Settings,
    ) -> Result<Running> {
        let opened = stack::open(settings)?;
        for fallback in &opened.fallbacks {
            tracing::warn!("fallback: {fallback}");
        }
        let progress = Progress::start(format!("loading {}", file.path().display()));
        let options = EngineOptions {
            count_active: settings.count_active,
            ..EngineOptions::from_config(&settings.config)?
        };
        let engine = Engine::load_file(&file, opened.stack, options)?;
        drop(progress);
        let mut fallbacks = opened.fallbacks;
        fallbacks.extend(engine.plan().fallbacks.iter().cloned());
        let running = Running {
            engine,
            file,
            tokenizer: OnceLock::new(),
            tokenizer_options,
            plugins: opened.plugins,
            fallbacks,
        };
        running.announce();
        Ok(running)
    }

    /// The start-up table: what runs where, and why not as asked.
    fn announce(&self) {
        let model = self.engine.model();
        tracing::info!(
            "{}: {}, {} layers, context {}, {} of weights",
            model.name,
            model.architecture,
            model.n_layer(),
            self.engine.context(),
            crate::output::bytes(self.engine.weight_bytes()),
        );
        for line in placement::table(self.engine.plan()).lines() {
            tracing::info!("{line}");
        }
        let names: Vec<String> =
            self.plugins.iter().map(|plugin| format!("{} {}", plugin.kind, plugin.name)).collect();
        tracing::info!("plug-ins: {}", names.join(", "));
        for note in &self.engine.backend().describe().notes {
            tracing::debug!("{}: {note}", self.engine.device());
        }
    }

    /// The model's tokenizer, read when it is first needed.
    ///
    /// # Errors
    /// Where the file has none, or one that is not known.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer);
        }
        let tokenizer = read_tokenizer(&self.file, &self.tokenizer_options)?;
        for notice in tokenizer.notices() {
            tracing::warn!("{}: {notice}", self.file.path().display());
        }
        Ok(self.tokenizer.get_or_init(|| tokenizer))
    }

    /// What the model is, for `--json`.
    pub(crate) fn model_json(&self) -> Value {
        let model = self.engine.model();
        json!({
            "path": model.path,
            "name": model.name,
            "architecture": model.architecture,
            "layers": model.n_layer(),
            "vocabulary": model.vocab_size,
            "context": self.engine.context(),
            "trained_context": model.context_length,
            "weight_bytes": self.engine.weight_bytes(),
        })
    }

    /// What runs where, for `--json`.
    pub(crate) fn plan_json(&self) -> Value {
        let mut plan = placement::json(self.engine.plan(), &self.fallbacks);
        plan["device_notes"] = json!(self.engine.backend().describe().notes);
        plan
    }

    /// The plug-ins in use, for `--json`; `mapped` says whether the system shows the library in this process.
    pub(crate) fn plugins_json(&self) -> Value {
        let maps = std::fs::read_to_string("/proc/self/maps").ok();
        let mapped = |path: &std::path::Path| {
            let path = path.to_string_lossy();
            maps.as_ref().map(|maps| maps.lines().any(|line| line.ends_with(&*path)))
        };
        self.plugins
            .iter()
            .map(|plugin| {
                json!({
                    "kind": plugin.kind.name(),
                    "name": plugin.name,
                    "version": plugin.version,
                    "path": plugin.path,
                    "mapped": plugin.path.as_deref().and_then(mapped),
                })
            })
            .collect()
    }

    /// The start-up table with its fallbacks.
    pub(crate) fn placement_table(&self) -> String {
        let mut text = placement::table(self.engine.plan());
        for fallback in &self.fallbacks {
            text.push_str(&format!("fallback: {fallback}\n"));
        }
        text
    }
}

/// Reads a tokenizer; a failure says how another pre-tokenizer is named.
pub(crate) fn read_tokenizer(file: &GgufFile, options: &TokenizerOptions) -> Result<Tokenizer> {
    match Tokenizer::from_gguf(file, options) {
        Err(error) if error.to_string().contains("pre-tokenizer") => {
            Err(error).hint("--pre-tokenizer NAME overrides the file's")
        }
        other => Ok(other?),
    }
}

impl ModelArg {
    /// What the flags say about the tokenizer.
    pub(crate) fn tokenizer_options(&self) -> TokenizerOptions {
        self.pre_tokenizer.as_ref().map_or_else(TokenizerOptions::default, TokenizerOptions::with_pre)
    }
}
