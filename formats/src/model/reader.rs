//! Reads an architecture's keys and tensors: prefixes keys, checks shapes, remembers what was used.

use std::cell::RefCell;
use std::collections::HashSet;
use std::ops::Range;

use super::Linear;
use crate::gguf::{GgufFile, TensorInfo};
use crate::safetensors::names::GATE_AND_UP;
use crate::{FormatError, Result};

/// A file seen by one architecture.
pub(super) struct Reader<'a> {
    pub(super) file: &'a GgufFile,
    architecture: String,
    used: RefCell<HashSet<String>>,
}

/// A shape that is wanted, and why.
pub(super) struct Wanted<'a> {
    pub(super) dims: &'a [u64],
    pub(super) reason: &'a str,
}

impl<'a> Reader<'a> {
    pub(super) fn new(file: &'a GgufFile, architecture: &str) -> Reader<'a> {
        Reader { file, architecture: architecture.to_owned(), used: RefCell::default() }
    }

    /// The full key of `suffix`.
    pub(super) fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.architecture)
    }

    /// A size that must be there, fit 32 bits and not be 0.
    pub(super) fn size(&self, suffix: &str) -> Result<usize> {
        self.optional_size(suffix)?.ok_or_else(|| self.missing(suffix))
    }

    /// A size that may be absent, but not 0.
    pub(super) fn optional_size(&self, suffix: &str) -> Result<Option<usize>> {
        let key = self.key(suffix);
        let Some(number) = self.file.metadata().u32(&key)? else { return Ok(None) };
        self.not_zero(&key, u64::from(number)).map(Some)
    }

    /// A size per layer that may be absent, but not 0 anywhere.
    pub(super) fn optional_sizes(&self, suffix: &str, n_layer: usize) -> Result<Option<Vec<usize>>> {
        let key = self.key(suffix);
        let Some(numbers) = self.file.metadata().per_layer_uint(&key, n_layer)? else { return Ok(None) };
        numbers.into_iter().map(|number| self.not_zero(&key, number)).collect::<Result<_>>().map(Some)
    }

    /// A size per layer that must be there.
    pub(super) fn sizes(&self, suffix: &str, n_layer: usize) -> Result<Vec<usize>> {
        self.optional_sizes(suffix, n_layer)?.ok_or_else(|| self.missing(suffix))
    }

    fn not_zero(&self, key: &str, number: u64) -> Result<usize> {
        match usize::try_from(number) {
            Ok(number) if number > 0 && number <= u32::MAX as usize => Ok(number),
            _ => {
                let problem = format!("is {number}; 1 to {} is allowed", u32::MAX);
                Err(self.file.metadata().bad_value(key, problem))
            }
        }
    }

    /// A float that must be there.
    pub(super) fn float(&self, suffix: &str) -> Result<f64> {
        self.optional_float(suffix)?.ok_or_else(|| self.missing(suffix))
    }

    /// A float that may be absent.
    pub(super) fn optional_float(&self, suffix: &str) -> Result<Option<f64>> {
        self.file.metadata().float(&self.key(suffix))
    }

    /// The choice that a string key names, among `names`; `None` where the key is absent.
    pub(super) fn choice<T: Copy>(&self, suffix: &str, names: &[(&str, T)]) -> Result<Option<T>> {
        let key = self.key(suffix);
        let Some(found) = self.file.metadata().string(&key)? else { return Ok(None) };
        match names.iter().find(|(name, _)| *name == found) {
            Some((_, value)) => Ok(Some(*value)),
            None => {
                let accepted: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
                let problem = format!("is {found:?}; accepted: {}", accepted.join(", "));
                Err(self.file.metadata().bad_value(&key, problem))
            }
        }
    }

    fn missing(&self, suffix: &str) -> FormatError {
        let advice = format!("architecture `{}` cannot be run without it", self.architecture);
        self.file.metadata().missing(&self.key(suffix), advice)
    }

    /// A tensor of any shape, marked as used.
    pub(super) fn any_tensor(&self, name: &str) -> Result<TensorInfo> {
        let Some(tensor) = self.file.tensor(name) else {
            return Err(FormatError::MissingTensor {
                path: self.file.path().to_path_buf(),
                tensor: name.to_owned(),
                advice: format!(
                    "architecture `{}` needs it; the file is incomplete, or its architecture is another one",
                    self.architecture
                ),
            });
        };
        self.used.borrow_mut().insert(name.to_owned());
        Ok(tensor.clone())
    }

    /// A tensor of this shape.
    pub(super) fn tensor(&self, name: &str, wanted: Wanted<'_>) -> Result<TensorInfo> {
        let tensor = self.any_tensor(name)?;
        if !same_shape(&tensor.dims, wanted.dims) {
            return Err(FormatError::Shape {
                path: self.file.path().to_path_buf(),
                tensor: name.to_owned(),
                found: format!("{:?}", tensor.dims),
                wanted: format!("{:?}", wanted.dims),
                reason: wanted.reason.to_owned(),
            });
        }
        Ok(tensor)
    }

    /// A tensor of this shape, where it is present.
    pub(super) fn optional_tensor(&self, name: &str, wanted: Wanted<'_>) -> Result<Option<TensorInfo>> {
        if self.file.tensor(name).is_none() {
            return Ok(None);
        }
        self.tensor(name, wanted).map(Some)
    }

    /// `NAME.weight` of this shape, and `NAME.bias` with `outputs` elements where it is present.
    pub(super) fn linear(&self, name: &str, wanted: Wanted<'_>, outputs: u64) -> Result<Linear> {
        let reason = wanted.reason;
        let weight = self.tensor(&format!("{name}.weight"), wanted)?;
        let bias = self.optional_tensor(&format!("{name}.bias"), Wanted { dims: &[outputs], reason })?;
        Ok(Linear { weight, bias, rows: Vec::new(), parts: Vec::new() })
    }

    /// `NAME.weight` of a norm, and `NAME.bias` where it is present.
    pub(super) fn norm(&self, name: &str, embd: u64) -> Result<(TensorInfo, Option<TensorInfo>)> {
        let Linear { weight, bias, .. } =
            self.linear(name, Wanted { dims: &[embd], reason: "one element per residual element" }, embd)?;
        Ok((weight, bias))
    }

    /// The rows of `NAME.weight` (and elements of `NAME.bias`) in three parts of these widths.
    pub(super) fn fused(&self, name: &str, inputs: u64, widths: [u64; 3]) -> Result<[Linear; 3]> {
        // Each under 2^64 / 3: products of two sizes under 2^32, in a file that holds them.
        let total = widths.iter().try_fold(0_u64, |sum, &width| sum.checked_add(width));
        let outputs = total.unwrap_or(u64::MAX);
        let reason = "embedding width by the widths of queries, keys and values together";
        let whole = self.whole(name, Wanted { dims: &[inputs, outputs], reason }, outputs)?;
        let mut start = 0;
        Ok(widths.map(|width| {
            let rows = start..start + width;
            start = rows.end;
            Linear {
                weight: part(&whole.weight, rows.clone()),
                bias: whole.bias.as_ref().map(|bias| part(bias, rows)),
                rows: Vec::new(),
                parts: Vec::new(),
            }
        }))
    }

    /// As [`Reader::fused`], where the parts take turns: `groups` times some rows of each.
    pub(super) fn fused_by_group(
        &self,
        name: &str,
        inputs: u64,
        groups: u64,
        widths: [u64; 3],
    ) -> Result<[Linear; 3]> {
        let total = widths.iter().try_fold(0_u64, |sum, &width| sum.checked_add(width));
        let outputs = total.unwrap_or(u64::MAX);
        let reason = "embedding width by the widths of queries, keys and values together";
        let whole = self.whole(name, Wanted { dims: &[inputs, outputs], reason }, outputs)?;
        let period = outputs / groups; // each width is that many heads of one width
        let mut start = 0;
        Ok(widths.map(|width| {
            let (first, count) = (start, width / groups);
            start += count;
            let rows = (0..groups).map(|group| group * period + first..group * period + first + count);
            Linear { rows: rows.collect(), ..whole.clone() }
        }))
    }

    /// A tensor of every expert in one matrix: `NAME_exps.weight` as GGUF has it, or as safetensors have it `NAME.E.weight`
    /// of each expert E, or, of gate and up, the one's rows and then the other's of each expert in one tensor.
    pub(super) fn experts(&self, name: &str, (inputs, outputs, count): (u64, u64, u64)) -> Result<Linear> {
        let stacked = format!("{name}_exps.weight");
        let dims = [inputs, outputs, count];
        let whole = |weight| Linear { weight, bias: None, rows: Vec::new(), parts: Vec::new() };
        let (layer, kind) = name.rsplit_once('.').unwrap_or_default();
        let both = format!("{layer}.{GATE_AND_UP}.weight");
        let reason = "inputs and outputs of an expert, and experts";
        let parts = if self.file.tensor(&stacked).is_some() {
            return self.tensor(&stacked, Wanted { dims: &dims, reason }).map(whole);
        } else if let Some(first) = ["ffn_gate", "ffn_up"].iter().position(|part| *part == kind)
            && self.file.tensor(&both).is_some()
        {
            let dims = [inputs, outputs.saturating_mul(2), count];
            let reason = "inputs and outputs of an expert, gate and up together, and experts";
            let mut tensor = self.tensor(&both, Wanted { dims: &dims, reason })?;
            tensor.dims = vec![inputs, 2 * outputs * count];
            let start = |expert: u64| (2 * expert + first as u64) * outputs;
            (0..count).map(|expert| part(&tensor, start(expert)..start(expert) + outputs)).collect()
        } else if self.file.tensor(&format!("{name}.0.weight")).is_some() {
            let reason = "inputs and outputs of an expert";
            let tensor = |expert| {
                self.tensor(&format!("{name}.{expert}.weight"), Wanted { dims: &[inputs, outputs], reason })
            };
            (0..count).map(tensor).collect::<Result<Vec<TensorInfo>>>()?
        } else {
            return self.any_tensor(&stacked).map(whole); // missing, by the name that GGUF has
        };
        let dtype = parts.first().map_or(engine_core::DType::F32, |part| part.dtype);
        if let Some(other) = parts.iter().find(|part| part.dtype != dtype) {
            return Err(FormatError::Tensor {
                path: self.file.path().to_path_buf(),
                tensor: other.name.clone(),
                problem: format!("is {}, but that of expert 0 is {dtype}; all must be alike", other.dtype),
            });
        }
        let bytes = parts.iter().map(TensorInfo::byte_len).sum(); // of tensors in files
        let weight = TensorInfo { name: stacked, dtype, dims: dims.to_vec(), file_range: 0..bytes, file: 0 };
        Ok(Linear { parts, ..whole(weight) })
    }

    /// A matrix and bias that are taken apart by rows and elements.
    fn whole(&self, name: &str, wanted: Wanted<'_>, outputs: u64) -> Result<Linear> {
        let whole = self.linear(name, wanted, outputs)?;
        match &whole.bias {
            Some(bias) if bias.dtype.block_elements() != 1 => Err(FormatError::Tensor {
                path: self.file.path().to_path_buf(),
                tensor: bias.name.clone(),
                problem: format!("is {}, whose blocks cannot be taken apart; store it as F32", bias.dtype),
            }),
            _ => Ok(whole),
        }
    }

    /// Marks a tensor as known where it is present, though the description has no place for it.
    pub(super) fn ignore(&self, name: &str) {
        self.used.borrow_mut().insert(name.to_owned());
    }

    /// Refuses a file with tensors that the architecture has no place for: leaving them out would give other results.
    pub(super) fn refuse_unused(&self) -> Result<()> {
        let used = self.used.borrow();
        let unused: Vec<&str> = self
            .file
            .tensors()
            .iter()
            .map(|t| t.name.as_str())
            .filter(|name| !used.contains(*name))
            .collect();
        let Some(first) = unused.first() else { return Ok(()) };
        let more = if unused.len() > 1 { format!(" (and {} more)", unused.len() - 1) } else { String::new() };
        Err(FormatError::Tensor {
            path: self.file.path().to_path_buf(),
            tensor: (*first).to_owned(),
            problem: format!(
                "architecture `{}` with these keys has no place for it{more}, and without it the results would be \
                 wrong; the file is of another architecture, or `{}` is too small",
                self.architecture,
                self.key("block_count")
            ),
        })
    }
}

/// Some rows of a matrix, or elements of a vector, as a tensor of its own.
fn part(whole: &TensorInfo, rows: Range<u64>) -> TensorInfo {
    let (count, mut dims) = (rows.end - rows.start, whole.dims.clone());
    let of = match dims.get(1) {
        Some(&of) => of,
        None => dims[0],
    };
    dims.truncate(2);
    if let Some(last) = dims.last_mut() {
        *last = count;
    }
    // Whole rows are whole blocks, and the tensor lies inside the file: nothing overflows.
    let unit = whole.byte_len() / of;
    let start = whole.file_range.start + rows.start * unit;
    TensorInfo {
        name: format!("{}[{}..{}]", whole.name, rows.start, rows.end),
        dtype: whole.dtype,
        dims,
        file_range: start..start + count * unit,
        file: whole.file,
    }
}

/// Equal, but for trailing dimensions of 1.
fn same_shape(a: &[u64], b: &[u64]) -> bool {
    (0..a.len().max(b.len())).all(|at| a.get(at).unwrap_or(&1) == b.get(at).unwrap_or(&1))
}

#[cfg(test)]
mod tests {
    use super::same_shape;

    #[test]
    fn trailing_ones_do_not_matter() {
        assert!(same_shape(&[4], &[4, 1]) && same_shape(&[4, 2, 1], &[4, 2]));
        assert!(!same_shape(&[4, 2], &[4]) && !same_shape(&[2, 4], &[4, 2]));
    }
}
