//! Memory of a program that outlives its stages, and what a run of it binds.

use super::{Bind, Named, Prepared, Stage, named};
use crate::host_binding::{Call, Chain};
use crate::resource::DeviceBuffer;
use crate::stages::times::Span;
use crate::{Result, RuntimeError};
use engine_core::HostMemory;
use engine_core::backend::{ActiveRanges, BufferUse, BufferView, SequenceSpan};

/// What passes between stages.
pub(crate) struct ProgramMemory {
    exchanges: Vec<HostMemory>,
    kept: Vec<DeviceBuffer>,
}

impl ProgramMemory {
    pub(crate) fn new(prepared: &Prepared, devices: &[Named]) -> Result<ProgramMemory> {
        let host = |bytes: &u64| {
            HostMemory::allocate(*bytes).map_err(RuntimeError::device("host", "dividing a model"))
        };
        let kept = |(device, bytes): &(u32, u64)| {
            let Named { name, backend } = named(devices, *device)?;
            DeviceBuffer::allocate(backend, *bytes, BufferUse::Activations)
                .map_err(RuntimeError::device(name, "allocating what stays between stages"))
        };
        let program = &prepared.program;
        Ok(ProgramMemory {
            exchanges: program.exchanges.iter().map(host).collect::<Result<_>>()?,
            kept: program.kept.iter().map(kept).collect::<Result<_>>()?,
        })
    }
}

/// What one run of a program is bound to, beside its own memory.
pub(crate) struct Bound<'a> {
    pub(crate) tokens: u32,
    /// Positions of the sequence before these tokens; none where the program knows no positions.
    pub(crate) past: Option<u32>,
    /// Where position 0 of the sequence lies within its caches.
    pub(crate) base: u32,
    pub(crate) residual: Option<BufferView>,
    /// Per layer.
    pub(crate) caches: Vec<BufferView>,
    /// Memory of the host by what it is for.
    pub(crate) host: Vec<(Bind, &'a mut HostMemory)>,
}

impl Prepared {
    /// Runs every stage; `doing` is for messages.
    pub(crate) fn run(
        &self,
        devices: &[Named],
        memory: &mut ProgramMemory,
        bound: Bound<'_>,
        doing: &str,
    ) -> Result<Vec<Span>> {
        let Bound { tokens, past, base, residual, caches, mut host } = bound;
        let ProgramMemory { exchanges, kept } = memory;
        host.extend(exchanges.iter_mut().enumerate().map(|(at, memory)| (Bind::Exchange(at), memory)));
        let mut calls = Vec::with_capacity(self.program.stages.len());
        for (stage, executable) in self.program.stages.iter().zip(&self.executables) {
            let mut call = Call::new(&*named(devices, stage.device)?.backend, executable.id());
            (call.device, call.waits) = (stage.device, &stage.waits);
            for &(slot, bind) in &stage.binds {
                let view = match bind {
                    Bind::Residual => residual,
                    Bind::Cache(layer) => caches.get(layer).copied(),
                    Bind::Kept(at) => kept.get(at).map(|buffer| buffer.at(0)),
                    host_side => {
                        // A slot without memory is refused by the checks of what is bound.
                        let at = host.iter().position(|(bind, _)| *bind == host_side);
                        call.host.extend(at.map(|at| (slot, at)));
                        continue;
                    }
                };
                call.buffers.extend(view.map(|view| (slot, view)));
            }
            let ranges = stage.ranges.iter();
            call.ranges
                .extend(ranges.map(|(operation, ranges)| ActiveRanges { operation: *operation, ranges }));
            calls.push(call);
        }
        let sequence = |past| SequenceSpan { first_token: 0, tokens, past, cache_base: base };
        let sequences: Vec<SequenceSpan> = past.map(sequence).into_iter().collect();
        let memory = host.into_iter().map(|(_, memory)| memory).collect();
        Chain { tokens, sequences: &sequences, memory, calls }
            .run()
            .map_err(|(at, source)| self.failed(devices, at, doing)(source))
    }

    fn failed<'a>(
        &'a self,
        devices: &'a [Named],
        at: usize,
        doing: &'a str,
    ) -> impl Fn(engine_core::Error) -> RuntimeError + 'a {
        let stage: Option<&Stage> = self.program.stages.get(at);
        let device = stage.and_then(|stage| devices.get(stage.device as usize));
        let device = device.map_or("", |device| device.name.as_str());
        let label = |stage: &Stage| {
            let middle = stage.list.operations.iter().find(|operation| operation.kind.name() != "copy");
            middle.map(|operation| operation.label.clone())
        };
        let what = match stage.filter(|_| self.program.stages.len() > 1).and_then(label) {
            Some(label) => format!("{doing} (from {label} on)"),
            None => doing.to_owned(),
        };
        move |source| RuntimeError::device(device, &what)(source)
    }
}
