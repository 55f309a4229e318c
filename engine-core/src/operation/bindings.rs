//! The rules that bindings obey, checked on both sides of the plug-in boundary.

use super::{OperationKind, OperationList, Place, SlotId, SlotRole};
use crate::backend::{Bindings, Bound, SequenceSpan};
use crate::{Error, Result};

impl Bindings<'_> {
    /// Checks everything about a submission that can be checked without knowing the backend: tokens within the
    /// capacity, every bound slot bound once and in the right place, host spans long enough and writable where
    /// written, sequences covering the tokens and fitting every KV cache, ranges sorted and within the layer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], naming slot or sequence.
    pub fn validate(&self, list: &OperationList) -> Result<()> {
        if self.tokens == 0 || self.tokens > list.token_capacity {
            return Err(Error::invalid(format!(
                "{} tokens are not in 1..={}",
                self.tokens, list.token_capacity
            )));
        }
        self.validate_slots(list)?;
        self.validate_sequences(list)?;
        self.validate_ranges(list)
    }

    fn validate_slots(&self, list: &OperationList) -> Result<()> {
        let mut bound = vec![false; list.slots.len()];
        for (id, binding) in self.slots {
            let Some(slot) = list.slot(*id) else {
                return Err(Error::invalid(format!("bound slot {} does not exist", id.0)));
            };
            let fail = |what: &str| Err(Error::invalid(format!("slot `{}` {what}", slot.name)));
            if std::mem::replace(&mut bound[id.0 as usize], true) {
                return fail("is bound twice");
            }
            if matches!(slot.role, SlotRole::Constant(_) | SlotRole::Scratch) {
                return fail("is not bound at submit: it is a constant or scratch");
            }
            match (binding, slot.place) {
                (Bound::Buffer(_), Place::Device) => {}
                (Bound::Host(span), Place::Host) => {
                    let rows = if slot.per_token { u64::from(self.tokens) } else { slot.tensor.rows };
                    let needed = crate::TensorType { rows, ..slot.tensor }.bytes();
                    if span.len() < needed {
                        return fail(&format!(
                            "needs {needed} bytes of host memory, bound are {}",
                            span.len()
                        ));
                    }
                    if slot.role == SlotRole::Output && !span.is_writable() {
                        return fail("is an output bound to read-only host memory");
                    }
                }
                (Bound::Buffer(_), Place::Host) => {
                    return fail("lies in host memory but is bound to a buffer");
                }
                (Bound::Host(_), Place::Device) => {
                    return fail("lies on the device but is bound to host memory");
                }
            }
        }
        for (slot, bound) in list.slots.iter().zip(&bound) {
            if !bound && !matches!(slot.role, SlotRole::Constant(_) | SlotRole::Scratch) {
                return Err(Error::invalid(format!("slot `{}` is not bound", slot.name)));
            }
        }
        Ok(())
    }

    fn validate_sequences(&self, list: &OperationList) -> Result<()> {
        let mut next = 0u32;
        for (index, span) in self.sequences.iter().enumerate() {
            if span.first_token != next || span.tokens == 0 {
                return Err(Error::invalid(format!(
                    "sequence {index} starts at token {} with {} tokens; wanted a start of {next} and at least one",
                    span.first_token, span.tokens
                )));
            }
            next = next.checked_add(span.tokens).filter(|n| *n <= self.tokens).ok_or_else(|| {
                Error::invalid(format!(
                    "the sequences have more tokens than the submission's {}",
                    self.tokens
                ))
            })?;
            if span.past.checked_add(span.tokens).is_none() {
                return Err(Error::invalid(format!("sequence {index}: its positions overflow 32 bits")));
            }
        }
        if !self.sequences.is_empty() && next != self.tokens {
            return Err(Error::invalid(format!("the sequences cover {next} of {} tokens", self.tokens)));
        }
        let mut caches = false;
        for operation in &list.operations {
            let (cache, one_sequence) = match &operation.kind {
                OperationKind::KvAppend { cache, .. } | OperationKind::Attention { cache, .. } => {
                    (Some(*cache), false)
                }
                OperationKind::KvExport { cache, key, .. } | OperationKind::KvImport { cache, key, .. } => {
                    self.fits_export(list, *key)?;
                    (Some(*cache), true)
                }
                OperationKind::Rope(_) => (None, false),
                _ => continue,
            };
            let at = |what: String| {
                Error::invalid(format!("{} ({}): {what}", operation.label, operation.kind.name()))
            };
            if self.sequences.is_empty() || (one_sequence && self.sequences.len() != 1) {
                return Err(at(format!("{} sequences are bound", self.sequences.len())));
            }
            let Some(positions) = cache.and_then(|c| list.slot(c)).map(|s| s.tensor.rows) else { continue };
            caches = true;
            for (index, span) in self.sequences.iter().enumerate() {
                let end = u64::from(span.cache_base) + u64::from(span.past) + u64::from(span.tokens);
                if end > positions {
                    return Err(at(format!(
                        "sequence {index} would end at position {end} of a KV cache of {positions}"
                    )));
                }
            }
        }
        if caches { self.apart() } else { Ok(()) }
    }

    /// No two sequences share positions of the cache: what one appends, another would read or overwrite.
    fn apart(&self) -> Result<()> {
        let start = |span: &SequenceSpan| u64::from(span.cache_base);
        let end = |span: &SequenceSpan| start(span) + u64::from(span.past) + u64::from(span.tokens);
        let mut order: Vec<usize> = (0..self.sequences.len()).collect();
        order.sort_unstable_by_key(|index| self.sequences[*index].cache_base);
        for pair in order.windows(2) {
            let (before, after) = (&self.sequences[pair[0]], &self.sequences[pair[1]]);
            if end(before) > start(after) {
                return Err(Error::invalid(format!(
                    "sequence {} ends at position {} of the KV cache, behind the start {} of sequence {}",
                    pair[0],
                    end(before),
                    start(after),
                    pair[1]
                )));
            }
        }
        Ok(())
    }

    fn fits_export(&self, list: &OperationList, key: SlotId) -> Result<()> {
        let rows = list.slot(key).map_or(0, |s| s.tensor.rows);
        for span in self.sequences {
            let end = u64::from(span.past) + u64::from(span.tokens);
            if end > rows {
                return Err(Error::invalid(format!("{end} positions do not fit an export of {rows}")));
            }
        }
        Ok(())
    }

    fn validate_ranges(&self, list: &OperationList) -> Result<()> {
        let mut named = std::collections::BTreeSet::new();
        for active in self.ranges {
            let Some(operation) = list.operations.get(active.operation as usize) else {
                return Err(Error::invalid(format!(
                    "ranges for operation {}, which does not exist",
                    active.operation
                )));
            };
            let fail = |what: String| Err(Error::invalid(format!("{}: {what}", operation.label)));
            let OperationKind::Ffn(ffn) = &operation.kind else {
                return fail("has active ranges but is no ffn".into());
            };
            if !named.insert(active.operation) {
                return fail("has active ranges twice".into());
            }
            let neurons = list.slot(ffn.up).map_or(0, |s| s.tensor.rows);
            let mut next = 0u32;
            for range in active.ranges {
                if range.start < next || range.end <= range.start || u64::from(range.end) > neurons {
                    return fail(format!(
                        "range {range} is empty, out of order, overlapping or beyond the layer's {neurons} neurons"
                    ));
                }
                next = range.end;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Arithmetic;
    use crate::{DType, TensorType};

    #[test]
    fn sequences_do_not_share_positions_of_a_cache() {
        let mut list = OperationList::new(4);
        let row = list.per_token("row", SlotRole::Input, DType::F32, 8).unwrap();
        let cache = TensorType::matrix(DType::F16, 16, 16).unwrap();
        let cache = list.fixed("cache", SlotRole::State, cache);
        let kind = OperationKind::KvAppend { key: row, value: row, cache, kv_heads: 1, head_dim: 8 };
        list.push("append", kind, Arithmetic::F32);
        let check = |bases: [u32; 2]| {
            let span = |first_token, cache_base| SequenceSpan { first_token, tokens: 2, past: 3, cache_base };
            let sequences = [span(0, bases[0]), span(2, bases[1])];
            let bindings = Bindings { tokens: 4, sequences: &sequences, ..Bindings::default() };
            bindings.validate_sequences(&list).map_err(|error| error.detail().contains("behind the start"))
        };
        assert_eq!(check([0, 5]), Ok(()));
        assert_eq!(check([8, 0]), Ok(()));
        assert_eq!(check([0, 4]), Err(true));
        assert_eq!(check([7, 7]), Err(true));
        assert_eq!(check([4, 0]), Err(true));
    }
}
