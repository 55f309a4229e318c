//! Small layers on a device, with what they should give in f64.

use std::cell::RefCell;
use std::time::Duration;

use engine_core::backend::{ActiveRanges, Bindings, Bound, BufferId, BufferUse, BufferView, ExecutableId};
use engine_core::operation::{
    Activation, Arithmetic, DownLayout, Ffn, OperationKind, OperationList, Place, Selection, Slot, SlotId,
    SlotRole,
};
use engine_core::{ClusterRange, ComputeBackend, DType, Error, HostMemory, TensorType};

/// Repeatable numbers.
pub(crate) struct Numbers;

impl Numbers {
    fn some(count: usize, seed: u64, scale: f32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
        };
        (0..count).map(|_| next()).collect()
    }

    /// Euclidean distance as a share of the length of what is wanted.
    pub(crate) fn distance(got: &[f32], want: &[f64]) -> f64 {
        let off: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
        (off / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
    }
}

/// What a layer computes.
enum Kind {
    /// Several projections of one input, outputs side by side in the result.
    Linear,
    /// relu(gate) * up, then down by neuron.
    Ffn,
}

/// A prepared list with its memory. Slots: the input, the weights, the outputs.
pub(crate) struct Layer {
    kind: Kind,
    executable: ExecutableId,
    input: BufferId,
    weights: Vec<(BufferId, Vec<f32>)>,
    outputs: Vec<BufferId>,
    x: Vec<f32>,
    /// Elements of an input row, and of an output row.
    columns: (usize, usize),
    neurons: usize,
    slots: (SlotId, Vec<SlotId>),
    buffers: RefCell<Vec<BufferId>>,
}

fn transfer(
    device: &dyn ComputeBackend,
    buffer: BufferId,
    memory: &HostMemory,
    to_host: bool,
) -> Result<(), Error> {
    let mut list = OperationList::new(1);
    let tensor = TensorType::matrix(DType::U8, 1, memory.len())?;
    let role = |input| if input { SlotRole::Input } else { SlotRole::Output };
    let slot =
        Slot { name: "host".into(), role: role(!to_host), place: Place::Host, tensor, per_token: false };
    let (host, there) = (list.add_slot(slot), list.fixed("device", role(to_host), tensor));
    let (from, to) = if to_host { (there, host) } else { (host, there) };
    list.push("transfer", OperationKind::Copy { from, to }, Arithmetic::F32);
    // SAFETY: the memory outlives the submission, which is waited for.
    let span = unsafe { memory.span() };
    let slots = [(host, Bound::Host(span)), (there, Bound::Buffer(BufferView { buffer, offset: 0 }))];
    let executable = device.prepare(&list)?;
    submit(device, executable, &slots, 1)?;
    device.release(executable)
}

fn submit(
    device: &dyn ComputeBackend,
    executable: ExecutableId,
    slots: &[(SlotId, Bound)],
    tokens: u32,
) -> Result<(), Error> {
    submit_ranges(device, executable, slots, tokens, &[])
}

fn submit_ranges(
    device: &dyn ComputeBackend,
    executable: ExecutableId,
    slots: &[(SlotId, Bound)],
    tokens: u32,
    ranges: &[ActiveRanges<'_>],
) -> Result<(), Error> {
    let value = device.submit(executable, &Bindings { tokens, slots, sequences: &[], ranges }, &[])?;
    device.wait(value, Duration::from_secs(120)).map(|_| ())
}

fn placed(device: &dyn ComputeBackend, values: &[f32], use_: BufferUse) -> Result<BufferId, Error> {
    let mut memory = HostMemory::allocate(values.len() as u64 * 4)?;
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    memory.write(0, &bytes)?;
    let buffer = device.allocate(memory.len(), use_)?;
    transfer(device, buffer, &memory, false)?;
    Ok(buffer)
}

fn read(device: &dyn ComputeBackend, buffer: BufferId, count: usize) -> Result<Vec<f32>, Error> {
    let memory = HostMemory::allocate(count as u64 * 4)?;
    transfer(device, buffer, &memory, true)?;
    Ok(memory.bytes().chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect())
}

fn product(x: &[f64], w: &[f64], columns: usize) -> Vec<f64> {
    let row = |x: &[f64]| {
        w.chunks(columns).map(|w| x.iter().zip(w).map(|(x, w)| x * w).sum()).collect::<Vec<f64>>()
    };
    x.chunks(columns).flat_map(row).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}

impl Layer {
    /// `count` projections `[rows x columns]` of one input.
    pub(crate) fn linear(
        device: &dyn ComputeBackend,
        capacity: u32,
        (rows, columns): (u64, u64),
        count: usize,
    ) -> Result<Layer, Error> {
        let mut list = OperationList::new(capacity);
        let input = list.per_token("x", SlotRole::Input, DType::F32, columns)?;
        let (mut weights, mut outputs) = (Vec::new(), Vec::new());
        for at in 0..count {
            let values = Numbers::some((rows * columns) as usize, at as u64 + 1, 0.2);
            let buffer = placed(device, &values, BufferUse::Weights)?;
            let role = SlotRole::Constant(BufferView { buffer, offset: 0 });
            let weight = list.fixed("w", role, TensorType::matrix(DType::F32, rows, columns)?);
            let output = list.per_token("y", SlotRole::Output, DType::F32, rows)?;
            // The second of two products goes on from the input of the first, unless they overlap in memory.
            let kind = OperationKind::Linear { input, weight, bias: None, output, accumulate: false };
            list.push("linear", kind, Arithmetic::F32);
            weights.push((buffer, values));
            outputs.push(output);
        }
        Layer::new(device, Kind::Linear, &list, (input, outputs), weights, (columns as usize, rows as usize))
    }

    /// The list of one projection `[rows x columns]` for one token, its weights in the device.
    pub(crate) fn unprepared_linear(
        device: &dyn ComputeBackend,
        (rows, columns): (u64, u64),
    ) -> Result<OperationList, Error> {
        let mut list = OperationList::new(1);
        let input = list.per_token("x", SlotRole::Input, DType::F32, columns)?;
        let values = Numbers::some((rows * columns) as usize, 1, 0.2);
        let buffer = placed(device, &values, BufferUse::Weights)?;
        let role = SlotRole::Constant(BufferView { buffer, offset: 0 });
        let weight = list.fixed("w", role, TensorType::matrix(DType::F32, rows, columns)?);
        let output = list.per_token("y", SlotRole::Output, DType::F32, rows)?;
        let kind = OperationKind::Linear { input, weight, bias: None, output, accumulate: false };
        list.push("linear", kind, Arithmetic::F32);
        Ok(list)
    }

    /// A gated layer of `neurons`.
    pub(crate) fn ffn(
        device: &dyn ComputeBackend,
        capacity: u32,
        (width, neurons): (u64, u64),
    ) -> Result<Layer, Error> {
        let mut list = OperationList::new(capacity);
        let input = list.per_token("x", SlotRole::Input, DType::F32, width)?;
        let output = list.per_token("y", SlotRole::Output, DType::F32, width)?;
        let mut weights = Vec::new();
        let mut matrix = |list: &mut OperationList, name: &str, seed| -> Result<SlotId, Error> {
            let values = Numbers::some((width * neurons) as usize, seed, 0.2);
            let buffer = placed(device, &values, BufferUse::Weights)?;
            weights.push((buffer, values));
            let role = SlotRole::Constant(BufferView { buffer, offset: 0 });
            Ok(list.fixed(name, role, TensorType::matrix(DType::F32, neurons, width)?))
        };
        let (gate, up) = (matrix(&mut list, "gate", 11)?, matrix(&mut list, "up", 12)?);
        let down = matrix(&mut list, "down", 13)?;
        let ffn = Ffn {
            input,
            gate: Some(gate),
            up,
            down,
            gate_low: None,
            up_low: None,
            gate_bias: None,
            up_bias: None,
            output,
            hidden: None,
            active_count: None,
            down_layout: DownLayout::NeuronRows,
            function: Activation::Relu,
            up_function: Activation::Identity,
            selection: Selection::All,
            accumulate: false,
        };
        list.push("ffn", OperationKind::Ffn(ffn), Arithmetic::F32);
        Layer::new(device, Kind::Ffn, &list, (input, vec![output]), weights, (width as usize, width as usize))
    }

    fn new(
        device: &dyn ComputeBackend,
        kind: Kind,
        list: &OperationList,
        slots: (SlotId, Vec<SlotId>),
        weights: Vec<(BufferId, Vec<f32>)>,
        columns: (usize, usize),
    ) -> Result<Layer, Error> {
        let capacity = list.token_capacity as usize;
        let x = Numbers::some(capacity * columns.0, 99, 1.0);
        let input = placed(device, &x, BufferUse::Activations)?;
        let room = capacity * columns.1 * 4;
        let outputs: Vec<BufferId> = slots
            .1
            .iter()
            .map(|_| device.allocate(room as u64, BufferUse::Activations))
            .collect::<Result<_, _>>()?;
        let executable = device.prepare(list)?;
        let mut buffers: Vec<BufferId> = weights.iter().map(|(buffer, _)| *buffer).collect();
        buffers.push(input);
        buffers.extend(&outputs);
        let neurons = weights.first().map_or(0, |(_, w)| w.len() / columns.0);
        Ok(Layer {
            kind,
            executable,
            input,
            weights,
            outputs,
            x,
            columns,
            neurons,
            slots,
            buffers: buffers.into(),
        })
    }

    fn bound(&self) -> Vec<(SlotId, Bound)> {
        let at = |buffer: BufferId| Bound::Buffer(BufferView { buffer, offset: 0 });
        let mut bound = vec![(self.slots.0, at(self.input))];
        bound.extend(self.slots.1.iter().zip(&self.outputs).map(|(slot, buffer)| (*slot, at(*buffer))));
        bound
    }

    /// Runs it once.
    pub(crate) fn submit(&self, device: &dyn ComputeBackend, tokens: u32) -> Result<(), Error> {
        submit(device, self.executable, &self.bound(), tokens)
    }

    /// Runs it once; the outputs' rows, one output after the other.
    pub(crate) fn run(&self, device: &dyn ComputeBackend, tokens: u32) -> Result<Vec<f32>, Error> {
        self.submit(device, tokens)?;
        let mut all = Vec::new();
        for output in &self.outputs {
            all.extend(read(device, *output, tokens as usize * self.columns.1)?);
        }
        Ok(all)
    }

    /// Multiplies the first token's row of the input.
    pub(crate) fn enlarge_first(&mut self, device: &dyn ComputeBackend, factor: f32) -> Result<(), Error> {
        self.x[..self.columns.0].iter_mut().for_each(|x| *x *= factor);
        device.free(self.input)?;
        let input = placed(device, &self.x, BufferUse::Activations)?;
        self.buffers.borrow_mut().iter_mut().filter(|b| **b == self.input).for_each(|b| *b = input);
        self.input = input;
        Ok(())
    }

    /// Runs a feed-forward layer over these neurons only.
    pub(crate) fn run_range(
        &self,
        device: &dyn ComputeBackend,
        tokens: u32,
        range: ClusterRange,
    ) -> Result<Vec<f32>, Error> {
        let ranges = [ActiveRanges { operation: 0, ranges: &[range] }];
        submit_ranges(device, self.executable, &self.bound(), tokens, &ranges)?;
        read(device, self.outputs[0], tokens as usize * self.columns.1)
    }

    /// The same with the first output written where the input lies (rows of input and output have one length).
    pub(crate) fn run_overlapping(
        &self,
        device: &dyn ComputeBackend,
        tokens: u32,
    ) -> Result<Vec<f32>, Error> {
        let mut bound = self.bound();
        bound[1].1 = bound[0].1;
        submit(device, self.executable, &bound, tokens)?;
        let mut all = read(device, self.input, tokens as usize * self.columns.1)?;
        for output in &self.outputs[1..] {
            all.extend(read(device, *output, tokens as usize * self.columns.1)?);
        }
        Ok(all)
    }

    fn inputs(&self, tokens: usize) -> Vec<f64> {
        wide(&self.x[..tokens * self.columns.0])
    }

    /// What [`Layer::run`] gives in f64.
    pub(crate) fn reference(&self, tokens: usize) -> Vec<f64> {
        self.reference_range(tokens, 0..self.neurons)
    }

    /// The same over some neurons.
    pub(crate) fn reference_range(&self, tokens: usize, range: std::ops::Range<usize>) -> Vec<f64> {
        let x = self.inputs(tokens);
        match self.kind {
            Kind::Linear => {
                self.weights.iter().flat_map(|(_, w)| product(&x, &wide(w), self.columns.0)).collect()
            }
            Kind::Ffn => {
                let of = |at: usize| wide(&self.weights[at].1);
                let (gate, up, down) = (of(0), of(1), of(2));
                let (gate, up) = (product(&x, &gate, self.columns.0), product(&x, &up, self.columns.0));
                let active = |at: usize| f64::from(u8::from(range.contains(&(at % self.neurons))));
                let hidden = gate.iter().zip(&up).enumerate();
                let hidden: Vec<f64> = hidden.map(|(at, (g, u))| g.max(0.0) * u * active(at)).collect();
                let mut turned = vec![0.0; down.len()];
                for (neuron, row) in down.chunks(self.columns.1).enumerate() {
                    row.iter().enumerate().for_each(|(c, w)| turned[c * self.neurons + neuron] = *w);
                }
                product(&hidden, &turned, self.neurons)
            }
        }
    }

    /// The first product, then the second one of the first's results.
    pub(crate) fn chained_reference(&self, tokens: usize) -> Vec<f64> {
        let mut first = product(&self.inputs(tokens), &wide(&self.weights[0].1), self.columns.0);
        first.extend(product(&first, &wide(&self.weights[1].1), self.columns.0));
        first
    }

    /// [`Layer::reference`] of one projection, with weights rounded to 8 bits with a scale per row.
    pub(crate) fn rounded_reference(&self, tokens: usize) -> Vec<f64> {
        let mut rounded = Vec::new();
        for row in self.weights[0].1.chunks(self.columns.0) {
            let scale = row.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
            rounded.extend(row.iter().map(|x| f64::from((x / scale).round_ties_even()) * f64::from(scale)));
        }
        product(&self.inputs(tokens), &rounded, self.columns.0)
    }

    /// Gives executable and buffers back.
    pub(crate) fn release(&self, device: &dyn ComputeBackend) -> Result<(), Error> {
        device.release(self.executable)?;
        self.buffers.borrow_mut().drain(..).try_for_each(|buffer| device.free(buffer))
    }
}
