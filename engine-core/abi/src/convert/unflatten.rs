//! Flat descriptors to operations.

use super::codes::{activation, gating, layout, norm, style};
use super::raw::flag;
use crate::{NO_SLOT, Operation, OperationCode};
use engine_core::operation::{Bitplane, Experts, Ffn, OperationKind, Rope, RopeScaling, Selection, SlotId};
use engine_core::{Error, Result};

/// Takes slots and parameters in order, and then checks that nothing is left.
struct Reader<'a> {
    operation: &'a Operation,
    slots: usize,
    u: usize,
    f: usize,
}

impl Reader<'_> {
    fn slot_or_none(&mut self) -> Option<SlotId> {
        let slot = self.operation.slots.get(self.slots).copied().unwrap_or(NO_SLOT);
        self.slots += 1;
        (slot != NO_SLOT).then_some(SlotId(slot))
    }

    fn slot(&mut self) -> Result<SlotId> {
        let index = self.slots;
        self.slot_or_none().ok_or_else(|| {
            Error::invalid(format!("operation code {}: operand {index} is absent", self.operation.code.0))
        })
    }

    fn u(&mut self) -> u64 {
        self.u += 1;
        self.operation.u.get(self.u - 1).copied().unwrap_or(0)
    }

    fn u32(&mut self) -> Result<u32> {
        let value = self.u();
        u32::try_from(value).map_err(|_| {
            Error::invalid(format!(
                "operation code {}: parameter {} is {value}, which exceeds 32 bits",
                self.operation.code.0,
                self.u - 1
            ))
        })
    }

    fn f(&mut self) -> f32 {
        self.f += 1;
        self.operation.f.get(self.f - 1).copied().unwrap_or(0.0) as f32
    }

    /// What is not used must be absent or zero, or a newer meaning would be ignored.
    fn finish(self, kind: OperationKind) -> Result<OperationKind> {
        let operation = self.operation;
        let rest = operation.slots.iter().skip(self.slots).all(|slot| *slot == NO_SLOT)
            && operation.u.iter().skip(self.u).all(|value| *value == 0)
            && operation.f.iter().skip(self.f).all(|value| value.to_bits() == 0)
            && operation.reserved == [0; 4]
            && operation.reserved_flags == 0;
        if rest {
            return Ok(kind);
        }
        Err(Error::unsupported(format!(
            "operation `{}` has parameters that this version of the interface does not know",
            kind.name()
        )))
    }
}

pub(super) fn unflatten(operation: &Operation) -> Result<OperationKind> {
    let mut r = Reader { operation, slots: 0, u: 0, f: 0 };
    let kind = match operation.code {
        OperationCode::COPY => OperationKind::Copy { from: r.slot()?, to: r.slot()? },
        OperationCode::EMBED => {
            OperationKind::Embed { ids: r.slot()?, table: r.slot()?, output: r.slot()?, scale: r.f() }
        }
        OperationCode::NORM => OperationKind::Norm {
            input: r.slot()?,
            weight: r.slot()?,
            bias: r.slot_or_none(),
            output: r.slot()?,
            norm: norm(r.u())?,
            epsilon: r.f(),
        },
        OperationCode::LINEAR => OperationKind::Linear {
            input: r.slot()?,
            weight: r.slot()?,
            bias: r.slot_or_none(),
            output: r.slot()?,
            accumulate: flag(r.u(), "linear: accumulate")?,
        },
        OperationCode::ROPE => OperationKind::Rope(rope(&mut r)?),
        OperationCode::KV_APPEND => OperationKind::KvAppend {
            key: r.slot()?,
            value: r.slot()?,
            cache: r.slot()?,
            kv_heads: r.u32()?,
            head_dim: r.u32()?,
        },
        OperationCode::ATTENTION => OperationKind::Attention {
            query: r.slot()?,
            cache: r.slot()?,
            output: r.slot()?,
            heads: r.u32()?,
            kv_heads: r.u32()?,
            head_dim: r.u32()?,
            window: Some(r.u32()?).filter(|window| *window != 0),
            scale: r.f(),
            soft_cap: Some(r.f()).filter(|cap| *cap != 0.0),
        },
        OperationCode::FFN => OperationKind::Ffn(ffn(&mut r)?),
        OperationCode::PREDICT => OperationKind::Predict {
            input: r.slot()?,
            fc1: r.slot()?,
            fc2: r.slot()?,
            mask: r.slot()?,
            threshold: r.f(),
        },
        OperationCode::ACTIVATE => {
            OperationKind::Activate { input: r.slot()?, output: r.slot()?, function: activation(r.u())? }
        }
        OperationCode::ADD => OperationKind::Add { left: r.slot()?, right: r.slot()?, output: r.slot()? },
        OperationCode::MULTIPLY => {
            OperationKind::Multiply { left: r.slot()?, right: r.slot()?, output: r.slot()? }
        }
        OperationCode::KV_EXPORT => OperationKind::KvExport {
            cache: r.slot()?,
            key: r.slot()?,
            value: r.slot()?,
            kv_heads: r.u32()?,
            head_dim: r.u32()?,
        },
        OperationCode::KV_IMPORT => OperationKind::KvImport {
            key: r.slot()?,
            value: r.slot()?,
            cache: r.slot()?,
            kv_heads: r.u32()?,
            head_dim: r.u32()?,
        },
        OperationCode::ROUTE => OperationKind::Route {
            scores: r.slot()?,
            chosen: r.slot()?,
            weights: r.slot()?,
            gating: gating(r.u())?,
            normalise: flag(r.u(), "route: normalise")?,
            scale: r.f(),
        },
        OperationCode::EXPERTS => OperationKind::Experts(experts(&mut r)?),
        OperationCode(other) => {
            return Err(Error::unsupported(format!(
                "operation code {other} is not known to this version of the interface"
            )));
        }
    };
    r.finish(kind)
}

fn rope(r: &mut Reader<'_>) -> Result<Rope> {
    let (input, factors, output) = (r.slot()?, r.slot_or_none(), r.slot()?);
    let (style, head_dim, rotary_dim) = (style(r.u())?, r.u32()?, r.u32()?);
    let base = r.f();
    let scaling = match r.u() {
        0 => RopeScaling::None,
        1 => RopeScaling::Linear { factor: r.f() },
        2 => RopeScaling::Yarn {
            original_context: r.u32()?,
            factor: r.f(),
            attention_factor: r.f(),
            beta_fast: r.f(),
            beta_slow: r.f(),
        },
        other => {
            return Err(Error::unsupported(format!(
                "rope scaling code {other} is not known to this version of the interface"
            )));
        }
    };
    Ok(Rope { input, output, factors, style, head_dim, rotary_dim, base, scaling })
}

/// By mask and by the vectors of bit planes, where there are any.
fn selection(r: &mut Reader<'_>, mask: Option<SlotId>, vectors: [Option<SlotId>; 3]) -> Result<Selection> {
    let code = r.u();
    if (code == 4) != vectors[0].is_some() || (code != 4 && vectors != [None; 3]) {
        return Err(Error::invalid(format!("selection {code} and its vectors do not fit")));
    }
    match (code, mask) {
        (0, None) => Ok(Selection::All),
        (1, Some(mask)) => Ok(Selection::Mask(mask)),
        (2, None) => Ok(Selection::GateFirst),
        (3, None) => Ok(Selection::Threshold(r.f())),
        (4, None) => {
            let [Some(gate_deviation), up_deviation, down_norm] = vectors else {
                return Err(Error::invalid("bit planes without the gate's deviations"));
            };
            let (threshold, deviations) = (r.f(), r.f());
            Ok(Selection::Bitplane(Bitplane {
                gate_deviation,
                up_deviation,
                down_norm,
                deviations,
                threshold,
            }))
        }
        (code @ 0..=4, _) => Err(Error::invalid(format!("selection {code} and its mask do not fit"))),
        (code, _) => Err(Error::unsupported(format!(
            "selection code {code} is not known to this version of the interface"
        ))),
    }
}

fn experts(r: &mut Reader<'_>) -> Result<Experts> {
    Ok(Experts {
        input: r.slot()?,
        chosen: r.slot()?,
        weights: r.slot()?,
        gate: r.slot_or_none(),
        up: r.slot()?,
        down: r.slot()?,
        output: r.slot()?,
        active_count: r.slot_or_none(),
        experts: r.u32()?,
        down_layout: layout(r.u())?,
        function: activation(r.u())?,
        up_function: activation(r.u())?,
        selection: selection(r, None, [None; 3])?,
        accumulate: flag(r.u(), "experts: accumulate")?,
    })
}

fn ffn(r: &mut Reader<'_>) -> Result<Ffn> {
    let (input, gate, up, down) = (r.slot()?, r.slot_or_none(), r.slot()?, r.slot()?);
    let (gate_bias, up_bias, mask) = (r.slot_or_none(), r.slot_or_none(), r.slot_or_none());
    let (output, hidden, active_count) = (r.slot()?, r.slot_or_none(), r.slot_or_none());
    let (gate_low, up_low) = (r.slot_or_none(), r.slot_or_none());
    let vectors = [r.slot_or_none(), r.slot_or_none(), r.slot_or_none()];
    let (down_layout, function, up_function) = (layout(r.u())?, activation(r.u())?, activation(r.u())?);
    let selection = selection(r, mask, vectors)?;
    let accumulate = flag(r.u(), "ffn: accumulate")?;
    Ok(Ffn {
        input,
        gate,
        up,
        down,
        gate_low,
        up_low,
        gate_bias,
        up_bias,
        output,
        hidden,
        active_count,
        down_layout,
        function,
        up_function,
        selection,
        accumulate,
    })
}
