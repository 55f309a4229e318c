//! A model that is loaded on the plug-ins that the settings ask for.

use crate::args::ModelArg;
use crate::failure::WithHint;
use crate::placed::Placed;
use crate::placement;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::stack;
use anyhow::{Result, anyhow};
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
    strict: bool,
    /// What runs where.
    pub(crate) placed: Placed,
}

impl Running {
    /// Opens the file, the plug-ins and the model, and logs what runs where.
    ///
    /// # Errors
    /// Where any of them is refused.
    pub(crate) fn load(model: &ModelArg, settings: &Settings) -> Result<Running> {
        let file = model.open()?;
        let tokenizer_options = model.tokenizer_options();
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
        let notes = engine.device_notes();
        let placed = Placed::new(engine.plan().clone(), notes, opened.plugins, opened.fallbacks);
        let strict = settings.config.general.strict;
        let running = Running { engine, file, tokenizer: OnceLock::new(), tokenizer_options, strict, placed };
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
            self.placed.plugins.iter().map(|plugin| format!("{} {}", plugin.kind, plugin.name)).collect();
        tracing::info!("plug-ins: {}", names.join(", "));
        for note in self.engine.device_notes() {
            tracing::debug!("{}: {note}", self.engine.device_names().join(", "));
        }
    }

    /// The model's tokenizer, read when it is first needed.
    ///
    /// # Errors
    /// Where the file has none, or one that is not known; under `strict`, where something is assumed for want of a key.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer> {
        if let Some(tokenizer) = self.tokenizer.get() {
            return Ok(tokenizer);
        }
        let tokenizer = read_tokenizer(&self.file, &self.tokenizer_options)?;
        if let Some(assumed) = tokenizer.assumptions().next().filter(|_| self.strict) {
            return Err(anyhow!("strict is on, and {}: {assumed}", self.file.path().display()))
                .hint("--pre-tokenizer NAME and --override KEY=VALUE say what the file does not");
        }
        for notice in tokenizer.notices() {
            // True of nearly every small vocabulary, and of no use to who runs a model; `inspect` tells it.
            if notice.contains("bytes have no token") {
                tracing::debug!("{}: {notice}", self.file.path().display());
            } else {
                tracing::warn!("{}: {notice}", self.file.path().display());
            }
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
    /// Opens the model's file, the overridden keys laid over its own, each with a line in the log.
    ///
    /// # Errors
    /// Where the file is refused, or a value does not suit its key.
    pub(crate) fn open(&self) -> Result<GgufFile> {
        let mut file = GgufFile::open(&self.model)?;
        for (key, text) in &self.overrides {
            let done = file.override_key(key, text).hint("--override KEY=VALUE (or THERMOCLINE_OVERRIDE)")?;
            match done.before {
                Some(before) => {
                    tracing::info!(
                        "override: {key} is {}, not the file's {}",
                        done.value.brief(),
                        before.brief()
                    );
                }
                None => tracing::warn!("override: {key} is {}; the file has no such key", done.value.brief()),
            }
        }
        Ok(file)
    }

    /// What the flags say about the tokenizer.
    pub(crate) fn tokenizer_options(&self) -> TokenizerOptions {
        self.pre_tokenizer.as_ref().map_or_else(TokenizerOptions::default, TokenizerOptions::with_pre)
    }
}
