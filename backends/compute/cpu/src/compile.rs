//! From an operation descriptor to what the threads run, or to the reason why this backend cannot.

use engine_core::operation::{
    Accumulation, Activation, Arithmetic, DownLayout, Gating, NormKind, OperationKind, OperationList,
    RopeScaling, RopeStyle, Selection, SlotId, SlotRole,
};

use crate::kernels::format::WeightType;
use crate::kernels::pointwise;
use crate::run::attention::{Attention, KvAppend, KvTransfer, Rope, RopeSource};
use crate::run::elementwise::{Activate, Binary, Copy, Embed, Norm};
use crate::run::experts::{Experts, Route, STAGING};
use crate::run::ffn::{Ffn, Select};
use crate::run::input::Needs;
use crate::run::linear::{Linear, Predict};
use crate::run::planes::PlaneRule;
use crate::run::{Operand, Weight, index};
use engine_plugin::buffers::alignment;

/// An operation ready to run.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    Copy(Copy),
    Embed(Embed),
    Norm(Norm),
    Linear(Linear),
    Rope(Rope),
    KvAppend(KvAppend),
    Attention(Attention),
    Ffn(Box<Ffn>),
    Route(Route),
    Experts(Box<Experts>),
    Predict(Predict),
    Activate(Activate),
    Binary(Binary),
    KvTransfer(KvTransfer),
}

/// A rope whose frequencies the executable can prepare.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeKey {
    pub(crate) rotary_dim: u32,
    pub(crate) base: f32,
    pub(crate) scaling: RopeScaling,
    /// A constant slot.
    pub(crate) factors: Option<SlotId>,
}

/// The position of `key` in `tables`, added where it is new.
fn table_of(tables: &mut Vec<RopeKey>, key: RopeKey) -> usize {
    tables.iter().position(|t| *t == key).unwrap_or_else(|| {
        tables.push(key);
        tables.len() - 1
    })
}

struct Slots<'a>(&'a OperationList);

impl Slots<'_> {
    fn operand(&self, id: SlotId) -> Result<Operand, String> {
        let slot = self.0.slot(id).ok_or_else(|| format!("slot {} does not exist", id.0))?;
        let t = &slot.tensor;
        let size =
            |n: u64| usize::try_from(n).map_err(|_| format!("`{}` is too large for this machine", slot.name));
        let operand = Operand {
            slot: index(id),
            stride: size(t.row_stride)?,
            columns: size(t.columns)?,
            rows: size(t.rows)?,
            offset: 0,
        };
        size(t.bytes())?;
        let unit = alignment(t.dtype);
        if !operand.stride.is_multiple_of(unit) {
            return Err(format!(
                "`{}`: a row stride of {} bytes is no multiple of {unit}",
                slot.name, operand.stride
            ));
        }
        Ok(operand)
    }

    fn optional(&self, id: Option<SlotId>) -> Result<Option<Operand>, String> {
        id.map(|id| self.operand(id)).transpose()
    }

    fn weight(&self, id: SlotId) -> Result<Weight, String> {
        let operand = self.operand(id)?;
        let slot = &self.0.slots[operand.slot];
        let format = WeightType::of(slot.tensor.dtype).ok_or_else(|| {
            let known = WeightType::ALL.map(|w| w.dtype().name()).join(", ");
            format!("`{}` is {}; the cpu has kernels for {known}", slot.name, slot.tensor.dtype)
        })?;
        Ok(Weight { operand, format, low: None })
    }

    /// A matrix in planes, where `low` says so.
    fn planes(&self, id: SlotId, low: Option<SlotId>) -> Result<Weight, String> {
        let weight = self.weight(id)?;
        let Some(low) = low else { return Ok(weight) };
        Ok(Weight { format: WeightType::Planes, low: Some(self.operand(low)?), ..weight })
    }

    fn per_token(&self, id: SlotId) -> bool {
        self.0.slot(id).is_some_and(|s| s.per_token)
    }
}

fn known_activation(function: Activation) -> Result<Activation, String> {
    if pointwise::knows(function) { Ok(function) } else { Err(format!("no kernel for {}", function.name())) }
}

/// Compiles operation `at` of a validated list.
pub(crate) fn compile(list: &OperationList, at: usize, tables: &mut Vec<RopeKey>) -> Result<Kind, String> {
    let operation = list.operations.get(at).ok_or_else(|| format!("the list has no operation {at}"))?;
    let Arithmetic { input, hidden, accumulation } = operation.arithmetic;
    let slots = Slots(list);
    if accumulation != Accumulation::F32 {
        return Err("the cpu sums in f32 only".into());
    }
    Ok(match &operation.kind {
        OperationKind::Copy { from, to } => Kind::Copy(Copy {
            from: slots.operand(*from)?,
            to: slots.operand(*to)?,
            row_bytes: list.slots[index(*from)].tensor.row_bytes() as usize,
            per_token: slots.per_token(*from),
        }),
        OperationKind::Embed { ids, table, output, scale } => Kind::Embed(Embed {
            label: operation.label.clone(),
            ids: slots.operand(*ids)?,
            table: slots.weight(*table)?,
            output: slots.operand(*output)?,
            scale: *scale,
        }),
        OperationKind::Norm { norm, epsilon, input, weight, bias, output } => Kind::Norm(Norm {
            centred: match norm {
                NormKind::Rms => false,
                NormKind::Layer => true,
                _ => return Err("an unknown kind of normalisation".into()),
            },
            epsilon: *epsilon,
            input: slots.operand(*input)?,
            weight: slots.operand(*weight)?,
            bias: slots.optional(*bias)?,
            output: slots.operand(*output)?,
        }),
        OperationKind::Linear { input: from, weight, bias, output, accumulate } => {
            let weight = slots.weight(*weight)?;
            Kind::Linear(Linear {
                input: slots.operand(*from)?,
                weight,
                bias: slots.optional(*bias)?,
                output: slots.operand(*output)?,
                accumulate: *accumulate,
                needs: Needs::of(input, &[weight.format]),
                reuse: false,
            })
        }
        OperationKind::Rope(rope) => {
            if !matches!(rope.style, RopeStyle::Interleaved | RopeStyle::Halves) {
                return Err("an unknown rope style".into());
            }
            if !matches!(
                rope.scaling,
                RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Yarn { .. }
            ) {
                return Err("an unknown rope scaling".into());
            }
            let constant = |id: &SlotId| matches!(list.slots[index(*id)].role, SlotRole::Constant(_));
            let source = match &rope.factors {
                Some(factors) if !constant(factors) => RopeSource::Factors {
                    factors: slots.operand(*factors)?,
                    base: rope.base,
                    scaling: rope.scaling,
                },
                factors => RopeSource::Table(table_of(
                    tables,
                    RopeKey {
                        rotary_dim: rope.rotary_dim,
                        base: rope.base,
                        scaling: rope.scaling,
                        factors: *factors,
                    },
                )),
            };
            Kind::Rope(Rope {
                input: slots.operand(rope.input)?,
                output: slots.operand(rope.output)?,
                style: rope.style,
                head_dim: rope.head_dim as usize,
                pairs: (rope.rotary_dim / 2) as usize,
                source,
            })
        }
        OperationKind::KvAppend { key, value, cache, kv_heads: _, head_dim: _ } => Kind::KvAppend(KvAppend {
            key: slots.operand(*key)?,
            value: slots.operand(*value)?,
            cache: slots.operand(*cache)?,
        }),
        OperationKind::Attention {
            query,
            cache,
            output,
            heads,
            kv_heads,
            head_dim,
            scale,
            window,
            soft_cap,
        } => Kind::Attention(Attention {
            query: slots.operand(*query)?,
            cache: slots.operand(*cache)?,
            output: slots.operand(*output)?,
            heads: *heads as usize,
            kv_heads: *kv_heads as usize,
            head_dim: *head_dim as usize,
            scale: *scale,
            window: *window,
            soft_cap: soft_cap.unwrap_or(0.0),
        }),
        OperationKind::Ffn(ffn) => {
            let gate = ffn.gate.map(|g| slots.planes(g, ffn.gate_low)).transpose()?;
            let (up, down) = (slots.planes(ffn.up, ffn.up_low)?, slots.weight(ffn.down)?);
            let by_neuron = ffn.down_layout == DownLayout::NeuronRows;
            let mut hidden_needs = Needs::of(hidden, &[down.format]);
            if by_neuron {
                // Every row has a coefficient of its own: quantised activations enter as values.
                hidden_needs = Needs { values: hidden_needs.quantised, codes: false, ..hidden_needs };
            }
            Kind::Ffn(Box::new(Ffn {
                operation: at,
                input: slots.operand(ffn.input)?,
                gate,
                up,
                down,
                gate_bias: slots.optional(ffn.gate_bias)?,
                up_bias: slots.optional(ffn.up_bias)?,
                output: slots.operand(ffn.output)?,
                hidden: slots.optional(ffn.hidden)?,
                active_count: slots.optional(ffn.active_count)?,
                layout: ffn.down_layout,
                function: known_activation(ffn.function)?,
                up_function: known_activation(ffn.up_function)?,
                select: match ffn.selection {
                    Selection::All => Select::All,
                    Selection::Mask(mask) => Select::Mask(slots.operand(mask)?),
                    Selection::GateFirst => Select::GateFirst,
                    Selection::Threshold(t) => Select::Threshold(t),
                    Selection::Bitplane(rule) => Select::Planes(PlaneRule {
                        gate_deviation: slots.operand(rule.gate_deviation)?,
                        up_deviation: slots.optional(rule.up_deviation)?,
                        down_norm: slots.optional(rule.down_norm)?,
                        deviations: rule.deviations,
                        threshold: rule.threshold,
                    }),
                    _ => return Err("an unknown selection of neurons".into()),
                },
                accumulate: ffn.accumulate,
                needs: Needs::of(input, &[up.format, gate.map_or(up.format, |g| g.format)]),
                hidden_needs,
            }))
        }
        OperationKind::Route { scores, chosen, weights, gating, normalise, scale } => Kind::Route(Route {
            scores: slots.operand(*scores)?,
            chosen: slots.operand(*chosen)?,
            weights: slots.operand(*weights)?,
            softmax: match gating {
                Gating::Softmax => true,
                Gating::Sigmoid => false,
                _ => return Err("an unknown gating".into()),
            },
            normalise: *normalise,
            scale: *scale,
        }),
        OperationKind::Experts(op) => Kind::Experts(Box::new(experts(list, at, op)?)),
        OperationKind::Predict { input: from, fc1, fc2, mask, threshold } => {
            let (fc1, fc2) = (slots.weight(*fc1)?, slots.weight(*fc2)?);
            Kind::Predict(Predict {
                input: slots.operand(*from)?,
                fc1,
                fc2,
                mask: slots.operand(*mask)?,
                threshold: *threshold,
                needs: Needs::of(input, &[fc1.format]),
                hidden_needs: Needs::of(hidden, &[fc2.format]),
            })
        }
        OperationKind::Activate { function, input, output } => Kind::Activate(Activate {
            function: known_activation(*function)?,
            input: slots.operand(*input)?,
            output: slots.operand(*output)?,
        }),
        OperationKind::Add { left, right, output } | OperationKind::Multiply { left, right, output } => {
            Kind::Binary(Binary {
                multiply: matches!(operation.kind, OperationKind::Multiply { .. }),
                left: slots.operand(*left)?,
                right: slots.operand(*right)?,
                right_per_token: slots.per_token(*right),
                output: slots.operand(*output)?,
            })
        }
        OperationKind::KvExport { cache, key, value, .. }
        | OperationKind::KvImport { cache, key, value, .. } => Kind::KvTransfer(KvTransfer {
            import: matches!(operation.kind, OperationKind::KvImport { .. }),
            cache: slots.operand(*cache)?,
            key: slots.operand(*key)?,
            value: slots.operand(*value)?,
        }),
        other => return Err(format!("the cpu backend does not know {}", other.name())),
    })
}

/// A mixture: the layer of one expert, whose operands are moved to each expert's rows in turn.
fn experts(list: &OperationList, at: usize, op: &engine_core::operation::Experts) -> Result<Experts, String> {
    let Arithmetic { input, hidden, .. } = list.operations[at].arithmetic;
    let slots = Slots(list);
    let count = op.experts as usize;
    let part = |id: SlotId| {
        let weight = slots.weight(id)?;
        Ok::<_, String>(Weight {
            operand: Operand { rows: weight.operand.rows / count, ..weight.operand },
            ..weight
        })
    };
    let gate = op.gate.map(part).transpose()?;
    let (up, down) = (part(op.up)?, part(op.down)?);
    let mut hidden_needs = Needs::of(hidden, &[down.format]);
    if op.down_layout == DownLayout::NeuronRows {
        hidden_needs = Needs { values: hidden_needs.quantised, codes: false, ..hidden_needs };
    }
    let from = slots.operand(op.input)?;
    let rows = |index: usize, columns: usize| Operand {
        slot: list.slots.len() + index,
        stride: (columns * 4).next_multiple_of(64),
        columns,
        rows: list.token_capacity as usize,
        offset: 0,
    };
    let [staged_input, staged_output, staged_count] = STAGING;
    let layer = Ffn {
        operation: at,
        input: rows(staged_input, from.columns),
        gate,
        up,
        down,
        gate_bias: None,
        up_bias: None,
        output: rows(staged_output, from.columns),
        hidden: None,
        active_count: op.active_count.map(|_| rows(staged_count, 1)),
        layout: op.down_layout,
        function: known_activation(op.function)?,
        up_function: known_activation(op.up_function)?,
        select: match op.selection {
            Selection::All => Select::All,
            Selection::GateFirst => Select::GateFirst,
            Selection::Threshold(t) => Select::Threshold(t),
            _ => return Err("an unknown selection of an expert's neurons".into()),
        },
        accumulate: false,
        needs: Needs::of(input, &[up.format, gate.map_or(up.format, |g| g.format)]),
        hidden_needs,
    };
    Ok(Experts {
        label: list.operations[at].label.clone(),
        layer,
        count,
        input: from,
        chosen: slots.operand(op.chosen)?,
        weights: slots.operand(op.weights)?,
        output: slots.operand(op.output)?,
        active_count: slots.optional(op.active_count)?,
        accumulate: op.accumulate,
    })
}
