//! Runs texts and looks at every layer's network: what goes in, what a predictor is given, what every neuron does. What
//! profiling, calibration and training are made from.

use crate::graph::{Kind, residual_stride};
use crate::resource::DeviceBuffer;
use crate::session::position_rows;
use crate::stages::{Bind, Bound, Named, Prepared, ProgramMemory};
use crate::{Engine, Result, RuntimeError};
use engine_core::HostMemory;
use engine_core::backend::BufferUse;

/// What is seen of one layer and one batch: rows of a token each, one behind the other. Empty where it was not asked for.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// What the network is given, behind its norm: `n_embd` per token.
    pub input: &'a [f32],
    /// What a predictor is given, a residual before any norm: `n_embd` per token. The one after attention, or, where
    /// the layer is parallel or the model says so, the one that enters the layer.
    pub residual: &'a [f32],
    /// Every neuron's `h`, 0 where it is off: `n_ff` per token.
    pub hidden: &'a [f32],
    /// The experts that a token uses, ascending, where the layer is a mixture.
    pub chosen: &'a [i32],
}

/// What an observer is to give.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// [`Observed::input`].
    pub input: bool,
    /// [`Observed::residual`].
    pub residual: bool,
    /// [`Observed::hidden`], of layers that have one network.
    pub hidden: bool,
    /// [`Observed::chosen`].
    pub chosen: bool,
}

/// A sequence at a time through the layers of a model, dense, with what [`Wanted`] names given to the caller.
///
/// It has a KV cache and lists of its own: sessions of the engine are not touched.
pub struct Observer {
    // The executable holds the engine's weights as constants, so it is dropped first.
    list: Prepared,
    memory: ProgramMemory,
    caches: Vec<DeviceBuffer>,
    residual: DeviceBuffer,
    ids: HostMemory,
    positions: HostMemory,
    /// One per entry of the graph's `observed`.
    seen: Vec<HostMemory>,
    engine: Engine,
}

impl Observer {
    /// Gets ready to observe the model of an engine, whose plan should compute every neuron.
    ///
    /// # Errors
    /// Where `h` is wanted of a mixture of experts, and where the device has no memory or refuses the list.
    pub fn new(engine: &Engine, wanted: Wanted) -> Result<Observer> {
        let model = engine.model();
        let mixture = model.layers.iter().position(|layer| layer.ffn.experts.is_some());
        if let Some(layer) = mixture.filter(|_| wanted.hidden) {
            return Err(RuntimeError::Model {
                path: model.path.clone(),
                what: format!("observing the neurons of layer {layer}, which is a mixture of experts"),
                advice: "models with one network per layer are".into(),
            });
        }
        let list = engine.observed_list(wanted)?;
        let Named { name, backend } = engine.home()?;
        let allocate = |bytes, purpose, what: &str| {
            DeviceBuffer::allocate(backend, bytes, purpose).map_err(RuntimeError::device(name, what))
        };
        let host =
            |bytes| HostMemory::allocate(bytes).map_err(RuntimeError::device("host", "observing neurons"));
        let batch = u64::from(engine.options().batch);
        let caches = list.program.caches.iter();
        let caches = caches
            .map(|&(_, bytes)| allocate(bytes, BufferUse::KvCache, "allocating a KV cache"))
            .collect::<Result<_>>()?;
        let residual = batch * residual_stride(model, engine.row_alignment());
        let seen = list.program.observed.iter().map(|&(_, _, bytes)| host(bytes)).collect::<Result<_>>()?;
        Ok(Observer {
            memory: ProgramMemory::new(&list, engine.devices())?,
            caches,
            residual: allocate(residual, BufferUse::Activations, "allocating the residual")?,
            ids: host(batch * 4)?,
            positions: host(batch * 4)?,
            seen,
            list,
            engine: engine.clone(),
        })
    }

    /// Runs `ids` as one sequence from position 0, and gives what was seen of each batch and layer to `on_layer`.
    ///
    /// # Errors
    /// For ids that the model does not have or that are more than the context, and where the device fails.
    pub fn run(&mut self, ids: &[u32], on_layer: &mut dyn FnMut(usize, Observed<'_>)) -> Result<()> {
        self.engine.check_ids(ids, 0)?;
        let mut past = 0u32;
        let [mut input, mut residual, mut hidden] = [const { Vec::new() }; 3];
        let mut chosen: Vec<i32> = Vec::new();
        let engine = self.engine.clone();
        for batch in ids.chunks(engine.options().batch.max(1) as usize) {
            self.submit(batch, past)?;
            past += batch.len() as u32; // at most the context
            let mut seen = self.list.program.observed.iter().zip(&self.seen).peekable();
            for (index, layer) in engine.model().layers.iter().enumerate() {
                let failed = || RuntimeError::device("host", "reading what is observed");
                while let Some(((_, kind, _), memory)) = seen.next_if(|((layer, ..), _)| *layer == index) {
                    let (rows, width) = match kind {
                        Kind::Chosen => {
                            let used = layer.ffn.experts.as_ref().map_or(0, |experts| experts.used);
                            chosen.resize(batch.len() * used, 0);
                            memory.read(0, &mut chosen).map_err(failed())?;
                            continue;
                        }
                        Kind::Input => (&mut input, engine.model().n_embd),
                        Kind::Residual => (&mut residual, engine.model().n_embd),
                        Kind::Hidden => (&mut hidden, layer.ffn.n_ff),
                    };
                    rows.resize(batch.len() * width, 0.0f32);
                    memory.read(0, rows).map_err(failed())?;
                }
                let seen = Observed { input: &input, residual: &residual, hidden: &hidden, chosen: &chosen };
                on_layer(index, seen);
            }
        }
        Ok(())
    }

    fn submit(&mut self, ids: &[u32], past: u32) -> Result<()> {
        let engine = &self.engine;
        let passing = || RuntimeError::device("host", "passing the ids");
        let signed: Vec<i32> = ids.iter().map(|&id| id as i32).collect(); // checked
        self.ids.write(0, &signed).map_err(passing())?;
        let rows = position_rows(engine.model(), past, ids.len());
        self.positions.write(0, &rows).map_err(passing())?;
        let mut host = vec![(Bind::Ids, &mut self.ids), (Bind::Positions, &mut self.positions)];
        host.extend(self.seen.iter_mut().enumerate().map(|(at, memory)| (Bind::Seen(at), memory)));
        let bound = Bound {
            tokens: ids.len() as u32,
            past: Some(past),
            base: 0,
            residual: Some(self.residual.at(0)),
            caches: self.caches.iter().map(|cache| cache.at(0)).collect(),
            host,
        };
        let run = self.list.run(engine.devices(), &mut self.memory, bound, "observing neurons");
        run.map(drop).inspect_err(|error| engine.keep_if_lost(error))
    }
}
