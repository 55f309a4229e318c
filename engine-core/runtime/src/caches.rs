//! The KV caches of a sequence: a layer whose batches and single tokens run on different devices has one on each, and keys
//! and values follow the sequence from one to the other.

use crate::planning::moved;
use crate::resource::DeviceBuffer;
use crate::stages::kv::Move;
use crate::stages::{Bound, Named, Prepared, ProgramMemory, StageTimes, Times, named};
use crate::{Engine, Result, RuntimeError};
use engine_core::backend::{BufferUse, BufferView};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// What reads and writes a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Single tokens.
    Step,
    /// Batches.
    Body,
}

/// A layer's cache, or both.
struct Layer {
    step: DeviceBuffer,
    /// Where batches have another device: their cache.
    body: Option<DeviceBuffer>,
}

pub(crate) struct Caches {
    layers: Vec<Layer>,
    /// Positions that the caches of single tokens have, and those of batches. The same where no layer has two caches.
    step: u32,
    body: u32,
    /// Of all caches.
    pub(crate) bytes: u64,
    /// Moved so far.
    pub(crate) bytes_moved: u64,
    /// What moved them, by the devices that they were moved from and to.
    moved: BTreeMap<(u32, u32), Moved>,
}

/// Moves from one device to another: how often and how long, and a program with the kinds of their stages.
struct Moved {
    times: Times,
    list: Arc<Prepared>,
}

impl Caches {
    pub(crate) fn new(engine: &Engine) -> Result<Caches> {
        let allocate = |layer: usize, (device, bytes): (u32, u64)| {
            let Named { name, backend } = named(engine.devices(), device)?;
            let what = format!(
                "allocating the KV cache of layer {layer}; lower [runtime] context if memory is short"
            );
            DeviceBuffer::allocate(backend, bytes, BufferUse::KvCache)
                .map_err(RuntimeError::device(name, &what))
        };
        let (mut layers, mut bytes) = (Vec::new(), 0);
        let programs = (&engine.step_list().program.caches, &engine.body_list().program.caches);
        for (layer, (&step, &body)) in programs.0.iter().zip(programs.1).enumerate() {
            let own = body.0 != step.0;
            bytes += step.1 + if own { body.1 } else { 0 };
            let body = if own { Some(allocate(layer, body)?) } else { None };
            layers.push(Layer { step: allocate(layer, step)?, body });
        }
        Ok(Caches { layers, step: 0, body: 0, bytes, bytes_moved: 0, moved: BTreeMap::new() })
    }

    /// Where the caches of a phase lie.
    pub(crate) fn views(&self, phase: Phase) -> Vec<BufferView> {
        self.layers.iter().map(|layer| layer.at(phase)).collect()
    }

    /// A phase wrote all positions up to `past`.
    pub(crate) fn filled(&mut self, phase: Phase, past: u32) {
        match phase {
            Phase::Step => self.step = past,
            Phase::Body => self.body = past,
        }
    }

    /// Positions from `position` on are no longer what they were.
    pub(crate) fn forget(&mut self, position: u32) {
        (self.step, self.body) = (self.step.min(position), self.body.min(position));
    }

    /// How often and how long each kind of move ran.
    pub(crate) fn times(&self) -> BTreeMap<(u32, u32), Times> {
        self.moved.iter().map(|(devices, moved)| (*devices, moved.times.clone())).collect()
    }

    /// The same since `earlier`, with names.
    pub(crate) fn times_since(
        &self,
        earlier: &BTreeMap<(u32, u32), Times>,
        names: &[&str],
    ) -> Vec<StageTimes> {
        let none = Times::default();
        let since = |(devices, moved): (&(u32, u32), &Moved)| {
            moved.times.since(earlier.get(devices).unwrap_or(&none), &moved.list.program, names)
        };
        self.moved.iter().flat_map(since).collect()
    }

    /// Brings the `past` positions of the sequence to the caches of a phase, where these do not have them: those that are
    /// missing, a piece at a time.
    pub(crate) fn ready(&mut self, engine: &Engine, phase: Phase, past: u32) -> Result<()> {
        let there = match phase {
            Phase::Step => self.step,
            Phase::Body => self.body,
        };
        if there >= past {
            return Ok(());
        }
        let mut memory: BTreeMap<Move, ProgramMemory> = BTreeMap::new();
        let layers = engine.plan().layers.iter().zip(&engine.model().layers);
        for ((plan, described), layer) in layers.zip(&self.layers) {
            let Some(moved) = moved(plan, described, engine.context()) else { continue };
            let (moved, from) = match phase {
                Phase::Step => (moved, Phase::Body),
                Phase::Body => (moved.back(), Phase::Step),
            };
            let list = engine.move_list(moved)?;
            let memory = match memory.entry(moved) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(ProgramMemory::new(&list, engine.devices())?),
            };
            let of = self.moved.entry((moved.from, moved.to));
            let of = of.or_insert_with(|| Moved { times: Times::default(), list: Arc::clone(&list) });
            for start in (there..past).step_by(moved.positions() as usize) {
                let count = moved.positions().min(past - start);
                let bound = Bound {
                    tokens: 1,
                    past: Some(count - 1),
                    base: start,
                    residual: None,
                    caches: vec![layer.at(from), layer.at(phase)],
                    host: Vec::new(),
                };
                let spans = list.run(engine.devices(), memory, bound, "moving the KV cache")?;
                self.bytes_moved += moved_bytes(moved, count);
                of.times.add(&list.program, &spans);
            }
        }
        self.filled(phase, past);
        Ok(())
    }
}

/// Bytes of keys and values of so many positions.
fn moved_bytes(moved: Move, positions: u32) -> u64 {
    u64::from(positions) * u64::from(moved.kv_heads) * u64::from(moved.head_dim) * 4
}

impl Layer {
    fn at(&self, phase: Phase) -> BufferView {
        match (phase, &self.body) {
            (Phase::Body, Some(body)) => body.at(0),
            _ => self.step.at(0),
        }
    }
}
