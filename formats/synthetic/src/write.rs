//! Puts a model together and writes it.

use std::ops::Range;
use std::path::Path;
use std::thread;

use engine_core::DType;
use formats::gguf::GgufWriter;
use formats::quantise::quantise;
use formats::{Container, FormatError};

use crate::vocabulary::set_tokenizer;
use crate::weights::{Network, Weights};
use crate::{Result, Shape};

/// Writes a model of this shape: into a file beside `path` that takes its name when it is complete. `progress` is told
/// each tensor's name before it is made. All of the model is in memory until it is written.
///
/// # Errors
/// What [`Shape::check`] says, values that the type cannot hold, and what writing a file says.
pub fn write(shape: &Shape, path: &Path, threads: usize, progress: &mut dyn FnMut(&str)) -> Result<()> {
    shape.check()?;
    let mut file = GgufWriter::new(Container::Gguf);
    set_keys(&mut file, shape);
    set_tokenizer(&mut file, shape)?;
    let mut tensors = Tensors { file, shape, weights: Weights::new(shape), threads, progress };
    tensors.whole_model()?;
    tensors.file.write(path)?;
    Ok(())
}

fn set_keys(file: &mut GgufWriter<'_>, shape: &Shape) {
    file.set("general.architecture", "llama");
    file.set("general.name", format!("synthetic, seed {}", shape.seed).as_str());
    for (key, value) in [
        ("block_count", shape.layers),
        ("embedding_length", shape.width),
        ("context_length", shape.context),
        ("feed_forward_length", shape.hidden),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("rope.dimension_count", shape.head()),
    ] {
        file.set(&format!("llama.{key}"), value);
    }
    file.set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
    file.set("llama.feed_forward_activation", shape.activation.name());
    if shape.predictor_rank > 0 {
        file.set("llama.feed_forward_predictor_input", "residual");
        file.set("powerinfer.sparse_threshold", 0.0f32);
    }
    if let Some(experts) = shape.experts {
        file.set("llama.expert_count", experts.count).set("llama.expert_used_count", experts.used);
    }
}

struct Tensors<'a> {
    file: GgufWriter<'static>,
    shape: &'a Shape,
    weights: Weights<'a>,
    threads: usize,
    progress: &'a mut dyn FnMut(&str),
}

impl Tensors<'_> {
    fn whole_model(&mut self) -> Result<()> {
        let Shape { width, vocabulary, dtype, layers, .. } = *self.shape;
        self.norm("output_norm.weight")?;
        self.matrix("token_embd.weight", dtype, &[width, vocabulary], |weights, id, row| {
            weights.embedding(id, row);
        })?;
        self.matrix("output.weight", dtype, &[width, vocabulary], |weights, id, row| weights.head(id, row))?;
        for layer in 0..layers {
            self.attention(layer)?;
            self.networks(layer)?;
        }
        Ok(())
    }

    fn attention(&mut self, layer: u32) -> Result<()> {
        let (width, kv, dtype) = (self.shape.width, self.shape.kv_width(), self.shape.dtype);
        self.norm(&format!("blk.{layer}.attn_norm.weight"))?;
        self.norm(&format!("blk.{layer}.ffn_norm.weight"))?;
        let output = self.weights.attention_scale();
        let parts = [
            ("attn_q", width, 1.0),
            ("attn_k", kv, 1.0),
            ("attn_v", kv, 1.0),
            ("attn_output", width, output),
        ];
        for (part, rows, scale) in parts {
            let name = format!("blk.{layer}.{part}.weight");
            self.matrix(&name.clone(), dtype, &[width, rows], move |weights, index, row| {
                weights.plain(&name, u64::from(index), scale, row);
            })?;
        }
        Ok(())
    }

    /// A layer's network, or its experts one behind the other.
    fn networks(&mut self, layer: u32) -> Result<()> {
        let Shape { width, hidden, dtype, predictor_rank, experts, .. } = *self.shape;
        let count = experts.map_or(1, |experts| experts.count);
        let networks: Vec<Network> = (0..count).map(|expert| self.weights.network(layer, expert)).collect();
        let name = |part: &str| match experts {
            Some(_) => format!("blk.{layer}.{part}_exps.weight"),
            None => format!("blk.{layer}.{part}.weight"),
        };
        if experts.is_some() {
            let router = format!("blk.{layer}.ffn_gate_inp.weight");
            self.matrix(&router.clone(), DType::F32, &[width, count], move |weights, index, row| {
                weights.router(&router, u64::from(index), row);
            })?;
        }
        let dims: &[u32] = if experts.is_some() { &[width, hidden, count] } else { &[width, hidden] };
        let of = |index: u32| (&networks[(index / hidden) as usize], index % hidden);
        self.matrix(&name("ffn_gate"), dtype, dims, |weights, index, row| {
            let (network, neuron) = of(index);
            weights.gate(network, neuron, row);
        })?;
        self.matrix(&name("ffn_up"), dtype, dims, |weights, index, row| {
            let (network, neuron) = of(index);
            weights.up(network, neuron, row);
        })?;
        self.matrix(&name("ffn_down_t"), dtype, dims, |weights, index, row| {
            let (network, neuron) = of(index);
            weights.down(network, neuron, row);
        })?;
        if predictor_rank > 0 {
            let (fc1, fc2) = (format!("blk.{layer}.fc1.weight"), format!("blk.{layer}.fc2.weight"));
            self.matrix(&fc1, DType::F16, &[width, predictor_rank], |weights, index, row| {
                weights.fc1(&networks[0], index, row);
            })?;
            self.matrix(&fc2, DType::Q8_0, &[predictor_rank, hidden], |weights, index, row| {
                weights.fc2(&networks[0], index, row);
            })?;
        }
        Ok(())
    }

    fn norm(&mut self, name: &str) -> Result<()> {
        let ones: Vec<u8> = (0..self.shape.width).flat_map(|_| 1.0f32.to_le_bytes()).collect();
        self.file.tensor(name, DType::F32, &[u64::from(self.shape.width)], ones)?;
        Ok(())
    }

    /// Makes a matrix row by row: `fill(weights, index of the row, row)`; threads share the rows.
    fn matrix(
        &mut self,
        name: &str,
        dtype: DType,
        dims: &[u32],
        fill: impl Fn(&Weights<'_>, u32, &mut [f32]) + Sync,
    ) -> Result<()> {
        (self.progress)(name);
        let (columns, rows) = (dims[0] as usize, dims[1..].iter().product::<u32>());
        let share = rows.div_ceil(u32::try_from(self.threads.max(1)).unwrap_or(u32::MAX)).max(1);
        let weights = &self.weights;
        let made = |rows: Range<u32>| -> Result<Vec<u8>, FormatError> {
            let mut bytes = Vec::new();
            let mut row = vec![0.0; columns];
            for index in rows {
                fill(weights, index, &mut row);
                bytes.extend(quantise(dtype, &row)?);
            }
            Ok(bytes)
        };
        let parts: Vec<Result<Vec<u8>, FormatError>> = thread::scope(|scope| {
            let starts = (0..rows).step_by(share as usize);
            let threads: Vec<_> =
                starts.map(|start| scope.spawn(move || made(start..rows.min(start + share)))).collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined.map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        let mut bytes = Vec::new();
        for part in parts {
            bytes.append(&mut part?);
        }
        let dims: Vec<u64> = dims.iter().map(|&size| u64::from(size)).collect();
        self.file.tensor(name, dtype, &dims, bytes)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample_ids;
    use formats::{GgufFile, ModelDescription, Tokenizer};

    #[test]
    fn bytes_follow_from_shape_and_seed_alone() {
        let folder = tempfile::tempdir().unwrap();
        let shape =
            Shape { width: 64, hidden: 96, layers: 1, vocabulary: 300, ..Shape::preset("tiny").unwrap() };
        let bytes = |shape: &Shape, threads| {
            let path = folder.path().join("model.gguf");
            write(shape, &path, threads, &mut |_| ()).unwrap();
            std::fs::read(path).unwrap()
        };
        let one = bytes(&shape, 1);
        assert!(one == bytes(&shape, 3));
        assert!(one != bytes(&Shape { seed: 2, ..shape }, 1));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_written_is_a_model_with_a_tokenizer() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["tiny", "tiny-moe"] {
            let shape = Shape { layers: 1, ..Shape::preset(name).unwrap() };
            let path = folder.path().join(name);
            write(&shape, &path, 2, &mut |_| ()).unwrap();
            let file = GgufFile::open(&path).unwrap();
            let model = ModelDescription::describe(&file).unwrap();
            assert!(
                model.notices.iter().all(|notice| notice.contains("no predictors")),
                "{:?}",
                model.notices
            );
            let ids: Vec<u32> = sample_ids(&shape, 5, 50).into_iter().filter(|&id| id > 256).collect();
            let tokenizer = Tokenizer::from_gguf(&file, &Default::default()).unwrap();
            assert_eq!(tokenizer.encode(&crate::sample_text(&ids), false, true).unwrap(), ids);
            assert_eq!(tokenizer.encode("Az ~", false, true).unwrap(), [65, 122, 32, 126]);
        }
    }
}
