//! `inspect`: what is in a model file, and what would run where.

use crate::args::{Global, InspectArgs};
use crate::model::read_tokenizer;
use crate::output;
use crate::placed::Placed;
use crate::settings::Settings;
use anyhow::Result;
use engine_runtime::WeightType;
use engine_runtime::check::{CheckReport, check_file};
use formats::gguf::{Array, Value};
use formats::tokenizer::TokenizerOptions;
use formats::{GgufFile, ModelDescription, Tokenizer};
use serde_json::{Map, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Arrays up to this length are shown whole.
const SHORT_ARRAY: usize = 16;

/// Everything that is known of the file.
struct Inspection<'a> {
    file: &'a GgufFile,
    model: Result<ModelDescription>,
    tokenizer: Result<Tokenizer>,
    check: Option<CheckReport>,
}

pub(super) fn inspect(global: &Global, args: &InspectArgs) -> Result<ExitCode> {
    let settings = Settings::resolve(global, &args.engine, &args.size, None)?;
    let file = GgufFile::open(&args.model)?;
    let options =
        args.pre_tokenizer.as_ref().map_or_else(TokenizerOptions::default, TokenizerOptions::with_pre);
    let inspection = Inspection {
        file: &file,
        model: engine_runtime::describe(&file).map_err(Into::into),
        tokenizer: read_tokenizer(&file, &options),
        check: args.check.then(|| check_file(&file)),
    };
    let damaged = inspection.check.as_ref().is_some_and(|check| !check.faults.is_empty());
    let placed = Placed::would_be(&file, &settings);
    if args.json {
        let mut object = inspection.json(args.tensors);
        object.insert("placement".into(), placement_json(&placed));
        output::json(&object.into())?;
    } else {
        output::line(&inspection.text(args.tensors))?;
        output::line(&placement_text(&placed))?;
    }
    Ok(if damaged || placed.is_err() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The model as a run would place it, or why it cannot run.
type Placement = Result<(Placed, Vec<WeightType>)>;

fn placement_json(placed: &Placement) -> serde_json::Value {
    match placed {
        Ok((placed, types)) => {
            let types: Vec<serde_json::Value> = types
                .iter()
                .map(|of| {
                    json!({
                        "stored": of.stored.name(), "held": of.held.name(), "weights": of.weights,
                        "stored_bytes": of.stored_bytes, "held_bytes": of.held_bytes,
                    })
                })
                .collect();
            let (plan, plugins) = (placed.plan_json(), placed.plugins_json());
            json!({"runs": true, "plan": plan, "plugins": plugins, "weight_types": types})
        }
        Err(error) => json!({"runs": false, "reason": format!("{error:#}")}),
    }
}

fn placement_text(placed: &Placement) -> String {
    let (placed, types) = match placed {
        Ok(placed) => placed,
        Err(error) => return format!("cannot run here: {error:#}"),
    };
    let row = |of: &WeightType| {
        let how = match of.stored == of.held {
            true => "native".to_owned(),
            false => format!("converted at load to {}, {}", of.held, output::bytes(of.held_bytes)),
        };
        vec![of.stored.to_string(), of.weights.to_string(), output::bytes(of.stored_bytes), how]
    };
    let rows: Vec<Vec<String>> = types.iter().map(row).collect();
    let types = output::table(&["matrices", "count", "size", "how"], &rows);
    format!("would run:\n{}{}", indented(&placed.table()), indented(&types))
}

impl Inspection<'_> {
    fn json(&self, tensors: bool) -> Map<String, serde_json::Value> {
        let file = self.file;
        let mut object = Map::new();
        let mut add = |key: &str, value: serde_json::Value| object.insert(key.into(), value);
        add("path", json!(file.path()));
        add("container", json!(format!("{:?}", file.container())));
        add("version", json!(file.version()));
        add("alignment", json!(file.alignment()));
        add("bytes", json!(file.file_len()));
        add("data_start", json!(file.data_start()));
        add("model", self.model.as_ref().map_or_else(|e| json!({"error": format!("{e:#}")}), model_json));
        add(
            "tokenizer",
            self.tokenizer.as_ref().map_or_else(|e| json!({"error": format!("{e:#}")}), tokenizer_json),
        );
        let metadata: Map<String, serde_json::Value> =
            file.metadata().iter().map(|(key, value)| (key.to_owned(), value_json(value))).collect();
        add("metadata", metadata.into());
        let types: Vec<serde_json::Value> = self
            .histogram()
            .into_iter()
            .map(|(name, (count, bytes))| json!({"type": name, "tensors": count, "bytes": bytes}))
            .collect();
        add("types", types.into());
        add("tensor_count", json!(file.tensors().len()));
        if tensors {
            let list: Vec<serde_json::Value> = file
                .tensors()
                .iter()
                .map(|tensor| {
                    json!({
                        "name": tensor.name, "type": tensor.dtype.name(), "dims": tensor.dims,
                        "offset": tensor.file_range.start, "bytes": tensor.byte_len(),
                    })
                })
                .collect();
            add("tensors", list.into());
        }
        if let Some(check) = &self.check {
            let faults: Vec<serde_json::Value> = check
                .faults
                .iter()
                .map(|fault| {
                    json!({
                        "tensor": fault.tensor, "type": fault.dtype.name(), "block": fault.block,
                        "value": fault.value.to_string(), "blocks": fault.blocks,
                    })
                })
                .collect();
            add("check", json!({"tensors": check.tensors, "bytes": check.bytes, "faults": faults}));
        }
        add("notices", json!(self.notices()));
        object
    }

    fn text(&self, tensors: bool) -> String {
        let file = self.file;
        let mut text = format!(
            "{}: {:?} version {}, {} in {} tensors, alignment {}\n",
            file.path().display(),
            file.container(),
            file.version(),
            output::bytes(file.file_len()),
            file.tensors().len(),
            file.alignment(),
        );
        text.push_str(&match &self.model {
            Ok(model) => indented(&model_text(model)),
            Err(error) => format!("no model that is known here: {error:#}\n"),
        });
        text.push_str("metadata:\n");
        for (key, value) in file.metadata().iter() {
            let _ = writeln!(text, "  {key} = {}", value_text(value));
        }
        text.push_str("types:\n");
        let rows: Vec<Vec<String>> = self
            .histogram()
            .into_iter()
            .map(|(name, (count, bytes))| vec![name.into(), count.to_string(), output::bytes(bytes)])
            .collect();
        text.push_str(&indented(&output::table(&["type", "tensors", "size"], &rows)));
        if tensors {
            let rows: Vec<Vec<String>> = file
                .tensors()
                .iter()
                .map(|tensor| {
                    let dims: Vec<String> = tensor.dims.iter().map(u64::to_string).collect();
                    let offset = tensor.file_range.start.to_string();
                    let size = output::bytes(tensor.byte_len());
                    vec![tensor.name.clone(), tensor.dtype.name().into(), dims.join(" x "), size, offset]
                })
                .collect();
            text.push_str("tensors:\n");
            text.push_str(&indented(&output::table(&["name", "type", "dims", "size", "offset"], &rows)));
        }
        for notice in self.notices() {
            let _ = writeln!(text, "notice: {notice}");
        }
        if let Err(error) = &self.tokenizer {
            let _ = writeln!(text, "no tokenizer: {error:#}");
        }
        if let Some(check) = &self.check {
            let size = output::bytes(check.bytes);
            let _ =
                writeln!(text, "checked {} tensors, {size}: {} damaged", check.tensors, check.faults.len());
            for fault in &check.faults {
                let _ = writeln!(text, "  {fault}");
            }
        }
        text
    }

    /// Tensors and bytes by type.
    fn histogram(&self) -> BTreeMap<&'static str, (usize, u64)> {
        let mut types: BTreeMap<&'static str, (usize, u64)> = BTreeMap::new();
        for tensor in self.file.tensors() {
            let entry = types.entry(tensor.dtype.name()).or_default();
            entry.0 += 1;
            entry.1 += tensor.byte_len();
        }
        types
    }

    fn notices(&self) -> Vec<String> {
        let model = self.model.iter().flat_map(|model| model.notices.iter());
        model.chain(self.tokenizer.iter().flat_map(|tokenizer| tokenizer.notices())).cloned().collect()
    }
}

fn model_json(model: &ModelDescription) -> serde_json::Value {
    let first = model.layers.first();
    json!({
        "name": model.name,
        "architecture": model.architecture,
        "layers": model.n_layer(),
        "width": model.n_embd,
        "heads": first.map(|layer| layer.attention.n_head),
        "kv_heads": first.map(|layer| layer.attention.n_head_kv),
        "head_width": first.map(|layer| layer.attention.head_dim),
        "neurons": model.layers.iter().map(|layer| layer.ffn.n_ff).collect::<Vec<_>>(),
        "activation": first.map(|layer| layer.ffn.activation.name()),
        "vocabulary": model.vocab_size,
        "sampleable_vocabulary": model.sampleable_vocab,
        "trained_context": model.context_length,
        "tied_embeddings": matches!(model.output, formats::model::OutputHead::Tied),
        "layers_with_predictor": model.layers.iter().filter(|layer| layer.ffn.predictor.is_some()).count(),
    })
}

fn model_text(model: &ModelDescription) -> String {
    let mut text = format!(
        "{} ({}): {} layers, width {}, vocabulary {}, context {}\n",
        model.name,
        model.architecture,
        model.n_layer(),
        model.n_embd,
        model.vocab_size,
        model.context_length
    );
    if let Some(layer) = model.layers.first() {
        let (attention, ffn) = (&layer.attention, &layer.ffn);
        let predictors = model.layers.iter().filter(|layer| layer.ffn.predictor.is_some()).count();
        let _ = writeln!(
            text,
            "layer 0: {} heads of {}, {} for keys and values; {} neurons, {}; layers with predictors: {predictors}",
            attention.n_head,
            attention.head_dim,
            attention.n_head_kv,
            ffn.n_ff,
            ffn.activation.name()
        );
    }
    text
}

fn tokenizer_json(tokenizer: &Tokenizer) -> serde_json::Value {
    let ids = tokenizer.special_ids();
    json!({
        "tokens": tokenizer.vocab_size(),
        "bos": ids.bos,
        "eos": ids.eos,
        "eot": ids.eot,
        "adds_bos": tokenizer.adds_bos(),
        "ends_of_generation": tokenizer.ends_of_generation(),
        "chat_template": tokenizer.chat_template().is_some(),
    })
}

/// A value whole, but for long arrays, of which type and length are told.
fn value_json(value: &Value) -> serde_json::Value {
    match value {
        Value::String(bytes) => json!(String::from_utf8_lossy(bytes)),
        Value::Bool(truth) => json!(truth),
        Value::Array(array) => array_json(array),
        other => match (other.integer(), other.float()) {
            (Some(number), _) => {
                json!(i64::try_from(number).map_or_else(|_| json!(number.to_string()), |n| json!(n)))
            }
            (None, Some(number)) if number.is_finite() => json!(number),
            (None, number) => json!(number.map(|number| number.to_string())),
        },
    }
}

fn array_json(array: &Array) -> serde_json::Value {
    if array.len() > SHORT_ARRAY {
        return json!({"array_of": array.element_type().to_string(), "length": array.len()});
    }
    match array {
        Array::Strings(strings) => strings.iter().map(|s| json!(String::from_utf8_lossy(s))).collect(),
        Array::Bool(truths) => json!(truths),
        Array::Nested(arrays) => arrays.iter().map(array_json).collect(),
        other => match (other.integers(), other.floats()) {
            (Some(numbers), _) => {
                numbers.iter().map(|n| json!(i64::try_from(*n).unwrap_or(i64::MAX))).collect()
            }
            (None, numbers) => json!(numbers),
        },
    }
}

fn value_text(value: &Value) -> String {
    match value_json(value) {
        serde_json::Value::String(text) if text.chars().count() > 100 => {
            let start: String = text.chars().take(100).collect();
            format!("{start:?}... ({} bytes)", text.len())
        }
        serde_json::Value::Object(_) => value.brief(),
        other => other.to_string(),
    }
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}
