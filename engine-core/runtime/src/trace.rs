//! What a session submits, list by list, with the bytes that it binds: for tools that run a model's operations one by
//! one, such as the divergence finder.
//!
//! A [`Trace`] needs no device: it is made from the file and the ids alone. Prefill comes first, in batches, each
//! followed by the head on all its tokens; then one submission per decoded id.

use crate::EngineOptions;
use crate::graph::{Graph, GraphOptions, OnDevice, body, head, step};
use crate::options::{Activations, SparsityChoice};
use crate::session::position_rows;
use crate::weight::Weight;
use crate::{Result, RuntimeError};
use engine_core::backend::SequenceSpan;
use engine_core::operation::{OperationList, SlotId, SlotRole};
use engine_core::planner::{FfnShare, LayerPlan, SparsityPolicy};
use engine_core::{ClusterRange, ClusterSet, DType};
use formats::{GgufFile, ModelDescription, TensorInfo};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

/// What decides a trace besides the model.
#[derive(Clone, Debug)]
pub struct TraceOptions {
    /// The ids, prompt and continuation.
    pub ids: Vec<u32>,
    /// How many of the last ids are decoded one by one instead of prefilled.
    pub decoded: u32,
    /// Tokens of a prefill batch; at least 1.
    pub batch: u32,
    /// How activations meet quantised weights.
    pub activations: Activations,
    /// How neurons are skipped; `Auto` is exact skipping where the activation function allows it.
    pub sparsity: SparsityChoice,
    /// Into how many ranges of neurons each feed-forward layer is divided, an operation each; at least 1.
    pub shares: u32,
    /// Alignment of rows in bytes that the device asks for.
    pub alignment: u64,
}

/// One submission.
#[derive(Clone, Debug)]
pub struct Submission {
    /// What it is for, such as `prefill of 8 tokens from position 0`.
    pub what: String,
    /// The list. Views of constants name no buffer: [`Trace::bytes`] has what is in them.
    pub list: OperationList,
    /// Tokens.
    pub tokens: u32,
    /// Where they stand.
    pub sequences: Vec<SequenceSpan>,
    /// Active ranges by operation; an operation that is not named covers all its neurons.
    pub ranges: Vec<(u32, Vec<ClusterRange>)>,
    /// Names of states that go on from one submission to the next; two slots of one name are one memory.
    pub kept: BTreeMap<SlotId, String>,
    /// The ids that it takes, where it takes ids.
    pub ids: Option<(SlotId, Vec<u32>)>,
    /// The rows of its learned positions that it takes, where it takes any.
    pub positions: Option<(SlotId, Vec<i32>)>,
}

/// The submissions of a model for some ids.
pub struct Trace<'a> {
    file: &'a GgufFile,
    weights: BTreeMap<String, Weight>,
    submissions: Vec<Submission>,
}

impl<'a> Trace<'a> {
    /// Makes the lists.
    ///
    /// # Errors
    /// Where the file holds no model that can be run, there are no ids, or one is not in the vocabulary.
    pub fn new(file: &'a GgufFile, options: &TraceOptions) -> Result<Trace<'a>> {
        let model = crate::describe(file)?;
        check_ids(&model, &options.ids)?;
        let plan = shared_plan(&model, options)?;
        // One position more than the ids need: a device that reads it reads what was never written.
        let context = u32::try_from(options.ids.len()).unwrap_or(u32::MAX).saturating_add(1);
        let decoded = (options.decoded as usize).min(options.ids.len());
        let (prompt, rest) = options.ids.split_at(options.ids.len() - decoded);
        let graph_options = GraphOptions {
            model: &model,
            plan: &plan,
            embedding: 0,
            activations: options.activations,
            context,
            count_active: false,
            devices: &[OnDevice::plain(options.alignment)],
        };
        let mut trace = Trace { file, weights: BTreeMap::new(), submissions: Vec::new() };
        let mut past = 0;
        for batch in prompt.chunks(options.batch.max(1) as usize) {
            let capacity = batch.len() as u32; // at most the batch
            let layers = body(graph_options, capacity)?;
            trace.push(
                &model,
                format!("prefill of {capacity} tokens from position {past}"),
                layers,
                batch,
                past,
            );
            let last = head(graph_options, capacity)?;
            trace.push(
                &model,
                format!("logits of {capacity} tokens from position {past}"),
                last,
                batch,
                past,
            );
            past += capacity;
        }
        for id in rest {
            let whole = step(graph_options)?;
            trace.push(&model, format!("decoding at position {past}"), whole, &[*id], past);
            past += 1;
        }
        Ok(trace)
    }

    fn push(&mut self, model: &ModelDescription, what: String, graph: Graph, ids: &[u32], past: u32) {
        let tokens = ids.len() as u32;
        let caches =
            graph.caches.iter().enumerate().map(|(layer, slot)| (*slot, format!("kv cache {layer}")));
        let residual = graph.residual.map(|slot| (slot, "residual".to_owned()));
        self.weights.extend(graph.weights.into_iter().map(|weight| (weight.name.clone(), weight)));
        self.submissions.push(Submission {
            what,
            kept: caches.chain(residual).collect(),
            list: graph.list,
            tokens,
            sequences: vec![SequenceSpan { first_token: 0, tokens, past, cache_base: 0 }],
            ranges: graph.ranges,
            ids: graph.ids.map(|slot| (slot, ids.to_vec())),
            positions: graph.positions.map(|slot| (slot, position_rows(model, past, ids.len()))),
        });
    }

    /// The submissions, in order.
    pub fn submissions(&self) -> &[Submission] {
        &self.submissions
    }

    /// What a constant or an input of a submission holds; `None` for other slots.
    pub fn bytes(&self, submission: &Submission, slot: SlotId) -> Option<Cow<'_, [u8]>> {
        if let Some((_, ids)) = submission.ids.as_ref().filter(|(input, _)| *input == slot) {
            return Some(ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>().into());
        }
        if let Some((_, rows)) = submission.positions.as_ref().filter(|(input, _)| *input == slot) {
            return Some(rows.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<u8>>().into());
        }
        let found = submission.list.slot(slot).filter(|slot| matches!(slot.role, SlotRole::Constant(_)))?;
        let weight = self.weights.get(&found.name)?;
        if let Some(stored) = weight.stored()
            && let [run] = &stored.runs[..]
        {
            return Some(stored_bytes(self.file, run.file, run.range.clone()).into());
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut bytes = Vec::new();
        let mut read = |file, range| Ok(stored_bytes(self.file, file, range).into());
        let made = weight.make(threads, &mut read, &mut |portion| {
            bytes.extend_from_slice(portion);
            Ok(())
        });
        made.is_ok().then(|| bytes.into())
    }
}

/// Bytes of one of a model's files.
fn stored_bytes(file: &GgufFile, at: usize, range: Range<u64>) -> &[u8] {
    let dims = vec![range.end.saturating_sub(range.start)];
    file.tensor_bytes(&TensorInfo {
        name: String::new(),
        dtype: DType::U8,
        dims,
        file_range: range,
        file: at,
    })
}

fn check_ids(model: &ModelDescription, ids: &[u32]) -> Result<()> {
    if ids.is_empty() {
        return Err(RuntimeError::NoTokens);
    }
    let vocabulary = model.vocab_size;
    match ids.iter().position(|&id| id as usize >= vocabulary || id > i32::MAX as u32) {
        Some(index) => Err(RuntimeError::TokenId { id: ids[index], index, vocabulary }),
        None => Ok(()),
    }
}

/// Everything on one device, each feed-forward layer in as many ranges as asked for.
fn shared_plan(model: &ModelDescription, options: &TraceOptions) -> Result<Vec<LayerPlan>> {
    let exact = match model.layers.iter().all(|layer| layer.ffn.activation.is_sparse()) {
        true => SparsityPolicy::GateFirst,
        false => SparsityPolicy::Dense,
    };
    let engine = EngineOptions { sparsity: options.sparsity, ..EngineOptions::default() };
    let kind = options.sparsity.kind(model)?;
    let layer = |(index, layer): (usize, &formats::model::Layer)| {
        let offered = engine
            .calibrated(model, index)
            .into_iter()
            .chain([SparsityPolicy::Dense, SparsityPolicy::GateFirst]);
        let sparsity = offered.into_iter().find(|policy| Some(policy.kind()) == kind).unwrap_or(exact);
        let neurons = u32::try_from(layer.ffn.n_ff).unwrap_or(u32::MAX);
        let shares = options.shares.clamp(1, neurons.max(1));
        let bound = |share: u32| (u64::from(neurons) * u64::from(share) / u64::from(shares)) as u32;
        let share = |index: u32| {
            let range = ClusterRange::new(bound(index), bound(index + 1));
            // Not empty and alone, so that it is a set whatever the bounds.
            let clusters = ClusterSet::from_ranges(vec![range]).unwrap_or_else(|_| ClusterSet::all(neurons));
            FfnShare { device: 0, clusters, sparsity }
        };
        LayerPlan { attention: 0, ffn: (0..shares).map(share).collect(), prefill: None }
    };
    Ok(model.layers.iter().enumerate().map(layer).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::story;

    fn options(ids: &[u32]) -> TraceOptions {
        TraceOptions {
            ids: ids.to_vec(),
            decoded: 2,
            batch: 3,
            activations: Activations::Int8,
            sparsity: SparsityChoice::Auto,
            shares: 1,
            alignment: 64,
        }
    }

    #[test]
    fn submissions_follow_each_other() {
        let file = GgufFile::open(story()).unwrap();
        let trace = Trace::new(&file, &options(&[5, 6, 7, 8, 9, 10])).unwrap();
        let what: Vec<&str> = trace.submissions().iter().map(|submission| submission.what.as_str()).collect();
        let wanted = [
            "prefill of 3 tokens from position 0",
            "logits of 3 tokens from position 0",
            "prefill of 1 tokens from position 3",
            "logits of 1 tokens from position 3",
            "decoding at position 4",
            "decoding at position 5",
        ];
        assert_eq!(what, wanted);
        for submission in trace.submissions() {
            for (index, slot) in submission.list.slots.iter().enumerate() {
                let bytes = trace.bytes(submission, SlotId(index as u32));
                match slot.role {
                    SlotRole::Constant(_) => assert_eq!(bytes.unwrap().len() as u64, slot.tensor.bytes()),
                    SlotRole::Input => assert_eq!(bytes.unwrap().len() as u32, submission.tokens * 4),
                    _ => assert!(bytes.is_none()),
                }
                assert_eq!(slot.role == SlotRole::State, submission.kept.contains_key(&SlotId(index as u32)));
            }
        }
        assert!(trace.submissions().iter().all(|submission| submission.ranges.is_empty()));
    }

    /// Made weights as well as those of the file: norms in BF16, a norm's offset, rows in turns, positions.
    #[test]
    fn every_constant_has_its_bytes_whatever_the_architecture() {
        for name in ["llama", "gemma3", "opt", "falcon-new"] {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
            let file = GgufFile::open(folder).unwrap();
            let trace = Trace::new(&file, &options(&[1, 2, 3, 4, 5, 6])).unwrap();
            for submission in trace.submissions() {
                for (index, slot) in submission.list.slots.iter().enumerate() {
                    let bytes = trace.bytes(submission, SlotId(index as u32));
                    match slot.role {
                        SlotRole::Constant(_) => assert_eq!(bytes.unwrap().len() as u64, slot.tensor.bytes()),
                        SlotRole::Input => assert_eq!(bytes.unwrap().len() as u32, submission.tokens * 4),
                        _ => assert!(bytes.is_none()),
                    }
                }
            }
            if name == "opt" {
                // Two rows before position 0; four ids are prefilled three at a time.
                let positions = trace.submissions()[2].positions.as_ref().unwrap();
                assert_eq!(positions.1, [5]);
            }
        }
    }

    #[test]
    fn shares_cover_every_neuron_once() {
        let file = GgufFile::open(story()).unwrap();
        let trace = Trace::new(&file, &TraceOptions { shares: 3, ..options(&[1, 2, 3, 4]) }).unwrap();
        let ranges = &trace.submissions()[0].ranges;
        assert_eq!(ranges.len(), 3 * 8);
        let of_layer: Vec<ClusterRange> = ranges[..3].iter().flat_map(|(_, ranges)| ranges.clone()).collect();
        let wanted = [(0, 341), (341, 682), (682, 1024)];
        assert_eq!(of_layer, wanted.map(|(start, end)| ClusterRange::new(start, end)));
    }

    #[test]
    fn wrong_ids_are_refused() {
        let file = GgufFile::open(story()).unwrap();
        assert!(matches!(Trace::new(&file, &options(&[])), Err(RuntimeError::NoTokens)));
        let refused = Trace::new(&file, &options(&[1, 4096]));
        assert!(matches!(refused, Err(RuntimeError::TokenId { id: 4096, index: 1, .. })));
    }
}
