/*
 * The plug-in interface of Thermocline, version 1.0.
 *
 * A plug-in is a shared library that exports `thermocline_plugin`, which returns the table of its kind. Rules:
 * - Text is UTF-8 without a terminating zero; paths are the bytes that the system uses. A null pointer is fine where
 *   the length is 0.
 * - Whoever calls owns all memory that it passes, and it is borrowed for the call only. Results of unknown length are
 *   written into a sink of the caller's. Nothing is freed across the boundary.
 * - Reserved words are zero. So are parameters, slots and flags that a code does not use (slots: THERMOCLINE_NO_SLOT).
 *   They are to be refused otherwise, so that a newer meaning is never ignored.
 * - A function returns 0 (ThermoclineStatus_OK) or an error code, and then writes one sentence into the `detail` sink.
 *   Out parameters mean something only after success.
 * - A function never unwinds and never exits the process. All functions may be called from any thread, except those
 *   of one cache policy instance, which are called one at a time.
 */

#pragma once

/* Generated from the crate engine-abi by `THERMOCLINE_WRITE_HEADER=1 cargo test -p engine-abi header`. Do not edit. */

#include <stddef.h>
#include <stdint.h>

// What the plug-in keeps for one open instance. Only the plug-in looks inside.
typedef struct ThermoclineInstance ThermoclineInstance;

/// First word of every table: the bytes `THERMOC1` on a little-endian machine.
#define THERMOCLINE_MAGIC 3549768124809431124

/// Major version of the interface; the loader refuses any other.
#define THERMOCLINE_ABI_MAJOR 1

/// Minor version of the interface: tables may have more functions than those of an older minor version.
#define THERMOCLINE_ABI_MINOR 0

/// In `Operation::slots`: the operation has no such operand.
#define THERMOCLINE_NO_SLOT UINT32_MAX

/// What a plug-in implements.
typedef uint32_t ThermoclineKind;
/// Compute devices: `ComputeTable`.
#define ThermoclineKind_COMPUTE 1
/// A storage tier: `StorageTable`.
#define ThermoclineKind_STORAGE 2
/// A cache policy: `CacheTable`.
#define ThermoclineKind_CACHE 3
/// A planner: `PlannerTable`.
#define ThermoclineKind_PLANNER 4

/// What a function returns. The sentence of an unknown handle (30 to 33) is the handle's number in decimal.
typedef uint32_t ThermoclineStatus;
/// Success.
#define ThermoclineStatus_OK 0
/// The device, tier or policy cannot do this at all.
#define ThermoclineStatus_UNSUPPORTED 1
/// The caller broke the contract.
#define ThermoclineStatus_INVALID_ARGUMENT 2
/// Memory could not be had, or a budget would be exceeded.
#define ThermoclineStatus_OUT_OF_MEMORY 4
/// The work was cancelled before it was done.
#define ThermoclineStatus_CANCELLED 5
/// Work that this waited for has failed.
#define ThermoclineStatus_DEPENDENCY_FAILED 6
/// The device or its driver is gone.
#define ThermoclineStatus_DEVICE_LOST 7
/// The operating system refused a file operation.
#define ThermoclineStatus_IO 8
/// An option of the plug-in is wrong.
#define ThermoclineStatus_CONFIG 9
/// The data holds what the arithmetic cannot go on with.
#define ThermoclineStatus_DATA 10
/// No placement satisfies the budgets.
#define ThermoclineStatus_INFEASIBLE 11
/// The plug-in's code panicked.
#define ThermoclineStatus_PANICKED 12
/// A bug in the plug-in.
#define ThermoclineStatus_INTERNAL 13
/// A buffer that was never given out, or was freed already.
#define ThermoclineStatus_UNKNOWN_BUFFER 30
/// An executable that was never given out, or was released already.
#define ThermoclineStatus_UNKNOWN_EXECUTABLE 31
/// A file that was never given out, or was closed already.
#define ThermoclineStatus_UNKNOWN_FILE 32
/// A timeline value that was never returned.
#define ThermoclineStatus_UNKNOWN_TIMELINE_VALUE 33

/// Element type: the number of GGUF's tensor types, and 1000 for unsigned bytes.
typedef uint32_t ThermoclineDType;
/// IEEE 754 binary32.
#define ThermoclineDType_F32 0
/// IEEE 754 binary16.
#define ThermoclineDType_F16 1
/// 32 elements in 18 bytes: f16 scale, 4-bit codes.
#define ThermoclineDType_Q4_0 2
/// 32 elements in 20 bytes: f16 scale and minimum, 4-bit codes.
#define ThermoclineDType_Q4_1 3
/// 32 elements in 22 bytes: f16 scale, 5-bit codes.
#define ThermoclineDType_Q5_0 6
/// 32 elements in 24 bytes: f16 scale and minimum, 5-bit codes.
#define ThermoclineDType_Q5_1 7
/// 32 elements in 34 bytes: f16 scale, signed bytes.
#define ThermoclineDType_Q8_0 8
/// 256 elements in 84 bytes.
#define ThermoclineDType_Q2_K 10
/// 256 elements in 110 bytes.
#define ThermoclineDType_Q3_K 11
/// 256 elements in 144 bytes.
#define ThermoclineDType_Q4_K 12
/// 256 elements in 176 bytes.
#define ThermoclineDType_Q5_K 13
/// 256 elements in 210 bytes.
#define ThermoclineDType_Q6_K 14
/// 32 elements in 18 bytes, a non-linear table.
#define ThermoclineDType_IQ4_NL 20
/// 256 elements in 136 bytes, the same table.
#define ThermoclineDType_IQ4_XS 23
/// Signed 8-bit integers.
#define ThermoclineDType_I8 24
/// Signed 16-bit integers.
#define ThermoclineDType_I16 25
/// Signed 32-bit integers.
#define ThermoclineDType_I32 26
/// Signed 64-bit integers.
#define ThermoclineDType_I64 27
/// IEEE 754 binary64.
#define ThermoclineDType_F64 28
/// Brain float.
#define ThermoclineDType_BF16 30
/// 32 elements in 17 bytes: E8M0 scale, E2M1 codes.
#define ThermoclineDType_MXFP4 39
/// Unsigned bytes; masks use 0 and 1.
#define ThermoclineDType_U8 1000

/// Who provides a slot's memory.
typedef uint32_t ThermoclineSlotRole;
/// Weights, bound when the list is prepared: the slot's `buffer` says where. `supports` must not look at it.
#define ThermoclineSlotRole_CONSTANT 1
/// Bound at submit, read only.
#define ThermoclineSlotRole_INPUT 2
/// Bound at submit, written.
#define ThermoclineSlotRole_OUTPUT 3
/// Bound at submit, read and written.
#define ThermoclineSlotRole_STATE 4
/// Memory that the executable provides itself.
#define ThermoclineSlotRole_SCRATCH 5

/// Where memory lies.
typedef uint32_t ThermoclinePlace;
/// In a buffer of the backend.
#define ThermoclinePlace_DEVICE 1
/// In host memory.
#define ThermoclinePlace_HOST 2

/// How an operand is quantised before it is multiplied.
typedef uint32_t ThermoclineQuantization;
/// As it is.
#define ThermoclineQuantization_NONE 0
/// Blocks of 32 consecutive elements: `scale = amax / 127`, `code = round_ties_even(x * (127 / amax))` in f32.
#define ThermoclineQuantization_INT8_BLOCKS 1

/// The type that sums are kept in.
typedef uint32_t ThermoclineAccumulation;
/// f32 or better.
#define ThermoclineAccumulation_F32 1
/// f16 products and sums.
#define ThermoclineAccumulation_F16 2

/// What a buffer is for.
typedef uint32_t ThermoclineBufferUse;
/// Written once, read often.
#define ThermoclineBufferUse_WEIGHTS 1
/// A KV cache.
#define ThermoclineBufferUse_KV_CACHE 2
/// Activations, ids, logits.
#define ThermoclineBufferUse_ACTIVATIONS 3

/// A device's answer to "can you run this operation".
typedef uint32_t ThermoclineSupport;
/// It cannot; the reason is in the sink.
#define ThermoclineSupport_NO 1
/// It can.
#define ThermoclineSupport_YES 2
/// It can, and it is what the device is best at.
#define ThermoclineSupport_PREFERRED 3

/// Whether a value was reached within the time given.
typedef uint32_t ThermoclineReached;
/// The work up to the value has been done.
#define ThermoclineReached_DONE 1
/// The time ran out first.
#define ThermoclineReached_TIMED_OUT 2

/// What an operation computes. The slots are listed in the order of `Operation::slots`;
/// those in brackets may be absent. `u` and `f` are the parameters. `T` is the number of tokens of a submission.
typedef uint32_t ThermoclineOperationCode;
/// `to = from`, equal types; one of the two may lie in host memory. Slots: from, to.
#define ThermoclineOperationCode_COPY 1
/// `output[t] = scale * table[ids[t]]`. Slots: ids, table, output. f[0] scale.
#define ThermoclineOperationCode_EMBED 2
/// Normalises groups of the weight's length: `(x - m) / sqrt(v + epsilon) * weight + bias`.
/// Slots: input, weight, [bias], output. u[0] kind: 1 root mean square, 2 layer. f[0] epsilon.
#define ThermoclineOperationCode_NORM 3
/// `output[t][r] = sum_c weight[r][c] * input[t][c] + bias[r]`, added to what `output` holds where accumulate.
/// Slots: input, weight, [bias], output. u[0] accumulate, 0 or 1.
#define ThermoclineOperationCode_LINEAR 4
/// Rotary position embedding of every head. Slots: input, [factors], output. u[0] style: 1 pairs (2j, 2j+1),
/// 2 pairs (j, j + rotary_dim/2); u[1] head_dim, u[2] rotary_dim, u[3] scaling: 0 none, 1 linear, 2 YaRN;
/// u[4] original context (YaRN). f[0] base, f[1] factor (linear, YaRN), f[2] attention factor, f[3]
/// beta_fast, f[4] beta_slow (YaRN).
#define ThermoclineOperationCode_ROPE 5
/// Appends keys and values at their positions in the KV cache. Slots: key, value, cache. u[0] KV heads, u[1]
/// head_dim.
#define ThermoclineOperationCode_KV_APPEND 6
/// Causal attention over the KV cache. Slots: query, cache, output. u[0] heads, u[1] KV heads, u[2]
/// head_dim, u[3] sliding window in positions or 0. f[0] scale, f[1] soft cap of the scores or 0.
#define ThermoclineOperationCode_ATTENTION 7
/// Feed-forward layer over the active ranges. Slots: input, [gate], up, down, [gate_bias], [up_bias],
/// [mask], output, [hidden], [active_count], [gate_low], [up_low], [gate_deviation], [up_deviation],
/// [down_norm]. u[0] layout of down: 1 a row per output element, 2 a row per
/// neuron; u[1] function, u[2] function of up (see ACTIVATE); u[3] selection: 0 all, 1 mask, 2 gate first,
/// 3 threshold, 4 bit planes; u[4] accumulate, 0 or 1. f[0] threshold, f[1] deviations of bit planes.
/// With gate_low the codes of gate (Q4_0) are the high halves of 8-bit codes, of which these are the low ones, and
/// the same with up. Bit planes keep a neuron where `|function(e + k s |x|)|`, times the same of up where
/// up_deviation is given, times down_norm where that is given, is above the threshold: e the product of the high
/// halves, `D (q - 7.53125)` per element, s the deviation, |x| the norm of the input.
#define ThermoclineOperationCode_FFN 8
/// `mask[t][i] = (fc2 . relu(fc1 . input[t]))[i] >= threshold`. Slots: input, fc1, fc2, mask. f[0] threshold.
#define ThermoclineOperationCode_PREDICT 9
/// `output = function(input)`. Slots: input, output. u[0] function: 0 identity, 1 ReLU, 2 squared ReLU, 3 SiLU,
/// 4 GELU by tanh, 5 GELU by erf.
#define ThermoclineOperationCode_ACTIVATE 10
/// `output = left + right`. Slots: left, right, output.
#define ThermoclineOperationCode_ADD 11
/// `output = left * right`. Slots: left, right, output.
#define ThermoclineOperationCode_MULTIPLY 12
/// Writes the KV cache in the canonical layout. Slots: cache, key, value. u[0] KV heads, u[1] head_dim.
#define ThermoclineOperationCode_KV_EXPORT 13
/// The reverse of KV_EXPORT. Slots: key, value, cache. u[0] KV heads, u[1] head_dim.
#define ThermoclineOperationCode_KV_IMPORT 14
/// The best experts of each token, ascending, and their shares. Slots: scores, chosen (I32), weights. u[0] gating:
/// 1 softmax over all, 2 sigmoid; u[1] normalise, 0 or 1. f[0] scale.
#define ThermoclineOperationCode_ROUTE 15
/// A mixture of experts. Slots: input, chosen, weights, gate or none, up, down, output, active_count or none. u[0]
/// experts; u[1] layout of down, u[2] function and u[3] function of up as FFN has them; u[4] selection: 0 all,
/// 2 gate-first, 3 threshold; u[5] accumulate, 0 or 1. f[0] threshold.
#define ThermoclineOperationCode_EXPERTS 16

/// Start of every table, checked before any function is called.
typedef struct ThermoclineHead {
    /// `THERMOCLINE_MAGIC`.
    uint64_t magic;
    /// Bytes of the whole table as the plug-in was built. A table may be longer than the host knows (a newer minor
    /// version) or shorter (an older one: functions beyond it are absent), never shorter than that of version 1.0.
    uint32_t struct_size;
    /// Which table it is.
    ThermoclineKind kind;
    /// `THERMOCLINE_ABI_MAJOR` of the plug-in; must equal the host's.
    uint32_t abi_major;
    /// `THERMOCLINE_ABI_MINOR` of the plug-in; may differ from the host's.
    uint32_t abi_minor;
    /// Zero.
    uint64_t reserved[4];
} ThermoclineHead;

/// Borrowed bytes: text in UTF-8, or a path.
typedef struct ThermoclineBytes {
    /// First byte; may be null where `len` is 0.
    const uint8_t *data;
    /// Number of bytes.
    size_t len;
} ThermoclineBytes;

/// Receives bytes of a length that the caller does not know beforehand. Writes are appended. Valid for one call.
typedef struct ThermoclineSink {
    /// Passed to `write`.
    void *context;
    /// Appends a copy of the bytes; null where nobody wants them.
    void (*write)(void *context, struct ThermoclineBytes bytes);
} ThermoclineSink;

/// A place within a buffer.
typedef struct ThermoclineBufferView {
    /// The buffer.
    uint64_t buffer;
    /// Byte offset of the slot's first row.
    uint64_t offset;
} ThermoclineBufferView;

/// One operand of a list: a matrix whose rows start `row_stride` bytes apart.
typedef struct ThermoclineSlot {
    /// For messages.
    struct ThermoclineBytes name;
    /// Who provides the memory.
    ThermoclineSlotRole role;
    /// Where it lies.
    ThermoclinePlace place;
    /// Element type.
    ThermoclineDType dtype;
    /// 1 where row `t` belongs to token `t` (then `rows` is the list's token capacity), else 0.
    uint32_t per_token;
    /// Number of rows.
    uint64_t rows;
    /// Elements in a row.
    uint64_t columns;
    /// Bytes from the start of one row to the start of the next.
    uint64_t row_stride;
    /// Where a constant lies; zero for other roles.
    struct ThermoclineBufferView constant;
    /// Zero.
    uint64_t reserved[4];
} ThermoclineSlot;

/// One operation. `OperationCode` says what slots and parameters mean.
typedef struct ThermoclineOperation {
    /// Bytes of this struct.
    uint32_t struct_size;
    /// What is computed.
    ThermoclineOperationCode code;
    /// For messages.
    struct ThermoclineBytes label;
    /// Quantisation of the input rows before they meet a weight.
    ThermoclineQuantization input;
    /// Quantisation of an FFN's hidden activations before they meet `down`.
    ThermoclineQuantization hidden;
    /// The type of sums.
    ThermoclineAccumulation accumulation;
    /// Zero.
    uint32_t reserved_flags;
    /// Operands by index into the list's slots; `UINT32_MAX` where there is none.
    uint32_t slots[16];
    /// Whole-number parameters.
    uint64_t u[8];
    /// Other parameters.
    double f[12];
    /// Zero.
    uint64_t reserved[4];
} ThermoclineOperation;

/// Operations with their slots, in the order in which they take effect.
typedef struct ThermoclineOperationList {
    /// Bytes of this struct.
    uint32_t struct_size;
    /// The most tokens that one submission may carry.
    uint32_t token_capacity;
    /// The operands.
    const struct ThermoclineSlot *slots;
    /// Number of slots.
    size_t slots_len;
    /// The operations.
    const struct ThermoclineOperation *operations;
    /// Number of operations.
    size_t operations_len;
    /// Zero.
    uint64_t reserved[4];
} ThermoclineOperationList;

/// A run of bytes in the host's address space.
///
/// The memory stays valid and is not touched in a conflicting way until the work that it was passed to is reached on
/// its timeline (for an import: until the buffer is freed).
typedef struct ThermoclineHostSpan {
    /// First byte.
    uint8_t *address;
    /// Number of bytes.
    uint64_t len;
    /// 1 where the receiver may write, else 0.
    uint32_t writable;
    /// Zero.
    uint32_t reserved;
} ThermoclineHostSpan;

/// The memory of one slot.
typedef struct ThermoclineBinding {
    /// Index of the slot.
    uint32_t slot;
    /// Which of the two below counts.
    ThermoclinePlace place;
    /// For device slots; zero otherwise.
    struct ThermoclineBufferView buffer;
    /// For host slots; zero otherwise.
    struct ThermoclineHostSpan host;
} ThermoclineBinding;

/// Consecutive tokens of a submission that belong to one sequence.
typedef struct ThermoclineSequenceSpan {
    /// Index of its first token within the submission.
    uint32_t first_token;
    /// Number of its tokens.
    uint32_t tokens;
    /// Positions of the sequence that are in the KV cache already; the first token's position.
    uint32_t past;
    /// Where the sequence's position 0 lies within the KV cache, in positions.
    uint32_t cache_base;
} ThermoclineSequenceSpan;

/// Consecutive neurons `start..end` of one FFN.
typedef struct ThermoclineClusterRange {
    /// First neuron.
    uint32_t start;
    /// One past the last neuron.
    uint32_t end;
} ThermoclineClusterRange;

/// The neurons that one FFN operation covers.
typedef struct ThermoclineActiveRanges {
    /// Index of the operation in its list.
    uint32_t operation;
    /// Zero.
    uint32_t reserved;
    /// Sorted, disjoint ranges.
    const struct ThermoclineClusterRange *ranges;
    /// Number of ranges; none means no neuron.
    size_t ranges_len;
} ThermoclineActiveRanges;

/// Everything that one submission adds to a list.
typedef struct ThermoclineBindings {
    /// Bytes of this struct.
    uint32_t struct_size;
    /// Number of tokens; at most the list's capacity.
    uint32_t tokens;
    /// Memory for every input, output and state slot.
    const struct ThermoclineBinding *slots;
    /// Number of bindings.
    size_t slots_len;
    /// Which tokens belong to which sequence.
    const struct ThermoclineSequenceSpan *sequences;
    /// Number of sequences.
    size_t sequences_len;
    /// Active ranges of FFN operations; one that is not named covers all its neurons.
    const struct ThermoclineActiveRanges *ranges;
    /// Number of FFN operations that are named.
    size_t ranges_len;
    /// Zero.
    uint64_t reserved[4];
} ThermoclineBindings;

/// Compute devices.
typedef struct ThermoclineComputeTable {
    /// Checked first.
    struct ThermoclineHead head;
    /// Who the plug-in is, as a JSON object: name, version, vendor, license, description, build.
    ThermoclineStatus (*info)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// Its options, as JSON: `{"fields": [{"name", "kind": {"type", ..}, "default", "doc"}]}`, the kind's type being
    /// bool, integer (min, max), float (min, max), string, choice (values) or list (element).
    ThermoclineStatus (*schema)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// The devices there are now, as a JSON array of objects as `describe` writes them. `options` is the plug-in's
    /// table of the config as TOML. An empty array is no error.
    ThermoclineStatus (*devices)(struct ThermoclineBytes options,
                                 struct ThermoclineSink out,
                                 struct ThermoclineSink detail);
    /// Why there are no devices, as text.
    ThermoclineStatus (*why_none)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// Opens device `index`.
    ThermoclineStatus (*open)(uint32_t index,
                              struct ThermoclineBytes options,
                              ThermoclineInstance **out,
                              struct ThermoclineSink detail);
    /// Waits for work under way and frees everything of the instance, which is not used again.
    void (*close)(ThermoclineInstance *instance);
    /// What the device is, as a JSON object: name, description, tolerance (f64, f32 or f16), memory_bytes, alignment,
    /// imports_host_memory, needs_constant_weights, max_buffer_bytes, notes. Constant while it is open.
    ThermoclineStatus (*describe)(ThermoclineInstance *instance,
                                  struct ThermoclineSink out,
                                  struct ThermoclineSink detail);
    /// Whether operation `index` of the list can be run; the reason where it cannot goes to `reason`. A yes binds.
    ThermoclineStatus (*supports)(ThermoclineInstance *instance,
                                  const struct ThermoclineOperationList *list,
                                  uint32_t index,
                                  ThermoclineSupport *out,
                                  struct ThermoclineSink reason,
                                  struct ThermoclineSink detail);
    /// Device memory, content undefined.
    ThermoclineStatus (*allocate)(ThermoclineInstance *instance,
                                  uint64_t bytes,
                                  ThermoclineBufferUse purpose,
                                  uint64_t *out,
                                  struct ThermoclineSink detail);
    /// A view of host memory as a buffer, without a copy.
    ThermoclineStatus (*import)(ThermoclineInstance *instance,
                                const struct ThermoclineHostSpan *span,
                                uint64_t *out,
                                struct ThermoclineSink detail);
    /// Gives a buffer back.
    ThermoclineStatus (*free)(ThermoclineInstance *instance, uint64_t buffer, struct ThermoclineSink detail);
    /// Turns a list into something that can be submitted many times.
    ThermoclineStatus (*prepare)(ThermoclineInstance *instance,
                                 const struct ThermoclineOperationList *list,
                                 uint64_t *out,
                                 struct ThermoclineSink detail);
    /// Gives an executable back; submissions under way finish first.
    ThermoclineStatus (*release)(ThermoclineInstance *instance,
                                 uint64_t executable,
                                 struct ThermoclineSink detail);
    /// Queues one run and writes its timeline value. `waits` are values of the same instance.
    ThermoclineStatus (*submit)(ThermoclineInstance *instance,
                                uint64_t executable,
                                const struct ThermoclineBindings *bindings,
                                const uint64_t *waits,
                                size_t waits_len,
                                uint64_t *out,
                                struct ThermoclineSink detail);
    /// Waits until the submission with this value is done, at most `timeout_ns` nanoseconds (0: only asks;
    /// `UINT64_MAX`: for ever). An error of the work is this function's error.
    ThermoclineStatus (*wait)(ThermoclineInstance *instance,
                              uint64_t value,
                              uint64_t timeout_ns,
                              ThermoclineReached *out,
                              struct ThermoclineSink detail);
    /// Named counts, as a JSON object of whole numbers: at least submissions, bytes_allocated, bytes_allocated_peak.
    ThermoclineStatus (*counters)(ThermoclineInstance *instance,
                                  struct ThermoclineSink out,
                                  struct ThermoclineSink detail);
} ThermoclineComputeTable;

/// One request of `StorageTable::read`.
typedef struct ThermoclineRead {
    /// The file.
    uint64_t file;
    /// First byte of the file.
    uint64_t start;
    /// One past the last byte.
    uint64_t end;
    /// Where they go; as long as the range.
    struct ThermoclineHostSpan into;
    /// 0 to 255; 0 is the most urgent.
    uint32_t priority;
    /// Zero.
    uint32_t reserved;
} ThermoclineRead;

/// A storage tier.
typedef struct ThermoclineStorageTable {
    /// Checked first.
    struct ThermoclineHead head;
    /// Who the plug-in is, as in the compute table.
    ThermoclineStatus (*info)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// Its options, as in the compute table.
    ThermoclineStatus (*schema)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// Opens the tier.
    ThermoclineStatus (*open)(struct ThermoclineBytes options,
                              ThermoclineInstance **out,
                              struct ThermoclineSink detail);
    /// Waits for reads under way and frees everything of the instance.
    void (*close)(ThermoclineInstance *instance);
    /// What the tier is, as a JSON object: name, description, alignment, granularity, resident, max_depth, curve (an
    /// array of objects with block_bytes, depth, bytes_per_second), notes.
    ThermoclineStatus (*describe)(ThermoclineInstance *instance,
                                  struct ThermoclineSink out,
                                  struct ThermoclineSink detail);
    /// Opens a file for reading; `path` is the system's bytes.
    ThermoclineStatus (*open_file)(ThermoclineInstance *instance,
                                   struct ThermoclineBytes path,
                                   uint64_t *out,
                                   struct ThermoclineSink detail);
    /// Length of an open file in bytes.
    ThermoclineStatus (*file_len)(ThermoclineInstance *instance,
                                  uint64_t file,
                                  uint64_t *out,
                                  struct ThermoclineSink detail);
    /// Closes a file.
    ThermoclineStatus (*close_file)(ThermoclineInstance *instance,
                                    uint64_t file,
                                    struct ThermoclineSink detail);
    /// Where bytes `start..end` lie in memory already: `present` 1 and the span, or `present` 0.
    ThermoclineStatus (*resident)(ThermoclineInstance *instance,
                                  uint64_t file,
                                  uint64_t start,
                                  uint64_t end,
                                  uint32_t *present,
                                  struct ThermoclineHostSpan *out,
                                  struct ThermoclineSink detail);
    /// Starts reads and writes the timeline value at which all of them are done.
    ThermoclineStatus (*read)(ThermoclineInstance *instance,
                              const struct ThermoclineRead *requests,
                              size_t requests_len,
                              uint64_t *out,
                              struct ThermoclineSink detail);
    /// Waits as in the compute table.
    ThermoclineStatus (*wait)(ThermoclineInstance *instance,
                              uint64_t value,
                              uint64_t timeout_ns,
                              ThermoclineReached *out,
                              struct ThermoclineSink detail);
    /// Asks that reads not started yet be dropped.
    ThermoclineStatus (*cancel)(ThermoclineInstance *instance, uint64_t value, struct ThermoclineSink detail);
    /// Named counts, as a JSON object of whole numbers: at least bytes_read, reads.
    ThermoclineStatus (*counters)(ThermoclineInstance *instance,
                                  struct ThermoclineSink out,
                                  struct ThermoclineSink detail);
} ThermoclineStorageTable;

/// A part of the memory budget with units of one size.
typedef struct ThermoclineRegion {
    /// Bytes of one unit.
    uint64_t unit_bytes;
    /// Bytes that the region may hold.
    uint64_t budget_bytes;
} ThermoclineRegion;

/// A unit of caching.
typedef struct ThermoclineUnit {
    /// Index of its region.
    uint32_t region;
    /// Layer.
    uint32_t layer;
    /// Cluster index within the layer.
    uint32_t cluster;
} ThermoclineUnit;

/// A unit that is needed and not in memory.
typedef struct ThermoclineMiss {
    /// The unit.
    struct ThermoclineUnit unit;
    /// Steps of the logical clock until it is needed.
    uint32_t deadline;
} ThermoclineMiss;

/// Receives units, as `Sink` receives bytes.
typedef struct ThermoclineUnitSink {
    /// Passed to `write`.
    void *context;
    /// Appends copies of `len` units.
    void (*write)(void *context, const struct ThermoclineUnit *units, size_t len);
} ThermoclineUnitSink;

/// A cache policy.
typedef struct ThermoclineCacheTable {
    /// Checked first.
    struct ThermoclineHead head;
    /// Who the plug-in is, as in the compute table.
    ThermoclineStatus (*info)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// Its options, as in the compute table.
    ThermoclineStatus (*schema)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// A fresh policy.
    ThermoclineStatus (*open)(struct ThermoclineBytes options,
                              ThermoclineInstance **out,
                              struct ThermoclineSink detail);
    /// Frees the instance.
    void (*close)(ThermoclineInstance *instance);
    /// Sets the regions, forgetting everything.
    ThermoclineStatus (*configure)(ThermoclineInstance *instance,
                                   const struct ThermoclineRegion *regions,
                                   size_t regions_len,
                                   struct ThermoclineSink detail);
    /// One layer of one step: writes the misses that become resident, in order of loading, into `admit`, and the
    /// resident units that make room for them into `evict`.
    ThermoclineStatus (*step)(ThermoclineInstance *instance,
                              uint32_t layer,
                              const struct ThermoclineUnit *hits,
                              size_t hits_len,
                              const struct ThermoclineMiss *misses,
                              size_t misses_len,
                              const struct ThermoclineUnit *pinned,
                              size_t pinned_len,
                              struct ThermoclineUnitSink admit,
                              struct ThermoclineUnitSink evict,
                              struct ThermoclineSink detail);
} ThermoclineCacheTable;

/// A planner.
typedef struct ThermoclinePlannerTable {
    /// Checked first.
    struct ThermoclineHead head;
    /// Who the plug-in is, as in the compute table.
    ThermoclineStatus (*info)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// Its options, as in the compute table.
    ThermoclineStatus (*schema)(struct ThermoclineSink out, struct ThermoclineSink detail);
    /// A planner.
    ThermoclineStatus (*open)(struct ThermoclineBytes options,
                              ThermoclineInstance **out,
                              struct ThermoclineSink detail);
    /// Frees the instance.
    void (*close)(ThermoclineInstance *instance);
    /// A placement. `request` is a JSON object with model, hardware and budget; the plan is written as JSON.
    ThermoclineStatus (*plan)(ThermoclineInstance *instance,
                              struct ThermoclineBytes request,
                              struct ThermoclineSink out,
                              struct ThermoclineSink detail);
} ThermoclinePlannerTable;

#ifdef __cplusplus
extern "C" {
#endif

/*
 * What a plug-in exports: a pointer to its table (a ThermoclineComputeTable, ThermoclineStorageTable,
 * ThermoclineCacheTable or ThermoclinePlannerTable, as `kind` says), which stays valid for ever.
 */
const ThermoclineHead *thermocline_plugin(void);

#ifdef __cplusplus
}
#endif
