//! Which weight types a device has no kernels for, and what it gets instead.

use crate::options::Activations;
use engine_core::backend::{BufferId, BufferView, ToleranceClass};
use engine_core::operation::{
    Accumulation, Activation, Arithmetic, DownLayout, Ffn, OperationKind, OperationList, Quantization,
    Selection, SlotRole,
};
use engine_core::{ComputeBackend, DType, TensorType};
use formats::ModelDescription;
use formats::model::Down;
use std::collections::{BTreeMap, BTreeSet};

/// What a weight is used for: a device may have kernels for a type here and not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Use {
    /// Rows are looked up.
    Table,
    /// Of a linear map.
    Matrix,
    /// Of a feed-forward network, a row per neuron or output.
    Neurons,
    /// Of a predictor.
    Predictor,
}

/// The types that weights are brought to a device in, where these are not the file's own.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Conversions {
    targets: BTreeMap<(Use, DType), DType>,
}

impl Conversions {
    /// Every weight as it is stored.
    pub(crate) const NONE: &Conversions = &Conversions { targets: BTreeMap::new() };

    /// What `backend` needs for this model: a type that it denies becomes F16, or F32 where it denies that, too. Where it
    /// denies both, nothing is changed, and the device's own reason will be told.
    pub(crate) fn of(
        backend: &dyn ComputeBackend,
        model: &ModelDescription,
        activations: Activations,
    ) -> Conversions {
        // As the lists for such a device have it.
        let activations = match backend.describe().tolerance {
            ToleranceClass::F16 => Activations::F32,
            _ => activations,
        };
        let takes = |purpose, dtype: DType| {
            let list = question(model, purpose, dtype, activations);
            list.is_ok_and(|list| backend.supports(&list, 0).is_yes())
        };
        let mut targets = BTreeMap::new();
        for (purpose, dtype) in uses(model) {
            // F16 has no place for the range of these.
            let candidates: &[DType] = match dtype {
                DType::F32 | DType::BF16 | DType::F64 => &[DType::F32],
                _ => &[DType::F16, DType::F32],
            };
            if !takes(purpose, dtype)
                && let Some(&target) = candidates.iter().find(|&&target| takes(purpose, target))
            {
                targets.insert((purpose, dtype), target);
            }
        }
        Conversions { targets }
    }

    /// The type in which a weight is brought.
    pub(crate) fn target(&self, purpose: Use, dtype: DType) -> DType {
        self.targets.get(&(purpose, dtype)).copied().unwrap_or(dtype)
    }

    /// Of several devices' conversions, for each type the one that takes most memory.
    pub(crate) fn largest(all: impl IntoIterator<Item = Conversions>) -> Conversions {
        let bits = |dtype: DType| dtype.block_bytes() * 8 / dtype.block_elements().max(1);
        let mut largest = Conversions::default();
        for ((purpose, dtype), target) in all.into_iter().flat_map(|each| each.targets) {
            let known = largest.targets.entry((purpose, dtype)).or_insert(target);
            if bits(target) > bits(*known) {
                *known = target;
            }
        }
        largest
    }
}

/// Every type that the model's matrices have, by what they are used for.
fn uses(model: &ModelDescription) -> BTreeSet<(Use, DType)> {
    let mut uses = BTreeSet::from([(Use::Table, model.token_embd.dtype), (Use::Matrix, model.head().dtype)]);
    uses.extend(model.positions.as_ref().map(|positions| (Use::Table, positions.tensor.dtype)));
    for layer in &model.layers {
        let (attention, ffn) = (&layer.attention, &layer.ffn);
        let linear = [&attention.q, &attention.k, &attention.v, &attention.o];
        uses.extend(linear.map(|linear| (Use::Matrix, linear.weight.dtype)));
        uses.extend([&ffn.gate, &ffn.up, ffn.down.linear()].map(|of| (Use::Neurons, of.weight.dtype)));
        uses.extend(ffn.experts.as_ref().map(|experts| (Use::Matrix, experts.router.weight.dtype)));
        if let Some(predictor) = &ffn.predictor {
            uses.extend([&predictor.fc1, &predictor.fc2].map(|tensor| (Use::Predictor, tensor.dtype)));
        }
    }
    uses
}

/// Rows and columns of the operations that a device is asked about: whole blocks of every type.
const SIZE: u64 = 256;

/// A list of one operation with weights of this type, as the model's lists have them.
fn question(
    model: &ModelDescription,
    purpose: Use,
    dtype: DType,
    activations: Activations,
) -> engine_core::Result<OperationList> {
    let mut list = OperationList::new(1);
    let unplaced = SlotRole::Constant(BufferView { buffer: BufferId(0), offset: 0 });
    let shape = TensorType::matrix(dtype, SIZE, SIZE)?;
    let input = list.per_token("input", SlotRole::Input, DType::F32, SIZE)?;
    let output = list.per_token("output", SlotRole::State, DType::F32, SIZE)?;
    let mut weight = |name: &str| list.fixed(name, unplaced, shape);
    let quantised = match activations {
        Activations::Int8 if dtype.is_quantised() => Quantization::Int8Blocks,
        _ => Quantization::None,
    };
    let mut arithmetic =
        Arithmetic { input: quantised, hidden: Quantization::None, accumulation: Accumulation::F32 };
    let kind = match purpose {
        Use::Table => {
            arithmetic.input = Quantization::None;
            let table = weight("table");
            let ids = list.per_token("ids", SlotRole::Input, DType::I32, 1)?;
            OperationKind::Embed { ids, table, output, scale: 1.0 }
        }
        Use::Matrix => {
            let weight = weight("weight");
            OperationKind::Linear { input, weight, bias: None, output, accumulate: false }
        }
        Use::Predictor => {
            arithmetic.hidden = quantised;
            let (fc1, fc2) = (weight("fc1"), weight("fc2"));
            let mask = list.per_token("mask", SlotRole::Output, DType::U8, SIZE)?;
            OperationKind::Predict { input, fc1, fc2, mask, threshold: 0.0 }
        }
        Use::Neurons => {
            let ffn = model.layers.first().map(|layer| &layer.ffn);
            let transposed = ffn.is_some_and(|ffn| matches!(ffn.down, Down::Transposed(_)));
            if !transposed {
                arithmetic.hidden = quantised;
            }
            OperationKind::Ffn(Ffn {
                input,
                gate: ffn.is_none_or(|ffn| ffn.gated).then(|| weight("gate")),
                up: weight("up"),
                down: weight("down"),
                gate_low: None,
                up_low: None,
                gate_bias: None,
                up_bias: None,
                output,
                hidden: None,
                active_count: None,
                down_layout: if transposed { DownLayout::NeuronRows } else { DownLayout::OutputRows },
                function: Activation::Relu,
                up_function: Activation::Identity,
                selection: Selection::All,
                accumulate: false,
            })
        }
    };
    list.push("a weight of this type", kind, arithmetic);
    list.validate()?;
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::{FakeDevice, story};
    use formats::GgufFile;

    fn model() -> ModelDescription {
        ModelDescription::describe(&GgufFile::open(story()).unwrap()).unwrap()
    }

    fn denies(list: &OperationList, kinds: &[&str], dtypes: &[DType]) -> Option<String> {
        let kind = list.operations[0].kind.name();
        let denied = list
            .slots
            .iter()
            .any(|slot| matches!(slot.role, SlotRole::Constant(_)) && dtypes.contains(&slot.tensor.dtype));
        (kinds.contains(&kind) && denied).then(|| "no kernel".to_owned())
    }

    #[test]
    fn only_what_is_denied_is_converted_and_only_there() {
        let of = |device: FakeDevice| Conversions::of(&device, &model(), Activations::Int8);
        assert_eq!(of(FakeDevice::new()), Conversions::default());
        let found = of(FakeDevice::denying(|list, _| denies(list, &["linear"], &[DType::Q8_0])));
        assert_eq!(found.target(Use::Matrix, DType::Q8_0), DType::F16);
        assert_eq!(found.target(Use::Neurons, DType::Q8_0), DType::Q8_0);
        let found =
            of(FakeDevice::denying(|list, _| denies(list, &["ffn", "embed"], &[DType::Q8_0, DType::F16])));
        assert_eq!(found.target(Use::Neurons, DType::Q8_0), DType::F32);
        assert_eq!(found.target(Use::Table, DType::Q8_0), DType::F32);
        let all =
            of(FakeDevice::denying(|list, _| denies(list, &["ffn"], &[DType::Q8_0, DType::F16, DType::F32])));
        assert_eq!(all.target(Use::Neurons, DType::Q8_0), DType::Q8_0);
        let largest = Conversions::largest([found, all]);
        assert_eq!(largest.target(Use::Neurons, DType::Q8_0), DType::F32);
    }
}
