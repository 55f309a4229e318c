//! Which tensors are written, and how they follow from the stored ones.

use std::collections::BTreeMap;

use engine_core::DType;

use super::{Data, Options, Order, Source, Tensor};
use crate::gguf::{Container, GgufFile, TensorInfo};
use crate::safetensors::names::{FUSED_BY_GROUP, GATE_AND_UP, of_expert};
use crate::{FormatError, Result};

/// Every tensor, in GGUF's order; types are still the stored ones.
pub(super) fn collect<'a>(
    file: &'a GgufFile,
    options: &Options,
    lines: &mut Vec<String>,
) -> Result<Vec<Tensor<'a>>> {
    let mut tensors = match file.container() {
        Container::Safetensors => of_safetensors(file)?,
        Container::PowerInfer => of_powerinfer(file, lines),
        Container::Gguf => file.tensors().iter().map(|info| as_stored(file, info)).collect(),
    };
    if options.without_predictors {
        tensors
            .retain(|tensor| !tensor.name.ends_with(".fc1.weight") && !tensor.name.ends_with(".fc2.weight"));
    }
    Ok(tensors)
}

fn as_stored<'a>(file: &'a GgufFile, info: &TensorInfo) -> Tensor<'a> {
    let bytes = Data::Borrowed(file.tensor_bytes(info));
    Tensor {
        name: info.name.clone(),
        dtype: info.dtype,
        dims: info.dims.clone(),
        source: Source::as_stored(bytes, info.dtype, info.row_elements()),
    }
}

/// PowerInfer's transposed down is turned back, so that other programs know it; not where it is quantised, which would
/// lose a second time.
fn of_powerinfer<'a>(file: &'a GgufFile, lines: &mut Vec<String>) -> Vec<Tensor<'a>> {
    const TRANSPOSED: &str = ".ffn_down_t.";
    let mut kept = 0;
    let mut tensors = Vec::new();
    for info in file.tensors() {
        let mut tensor = as_stored(file, info);
        let plain = info.name.replace(TRANSPOSED, ".ffn_down.");
        match (info.name.contains(TRANSPOSED), info.dims.as_slice()) {
            (true, &[columns, rows]) if !info.dtype.is_quantised() => {
                tensor.name = plain;
                tensor.dims = vec![rows, columns];
                tensor.source.order = Order::Transposed { rows };
            }
            (true, &[_, _]) => kept += 1,
            _ => {}
        }
        tensors.push(tensor);
    }
    if kept > 0 {
        lines.push(format!(
            "{kept} tensors `ffn_down_t` stay transposed, since they are quantised: this program runs them, others do not"
        ));
        return tensors;
    }
    for tensor in &mut tensors {
        tensor.name = tensor.name.replace(TRANSPOSED, ".ffn_down."); // biases
    }
    tensors
}

/// What the order of elements depends on.
struct Shape {
    heads: u64,
    kv_heads: u64,
    head_width: u64,
    /// Queries and keys turn in pairs of neighbours in GGUF.
    interleaved: bool,
    norm_offset: f32,
    /// What the scores' scale is more than GGUF's readers take it to be.
    scale: f32,
}

impl Shape {
    fn read(file: &GgufFile, architecture: &str) -> Result<Shape> {
        let metadata = file.metadata();
        let size = |suffix: &str| metadata.uint(&format!("{architecture}.{suffix}"));
        let heads = size("attention.head_count")?.unwrap_or(1).max(1);
        let width = size("embedding_length")?.unwrap_or(0);
        let offset = metadata.float(&format!("{architecture}.norm_offset"))?;
        let head_width = size("attention.key_length")?.unwrap_or(width / heads).max(1);
        let scale = metadata.float(&format!("{architecture}.attention.scale"))?.map_or(1.0, |scale| {
            // Gemma 3's largest model is told by its layers, and scaled by another width.
            let wide = architecture == "gemma3" && size("block_count").ok().flatten() == Some(62);
            let usual = if wide { width / heads } else { head_width };
            scale * (usual as f64).sqrt()
        });
        Ok(Shape {
            heads,
            kv_heads: size("attention.head_count_kv")?.unwrap_or(heads).max(1),
            head_width,
            interleaved: matches!(architecture, "llama" | "mistral" | "bamboo"),
            norm_offset: offset.unwrap_or(0.0) as f32,
            scale: scale as f32,
        })
    }
}

fn of_safetensors(file: &GgufFile) -> Result<Vec<Tensor<'_>>> {
    let architecture = file.metadata().string("general.architecture")?.unwrap_or_default();
    let shape = Shape::read(file, architecture)?;
    let mut tensors = Vec::new();
    let mut experts: BTreeMap<(u32, &str), Vec<(u32, &TensorInfo)>> = BTreeMap::new();
    for info in file.tensors() {
        if let Some((layer, part, expert)) = of_expert(&info.name) {
            experts.entry((layer, part)).or_default().push((expert, info));
            continue;
        }
        let part = info.name.split('.').nth(2).unwrap_or_default();
        if part == GATE_AND_UP {
            tensors.extend(gate_and_up(file, info)?);
        } else {
            tensors.push(single(file, info, part, &shape)?);
        }
    }
    for ((layer, part), found) in experts {
        tensors.push(stack(file, &format!("blk.{layer}.{part}_exps.weight"), found)?);
    }
    if let Some(factors) = rope_factors(file, architecture, &shape)? {
        tensors.push(factors);
    }
    tensors.sort_by_key(|tensor| place(&tensor.name)); // stable: parts of a layer stay as they were
    Ok(tensors)
}

/// Where a tensor stands in the file.
fn place(name: &str) -> u64 {
    let layer = |rest: &str| rest.split_once('.').and_then(|(number, _)| number.parse::<u32>().ok());
    match name.strip_prefix("blk.").and_then(layer) {
        Some(layer) => 1 + u64::from(layer),
        None if name.starts_with("output") => u64::MAX,
        None => 0,
    }
}

fn refused(file: &GgufFile, info: &TensorInfo, problem: &str) -> FormatError {
    let path = file.files().nth(info.file).unwrap_or(file.path()).to_path_buf();
    FormatError::Tensor { path, tensor: info.name.clone(), problem: problem.into() }
}

fn single<'a>(file: &'a GgufFile, info: &TensorInfo, part: &str, shape: &Shape) -> Result<Tensor<'a>> {
    const WHOLE: [&str; 4] = ["token_embd", "position_embd", "output_norm", "output"];
    let stem = info.name.split('.').next().unwrap_or_default();
    if stem != "blk" && !WHOLE.contains(&stem) {
        let problem =
            "has no place in GGUF files of this architecture, and without it results would be wrong";
        return Err(refused(file, info, problem));
    }
    let mut tensor = as_stored(file, info);
    // Heads are counted in rows: elements, where the tensor is a bias.
    let rows = if info.dims.len() == 1 { info.dims[0] } else { info.rows() };
    let by_rows = |tensor: &mut Tensor<'_>, order| {
        if info.dims.len() == 1 {
            tensor.source.row = 1;
        }
        tensor.source.order = order;
    };
    let width = shape.head_width;
    if shape.interleaved && matches!(part, "attn_q" | "attn_k") {
        if !rows.is_multiple_of(width) || !width.is_multiple_of(2) {
            let problem =
                format!("has {rows} rows, which are no whole number of heads of {width} (an even number)");
            return Err(refused(file, info, &problem));
        }
        by_rows(&mut tensor, Order::Interleaved { width });
    }
    if part == FUSED_BY_GROUP {
        let queries = shape.heads / shape.kv_heads;
        if !shape.heads.is_multiple_of(shape.kv_heads)
            || (queries + 2).checked_mul(shape.kv_heads).and_then(|heads| heads.checked_mul(width))
                != Some(rows)
        {
            let problem = format!(
                "has {rows} rows, which are not {} groups of {queries} query heads, a key and a value head of {width}",
                shape.kv_heads
            );
            return Err(refused(file, info, &problem));
        }
        tensor.name = info.name.replace(FUSED_BY_GROUP, "attn_qkv");
        by_rows(&mut tensor, Order::Ungrouped { groups: shape.kv_heads, queries, width });
    }
    if info.name.ends_with("norm.weight") {
        tensor.source.add = shape.norm_offset;
    }
    if part == "attn_q_norm" {
        tensor.source.times = shape.scale; // nothing but turning stands between it and the scores
    }
    Ok(tensor)
}

/// Every expert's gate rows, and every expert's up rows, out of one tensor: ne {n_embd, 2 x n_ff, n_expert}.
fn gate_and_up<'a>(file: &'a GgufFile, info: &TensorInfo) -> Result<[Tensor<'a>; 2]> {
    let &[width, both, experts] = info.dims.as_slice() else {
        return Err(refused(file, info, "is not of three dimensions: experts, gate and up, width"));
    };
    if both % 2 != 0 {
        return Err(refused(
            file,
            info,
            "has an odd number of rows per expert, where gate and up have as many each",
        ));
    }
    let count = both / 2;
    let half = |part: &str, first| {
        let mut tensor = as_stored(file, info);
        tensor.name = info.name.replace(GATE_AND_UP, part);
        tensor.dims = vec![width, count, experts];
        tensor.source.order = Order::Part { period: both, first, count };
        tensor
    };
    Ok([half("ffn_gate_exps", 0), half("ffn_up_exps", count)])
}

/// One tensor of all experts, in their order.
fn stack<'a>(file: &'a GgufFile, name: &str, mut experts: Vec<(u32, &TensorInfo)>) -> Result<Tensor<'a>> {
    experts.sort_by_key(|(expert, _)| *expert);
    let (_, first) = experts[0]; // made with its first expert
    for (wanted, (expert, info)) in (0..).zip(&experts) {
        if *expert != wanted {
            return Err(FormatError::MissingTensor {
                path: file.path().to_path_buf(),
                tensor: name.replace("_exps.weight", &format!(".{wanted}.weight")),
                advice: format!("there is one of expert {expert}; the model is incomplete"),
            });
        }
        if info.dims != first.dims || info.dtype != first.dtype || info.dims.len() > 2 {
            let problem = format!(
                "is {} {:?}, but that of expert 0 is {} {:?}; all must be alike",
                info.dtype, info.dims, first.dtype, first.dims
            );
            return Err(refused(file, info, &problem));
        }
    }
    let mut dims = first.dims.clone();
    dims.resize(2, 1);
    dims.push(experts.len() as u64);
    let pieces = experts.iter().map(|(_, info)| Data::Borrowed(file.tensor_bytes(info))).collect();
    let row = first.row_elements();
    let (dtype, order) = (first.dtype, Order::AsStored);
    let source = Source { pieces, dtype, row, order, add: 0.0, times: 1.0, plane: None };
    Ok(Tensor { name: name.to_owned(), dtype: first.dtype, dims, source })
}

/// Llama 3's stretching as GGUF has it: each pair's frequency is divided by its factor.
fn rope_factors(file: &GgufFile, architecture: &str, shape: &Shape) -> Result<Option<Tensor<'static>>> {
    let metadata = file.metadata();
    let key = |suffix: &str| format!("{architecture}.rope.{suffix}");
    if metadata.string(&key("scaling.type"))? != Some("llama3") {
        return Ok(None);
    }
    let float = |suffix: &str, default: f64| -> Result<f64> {
        let value = metadata.float(&key(suffix))?.unwrap_or(default);
        match value > 0.0 {
            true => Ok(value),
            false => Err(metadata.bad_value(&key(suffix), format!("is {value}; more than 0 is wanted"))),
        }
    };
    let base = float("freq_base", 10_000.0)?;
    let factor = float("scaling.factor", 8.0)?;
    let (low, high) = (float("scaling.low_freq_factor", 1.0)?, float("scaling.high_freq_factor", 4.0)?);
    let context = float("scaling.original_context_length", 8192.0)?;
    if high <= low {
        let problem = format!("is {high}; more than low_freq_factor {low} is wanted");
        return Err(metadata.bad_value(&key("scaling.high_freq_factor"), problem));
    }
    let pairs = shape.head_width / 2;
    let factors = (0..pairs).map(|pair| {
        let wavelength = std::f64::consts::TAU * base.powf(2.0 * pair as f64 / shape.head_width as f64);
        let turns = context / wavelength;
        // 0 for slow pairs, which are stretched whole, 1 for fast ones, which are left alone.
        let fast = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - fast) / factor + fast)) as f32
    });
    let bytes: Vec<u8> = factors.flat_map(f32::to_le_bytes).collect();
    Ok(Some(Tensor {
        name: "rope_freqs.weight".into(),
        dtype: DType::F32,
        dims: vec![pairs],
        source: Source::as_stored(Data::Owned(bytes), DType::F32, pairs),
    }))
}
