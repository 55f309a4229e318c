//! Rope, the KV cache and attention.
//!
//! A cache is two planes, keys first, each with a packed row of f16 per position: the canonical layout is then a copy.

use engine_core::operation::{OperationKind, Rope, RopeStyle, SlotId};
use engine_core::{Error, Result};

use super::{Emitter, Step, groups, read, write};
use crate::memory::Place;
use crate::record::Command;

impl Emitter<'_> {
    pub(super) fn rope(&mut self, index: usize, rope: &Rope) -> Result<()> {
        let (from, to) = (self.rows(rope.input)?, self.rows(rope.output)?);
        let heads = self.tensor(rope.input)?.columns / u64::from(rope.head_dim.max(1));
        let (parameters, place) = self.parameters()?;
        let angles = parameters.angles(index).ok_or_else(|| Error::internal("a rope has no angles"))?;
        let pairs = rope.rotary_dim / 2;
        self.dispatch(
            "rope",
            vec![read(0, &from.place), write(1, &to.place), read(2, &place)],
            &[
                rope.head_dim,
                pairs,
                heads as u32,
                self.env.tokens,
                from.stride,
                to.stride,
                u32::from(rope.style == RopeStyle::Interleaved),
                angles,
            ],
            [groups(heads * u64::from(rope.head_dim - pairs)), self.env.tokens, 1],
        )
    }

    /// The planes of keys and values of a cache, with `columns` elements per position.
    fn planes(&self, cache: SlotId, columns: u64) -> Result<[Place; 2]> {
        let plane = self.tensor(cache)?.rows * columns * 2;
        let place = self.place(cache)?;
        Ok([place.part(0, plane), place.part(plane, plane)])
    }

    pub(super) fn append(&mut self, [key, value, cache]: [SlotId; 3], columns: u64) -> Result<()> {
        let (keys, values) = (self.rows(key)?, self.rows(value)?);
        let [key_plane, value_plane] = self.planes(cache, columns)?;
        let (parameters, place) = self.parameters()?;
        let positions = parameters.positions();
        self.dispatch(
            "append",
            vec![
                read(0, &keys.place),
                read(1, &values.place),
                write(2, &key_plane),
                write(3, &value_plane),
                read(4, &place),
            ],
            &[(columns / 2) as u32, keys.stride, values.stride, positions],
            [groups(columns / 2), self.env.tokens, 1],
        )
    }

    pub(super) fn attention(&mut self, kind: &OperationKind) -> Result<()> {
        let OperationKind::Attention {
            query,
            cache,
            output,
            heads,
            kv_heads,
            head_dim,
            scale,
            window,
            soft_cap,
        } = kind
        else {
            return Err(Error::internal("this is no attention"));
        };
        let columns = u64::from(*kv_heads) * u64::from(*head_dim);
        let [key_plane, value_plane] = self.planes(*cache, columns)?;
        let (from, to) = (self.rows(*query)?, self.rows(*output)?);
        let (parameters, place) = self.parameters()?;
        let positions = parameters.positions();
        self.dispatch(
            "attention",
            vec![
                read(0, &from.place),
                read(1, &key_plane),
                read(2, &value_plane),
                write(3, &to.place),
                read(4, &place),
            ],
            &[
                *head_dim,
                *heads,
                *kv_heads,
                (columns / 2) as u32,
                from.stride,
                to.stride,
                positions,
                window.unwrap_or(0),
                scale.to_bits(),
                soft_cap.unwrap_or(0.0).to_bits(),
            ],
            [*heads, self.env.tokens, 1],
        )
    }

    /// Copies the first positions of the one sequence out of a cache, or into it.
    pub(super) fn move_cache(
        &mut self,
        cache: SlotId,
        canonical: [SlotId; 2],
        columns: u64,
        out: bool,
    ) -> Result<()> {
        let planes = self.planes(cache, columns)?;
        let span = self.env.sequences.first().ok_or_else(|| Error::internal("no sequence is bound"))?;
        let (base, count) = (u64::from(span.cache_base), u64::from(span.past) + u64::from(span.tokens));
        let row = columns * 2;
        for (plane, slot) in planes.into_iter().zip(canonical) {
            let (t, place) = (self.tensor(slot)?, self.place(slot)?);
            let runs: Vec<(u64, u64, u64)> = if t.row_stride == row {
                vec![(base * row, 0, count * row)]
            } else {
                (0..count).map(|position| ((base + position) * row, position * t.row_stride, row)).collect()
            };
            let copy = if out {
                Command::Copy { from: plane, to: place, runs }
            } else {
                let runs = runs.into_iter().map(|(cache, other, bytes)| (other, cache, bytes)).collect();
                Command::Copy { from: place, to: plane, runs }
            };
            self.steps.push(Step::Command(copy));
        }
        Ok(())
    }
}
