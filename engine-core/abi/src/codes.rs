//! Open codes: numbers with names. A receiver answers a number that it does not know with an error, never with a guess.

use abi_stable::StableAbi;

/// What a plug-in implements.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Kind(pub u32);

impl Kind {
    /// Compute devices: [`ComputeTable`](crate::ComputeTable).
    pub const COMPUTE: Kind = Kind(1);
    /// A storage tier: [`StorageTable`](crate::StorageTable).
    pub const STORAGE: Kind = Kind(2);
    /// A cache policy: [`CacheTable`](crate::CacheTable).
    pub const CACHE: Kind = Kind(3);
    /// A planner: [`PlannerTable`](crate::PlannerTable).
    pub const PLANNER: Kind = Kind(4);
}

/// What a function returns. The sentence of an unknown handle (30 to 33) is the handle's number in decimal.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Status(pub u32);

impl Status {
    /// Success.
    pub const OK: Status = Status(0);
    /// The device, tier or policy cannot do this at all.
    pub const UNSUPPORTED: Status = Status(1);
    /// The caller broke the contract.
    pub const INVALID_ARGUMENT: Status = Status(2);
    /// Memory could not be had, or a budget would be exceeded.
    pub const OUT_OF_MEMORY: Status = Status(4);
    /// The work was cancelled before it was done.
    pub const CANCELLED: Status = Status(5);
    /// Work that this waited for has failed.
    pub const DEPENDENCY_FAILED: Status = Status(6);
    /// The device or its driver is gone.
    pub const DEVICE_LOST: Status = Status(7);
    /// The operating system refused a file operation.
    pub const IO: Status = Status(8);
    /// An option of the plug-in is wrong.
    pub const CONFIG: Status = Status(9);
    /// The data holds what the arithmetic cannot go on with.
    pub const DATA: Status = Status(10);
    /// No placement satisfies the budgets.
    pub const INFEASIBLE: Status = Status(11);
    /// The plug-in's code panicked.
    pub const PANICKED: Status = Status(12);
    /// A bug in the plug-in.
    pub const INTERNAL: Status = Status(13);
    /// A buffer that was never given out, or was freed already.
    pub const UNKNOWN_BUFFER: Status = Status(30);
    /// An executable that was never given out, or was released already.
    pub const UNKNOWN_EXECUTABLE: Status = Status(31);
    /// A file that was never given out, or was closed already.
    pub const UNKNOWN_FILE: Status = Status(32);
    /// A timeline value that was never returned.
    pub const UNKNOWN_TIMELINE_VALUE: Status = Status(33);
}

/// Element type: the number of GGUF's tensor types, and 1000 for unsigned bytes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct DType(pub u32);

impl DType {
    /// IEEE 754 binary32.
    pub const F32: DType = DType(0);
    /// IEEE 754 binary16.
    pub const F16: DType = DType(1);
    /// 32 elements in 18 bytes: f16 scale, 4-bit codes.
    pub const Q4_0: DType = DType(2);
    /// 32 elements in 20 bytes: f16 scale and minimum, 4-bit codes.
    pub const Q4_1: DType = DType(3);
    /// 32 elements in 22 bytes: f16 scale, 5-bit codes.
    pub const Q5_0: DType = DType(6);
    /// 32 elements in 24 bytes: f16 scale and minimum, 5-bit codes.
    pub const Q5_1: DType = DType(7);
    /// 32 elements in 34 bytes: f16 scale, signed bytes.
    pub const Q8_0: DType = DType(8);
    /// 256 elements in 84 bytes.
    pub const Q2_K: DType = DType(10);
    /// 256 elements in 110 bytes.
    pub const Q3_K: DType = DType(11);
    /// 256 elements in 144 bytes.
    pub const Q4_K: DType = DType(12);
    /// 256 elements in 176 bytes.
    pub const Q5_K: DType = DType(13);
    /// 256 elements in 210 bytes.
    pub const Q6_K: DType = DType(14);
    /// 32 elements in 18 bytes, a non-linear table.
    pub const IQ4_NL: DType = DType(20);
    /// 256 elements in 136 bytes, the same table.
    pub const IQ4_XS: DType = DType(23);
    /// Signed 8-bit integers.
    pub const I8: DType = DType(24);
    /// Signed 16-bit integers.
    pub const I16: DType = DType(25);
    /// Signed 32-bit integers.
    pub const I32: DType = DType(26);
    /// Signed 64-bit integers.
    pub const I64: DType = DType(27);
    /// IEEE 754 binary64.
    pub const F64: DType = DType(28);
    /// Brain float.
    pub const BF16: DType = DType(30);
    /// 32 elements in 17 bytes: E8M0 scale, E2M1 codes.
    pub const MXFP4: DType = DType(39);
    /// Unsigned bytes; masks use 0 and 1.
    pub const U8: DType = DType(1000);
}

/// Who provides a slot's memory.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct SlotRole(pub u32);

impl SlotRole {
    /// Weights, bound when the list is prepared: the slot's `buffer` says where. `supports` must not look at it.
    pub const CONSTANT: SlotRole = SlotRole(1);
    /// Bound at submit, read only.
    pub const INPUT: SlotRole = SlotRole(2);
    /// Bound at submit, written.
    pub const OUTPUT: SlotRole = SlotRole(3);
    /// Bound at submit, read and written.
    pub const STATE: SlotRole = SlotRole(4);
    /// Memory that the executable provides itself.
    pub const SCRATCH: SlotRole = SlotRole(5);
}

/// Where memory lies.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Place(pub u32);

impl Place {
    /// In a buffer of the backend.
    pub const DEVICE: Place = Place(1);
    /// In host memory.
    pub const HOST: Place = Place(2);
}

/// How an operand is quantised before it is multiplied.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Quantization(pub u32);

impl Quantization {
    /// As it is.
    pub const NONE: Quantization = Quantization(0);
    /// Blocks of 32 consecutive elements: `scale = amax / 127`, `code = round_ties_even(x * (127 / amax))` in f32.
    pub const INT8_BLOCKS: Quantization = Quantization(1);
}

/// The type that sums are kept in.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Accumulation(pub u32);

impl Accumulation {
    /// f32 or better.
    pub const F32: Accumulation = Accumulation(1);
    /// f16 products and sums.
    pub const F16: Accumulation = Accumulation(2);
}

/// What a buffer is for.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct BufferUse(pub u32);

impl BufferUse {
    /// Written once, read often.
    pub const WEIGHTS: BufferUse = BufferUse(1);
    /// A KV cache.
    pub const KV_CACHE: BufferUse = BufferUse(2);
    /// Activations, ids, logits.
    pub const ACTIVATIONS: BufferUse = BufferUse(3);
}

/// A device's answer to "can you run this operation".
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Support(pub u32);

impl Support {
    /// It cannot; the reason is in the sink.
    pub const NO: Support = Support(1);
    /// It can.
    pub const YES: Support = Support(2);
    /// It can, and it is what the device is best at.
    pub const PREFERRED: Support = Support(3);
}

/// Whether a value was reached within the time given.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct Reached(pub u32);

impl Reached {
    /// The work up to the value has been done.
    pub const DONE: Reached = Reached(1);
    /// The time ran out first.
    pub const TIMED_OUT: Reached = Reached(2);
}

/// What an operation computes. The slots are listed in the order of [`Operation::slots`](crate::Operation::slots);
/// those in brackets may be absent. `u` and `f` are the parameters. `T` is the number of tokens of a submission.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct OperationCode(pub u32);

impl OperationCode {
    /// `to = from`, equal types; one of the two may lie in host memory. Slots: from, to.
    pub const COPY: OperationCode = OperationCode(1);
    /// `output[t] = scale * table[ids[t]]`. Slots: ids, table, output. f\[0\] scale.
    pub const EMBED: OperationCode = OperationCode(2);
    /// Normalises groups of the weight's length: `(x - m) / sqrt(v + epsilon) * weight + bias`.
    /// Slots: input, weight, \[bias\], output. u\[0\] kind: 1 root mean square, 2 layer. f\[0\] epsilon.
    pub const NORM: OperationCode = OperationCode(3);
    /// `output[t][r] = sum_c weight[r][c] * input[t][c] + bias[r]`, added to what `output` holds where accumulate.
    /// Slots: input, weight, \[bias\], output. u\[0\] accumulate, 0 or 1.
    pub const LINEAR: OperationCode = OperationCode(4);
    /// Rotary position embedding of every head. Slots: input, \[factors\], output. u\[0\] style: 1 pairs (2j, 2j+1),
    /// 2 pairs (j, j + rotary_dim/2); u\[1\] head_dim, u\[2\] rotary_dim, u\[3\] scaling: 0 none, 1 linear, 2 YaRN;
    /// u\[4\] original context (YaRN). f\[0\] base, f\[1\] factor (linear, YaRN), f\[2\] attention factor, f\[3\]
    /// beta_fast, f\[4\] beta_slow (YaRN).
    pub const ROPE: OperationCode = OperationCode(5);
    /// Appends keys and values at their positions in the KV cache. Slots: key, value, cache. u\[0\] KV heads, u\[1\]
    /// head_dim.
    pub const KV_APPEND: OperationCode = OperationCode(6);
    /// Causal attention over the KV cache. Slots: query, cache, output. u\[0\] heads, u\[1\] KV heads, u\[2\]
    /// head_dim, u\[3\] sliding window in positions or 0. f\[0\] scale, f\[1\] soft cap of the scores or 0.
    pub const ATTENTION: OperationCode = OperationCode(7);
    /// Feed-forward layer over the active ranges. Slots: input, \[gate\], up, down, \[gate_bias\], \[up_bias\],
    /// \[mask\], output, \[hidden\], \[active_count\], \[gate_low\], \[up_low\], \[gate_deviation\], \[up_deviation\],
    /// \[down_norm\]. u\[0\] layout of down: 1 a row per output element, 2 a row per
    /// neuron; u\[1\] function, u\[2\] function of up (see ACTIVATE); u\[3\] selection: 0 all, 1 mask, 2 gate first,
    /// 3 threshold, 4 bit planes; u\[4\] accumulate, 0 or 1. f\[0\] threshold, f\[1\] deviations of bit planes.
    /// With gate_low the codes of gate (Q4_0) are the high halves of 8-bit codes, of which these are the low ones, and
    /// the same with up. Bit planes keep a neuron where `|function(e + k s |x|)|`, times the same of up where
    /// up_deviation is given, times down_norm where that is given, is above the threshold: e the product of the high
    /// halves, `D (q - 7.53125)` per element, s the deviation, |x| the norm of the input.
    pub const FFN: OperationCode = OperationCode(8);
    /// `mask[t][i] = (fc2 . relu(fc1 . input[t]))[i] >= threshold`. Slots: input, fc1, fc2, mask. f\[0\] threshold.
    pub const PREDICT: OperationCode = OperationCode(9);
    /// `output = function(input)`. Slots: input, output. u\[0\] function: 0 identity, 1 ReLU, 2 squared ReLU, 3 SiLU,
    /// 4 GELU by tanh, 5 GELU by erf.
    pub const ACTIVATE: OperationCode = OperationCode(10);
    /// `output = left + right`. Slots: left, right, output.
    pub const ADD: OperationCode = OperationCode(11);
    /// `output = left * right`. Slots: left, right, output.
    pub const MULTIPLY: OperationCode = OperationCode(12);
    /// Writes the KV cache in the canonical layout. Slots: cache, key, value. u\[0\] KV heads, u\[1\] head_dim.
    pub const KV_EXPORT: OperationCode = OperationCode(13);
    /// The reverse of KV_EXPORT. Slots: key, value, cache. u\[0\] KV heads, u\[1\] head_dim.
    pub const KV_IMPORT: OperationCode = OperationCode(14);
    /// The best experts of each token, ascending, and their shares. Slots: scores, chosen (I32), weights. u\[0\] gating:
    /// 1 softmax over all, 2 sigmoid; u\[1\] normalise, 0 or 1. f\[0\] scale.
    pub const ROUTE: OperationCode = OperationCode(15);
    /// A mixture of experts. Slots: input, chosen, weights, gate or none, up, down, output, active_count or none. u\[0\]
    /// experts; u\[1\] layout of down, u\[2\] function and u\[3\] function of up as FFN has them; u\[4\] selection: 0 all,
    /// 2 gate-first, 3 threshold; u\[5\] accumulate, 0 or 1. f\[0\] threshold.
    pub const EXPERTS: OperationCode = OperationCode(16);
}
