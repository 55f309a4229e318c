//! Runs texts and looks at every neuron of every layer: what profiling is made from.

use crate::engine::Prepared;
use crate::host_binding::Submission;
use crate::resource::DeviceBuffer;
use crate::session::{layers, position_rows};
use crate::{Engine, Result, RuntimeError};
use engine_core::HostMemory;
use engine_core::backend::BufferUse;

/// A sequence at a time through the layers of a model, dense, with each neuron's `h` given to the caller.
///
/// It has a KV cache and lists of its own: sessions of the engine are not touched.
pub struct Observer {
    // The executable holds the engine's weights as constants, so it is dropped first.
    list: Prepared,
    caches: Vec<DeviceBuffer>,
    residual: DeviceBuffer,
    ids: HostMemory,
    positions: HostMemory,
    hidden: Vec<HostMemory>,
    engine: Engine,
}

impl Observer {
    /// Gets ready to observe the model of an engine, whose plan should compute every neuron.
    ///
    /// # Errors
    /// Where a layer is a mixture of experts, and where the device has no memory or refuses the list.
    pub fn new(engine: &Engine) -> Result<Observer> {
        let model = engine.model();
        if let Some(layer) = model.layers.iter().position(|layer| layer.ffn.experts.is_some()) {
            return Err(RuntimeError::Model {
                path: model.path.clone(),
                what: format!("observing the neurons of layer {layer}, which is a mixture of experts"),
                advice: "models with one network per layer are".into(),
            });
        }
        let list = engine.observed_list()?;
        let (backend, device) = (engine.backend(), engine.device());
        let allocate = |bytes, purpose, what: &str| {
            DeviceBuffer::allocate(backend, bytes, purpose).map_err(RuntimeError::device(device, what))
        };
        let host =
            |bytes| HostMemory::allocate(bytes).map_err(RuntimeError::device("host", "observing neurons"));
        let bytes = |slot| list.graph.list.slot(slot).map_or(0, |slot| slot.tensor.bytes());
        let batch = u64::from(engine.options().batch);
        let caches = list.graph.caches.iter();
        let caches = caches
            .map(|&slot| allocate(bytes(slot), BufferUse::KvCache, "allocating a KV cache"))
            .collect::<Result<_>>()?;
        let residual = list.graph.residual.map_or(0, bytes);
        let hidden = list.graph.hidden.iter().map(|&(_, slot)| host(bytes(slot))).collect::<Result<_>>()?;
        Ok(Observer {
            caches,
            residual: allocate(residual, BufferUse::Activations, "allocating the residual")?,
            ids: host(batch * 4)?,
            positions: host(batch * 4)?,
            hidden,
            list,
            engine: engine.clone(),
        })
    }

    /// Runs `ids` as one sequence from position 0. For each batch and layer, `on_layer(layer, rows)` is given a row of
    /// neurons per token, one behind the other: `h`, 0 for neurons that are off.
    ///
    /// # Errors
    /// For ids that the model does not have or that are more than the context, and where the device fails.
    pub fn run(&mut self, ids: &[u32], on_layer: &mut dyn FnMut(usize, &[f32])) -> Result<()> {
        self.engine.check_ids(ids, 0)?;
        let mut past = 0u32;
        let mut rows = Vec::new();
        for batch in ids.chunks(self.engine.options().batch.max(1) as usize) {
            self.submit(batch, past)?;
            past += batch.len() as u32; // at most the context
            for (&(layer, _), memory) in self.list.graph.hidden.iter().zip(&self.hidden) {
                let neurons = self.engine.model().layers[layer].ffn.n_ff;
                rows.resize(batch.len() * neurons, 0.0f32);
                memory.read(0, &mut rows).map_err(RuntimeError::device("host", "reading neurons"))?;
                on_layer(layer, &rows);
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
        let graph = &self.list.graph;
        let mut submission = layers(&self.list, &self.caches, ids.len() as u32, past);
        submission.device.extend(graph.residual.map(|slot| (slot, self.residual.at(0))));
        submission.host.extend(graph.ids.map(|slot| (slot, &mut self.ids)));
        submission.host.extend(graph.positions.map(|slot| (slot, &mut self.positions)));
        submission.host.extend(graph.hidden.iter().map(|&(_, slot)| slot).zip(&mut self.hidden));
        Submission::run(submission, &**engine.backend(), self.list.executable.id())
            .map_err(RuntimeError::device(engine.device(), "observing neurons"))
    }
}
