//! Copies between host and device that are too large to be staged as a whole: piece by piece through a buffer of their own.

use std::sync::Arc;

use engine_core::operation::{Slot, SlotId};
use engine_core::{Error, Result, TensorType};

use super::{Env, Shared};
use crate::device::Kind;
use crate::memory::{Memory, Place};
use crate::record::{Command, Recorded};

/// Bytes of the buffer that pieces go through.
const PIECE: u64 = 16 << 20;

/// Runs of bytes that are copied: (offset on the host, offset on the device, length).
pub(crate) type Runs = Vec<(u64, u64, u64)>;

/// A copy between a host slot and a place on the device.
pub(crate) struct Stream {
    pub(crate) host: SlotId,
    pub(crate) device: Place,
    pub(crate) to_host: bool,
    pub(crate) runs: Runs,
}

/// The bytes of a slot's rows as (offset, length), one run where there are no gaps.
pub(crate) fn rows_of(slot: &Slot, tokens: u32) -> Vec<(u64, u64)> {
    let rows = if slot.per_token { u64::from(tokens) } else { slot.tensor.rows };
    let t = TensorType { rows, ..slot.tensor };
    if t.row_stride == t.row_bytes() || rows == 1 {
        return vec![(0, t.bytes())];
    }
    (0..rows).map(|row| (row * t.row_stride, t.row_bytes())).collect()
}

/// Runs cut so that none is longer than [`PIECE`].
fn cut(runs: &Runs) -> Runs {
    let mut pieces = Vec::new();
    for (host, device, length) in runs {
        let mut done = 0;
        while done < *length {
            let part = PIECE.min(length - done);
            pieces.push((host + done, device + done, part));
            done += part;
        }
    }
    pieces
}

/// Carries out a stream, waiting for each buffer full.
pub(super) fn execute_stream(shared: &Shared, stream: &Stream, env: &Env) -> Result<()> {
    let span = env.span(stream.host).ok_or_else(|| Error::internal("a host slot is bound to nothing"))?;
    let pieces = cut(&stream.runs);
    let total: u64 = pieces.iter().map(|piece| piece.2).sum();
    if total == 0 {
        return Ok(());
    }
    let room = PIECE.min(total);
    let memory = Arc::new(Memory::allocate(&shared.device, &shared.budget, room, Kind::Staging)?);
    let staging = Place::of(&memory, 0, room);
    let mut rest = &pieces[..];
    while !rest.is_empty() {
        // As many pieces as the buffer holds: (offset in it, piece).
        let (mut batch, mut filled) = (Vec::new(), 0);
        while let Some((piece, after)) = rest.split_first().filter(|(piece, _)| filled + piece.2 <= room) {
            batch.push((filled, *piece));
            filled += piece.2;
            rest = after;
        }
        let exchange = |to_host: bool| -> Result<()> {
            for (at, (host, _, length)) in &batch {
                // SAFETY: the span is that of the submission that is being run.
                unsafe { memory.exchange(*at, span.slice(*host, *length)?, to_host)? };
            }
            Ok(())
        };
        if !stream.to_host {
            exchange(false)?;
        }
        let runs = batch
            .iter()
            .map(
                |(at, (_, device, length))| {
                    if stream.to_host { (*device, *at, *length) } else { (*at, *device, *length) }
                },
            )
            .collect();
        let (from, to) = if stream.to_host {
            (stream.device.clone(), staging.clone())
        } else {
            (staging.clone(), stream.device.clone())
        };
        let recorded = Recorded::new(&shared.device, &[Command::Copy { from, to, runs }])?;
        shared.device.execute(recorded.commands)?;
        if stream.to_host {
            exchange(true)?;
        }
    }
    Ok(())
}

/// The bytes of a place.
pub(super) fn download(shared: &Shared, place: &Place) -> Result<Vec<u8>> {
    let memory = Arc::new(Memory::allocate(&shared.device, &shared.budget, place.bytes, Kind::Staging)?);
    let copy = Command::Copy {
        from: place.clone(),
        to: Place::of(&memory, 0, place.bytes),
        runs: vec![(0, 0, place.bytes)],
    };
    let recorded = Recorded::new(&shared.device, &[copy])?;
    shared.device.execute(recorded.commands)?;
    let mut bytes = vec![0; place.bytes as usize];
    memory.read(0, &mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_their_runs() {
        let pieces = cut(&vec![(10, 0, 3), (100, 50, 2 * PIECE + 1)]);
        assert_eq!(
            pieces,
            vec![
                (10, 0, 3),
                (100, 50, PIECE),
                (100 + PIECE, 50 + PIECE, PIECE),
                (100 + 2 * PIECE, 50 + 2 * PIECE, 1)
            ]
        );
    }
}
